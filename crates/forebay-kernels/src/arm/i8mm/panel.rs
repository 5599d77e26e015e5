//! Sixteen weight rows at a time, in panel order, with products of 2 x 8 by 8 x 2 matrices.
//!
//! Two units of a register hold eight columns of four rows once they are zipped, and then one
//! `smmla` does the work of two `sdot` for two batch rows. The zips and the matrices' order cost
//! something too. Vector instructions for 64 columns of a panel, loads left out:
//!
//! | batch rows     | 1   | 2   | 4   | 8   |
//! |----------------|-----|-----|-----|-----|
//! | int8, `sdot`   | 64  | 128 | 256 | 512 |
//! | int8, `smmla`  |     | 144 | 224 | 384 |
//! | int4, `sdot`   | 128 | 192 | 320 | 640 |
//! | int4, `smmla`  |     | 176 | 256 | 416 |
//!
//! `usdot` would save nothing: int8 weights are signed already, and those of int4 need their
//! correction because they are stored as code + 8.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use crate::activations::GROUP;
use crate::arm::dotprod;
use crate::arm::neon::panel::AHEAD;
use forebay_core::panel::PANEL_LINE;
use std::arch::aarch64::*;
use std::arch::asm;

pub(super) use crate::arm::neon::panel::{Ints, from_ints, prefetch, transpose};

/// Eight batch rows go by with half a panel at a time: sixteen sums, weights and activations.
pub(super) const PAIRS: bool = false;
pub(super) const BATCH: usize = 8;

/// Registers with eight activations each of two batch rows: `[two batch rows][eight columns]`.
type Activations = [[int8x16_t; GROUP / 8]; BATCH / 2];

/// Lane `2 i + j` plus the dot of the `i`-th eight weights and the `j`-th eight activations.
/// The intrinsic of this instruction is not stable.
#[inline]
#[target_feature(enable = "neon,i8mm")]
fn smmla(mut sums: int32x4_t, weights: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: registers only, and the processor has the instruction.
    unsafe {
        asm!(
            "smmla {sums:v}.4s, {weights:v}.16b, {x:v}.16b",
            sums = inout(vreg) sums,
            weights = in(vreg) weights,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags)
        );
    }
    sums
}

/// Eight activations of two batch rows.
///
/// # Safety
/// Eight readable bytes in both; NEON.
#[inline(always)]
unsafe fn two_rows(x: *const i8) -> int8x16_t {
    // SAFETY: passed on to the caller.
    unsafe { vcombine_s8(vld1_s8(x), vld1_s8(x.add(GROUP))) }
}

/// As `scalar::panel::dot_int4`. Weights enter as the numbers code + 8, which are the same
/// signed and unsigned, so the sums start at `8 * negated_sum`.
#[inline(always)]
pub(super) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for the
    // instruction set.
    unsafe {
        if S < 2 {
            return dotprod::panel::dot_int4(codes, units, x, negated_sums);
        }
        let mut pairs = [[vdupq_n_s8(0); GROUP / 8]; BATCH / 2];
        let mut start = [vdupq_n_s32(0); BATCH / 2];
        for pair in 0..S / 2 {
            for block in 0..units / 2 {
                let x = x.add(2 * pair * GROUP + 8 * block);
                pairs[pair][block] = two_rows(x);
                pairs[pair][4 + block] = two_rows(x.add(32));
            }
            let [even, odd] = [8 * negated_sums[2 * pair], 8 * negated_sums[2 * pair + 1]];
            start[pair] = vld1q_s32([even, odd, even, odd].as_ptr());
        }
        // No closure: it would not have the target features, and smmla would be a call.
        let mut dots = [[[vdupq_n_s32(0); 4]; S]; P];
        for p in 0..P {
            dots[p] = whole_panel::<true, S>(codes[p], units, &pairs, start);
        }
        dots
    }
}

/// As `scalar::panel::dot_int8`.
#[inline(always)]
pub(super) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for the
    // instruction set.
    unsafe {
        if S < 4 {
            return dotprod::panel::dot_int8(codes, units, x, negated_sums);
        }
        let mut pairs = [[vdupq_n_s8(0); GROUP / 8]; BATCH / 2];
        for pair in 0..S / 2 {
            for block in 0..units / 2 {
                pairs[pair][block] = two_rows(x.add(2 * pair * GROUP + 8 * block));
            }
        }
        let start = [vdupq_n_s32(0); BATCH / 2];
        let mut dots = [[[vdupq_n_s32(0); 4]; S]; P];
        for p in 0..P {
            dots[p] = whole_panel::<false, S>(codes[p], units, &pairs, start);
        }
        dots
    }
}

/// The dots of one panel, of int4 or int8 codes, and `S` batch rows, an even number; `start`
/// is what the sums of two batch rows start at.
///
/// # Safety
/// As [`dot_int4`].
#[inline(always)]
unsafe fn whole_panel<const INT4: bool, const S: usize>(
    codes: *const u8,
    units: usize,
    x: &Activations,
    start: [int32x4_t; BATCH / 2],
) -> [Ints; S] {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut dots = [[vdupq_n_s32(0); 4]; S];
        if S > 4 {
            quarters::<INT4, 0, 2, S>(codes, units, x, start, &mut dots);
            quarters::<INT4, 2, 4, S>(codes, units, x, start, &mut dots);
        } else {
            quarters::<INT4, 0, 4, S>(codes, units, x, start, &mut dots);
        }
        dots
    }
}

/// As [`whole_panel`] for four rows each of quarters `FROM..TO`.
///
/// # Safety
/// As [`dot_int4`].
#[inline(always)]
unsafe fn quarters<const INT4: bool, const FROM: usize, const TO: usize, const S: usize>(
    codes: *const u8,
    units: usize,
    x: &Activations,
    start: [int32x4_t; BATCH / 2],
    dots: &mut [Ints; S],
) {
    debug_assert!(units.is_multiple_of(2), "columns are padded to sixteen");
    // SAFETY: passed on to the caller.
    unsafe {
        // For two batch rows, the first and the last two rows of each quarter.
        let mut sums = start.map(|start| [[start; 2]; 4]);
        for block in 0..units / 2 {
            let at = codes.wrapping_add(2 * block * PANEL_LINE);
            if FROM == 0 {
                prefetch(at.wrapping_add(AHEAD));
                prefetch(at.wrapping_add(AHEAD + PANEL_LINE));
            }
            for q in FROM..TO {
                let first = vld1q_u32(at.add(16 * q).cast());
                let second = vld1q_u32(at.add(16 * q + PANEL_LINE).cast());
                let rows = [vzip1q_u32(first, second), vzip2q_u32(first, second)];
                for (half, rows) in rows.into_iter().enumerate() {
                    let codes = vreinterpretq_u8_u32(rows);
                    if INT4 {
                        let low = vreinterpretq_s8_u8(vandq_u8(codes, vdupq_n_u8(15)));
                        let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(codes));
                        for pair in 0..S / 2 {
                            sums[pair][q][half] = smmla(sums[pair][q][half], low, x[pair][block]);
                        }
                        for pair in 0..S / 2 {
                            sums[pair][q][half] = smmla(sums[pair][q][half], high, x[pair][4 + block]);
                        }
                    } else {
                        let weights = vreinterpretq_s8_u8(codes);
                        for pair in 0..S / 2 {
                            sums[pair][q][half] = smmla(sums[pair][q][half], weights, x[pair][block]);
                        }
                    }
                }
            }
        }
        for pair in 0..S / 2 {
            for q in FROM..TO {
                let [first, second] = sums[pair][q];
                dots[2 * pair][q] = vuzp1q_s32(first, second);
                dots[2 * pair + 1][q] = vuzp2q_s32(first, second);
            }
        }
    }
}
