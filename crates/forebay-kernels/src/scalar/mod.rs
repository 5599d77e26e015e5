//! The scalar room: no SIMD, the truth that every other room is compared with.

mod dot_i8;
mod unpack;

use crate::portable::Room;

/// Plain Rust, any processor.
pub(crate) struct Scalar;

impl Room for Scalar {
    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        unpack::int4(codes, out)
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        unpack::int2(codes, out)
    }

    #[inline(always)]
    unsafe fn dot64(w: &[i8; 64], x: &[i8; 64], _corrections: &[i32; 4]) -> i32 {
        dot_i8::dot(w, x)
    }

    #[inline(always)]
    unsafe fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
        dot_i8::dot(w, x)
    }
}

crate::table::room_table!(Scalar);

pub(crate) use unpack::{int2, int4};
