//! Rooms for AArch64.

pub(crate) mod dotprod;
pub(crate) mod i8mm;
pub(crate) mod neon;
