//! Sixteen f32 lanes as an array.

use crate::portable::lanes::{Bf16Bits, Element, LANES, tree};

pub(crate) type Lanes = [f32; LANES];

/// How many [`Lanes`] the registers hold.
pub(crate) const REGISTERS: usize = 1;

#[inline(always)]
pub(super) fn splat(value: f32) -> Lanes {
    [value; LANES]
}

#[inline(always)]
pub(super) fn load(values: &[f32; LANES]) -> Lanes {
    *values
}

#[inline(always)]
pub(super) fn load_bf16(values: &[Bf16Bits; LANES]) -> Lanes {
    values.map(Element::value)
}

#[inline(always)]
pub(super) fn store(lanes: Lanes, out: &mut [f32; LANES]) {
    *out = lanes;
}

#[inline(always)]
pub(super) fn fma(a: Lanes, b: Lanes, c: Lanes) -> Lanes {
    std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
}

#[inline(always)]
pub(super) fn trees(sums: [Lanes; 4]) -> [f32; 4] {
    sums.map(tree)
}

#[inline(always)]
pub(super) fn mul(a: Lanes, b: Lanes) -> Lanes {
    std::array::from_fn(|i| a[i] * b[i])
}
