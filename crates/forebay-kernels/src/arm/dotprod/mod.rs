//! The NEON room with the dot-product extension.

mod lanes;
pub(crate) mod panel;
mod unpack;
mod weights;

/// NEON and the dot-product extension.
pub(crate) struct DotProd;

crate::table::room!(DotProd, "neon,dotprod");
