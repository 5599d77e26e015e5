//! A few batch rows: weights go from their codes into the sums without touching memory.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::{Sum, put};
use crate::portable::lanes::LANES;
use crate::portable::line::{Line, with_line};
use crate::portable::{Out, Room, decode};
use forebay_core::format::Format;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// How far ahead of its use a row is asked for, in bytes of that row.
const AHEAD: usize = 512;
/// Weight rows that stay in the second cache while the tiles of a batch go by.
const BLOCK: usize = 32;

/// `N` rows of weights.
struct Strip<'a, const N: usize> {
    format: Format,
    cols: usize,
    /// Columns that share a scale.
    group: usize,
    codes: [&'a [u8]; N],
    scales: [&'a [f32]; N],
}

/// Batch rows that are not worth decoding the weights to memory: several tiles read the codes
/// again, from the cache.
#[inline(always)]
fn most<R: Room>() -> usize {
    if R::REGISTERS >= 32 { 15 } else { 1 }
}

/// As [`super::rows`]; false, and nothing done, if the weights are better decoded first.
///
/// # Safety
/// As [`super::rows`].
#[inline(always)]
pub(super) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) -> bool {
    let cols = view.cols();
    if x.len() / cols.max(1) > most::<R>() {
        return false;
    }
    with_line!(view.format(), F => {
        for (rows, first, x) in parts(rows, x, cols) {
            let out = out.skip_batch_rows(first);
            // SAFETY: passed on to the caller.
            unsafe {
                match (x.len() / cols, R::REGISTERS >= 32) {
                    (1, false) => blocks::<R, F, 4, 1>(view, rows, x, out),
                    (1, true) => blocks::<R, F, 8, 1>(view, rows, x, out),
                    (2, _) => blocks::<R, F, 4, 2>(view, rows, x, out),
                    (3, _) => blocks::<R, F, 4, 3>(view, rows, x, out),
                    _ => blocks::<R, F, 4, 4>(view, rows, x, out),
                }
            }
        }
        true
    }, false)
}

/// Weight rows that stay in the second cache while the tiles of the batch go by, and for each of
/// these tiles, as equal as can be, its first row and its activations.
#[inline(always)]
fn parts(rows: Range<usize>, x: &[f32], cols: usize) -> impl Iterator<Item = (Range<usize>, usize, &[f32])> {
    let batch = x.len() / cols.max(1);
    let tile = batch.div_ceil(batch.div_ceil(4).max(1));
    let end = rows.end;
    rows.step_by(BLOCK).flat_map(move |row| {
        (0..batch).step_by(tile.max(1)).map(move |first| {
            let x = &x[first * cols..batch.min(first + tile) * cols];
            (row..end.min(row + BLOCK), first, x)
        })
    })
}

/// Row-major weights, `N` rows at a time; at the end, the last one stands in for those missing.
#[inline(always)]
unsafe fn blocks<R: Room, F: Line, const N: usize, const S: usize>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    x: &[f32],
    out: Out,
) {
    let cols = view.cols();
    let x: [&[f32]; S] = std::array::from_fn(|s| &x[s * cols..(s + 1) * cols]);
    for first in rows.clone().step_by(N) {
        let block: [usize; N] = std::array::from_fn(|n| (first + n).min(rows.end - 1));
        let strip = Strip {
            format: view.format(),
            cols,
            group: decode::per_scale(view),
            codes: block.map(|row| view.row_codes(row)),
            scales: block.map(|row| view.row_scales(row)),
        };
        let mut sums = [[[0f32; LANES]; S]; N];
        let here = N.min(rows.end - first);
        // SAFETY: passed on to the caller.
        unsafe {
            add::<R, F, N, S>(&strip, x, &mut sums);
            put::<R>(sums[..here].as_flattened(), out, |i| (i % S, first + i / S));
        }
    }
}

/// Adds the columns of a strip to its sums.
///
/// # Safety
/// The processor has the room's instruction set; the strip has the format `F`.
#[inline(always)]
unsafe fn add<R: Room, F: Line, const N: usize, const S: usize>(
    strip: &Strip<'_, N>,
    x: [&[f32]; S],
    sums: &mut [[Sum; S]; N],
) {
    let lines = strip.cols / LANES;
    let group = strip.group.div_ceil(LANES).min(lines);
    let row_bytes = strip.codes[0].len();
    for n in 0..N {
        assert!(strip.codes[n].len() >= lines * F::BYTES);
        assert!(!F::SCALED || strip.scales[n].len() >= strip.cols.div_ceil(strip.group));
    }
    for x in x {
        assert_eq!(x.len(), strip.cols);
    }
    // SAFETY: every row of weights and activations has these lines and their scales.
    unsafe {
        let mut acc = [[R::splat(0.0); S]; N];
        for n in 0..N {
            for s in 0..S {
                acc[n][s] = F::to_order::<R>(R::load(&sums[n][s]));
            }
        }
        let mut line = 0;
        let mut g = 0;
        while line < lines {
            let end = lines.min(line + group);
            let mut scales = [F::scale::<R>(strip.scales[0].as_ptr().wrapping_add(g)); N];
            for n in 1..N {
                scales[n] = F::scale::<R>(strip.scales[n].as_ptr().wrapping_add(g));
            }
            g += 1;
            while line + 4 <= end {
                // After the end of these rows, the rows below them are next.
                let ahead = line * F::BYTES + AHEAD;
                let ahead = if ahead < row_bytes { ahead } else { ahead + (N - 1) * row_bytes };
                for n in 0..N {
                    for part in 0..(4 * F::BYTES).div_ceil(64) {
                        R::prefetch(strip.codes[n].as_ptr().wrapping_add(ahead + part * 64));
                    }
                }
                for i in 0..4 {
                    step::<R, F, N, S>(strip, &x, line + i, &scales, &mut acc);
                }
                line += 4;
            }
            while line < end {
                step::<R, F, N, S>(strip, &x, line, &scales, &mut acc);
                line += 1;
            }
        }
        for n in 0..N {
            for s in 0..S {
                R::store(F::from_order::<R>(acc[n][s]), &mut sums[n][s]);
            }
        }
    }
    let start = lines * LANES;
    if start < strip.cols {
        let mut weights = [0f32; LANES];
        let weights = &mut weights[..strip.cols - start];
        for (n, sums) in sums.iter_mut().enumerate() {
            decode::plain(strip.format, strip.group, strip.codes[n], strip.scales[n], start, weights);
            for (sum, x) in sums.iter_mut().zip(x) {
                for ((lane, w), x) in sum.iter_mut().zip(&*weights).zip(&x[start..]) {
                    *lane = w.mul_add(*x, *lane);
                }
            }
        }
    }
}

/// One line of every row.
///
/// # Safety
/// The processor has the room's instruction set; every row has this line.
#[inline(always)]
unsafe fn step<R: Room, F: Line, const N: usize, const S: usize>(
    strip: &Strip<'_, N>,
    x: &[&[f32]; S],
    line: usize,
    scales: &[F::Scale<R>; N],
    acc: &mut [[R::Lanes; S]; N],
) {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut lines = [R::splat(0.0); S];
        for s in 0..S {
            let x = x[s].as_ptr().add(line * LANES).cast::<[f32; LANES]>();
            lines[s] = F::to_order::<R>(R::load(&*x));
        }
        for n in 0..N {
            let weights = F::line::<R>(strip.codes[n].as_ptr().add(line * F::BYTES), scales[n]);
            for s in 0..S {
                acc[n][s] = R::fma(lines[s], weights, acc[n][s]);
            }
        }
    }
}
