//! Sixteen weight rows at a time, in panel order.

pub(super) use crate::arm::neon::panel::{
    BATCH, Ints, PAIRS, dot_int4, dot_int8, from_ints, prefetch_far, transpose,
};
