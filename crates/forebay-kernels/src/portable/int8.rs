//! The `int8` arithmetic: integer weights against quantised activations.

use super::{CHUNK, Out, QuantGroup, Room, decode};
use crate::Activations;
use crate::activations::{GROUP, QuantRow};
use forebay_core::quant::columns_per_scale;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows that go together, so that four sums are made at once.
const ROWS: usize = 4;
/// Batch rows that share one unpacking of a chunk.
const BATCH: usize = 32;
/// Segments start and end at multiples of this: it divides all group sizes.
const STEP: usize = 16;

/// `y[b][row]` for every batch row `b` and `row` of `rows`.
///
/// # Safety
/// The processor has the room's instruction set; `rows` lie inside `view`; the format
/// is an integer one; `x` has `view.cols()` columns; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn matmul<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &Activations, out: Out) {
    let cols = view.cols();
    let format = view.format();
    let mut segments = Segments::new(columns_per_scale(format, cols));
    // Beyond the last column the unpacked codes are stale, but the activations are zero.
    let mut codes = [[0i8; CHUNK]; ROWS];
    for row in rows.clone().step_by(ROWS) {
        // The last block may be short: its last row is then computed more than once.
        let block: [usize; ROWS] = std::array::from_fn(|n| (row + n).min(rows.end - 1));
        for first in (0..x.batch()).step_by(BATCH) {
            let tile = BATCH.min(x.batch() - first);
            let mut sums = [[0f32; ROWS]; BATCH];
            for start in (0..cols).step_by(CHUNK) {
                let len = CHUNK.min(cols - start);
                for (codes, row) in codes.iter_mut().zip(block) {
                    // SAFETY: passed on to the caller.
                    unsafe { decode::codes::<R>(format, view.row_codes(row), start, &mut codes[..len]) };
                }
                segments.fill(block.map(|row| view.row_scales(row)), start, len);
                for (b, sums) in sums[..tile].iter_mut().enumerate() {
                    let x = x.row(first + b).from(start / GROUP);
                    // SAFETY: passed on to the caller.
                    *sums = unsafe { chunk::<R>(&codes, x, &segments, *sums) };
                }
            }
            for (b, sums) in sums[..tile].iter().enumerate() {
                for (sum, row) in sums.iter().zip(block) {
                    // SAFETY: passed on to the caller.
                    unsafe { out.put(first + b, row, *sum) };
                }
            }
        }
    }
}

/// The segments of one chunk of one block of rows, in ascending order.
struct Segments {
    columns_per_scale: usize,
    list: [Segment; CHUNK / STEP],
    len: usize,
}

/// The longest run of columns inside one activation group and one weight group.
#[derive(Clone, Copy)]
struct Segment {
    /// Activation group, from the start of the chunk.
    group: usize,
    /// Columns inside that group.
    columns: (usize, usize),
    /// Weight scale of each row of the block.
    scales: [f32; ROWS],
}

impl Segments {
    #[inline(always)]
    fn new(columns_per_scale: usize) -> Self {
        let none = Segment { group: 0, columns: (0, 0), scales: [0.0; ROWS] };
        Self { columns_per_scale, list: [none; CHUNK / STEP], len: 0 }
    }

    /// The segments of columns `start..start + len`, `start` being a multiple of [`CHUNK`].
    #[inline(always)]
    fn fill(&mut self, scales: [&[f32]; ROWS], start: usize, len: usize) {
        let mut weight_group = start / self.columns_per_scale;
        let mut weight_end = (weight_group + 1) * self.columns_per_scale - start;
        let mut from = 0;
        self.len = 0;
        while from < len {
            let group = from / GROUP;
            let group_end = (group + 1) * GROUP;
            // Columns beyond the last one count for nothing, so the last segment takes them in.
            let to = if weight_end >= len { group_end } else { weight_end.min(group_end) };
            self.list[self.len] = Segment {
                group,
                columns: (from % GROUP, (to - 1) % GROUP + 1),
                scales: scales.map(|scales| scales[weight_group]),
            };
            self.len += 1;
            from = to;
            if to == weight_end {
                weight_group += 1;
                weight_end += self.columns_per_scale;
            }
        }
    }
}

/// Adds the segments of one chunk to the sums of one batch row.
///
/// # Safety
/// As the methods of [`Room`].
#[inline(always)]
unsafe fn chunk<R: Room>(
    codes: &[[i8; CHUNK]; ROWS],
    x: QuantRow<'_>,
    segments: &Segments,
    mut sums: [f32; ROWS],
) -> [f32; ROWS] {
    let codes = codes.each_ref().map(|codes| codes.as_chunks::<GROUP>().0);
    for segment in &segments.list[..segments.len] {
        let g = segment.group;
        let weights = codes.map(|codes| &codes[g]);
        let whole = x.group(g);
        if segment.columns == (0, GROUP) {
            // SAFETY: passed on to the caller.
            sums = unsafe { R::quad(weights, whole, segment.scales, sums) };
        } else {
            // The activations of the other segments are hidden.
            let (from, to) = segment.columns;
            let mut codes = [0i8; GROUP];
            let mut corrections = [0i32; GROUP / STEP];
            codes[from..to].copy_from_slice(&whole.codes[from..to]);
            let steps = from / STEP..to.div_ceil(STEP);
            corrections[steps.clone()].copy_from_slice(&whole.corrections[steps]);
            let part = QuantGroup { codes: &codes, corrections: &corrections, scale: whole.scale };
            // SAFETY: passed on to the caller.
            sums = unsafe { R::quad(weights, part, segment.scales, sums) };
        }
    }
    sums
}
