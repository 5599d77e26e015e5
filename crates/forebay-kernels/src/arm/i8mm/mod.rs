//! The NEON room with the extensions of dot products and int8 matrix products.

mod lanes;
mod panel;
mod unpack;
mod weights;

/// NEON, the dot-product extension and the int8 matrix extension.
pub(crate) struct I8mm;

crate::table::room!(I8mm, "neon,dotprod,i8mm");
