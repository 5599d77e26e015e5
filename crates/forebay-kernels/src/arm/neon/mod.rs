//! The NEON room.

mod dot_i8;
pub(crate) mod lanes;
pub(crate) mod unpack;

/// NEON.
pub(crate) struct Neon;

crate::table::room!(Neon, "neon");
