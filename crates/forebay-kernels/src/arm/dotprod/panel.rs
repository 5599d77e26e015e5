//! Sixteen weight rows at a time, in panel order, with dot products of four bytes.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use crate::activations::GROUP;
use crate::arm::neon::panel::AHEAD;
use forebay_core::panel::PANEL_LINE;
use std::arch::aarch64::*;
use std::arch::asm;

pub(crate) use crate::arm::neon::panel::{Ints, from_ints, prefetch, transpose};

/// Thirty-two registers: sixteen sums of four batch rows, four weights and four activations,
/// or two of each kind of nibble.
pub(crate) const PAIRS: bool = false;
pub(crate) const BATCH: usize = 4;

/// Each lane plus the dot of its four weights with four activations, those of word `WORD` of `x`.
/// The intrinsic of this instruction is not stable.
#[inline]
#[target_feature(enable = "neon,dotprod")]
fn sdot<const WORD: usize>(mut sums: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers only, and the processor has the instruction.
    unsafe {
        asm!(
            "sdot {sums:v}.4s, {weights:v}.16b, {x:v}.4b[{word}]",
            sums = inout(vreg) sums,
            weights = in(vreg) weights,
            x = in(vreg) x,
            word = const WORD,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// As `scalar::panel::dot_int4`. Weights enter as the numbers code + 8, which are the same
/// signed and unsigned, so the sums start at `8 * negated_sum`.
#[inline(always)]
pub(crate) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    debug_assert!(units.is_multiple_of(2), "columns are padded to sixteen");
    // SAFETY: the caller's panels and activations cover these units; it has checked for the
    // instruction set.
    unsafe {
        let mut dots = [negated_sums.map(|sum| [vdupq_n_s32(8 * sum); 4]); P];
        let mut u = 0;
        while u + 4 <= units {
            let (mut even, mut odd) = ([vdupq_n_s8(0); S], [vdupq_n_s8(0); S]);
            for s in 0..S {
                even[s] = vld1q_s8(x.add(s * GROUP + 4 * u));
                odd[s] = vld1q_s8(x.add(s * GROUP + 32 + 4 * u));
            }
            for p in 0..P {
                let at = codes[p].wrapping_add(u * PANEL_LINE);
                unit_int4::<S, 0>(at, &even, &odd, &mut dots[p]);
                unit_int4::<S, 1>(at.add(PANEL_LINE), &even, &odd, &mut dots[p]);
                unit_int4::<S, 2>(at.add(2 * PANEL_LINE), &even, &odd, &mut dots[p]);
                unit_int4::<S, 3>(at.add(3 * PANEL_LINE), &even, &odd, &mut dots[p]);
            }
            u += 4;
        }
        if u < units {
            // Half a register of activations is left: no more may be readable.
            let (mut even, mut odd) = ([vdupq_n_s8(0); S], [vdupq_n_s8(0); S]);
            for s in 0..S {
                even[s] = eight(x.add(s * GROUP + 4 * u));
                odd[s] = eight(x.add(s * GROUP + 32 + 4 * u));
            }
            for p in 0..P {
                let at = codes[p].wrapping_add(u * PANEL_LINE);
                unit_int4::<S, 0>(at, &even, &odd, &mut dots[p]);
                unit_int4::<S, 1>(at.add(PANEL_LINE), &even, &odd, &mut dots[p]);
            }
        }
        dots
    }
}

/// Eight activations and eight zeros.
///
/// # Safety
/// Eight readable bytes; NEON.
#[inline(always)]
pub(crate) unsafe fn eight(x: *const i8) -> int8x16_t {
    // SAFETY: passed on to the caller.
    unsafe { vcombine_s8(vld1_s8(x), vdup_n_s8(0)) }
}

/// Adds one unit of one panel, the activations being words `WORD` of `even` and `odd`.
///
/// # Safety
/// A readable unit; the instruction set.
#[inline(always)]
unsafe fn unit_int4<const S: usize, const WORD: usize>(
    at: *const u8,
    even: &[int8x16_t; S],
    odd: &[int8x16_t; S],
    dots: &mut [Ints; S],
) {
    prefetch(at.wrapping_add(AHEAD));
    for q in 0..4 {
        // SAFETY: passed on to the caller.
        unsafe {
            let both = vld1q_u8(at.add(16 * q));
            let low = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15)));
            let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(both));
            for s in 0..S {
                dots[s][q] = sdot::<WORD>(dots[s][q], low, even[s]);
            }
            for s in 0..S {
                dots[s][q] = sdot::<WORD>(dots[s][q], high, odd[s]);
            }
        }
    }
}

/// As `scalar::panel::dot_int8`.
#[inline(always)]
pub(crate) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    _negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    debug_assert!(units.is_multiple_of(4), "columns are padded to sixteen");
    // SAFETY: the caller's panels and activations cover these units; it has checked for the
    // instruction set.
    unsafe {
        let mut dots = [[[vdupq_n_s32(0); 4]; S]; P];
        for four in 0..units / 4 {
            let mut sixteen = [vdupq_n_s8(0); S];
            for s in 0..S {
                sixteen[s] = vld1q_s8(x.add(s * GROUP + 16 * four));
            }
            for p in 0..P {
                let at = codes[p].wrapping_add(4 * four * PANEL_LINE);
                unit_int8::<S, 0>(at, &sixteen, &mut dots[p]);
                unit_int8::<S, 1>(at.add(PANEL_LINE), &sixteen, &mut dots[p]);
                unit_int8::<S, 2>(at.add(2 * PANEL_LINE), &sixteen, &mut dots[p]);
                unit_int8::<S, 3>(at.add(3 * PANEL_LINE), &sixteen, &mut dots[p]);
            }
        }
        dots
    }
}

/// Adds one unit of one panel, the activations being word `WORD` of `x`.
///
/// # Safety
/// A readable unit; the instruction set.
#[inline(always)]
unsafe fn unit_int8<const S: usize, const WORD: usize>(
    at: *const u8,
    x: &[int8x16_t; S],
    dots: &mut [Ints; S],
) {
    prefetch(at.wrapping_add(AHEAD));
    for q in 0..4 {
        // SAFETY: passed on to the caller.
        unsafe {
            let weights = vld1q_s8(at.add(16 * q).cast());
            for s in 0..S {
                dots[s][q] = sdot::<WORD>(dots[s][q], weights, x[s]);
            }
        }
    }
}
