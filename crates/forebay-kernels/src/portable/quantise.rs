//! Activations to int8: one group of 64 columns at a time.

use crate::activations::GROUP;

/// The smallest scale: it keeps the reciprocal finite, and a group of zeros zero.
const SMALLEST_SCALE: f32 = 1e-12;

/// Quantises up to [`GROUP`] values; columns beyond `x` become zero.
/// Returns the scale and `-128 * sum` of each sixteen codes.
#[inline(always)]
pub(crate) fn group(x: &[f32], codes: &mut [i8; GROUP]) -> (f32, [i32; 4]) {
    // The bits of |x| order like |x| itself, with NaN and infinity on top.
    let absmax = x.iter().fold(0u32, |max, v| max.max(v.to_bits() & 0x7FFF_FFFF));
    *codes = [0; GROUP];
    if absmax >= f32::INFINITY.to_bits() {
        return (f32::NAN, [0; 4]);
    }
    let scale = (f32::from_bits(absmax) / 127.0).max(SMALLEST_SCALE);
    let inverse = 1.0 / scale;
    for (code, v) in codes.iter_mut().zip(x) {
        // At most 127 * (1 + 2^-22) before rounding, so always within -127..=127.
        *code = (v * inverse).round_ties_even() as i32 as i8;
    }
    let mut corrections = [0i32; 4];
    for (c, codes) in corrections.iter_mut().zip(codes.as_chunks::<16>().0) {
        *c = -128 * codes.iter().map(|q| i32::from(*q)).sum::<i32>();
    }
    (scale, corrections)
}

/// Quantises one row: `codes`, `scales` and `corrections` hold one entry per started group.
#[inline(always)]
pub(crate) fn row(x: &[f32], codes: &mut [[i8; GROUP]], scales: &mut [f32], corrections: &mut [[i32; 4]]) {
    for (((x, codes), scale), correction) in x.chunks(GROUP).zip(codes).zip(scales).zip(corrections) {
        (*scale, *correction) = group(x, codes);
    }
}
