//! Coded panels, four side by side, with VBMI: all states and tables stay in registers (performance spec 2.6).
//!
//! A step of a panel is one code of each of its 64 states, 32 to a register. What the lowest seven bits of a state
//! stand for is looked up with two-register byte permutations, for both registers at once; states that fall below
//! 256 take the next bytes of their stream in order, which is what an expansion does. A step waits for the one
//! before, so several panels are needed to keep the processor busy.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use forebay_core::coded::{CodedView, EXCEPTION, IndexScales, STREAM_STATES, Scales, Slots, code_runs};
use forebay_core::panel::{PANEL_LINE, PanelShape};
use std::arch::x86_64::*;

/// Lines between two looks at how far the streams are.
const LINES: usize = 8;
/// What is asked for ahead of its use, in bytes of a stream.
const AHEAD: usize = 512;

/// The panels from `first` on that `out` has room for: as many as [`CodedView::decode_panel`] one by one, and the
/// same bytes, whatever the streams hold.
///
/// # Safety
/// The processor has AVX-512 F, BW, VL, VBMI and VBMI2, and POPCNT.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt")]
pub(crate) unsafe fn decode(view: &CodedView<'_>, first: usize, out: &mut [u8]) {
    let (shape, slots) = (view.shape(), view.slots());
    let len = shape.panel_bytes();
    for (i, out) in out.chunks_mut(4 * len).enumerate() {
        let first = first + 4 * i;
        // SAFETY: passed on to the caller.
        unsafe {
            match out.len() / len {
                4 => panels::<4>(view, &slots, first, out),
                3 => panels::<3>(view, &slots, first, out),
                2 => panels::<2>(view, &slots, first, out),
                1 => panels::<1>(view, &slots, first, out),
                _ => {}
            }
        }
        for (j, out) in out.chunks_exact_mut(len).enumerate() {
            match view.scales(first + j) {
                Scales::Lines(_) => view.decode_scales(first + j, out),
                // SAFETY: passed on to the caller.
                Scales::Index(scales) => unsafe { write_scales(&scales, &shape, out) },
            }
        }
    }
}

/// The tables of [`Slots`], two registers each.
struct Tables {
    code: [__m512i; 2],
    frequency: [__m512i; 2],
    rank: [__m512i; 2],
}

/// Where some panels are in their streams.
struct States<const G: usize> {
    even: [__m512i; G],
    odd: [__m512i; G],
    even_at: [*const u8; G],
    odd_at: [*const u8; G],
}

/// # Safety
/// As [`decode`]; `out` has the bytes of `G` panels.
#[inline(always)]
unsafe fn panels<const G: usize>(view: &CodedView<'_>, slots: &Slots, first: usize, out: &mut [u8]) {
    let (shape, bytes) = (view.shape(), view.bytes());
    assert_eq!(out.len(), G * shape.panel_bytes());
    // The last place with 32 bytes to read: no stream goes further.
    let last = bytes.as_ptr().wrapping_add(bytes.len() - STREAM_STATES);
    // SAFETY: passed on to the caller; tables have 128 bytes each, chains 128 bytes of states.
    unsafe {
        let both = |table: &[u8; 128]| {
            let start = table.as_ptr();
            [_mm512_loadu_si512(start.cast()), _mm512_loadu_si512(start.add(64).cast())]
        };
        let tables =
            Tables { code: both(&slots.code), frequency: both(&slots.frequency), rank: both(&slots.rank) };
        let mut states = States::<G> {
            even: [_mm512_setzero_si512(); G],
            odd: [_mm512_setzero_si512(); G],
            even_at: [last; G],
            odd_at: [last; G],
        };
        for g in 0..G {
            let chain = view.chain(first + g);
            states.even[g] = _mm512_loadu_si512(chain.states.as_ptr().cast());
            states.odd[g] = _mm512_loadu_si512(chain.states.as_ptr().add(64).cast());
            states.even_at[g] = bytes[chain.streams[0]..].as_ptr().min(last);
            states.odd_at[g] = bytes[chain.streams[1]..].as_ptr().min(last);
        }
        for run in code_runs(&shape) {
            for start in run.clone().step_by(LINES * PANEL_LINE) {
                let lines = (run.end - start).min(LINES * PANEL_LINE) / PANEL_LINE;
                // A line takes 64 bytes of a stream at most, one for each of its codes.
                let far = last.wrapping_sub(lines * 64);
                let is_far = |at: &*const u8| *at <= far;
                let to = out.as_mut_ptr().add(start);
                let free = bytes.len() - STREAM_STATES >= lines * 64
                    && states.even_at.iter().all(is_far)
                    && states.odd_at.iter().all(is_far);
                if free {
                    some_lines::<G, false>(&tables, &mut states, last, to, shape.panel_bytes(), lines);
                } else {
                    some_lines::<G, true>(&tables, &mut states, last, to, shape.panel_bytes(), lines);
                }
            }
        }
    }
}

/// The next lines of each panel, the first panel's at `out`, the next one's `stride` bytes further. With `CHECK`
/// no stream passes `last`.
///
/// # Safety
/// As [`decode`]; there are as many writable lines. 32 bytes can be read up to `last`, which no stream has passed
/// and, without `CHECK`, none can reach.
#[inline(always)]
unsafe fn some_lines<const G: usize, const CHECK: bool>(
    tables: &Tables,
    states: &mut States<G>,
    last: *const u8,
    out: *mut u8,
    stride: usize,
    lines: usize,
) {
    // SAFETY: passed on to the caller.
    unsafe {
        for line in 0..lines {
            let mut low = [_mm512_setzero_si512(); G];
            for g in 0..G {
                low[g] = step::<G, CHECK>(tables, states, g, last);
            }
            for g in 0..G {
                let high = step::<G, CHECK>(tables, states, g, last);
                let both = _mm512_or_si512(low[g], _mm512_slli_epi16(high, 4));
                _mm512_storeu_si512(out.add(g * stride + line * PANEL_LINE).cast(), both);
            }
        }
        for g in 0..G {
            super::panel::prefetch(states.even_at[g].wrapping_add(AHEAD));
            super::panel::prefetch(states.odd_at[g].wrapping_add(AHEAD));
        }
    }
}

/// One code of each state of a panel, a byte each.
///
/// # Safety
/// As [`some_lines`].
#[inline(always)]
unsafe fn step<const G: usize, const CHECK: bool>(
    tables: &Tables,
    states: &mut States<G>,
    g: usize,
    last: *const u8,
) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        let (even, odd) = (states.even[g], states.odd[g]);
        // Odd bytes come from the odd states; the permutations ignore the uppermost bit of each.
        let slots = _mm512_mask_blend_epi8(0xAAAA_AAAA_AAAA_AAAA, even, _mm512_slli_epi16(odd, 8));
        let look_up = |table: &[__m512i; 2]| _mm512_permutex2var_epi8(table[0], slots, table[1]);
        let (frequency, rank) = (look_up(&tables.frequency), look_up(&tables.rank));
        let low_byte = _mm512_set1_epi16(255);
        let advance = |state, frequency, rank| {
            _mm512_add_epi16(_mm512_mullo_epi16(frequency, _mm512_srli_epi16(state, 7)), rank)
        };
        let even = advance(even, _mm512_and_si512(frequency, low_byte), _mm512_and_si512(rank, low_byte));
        let odd = advance(odd, _mm512_srli_epi16(frequency, 8), _mm512_srli_epi16(rank, 8));
        states.even[g] = take::<CHECK>(even, &mut states.even_at[g], last);
        states.odd[g] = take::<CHECK>(odd, &mut states.odd_at[g], last);
        look_up(&tables.code)
    }
}

/// States below 256 take a byte each from the stream, in order.
///
/// # Safety
/// As [`some_lines`].
#[inline(always)]
unsafe fn take<const CHECK: bool>(states: __m512i, at: &mut *const u8, last: *const u8) -> __m512i {
    // SAFETY: passed on to the caller.
    unsafe {
        let takes = _mm512_cmplt_epu16_mask(states, _mm512_set1_epi16(256));
        let bytes = _mm512_cvtepu8_epi16(_mm256_loadu_si256(at.cast()));
        let bytes = _mm512_maskz_expand_epi16(takes, bytes);
        *at = at.wrapping_add(takes.count_ones() as usize);
        if CHECK {
            *at = (*at).min(last);
        }
        _mm512_or_si512(_mm512_mask_slli_epi16(states, takes, states, 8), bytes)
    }
}

/// The lines of scales of a panel.
///
/// # Safety
/// As [`decode`].
#[inline(always)]
unsafe fn write_scales(scales: &IndexScales<'_>, shape: &PanelShape, out: &mut [u8]) {
    let mut exceptions = scales.exceptions.iter();
    let blocks = scales.indices.chunks(scales.groups_per_block).zip(scales.blocks).enumerate();
    // SAFETY: passed on to the caller; 16 magnitudes, 8 bytes of indices, and lines of 64 bytes are there.
    unsafe {
        let magnitudes = _mm512_loadu_ps(scales.magnitudes.as_ptr());
        for (block, (groups, value)) in blocks {
            let value = _mm512_set1_ps(f32::from_le_bytes(*value));
            let values = _mm512_div_ps(_mm512_mul_ps(magnitudes, value), _mm512_set1_ps(7.0));
            for (group, indices) in groups.iter().enumerate() {
                let at = shape.scales_at(block * scales.groups_per_block + group);
                let line: &mut [u8] = &mut out[at..at + PANEL_LINE];
                // Row 0 in the lowest nibble: lane `i` takes the bits from `4 i` on.
                let packed = i64::from_le_bytes(*indices);
                let low = _mm_set1_epi64x(packed);
                let nibbles = _mm_unpacklo_epi8(low, _mm_srli_epi16(low, 4));
                let index = _mm512_cvtepu8_epi32(_mm_and_si128(nibbles, _mm_set1_epi8(15)));
                _mm512_storeu_ps(line.as_mut_ptr().cast(), _mm512_permutexvar_ps(index, values));
                let mut missing = _mm512_cmpeq_epi32_mask(index, _mm512_set1_epi32(i32::from(EXCEPTION)));
                while missing != 0 {
                    let row = missing.trailing_zeros() as usize;
                    let exception = exceptions.next().copied().unwrap_or_default();
                    line[4 * row..][..4].copy_from_slice(&exception);
                    missing &= missing - 1;
                }
            }
        }
    }
}
