//! Row-major weights to panel order, a chunk of columns of sixteen rows at a time.

use super::{CHUNK, Room, decode, int8};
use forebay_core::format::Format;
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS};
use forebay_core::quant::columns_per_scale;
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Sixteen units of sixteen rows: what one transposition takes.
const BLOCK: usize = 16 * PANEL_LINE;
/// The smallest weight group.
const SMALLEST_GROUP: usize = 16;

/// How far ahead of its use a row is asked for, in bytes of that row: sixteen rows are under
/// way at once.
const AHEAD: usize = 512;

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
        let block: [usize; PANEL_ROWS] = std::array::from_fn(|lane| (rows.start + lane).min(rows.end - 1));
        let codes = block.map(|row| &source.codes[row * source.row_bytes..(row + 1) * source.row_bytes]);
        // SAFETY: passed on to the caller.
        unsafe {
            if source.format == Format::Int2Row {
                let mut wide = [[0i8; CHUNK]; PANEL_ROWS];
                for (wide, codes) in wide.iter_mut().zip(codes) {
                    decode::codes::<R>(source.format, codes, start, &mut wide[..len]);
                }
                self.transpose::<R>(wide.each_ref().map(|row| bytemuck::cast_slice(&row[..len])), 0, len);
            } else {
                let (from, to) = (start * 4 / self.unit_cols, ((start + len) * 4).div_ceil(self.unit_cols));
                self.transpose::<R>(codes, from, to);
            }
            let first = start / source.group;
            self.group = if source.group >= source.cols { CHUNK } else { source.group };
            let groups = (start + len).div_ceil(source.group) - first;
            let scales = block.map(|row| &source.scales[row * source.row_scales..][..source.row_scales]);
            self.take_scales::<R>(scales, first, groups);
        }
    }

    /// Bytes `from..to` of the rows, as lines.
    #[inline(always)]
    unsafe fn transpose<R: Room>(&mut self, rows: [&[u8]; PANEL_ROWS], from: usize, to: usize) {
        let out = self.codes.as_chunks_mut::<BLOCK>().0;
        let whole = (to - from) / PANEL_LINE;
        let starts = rows.map(|row| row.as_ptr());
        for (block, out) in out.iter_mut().enumerate().take(whole) {
            let at = from + block * PANEL_LINE;
            // After the end of a row, the sixteen rows below are next.
            let ahead = if at + AHEAD < rows[0].len() { at + AHEAD } else { at + AHEAD + 15 * rows[0].len() };
            for start in starts {
                R::prefetch(start.wrapping_add(ahead));
            }
            // SAFETY: 64 bytes of each row from here on; the instruction set is there.
            unsafe { R::transpose(starts.map(|start| start.add(at)), out) };
        }
        if !(to - from).is_multiple_of(PANEL_LINE) {
            let mut padded = [[0u8; PANEL_LINE]; PANEL_ROWS];
            for (padded, row) in padded.iter_mut().zip(rows) {
                let rest = &row[from + whole * PANEL_LINE..to];
                padded[..rest.len()].copy_from_slice(rest);
            }
            // SAFETY: as above.
            unsafe { R::transpose(padded.each_ref().map(|row| row.as_ptr()), &mut out[whole]) };
        }
    }

    /// Scales `first..first + len` of the rows, as lines.
    #[inline(always)]
    unsafe fn take_scales<R: Room>(&mut self, rows: [&[f32]; PANEL_ROWS], first: usize, len: usize) {
        if len == 1 {
            self.scales[0] = rows.map(|scales| scales[first]);
            return;
        }
        let out = self.scales.as_chunks_mut::<PANEL_ROWS>().0;
        for (block, out) in out.iter_mut().enumerate().take(len.div_ceil(PANEL_ROWS)) {
            let from = first + block * PANEL_ROWS;
            let out = bytemuck::cast_mut(out);
            for row in rows {
                R::prefetch(row.as_ptr().wrapping_add(from + 32).cast());
            }
            if from + PANEL_ROWS <= rows[0].len() {
                // SAFETY: 64 bytes of each row from here on; the instruction set is there.
                unsafe { R::transpose(rows.map(|row| row.as_ptr().add(from).cast()), out) };
            } else {
                let mut padded = [[0f32; PANEL_ROWS]; PANEL_ROWS];
                for (padded, row) in padded.iter_mut().zip(rows) {
                    padded[..row.len() - from].copy_from_slice(&row[from..]);
                }
                // SAFETY: as above.
                unsafe { R::transpose(padded.each_ref().map(|row| row.as_ptr().cast()), out) };
            }
        }
    }
}
