//! The NEON room.

pub(crate) mod lanes;
pub(crate) mod panel;
pub(crate) mod unpack;
pub(crate) mod weights;

/// NEON.
pub(crate) struct Neon;

crate::table::room!(Neon, "neon");
