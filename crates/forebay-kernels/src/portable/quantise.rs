//! Activations to int8: one group of 64 columns at a time.

use crate::activations::{GROUP, GroupTotals};

/// 1.5 * 2^23: a number of small magnitude added to it loses its fraction.
const ROUNDER: f32 = 12_582_912.0;
/// The smallest scale: it keeps the reciprocal finite, and a group of zeros zero.
const SMALLEST_SCALE: f32 = 1e-12;

/// Quantises one group; `codes` in the order of the columns.
#[inline(always)]
fn group(x: &[f32; GROUP], codes: &mut [i8; GROUP]) -> GroupTotals {
    // The bits of |x| order like |x| itself, with NaN and infinity on top.
    let absmax = x.iter().fold(0u32, |max, v| max.max(v.to_bits() & 0x7FFF_FFFF));
    if absmax >= f32::INFINITY.to_bits() {
        *codes = [0; GROUP];
        return GroupTotals { scale: f32::NAN, ..GroupTotals::default() };
    }
    let scale = (f32::from_bits(absmax) / 127.0).max(SMALLEST_SCALE);
    let inverse = 1.0 / scale;
    for (code, v) in codes.iter_mut().zip(x) {
        // At most 127 * (1 + 2^-22) in magnitude. Adding the constant rounds half to even and
        // leaves the integer in the lowest bits.
        *code = (v * inverse + ROUNDER).to_bits() as i8;
    }
    let mut totals = GroupTotals { scale, ..GroupTotals::default() };
    for (sum, codes) in totals.negated_parts.iter_mut().zip(codes.as_chunks::<16>().0) {
        *sum = -codes.iter().map(|q| i32::from(*q)).sum::<i32>();
    }
    totals.negated_sum = totals.negated_parts.iter().sum();
    totals
}

/// The even columns first, then the odd ones.
#[inline(always)]
fn split(codes: &[i8; GROUP], out: &mut [i8; GROUP]) {
    let (even, odd) = out.split_at_mut(GROUP / 2);
    for ((even, odd), pair) in even.iter_mut().zip(odd).zip(codes.as_chunks::<2>().0) {
        (*even, *odd) = (pair[0], pair[1]);
    }
}

/// Quantises one row: every `stride`-th entry of the outputs, from the first on, is a group of
/// it. A partial group is filled up with zeros.
#[inline(always)]
pub(crate) fn row(
    x: &[f32],
    stride: usize,
    codes: &mut [[i8; GROUP]],
    splits: &mut [[i8; GROUP]],
    totals: &mut [GroupTotals],
) {
    for (g, values) in x.chunks(GROUP).enumerate() {
        let at = g * stride;
        totals[at] = match values.as_array() {
            Some(values) => group(values, &mut codes[at]),
            None => {
                let mut padded = [0f32; GROUP];
                padded[..values.len()].copy_from_slice(values);
                group(&padded, &mut codes[at])
            }
        };
        split(&codes[at], &mut splits[at]);
    }
}
