//! Sixteen weight rows at a time, in panel order, with VNNI.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use crate::activations::GROUP;
use forebay_core::panel::PANEL_LINE;
use std::arch::x86_64::*;

/// Thirty-two registers hold sixteen sums, the weights and the activations.
pub(super) const PAIRS: bool = true;
pub(super) const BATCH: usize = 8;

pub(super) type Ints = __m512i;

/// How far ahead of its use a panel is asked for: about two microseconds' worth of bytes
/// are under way at once on a fast memory, and the hardware stops at the end of a page.
const AHEAD: usize = 4096;

#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn from_ints(ints: Ints) -> __m512 {
    _mm512_cvtepi32_ps(ints)
}

/// Four activations, in every lane.
///
/// # Safety
/// Four readable bytes; AVX-512.
#[inline(always)]
unsafe fn broadcast(x: *const i8) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe { _mm512_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// As `scalar::panel::dot_int4`. Weights enter as the unsigned numbers code + 8, so the sums
/// start at `8 * negated_sum`.
#[inline(always)]
pub(super) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for VNNI.
    unsafe {
        let mask = _mm512_set1_epi8(15);
        let mut dots = [negated_sums.map(|sum| _mm512_slli_epi32(_mm512_set1_epi32(sum), 3)); P];
        for u in 0..units {
            let mut low = [_mm512_setzero_si512(); P];
            let mut high = low;
            for p in 0..P {
                let at = codes[p].wrapping_add(u * PANEL_LINE);
                prefetch(at.wrapping_add(AHEAD));
                let both = _mm512_loadu_si512(at.cast());
                low[p] = _mm512_and_si512(both, mask);
                high[p] = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            }
            for s in 0..S {
                let even = broadcast(x.add(s * GROUP + 4 * u));
                for p in 0..P {
                    dots[p][s] = _mm512_dpbusd_epi32(dots[p][s], low[p], even);
                }
            }
            for s in 0..S {
                let odd = broadcast(x.add(s * GROUP + 32 + 4 * u));
                for p in 0..P {
                    dots[p][s] = _mm512_dpbusd_epi32(dots[p][s], high[p], odd);
                }
            }
        }
        dots
    }
}

/// As `scalar::panel::dot_int8`. Weights enter as the unsigned numbers code + 128.
#[inline(always)]
pub(super) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for VNNI.
    unsafe {
        let flip = _mm512_set1_epi8(-128);
        let mut dots = [negated_sums.map(|sum| _mm512_slli_epi32(_mm512_set1_epi32(sum), 7)); P];
        for u in 0..units {
            let mut weights = [_mm512_setzero_si512(); P];
            for p in 0..P {
                let at = codes[p].wrapping_add(u * PANEL_LINE);
                prefetch(at.wrapping_add(AHEAD));
                weights[p] = _mm512_xor_si512(_mm512_loadu_si512(at.cast()), flip);
            }
            for s in 0..S {
                let x = broadcast(x.add(s * GROUP + 4 * u));
                for p in 0..P {
                    dots[p][s] = _mm512_dpbusd_epi32(dots[p][s], weights[p], x);
                }
            }
        }
        dots
    }
}

/// Asks for the cache line at this address.
#[inline(always)]
pub(super) fn prefetch(at: *const u8) {
    // SAFETY: a prefetch never faults, and every x86-64 processor has it.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
}

/// As `scalar::panel::transpose`: words inside quarters first, then the quarters.
#[inline(always)]
pub(super) unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
    // SAFETY: 64 readable bytes each, 64 writable bytes a line; the caller has checked for AVX-512.
    unsafe {
        // A loop, because the compiler does not inline the closure of a map over sixteen.
        let mut r = [_mm512_setzero_si512(); 16];
        for i in 0..16 {
            r[i] = _mm512_loadu_si512(start.add(i * stride).cast());
        }
        let mut fours = [_mm512_setzero_si512(); 16];
        for i in 0..4 {
            let [a, b, c, d] = [r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]];
            let (ab, cd) = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
            // `fours[4 w + i]`: word `4 q + w` of rows `4 i..4 i + 4`, for quarter `q`.
            fours[i] = _mm512_unpacklo_epi64(ab, cd);
            fours[4 + i] = _mm512_unpackhi_epi64(ab, cd);
            fours[8 + i] = _mm512_unpacklo_epi64(ab_high, cd_high);
            fours[12 + i] = _mm512_unpackhi_epi64(ab_high, cd_high);
        }
        for w in 0..4 {
            let [a, b, c, d] = [fours[4 * w], fours[4 * w + 1], fours[4 * w + 2], fours[4 * w + 3]];
            let (ab, cd) = (_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(c, d, 0x88));
            let (ab_odd, cd_odd) = (_mm512_shuffle_i32x4(a, b, 0xDD), _mm512_shuffle_i32x4(c, d, 0xDD));
            let lines = [
                _mm512_shuffle_i32x4(ab, cd, 0x88),
                _mm512_shuffle_i32x4(ab_odd, cd_odd, 0x88),
                _mm512_shuffle_i32x4(ab, cd, 0xDD),
                _mm512_shuffle_i32x4(ab_odd, cd_odd, 0xDD),
            ];
            for (q, line) in lines.into_iter().enumerate() {
                _mm512_storeu_si512(out.as_mut_ptr().add((4 * q + w) * PANEL_LINE).cast(), line);
            }
        }
    }
}
