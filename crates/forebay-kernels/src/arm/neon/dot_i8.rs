//! Exact integer dot products with widening multiplies.

use std::arch::aarch64::*;

/// `sum_k w[k] x[k]`, `|x| <= 127`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn dot64(w: &[i8; 64], x: &[i8; 64]) -> i32 {
    let mut sums = vdupq_n_s32(0);
    for (w, x) in w.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
        sums = add_products(sums, w, x);
    }
    vaddvq_s32(sums)
}

/// `sum_k w[k] x[k]`, `|x| <= 127`.
#[inline]
#[target_feature(enable = "neon")]
pub(super) fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
    vaddvq_s32(add_products(vdupq_n_s32(0), w, x))
}

/// Adds sixteen products to four sums. Two products share a 16-bit sum: at most
/// 2 * 128 * 127 = 32512, so it never overflows.
#[inline]
#[target_feature(enable = "neon")]
fn add_products(sums: int32x4_t, w: &[i8; 16], x: &[i8; 16]) -> int32x4_t {
    // SAFETY: 16 readable bytes each.
    let (w, x) = unsafe { (vld1q_s8(w.as_ptr()), vld1q_s8(x.as_ptr())) };
    let low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    vpadalq_s16(sums, vmlal_s8(low, vget_high_s8(w), vget_high_s8(x)))
}
