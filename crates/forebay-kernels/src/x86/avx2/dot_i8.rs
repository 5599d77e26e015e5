//! Exact integer dot products with `maddubs`.

use std::arch::x86_64::*;

/// `sum_k w[k] x[k]`, `|x| <= 127`.
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn dot64(w: &[i8; 64], x: &[i8; 64]) -> i32 {
    // SAFETY: 64 readable bytes each.
    let (w0, w1, x0, x1) = unsafe {
        let (w, x) = (w.as_ptr().cast::<__m256i>(), x.as_ptr().cast::<__m256i>());
        (
            _mm256_loadu_si256(w),
            _mm256_loadu_si256(w.add(1)),
            _mm256_loadu_si256(x),
            _mm256_loadu_si256(x.add(1)),
        )
    };
    let ones = _mm256_set1_epi16(1);
    let low = _mm256_madd_epi16(products(w0, x0), ones);
    let high = _mm256_madd_epi16(products(w1, x1), ones);
    let sums = _mm256_add_epi32(low, high);
    horizontal(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)))
}

/// Sixteen sums of two products each. |w| <= 128 as an unsigned byte times x with w's
/// sign: at most 2 * 128 * 127 = 32512, so the 16-bit sums never saturate.
#[inline]
#[target_feature(enable = "avx2")]
fn products(w: __m256i, x: __m256i) -> __m256i {
    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
}

/// `sum_k w[k] x[k]`.
#[inline]
#[target_feature(enable = "avx2")]
pub(crate) fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
    // SAFETY: 16 readable bytes each.
    let (w, x) = unsafe { (_mm_loadu_si128(w.as_ptr().cast()), _mm_loadu_si128(x.as_ptr().cast())) };
    let sums = _mm256_madd_epi16(_mm256_cvtepi8_epi16(w), _mm256_cvtepi8_epi16(x));
    horizontal(_mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1)))
}

/// The sum of four integers.
#[inline]
#[target_feature(enable = "avx2")]
fn horizontal(sums: __m128i) -> i32 {
    let two = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0b01_00_11_10));
    let one = _mm_add_epi32(two, _mm_shuffle_epi32(two, 0b10_11_00_01));
    _mm_cvtsi128_si32(one)
}
