//! The NEON room.

pub(crate) mod lanes;
pub(crate) mod panel;
pub(crate) mod unpack;

/// NEON.
pub(crate) struct Neon;

crate::table::room!(Neon, "neon");
