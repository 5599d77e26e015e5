//! The AVX2 room.

pub(crate) mod dot_i8;
mod unpack;

use crate::portable::Room;

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

impl Room for Avx2 {
    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        // SAFETY: the caller has checked for AVX2.
        unsafe { unpack::int4(codes, out) }
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        // SAFETY: the caller has checked for AVX2.
        unsafe { unpack::int2(codes, out) }
    }

    #[inline(always)]
    unsafe fn dot64(w: &[i8; 64], x: &[i8; 64], _corrections: &[i32; 4]) -> i32 {
        // SAFETY: the caller has checked for AVX2.
        unsafe { dot_i8::dot64(w, x) }
    }

    #[inline(always)]
    unsafe fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
        // SAFETY: the caller has checked for AVX2.
        unsafe { dot_i8::dot16(w, x) }
    }
}

crate::table::room_table!(Avx2, "avx2,fma,f16c");
