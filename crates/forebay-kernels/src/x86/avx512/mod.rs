//! The AVX-512 room, with VNNI.

pub(crate) mod coded;
mod lanes;
mod panel;
mod rows;
mod unpack;
mod weights;

/// AVX-512 F, BW, VL and VNNI.
pub(crate) struct Avx512;

crate::table::room!(Avx512, "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni", rows);
