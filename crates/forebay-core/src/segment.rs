//! Reads, described.

use std::ops::Range;

/// What reads past the page cache ask of offset, length and address on every common disk: a multiple
/// of this many bytes.
pub const DIRECT_ALIGN: usize = 4096;

/// One positioned read: `len` bytes of shard `shard` from `offset`, to be
/// placed at `dst` in a destination buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadSegment {
    /// Index of the shard in the catalogue that described the file.
    pub shard: u32,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes to read; never zero.
    pub len: usize,
    /// Where the first byte goes in the destination.
    pub dst: usize,
}

impl ReadSegment {
    /// The part of the destination that this read fills.
    pub fn dst_range(&self) -> Range<usize> {
        self.dst..self.dst + self.len
    }
}
