//! The NEON room.

mod dot_i8;
pub(crate) mod lanes;
pub(crate) mod unpack;

use crate::activations::GROUP;
use crate::portable::lanes::{Bf16Bits, LANES};
use crate::portable::{QuantGroup, Room};

/// NEON.
pub(crate) struct Neon;

// Every method hands over to a function of this room. All rely on one promise.
impl Room for Neon {
    type Lanes = lanes::Lanes;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self::Lanes {
        // SAFETY: the caller has checked for NEON.
        unsafe { lanes::splat(value) }
    }

    #[inline(always)]
    unsafe fn load(values: &[f32; LANES]) -> Self::Lanes {
        // SAFETY: as above.
        unsafe { lanes::load(values) }
    }

    #[inline(always)]
    unsafe fn load_bf16(values: &[Bf16Bits; LANES]) -> Self::Lanes {
        // SAFETY: as above.
        unsafe { lanes::load_bf16(values) }
    }

    #[inline(always)]
    unsafe fn store(lanes: Self::Lanes, out: &mut [f32; LANES]) {
        // SAFETY: as above.
        unsafe { lanes::store(lanes, out) }
    }

    #[inline(always)]
    unsafe fn fma(a: Self::Lanes, b: Self::Lanes, c: Self::Lanes) -> Self::Lanes {
        // SAFETY: as above.
        unsafe { lanes::fma(a, b, c) }
    }

    #[inline(always)]
    unsafe fn unpack_int4(codes: &[u8], out: &mut [i8]) {
        // SAFETY: as above.
        unsafe { unpack::int4(codes, out) }
    }

    #[inline(always)]
    unsafe fn unpack_int2(codes: &[u8], out: &mut [i8]) {
        // SAFETY: as above.
        unsafe { unpack::int2(codes, out) }
    }

    #[inline(always)]
    unsafe fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
        // SAFETY: as above.
        unsafe { dot_i8::quad(w, x, scales, sums) }
    }
}

crate::table::room_table!(Neon, "neon");
