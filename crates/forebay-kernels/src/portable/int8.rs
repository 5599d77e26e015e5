//! The `int8` arithmetic: integer weights against quantised activations.

use super::{CHUNK, Out, Room, decode};
use crate::Activations;
use crate::activations::{GROUP, QuantRow};
use forebay_core::quant::columns_per_scale;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Batch rows that share one unpacking of a chunk.
const BATCH: usize = 32;
/// Every segment starts at a multiple of this: it divides all group sizes.
const STEP: usize = 16;

/// `y[b][row]` for every batch row `b` and `row` of `rows`.
///
/// # Safety
/// The processor has the room's instruction set; `rows` lie inside `view`; the format
/// is an integer one; `x` has `view.cols()` columns; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn matmul<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &Activations, out: Out) {
    let cols = view.cols();
    let per_scale = columns_per_scale(view.format(), cols);
    // Beyond the last column the unpacked codes are stale, but the activations are zero.
    let mut codes = [0i8; CHUNK];
    for row in rows {
        let row_codes = view.row_codes(row);
        let scales = view.row_scales(row);
        for first in (0..x.batch()).step_by(BATCH) {
            let tile = BATCH.min(x.batch() - first);
            let mut sums = [0f32; BATCH];
            for start in (0..cols).step_by(CHUNK) {
                let len = CHUNK.min(cols - start);
                // SAFETY: passed on to the caller.
                unsafe { decode::codes::<R>(view.format(), row_codes, start, &mut codes[..len]) };
                for (b, sum) in sums[..tile].iter_mut().enumerate() {
                    let x = x.row(first + b).from(start / GROUP);
                    let scales = &scales[start / per_scale..];
                    // SAFETY: passed on to the caller.
                    *sum = unsafe {
                        if per_scale.is_multiple_of(GROUP) || scales.len() == 1 {
                            whole_groups::<R>(&codes, len, x, scales, per_scale, *sum)
                        } else {
                            segments::<R>(&codes, len, x, scales, per_scale, *sum)
                        }
                    };
                }
            }
            for (b, sum) in sums[..tile].iter().enumerate() {
                // SAFETY: passed on to the caller.
                unsafe { out.put(first + b, row, *sum) };
            }
        }
    }
}

/// Segments that are whole activation groups.
#[inline(always)]
unsafe fn whole_groups<R: Room>(
    codes: &[i8; CHUNK],
    len: usize,
    x: QuantRow<'_>,
    scales: &[f32],
    per_scale: usize,
    mut sum: f32,
) -> f32 {
    let (codes, _) = codes.as_chunks::<GROUP>();
    let codes = &codes[..len.div_ceil(GROUP)];
    let mut activations = x.codes.iter().zip(x.scales).zip(x.corrections);
    for (codes, weight_scale) in codes.chunks(per_scale.div_ceil(GROUP)).zip(scales) {
        for (w, ((x, scale), corrections)) in codes.iter().zip(&mut activations) {
            // SAFETY: passed on to the caller.
            let dot = unsafe { R::dot64(w, x, corrections) };
            sum = (dot as f32).mul_add(scale * weight_scale, sum);
        }
    }
    sum
}

/// Segments of any length: they end at each activation group and at each weight group.
#[inline(always)]
unsafe fn segments<R: Room>(
    codes: &[i8; CHUNK],
    len: usize,
    x: QuantRow<'_>,
    scales: &[f32],
    per_scale: usize,
    mut sum: f32,
) -> f32 {
    let (codes, _) = codes.as_chunks::<STEP>();
    let activations = x.codes.as_flattened();
    let (activations, _) = activations.as_chunks::<STEP>();
    let mut dot = 0i32;
    for step in 0..len.div_ceil(STEP) {
        // SAFETY: passed on to the caller.
        dot += unsafe { R::dot16(&codes[step], &activations[step]) };
        let end = (step + 1) * STEP;
        if end >= len || end.is_multiple_of(GROUP) || end.is_multiple_of(per_scale) {
            let start = step * STEP;
            sum = (dot as f32).mul_add(x.scales[start / GROUP] * scales[start / per_scale], sum);
            dot = 0;
        }
    }
    sum
}
