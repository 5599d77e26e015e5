//! Exact integer dot products.

use crate::activations::GROUP;
use crate::portable::QuantGroup;

/// One activation group against four weight rows.
#[inline(always)]
pub(super) fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
    std::array::from_fn(|n| (dot(w[n], x.codes) as f32).mul_add(x.scale * scales[n], sums[n]))
}

/// `sum_k w[k] x[k]`; it stays below 2^21, so nothing overflows and f32 holds it exactly.
#[inline(always)]
fn dot(w: &[i8; GROUP], x: &[i8; GROUP]) -> i32 {
    w.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum()
}
