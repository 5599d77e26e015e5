//! The AVX2 room.

mod lanes;
mod panel;
mod rows;
mod unpack;
mod weights;

/// AVX2, FMA and F16C.
pub(crate) struct Avx2;

crate::table::room!(Avx2, "avx2,fma,f16c", rows);
