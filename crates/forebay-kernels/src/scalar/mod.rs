//! The scalar room: no SIMD, the truth that every other room is compared with.

mod lanes;
mod panel;
mod unpack;
mod weights;

use crate::portable::Room;
use crate::portable::lanes::{Bf16Bits, LANES};
use forebay_core::panel::PANEL_LINE;

/// Plain Rust, any processor.
pub(crate) struct Scalar;

impl Room for Scalar {
    const PLAIN: bool = true;

    type Lanes = lanes::Lanes;

    const REGISTERS: usize = lanes::REGISTERS;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Lanes {
        lanes::splat(value)
    }

    #[inline(always)]
    unsafe fn load(values: &[f32; LANES]) -> Self::Lanes {
        lanes::load(values)
    }

    #[inline(always)]
    unsafe fn load_bf16(values: &[Bf16Bits; LANES]) -> Self::Lanes {
        lanes::load_bf16(values)
    }

    #[inline(always)]
    unsafe fn load_f16(values: &[u16; LANES]) -> Self::Lanes {
        weights::load_f16(values)
    }

    #[inline(always)]
    unsafe fn load_fp8(values: &[u8; LANES]) -> Self::Lanes {
        weights::load_fp8(values)
    }

    #[inline(always)]
    unsafe fn load_i8(values: &[i8; LANES]) -> Self::Lanes {
        values.map(f32::from)
    }

    type Int4Scale = f32;

    #[inline(always)]
    unsafe fn int4_scale(scale: f32) -> Self::Int4Scale {
        scale
    }

    #[inline(always)]
    unsafe fn load_int4(codes: &[u8; LANES / 2], scale: Self::Int4Scale) -> Self::Lanes {
        weights::load_int4(codes, scale)
    }

    #[inline(always)]
    unsafe fn to_int4_order(lanes: Self::Lanes) -> Self::Lanes {
        lanes
    }

    #[inline(always)]
    unsafe fn from_int4_order(lanes: Self::Lanes) -> Self::Lanes {
        lanes
    }

    #[inline(always)]
    unsafe fn int8_column(unit: &[u8; PANEL_LINE], column: usize) -> Self::Lanes {
        weights::int8_column(unit, column)
    }

    #[inline(always)]
    unsafe fn int4_column(unit: &[u8; PANEL_LINE], column: usize) -> Self::Lanes {
        weights::int4_column(unit, column)
    }

    #[inline(always)]
    unsafe fn store(lanes: Self::Lanes, out: &mut [f32; LANES]) {
        lanes::store(lanes, out)
    }

    #[inline(always)]
    unsafe fn fma(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        lanes::fma(a, b, c)
    }

    #[inline(always)]
    unsafe fn trees(sums: [Self::Lanes; 4]) -> [f32; 4] {
        lanes::trees(sums)
    }

    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        unpack::int4(codes, out)
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        unpack::int2(codes, out)
    }

    type Ints = panel::Ints;
    const PAIRS: bool = false;
    const BATCH: usize = 4;

    #[inline(always)]
    unsafe fn from_ints(ints: Self::Ints) -> Self::Lanes {
        ints.map(|i| i as f32)
    }

    #[inline(always)]
    unsafe fn mul(a: Self::Lanes, b: Self::Lanes) -> Self::Lanes {
        lanes::mul(a, b)
    }

    #[inline(always)]
    unsafe fn dot_int4<const P: usize, const S: usize>(
        codes: [*const u8; P],
        units: usize,
        x: *const i8,
        _negated_sums: [i32; S],
    ) -> [[Self::Ints; S]; P] {
        // SAFETY: passed on to the caller.
        unsafe { panel::dot_int4(codes, units, x) }
    }

    #[inline(always)]
    unsafe fn dot_int8<const P: usize, const S: usize>(
        codes: [*const u8; P],
        units: usize,
        x: *const i8,
        _negated_sums: [i32; S],
    ) -> [[Self::Ints; S]; P] {
        // SAFETY: passed on to the caller.
        unsafe { panel::dot_int8(codes, units, x) }
    }

    #[inline(always)]
    fn prefetch(_at: *const u8) {}

    #[inline(always)]
    unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
        // SAFETY: passed on to the caller.
        unsafe { panel::transpose(start, stride, out) }
    }
}

crate::table::room_table!(Scalar);

pub(crate) use unpack::{int2, int4};
#[cfg(target_arch = "aarch64")]
pub(crate) use weights::{load_f16, load_fp8};
