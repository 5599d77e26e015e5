//! A slice cut into chunks that several threads may take.

/// Chunks of a slice, handed out by number.
pub(crate) struct Chunks<T> {
    start: *mut T,
    total: usize,
    len: usize,
}

// SAFETY: chunks are disjoint exclusive parts of a slice of `T: Send` (see `get`).
unsafe impl<T: Send> Sync for Chunks<T> {}

impl<T> Chunks<T> {
    /// Chunks of `len` elements, the last one maybe shorter.
    pub(crate) fn new(data: &mut [T], len: usize) -> Self {
        assert!(len > 0, "a chunk has at least one element");
        Self { start: data.as_mut_ptr(), total: data.len(), len }
    }

    pub(crate) fn count(&self) -> usize {
        self.total.div_ceil(self.len)
    }

    /// # Safety
    /// `index` is below [`count`](Self::count), the slice outlives the result, and nobody else
    /// holds the same chunk meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get(&self, index: usize) -> &mut [T] {
        let from = index * self.len;
        let len = self.len.min(self.total - from);
        // SAFETY: inside the slice; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}
