//! Exact integer dot products with VNNI.

use crate::activations::GROUP;
use crate::portable::QuantGroup;
use std::arch::x86_64::*;

/// One activation group against four weight rows.
#[inline]
#[target_feature(enable = "avx2,fma,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
    // SAFETY: 64 readable bytes and four readable values.
    let (codes, start) = unsafe {
        (_mm512_loadu_si512(x.codes.as_ptr().cast()), _mm_loadu_si128(x.corrections.as_ptr().cast()))
    };
    let start = _mm512_zextsi128_si512(start);
    let [a, b, c, d] = w.map(|w| {
        // SAFETY: 64 readable bytes.
        let w = unsafe { _mm512_loadu_si512(w.as_ptr().cast()) };
        // The weights enter as the unsigned bytes w + 128; the sum starts at -128 * sum(x),
        // which is what that adds.
        _mm512_dpbusd_epi32(start, _mm512_xor_si512(w, _mm512_set1_epi8(-128)), codes)
    });
    // Transpose and add: each quarter ends up with one number per row.
    let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
    let quarters = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
    let halves = _mm256_add_epi32(_mm512_castsi512_si256(quarters), _mm512_extracti64x4_epi64(quarters, 1));
    let dots = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
    // SAFETY: four readable values each.
    let (scales, sums) = unsafe { (_mm_loadu_ps(scales.as_ptr()), _mm_loadu_ps(sums.as_ptr())) };
    let sums = _mm_fmadd_ps(_mm_cvtepi32_ps(dots), _mm_mul_ps(_mm_set1_ps(x.scale), scales), sums);
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
