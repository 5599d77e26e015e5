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

/// What becomes of the sums of a tile.
enum Goal<'a> {
    /// More columns follow: kept, from this weight row of the batch rows on.
    Kept(&'a mut [RowSums], usize),
    /// All columns were there: stored as results, from this batch row and weight row on.
    Results(Out, usize, usize),
}

impl Goal<'_> {
    /// That of the `count` batch rows from `first` on.
    #[inline(always)]
    fn of(&mut self, first: usize, count: usize) -> Goal<'_> {
        match self {
            Goal::Kept(sums, to) => Goal::Kept(&mut sums[first..first + count], *to),
            Goal::Results(out, batch_row, row) => Goal::Results(*out, *batch_row + first, *row),
        }
    }
}

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
        // One chunk holds all columns: no sum needs to wait in memory for more of them.
        let at_once = R::REGISTERS >= 32
            && (LANES..=CHUNK).contains(&cols)
            && cols % LANES == 0
            && here.is_multiple_of(4);
        for (batch, x) in x.chunks((BATCH * cols).max(1)).enumerate() {
            let sums = sums.zeros(if at_once { 0 } else { x.len() / cols.max(1) });
            for start in (0..cols).step_by(CHUNK) {
                let columns = start..cols.min(start + CHUNK);
                for half in (0..here).step_by(HALF) {
                    let some = HALF.min(here - half);
                    for (n, weights) in decoded.0[..some].iter_mut().enumerate() {
                        let weights = &mut weights[..columns.len()];
                        // SAFETY: passed on to the caller.
                        unsafe { decode::weights::<R>(view, first + half + n, start, weights) };
                    }
                    let goal = if at_once {
                        Goal::Results(out, batch * BATCH, first + half)
                    } else {
                        Goal::Kept(sums, half)
                    };
                    // SAFETY: passed on to the caller.
                    unsafe { add::<R>(&decoded, some, x, cols, columns.clone(), goal) };
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
                    unsafe { add::<R>(&decoded, some, x, cols, columns.clone(), Goal::Kept(sums, half)) };
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

/// Multiplies `columns` of the first `some` decoded rows with the rows of `x`.
///
/// # Safety
/// The processor has the room's instruction set. Results have a place, four weight rows at a time,
/// and their columns are whole lines.
#[inline(always)]
unsafe fn add<R: Room>(
    decoded: &Decoded,
    some: usize,
    x: &[f32],
    cols: usize,
    columns: Range<usize>,
    mut goal: Goal<'_>,
) {
    let batch = x.len() / cols;
    // Batch rows in tiles as equal as can be.
    let widest = if R::REGISTERS >= 32 { 6 } else { 3 };
    let tiles = batch.div_ceil(widest);
    let lines = columns.len() / LANES;
    let mut first = 0;
    for tile in 0..tiles {
        let size = (batch - first).div_ceil(tiles - tile);
        let (x, goal) = (&x[first * cols + columns.start..], goal.of(first, size));
        // SAFETY: passed on to the caller.
        unsafe {
            if R::REGISTERS >= 32 {
                match size {
                    1 => row_tiles::<R, 4, 1>(decoded, some, x, cols, lines, goal),
                    2 => row_tiles::<R, 4, 2>(decoded, some, x, cols, lines, goal),
                    3 => row_tiles::<R, 4, 3>(decoded, some, x, cols, lines, goal),
                    4 => row_tiles::<R, 4, 4>(decoded, some, x, cols, lines, goal),
                    5 => row_tiles::<R, 4, 5>(decoded, some, x, cols, lines, goal),
                    _ => row_tiles::<R, 4, 6>(decoded, some, x, cols, lines, goal),
                }
            } else {
                match size {
                    1 => row_tiles::<R, 2, 1>(decoded, some, x, cols, lines, goal),
                    2 => row_tiles::<R, 2, 2>(decoded, some, x, cols, lines, goal),
                    _ => row_tiles::<R, 2, 3>(decoded, some, x, cols, lines, goal),
                }
            }
        }
        first += size;
    }
    let tail = lines * LANES;
    if let (Goal::Kept(sums, to), true) = (goal, tail < columns.len()) {
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
///
/// # Safety
/// As [`add`].
#[inline(always)]
unsafe fn row_tiles<R: Room, const M: usize, const S: usize>(
    decoded: &Decoded,
    some: usize,
    x: &[f32],
    cols: usize,
    lines: usize,
    mut goal: Goal<'_>,
) {
    assert!(lines * LANES <= CHUNK && x.len() >= (S - 1) * cols + lines * LANES);
    for first in (0..some).step_by(M) {
        let weights: &[[f32; CHUNK]] = &decoded.0[first..first + M];
        // SAFETY: passed on to the caller; every row was just checked to have these lines.
        unsafe {
            let mut acc = [[R::splat(0.0); S]; M];
            if let Goal::Kept(sums, to) = &goal {
                assert!(sums.len() >= S);
                for m in 0..M {
                    for s in 0..S {
                        acc[m][s] = R::load(&sums[s][to + first + m]);
                    }
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
            match &mut goal {
                Goal::Kept(sums, to) => {
                    assert!(sums.len() >= S);
                    for m in 0..M {
                        for s in 0..S {
                            R::store(acc[m][s], &mut sums[s][*to + first + m]);
                        }
                    }
                }
                Goal::Results(out, batch_row, row) => {
                    for s in 0..S {
                        let four = [acc[0][s], acc[1 % M][s], acc[2 % M][s], acc[3 % M][s]];
                        out.put_four(*batch_row + s, *row + first, R::trees(four));
                    }
                }
            }
        }
    }
}
