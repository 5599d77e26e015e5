//! Sixteen weight rows at a time, in panel order.

use crate::activations::GROUP;
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS};

pub(crate) type Ints = [i32; PANEL_ROWS];

/// The units of one panel; `unit(u)[lane]` holds the four bytes of a row.
#[inline(always)]
unsafe fn unit<'a>(codes: *const u8, u: usize) -> &'a [[u8; 4]; PANEL_ROWS] {
    // SAFETY: the caller's panel has this unit.
    unsafe { &*codes.add(u * PANEL_LINE).cast() }
}

/// `dots[p][s][lane] = sum_k w[lane][k] x[s][k]` over `units` units of eight columns; the even
/// columns of a row lie at `x` and the odd ones 32 bytes further, the next row [`GROUP`] bytes further.
#[inline(always)]
pub(crate) unsafe fn dot_int4<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
) -> [[Ints; S]; P] {
    codes.map(|codes| {
        std::array::from_fn(|s| {
            let x = x.wrapping_add(s * GROUP);
            let mut dots = [0i32; PANEL_ROWS];
            for u in 0..units {
                for i in 0..4 {
                    // SAFETY: the caller's activations cover these columns.
                    let (even, odd) = unsafe { (*x.add(4 * u + i), *x.add(32 + 4 * u + i)) };
                    // SAFETY: passed on to the caller.
                    for (dot, bytes) in dots.iter_mut().zip(unsafe { unit(codes, u) }) {
                        let low = i32::from(bytes[i] & 15) - 8;
                        let high = i32::from(bytes[i] >> 4) - 8;
                        *dot += low * i32::from(even) + high * i32::from(odd);
                    }
                }
            }
            dots
        })
    })
}

/// As [`dot_int4`] for units of four signed bytes and activations in the order of the columns.
#[inline(always)]
pub(crate) unsafe fn dot_int8<const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: *const i8,
) -> [[Ints; S]; P] {
    codes.map(|codes| {
        std::array::from_fn(|s| {
            let x = x.wrapping_add(s * GROUP);
            let mut dots = [0i32; PANEL_ROWS];
            for u in 0..units {
                for i in 0..4 {
                    // SAFETY: the caller's activations cover these columns.
                    let x = i32::from(unsafe { *x.add(4 * u + i) });
                    // SAFETY: passed on to the caller.
                    for (dot, bytes) in dots.iter_mut().zip(unsafe { unit(codes, u) }) {
                        *dot += i32::from(bytes[i] as i8) * x;
                    }
                }
            }
            dots
        })
    })
}

/// Word `i` of row `j` becomes word `j` of line `i`; rows are `stride` bytes apart.
#[inline(always)]
pub(crate) unsafe fn transpose(start: *const u8, stride: usize, out: &mut [u8; 16 * PANEL_LINE]) {
    let (words, _) = out.as_chunks_mut::<4>();
    for j in 0..PANEL_ROWS {
        // SAFETY: the caller's rows have 64 bytes.
        let row: &[[u8; 4]; 16] = unsafe { &*start.add(j * stride).cast() };
        for (i, word) in row.iter().enumerate() {
            words[i * PANEL_ROWS + j] = *word;
        }
    }
}
