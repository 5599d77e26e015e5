//! Sixteen f32 lanes: nothing beyond NEON is needed.

pub(super) use crate::arm::neon::lanes::{Lanes, REGISTERS, fma, load, load_bf16, mul, splat, store, trees};
