//! A checked window on the bytes of one weight matrix.

use crate::format::Format;

/// One weight matrix, `rows x cols`, wherever its bytes live.
///
/// A view exists only with exactly the bytes and scales that its format and
/// shape ask for, so kernels need no further checks.
#[derive(Clone, Copy, Debug)]
pub struct MatrixView<'a> {
    rows: usize,
    cols: usize,
    format: Format,
    codes: &'a [u8],
    scales: &'a [f32],
}

/// Bytes that do not fit the shape they were said to have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "a {rows} x {cols} {format} matrix takes {want_codes:?} bytes and {want_scales:?} scales, \
     but {found_codes} bytes and {found_scales} scales were given"
)]
pub struct ViewError {
    /// Rows (outputs).
    pub rows: usize,
    /// Columns (inputs).
    pub cols: usize,
    /// Storage format.
    pub format: Format,
    /// Bytes the format needs; `None` when the count overflows.
    pub want_codes: Option<usize>,
    /// Scales the format needs; `None` when the count overflows.
    pub want_scales: Option<usize>,
    /// Bytes given.
    pub found_codes: usize,
    /// Scales given.
    pub found_scales: usize,
}

impl<'a> MatrixView<'a> {
    /// A view on `codes` and `scales`; an error unless both have exactly the right length.
    pub fn new(
        format: Format,
        rows: usize,
        cols: usize,
        codes: &'a [u8],
        scales: &'a [f32],
    ) -> Result<Self, ViewError> {
        let want_codes = format.payload_bytes(rows, cols);
        let want_scales = format.scale_count(rows, cols);
        if want_codes != Some(codes.len()) || want_scales != Some(scales.len()) {
            let (found_codes, found_scales) = (codes.len(), scales.len());
            return Err(ViewError { rows, cols, format, want_codes, want_scales, found_codes, found_scales });
        }
        Ok(Self { rows, cols, format, codes, scales })
    }

    /// Rows (outputs).
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns (inputs).
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Storage format.
    pub fn format(&self) -> Format {
        self.format
    }

    /// All codes, row after row. Alignment is that of the caller's buffer: 1 is allowed.
    pub fn codes(&self) -> &'a [u8] {
        self.codes
    }

    /// All scales: per row, per row and group (group fastest), or per FP8 block (column block fastest).
    pub fn scales(&self) -> &'a [f32] {
        self.scales
    }

    /// The codes of row `row`.
    ///
    /// # Panics
    /// If `row` is not below [`rows`](Self::rows).
    #[inline]
    pub fn row_codes(&self, row: usize) -> &'a [u8] {
        let stride = self.codes.len() / self.rows;
        &self.codes[row * stride..(row + 1) * stride]
    }

    /// The scales that row `row` uses: one, one per group, or one per FP8 column block.
    ///
    /// # Panics
    /// If `row` is not below [`rows`](Self::rows).
    #[inline]
    pub fn row_scales(&self, row: usize) -> &'a [f32] {
        let (line, per_line) = match self.format {
            Format::F32 | Format::Bf16 | Format::F16 => return &[],
            Format::Fp8Block => {
                (row / crate::format::FP8_BLOCK, self.cols.div_ceil(crate::format::FP8_BLOCK))
            }
            Format::Int8Row | Format::Int4Row | Format::Int2Row => (row, 1),
            Format::Int4Group(size) => (row, self.cols.div_ceil(size.get())),
        };
        &self.scales[line * per_line..(line + 1) * per_line]
    }

    /// The view on rows `range` alone. FP8 rows must start on a block boundary.
    ///
    /// # Panics
    /// If the range leaves the matrix, or splits an FP8 block.
    pub fn slice_rows(&self, range: std::ops::Range<usize>) -> MatrixView<'a> {
        let stride = self.codes.len().checked_div(self.rows).unwrap_or(0);
        let codes = &self.codes[range.start * stride..range.end * stride];
        let scales = match self.format {
            Format::F32 | Format::Bf16 | Format::F16 => &self.scales[..0],
            Format::Fp8Block => {
                assert_eq!(range.start % crate::format::FP8_BLOCK, 0, "an FP8 block cannot be split");
                let per_line = self.cols.div_ceil(crate::format::FP8_BLOCK);
                let lines =
                    range.start / crate::format::FP8_BLOCK..range.end.div_ceil(crate::format::FP8_BLOCK);
                &self.scales[lines.start * per_line..lines.end * per_line]
            }
            Format::Int8Row | Format::Int4Row | Format::Int2Row => &self.scales[range.clone()],
            Format::Int4Group(size) => {
                let groups = self.cols.div_ceil(size.get());
                &self.scales[range.start * groups..range.end * groups]
            }
        };
        MatrixView { rows: range.len(), cols: self.cols, format: self.format, codes, scales }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::GroupSize;

    #[test]
    fn wrong_lengths_are_refused() {
        let codes = [0u8; 10];
        let scales = [1f32; 3];
        // A 3 x 5 matrix takes 15 (int8), 9 (int4) or 6 (int2) bytes; 10 fits nothing.
        for format in [Format::Int8Row, Format::Int4Row, Format::Int2Row] {
            let err = MatrixView::new(format, 3, 5, &codes, &scales).unwrap_err();
            assert_eq!(err.found_codes, 10);
        }
        assert!(MatrixView::new(Format::Int4Row, 3, 5, &codes[..9], &scales).is_ok());
        assert!(MatrixView::new(Format::Int4Row, 3, 5, &codes[..9], &scales[..2]).is_err());
    }

    #[test]
    fn rows_find_their_scales() {
        let codes = [0u8; 2 * 10];
        let scales = [0.0, 0.1, 1.0, 1.1];
        let format = Format::Int4Group(GroupSize::new(16).unwrap());
        let view = MatrixView::new(format, 2, 20, &codes, &scales).unwrap();
        assert_eq!(view.row_scales(1), &[1.0, 1.1]);
        assert_eq!(view.slice_rows(1..2).row_scales(0), &[1.0, 1.1]);
        assert_eq!(view.row_codes(1).len(), 10);
    }
}
