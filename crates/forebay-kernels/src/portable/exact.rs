//! The `exact` arithmetic: weights dequantised to f32, activations f32.

use super::lanes::{self, LANES};
use super::{CHUNK, Out, Room, decode};
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
pub(crate) unsafe fn matmul<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
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

/// `out[c] = fma(coefficients[i], W[rows.start + i][c], out[c])` for rows in ascending order.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn combine<R: Room>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    coefficients: &[f32],
    out: &mut [f32],
) {
    let mut weights = [0f32; CHUNK];
    for (chunk, out) in out.chunks_mut(CHUNK).enumerate() {
        let weights = &mut weights[..out.len()];
        for (row, coefficient) in rows.clone().zip(coefficients) {
            // SAFETY: passed on to the caller.
            unsafe { decode::weights::<R>(view, row, chunk * CHUNK, weights) };
            lanes::axpy(*coefficient, weights, out);
        }
    }
}
