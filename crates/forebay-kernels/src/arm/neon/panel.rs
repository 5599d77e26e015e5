//! Sixteen weight rows at a time, in panel order.

use crate::arm::neon::lanes::Lanes;
use crate::scalar;
use forebay_core::panel::PANEL_LINE;
use std::arch::aarch64::*;

pub(crate) const PAIRS: bool = false;
pub(crate) const BATCH: usize = 4;

pub(crate) type Ints = scalar::Ints;

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn from_ints(ints: Ints) -> Lanes {
    // SAFETY: four readable values each.
    std::array::from_fn(|i| unsafe { vcvtq_f32_s32(vld1q_s32(ints.as_ptr().add(4 * i))) })
}

/// As `scalar::panel::dot_int4`.
#[inline(always)]
pub(crate) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    _negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: passed on to the caller.
    unsafe { scalar::dot_int4(codes, units, x) }
}

/// As `scalar::panel::dot_int8`.
#[inline(always)]
pub(crate) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    _negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: passed on to the caller.
    unsafe { scalar::dot_int8(codes, units, x) }
}

/// As `scalar::panel::transpose`.
#[inline(always)]
pub(crate) unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
    // SAFETY: passed on to the caller.
    unsafe { scalar::transpose(start, stride, out) }
}

/// Nothing: prefetching has no stable intrinsic on this architecture.
#[inline(always)]
pub(crate) fn prefetch_far(_at: *const u8) {}
