//! More batch rows: a chunk of columns of some weight rows is decoded once, to f32 lines in the
//! first cache, and multiplied with all of them in register tiles.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::unpanel::Unpanelled;
use super::{Sum, put};
use crate::portable::lanes::LANES;
use crate::portable::space::Space;
use crate::portable::{CHUNK, Out, Room, decode};
use forebay_core::panel::{PANEL_ROWS, PanelView};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows whose sums are kept: those of a panel.
const ROWS: usize = PANEL_ROWS;
/// Weight rows that are decoded together; with a whole chunk of columns they stay in the first cache.
const HALF: usize = 8;
/// Batch rows that share one decoding.
const BATCH: usize = 64;

/// The sums of one batch row.
type RowSums = [Sum; ROWS];

/// Decoded weights.
#[repr(C, align(64))]
struct Decoded([[f32; CHUNK]; HALF]);

/// # Safety
/// As [`super::rows`].
#[inline(always)]
pub(super) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let cols = view.cols();
    let mut decoded = Decoded([[0.0; CHUNK]; HALF]);
    let mut sums = Space::<RowSums, BATCH>::new();
    for first in rows.clone().step_by(ROWS) {
        let here = ROWS.min(rows.end - first);
        for (batch, x) in x.chunks((BATCH * cols).max(1)).enumerate() {
            let sums = sums.zeros(x.len() / cols.max(1));
            for start in (0..cols).step_by(CHUNK) {
                let columns = start..cols.min(start + CHUNK);
                for half in (0..here).step_by(HALF) {
                    let some = HALF.min(here - half);
                    for (n, weights) in decoded.0[..some].iter_mut().enumerate() {
                        let weights = &mut weights[..columns.len()];
                        // SAFETY: passed on to the caller.
                        unsafe { decode::weights::<R>(view, first + half + n, start, weights) };
                    }
                    // SAFETY: passed on to the caller.
                    unsafe { add::<R>(&decoded, some, x, cols, columns.clone(), sums, half) };
                }
            }
            // SAFETY: passed on to the caller.
            unsafe { put_all::<R>(sums, batch * BATCH, first, here, out) };
        }
    }
}

/// # Safety
/// As [`super::panels`].
#[inline(always)]
pub(super) unsafe fn panels<R: Room>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let shape = view.shape();
    let cols = shape.cols();
    let mut chunk = Unpanelled::new();
    let mut decoded = Decoded([[0.0; CHUNK]; HALF]);
    let mut sums = Space::<RowSums, BATCH>::new();
    for first in rows.clone().step_by(ROWS) {
        let here = ROWS.min(rows.end - first);
        for (batch, x) in x.chunks(BATCH * cols).enumerate() {
            let sums = sums.zeros(x.len() / cols);
            for start in (0..cols).step_by(CHUNK) {
                let columns = start..cols.min(start + CHUNK);
                // SAFETY: passed on to the caller.
                unsafe { chunk.fill::<R>(view, first / PANEL_ROWS, columns.clone()) };
                for half in (0..here).step_by(HALF) {
                    let some = HALF.min(here - half);
                    for (n, weights) in decoded.0[..some].iter_mut().enumerate() {
                        let (codes, scales) = chunk.row(half + n);
                        let (format, weights) = (shape.format(), &mut weights[..columns.len()]);
                        // SAFETY: passed on to the caller.
                        unsafe {
                            decode::row_weights::<R>(format, shape.group_cols(), codes, scales, 0, weights)
                        };
                    }
                    // SAFETY: passed on to the caller.
                    unsafe { add::<R>(&decoded, some, x, cols, columns.clone(), sums, half) };
                }
            }
            // SAFETY: passed on to the caller.
            unsafe { put_all::<R>(sums, batch * BATCH, first, here, out) };
        }
    }
}

/// Stores the results of `here` weight rows from `first_row` on.
#[inline(always)]
unsafe fn put_all<R: Room>(sums: &[RowSums], first_batch: usize, first_row: usize, here: usize, out: Out) {
    let whole = here / 4 * 4;
    for (b, sums) in sums.iter().enumerate() {
        // SAFETY: passed on to the caller.
        unsafe {
            for row in (0..whole).step_by(4) {
                let [x, y, z, w] = [&sums[row], &sums[row + 1], &sums[row + 2], &sums[row + 3]];
                let results = R::trees([R::load(x), R::load(y), R::load(z), R::load(w)]);
                out.put_four(first_batch + b, first_row + row, results);
            }
            put::<R>(&sums[whole..here], out, |i| (first_batch + b, first_row + whole + i));
        }
    }
}

/// Adds `columns` of the first `some` decoded rows to the sums of weight rows `to..to + some`.
#[inline(always)]
unsafe fn add<R: Room>(
    decoded: &Decoded,
    some: usize,
    x: &[f32],
    cols: usize,
    columns: Range<usize>,
    sums: &mut [RowSums],
    to: usize,
) {
    // Batch rows in tiles as equal as can be.
    let widest = if R::REGISTERS >= 32 { 6 } else { 3 };
    let tiles = sums.len().div_ceil(widest);
    let lines = columns.len() / LANES;
    let mut first = 0;
    for tile in 0..tiles {
        let size = (sums.len() - first).div_ceil(tiles - tile);
        let (x, sums) = (&x[first * cols + columns.start..], &mut sums[first..first + size]);
        // SAFETY: passed on to the caller.
        unsafe {
            if R::REGISTERS >= 32 {
                match size {
                    1 => row_tiles::<R, 4, 1>(decoded, some, x, cols, lines, sums, to),
                    2 => row_tiles::<R, 4, 2>(decoded, some, x, cols, lines, sums, to),
                    3 => row_tiles::<R, 4, 3>(decoded, some, x, cols, lines, sums, to),
                    4 => row_tiles::<R, 4, 4>(decoded, some, x, cols, lines, sums, to),
                    5 => row_tiles::<R, 4, 5>(decoded, some, x, cols, lines, sums, to),
                    _ => row_tiles::<R, 4, 6>(decoded, some, x, cols, lines, sums, to),
                }
            } else {
                match size {
                    1 => row_tiles::<R, 2, 1>(decoded, some, x, cols, lines, sums, to),
                    2 => row_tiles::<R, 2, 2>(decoded, some, x, cols, lines, sums, to),
                    _ => row_tiles::<R, 2, 3>(decoded, some, x, cols, lines, sums, to),
                }
            }
        }
        first += size;
    }
    let tail = lines * LANES;
    if tail < columns.len() {
        for (x, sums) in x.chunks_exact(cols).zip(sums) {
            let x = &x[columns.start + tail..columns.end];
            for (weights, sum) in decoded.0[..some].iter().zip(&mut sums[to..]) {
                for ((lane, w), x) in sum.iter_mut().zip(&weights[tail..]).zip(x) {
                    *lane = w.mul_add(*x, *lane);
                }
            }
        }
    }
}

/// Whole lines of the decoded rows, `M` at a time, against `S` batch rows. There are sums and
/// decoded rows for a whole number of tiles; what the last one has too many is never looked at.
#[inline(always)]
unsafe fn row_tiles<R: Room, const M: usize, const S: usize>(
    decoded: &Decoded,
    some: usize,
    x: &[f32],
    cols: usize,
    lines: usize,
    sums: &mut [RowSums],
    to: usize,
) {
    assert!(sums.len() >= S && lines * LANES <= CHUNK && x.len() >= (S - 1) * cols + lines * LANES);
    for first in (0..some).step_by(M) {
        let weights: &[[f32; CHUNK]] = &decoded.0[first..first + M];
        // SAFETY: passed on to the caller; every row was just checked to have these lines.
        unsafe {
            let mut acc = [[R::splat(0.0); S]; M];
            for m in 0..M {
                for s in 0..S {
                    acc[m][s] = R::load(&sums[s][to + first + m]);
                }
            }
            for line in 0..lines {
                let at = line * LANES;
                let mut lines = [R::splat(0.0); S];
                for s in 0..S {
                    lines[s] = R::load(&*x.as_ptr().add(s * cols + at).cast::<[f32; LANES]>());
                }
                for m in 0..M {
                    let weights = R::load(&*weights[m].as_ptr().add(at).cast::<[f32; LANES]>());
                    for s in 0..S {
                        acc[m][s] = R::fma(lines[s], weights, acc[m][s]);
                    }
                }
            }
            for m in 0..M {
                for s in 0..S {
                    R::store(acc[m][s], &mut sums[s][to + first + m]);
                }
            }
        }
    }
}
