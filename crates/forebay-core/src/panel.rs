//! Panels: the layout of integer weights that kernels read as one stream.
//!
//! A panel holds sixteen rows. Its codes are those of the row-major container, cut into
//! units of four bytes and transposed: unit `u` of rows 0, 1, ... 15, then unit `u + 1` of
//! the sixteen rows, and so on. A 64-byte vector is therefore one unit of sixteen rows, a
//! row's sum stays in its own lane, and turning one layout into the other is a transposition
//! of four-byte words whatever the format. A unit covers four columns of int8 (two's
//! complement) or eight of int4 (value + 8, even column in the low nibble).
//!
//! Scales are f32, sixteen at a time, one per row of the panel:
//!
//! * one per row (int8, int4): the 64 bytes before the codes;
//! * grouped int4: the 64 bytes behind the codes of each group.
//!
//! Columns are padded to a multiple of sixteen, and rows to a whole panel, with codes of value
//! 0; padding rows have scales of 0. There is no other padding, so a matrix takes as many bytes
//! as in the container if its rows and columns are multiples of sixteen.

use crate::format::Format;
use crate::view::MatrixView;
use std::ops::Range;

/// Rows of a panel.
pub const PANEL_ROWS: usize = 16;
/// Bytes of one unit of all rows of a panel, and of one scale of each.
pub const PANEL_LINE: usize = 4 * PANEL_ROWS;
/// Columns are padded to a multiple of this.
const PAD_COLS: usize = 16;

/// How a matrix lies in panels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PanelShape {
    format: Format,
    rows: usize,
    cols: usize,
    /// Columns of one four-byte unit.
    unit_cols: usize,
    /// Columns that share a scale; the padded number of columns if there is one scale a row.
    group: usize,
    /// Bytes of a panel.
    panel_bytes: usize,
}

impl PanelShape {
    /// The panels of a `rows x cols` matrix. `None` if the format has none (float formats and
    /// int2 stay row-major), if the matrix is empty, or if its bytes cannot be counted.
    pub fn new(format: Format, rows: usize, cols: usize) -> Option<Self> {
        let padded = cols.checked_next_multiple_of(PAD_COLS)?;
        let (unit_cols, group) = match format {
            Format::Int8Row => (4, padded),
            Format::Int4Row => (8, padded),
            Format::Int4Group(size) => (8, size.get()),
            Format::Int2Row | Format::F32 | Format::Bf16 | Format::F16 | Format::Fp8Block => return None,
        };
        if rows == 0 || cols == 0 {
            return None;
        }
        let lines = (padded / unit_cols).checked_add(cols.div_ceil(group))?;
        let panel_bytes = lines.checked_mul(PANEL_LINE)?;
        rows.div_ceil(PANEL_ROWS).checked_mul(panel_bytes)?;
        Some(Self { format, rows, cols, unit_cols, group, panel_bytes })
    }

    /// Storage format of the codes.
    pub fn format(&self) -> Format {
        self.format
    }

    /// Rows (outputs), without padding.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (inputs), without padding.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Columns of one four-byte unit: 4 (int8) or 8 (int4).
    pub fn unit_cols(&self) -> usize {
        self.unit_cols
    }

    /// Columns that share a scale; the padded number of columns if there is one scale a row.
    pub fn group_cols(&self) -> usize {
        self.group
    }

    /// Number of panels.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(PANEL_ROWS)
    }

    /// Bytes of one panel.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Bytes of the whole matrix.
    pub fn bytes(&self) -> usize {
        self.panels() * self.panel_bytes
    }

    /// The shape of rows `rows` alone, which must be whole panels (the last may be partial).
    ///
    /// # Panics
    /// If the range is empty, leaves the matrix or starts inside a panel.
    pub fn slice_rows(&self, rows: Range<usize>) -> PanelShape {
        assert!(rows.start < rows.end && rows.end <= self.rows, "rows {rows:?} of {}", self.rows);
        assert_eq!(rows.start % PANEL_ROWS, 0, "a panel cannot be split");
        Self { rows: rows.len(), ..*self }
    }

    /// Offset, inside a panel, of the unit that holds column `col`.
    #[inline(always)]
    pub fn codes_at(&self, col: usize) -> usize {
        if self.has_groups() {
            let before = col / self.group * (self.group / self.unit_cols + 1);
            (before + col % self.group / self.unit_cols) * PANEL_LINE
        } else {
            (1 + col / self.unit_cols) * PANEL_LINE
        }
    }

    /// Offset, inside a panel, of the sixteen scales of weight group `group`.
    #[inline(always)]
    pub fn scales_at(&self, group: usize) -> usize {
        if self.has_groups() {
            let padded = self.cols.next_multiple_of(PAD_COLS);
            let end = ((group + 1) * self.group).min(padded);
            (group + end / self.unit_cols) * PANEL_LINE
        } else {
            0
        }
    }

    fn has_groups(&self) -> bool {
        matches!(self.format, Format::Int4Group(_))
    }

    /// Writes panel `panel` of `view` into `out`, which has [`panel_bytes`](Self::panel_bytes).
    ///
    /// # Panics
    /// If `view` has another shape or format, or `out` another length.
    pub fn pack_panel(&self, view: &MatrixView<'_>, panel: usize, out: &mut [u8]) {
        assert_eq!((view.format(), view.cols()), (self.format, self.cols), "the panel is of another matrix");
        assert!(view.rows() == self.rows && out.len() == self.panel_bytes, "the panel is of another matrix");
        let row_bytes = self.format.row_bytes(self.cols).unwrap_or(0);
        let (zero, tail) = if self.unit_cols == 8 { (0x88, self.cols % 2) } else { (0, 0) };
        for unit in 0..self.cols.next_multiple_of(PAD_COLS) / self.unit_cols {
            let at = self.codes_at(unit * self.unit_cols);
            for (lane, out) in out[at..at + PANEL_LINE].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let row = panel * PANEL_ROWS + lane;
                *out = [zero; 4];
                if row < self.rows {
                    let from = (4 * unit).min(row_bytes);
                    let bytes = &view.row_codes(row)[from..(from + 4).min(row_bytes)];
                    out[..bytes.len()].copy_from_slice(bytes);
                    if tail == 1 && from + bytes.len() == row_bytes && !bytes.is_empty() {
                        // The high nibble of the last byte belongs to no column.
                        let last = &mut out[bytes.len() - 1];
                        *last = *last & 0x0F | zero & 0xF0;
                    }
                }
            }
        }
        for group in 0..self.cols.div_ceil(self.group) {
            let at = self.scales_at(group);
            for (lane, out) in out[at..at + PANEL_LINE].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                let row = panel * PANEL_ROWS + lane;
                let scale = if row < self.rows { view.row_scales(row)[group] } else { 0.0 };
                *out = scale.to_le_bytes();
            }
        }
    }

    /// The way back from [`pack`](Self::pack): writes rows of codes and, as little-endian f32, their scales. What
    /// panels do not hold, the half byte behind an odd row of int4, becomes code 0.
    ///
    /// # Panics
    /// Unless `bytes`, `codes` and `scales` have exactly the bytes of this matrix.
    pub fn unpack(&self, bytes: &[u8], codes: &mut [u8], scales: &mut [u8]) {
        let row_bytes = self.format.row_bytes(self.cols).unwrap_or(0);
        let groups = self.cols.div_ceil(self.group);
        let lengths = (self.bytes(), self.rows * row_bytes, 4 * self.rows * groups);
        assert_eq!((bytes.len(), codes.len(), scales.len()), lengths, "the panels are of another matrix");
        let rows = codes.chunks_exact_mut(row_bytes).zip(scales.chunks_exact_mut(4 * groups));
        for (row, (codes, scales)) in rows.enumerate() {
            let panel = &bytes[row / PANEL_ROWS * self.panel_bytes..];
            let lane = 4 * (row % PANEL_ROWS);
            for (unit, out) in codes.chunks_mut(4).enumerate() {
                let at = self.codes_at(unit * self.unit_cols) + lane;
                out.copy_from_slice(&panel[at..at + out.len()]);
            }
            for (group, out) in scales.chunks_exact_mut(4).enumerate() {
                let at = self.scales_at(group) + lane;
                out.copy_from_slice(&panel[at..at + 4]);
            }
        }
    }

    /// Writes the whole matrix in panels.
    ///
    /// # Panics
    /// As [`pack_panel`](Self::pack_panel), `out` having [`bytes`](Self::bytes).
    pub fn pack(&self, view: &MatrixView<'_>, out: &mut [u8]) {
        assert_eq!(out.len(), self.bytes(), "the panels are of another matrix");
        for (panel, out) in out.chunks_exact_mut(self.panel_bytes).enumerate() {
            self.pack_panel(view, panel, out);
        }
    }
}

/// A matrix in panels, wherever its bytes live.
#[derive(Clone, Copy, Debug)]
pub struct PanelView<'a> {
    shape: PanelShape,
    bytes: &'a [u8],
}

/// Bytes that do not fit the panels they were said to be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a {} x {} {} matrix takes {} bytes in panels, but {found} bytes were given",
    shape.rows, shape.cols, shape.format, shape.bytes()
)]
pub struct PanelError {
    /// What was asked for.
    pub shape: PanelShape,
    /// Bytes given.
    pub found: usize,
}

impl<'a> PanelView<'a> {
    /// A view on `bytes`, which may have any alignment (64 is fastest).
    ///
    /// # Errors
    /// Unless there are exactly [`PanelShape::bytes`].
    pub fn new(shape: PanelShape, bytes: &'a [u8]) -> Result<Self, PanelError> {
        if bytes.len() != shape.bytes() {
            return Err(PanelError { shape, found: bytes.len() });
        }
        Ok(Self { shape, bytes })
    }

    /// How the matrix lies in panels.
    pub fn shape(&self) -> PanelShape {
        self.shape
    }

    /// The bytes of panel `panel`.
    ///
    /// # Panics
    /// If there is no such panel.
    #[inline(always)]
    pub fn panel(&self, panel: usize) -> &'a [u8] {
        let len = self.shape.panel_bytes;
        &self.bytes[panel * len..(panel + 1) * len]
    }

    /// The view on rows `rows` alone, which must be whole panels (the last may be partial).
    ///
    /// # Panics
    /// As [`PanelShape::slice_rows`].
    pub fn slice_rows(&self, rows: Range<usize>) -> PanelView<'a> {
        let shape = self.shape.slice_rows(rows.clone());
        let start = rows.start / PANEL_ROWS * self.shape.panel_bytes;
        PanelView { shape, bytes: &self.bytes[start..start + shape.bytes()] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::GroupSize;
    use crate::quant::int_code;

    /// The code of `(row, col)` and its scale, read from the description at the top of this file.
    fn read(shape: &PanelShape, bytes: &[u8], row: usize, col: usize) -> (i8, f32) {
        let panel = &bytes[row / 16 * shape.panel_bytes()..];
        let lane = row % 16;
        let padded = shape.cols().div_ceil(16) * 16;
        let scale_at = |at: usize| f32::from_le_bytes(panel[at + 4 * lane..][..4].try_into().unwrap());
        let nibble = |byte: u8| ((byte >> (4 * (col % 2))) & 15) as i8 - 8;
        match shape.format() {
            Format::Int8Row => (panel[64 + col / 4 * 64 + 4 * lane + col % 4] as i8, scale_at(0)),
            Format::Int4Row => (nibble(panel[64 + col / 8 * 64 + 4 * lane + col % 8 / 2]), scale_at(0)),
            Format::Int4Group(g) => {
                let g = g.get();
                let block = col / g * (g * 8 + 64);
                let codes = g.min(padded - col / g * g) * 8;
                let code = panel[block + col % g / 8 * 64 + 4 * lane + col % 8 / 2];
                (nibble(code), scale_at(block + codes))
            }
            _ => unreachable!("no other format has panels"),
        }
    }

    #[test]
    fn every_code_and_scale_is_where_the_description_says() {
        let mut formats = vec![Format::Int8Row, Format::Int4Row];
        formats.extend(GroupSize::ALL.map(Format::Int4Group));
        for format in formats {
            for (rows, cols) in [(1, 1), (16, 64), (17, 65), (33, 200), (5, 1023), (40, 512)] {
                let codes: Vec<u8> = (0..format.payload_bytes(rows, cols).unwrap())
                    .map(|i| (i * 89 + i / 251 * 7) as u8)
                    .collect();
                let scales: Vec<f32> =
                    (0..format.scale_count(rows, cols).unwrap()).map(|i| 1.0 + i as f32).collect();
                let view = MatrixView::new(format, rows, cols, &codes, &scales).unwrap();
                let shape = PanelShape::new(format, rows, cols).unwrap();
                let mut bytes = vec![0x55; shape.bytes()];
                shape.pack(&view, &mut bytes);
                let (mut back, mut back_scales) = (vec![0x55; codes.len()], vec![0x55; 4 * scales.len()]);
                shape.unpack(&bytes, &mut back, &mut back_scales);
                assert_eq!(back_scales, scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<_>>());
                if cols % 2 == 0 || format == Format::Int8Row {
                    assert_eq!(back, codes, "{format} {rows} x {cols}");
                }
                for row in 0..rows {
                    for col in 0..cols {
                        let code = int_code(format, view.row_codes(row), col);
                        let scale = view.row_scales(row)[col / shape.group_cols()];
                        assert_eq!(read(&shape, &bytes, row, col), (code, scale), "{format} {row} {col}");
                    }
                }
                for row in 0..rows.next_multiple_of(16) {
                    for col in 0..cols.next_multiple_of(16) {
                        let (code, scale) = read(&shape, &bytes, row, col);
                        assert!(row < rows && col < cols || code == 0, "padding is zero");
                        assert!(row < rows || scale == 0.0, "padding rows have no scale");
                    }
                }
            }
        }
    }

    #[test]
    fn panels_take_no_more_than_the_container_when_nothing_is_padded() {
        for format in [Format::Int8Row, Format::Int4Row, Format::Int4Group(GroupSize::ALL[3])] {
            let shape = PanelShape::new(format, 2048, 6144).unwrap();
            assert_eq!(shape.bytes(), format.total_bytes(2048, 6144).unwrap());
        }
    }

    #[test]
    fn what_has_no_panels_is_refused() {
        assert_eq!(PanelShape::new(Format::Bf16, 16, 16), None);
        assert_eq!(PanelShape::new(Format::Int2Row, 16, 16), None);
        assert_eq!(PanelShape::new(Format::Int8Row, 0, 16), None);
        assert_eq!(PanelShape::new(Format::Int8Row, usize::MAX, 64), None);
        assert_eq!(PanelShape::new(Format::Int4Row, 1, usize::MAX), None);
        let shape = PanelShape::new(Format::Int4Row, 20, 30).unwrap();
        let error = PanelView::new(shape, &[0; 100]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "a 20 x 30 int4-row matrix takes 640 bytes in panels, but 100 bytes were given"
        );
    }

    #[test]
    fn slices_are_whole_panels() {
        let shape = PanelShape::new(Format::Int8Row, 40, 16).unwrap();
        let bytes: Vec<u8> = (0..shape.bytes()).map(|i| (i / shape.panel_bytes()) as u8).collect();
        let view = PanelView::new(shape, &bytes).unwrap().slice_rows(16..40);
        assert_eq!((view.shape().rows(), view.shape().panels()), (24, 2));
        assert!(view.panel(1).iter().all(|b| *b == 2));
    }
}
