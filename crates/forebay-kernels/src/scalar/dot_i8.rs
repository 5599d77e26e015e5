//! Exact integer dot products.

/// `sum_k w[k] x[k]`; a group of 64 stays below 2^21, so nothing overflows.
#[inline(always)]
pub(crate) fn dot<const N: usize>(w: &[i8; N], x: &[i8; N]) -> i32 {
    w.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x)).sum()
}
