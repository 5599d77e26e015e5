//! Products with the transposed matrix: combinations of weight rows.

use super::lanes::LANES;
use super::registers::{self, Line, Panel, Sums};
use super::{CHUNK, Room, decode};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows that are decoded together: with a whole chunk of columns they stay in the first cache.
const ROWS: usize = 16;
const CHUNK_LINES: usize = CHUNK / LANES;

/// Coefficients of several combinations of the same rows.
#[derive(Clone, Copy)]
pub(crate) struct Coefficients<'a> {
    /// The first combination's, then from `stride` on the second's, and so on.
    pub values: &'a [f32],
    pub stride: usize,
}

/// `out[b][c] = fma(coefficients[b][i], W[rows.start + i][c], out[b][c])` for rows in ascending
/// order; `out` is `[batch, cols]`.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn combine<R: Room>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    coefficients: Coefficients<'_>,
    out: &mut [f32],
) {
    let cols = view.cols();
    let mut tile = [Line::ZERO; ROWS * CHUNK_LINES];
    for start in (0..cols).step_by(CHUNK) {
        let columns = start..cols.min(start + CHUNK);
        for first in rows.clone().step_by(ROWS) {
            let some = first..rows.end.min(first + ROWS);
            for (row, lines) in some.clone().zip(tile.chunks_exact_mut(CHUNK_LINES)) {
                let weights = &mut bytemuck::cast_slice_mut(lines)[..columns.len()];
                // SAFETY: passed on to the caller.
                unsafe { decode::weights::<R>(view, row, start, weights) };
            }
            let part = Coefficients {
                values: &coefficients.values[first - rows.start..],
                stride: coefficients.stride,
            };
            let part = Part { tile: &tile, rows: some.len(), coefficients: part, columns: columns.clone() };
            // SAFETY: passed on to the caller.
            unsafe {
                let done = if R::REGISTERS >= 32 {
                    groups::<R, 4, 4>(&part, 0, cols, out)
                } else {
                    groups::<R, 2, 2>(&part, 0, cols, out)
                };
                if R::REGISTERS >= 32 {
                    groups::<R, 1, 8>(&part, done, cols, out)
                } else {
                    groups::<R, 1, 4>(&part, done, cols, out)
                };
            }
        }
    }
}

/// Some decoded weight rows and their coefficients.
struct Part<'a> {
    tile: &'a [Line],
    rows: usize,
    coefficients: Coefficients<'a>,
    columns: Range<usize>,
}

/// Adds the part to as many combinations from `done` on as form whole groups of `M`; returns
/// how many are done then.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn groups<R: Room, const M: usize, const V: usize>(
    part: &Part<'_>,
    done: usize,
    cols: usize,
    out: &mut [f32],
) -> usize {
    let mut group = done;
    for out in out[done * cols..].chunks_exact_mut(M * cols) {
        let mut coefficients = [[0f32; M]; ROWS];
        for m in 0..M {
            let from = (group + m) * part.coefficients.stride;
            let values = &part.coefficients.values[from..from + part.rows];
            for (coefficients, value) in coefficients.iter_mut().zip(values) {
                coefficients[m] = *value;
            }
        }
        let coefficients = &coefficients[..part.rows];
        let lines = part.columns.len() / LANES;
        let mut line = 0;
        while line < lines {
            let out = &mut out[part.columns.start + line * LANES..];
            let sums = Sums { ptr: out.as_mut_ptr(), stride: cols };
            let tile = Panel { lines: &part.tile[line..], stride: CHUNK_LINES };
            // SAFETY: passed on to the caller; the last of the M rows has these columns too.
            unsafe {
                if line + V <= lines {
                    registers::mix::<R, M, V>(coefficients, tile, None, sums);
                    line += V;
                } else {
                    registers::mix::<R, M, 1>(coefficients, tile, None, sums);
                    line += 1;
                }
            }
        }
        let tail = part.columns.start + lines * LANES..part.columns.end;
        for (out, m) in out.chunks_exact_mut(cols).zip(0..M) {
            for (weights, coefficients) in part.tile.chunks_exact(CHUNK_LINES).zip(coefficients) {
                let weights: &[f32] = bytemuck::cast_slice(&weights[lines.min(CHUNK_LINES - 1)..]);
                for (sum, weight) in out[tail.clone()].iter_mut().zip(weights) {
                    *sum = coefficients[m].mul_add(*weight, *sum);
                }
            }
        }
        group += M;
    }
    group
}
