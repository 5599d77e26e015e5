//! Which whole pages hold the wanted bytes of a file, and where they go in a slab.
//! Every backend asks here and nowhere else.

use std::ops::Range;

use forebay_core::{DIRECT_ALIGN, ReadSegment};

/// The pages around the bytes of a segment: what a direct read reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Where the pages start in the file.
    pub base: u64,
    /// Bytes in front of the wanted ones.
    pub head: usize,
    /// Bytes of all pages.
    pub len: usize,
}

impl Window {
    /// The window of the `len` bytes from `offset`; `None` on overflow.
    pub fn around(offset: u64, len: usize) -> Option<Self> {
        let head = (offset % DIRECT_ALIGN as u64) as usize;
        let len = head.checked_add(len)?.checked_next_multiple_of(DIRECT_ALIGN)?;
        let base = offset - head as u64;
        base.checked_add(len as u64)?;
        Some(Self { base, head, len })
    }
}

/// The windows with which the segments of a job can be read straight into a buffer of `room` bytes that starts
/// at a page, in the order of `segments`. `None` for a segment that does not lie in the buffer as it does in the
/// file, or whose pages would spoil another one or leave the buffer; that one must be read exactly.
pub fn windows(segments: &[ReadSegment], room: usize) -> Vec<Option<Window>> {
    let span = |segment: &ReadSegment| -> Option<(Window, Range<usize>)> {
        let window = Window::around(segment.offset, segment.len)?;
        let start = segment.dst.checked_sub(window.head)?;
        let end = start.checked_add(window.len)?;
        (start.is_multiple_of(DIRECT_ALIGN) && end <= room).then_some((window, start..end))
    };
    let alone = |at: usize, pages: &Range<usize>| {
        let others = segments.iter().enumerate().filter(|(other, _)| *other != at);
        others
            .into_iter()
            .all(|(_, other)| other.dst >= pages.end || other.dst.saturating_add(other.len) <= pages.start)
    };
    let of = |(at, segment)| span(segment).filter(|(_, pages)| alone(at, pages)).map(|(window, _)| window);
    segments.iter().enumerate().map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn seg(offset: u64, len: usize, dst: usize) -> ReadSegment {
        ReadSegment { shard: 0, offset, len, dst }
    }

    #[test]
    fn a_window_by_hand() {
        // Offset 10,000, total 100,000: from page 2 on (8,192), 27 pages up to 110,000.
        let window = Window::around(10_000, 100_000).unwrap();
        assert_eq!(window, Window { base: 8192, head: 1808, len: 102_400 });
        assert_eq!(Window::around(u64::MAX - 5, 4), None);
        assert_eq!(Window::around(5, usize::MAX), None);
    }

    #[test]
    fn only_segments_that_keep_their_place_and_spoil_nothing_have_one() {
        let of = |segments: &[ReadSegment], room| {
            windows(segments, room).iter().map(Option::is_some).collect::<Vec<_>>()
        };
        assert_eq!(of(&[seg(800, 100, 800), seg(4096, 4096, 4096)], 8192), [true, true]);
        assert_eq!(of(&[seg(800, 100, 0)], 8192), [false], "displaced");
        assert_eq!(of(&[seg(5000, 100, 904)], 4096), [true]);
        assert_eq!(of(&[seg(800, 100, 800)], 900), [false], "the last page has no room");
        assert_eq!(of(&[seg(800, 100, 800), seg(8192, 1, 4095)], 8192), [false, false], "one page for two");
        assert_eq!(of(&[seg(1, usize::MAX, 1)], 8192), [false]);
    }
}
