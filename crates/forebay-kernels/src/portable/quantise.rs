//! Activations to int8: one group of 64 columns at a time.

use crate::activations::GROUP;

/// 1.5 * 2^23: a number of small magnitude added to it loses its fraction.
const ROUNDER: f32 = 12_582_912.0;
/// The smallest scale: it keeps the reciprocal finite, and a group of zeros zero.
const SMALLEST_SCALE: f32 = 1e-12;

/// Quantises one group. Returns the scale and `-128 * sum` of each sixteen codes.
#[inline(always)]
fn group(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> (f32, [i32; 4]) {
    // The bits of |x| order like |x| itself, with NaN and infinity on top.
    let absmax = x.iter().fold(0u32, |max, v| max.max(v.to_bits() & 0x7FFF_FFFF));
    if absmax >= f32::INFINITY.to_bits() {
        *codes = [0; GROUP];
        return (f32::NAN, [0; 4]);
    }
    let scale = (f32::from_bits(absmax) / 127.0).max(SMALLEST_SCALE);
    let inverse = 1.0 / scale;
    for (code, v) in codes.iter_mut().zip(x) {
        // At most 127 * (1 + 2^-22) in magnitude. Adding the constant rounds half to even and
        // leaves the integer in the lowest bits.
        *code = (v * inverse + ROUNDER).to_bits() as i8;
    }
    let mut corrections = [0i32; 4];
    for (c, codes) in corrections.iter_mut().zip(codes.as_chunks::<16>().0) {
        *c = -128 * codes.iter().map(|q| i32::from(*q)).sum::<i32>();
    }
    (scale, corrections)
}

/// Quantises one row: `codes`, `scales` and `corrections` hold one entry per started group.
/// A partial group is filled up with zeros.
#[inline(always)]
pub(crate) fn row(x: &[f32], codes: &mut [[i8; GROUP]], scales: &mut [f32], corrections: &mut [[i32; 4]]) {
    let (whole, tail) = x.as_chunks::<GROUP>();
    let mut outputs = codes.iter_mut().zip(scales).zip(corrections);
    for (x, ((codes, scale), correction)) in whole.iter().zip(&mut outputs) {
        (*scale, *correction) = group(x, codes);
    }
    if let Some(((codes, scale), correction)) = outputs.next() {
        let mut padded = [0f32; GROUP];
        padded[..tail.len()].copy_from_slice(tail);
        (*scale, *correction) = group(&padded, codes);
    }
}
