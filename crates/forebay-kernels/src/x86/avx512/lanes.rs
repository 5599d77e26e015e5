//! Sixteen f32 lanes in one register.

use crate::portable::lanes::{Bf16Bits, LANES};
use std::arch::x86_64::*;

pub(crate) type Lanes = __m512;

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
