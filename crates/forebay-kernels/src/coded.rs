//! Coded weights: panels are decoded a few at a time into a buffer of the thread, and multiplied there as any others.

use crate::matmul::Input;
use crate::portable::Out;
use crate::{Isa, Kernels};
use bytemuck::Zeroable;
use forebay_core::coded::CodedView;
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelShape, PanelView};
use std::cell::RefCell;
use std::ops::Range;

/// Panels that are decoded side by side.
const PANELS: usize = 4;
/// Parts of a product are multiples of this many weight rows, so that panels can be decoded side by side.
pub(crate) const PART_ROWS: usize = PANELS * PANEL_ROWS;

/// The panels from this one on that the buffer has room for.
pub(crate) type DecodeFn = unsafe fn(&CodedView<'_>, usize, &mut [u8]);

/// The decoder of an instruction set that this machine has, and whether it is a fast one.
pub(crate) fn decoder_of(isa: Isa) -> (DecodeFn, bool) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 && crate::isa::has_vbmi() {
        return (crate::x86::avx512::coded::decode, true);
    }
    let _ = isa;
    (one_by_one, false)
}

/// The decoder of `forebay-core`, on any processor.
///
/// # Safety
/// None is needed.
unsafe fn one_by_one(view: &CodedView<'_>, first: usize, out: &mut [u8]) {
    for (i, out) in out.chunks_exact_mut(view.shape().panel_bytes()).enumerate() {
        view.decode_panel(first + i, out);
    }
}

/// Bytes that a thread keeps for the panels of a coded matrix that it decodes side by side while it multiplies.
pub fn decoded_at_once(shape: &PanelShape) -> usize {
    shape.slice_rows(0..shape.rows().min(PART_ROWS)).bytes()
}

impl Kernels {
    /// Decodes panels `panels` of a coded matrix on the calling thread: the bytes that were coded.
    ///
    /// # Panics
    /// If there are no such panels, or `out` has not exactly their bytes.
    pub fn decode_panels(self, view: &CodedView<'_>, panels: Range<usize>, out: &mut [u8]) {
        let shape = view.shape();
        assert!(
            panels.start <= panels.end && panels.end <= shape.panels(),
            "panels {panels:?} of {}",
            shape.panels()
        );
        assert_eq!(out.len(), panels.len() * shape.panel_bytes(), "decoded panels have a fixed size");
        // SAFETY: the decoder was chosen for this processor.
        unsafe { self.decoder()(view, panels.start, out) }
    }
}

/// A cache line of a buffer.
#[derive(Clone, Copy, Zeroable, bytemuck::Pod)]
#[repr(C, align(64))]
struct Line([u8; PANEL_LINE]);

thread_local! {
    /// Where this thread decodes to. It grows to the largest panels and stays, so that it stays in the cache too.
    static DECODED: RefCell<Vec<Line>> = const { RefCell::new(Vec::new()) };
}

/// `y[b][row]` for coded weights, every batch row `b` and `row` of `rows`.
///
/// # Safety
/// As `matmul::multiply`.
pub(crate) unsafe fn multiply(
    kernels: Kernels,
    view: &CodedView<'_>,
    rows: Range<usize>,
    input: Input<'_>,
    out: Out,
) {
    let (shape, table) = (view.shape(), kernels.table());
    DECODED.with_borrow_mut(|room| {
        for row in rows.clone().step_by(PART_ROWS) {
            let some = shape.slice_rows(row..rows.end.min(row + PART_ROWS));
            let lines = some.bytes() / PANEL_LINE;
            if room.len() < lines {
                room.resize(lines, Line::zeroed());
            }
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut room[..lines]);
            let first = row / PANEL_ROWS;
            kernels.decode_panels(view, first..first + some.panels(), bytes);
            let panels = PanelView::new(some, bytes).expect("as many bytes as there are in the panels");
            let (rows, out) = (0..some.rows(), out.starting_with(row));
            // SAFETY: the processor has the instruction set (see `Kernels::table`); the rest is the caller's promise.
            unsafe {
                match input.quantised {
                    Some(quantised) => (table.int8_panels)(&panels, rows, quantised, out),
                    None => (table.exact_panels)(&panels, rows, input.rows, out),
                }
            }
        }
    });
}
