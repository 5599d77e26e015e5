//! Weights sixteen at a time: nothing beyond NEON is needed.

pub(super) use crate::arm::neon::weights::{
    Int4Scale, from_int4_order, int4_column, int4_scale, int8_column, load_f16, load_fp8, load_i8, load_int4,
    to_int4_order,
};
