//! Packed codes to signed bytes: nothing beyond NEON is needed.

pub(super) use crate::arm::neon::unpack::{int2, int4};
