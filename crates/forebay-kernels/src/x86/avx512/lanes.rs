//! Sixteen f32 lanes in one register.

use crate::portable::lanes::{Bf16Bits, LANES};
use std::arch::x86_64::*;

pub(crate) type Lanes = __m512;

/// How many [`Lanes`] the registers hold.
pub(crate) const REGISTERS: usize = 32;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn splat(value: f32) -> Lanes {
    _mm512_set1_ps(value)
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load(values: &[f32; LANES]) -> Lanes {
    // SAFETY: 16 readable values.
    unsafe { _mm512_loadu_ps(values.as_ptr()) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn load_bf16(values: &[Bf16Bits; LANES]) -> Lanes {
    // SAFETY: 16 readable values of two bytes.
    let narrow = unsafe { _mm256_loadu_si256(values.as_ptr().cast()) };
    _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16))
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn store(lanes: Lanes, out: &mut [f32; LANES]) {
    // SAFETY: 16 writable values.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), lanes) }
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    _mm512_fmadd_ps(a, b, c)
}

#[inline]
#[target_feature(enable = "avx512f,avx512vl")]
pub(super) fn trees([a, b, c, d]: [Lanes; 4]) -> [f32; 4] {
    // Transpose and add: first two sums share a register, eight lanes each, then four share it.
    let eights = |a, b| _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    let (ab, cd) = (eights(a, b), eights(c, d));
    let fours = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    // Inside each quarter: lanes 0 and 1 take 2 and 3, then lane 0 takes 1.
    let twos = _mm512_add_ps(fours, _mm512_permute_ps(fours, 0x4E));
    let ones = _mm512_add_ps(twos, _mm512_permute_ps(twos, 0xB1));
    let firsts =
        _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12), ones);
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), _mm512_castps512_ps128(firsts)) }
    out
}

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn mul(a: Lanes, b: Lanes) -> Lanes {
    _mm512_mul_ps(a, b)
}
