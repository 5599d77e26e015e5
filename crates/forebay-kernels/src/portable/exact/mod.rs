//! The `exact` arithmetic: weights dequantised to f32, activations f32.
//!
//! Every sum is a dot product of sixteen virtual lanes (docs/numerics.md, section 2), and the
//! lanes are those of the room's registers: a line of sixteen weights meets the same sixteen
//! columns of the activations. A few batch rows take the weights straight from their codes, in
//! rows (`strip`) or in panels (`panel`), where it is the weight rows that lie side by side. More
//! of them share one decoding (`tiled`), for which panels are turned back into rows in the cache
//! (`unpanel`). The scalar room does what the page says word for word (`plain`).

mod panel;
mod plain;
mod strip;
mod tiled;
mod unpanel;

use super::lanes::LANES;
use super::{Out, Room};
use forebay_core::panel::PanelView;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// The lanes of one sum.
type Sum = [f32; LANES];

/// `y[b][row] = dot(x[b], dequantised W[row])` for every batch row `b` and `row` of `rows`.
///
/// # Safety
/// The processor has the room's instruction set; `rows` lie inside `view`; `x` holds
/// whole rows of `view.cols()`; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    // SAFETY: passed on to the caller.
    unsafe {
        if R::PLAIN {
            plain::rows::<R>(view, rows, x, out);
        } else if !strip::rows::<R>(view, rows.clone(), x, out) {
            tiled::rows::<R>(view, rows, x, out);
        }
    }
}

/// As [`rows`] for weights in panels; `rows` start with a panel.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
pub(crate) unsafe fn panels<R: Room>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    // SAFETY: passed on to the caller.
    unsafe {
        if R::PLAIN {
            plain::panels::<R>(view, rows, x, out);
        } else if !panel::panels::<R>(view, rows.clone(), x, out) {
            tiled::panels::<R>(view, rows, x, out);
        }
    }
}

/// Stores the results of sums: `place(i)` is the batch row and weight row of `sums[i]`.
///
/// # Safety
/// The processor has the room's instruction set; `out` has these places.
#[inline(always)]
unsafe fn put<R: Room>(sums: &[Sum], out: Out, place: impl Fn(usize) -> (usize, usize)) {
    for (i, four) in sums.chunks(4).enumerate() {
        // SAFETY: passed on to the caller.
        unsafe {
            let load = |j: usize| R::load(&four[j.min(four.len() - 1)]);
            let results = R::trees([load(0), load(1), load(2), load(3)]);
            for (j, result) in results.into_iter().enumerate().take(four.len()) {
                let (batch_row, row) = place(4 * i + j);
                out.put(batch_row, row, result);
            }
        }
    }
}
