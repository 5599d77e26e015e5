//! Sixteen weight rows at a time, in panel order: four quarters of four rows.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use crate::activations::GROUP;
use crate::arm::neon::lanes::Lanes;
use forebay_core::panel::PANEL_LINE;
use std::arch::aarch64::*;
use std::arch::asm;

/// Two batch rows take sixteen of the 32 registers, because a row's products lie in two lanes
/// until the end of the segment; so four batch rows go by as two pairs, and so would panels.
pub(crate) const PAIRS: bool = false;
pub(crate) const BATCH: usize = 4;

/// Register `q` holds rows `4 q..4 q + 4`.
pub(crate) type Ints = [int32x4_t; 4];

/// How far ahead of its use a panel is asked for.
pub(crate) const AHEAD: usize = 4096;

#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn from_ints(ints: Ints) -> Lanes {
    [vcvtq_f32_s32(ints[0]), vcvtq_f32_s32(ints[1]), vcvtq_f32_s32(ints[2]), vcvtq_f32_s32(ints[3])]
}

/// Four activations, in every lane.
///
/// # Safety
/// Four readable bytes; NEON.
#[inline(always)]
unsafe fn broadcast(x: *const i8) -> int8x16_t {
    // SAFETY: passed on to the caller.
    unsafe { vreinterpretq_s8_s32(vdupq_n_s32(x.cast::<i32>().read_unaligned())) }
}

/// As `scalar::panel::dot_int4`.
#[inline(always)]
pub(crate) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for NEON.
    unsafe {
        let mut dots = [[[vdupq_n_s32(0); 4]; S]; P];
        for p in 0..P {
            for pair in 0..S / 2 {
                let s = 2 * pair;
                let x = x.add(s * GROUP);
                let sums = [negated_sums[s], negated_sums[s + 1]];
                [dots[p][s], dots[p][s + 1]] = some_int4(codes[p], units, x, sums, s == 0);
            }
            if S % 2 == 1 {
                let last = S - 1;
                let x = x.add(last * GROUP);
                [dots[p][last]] = some_int4(codes[p], units, x, [negated_sums[last]], last == 0);
            }
        }
        dots
    }
}

/// One panel and at most two batch rows. Weights enter as the numbers code + 8, 0 to 15. A lane
/// of the 16-bit sums takes two products a unit, sixteen a segment: 16 * 15 * 127 = 30480 fits.
#[inline(always)]
unsafe fn some_int4<const S: usize>(
    codes: *const u8,
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
    first: bool,
) -> [Ints; S] {
    debug_assert!(units <= 8, "a segment lies inside one activation group");
    // SAFETY: passed on to the caller.
    unsafe {
        let mask = vdupq_n_s8(15);
        let mut sums = [[[vdupq_n_s16(0); 2]; 4]; S];
        for u in 0..units {
            let at = codes.wrapping_add(u * PANEL_LINE);
            if first {
                prefetch(at.wrapping_add(AHEAD));
            }
            let (mut even, mut odd) = ([vdupq_n_s8(0); S], [vdupq_n_s8(0); S]);
            for s in 0..S {
                even[s] = broadcast(x.add(s * GROUP + 4 * u));
                odd[s] = broadcast(x.add(s * GROUP + 32 + 4 * u));
            }
            for q in 0..4 {
                let both = vld1q_s8(at.add(16 * q).cast());
                let low = vandq_s8(both, mask);
                let high = vreinterpretq_s8_u8(vshrq_n_u8::<4>(vreinterpretq_u8_s8(both)));
                for s in 0..S {
                    let [a, b] = sums[s][q];
                    let a = vmlal_s8(a, vget_low_s8(low), vget_low_s8(even[s]));
                    let b = vmlal_high_s8(b, low, even[s]);
                    let a = vmlal_s8(a, vget_low_s8(high), vget_low_s8(odd[s]));
                    let b = vmlal_high_s8(b, high, odd[s]);
                    sums[s][q] = [a, b];
                }
            }
        }
        let mut dots = [[vdupq_n_s32(0); 4]; S];
        for s in 0..S {
            let shift = vdupq_n_s32(8 * negated_sums[s]);
            for q in 0..4 {
                let [a, b] = sums[s][q];
                dots[s][q] = vaddq_s32(vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)), shift);
            }
        }
        dots
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
    // SAFETY: the caller's panels and activations cover these units; it has checked for NEON.
    unsafe {
        let mut dots = [[[vdupq_n_s32(0); 4]; S]; P];
        for p in 0..P {
            for pair in 0..S / 2 {
                let s = 2 * pair;
                [dots[p][s], dots[p][s + 1]] = some_int8(codes[p], units, x.add(s * GROUP), s == 0);
            }
            if S % 2 == 1 {
                let last = S - 1;
                [dots[p][last]] = some_int8(codes[p], units, x.add(last * GROUP), last == 0);
            }
        }
        dots
    }
}

/// One panel and at most two batch rows. With |weight| <= 128 and |activation| <= 127, two
/// products add up to at most 32512 in 16 bits: those of two units, after which they must widen.
#[inline(always)]
unsafe fn some_int8<const S: usize>(codes: *const u8, units: usize, x: *const i8, first: bool) -> [Ints; S] {
    debug_assert!(units.is_multiple_of(2), "columns are padded to sixteen");
    // SAFETY: passed on to the caller.
    unsafe {
        let mut sums = [[[vdupq_n_s32(0); 2]; 4]; S];
        for two in 0..units / 2 {
            let at = codes.wrapping_add(2 * two * PANEL_LINE);
            if first {
                prefetch(at.wrapping_add(AHEAD));
                prefetch(at.wrapping_add(AHEAD + PANEL_LINE));
            }
            let (mut here, mut next) = ([vdupq_n_s8(0); S], [vdupq_n_s8(0); S]);
            for s in 0..S {
                here[s] = broadcast(x.add(s * GROUP + 8 * two));
                next[s] = broadcast(x.add(s * GROUP + 8 * two + 4));
            }
            for q in 0..4 {
                let w = vld1q_s8(at.add(16 * q).cast());
                let v = vld1q_s8(at.add(16 * q + PANEL_LINE).cast());
                for s in 0..S {
                    let a = vmull_s8(vget_low_s8(w), vget_low_s8(here[s]));
                    let b = vmull_high_s8(w, here[s]);
                    let a = vmlal_s8(a, vget_low_s8(v), vget_low_s8(next[s]));
                    let b = vmlal_high_s8(b, v, next[s]);
                    sums[s][q] = [vpadalq_s16(sums[s][q][0], a), vpadalq_s16(sums[s][q][1], b)];
                }
            }
        }
        sums.map(|sums| sums.map(|[a, b]| vpaddq_s32(a, b)))
    }
}

/// Asks for the cache line at this address.
#[inline(always)]
pub(crate) fn prefetch(at: *const u8) {
    // SAFETY: a prefetch may name any address, and changes nothing that a program sees.
    unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) at.addr(), options(nomem, nostack, preserves_flags)) }
}

/// As `scalar::panel::transpose`, in sixteen blocks of four words by four rows.
#[inline(always)]
pub(crate) unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
    let lines_start = out.as_mut_ptr();
    for quarter in 0..4 {
        for four in 0..4 {
            // SAFETY: 64 readable bytes a row, 64 writable bytes a line; the caller has checked for NEON.
            unsafe {
                let row = |i: usize| vld1q_u32(start.add((4 * quarter + i) * stride + 16 * four).cast());
                let (a, b, c, d) = (row(0), row(1), row(2), row(3));
                // Words 0 and 2 of two rows, then words 1 and 3.
                let (ab, cd) = (vtrn1q_u32(a, b), vtrn1q_u32(c, d));
                let (ab_odd, cd_odd) = (vtrn2q_u32(a, b), vtrn2q_u32(c, d));
                let [ab, cd, ab_odd, cd_odd] = [ab, cd, ab_odd, cd_odd].map(|v| vreinterpretq_u64_u32(v));
                let lines = [
                    vtrn1q_u64(ab, cd),
                    vtrn1q_u64(ab_odd, cd_odd),
                    vtrn2q_u64(ab, cd),
                    vtrn2q_u64(ab_odd, cd_odd),
                ];
                for (word, line) in lines.into_iter().enumerate() {
                    let at = lines_start.add((4 * four + word) * PANEL_LINE + 16 * quarter);
                    vst1q_u8(at, vreinterpretq_u8_u64(line));
                }
            }
        }
    }
}
