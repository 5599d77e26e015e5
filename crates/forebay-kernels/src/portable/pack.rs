//! Row-major weights to panel order, a chunk of columns of sixteen rows at a time.

use super::{CHUNK, Room, decode, int8};
use forebay_core::format::Format;
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelView};
use forebay_core::quant::columns_per_scale;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Sixteen units of sixteen rows: what one transposition takes.
const BLOCK: usize = 16 * PANEL_LINE;
/// The smallest weight group.
const SMALLEST_GROUP: usize = 16;

/// Row-major weights of an integer format, their shape worked out once.
pub(crate) struct RowSource<'a> {
    format: Format,
    cols: usize,
    codes: &'a [u8],
    scales: &'a [f32],
    row_bytes: usize,
    row_scales: usize,
    /// Columns that share a scale.
    group: usize,
}

impl<'a> RowSource<'a> {
    pub(crate) fn new(view: &MatrixView<'a>) -> Self {
        let (rows, cols, format) = (view.rows().max(1), view.cols(), view.format());
        Self {
            format,
            cols,
            codes: view.codes(),
            scales: view.scales(),
            row_bytes: view.codes().len() / rows,
            row_scales: view.scales().len() / rows,
            group: columns_per_scale(format, cols),
        }
    }
}

/// The codes and scales of one chunk, in panel order but apart from one another.
#[repr(C, align(64))]
pub(crate) struct Chunk {
    codes: [u8; CHUNK * PANEL_ROWS],
    scales: [[f32; PANEL_ROWS]; CHUNK / SMALLEST_GROUP],
    /// Columns of a weight group (at least the chunk if there is one scale a row).
    pub group: usize,
    /// Columns of a unit.
    pub unit_cols: usize,
}

impl Chunk {
    pub(crate) fn new() -> Self {
        Self {
            codes: [0; CHUNK * PANEL_ROWS],
            scales: [[0.0; PANEL_ROWS]; CHUNK / SMALLEST_GROUP],
            group: CHUNK,
            unit_cols: 4,
        }
    }

    pub(crate) fn codes(&self) -> *const u8 {
        self.codes.as_ptr()
    }

    pub(crate) fn scales(&self) -> *const u8 {
        self.scales.as_ptr().cast()
    }

    /// Takes in columns `start..start + len` (`start` a multiple of [`CHUNK`]) of the first
    /// sixteen of `rows`; if there are fewer, the last one stands in for the others.
    ///
    /// # Safety
    /// As the methods of [`Room`].
    #[inline(always)]
    pub(crate) unsafe fn fill<R: Room>(
        &mut self,
        source: &RowSource<'_>,
        rows: Range<usize>,
        start: usize,
        len: usize,
    ) {
        self.unit_cols = int8::unit_cols(source.format);
        let first = start / source.group;
        self.group = if source.group >= source.cols { CHUNK } else { source.group };
        let groups = (start + len).div_ceil(source.group) - first;
        let (from, to) = (start * 4 / self.unit_cols, ((start + len) * 4).div_ceil(self.unit_cols));
        let rows = rows.start..rows.end.min(rows.start + PANEL_ROWS);
        let codes = &source.codes[rows.start * source.row_bytes..rows.end * source.row_bytes];
        let scales = &source.scales[rows.start * source.row_scales..rows.end * source.row_scales];
        // SAFETY: passed on to the caller.
        unsafe {
            if rows.len() == PANEL_ROWS && source.format != Format::Int2Row {
                let stride = source.row_bytes;
                transpose::<R>(
                    codes.as_ptr().add(from),
                    stride,
                    to - from,
                    below(codes, from),
                    &mut self.codes,
                );
            } else {
                let mut padded = [[0i8; CHUNK]; PANEL_ROWS];
                for (padded, codes) in padded.iter_mut().zip(codes.chunks_exact(source.row_bytes)) {
                    if source.format == Format::Int2Row {
                        decode::codes::<R>(source.format, codes, start, &mut padded[..len]);
                    } else {
                        padded[..to - from].copy_from_slice(bytemuck::cast_slice(&codes[from..to]));
                    }
                }
                transpose::<R>(padded.as_ptr().cast(), CHUNK, to - from, None, &mut self.codes);
            }
            if rows.len() == PANEL_ROWS {
                let start = scales.as_ptr().add(first).cast::<u8>();
                let out = bytemuck::cast_slice_mut(&mut self.scales);
                if source.row_scales == 1 {
                    out[..PANEL_LINE].copy_from_slice(bytemuck::cast_slice(&scales[..PANEL_ROWS]));
                } else {
                    // Whole lines where the row has them: what lies beyond the chunk is not used.
                    let len = 4 * groups.next_multiple_of(PANEL_ROWS).min(source.row_scales - first);
                    let ahead = below(bytemuck::cast_slice(scales), 4 * first);
                    transpose::<R>(start, 4 * source.row_scales, len, ahead, out);
                }
            } else {
                for (lane, scales) in scales.chunks_exact(source.row_scales).enumerate() {
                    for (out, scale) in self.scales.iter_mut().zip(&scales[first..first + groups]) {
                        out[lane] = *scale;
                    }
                }
            }
        }
    }
}

/// Where in memory the sixteen rows below those of `rows` are asked for while byte `from` of
/// each row is at hand. They are read in the order of the memory, one row after the other,
/// which a memory serves fastest, and wait in the second cache until it is their turn.
fn below(rows: &[u8], from: usize) -> Option<*const u8> {
    Some(rows.as_ptr_range().end.wrapping_add(from * PANEL_ROWS))
}

/// Sixteen rows of `len` bytes, the first at `start` and the next `stride` bytes further, as
/// lines of words. As many bytes from `ahead` on are asked for meanwhile.
///
/// # Safety
/// The rows are there; the processor has the room's instruction set.
#[inline(always)]
unsafe fn transpose<R: Room>(
    start: *const u8,
    stride: usize,
    len: usize,
    ahead: Option<*const u8>,
    out: &mut [u8],
) {
    let out = out.as_chunks_mut::<BLOCK>().0;
    let whole = len / PANEL_LINE;
    for (block, out) in out.iter_mut().enumerate().take(whole) {
        if let Some(ahead) = ahead {
            for i in 0..PANEL_ROWS {
                R::prefetch_far(ahead.wrapping_add(block * BLOCK + i * PANEL_LINE));
            }
        }
        // SAFETY: 64 bytes of each row from here on; the instruction set is there.
        unsafe { R::transpose(start.add(block * PANEL_LINE), stride, out) };
    }
    let rest = len % PANEL_LINE;
    if rest > 0 {
        let mut padded = [[0u8; PANEL_LINE]; PANEL_ROWS];
        for (i, padded) in padded.iter_mut().enumerate() {
            // SAFETY: the rest of each row.
            unsafe {
                let from = start.add(i * stride + whole * PANEL_LINE);
                std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), rest);
            }
        }
        // SAFETY: as above.
        unsafe { R::transpose(padded.as_ptr().cast(), PANEL_LINE, &mut out[whole]) };
    }
}

/// A chunk of columns of one panel, turned back into rows of the container.
pub(crate) struct Unpacked {
    /// Rows of [`CHUNK`] bytes; a chunk takes their beginnings.
    codes: [[u8; CHUNK]; PANEL_ROWS],
    scales: [[f32; CHUNK / SMALLEST_GROUP]; PANEL_ROWS],
}

impl Unpacked {
    pub(crate) fn new() -> Self {
        Self { codes: [[0; CHUNK]; PANEL_ROWS], scales: [[0.0; CHUNK / SMALLEST_GROUP]; PANEL_ROWS] }
    }

    /// Takes in columns `start..start + len` (`start` a multiple of [`CHUNK`]) of panel `panel`.
    ///
    /// # Safety
    /// As the methods of [`Room`].
    #[inline(always)]
    pub(crate) unsafe fn fill<R: Room>(
        &mut self,
        view: &PanelView<'_>,
        panel: usize,
        start: usize,
        len: usize,
    ) {
        let shape = view.shape();
        let bytes = view.panel(panel);
        let unit_cols = shape.unit_cols();
        let units = len.next_multiple_of(16) / unit_cols;
        let mut lines = [0u8; BLOCK];
        let mut words = [0u8; BLOCK];
        for first in (0..units).step_by(16) {
            let here = 16.min(units - first);
            for (unit, line) in lines.as_chunks_mut::<PANEL_LINE>().0.iter_mut().enumerate().take(here) {
                let at = shape.codes_at(start + (first + unit) * unit_cols);
                line.copy_from_slice(&bytes[at..at + PANEL_LINE]);
            }
            // SAFETY: sixteen lines; the instruction set is there.
            unsafe { R::transpose(lines.as_ptr(), PANEL_LINE, &mut words) };
            for (row, words) in self.codes.iter_mut().zip(words.as_chunks::<PANEL_LINE>().0) {
                row[4 * first..4 * (first + here)].copy_from_slice(&words[..4 * here]);
            }
        }
        let group = shape.group_cols();
        let groups = start / group..(start + len).div_ceil(group);
        for (i, group) in groups.enumerate() {
            let line = &bytes[shape.scales_at(group)..][..PANEL_LINE];
            for (scales, scale) in self.scales.iter_mut().zip(line.as_chunks::<4>().0) {
                scales[i] = f32::from_le_bytes(*scale);
            }
        }
    }

    /// The codes of a row from the start of the chunk on.
    #[inline(always)]
    pub(crate) fn codes(&self, row: usize) -> &[u8] {
        &self.codes[row]
    }

    /// The scales of a row from the start of the chunk on.
    #[inline(always)]
    pub(crate) fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row]
    }
}
