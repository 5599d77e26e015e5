//! The NEON room with the dot-product extension.

mod dot_i8;
mod lanes;
mod unpack;

/// NEON and the dot-product extension.
pub(crate) struct DotProd;

crate::table::room!(DotProd, "neon,dotprod");
