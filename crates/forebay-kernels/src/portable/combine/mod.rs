//! Products with the transposed matrix: combinations of weight rows.
//!
//! A few combinations take the weights straight from their codes (`few`); more of them share one
//! decoding, a tile of rows and columns in the first cache, and add it up in register tiles.

mod few;

use super::lanes::LANES;
use super::registers::{self, Line, Panel, Sums};
use super::{CHUNK, Room, decode};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows that are decoded together.
const ROWS: usize = 32;
/// Columns that are decoded together: [`ROWS`] rows of them stay in the first cache.
const COLS: usize = CHUNK / 3;
const LINES: usize = COLS / LANES;
/// Combinations that share one decoding.
const BATCH: usize = 64;

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
    // SAFETY: passed on to the caller.
    unsafe {
        if R::PLAIN || !few::combine::<R>(view, rows.clone(), coefficients, out) {
            many::<R>(view, rows, coefficients, out);
        }
    }
}

/// Decoded weights: lines of [`ROWS`] rows.
type Tile = [[Line; LINES]; ROWS];
/// The coefficients of a tile's rows for every combination.
type TileCoefficients = [[f32; ROWS]; BATCH];

/// As [`combine`] for any number of combinations.
#[inline(always)]
unsafe fn many<R: Room>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    coefficients: Coefficients<'_>,
    out: &mut [f32],
) {
    let cols = view.cols();
    let mut tile: Tile = [[Line::ZERO; LINES]; ROWS];
    let mut near: TileCoefficients = [[0.0; ROWS]; BATCH];
    for (batch, out) in out.chunks_mut((BATCH * cols).max(1)).enumerate() {
        for first in rows.clone().step_by(ROWS) {
            let some = first..rows.end.min(first + ROWS);
            // Side by side: where they come from, they may be a power of two apart.
            for (b, near) in near[..out.len() / cols].iter_mut().enumerate() {
                let from = (batch * BATCH + b) * coefficients.stride + first - rows.start;
                near[..some.len()].copy_from_slice(&coefficients.values[from..from + some.len()]);
            }
            for start in (0..cols).step_by(COLS) {
                let columns = start..cols.min(start + COLS);
                for (row, lines) in some.clone().zip(&mut tile) {
                    let weights = &mut bytemuck::cast_slice_mut(lines)[..columns.len()];
                    // SAFETY: passed on to the caller.
                    unsafe { decode::weights::<R>(view, row, start, weights) };
                }
                // SAFETY: passed on to the caller.
                unsafe { add::<R>(&tile, &near, some.len(), columns, cols, out) };
            }
        }
    }
}

/// Adds the first `rows` rows of the tile to every combination.
#[inline(always)]
unsafe fn add<R: Room>(
    tile: &Tile,
    coefficients: &TileCoefficients,
    rows: usize,
    columns: Range<usize>,
    cols: usize,
    out: &mut [f32],
) {
    let lines = columns.len() / LANES;
    let batch = out.len() / cols;
    let mut done = 0;
    while done < batch {
        let left = batch - done;
        let coefficients = &coefficients[done..];
        let out = &mut out[done * cols + columns.start..];
        // SAFETY: passed on to the caller; `left` combinations have these columns.
        done += unsafe {
            match (R::REGISTERS >= 32, left) {
                (true, 4..) => add_lines::<R, 4, 4>(tile, coefficients, rows, lines, cols, out),
                (true, _) => add_lines::<R, 1, 8>(tile, coefficients, rows, lines, cols, out),
                (false, 2..) => add_lines::<R, 2, 2>(tile, coefficients, rows, lines, cols, out),
                (false, _) => add_lines::<R, 1, 4>(tile, coefficients, rows, lines, cols, out),
            }
        };
    }
    let tail = lines * LANES;
    if tail < columns.len() {
        for (out, coefficients) in out.chunks_exact_mut(cols).zip(coefficients) {
            let out = &mut out[columns.start + tail..columns.end];
            for (weights, coefficient) in tile[..rows].iter().zip(coefficients) {
                let weights: &[f32] = bytemuck::cast_slice(&weights[lines..]);
                for (sum, weight) in out.iter_mut().zip(weights) {
                    *sum = coefficient.mul_add(*weight, *sum);
                }
            }
        }
    }
}

/// The whole lines of `M` combinations; returns `M`.
#[inline(always)]
unsafe fn add_lines<R: Room, const M: usize, const V: usize>(
    tile: &Tile,
    coefficients: &[[f32; ROWS]],
    rows: usize,
    lines: usize,
    cols: usize,
    out: &mut [f32],
) -> usize {
    assert!(rows <= ROWS && lines <= LINES && coefficients.len() >= M);
    assert!(out.len() >= (M - 1) * cols + lines * LANES);
    let mut line = 0;
    while line < lines {
        let rows_of_tile = Panel { lines: &tile.as_flattened()[line..], stride: LINES };
        let sums = Sums { ptr: out[line * LANES..].as_mut_ptr(), stride: cols };
        // SAFETY: passed on to the caller; the outputs were just checked.
        unsafe {
            // Rows and combinations were checked too.
            let coefficient = |row: usize, m: usize| *coefficients.get_unchecked(m).get_unchecked(row);
            if line + V <= lines {
                registers::mix::<R, M, V>(rows, coefficient, rows_of_tile, None, sums);
                line += V;
            } else {
                registers::mix::<R, M, 1>(rows, coefficient, rows_of_tile, None, sums);
                line += 1;
            }
        }
    }
    M
}
