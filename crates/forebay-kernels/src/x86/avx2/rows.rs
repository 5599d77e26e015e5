//! Sixteen weight rows where they lie, a line of 64 bytes each: halves of eight rows.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::panel::Ints;
use std::arch::x86_64::*;

/// As the method of `Room`. Weights enter as the unsigned numbers code + 8; the sums of four
/// products stay below 4 * 15 * 127, which fits 16 bits.
#[inline(always)]
pub(super) unsafe fn line_int4(
    start: *const u8,
    stride: usize,
    x: [*const i8; 2],
    negated_sums: [i32; 2],
) -> [Ints; 2] {
    // SAFETY: the caller's rows and activations are there; it has checked for AVX2.
    unsafe {
        let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let mut dots = [[_mm256_setzero_si256(); 2]; 2];
        for group in 0..2 {
            let even = _mm256_loadu_si256(x[group].cast());
            let odd = _mm256_loadu_si256(x[group].add(32).cast());
            let shift = _mm256_set1_epi32(8 * negated_sums[group]);
            for half in 0..2 {
                let mut sums = [_mm256_setzero_si256(); 8];
                for i in 0..8 {
                    let at = start.wrapping_add((8 * half + i) * stride + 32 * group);
                    let both = _mm256_loadu_si256(at.cast());
                    let low = _mm256_maddubs_epi16(_mm256_and_si256(both, mask), even);
                    let high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
                    let high = _mm256_maddubs_epi16(high, odd);
                    sums[i] = _mm256_madd_epi16(_mm256_add_epi16(low, high), ones);
                }
                dots[group][half] = _mm256_add_epi32(add_lanes(sums), shift);
            }
        }
        dots
    }
}

/// As the method of `Room`, with the products of `panel::dot_int8`.
#[inline(always)]
pub(super) unsafe fn line_int8(start: *const u8, stride: usize, x: *const i8, _negated_sum: i32) -> Ints {
    // SAFETY: as above.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let x = [_mm256_loadu_si256(x.cast()), _mm256_loadu_si256(x.add(32).cast())];
        let mut dots = [_mm256_setzero_si256(); 2];
        for half in 0..2 {
            let mut sums = [_mm256_setzero_si256(); 8];
            for i in 0..8 {
                for part in 0..2 {
                    let at = start.wrapping_add((8 * half + i) * stride + 32 * part);
                    let weights = _mm256_loadu_si256(at.cast());
                    let signed = _mm256_sign_epi8(x[part], weights);
                    let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), signed);
                    sums[i] = _mm256_add_epi32(sums[i], _mm256_madd_epi16(pairs, ones));
                }
            }
            dots[half] = add_lanes(sums);
        }
        dots
    }
}

/// Lane `i` is the sum of the lanes of register `i`.
#[inline(always)]
unsafe fn add_lanes(sums: [__m256i; 8]) -> __m256i {
    // SAFETY: the caller has checked for AVX2.
    unsafe {
        // Inside each half two rows share a register, then four, transposed and added.
        let mut fours = [_mm256_setzero_si256(); 2];
        for i in 0..2 {
            let ab = twos(sums[4 * i], sums[4 * i + 1]);
            let cd = twos(sums[4 * i + 2], sums[4 * i + 3]);
            fours[i] = _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
        }
        let [a, b] = fours;
        _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31))
    }
}

/// Lanes 0 and 2 and lanes 1 and 3 of each half of both.
#[inline(always)]
unsafe fn twos(a: __m256i, b: __m256i) -> __m256i {
    // SAFETY: as above.
    unsafe { _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b)) }
}
