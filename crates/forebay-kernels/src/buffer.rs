//! Memory for weights: on large pages where the system grants them, and really there.

use std::alloc::{Layout, alloc, dealloc};
use std::num::NonZero;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// The usual size of a large page.
const LARGE_PAGE: usize = 1 << 21;
/// An aligned address for no bytes.
const NOWHERE: NonZero<usize> = NonZero::new(LARGE_PAGE).unwrap();

/// Bytes of their own, zero at first, aligned to 2 MiB. Every page has been written, so nobody
/// pays for its first use later; on Linux large pages are asked for before that, for all but
/// the end, which would fill a last large page only in part.
#[derive(Debug)]
pub struct Buffer {
    /// [`NOWHERE`] when there are no bytes.
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the bytes belong to this value alone and are reached through its borrows.
unsafe impl Send for Buffer {}
// SAFETY: as above; a shared buffer can only be read.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zero bytes; `None` if the system refuses them.
    pub fn zeroed(len: usize) -> Option<Self> {
        if len == 0 {
            return Some(Self { start: NonNull::without_provenance(NOWHERE), len });
        }
        // SAFETY: the layout has at least one page.
        let start = NonNull::new(unsafe { alloc(layout(len)?) })?;
        want_large_pages(start, len);
        // SAFETY: `len` bytes were just set aside, for us alone.
        unsafe { start.write_bytes(0, len) };
        Some(Self { start, len })
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` bytes of ours, all written.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(layout) = layout(self.len).filter(|_| self.len > 0) {
            // SAFETY: allocated with this layout by `zeroed`.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

/// Whole large pages, so that the end can be on one too.
fn layout(len: usize) -> Option<Layout> {
    Layout::from_size_align(len.checked_next_multiple_of(LARGE_PAGE)?, LARGE_PAGE).ok()
}

#[cfg(target_os = "linux")]
fn want_large_pages(start: NonNull<u8>, len: usize) {
    // Whether the system grants them is its own affair: the bytes are the same.
    // SAFETY: the range is ours, page-aligned, and this advice changes no byte.
    unsafe {
        libc::madvise(start.as_ptr().cast(), len / LARGE_PAGE * LARGE_PAGE, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn want_large_pages(_start: NonNull<u8>, _len: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zero_aligned_and_ours() {
        for len in [0, 1, LARGE_PAGE - 1, LARGE_PAGE + 1] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert!(buffer.iter().all(|byte| *byte == 0));
            buffer.fill(7);
            assert!(buffer.iter().all(|byte| *byte == 7));
            assert_eq!(buffer.as_ptr().addr() % LARGE_PAGE, 0);
        }
        assert!(Buffer::zeroed(usize::MAX).is_none());
        assert!(Buffer::zeroed(1 << 62).is_none());
    }
}
