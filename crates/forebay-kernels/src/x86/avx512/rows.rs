//! Sixteen weight rows where they lie, a line of 64 bytes each, with VNNI.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use std::arch::x86_64::*;

/// 32 bytes from each of two places.
///
/// # Safety
/// They are readable; AVX-512.
#[inline(always)]
unsafe fn halves(low: *const i8, high: *const i8) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        let low = _mm512_castsi256_si512(_mm256_loadu_si256(low.cast()));
        _mm512_inserti64x4(low, _mm256_loadu_si256(high.cast()), 1)
    }
}

/// As the method of `Room`. Weights enter as the unsigned numbers code + 8, so lane 0 of each
/// half starts at `8 * negated_sum`.
#[inline(always)]
pub(super) unsafe fn line_int4(
    start: *const u8,
    stride: usize,
    x: [*const i8; 2],
    negated_sums: [i32; 2],
) -> [__m512i; 2] {
    // SAFETY: the caller's rows and activations are there; it has checked for VNNI.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        let even = halves(x[0], x[1]);
        let odd = halves(x[0].add(32), x[1].add(32));
        let first = _mm512_maskz_set1_epi32(1, 8 * negated_sums[0]);
        let first = _mm512_mask_set1_epi32(first, 1 << 8, 8 * negated_sums[1]);
        let mut sums = [_mm512_setzero_si512(); 16];
        for i in 0..16 {
            let both = _mm512_loadu_si512(start.wrapping_add(i * stride).cast());
            let high = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            let low = _mm512_dpbusd_epi32(first, _mm512_and_si512(both, mask), even);
            sums[i] = _mm512_dpbusd_epi32(low, high, odd);
        }
        let [ab, cd] = quarters(sums);
        [_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD)]
    }
}

/// As the method of `Room`. Weights enter as the unsigned numbers code + 128.
#[inline(always)]
pub(super) unsafe fn line_int8(start: *const u8, stride: usize, x: *const i8, negated_sum: i32) -> __m512i {
    // SAFETY: as above.
    unsafe {
        let flip = _mm512_set1_epi8(-128);
        let x = _mm512_loadu_si512(x.cast());
        let shift = _mm512_zextsi128_si512(_mm_cvtsi32_si128(128 * negated_sum));
        let mut sums = [_mm512_setzero_si512(); 16];
        for i in 0..16 {
            let weights = _mm512_loadu_si512(start.wrapping_add(i * stride).cast());
            sums[i] = _mm512_dpbusd_epi32(shift, _mm512_xor_si512(weights, flip), x);
        }
        let [ab, cd] = quarters(sums);
        _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xDD))
    }
}

/// The sums of the lower and the upper half of each row, in turns for every four rows: quarters
/// 0 and 1 of the first register are the halves of rows 0 to 3, quarters 2 and 3 those of rows
/// 4 to 7, and so on.
#[inline(always)]
unsafe fn quarters(sums: [__m512i; 16]) -> [__m512i; 2] {
    // SAFETY: the caller has checked for AVX-512.
    unsafe {
        // Inside each quarter two rows share a register, then four, transposed and added.
        let mut fours = [_mm512_setzero_si512(); 4];
        for i in 0..4 {
            let ab = twos(sums[4 * i], sums[4 * i + 1]);
            let cd = twos(sums[4 * i + 2], sums[4 * i + 3]);
            fours[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        }
        let mut out = [_mm512_setzero_si512(); 2];
        for i in 0..2 {
            let (a, b) = (fours[2 * i], fours[2 * i + 1]);
            out[i] = _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xDD));
        }
        out
    }
}

/// Lanes 0 and 2 and lanes 1 and 3 of each quarter of both.
#[inline(always)]
unsafe fn twos(a: __m512i, b: __m512i) -> __m512i {
    // SAFETY: as above.
    unsafe { _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b)) }
}
