//! The limits of AArch64: NEON, alone and with its extensions of integer products.

use super::{Chains, plain};
use std::arch::aarch64::*;
use std::arch::asm;

/// Enough to fill four units whose result comes after four cycles.
const CHAINS: usize = 16;
/// Bytes that a read asks for ahead of their use.
const AHEAD: usize = 2048;

pub(super) static I8MM: Chains = Chains {
    read: read_neon,
    integer: integer_i8mm,
    float: float_neon,
    integer_name: "smmla, 128 bits",
    float_name: "fmla, 128 bits",
};

pub(super) static DOTPROD: Chains = Chains {
    read: read_neon,
    integer: integer_dotprod,
    float: float_neon,
    integer_name: "sdot, 128 bits",
    float_name: "fmla, 128 bits",
};

pub(super) static NEON: Chains = Chains {
    read: read_neon,
    integer: integer_neon,
    float: float_neon,
    integer_name: "smull, smlal2 and sadalp, 128 bits",
    float_name: "fmla, 128 bits",
};

/// Makes the compiler think that a register changed: it can neither merge chains nor work
/// out their result.
macro_rules! renew {
    ($value:expr) => {
        // SAFETY: no instruction at all.
        unsafe { asm!("/* {0:v} */", inout(vreg) $value, options(nomem, nostack, preserves_flags)) }
    };
}

#[target_feature(enable = "neon")]
fn read_neon(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<128>();
    let mut sums = [vdupq_n_u64(0); 8];
    for block in blocks {
        for half in [0, 64] {
            let ahead = block.as_ptr().wrapping_add(half + AHEAD);
            // SAFETY: a prefetch may name any address.
            unsafe {
                asm!("prfm pldl1keep, [{0}]", in(reg) ahead, options(nostack, preserves_flags, readonly))
            };
        }
        for (i, sum) in sums.iter_mut().enumerate() {
            // SAFETY: 16 readable bytes of the block.
            let words = unsafe { vld1q_u8(block.as_ptr().add(16 * i)) };
            *sum = vaddq_u64(*sum, vreinterpretq_u64_u8(words));
        }
    }
    sums.into_iter().fold(plain::read(rest), |total, sum| total.wrapping_add(vaddvq_u64(sum)))
}

#[target_feature(enable = "neon,i8mm")]
fn integer_i8mm(steps: u32) -> u64 {
    let mut sums = [vdupq_n_s32(0); CHAINS];
    let ones = vdupq_n_s8(1);
    for _ in 0..steps {
        for sum in &mut sums {
            // SAFETY: registers only, and the processor has the instruction.
            unsafe {
                asm!(
                    "smmla {sum:v}.4s, {ones:v}.16b, {ones:v}.16b",
                    sum = inout(vreg) *sum,
                    ones = in(vreg) ones,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            renew!(*sum);
        }
    }
    sums.into_iter().map(|sum| u64::from(vaddvq_s32(sum) as u32)).sum()
}

#[target_feature(enable = "neon,dotprod")]
fn integer_dotprod(steps: u32) -> u64 {
    let mut sums = [vdupq_n_s32(0); CHAINS];
    let ones = vdupq_n_s8(1);
    for _ in 0..steps {
        for sum in &mut sums {
            // SAFETY: registers only, and the processor has the instruction.
            unsafe {
                asm!(
                    "sdot {sum:v}.4s, {ones:v}.16b, {ones:v}.16b",
                    sum = inout(vreg) *sum,
                    ones = in(vreg) ones,
                    options(pure, nomem, nostack, preserves_flags)
                );
            }
            renew!(*sum);
        }
    }
    sums.into_iter().map(|sum| u64::from(vaddvq_s32(sum) as u32)).sum()
}

#[target_feature(enable = "neon")]
fn integer_neon(steps: u32) -> u64 {
    let mut sums = [vdupq_n_s32(0); CHAINS];
    let mut ones = vdupq_n_s8(1);
    for _ in 0..steps {
        for sum in &mut sums {
            renew!(ones);
            let low = vmull_s8(vget_low_s8(ones), vget_low_s8(ones));
            *sum = vpadalq_s16(*sum, vmlal_high_s8(low, ones, ones));
        }
    }
    sums.into_iter().map(|sum| u64::from(vaddvq_s32(sum) as u32)).sum()
}

#[target_feature(enable = "neon")]
fn float_neon(steps: u32) -> u64 {
    let mut sums = [vdupq_n_f32(0.0); CHAINS];
    let one = vdupq_n_f32(1.0);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = vfmaq_f32(*sum, one, one);
            renew!(*sum);
        }
    }
    sums.into_iter().map(|sum| vaddvq_f32(sum) as u64).sum()
}
