//! Exact integer dot products with `sdot`.

use crate::activations::GROUP;
use crate::portable::QuantGroup;
use std::arch::aarch64::*;
use std::arch::asm;

/// One activation group against four weight rows.
#[inline]
#[target_feature(enable = "neon,dotprod")]
pub(super) fn quad(w: [&[i8; GROUP]; 4], x: QuantGroup<'_>, scales: [f32; 4], sums: [f32; 4]) -> [f32; 4] {
    let [a, b, c, d] = w.map(|w| partial_sums(w, x.codes));
    // Two rounds of neighbours leave one number per row.
    let dots = vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d));
    // SAFETY: four readable values each.
    let (scales, sums) = unsafe { (vld1q_f32(scales.as_ptr()), vld1q_f32(sums.as_ptr())) };
    let sums = vfmaq_f32(sums, vcvtq_f32_s32(dots), vmulq_n_f32(scales, x.scale));
    let mut out = [0f32; 4];
    // SAFETY: four writable values.
    unsafe { vst1q_f32(out.as_mut_ptr(), sums) };
    out
}

/// Four numbers that add up to `sum_k w[k] x[k]`. The instruction is written as assembly
/// because its intrinsic, `vdotq_s32`, is not stable in this toolchain.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn partial_sums(w: &[i8; GROUP], x: &[i8; GROUP]) -> int32x4_t {
    let mut sums = vdupq_n_s32(0);
    for (w, x) in w.as_chunks::<16>().0.iter().zip(x.as_chunks::<16>().0) {
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
    }
    sums
}
