//! Exact integer dot products with `sdot`.

use std::arch::aarch64::*;
use std::arch::asm;

/// `sum_k w[k] x[k]`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn dot64(w: &[i8; 64], x: &[i8; 64]) -> i32 {
    let mut sums = vdupq_n_s32(0);
    for (w, x) in w.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
        sums = add_products(sums, w, x);
    }
    vaddvq_s32(sums)
}

/// `sum_k w[k] x[k]`.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn dot16(w: &[i8; 16], x: &[i8; 16]) -> i32 {
    vaddvq_s32(add_products(vdupq_n_s32(0), w, x))
}

/// Adds sixteen products to four sums. Written as assembly because the intrinsic,
/// `vdotq_s32`, is not stable in this toolchain.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn add_products(mut sums: int32x4_t, w: &[i8; 16], x: &[i8; 16]) -> int32x4_t {
    // SAFETY: 16 readable bytes each.
    let (w, x) = unsafe { (vld1q_s8(w.as_ptr()), vld1q_s8(x.as_ptr())) };
    // SAFETY: one arithmetic instruction on registers; the processor has it, says the caller.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {w:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sums
}
