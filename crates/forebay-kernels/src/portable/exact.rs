//! The `exact` arithmetic: weights dequantised to f32, activations f32.

use super::lanes::{self, LANES};
use super::pack::Unpacked;
use super::{CHUNK, Out, Room, decode};
use forebay_core::panel::{PANEL_ROWS, PanelView};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows that are decoded together, so that four sums are in flight.
const ROWS: usize = 4;
/// Batch rows that share one decoding of a chunk.
const BATCH: usize = 16;

/// `y[b][row] = dot(x[b], dequantised W[row])` for every batch row `b` and `row` of `rows`.
///
/// # Safety
/// The processor has the room's instruction set; `rows` lie inside `view`; `x` holds
/// whole rows of `view.cols()`; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let mut row = rows.start;
    while row + ROWS <= rows.end {
        // SAFETY: passed on to the caller.
        unsafe { block::<R, ROWS>(view, row, x, out) };
        row += ROWS;
    }
    while row < rows.end {
        // SAFETY: passed on to the caller.
        unsafe { block::<R, 1>(view, row, x, out) };
        row += 1;
    }
}

/// As [`rows`] for weights in panels; `rows` start with a panel. A panel is turned back into
/// sixteen rows of the container, so that there is one decoder of every format.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
pub(crate) unsafe fn panels<R: Room>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let shape = view.shape();
    let cols = shape.cols();
    let mut unpacked = Unpacked::new();
    let mut weights = [[0f32; CHUNK]; ROWS];
    for row in rows.clone().step_by(PANEL_ROWS) {
        for (tile, xs) in x.chunks(BATCH * cols).enumerate() {
            let mut sums = [[[0f32; LANES]; PANEL_ROWS]; BATCH];
            for start in (0..cols).step_by(CHUNK) {
                let len = CHUNK.min(cols - start);
                // SAFETY: passed on to the caller.
                unsafe { unpacked.fill::<R>(view, row / PANEL_ROWS, start, len) };
                for four in (0..PANEL_ROWS).step_by(ROWS) {
                    for (n, weights) in weights.iter_mut().enumerate() {
                        let (codes, scales) = (unpacked.codes(four + n), unpacked.scales(four + n));
                        // SAFETY: passed on to the caller.
                        unsafe {
                            let weights = &mut weights[..len];
                            decode::row_weights::<R>(
                                shape.format(),
                                shape.group_cols(),
                                codes,
                                scales,
                                0,
                                weights,
                            );
                        }
                    }
                    let weights = weights.each_ref().map(|w| &w[..len]);
                    for (x, sums) in xs.chunks_exact(cols).zip(&mut sums) {
                        let sums = &mut sums.as_chunks_mut::<ROWS>().0[four / ROWS];
                        // SAFETY: passed on to the caller.
                        unsafe { lanes::accumulate::<R, f32, ROWS>(sums, &x[start..start + len], weights) };
                    }
                }
            }
            for (b, sums) in sums.iter().take(xs.len() / cols).enumerate() {
                for (lanes, row) in sums.iter().zip(row..rows.end) {
                    // SAFETY: passed on to the caller.
                    unsafe { out.put(tile * BATCH + b, row, lanes::tree(*lanes)) };
                }
            }
        }
    }
}

/// Weight rows `row..row + N` against all batch rows.
#[inline(always)]
unsafe fn block<R: Room, const N: usize>(view: &MatrixView<'_>, row: usize, x: &[f32], out: Out) {
    let cols = view.cols();
    let mut weights = [[0f32; CHUNK]; N];
    for (tile, xs) in x.chunks((BATCH * cols).max(1)).enumerate() {
        let mut sums = [[[0f32; LANES]; N]; BATCH];
        for start in (0..cols).step_by(CHUNK) {
            let len = CHUNK.min(cols - start);
            for (n, weights) in weights.iter_mut().enumerate() {
                // SAFETY: passed on to the caller.
                unsafe { decode::weights::<R>(view, row + n, start, &mut weights[..len]) };
            }
            for (x, sums) in xs.chunks_exact(cols).zip(&mut sums) {
                let weights = weights.each_ref().map(|w| &w[..len]);
                // SAFETY: passed on to the caller.
                unsafe { lanes::accumulate::<R, f32, N>(sums, &x[start..start + len], weights) };
            }
        }
        for (b, sums) in sums.iter().take(xs.len() / cols).enumerate() {
            for (n, lanes) in sums.iter().enumerate() {
                // SAFETY: passed on to the caller.
                unsafe { out.put(tile * BATCH + b, row + n, lanes::tree(*lanes)) };
            }
        }
    }
}
