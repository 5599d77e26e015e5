//! Sixteen weight rows at a time, in panel order: two halves of eight rows.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use crate::activations::GROUP;
use forebay_core::panel::PANEL_LINE;
use std::arch::x86_64::*;

/// Sixteen registers: one half panel, four batch rows with two sums each, weights and activations.
pub(super) const PAIRS: bool = false;
pub(super) const BATCH: usize = 4;

pub(super) type Ints = [__m256i; 2];

/// How far ahead of its use a panel is asked for.
const AHEAD: usize = 4096;

#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn from_ints(ints: Ints) -> [__m256; 2] {
    [_mm256_cvtepi32_ps(ints[0]), _mm256_cvtepi32_ps(ints[1])]
}

/// Four activations, in every lane.
///
/// # Safety
/// Four readable bytes; AVX2.
#[inline(always)]
unsafe fn broadcast(x: *const i8) -> __m256i {
    // SAFETY: passed on to the caller.
    unsafe { _mm256_set1_epi32(x.cast::<i32>().read_unaligned()) }
}

/// As `scalar::panel::dot_int4`. Up to two batch rows have registers for both halves of a panel.
#[inline(always)]
pub(super) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: passed on to the caller.
    unsafe {
        if S <= 2 {
            halves::<2, P, S>(codes, units, x, negated_sums)
        } else {
            halves::<1, P, S>(codes, units, x, negated_sums)
        }
    }
}

/// The same, `H` halves at a time. Weights enter as the unsigned numbers code + 8; the sums of
/// two products stay below 2 * 15 * 127, and eight of those fit 16 bits.
#[inline(always)]
unsafe fn halves<const H: usize, const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    debug_assert!(units <= 8, "a segment lies inside one activation group");
    // SAFETY: the caller's panels and activations cover these units; it has checked for AVX2.
    unsafe {
        let (mask, ones) = (_mm256_set1_epi8(15), _mm256_set1_epi16(1));
        let mut dots = [[[_mm256_setzero_si256(); 2]; S]; P];
        for p in 0..P {
            for half in (0..2).step_by(H) {
                let mut evens = [[_mm256_setzero_si256(); H]; S];
                let mut odds = evens;
                for u in 0..units {
                    let at = codes[p].wrapping_add(u * PANEL_LINE + 32 * half);
                    if half == 0 {
                        prefetch(at.wrapping_add(AHEAD));
                    }
                    let mut low = [_mm256_setzero_si256(); H];
                    let mut high = low;
                    for h in 0..H {
                        let both = _mm256_loadu_si256(at.wrapping_add(32 * h).cast());
                        low[h] = _mm256_and_si256(both, mask);
                        high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
                    }
                    for s in 0..S {
                        let even = broadcast(x.add(s * GROUP + 4 * u));
                        let odd = broadcast(x.add(s * GROUP + 32 + 4 * u));
                        for h in 0..H {
                            evens[s][h] = _mm256_add_epi16(evens[s][h], _mm256_maddubs_epi16(low[h], even));
                            odds[s][h] = _mm256_add_epi16(odds[s][h], _mm256_maddubs_epi16(high[h], odd));
                        }
                    }
                }
                for s in 0..S {
                    let shift = _mm256_slli_epi32(_mm256_set1_epi32(negated_sums[s]), 3);
                    for h in 0..H {
                        let even = _mm256_madd_epi16(evens[s][h], ones);
                        let sums = _mm256_add_epi32(even, _mm256_madd_epi16(odds[s][h], ones));
                        dots[p][s][half + h] = _mm256_add_epi32(sums, shift);
                    }
                }
            }
        }
        dots
    }
}

/// As `scalar::panel::dot_int8`. |w| <= 128 as an unsigned byte times x with w's sign: two
/// products are at most 2 * 128 * 127 = 32512, so the 16-bit sums never saturate.
#[inline(always)]
pub(super) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
    _negated_sums: [i32; S],
) -> [[Ints; S]; P] {
    // SAFETY: the caller's panels and activations cover these units; it has checked for AVX2.
    unsafe {
        let ones = _mm256_set1_epi16(1);
        let mut dots = [[[_mm256_setzero_si256(); 2]; S]; P];
        for p in 0..P {
            for u in 0..units {
                for half in 0..2 {
                    let at = codes[p].wrapping_add(u * PANEL_LINE + 32 * half);
                    if half == 0 {
                        prefetch(at.wrapping_add(AHEAD));
                    }
                    let weights = _mm256_loadu_si256(at.cast());
                    let sizes = _mm256_abs_epi8(weights);
                    for s in 0..S {
                        let signed = _mm256_sign_epi8(broadcast(x.add(s * GROUP + 4 * u)), weights);
                        let pairs = _mm256_maddubs_epi16(sizes, signed);
                        dots[p][s][half] = _mm256_add_epi32(dots[p][s][half], _mm256_madd_epi16(pairs, ones));
                    }
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

/// As `scalar::panel::transpose`, in four blocks of eight words by eight rows.
#[inline(always)]
pub(super) unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
    for half in 0..2 {
        for eight in 0..2 {
            // SAFETY: 64 readable bytes a row, 64 writable bytes a line; the caller has checked for AVX2.
            unsafe {
                let mut r = [_mm256_setzero_si256(); 8];
                for i in 0..8 {
                    r[i] = _mm256_loadu_si256(start.add((8 * half + i) * stride + 32 * eight).cast());
                }
                let lines = out.as_mut_ptr().add(8 * eight * PANEL_LINE + 32 * half);
                transpose_eight(r, lines);
            }
        }
    }
}

/// Word `i` of row `j` becomes word `j` of line `i`, lines being [`PANEL_LINE`] apart.
#[inline(always)]
unsafe fn transpose_eight(r: [__m256i; 8], out: *mut u8) {
    // SAFETY: 32 writable bytes a line; the caller has checked for AVX2.
    unsafe {
        let mut fours = [_mm256_setzero_si256(); 8];
        for i in 0..2 {
            let [a, b, c, d] = [r[4 * i], r[4 * i + 1], r[4 * i + 2], r[4 * i + 3]];
            let (ab, cd) = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let (ab_high, cd_high) = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            fours[i] = _mm256_unpacklo_epi64(ab, cd);
            fours[2 + i] = _mm256_unpackhi_epi64(ab, cd);
            fours[4 + i] = _mm256_unpacklo_epi64(ab_high, cd_high);
            fours[6 + i] = _mm256_unpackhi_epi64(ab_high, cd_high);
        }
        for w in 0..4 {
            let (a, b) = (fours[2 * w], fours[2 * w + 1]);
            let first = _mm256_permute2x128_si256(a, b, 0x20);
            let second = _mm256_permute2x128_si256(a, b, 0x31);
            _mm256_storeu_si256(out.add(w * PANEL_LINE).cast(), first);
            _mm256_storeu_si256(out.add((4 + w) * PANEL_LINE).cast(), second);
        }
    }
}
