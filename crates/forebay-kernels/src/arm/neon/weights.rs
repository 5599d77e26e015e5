//! Weights sixteen at a time, widened to f32.

use super::lanes::{Lanes, load, mul, splat};
use crate::portable::lanes::LANES;
use crate::scalar;
use forebay_core::panel::PANEL_LINE;
use std::arch::aarch64::*;

/// The scale in every lane.
pub(crate) type Int4Scale = Lanes;

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load_f16(values: &[u16; LANES]) -> Lanes {
    load(&scalar::load_f16(values))
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load_fp8(values: &[u8; LANES]) -> Lanes {
    load(&scalar::load_fp8(values))
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load_i8(values: &[i8; LANES]) -> Lanes {
    // SAFETY: 16 readable bytes.
    widen(unsafe { vld1q_s8(values.as_ptr()) })
}

#[inline]
#[target_feature(enable = "neon")]
fn widen(codes: int8x16_t) -> Lanes {
    let (low, high) = (vmovl_s8(vget_low_s8(codes)), vmovl_s8(vget_high_s8(codes)));
    [
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))),
        vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))),
    ]
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn int4_scale(scale: f32) -> Int4Scale {
    splat(scale)
}

/// In the order of the columns.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn load_int4(codes: &[u8; LANES / 2], scale: Int4Scale) -> Lanes {
    // SAFETY: 8 readable bytes.
    let both = unsafe { vld1_u8(codes.as_ptr()) };
    let (even, odd) = (vand_u8(both, vdup_n_u8(15)), vshr_n_u8::<4>(both));
    let nibbles = vcombine_u8(vzip1_u8(even, odd), vzip2_u8(even, odd));
    mul(widen(vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8))), scale)
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn to_int4_order(lanes: Lanes) -> Lanes {
    lanes
}

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn from_int4_order(lanes: Lanes) -> Lanes {
    lanes
}

/// The words of a unit, shifted up by `up` bits and then, with their signs, down by `down`.
#[inline]
#[target_feature(enable = "neon")]
fn column(unit: &[u8; PANEL_LINE], flip: u8, up: usize, down: i32) -> Lanes {
    let mut lanes = splat(0.0);
    for (q, lanes) in lanes.iter_mut().enumerate() {
        // SAFETY: 16 readable bytes.
        let bytes = veorq_u8(unsafe { vld1q_u8(unit.as_ptr().add(16 * q)) }, vdupq_n_u8(flip));
        let top = vshlq_s32(vreinterpretq_s32_u8(bytes), vdupq_n_s32(up as i32));
        *lanes = vcvtq_f32_s32(vshlq_s32(top, vdupq_n_s32(-down)));
    }
    lanes
}

/// The byte moves to the top of its word, and down again with its sign.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn int8_column(unit: &[u8; PANEL_LINE], number: usize) -> Lanes {
    column(unit, 0, 24 - 8 * number, 24)
}

/// The same with nibbles, whose highest bit flips first.
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn int4_column(unit: &[u8; PANEL_LINE], number: usize) -> Lanes {
    column(unit, 0x88, 28 - 4 * number, 28)
}
