//! Sixteen f32 lanes in two registers.

use crate::portable::lanes::{Bf16Bits, LANES};
use std::arch::x86_64::*;

pub(crate) type Lanes = [__m256; 2];

/// How many [`Lanes`] the registers hold.
pub(crate) const REGISTERS: usize = 8;

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn splat(value: f32) -> Lanes {
    [_mm256_set1_ps(value); 2]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn load(values: &[f32; LANES]) -> Lanes {
    let start = values.as_ptr();
    // SAFETY: 16 readable values.
    unsafe { [_mm256_loadu_ps(start), _mm256_loadu_ps(start.add(8))] }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn load_bf16(values: &[Bf16Bits; LANES]) -> Lanes {
    let start = values.as_ptr().cast::<__m128i>();
    // SAFETY: 16 readable values of two bytes.
    let halves = unsafe { [_mm_loadu_si128(start), _mm_loadu_si128(start.add(1))] };
    let wide = |half| _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    [wide(halves[0]), wide(halves[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn store(lanes: Lanes, out: &mut [f32; LANES]) {
    let start = out.as_mut_ptr();
    // SAFETY: 16 writable values.
    unsafe {
        _mm256_storeu_ps(start, lanes[0]);
        _mm256_storeu_ps(start.add(8), lanes[1]);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])]
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn trees(sums: [Lanes; 4]) -> [f32; 4] {
    // Transpose and add: two sums share a register, four lanes each, then all four share it.
    let [a, b, c, d] = sums.map(|[low, high]| _mm256_add_ps(low, high));
    let fours = |a, b| _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
    let (ab, cd) = (fours(a, b), fours(c, d));
    let twos = _mm256_add_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xEE));
    // Each half now holds two lanes of two sums: a and c, b and d.
    let ones = _mm256_add_ps(twos, _mm256_movehdup_ps(twos));
    let (ac, bd) = (_mm256_castps256_ps128(ones), _mm256_extractf128_ps(ones, 1));
    let abcd = _mm_blend_ps(ac, _mm_moveldup_ps(bd), 0b1010);
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), abcd) }
    out
}

#[inline]
#[target_feature(enable = "avx2,fma")]
pub(super) fn mul(a: Lanes, b: Lanes) -> Lanes {
    [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])]
}
