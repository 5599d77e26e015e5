//! How one routed expert is read: which bytes, in which reads, and where its
//! matrices then lie in a slab.
//!
//! Bytes that touch in a file are read together; no order of the three matrices
//! is assumed. In the slab they keep their distance in the file, so a coalesced
//! read needs no copy, and their place within a page, so a read of whole pages past
//! the page cache goes straight into the slab.

use std::ops::Range;
use std::sync::Arc;

use forebay_core::format::Format;
use forebay_core::segment::{DIRECT_ALIGN, ReadSegment};

use crate::layout::{Extent, WeightLayout};
use crate::native::header::{Layout, Record, RecordKind};

/// Scales and float codes start at a multiple of this many bytes of the slab.
const WORD: u64 = 4;

/// How the codes of a matrix lie in a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Row after row, scales apart.
    Rows,
    /// In panels, scales among the codes ([`forebay_core::panel`]).
    Panels,
    /// The panels as a coded matrix ([`forebay_core::coded`]), and padding.
    Coded,
}

impl From<Layout> for Codes {
    fn from(layout: Layout) -> Self {
        match layout {
            Layout::Rows => Codes::Rows,
            Layout::Panels => Codes::Panels,
        }
    }
}

/// One matrix of an expert, in the slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Storage format.
    pub format: Format,
    /// Rows (outputs).
    pub rows: usize,
    /// Columns (inputs).
    pub cols: usize,
    /// How the codes lie.
    pub layout: Codes,
    /// Where the codes lie in the slab; at a multiple of 64 if they are coded.
    pub codes: Range<usize>,
    /// Where the f32 scales lie in the slab, at a multiple of 4; empty for plain floats.
    pub scales: Range<usize>,
}

/// How one routed expert is read into a slab.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertRecord {
    /// The reads, in file order. The whole pages around their destinations do not overlap and
    /// lie within `len`, so whatever is read beside the wanted bytes spoils nothing.
    pub segments: Arc<[ReadSegment]>,
    /// Gate, up and down, in this order whatever their order in the files.
    pub parts: [Part; 3],
    /// Bytes of slab that the expert takes, in whole pages.
    pub len: usize,
    /// Reads that lie elsewhere in a page of the slab than in a page of the file, because words
    /// at odd places of the file must be aligned in memory; these go through the page cache.
    pub displaced: u8,
    /// All codes come with one read, and all scales too.
    pub coalesced: bool,
    /// CRC32C of what its one read brings, where the container says so.
    pub check: Option<u32>,
}

/// An expert whose bytes cannot be addressed on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("an expert of {bytes} bytes is too large to address on this machine; check config.json")]
pub struct RecordError {
    /// Bytes of codes and scales together, saturated.
    pub bytes: u64,
}

impl ExpertRecord {
    /// The record of the expert with these three matrices.
    pub fn new(gate: &WeightLayout, up: &WeightLayout, down: &WeightLayout) -> Result<Self, RecordError> {
        let layouts = [gate, up, down];
        let pieces = pieces(layouts);
        let too_large = || RecordError {
            bytes: pieces.iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.extent.len)),
        };
        let (segments, placed) = place(&pieces).ok_or_else(too_large)?;
        let of = |role: usize, scales: bool| {
            placed.iter().find(|p| p.piece.role == role && p.piece.scales == scales)
        };
        let range = |role, scales| of(role, scales).map_or(0..0, |p| p.dst.clone());
        let parts = [0, 1, 2].map(|role| {
            let &WeightLayout { format, rows, cols, .. } = layouts[role];
            let (codes, scales) = (range(role, false), range(role, true));
            Part { format, rows, cols, layout: Codes::Rows, codes, scales }
        });
        let one_read = |scales| {
            let mut reads = placed.iter().filter(|p| p.piece.scales == scales).map(|p| p.segment);
            let first = reads.next();
            reads.all(|segment| Some(segment) == first)
        };
        let coalesced = one_read(false) && one_read(true);
        let len = window_end(segments.last()).ok_or_else(too_large)?;
        // Six pieces make six reads at most.
        let displaced = segments.iter().filter(|read| !keeps_its_place(read)).count() as u8;
        Ok(Self { segments: segments.into(), parts, len, displaced, coalesced, check: None })
    }

    /// The record of an expert in a Forebay container, in file `shard`: one read of whole pages that lie in the slab as
    /// they do in the file.
    pub fn native(shard: u32, record: &Record, kind: &RecordKind) -> Result<Self, RecordError> {
        let too_large = |_| RecordError { bytes: record.len };
        let len = usize::try_from(record.len).map_err(too_large)?;
        let segments = Arc::new([ReadSegment { shard, offset: record.offset, len, dst: 0 }]);
        let mut parts = Self::raw_parts(kind);
        if let Some(places) = record.coded.and_then(|coded| coded.places(record.len)) {
            for (part, Range { start, end }) in parts.iter_mut().zip(places) {
                *part = Part {
                    layout: Codes::Coded,
                    codes: start as usize..end as usize,
                    scales: 0..0,
                    ..part.clone()
                };
            }
        }
        Ok(Self { segments, parts, len, displaced: 0, coalesced: true, check: Some(record.crc) })
    }

    /// Where the matrices of a raw record of this kind lie in it.
    pub fn raw_parts(kind: &RecordKind) -> [Part; 3] {
        // The header was checked: everything lies within the record, which can be addressed.
        let range = |at: u64, len: Option<u64>| at as usize..(at + len.unwrap_or(0)) as usize;
        kind.matrices.each_ref().map(|matrix| Part {
            format: matrix.weight.format,
            rows: matrix.weight.rows as usize,
            cols: matrix.weight.cols as usize,
            layout: matrix.layout.into(),
            codes: range(matrix.codes, matrix.codes_len()),
            scales: range(matrix.scales, matrix.scales_len()),
        })
    }

    /// Bytes wanted from the files; [`len`](Self::len) adds the rest of their pages.
    pub fn read_bytes(&self) -> usize {
        self.segments.iter().map(|segment| segment.len).sum()
    }
}

/// A run of bytes that must arrive: codes or scales of one matrix.
#[derive(Clone, Copy)]
struct Piece {
    role: usize,
    scales: bool,
    aligned: bool,
    extent: Extent,
}

/// A piece, and where it goes.
struct Placed {
    piece: Piece,
    segment: usize,
    dst: Range<usize>,
}

/// The pieces in file order.
fn pieces(layouts: [&WeightLayout; 3]) -> Vec<Piece> {
    let mut pieces = Vec::with_capacity(6);
    for (role, layout) in layouts.into_iter().enumerate() {
        let floats = matches!(layout.format, Format::F32 | Format::Bf16 | Format::F16);
        pieces.push(Piece { role, scales: false, aligned: floats, extent: layout.codes });
        if let Some(extent) = layout.scales {
            pieces.push(Piece { role, scales: true, aligned: true, extent });
        }
    }
    pieces.sort_by_key(|piece| piece.extent);
    pieces
}

/// Joins pieces that touch into reads and lays the reads out in the slab. `None` on overflow.
fn place(pieces: &[Piece]) -> Option<(Vec<ReadSegment>, Vec<Placed>)> {
    let mut segments: Vec<ReadSegment> = Vec::with_capacity(2);
    let mut placed = Vec::with_capacity(pieces.len());
    for &piece in pieces {
        let Extent { shard, offset, len } = piece.extent;
        let bytes = usize::try_from(len).ok()?;
        let joins = |read: &ReadSegment| {
            let end = read.offset.checked_add(read.len as u64);
            let lands_aligned = !piece.aligned || ((read.dst + read.len) as u64).is_multiple_of(WORD);
            read.shard == shard && end == Some(offset) && lands_aligned
        };
        let dst = match segments.last_mut().filter(|read| joins(read)) {
            Some(read) => {
                let dst = read.dst.checked_add(read.len)?;
                read.len = read.len.checked_add(bytes)?;
                dst
            }
            None => {
                let displaced = piece.aligned && !offset.is_multiple_of(WORD);
                let head = if displaced { 0 } else { offset % DIRECT_ALIGN as u64 };
                let dst = window_end(segments.last())?.checked_add(head as usize)?;
                segments.push(ReadSegment { shard, offset, len: bytes, dst });
                dst
            }
        };
        placed.push(Placed { piece, segment: segments.len() - 1, dst: dst..dst.checked_add(bytes)? });
    }
    Some((segments, placed))
}

/// Where the pages of a read end in the slab; 0 before the first one. `None` on overflow.
fn window_end(last: Option<&ReadSegment>) -> Option<usize> {
    let end = last.map_or(Some(0), |read| read.dst.checked_add(read.len))?;
    end.checked_next_multiple_of(DIRECT_ALIGN)
}

/// Whether a read lies in the slab as it does in the file, page by page.
fn keeps_its_place(read: &ReadSegment) -> bool {
    read.offset % DIRECT_ALIGN as u64 == (read.dst % DIRECT_ALIGN) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const fn at(shard: u32, offset: u64, len: u64) -> Extent {
        Extent { shard, offset, len }
    }

    fn int4(rows: usize, cols: usize, codes: Extent, scales: Extent) -> WeightLayout {
        let format = Format::Int4Row;
        WeightLayout { format, rows, cols, codes, scales: Some(scales), ambiguous_groups: false }
    }

    fn bf16(rows: usize, cols: usize, codes: Extent) -> WeightLayout {
        let format = Format::Bf16;
        WeightLayout { format, rows, cols, codes, scales: None, ambiguous_groups: false }
    }

    #[test]
    fn the_standard_file_order_takes_two_reads() {
        // Down, gate, up adjacent; their scales in the same order, far in front. The sizes are GLM-5.2's.
        let (codes, d, m) = (6_291_456, 24_576, 8_192);
        let down = int4(6144, 2048, at(3, 1_000_001, codes), at(3, 800, d));
        let gate = int4(2048, 6144, at(3, 1_000_001 + codes, codes), at(3, 800 + d, m));
        let up = int4(2048, 6144, at(3, 1_000_001 + 2 * codes, codes), at(3, 800 + d + m, m));
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        assert!(record.coalesced);
        let reads = [
            // 41,760 bytes of slab, 11 pages; 1,000,001 is byte 577 of its page.
            ReadSegment { shard: 3, offset: 800, len: 40_960, dst: 800 },
            ReadSegment { shard: 3, offset: 1_000_001, len: 18_874_368, dst: 45_056 + 577 },
        ];
        assert_eq!(*record.segments, reads);
        // 18,874,945 bytes are 4,609 pages.
        assert_eq!((record.len, record.read_bytes()), (45_056 + 4609 * 4096, 18_915_328));
        assert_eq!(record.displaced, 0);
        let [g, u, d] = &record.parts;
        assert_eq!((d.codes.start, g.codes.start, u.codes.start), (45_633, 6_337_089, 12_628_545));
        assert_eq!(
            (d.scales.clone(), g.scales.clone(), u.scales.clone()),
            (800..25_376, 25_376..33_568, 33_568..41_760)
        );
        assert_eq!((g.rows, g.cols, d.rows, d.cols), (2048, 6144, 6144, 2048));
    }

    #[test]
    fn scattered_matrices_take_a_read_each() {
        let gate = int4(4, 2, at(0, 100, 4), at(1, 0, 16));
        let up = int4(4, 2, at(1, 300, 4), at(0, 16, 16));
        let down = int4(2, 4, at(0, 90, 4), at(2, 0, 8));
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        assert!(!record.coalesced);
        assert_eq!(record.segments.len(), 6);
        assert!(record.segments.is_sorted_by_key(|read| (read.shard, read.offset)));
        // One byte between two matrices is enough to part them.
        let gate = bf16(1, 2, at(0, 0, 4));
        let (up, down) = (bf16(1, 2, at(0, 5, 4)), bf16(1, 2, at(0, 9, 4)));
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        assert_eq!(record.segments.len(), 2);
        assert!(!record.coalesced);
    }

    #[test]
    fn a_fused_tensor_gives_gate_and_up_in_one_read() {
        let gate = bf16(4, 8, at(0, 640, 64));
        let up = bf16(4, 8, at(0, 704, 64));
        let down = bf16(8, 4, at(1, 32, 64));
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        assert_eq!(record.segments.iter().map(|r| r.len).collect::<Vec<_>>(), [128, 64]);
        assert!(!record.coalesced);
        assert_eq!(record.parts[1].scales, 0..0);
    }

    #[test]
    fn words_stay_aligned_in_the_slab() {
        // A matrix of three bf16 numbers would leave its neighbour at six bytes.
        let gate = bf16(1, 3, at(0, 0, 6));
        let (up, down) = (bf16(1, 3, at(0, 6, 6)), bf16(3, 1, at(0, 12, 6)));
        let record = ExpertRecord::new(&gate, &up, &down).unwrap();
        // Byte 6 of the file is no place for a word, so that read moves to the start of a page.
        assert_eq!(record.segments.iter().map(|r| r.dst).collect::<Vec<_>>(), [0, 4096, 8192 + 12]);
        assert_eq!((record.len, record.displaced), (3 * 4096, 1));
    }

    #[test]
    fn a_record_is_small() {
        let scattered = |i: u64| int4(4, 2, at(0, 100 * i, 4), at(1, 100 * i, 16));
        let record = ExpertRecord::new(&scattered(1), &scattered(2), &scattered(3)).unwrap();
        let heap = size_of_val(&*record.segments);
        assert!(size_of::<ExpertRecord>() + heap <= 400, "{} + {heap}", size_of::<ExpertRecord>());
    }

    #[test]
    fn sizes_beyond_the_address_space_are_refused() {
        let huge = |i: u64| bf16(1, 1, at(i as u32, 0, u64::MAX / 2));
        assert!(ExpertRecord::new(&huge(0), &huge(1), &huge(2)).is_err());
    }

    /// Layouts whose pieces lie in a random order, over one or two shards, some of them adjacent.
    fn layouts() -> impl Strategy<Value = [WeightLayout; 3]> {
        let order = Just((0usize..6).collect::<Vec<_>>()).prop_shuffle();
        let gaps = prop::collection::vec(prop_oneof![3 => Just(0u64), 1 => 1u64..9, 1 => 4000u64..9000], 6);
        let lens = prop::collection::vec(1u64..40, 6);
        (order, gaps, lens, 0usize..7, prop::collection::vec(any::<bool>(), 3)).prop_map(
            |(order, gaps, lens, split, floats)| {
                let mut extents = [at(0, 0, 0); 6];
                let mut next = 0;
                for (place, &piece) in order.iter().enumerate() {
                    let offset = next + gaps[place];
                    extents[piece] = at(u32::from(place >= split), offset, lens[piece]);
                    next = offset + lens[piece];
                }
                [0, 1, 2].map(|role| {
                    let layout = int4(1, 1, extents[role], extents[3 + role]);
                    if floats[role] { bf16(1, 1, layout.codes) } else { layout }
                })
            },
        )
    }

    proptest! {
        #[test]
        fn every_byte_of_the_parts_is_read_to_its_place(layouts in layouts()) {
            let [gate, up, down] = &layouts;
            let record = ExpertRecord::new(gate, up, down).unwrap();
            // A slab whose bytes tell where in which file they came from.
            let mut slab = vec![None; record.len];
            for read in record.segments.iter() {
                for i in 0..read.len {
                    prop_assert!(slab[read.dst + i].replace((read.shard, read.offset + i as u64)).is_none());
                }
            }
            // Whole pages around the reads: each page of the slab belongs to one read at most.
            let pages = record.segments.iter().flat_map(|r| r.dst / 4096..(r.dst + r.len).div_ceil(4096));
            let pages: Vec<usize> = pages.collect();
            prop_assert!(pages.is_sorted_by(|a, b| a < b));
            prop_assert_eq!(record.len, 4096 * (pages.last().unwrap() + 1));
            let displaced = |r: &&ReadSegment| r.offset % 4096 != r.dst as u64 % 4096;
            prop_assert_eq!(record.segments.iter().filter(displaced).count(), usize::from(record.displaced));
            for read in record.segments.iter().filter(displaced) {
                prop_assert!(read.dst % 4096 == 0 && read.offset % 4 != 0);
            }
            let wanted: u64 = layouts.iter().map(WeightLayout::total_bytes).sum();
            prop_assert_eq!(record.read_bytes() as u64, wanted);
            for (part, layout) in record.parts.iter().zip(&layouts) {
                prop_assert_eq!(part.scales.start % 4, 0);
                prop_assert!(layout.scales.is_some() || part.codes.start % 4 == 0);
                prop_assert_eq!(part.scales.is_empty(), layout.scales.is_none());
                let pieces = [(Some(layout.codes), &part.codes), (layout.scales, &part.scales)];
                for (extent, range) in pieces.into_iter().filter_map(|(e, r)| Some((e?, r))) {
                    let expected: Vec<_> =
                        (0..extent.len).map(|i| Some((extent.shard, extent.offset + i))).collect();
                    prop_assert_eq!(&slab[range.clone()], expected.as_slice());
                }
            }
        }
    }
}
