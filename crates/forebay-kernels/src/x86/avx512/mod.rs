//! The AVX-512 room, with VNNI.

mod dot_i8;
mod unpack;

use crate::portable::Room;

/// AVX-512 F, BW, VL and VNNI.
pub(crate) struct Avx512;

impl Room for Avx512 {
    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        // SAFETY: the caller has checked for AVX-512 F, BW, VL and VNNI.
        unsafe { unpack::int4(codes, out) }
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        // SAFETY: as above.
        unsafe { unpack::int2(codes, out) }
    }

    #[inline(always)]
    unsafe fn dot64(w: &[i8; 64], x: &[i8; 64], corrections: &[i32; 4]) -> i32 {
        // SAFETY: as above.
        unsafe { dot_i8::dot64(w, x, corrections) }
    }

    #[inline(always)]
    unsafe fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
        // SAFETY: as above; AVX2 comes with it.
        unsafe { dot_i8::dot16(w, x) }
    }
}

crate::table::room_table!(Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni");
