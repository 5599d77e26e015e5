//! Rooms for AArch64.

pub(crate) mod dotprod;
pub(crate) mod neon;
