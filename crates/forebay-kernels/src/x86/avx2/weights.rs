//! Weights sixteen at a time, widened to f32.

use super::lanes::{Lanes, mul};
use crate::portable::lanes::LANES;
use forebay_core::panel::PANEL_LINE;
use std::arch::x86_64::*;

/// The scale in every lane.
pub(super) type Int4Scale = __m256;

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_f16(values: &[u16; LANES]) -> Lanes {
    let start = values.as_ptr().cast::<__m128i>();
    // SAFETY: 16 readable values of two bytes.
    unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(start)), _mm256_cvtph_ps(_mm_loadu_si128(start.add(1)))] }
}

/// As `decode::fp8`, by way of half precision, whose bias differs by 8: a processor may take
/// long to multiply subnormal f32, which small codes would be otherwise.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_fp8(values: &[u8; LANES]) -> Lanes {
    // SAFETY: 16 readable bytes.
    let bytes = unsafe { _mm_loadu_si128(values.as_ptr().cast()) };
    // The code in the upper byte; behind the sign, its other bits move down by one.
    let top = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
    let largest = _mm256_set1_epi16(0x7F00);
    let size = _mm256_and_si256(top, largest);
    // All bits set: NaN.
    let nan = _mm256_cmpeq_epi16(size, largest);
    let finite = _mm256_or_si256(_mm256_andnot_si256(largest, top), _mm256_srli_epi16(size, 1));
    let half = _mm256_or_si256(finite, nan);
    let (low, high) = (_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    mul([_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)], [_mm256_set1_ps(256.0); 2])
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_i8(values: &[i8; LANES]) -> Lanes {
    let start = values.as_ptr().cast::<__m128i>();
    // SAFETY: 8 readable bytes, twice.
    let (low, high) = unsafe { (_mm_loadl_epi64(start), _mm_loadl_epi64(start.byte_add(8))) };
    [_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(low)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int4_scale(scale: f32) -> Int4Scale {
    _mm256_set1_ps(scale)
}

/// The words of columns 0 to 7 and of 8 to 15 alternate, every lane shifting its code to the top.
/// The order is that of unpacking: 0, 8, 1, 9, 4, 12, 5, 13 and 2, 10, 3, 11, 6, 14, 7, 15.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn load_int4(codes: &[u8; LANES / 2], scale: Int4Scale) -> Lanes {
    // Value + 8 with its highest bit flipped is the value in two's complement.
    let all = _mm256_xor_si256(_mm256_set1_epi64x(i64::from_le_bytes(*codes)), _mm256_set1_epi8(-0x78));
    let shifts = _mm256_setr_epi32(28, 28, 24, 24, 12, 12, 8, 8);
    let first = _mm256_srai_epi32(_mm256_sllv_epi32(all, shifts), 28);
    let shifts = _mm256_setr_epi32(20, 20, 16, 16, 4, 4, 0, 0);
    let second = _mm256_srai_epi32(_mm256_sllv_epi32(all, shifts), 28);
    let weights = [_mm256_cvtepi32_ps(first), _mm256_cvtepi32_ps(second)];
    mul(weights, [scale; 2])
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn to_int4_order([low, high]: Lanes) -> Lanes {
    [_mm256_unpacklo_ps(low, high), _mm256_unpackhi_ps(low, high)]
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn from_int4_order([a, b]: Lanes) -> Lanes {
    [_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xDD)]
}

/// The words of a unit.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn words(unit: &[u8; PANEL_LINE]) -> [__m256i; 2] {
    let start = unit.as_ptr().cast::<__m256i>();
    // SAFETY: 64 readable bytes.
    unsafe { [_mm256_loadu_si256(start), _mm256_loadu_si256(start.add(1))] }
}

/// The byte moves to the top of its word, and down again with its sign.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int8_column(unit: &[u8; PANEL_LINE], column: usize) -> Lanes {
    let [low, high] = words(unit);
    let up = _mm_cvtsi32_si128(24 - 8 * column as i32);
    let low = _mm256_srai_epi32(_mm256_sll_epi32(low, up), 24);
    let high = _mm256_srai_epi32(_mm256_sll_epi32(high, up), 24);
    [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
}

/// The same with nibbles, whose highest bit flips first.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn int4_column(unit: &[u8; PANEL_LINE], column: usize) -> Lanes {
    let [low, high] = words(unit);
    let flip = _mm256_set1_epi8(-0x78);
    let up = _mm_cvtsi32_si128(28 - 4 * column as i32);
    let low = _mm256_srai_epi32(_mm256_sll_epi32(_mm256_xor_si256(low, flip), up), 28);
    let high = _mm256_srai_epi32(_mm256_sll_epi32(_mm256_xor_si256(high, flip), up), 28);
    [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
}
