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
        *sum = -sum_of_codes(codes);
    }
    totals.negated_sum = totals.negated_parts.iter().sum();
    totals
}

/// The sum of sixteen codes. Added up inside two 64-bit words: the compiler makes a long detour of
/// the plain sum.
#[inline(always)]
fn sum_of_codes(codes: &[i8; 16]) -> i32 {
    // As unsigned numbers, code + 128, in four lanes of 16 bits.
    const BYTES: u64 = 0x00FF_00FF_00FF_00FF;
    let mut lanes = 0;
    for eight in codes.as_chunks::<8>().0 {
        let bytes = u64::from_ne_bytes(eight.map(|code| code as u8 ^ 0x80));
        lanes += (bytes & BYTES) + (bytes >> 8 & BYTES);
    }
    // The topmost lane of the product is the sum of all lanes, at most 16 * 255.
    (lanes.wrapping_mul(0x0001_0001_0001_0001) >> 48) as i32 - 16 * 128
}

/// The even columns first, then the odd ones.
#[inline(always)]
pub(crate) fn split(codes: &[i8; GROUP], out: &mut [i8; GROUP]) {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_add_up() {
        let mut codes = [0i8; 16];
        for i in 0..200_000u32 {
            let want: i32 = codes.iter().map(|code| i32::from(*code)).sum();
            assert_eq!(sum_of_codes(&codes), want, "{codes:?}");
            let at = i as usize * 7 % 16;
            codes[at] = codes[at].wrapping_mul(37).wrapping_add(i as i8);
        }
        assert_eq!(sum_of_codes(&[-128; 16]), -2048);
        assert_eq!(sum_of_codes(&[127; 16]), 2032);
    }
}
