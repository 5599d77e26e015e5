//! Weights sixteen at a time, widened to f32.

use crate::portable::lanes::LANES;
use forebay_core::panel::PANEL_LINE;
use std::arch::x86_64::*;

/// The sixteen weights that the codes of one scale can stand for.
pub(super) type Int4Scale = __m512;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_f16(values: &[u16; LANES]) -> __m512 {
    // SAFETY: 16 readable values of two bytes.
    _mm512_cvtph_ps(unsafe { _mm256_loadu_si256(values.as_ptr().cast()) })
}

/// As `decode::fp8`, by way of half precision, whose bias differs by 8: a processor may take
/// long to multiply subnormal f32, which small codes would be otherwise.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl")]
pub(super) fn load_fp8(values: &[u8; LANES]) -> __m512 {
    // SAFETY: 16 readable bytes.
    let bytes = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    // The code in the upper byte; behind the sign, its other bits move down by one.
    let top = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    let largest = _mm256_set1_epi16(0x7F00);
    let size = _mm256_and_si256(top, largest);
    let nan = _mm256_cmpeq_epi16_mask(size, largest);
    let half = _mm256_or_si256(_mm256_andnot_si256(largest, top), _mm256_srli_epi16(size, 1));
    let half = _mm256_mask_mov_epi16(half, nan, _mm256_set1_epi16(0x7E00));
    _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_i8(values: &[i8; LANES]) -> __m512 {
    // SAFETY: 16 readable bytes.
    let bytes = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn int4_scale(scale: f32) -> Int4Scale {
    _mm512_mul_ps(int4_codes(), _mm512_set1_ps(scale))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn int4_codes() -> __m512 {
    _mm512_setr_ps(-8., -7., -6., -5., -4., -3., -2., -1., 0., 1., 2., 3., 4., 5., 6., 7.)
}

/// A lane looks its weight up by its lowest four bits: the words of columns 0 to 7 and of 8 to 15
/// alternate, each pair shifted one code further. So the order is 0, 8, 1, 9, ... 7, 15.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_int4(codes: &[u8; LANES / 2], scale: Int4Scale) -> __m512 {
    let all = _mm512_set1_epi64(i64::from_le_bytes(*codes));
    let shifts = _mm512_setr_epi64(0, 4, 8, 12, 16, 20, 24, 28);
    _mm512_permutexvar_ps(_mm512_srlv_epi64(all, shifts), scale)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn to_int4_order(lanes: __m512) -> __m512 {
    let from = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    _mm512_permutexvar_ps(from, lanes)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn from_int4_order(lanes: __m512) -> __m512 {
    let from = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
    _mm512_permutexvar_ps(from, lanes)
}

/// The byte moves to the top of its word, and down again with its sign.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn int8_column(unit: &[u8; PANEL_LINE], column: usize) -> __m512 {
    // SAFETY: 64 readable bytes.
    let words = unsafe { _mm512_loadu_si512(unit.as_ptr().cast()) };
    let top = _mm512_sll_epi32(words, _mm_cvtsi32_si128(24 - 8 * column as i32));
    _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24))
}

/// A lane looks its code up by its lowest four bits.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn int4_column(unit: &[u8; PANEL_LINE], column: usize) -> __m512 {
    // SAFETY: 64 readable bytes.
    let words = unsafe { _mm512_loadu_si512(unit.as_ptr().cast()) };
    _mm512_permutexvar_ps(_mm512_srl_epi32(words, _mm_cvtsi32_si128(4 * column as i32)), int4_codes())
}
