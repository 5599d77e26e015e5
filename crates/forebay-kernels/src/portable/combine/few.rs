//! A few combinations: weights go from their codes into the sums without touching memory.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::Coefficients;
use crate::portable::lanes::LANES;
use crate::portable::line::{Line, with_line};
use crate::portable::{Room, decode};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Weight rows that are added up before the sums of their columns are put down.
const ROWS: usize = 32;
/// Lines that share a scale if their format allows it: the most common weight group.
const GROUP: usize = 4;

/// Combinations that are not worth decoding the weights to memory: several groups read the codes
/// again, from the cache.
#[inline(always)]
fn most<R: Room>() -> usize {
    if R::REGISTERS >= 32 { 8 } else { 2 }
}

/// As [`super::combine`]; false, and nothing done, if the weights are better decoded first.
///
/// # Safety
/// As [`super::combine`].
#[inline(always)]
pub(super) unsafe fn combine<R: Room>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    coefficients: Coefficients<'_>,
    out: &mut [f32],
) -> bool {
    let cols = view.cols();
    let batch = out.len() / cols.max(1);
    if batch == 0 || batch > most::<R>() {
        return false;
    }
    // Groups as equal as can be.
    let group = batch.div_ceil(batch.div_ceil(3));
    with_line!(view.format(), F => {
        for (i, out) in out.chunks_mut(group * cols).enumerate() {
            let values = &coefficients.values[i * group * coefficients.stride..];
            let coefficients = Coefficients { values, ..coefficients };
            let rows = rows.clone();
            // SAFETY: passed on to the caller.
            unsafe {
                match (out.len() / cols, R::REGISTERS >= 32) {
                    (1, true) => blocks::<R, F, 1, 16>(view, rows, coefficients, out),
                    (2, true) => blocks::<R, F, 2, 8>(view, rows, coefficients, out),
                    (_, true) => blocks::<R, F, 3, 8>(view, rows, coefficients, out),
                    (1, false) => blocks::<R, F, 1, 4>(view, rows, coefficients, out),
                    (_, false) => blocks::<R, F, 2, 2>(view, rows, coefficients, out),
                }
            }
        }
        true
    }, false)
}

/// Rows of weights that are added up together.
struct Block<'a> {
    /// Where the codes of each start.
    codes: [*const u8; ROWS],
    scales: [&'a [f32]; ROWS],
    rows: usize,
    /// Columns that share a scale.
    per_scale: usize,
    /// The next block, or null: asked for in the order of the memory.
    next: *const u8,
}

/// `M` combinations, blocks of rows one after the other.
///
/// # Safety
/// As [`super::combine`]; the view has the format `F`.
#[inline(always)]
unsafe fn blocks<R: Room, F: Line, const M: usize, const V: usize>(
    view: &MatrixView<'_>,
    rows: Range<usize>,
    coefficients: Coefficients<'_>,
    out: &mut [f32],
) {
    let cols = view.cols();
    let lines = cols / LANES;
    let per_scale = decode::per_scale(view);
    assert_eq!(out.len(), M * cols);
    // A scale for every line, or for a whole number of `GROUP`s of them.
    let together = per_scale >= cols || per_scale.is_multiple_of(GROUP * LANES);
    for first in rows.clone().step_by(ROWS) {
        let some = first..rows.end.min(first + ROWS);
        let mut block = Block {
            codes: [std::ptr::null(); ROWS],
            scales: [&[]; ROWS],
            rows: some.len(),
            per_scale,
            next: std::ptr::null(),
        };
        for (i, row) in some.clone().enumerate() {
            let codes = view.row_codes(row);
            assert!(codes.len() >= lines * F::BYTES);
            block.codes[i] = codes.as_ptr();
            if F::SCALED {
                block.scales[i] = view.row_scales(row);
                assert!(block.scales[i].len() >= cols.div_ceil(per_scale));
            }
        }
        if some.end < rows.end {
            block.next = view.row_codes(some.end).as_ptr();
        }
        let mut near = [[0f32; ROWS]; M];
        for m in 0..M {
            let from = m * coefficients.stride + first - rows.start;
            near[m][..some.len()].copy_from_slice(&coefficients.values[from..from + some.len()]);
        }
        let mut line = 0;
        // SAFETY: passed on to the caller; every row and every combination has these lines, and
        // the rows their scales.
        unsafe {
            if together {
                while line + V <= lines {
                    add_up::<R, F, M, V, GROUP>(&block, &near, line, cols, out);
                    line += V;
                }
            }
            while line + 4 <= lines {
                add_up::<R, F, M, 4, 1>(&block, &near, line, cols, out);
                line += 4;
            }
            while line < lines {
                add_up::<R, F, M, 1, 1>(&block, &near, line, cols, out);
                line += 1;
            }
        }
        let tail = lines * LANES;
        if tail < cols {
            let mut weights = [0f32; LANES];
            let weights = &mut weights[..cols - tail];
            for (i, row) in some.enumerate() {
                let (codes, scales) = (view.row_codes(row), view.row_scales(row));
                decode::plain(view.format(), per_scale, codes, scales, tail, weights);
                for (out, near) in out.chunks_exact_mut(cols).zip(&near) {
                    for (sum, weight) in out[tail..].iter_mut().zip(&*weights) {
                        *sum = near[i].mul_add(*weight, *sum);
                    }
                }
            }
        }
    }
}

/// `V` lines of `M` combinations in registers, `G` lines sharing a scale (all `V` if they are fewer).
///
/// # Safety
/// The processor has the room's instruction set; every row of the block has these lines and
/// their scales, and so have `M` rows of `cols` outputs.
#[inline(always)]
unsafe fn add_up<R: Room, F: Line, const M: usize, const V: usize, const G: usize>(
    block: &Block<'_>,
    coefficients: &[[f32; ROWS]; M],
    line: usize,
    cols: usize,
    out: &mut [f32],
) {
    let out = out.as_mut_ptr();
    let mut groups = [0; V];
    for v in 0..V {
        groups[v] = (line + v) * LANES / block.per_scale;
    }
    // The part of the next block that this is of this one.
    let bytes = V * F::BYTES;
    let ahead = block.next.wrapping_add(line * F::BYTES * block.rows);
    // SAFETY: passed on to the caller.
    unsafe {
        let mut acc = [[R::splat(0.0); V]; M];
        for m in 0..M {
            for v in 0..V {
                let sums = R::load(&*out.add(m * cols + (line + v) * LANES).cast());
                acc[m][v] = F::to_order::<R>(sums);
            }
        }
        for row in 0..block.rows {
            if !block.next.is_null() {
                for part in 0..bytes.div_ceil(64) {
                    R::prefetch(ahead.wrapping_add(row * bytes + part * 64));
                }
            }
            let codes = block.codes.get_unchecked(row).add(line * F::BYTES);
            let scales = block.scales.get_unchecked(row).as_ptr();
            let mut near = [R::splat(0.0); M];
            for m in 0..M {
                near[m] = R::splat(*coefficients[m].get_unchecked(row));
            }
            let mut scale = F::scale::<R>(scales.wrapping_add(groups[0]));
            for v in 0..V {
                if v > 0 && v.is_multiple_of(G) {
                    scale = F::scale::<R>(scales.wrapping_add(groups[v]));
                }
                let weights = F::line::<R>(codes.add(v * F::BYTES), scale);
                for m in 0..M {
                    acc[m][v] = R::fma(near[m], weights, acc[m][v]);
                }
            }
        }
        for m in 0..M {
            for v in 0..V {
                let sums = F::from_order::<R>(acc[m][v]);
                R::store(sums, &mut *out.add(m * cols + (line + v) * LANES).cast());
            }
        }
    }
}
