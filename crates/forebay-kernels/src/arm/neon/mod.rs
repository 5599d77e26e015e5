//! The NEON room.

mod dot_i8;
pub(crate) mod unpack;

use crate::portable::Room;

/// NEON.
pub(crate) struct Neon;

impl Room for Neon {
    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        // SAFETY: the caller has checked for NEON.
        unsafe { unpack::int4(codes, out) }
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        // SAFETY: as above.
        unsafe { unpack::int2(codes, out) }
    }

    #[inline(always)]
    unsafe fn dot64(w: &[i8; 64], x: &[i8; 64], _corrections: &[i32; 4]) -> i32 {
        // SAFETY: as above.
        unsafe { dot_i8::dot64(w, x) }
    }

    #[inline(always)]
    unsafe fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
        // SAFETY: as above.
        unsafe { dot_i8::dot16(w, x) }
    }
}

crate::table::room_table!(Neon, "neon");
