//! Sixteen f32 lanes in four registers.

use crate::portable::lanes::{Bf16Bits, LANES};
use std::arch::aarch64::*;

pub(crate) type Lanes = [float32x4_t; 4];

/// How many [`Lanes`] the registers hold.
pub(crate) const REGISTERS: usize = 8;

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn splat(value: f32) -> Lanes {
    [vdupq_n_f32(value); 4]
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load(values: &[f32; LANES]) -> Lanes {
    let start = values.as_ptr();
    // SAFETY: 16 readable values.
    unsafe { [vld1q_f32(start), vld1q_f32(start.add(4)), vld1q_f32(start.add(8)), vld1q_f32(start.add(12))] }
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load_bf16(values: &[Bf16Bits; LANES]) -> Lanes {
    let start = values.as_ptr().cast::<u16>();
    // SAFETY: 16 readable values of two bytes.
    let (low, high) = unsafe { (vld1q_u16(start), vld1q_u16(start.add(8))) };
    let wide = |four| vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(four)));
    [wide(vget_low_u16(low)), wide(vget_high_u16(low)), wide(vget_low_u16(high)), wide(vget_high_u16(high))]
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn store(lanes: Lanes, out: &mut [f32; LANES]) {
    let start = out.as_mut_ptr();
    // SAFETY: 16 writable values.
    unsafe {
        vst1q_f32(start, lanes[0]);
        vst1q_f32(start.add(4), lanes[1]);
        vst1q_f32(start.add(8), lanes[2]);
        vst1q_f32(start.add(12), lanes[3]);
    }
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    [
        vfmaq_f32(c[0], a[0], b[0]),
        vfmaq_f32(c[1], a[1], b[1]),
        vfmaq_f32(c[2], a[2], b[2]),
        vfmaq_f32(c[3], a[3], b[3]),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn trees(sums: [Lanes; 4]) -> [f32; 4] {
    let [a, b, c, d] = sums.map(|[w, x, y, z]| vaddq_f32(vaddq_f32(w, y), vaddq_f32(x, z)));
    // Transpose and add: two sums share a register, two lanes each, then all four share it.
    let twos = |a, b| {
        let low = vcombine_f32(vget_low_f32(a), vget_low_f32(b));
        vaddq_f32(low, vcombine_f32(vget_high_f32(a), vget_high_f32(b)))
    };
    let ones = vpaddq_f32(twos(a, b), twos(c, d));
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { vst1q_f32(out.as_mut_ptr(), ones) }
    out
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn mul(a: Lanes, b: Lanes) -> Lanes {
    [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1]), vmulq_f32(a[2], b[2]), vmulq_f32(a[3], b[3])]
}
