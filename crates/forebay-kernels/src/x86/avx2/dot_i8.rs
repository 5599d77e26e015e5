//! Exact integer dot products with `maddubs`.

use crate::activations::GROUP;
use crate::portable::QuantGroup;
use std::arch::x86_64::*;

/// One activation group against four weight rows.
#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
    let x_codes = load(x.codes);
    let [a, b, c, d] = w.map(|w| partial_sums(load(w), x_codes));
    // Two rounds of neighbours leave each half holding one number per row.
    let halves = _mm256_hadd_epi32(_mm256_hadd_epi32(a, b), _mm256_hadd_epi32(c, d));
    let dots = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    // SAFETY: four readable values each.
    let (scales, sums) = unsafe { (_mm_loadu_ps(scales.as_ptr()), _mm_loadu_ps(sums.as_ptr())) };
    let sums = _mm_fmadd_ps(_mm_cvtepi32_ps(dots), _mm_mul_ps(_mm_set1_ps(x.scale), scales), sums);
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

#[inline]
#[target_feature(enable = "avx2")]
fn load(codes: &[i8; GROUP]) -> [__m256i; 2] {
    let start = codes.as_ptr().cast::<__m256i>();
    // SAFETY: 64 readable bytes.
    unsafe { [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))] }
}

/// Eight numbers that add up to `sum_k w[k] x[k]`.
#[inline]
#[target_feature(enable = "avx2")]
fn partial_sums(w: [__m256i; 2], x: [__m256i; 2]) -> __m256i {
    let ones = _mm256_set1_epi16(1);
    let low = _mm256_madd_epi16(products(w[0], x[0]), ones);
    let high = _mm256_madd_epi16(products(w[1], x[1]), ones);
    _mm256_add_epi32(low, high)
}

/// Sixteen sums of two products each. |w| <= 128 as an unsigned byte times x with w's
/// sign: at most 2 * 128 * 127 = 32512, so the 16-bit sums never saturate.
#[inline]
#[target_feature(enable = "avx2")]
fn products(w: __m256i, x: __m256i) -> __m256i {
    _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w))
}
