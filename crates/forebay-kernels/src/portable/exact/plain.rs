//! The `exact` product as docs/numerics.md writes it down: one row, one sum, one column at a
//! time. The scalar room runs this, and every other body is compared with it.

use crate::portable::lanes::{self, LANES};
use crate::portable::{CHUNK, Out, Room, decode};
use forebay_core::format::Format;
use forebay_core::panel::{PANEL_ROWS, PanelView};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// # Safety
/// As [`super::rows`].
#[inline(always)]
pub(super) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let mut weights = [0f32; CHUNK];
    for row in rows {
        for (b, x) in x.chunks_exact(view.cols().max(1)).enumerate() {
            let mut sum = [0f32; LANES];
            for (chunk, x) in x.chunks(CHUNK).enumerate() {
                let weights = &mut weights[..x.len()];
                // SAFETY: passed on to the caller.
                unsafe { decode::weights::<R>(view, row, chunk * CHUNK, weights) };
                add(&mut sum, weights, x);
            }
            // SAFETY: passed on to the caller.
            unsafe { out.put(b, row, lanes::tree(sum)) };
        }
    }
}

/// # Safety
/// As [`super::panels`].
#[inline(always)]
pub(super) unsafe fn panels<R: Room>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let shape = view.shape();
    let mut weights = [0f32; CHUNK];
    for row in rows {
        let panel = view.panel(row / PANEL_ROWS);
        // The four bytes of this row in the line at `at`.
        let word =
            |at: usize| panel[at + row % PANEL_ROWS * 4..].first_chunk::<4>().copied().unwrap_or_default();
        for (b, x) in x.chunks_exact(shape.cols()).enumerate() {
            let mut sum = [0f32; LANES];
            for (chunk, x) in x.chunks(CHUNK).enumerate() {
                for (i, weight) in weights[..x.len()].iter_mut().enumerate() {
                    let col = chunk * CHUNK + i;
                    let unit = word(shape.codes_at(col));
                    let code = if shape.format() == Format::Int8Row {
                        unit[col % 4] as i8
                    } else {
                        ((unit[col % 8 / 2] >> (4 * (col % 2))) & 15) as i8 - 8
                    };
                    let scale = f32::from_le_bytes(word(shape.scales_at(col / shape.group_cols())));
                    *weight = f32::from(code) * scale;
                }
                add(&mut sum, &weights[..x.len()], x);
            }
            // SAFETY: passed on to the caller.
            unsafe { out.put(b, row, lanes::tree(sum)) };
        }
    }
}

/// `sum[k mod 16] = fma(w[k], x[k], sum[k mod 16])` for ascending `k`.
#[inline(always)]
fn add(sum: &mut [f32; LANES], weights: &[f32], x: &[f32]) {
    for (k, (w, x)) in weights.iter().zip(x).enumerate() {
        sum[k % LANES] = w.mul_add(*x, sum[k % LANES]);
    }
}
