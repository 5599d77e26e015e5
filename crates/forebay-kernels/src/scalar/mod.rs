//! The scalar room: no SIMD, the truth that every other room is compared with.

mod dot_i8;
mod lanes;
mod unpack;

use crate::activations::GROUP;
use crate::portable::lanes::{Bf16Bits, LANES};
use crate::portable::{QuantGroup, Room};

/// Plain Rust, any processor.
pub(crate) struct Scalar;

impl Room for Scalar {
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

    #[inline(always)]
    unsafe fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
        dot_i8::quad(w, x, scales, sums)
    }
}

crate::table::room_table!(Scalar);

pub(crate) use unpack::{int2, int4};
