//! Panels back to rows of the container, a chunk of columns at a time, in the cache.

use crate::portable::{CHUNK, Room};
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelView};
use std::ops::Range;

/// What one transposition takes: a unit of sixteen rows sixteen times.
const BLOCK: usize = 16 * PANEL_LINE;
/// Most scales of a row of a chunk: the smallest weight group has sixteen columns.
const SCALES: usize = CHUNK / 16;
/// How far ahead of its use a panel is asked for.
const AHEAD: usize = 4096;

/// A chunk of columns of one panel as rows of the container.
#[repr(C, align(64))]
pub(super) struct Unpanelled {
    /// Rows of [`CHUNK`] bytes; a chunk takes their beginnings.
    codes: [[u8; CHUNK]; PANEL_ROWS],
    scales: [[f32; SCALES]; PANEL_ROWS],
}

impl Unpanelled {
    pub(super) fn new() -> Self {
        Self { codes: [[0; CHUNK]; PANEL_ROWS], scales: [[0.0; SCALES]; PANEL_ROWS] }
    }

    /// Takes in columns `cols` (at most a chunk, from a multiple of [`CHUNK`] on) of a panel.
    ///
    /// # Safety
    /// As the methods of [`Room`].
    #[inline(always)]
    pub(super) unsafe fn fill<R: Room>(&mut self, view: &PanelView<'_>, panel: usize, cols: Range<usize>) {
        let shape = view.shape();
        let bytes = view.panel(panel);
        let grouped = shape.codes_at(0) == 0;
        // Of a format with groups, a line of scales follows the codes of each.
        let group_units = if grouped { shape.group_cols() / shape.unit_cols() } else { usize::MAX };
        let units = cols.len().next_multiple_of(16) / shape.unit_cols();
        let mut words = [0u8; BLOCK];
        let mut lines = [[0u8; PANEL_LINE]; 16];
        let mut scale_lines = [[0u8; PANEL_LINE]; SCALES];
        let mut groups = 0;
        let mut at = shape.codes_at(cols.start);
        let mut left = group_units;
        for first in (0..units).step_by(16) {
            for line in &mut lines[..16.min(units - first)] {
                if left == 0 {
                    scale_lines[groups].copy_from_slice(&bytes[at..at + PANEL_LINE]);
                    groups += 1;
                    at += PANEL_LINE;
                    left = group_units;
                }
                let here = &bytes[at..at + PANEL_LINE];
                line.copy_from_slice(here);
                R::prefetch(here.as_ptr().wrapping_add(AHEAD));
                at += PANEL_LINE;
                left -= 1;
            }
            // SAFETY: sixteen lines; the instruction set is there.
            unsafe { R::transpose(lines.as_ptr().cast(), PANEL_LINE, &mut words) };
            for (row, words) in self.codes.iter_mut().zip(words.as_chunks::<PANEL_LINE>().0) {
                row.as_chunks_mut::<PANEL_LINE>().0[first / 16] = *words;
            }
        }
        // The last group's scales are behind its codes; a scale per row is at the start.
        let last = if grouped { at } else { 0 };
        scale_lines[groups].copy_from_slice(&bytes[last..last + PANEL_LINE]);
        groups += 1;
        for (block, lines) in scale_lines.as_chunks::<16>().0.iter().enumerate().take(groups.div_ceil(16)) {
            // SAFETY: as above.
            unsafe { R::transpose(lines.as_ptr().cast(), PANEL_LINE, &mut words) };
            for (row, words) in self.scales.iter_mut().zip(words.as_chunks::<PANEL_LINE>().0) {
                *bytemuck::cast_mut::<[f32; 16], [u8; PANEL_LINE]>(&mut row.as_chunks_mut().0[block]) =
                    *words;
            }
        }
    }

    /// Codes and scales of row `row` of the chunk; what lies beyond its columns means nothing.
    #[inline(always)]
    pub(super) fn row(&self, row: usize) -> (&[u8], &[f32]) {
        (&self.codes[row], &self.scales[row])
    }
}
