//! Row-major weights to panel order, a chunk of columns of sixteen rows at a time.

use super::{CHUNK, Room, decode};
use crate::activations::GROUP;
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
const AHEAD: usize = 320;

/// Row-major weights of an integer format, their shape worked out once.
pub(crate) struct RowSource<'a> {
    pub(super) format: Format,
    pub(super) cols: usize,
    pub(super) codes: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) row_bytes: usize,
    pub(super) row_scales: usize,
    /// Columns that share a scale.
    pub(super) group: usize,
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

    /// Columns of a unit once the codes are in panel order: int2 is widened to int8 first.
    pub(super) fn unit_cols(&self) -> usize {
        if matches!(self.format, Format::Int4Row | Format::Int4Group(_)) { 8 } else { 4 }
    }

    /// Whether the codes can be multiplied where they lie: whole activation groups share a scale.
    pub(crate) fn is_direct(&self) -> bool {
        let whole = self.row_scales == 1 || self.group.is_multiple_of(GROUP);
        self.format != Format::Int2Row && self.cols > 0 && whole
    }

    /// Where `rows` rows from row `row` on are asked for, in the order of the memory, while
    /// columns from `start` on of as many other rows are multiplied.
    pub(crate) fn below(&self, row: usize, rows: usize, start: usize) -> *const u8 {
        let before = self.row_bytes * start / self.cols.max(1);
        self.codes.as_ptr().wrapping_add(row * self.row_bytes + rows * before)
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
    /// sixteen of `rows`; if there are fewer, the lines of the others hold anything.
    /// What follows in these rows is asked for meanwhile, even where the second cache has it already:
    /// sixteen rows at once are too many for the processor to foresee.
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
        self.unit_cols = source.unit_cols();
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
                transpose::<R>(codes.as_ptr().add(from), stride, to - from, Some(from), &mut self.codes);
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
                    transpose::<R>(start, 4 * source.row_scales, len, Some(4 * first), out);
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

/// Asks for what is read `ahead` bytes later than the lines at `here`, of sixteen rows of `row_bytes`
/// bytes one behind the other: more of these rows, and after their end the sixteen rows below. The
/// lines start with byte `from` of the rows.
#[inline(always)]
pub(super) fn ask_ahead<R: Room>(here: *const u8, from: usize, row_bytes: usize, ahead: usize) {
    let beyond = from + ahead >= row_bytes;
    let next = here.wrapping_add(ahead + if beyond { (PANEL_ROWS - 1) * row_bytes } else { 0 });
    for i in 0..PANEL_ROWS {
        R::prefetch(next.wrapping_add(i * row_bytes));
    }
}

/// Sixteen rows of `len` bytes, the first at `start` and the next `stride` bytes further, as
/// lines of words. Of rows one behind the other, `from` is the byte that they start with here:
/// what follows is asked for meanwhile.
///
/// # Safety
/// The rows are there; the processor has the room's instruction set.
#[inline(always)]
pub(super) unsafe fn transpose<R: Room>(
    start: *const u8,
    stride: usize,
    len: usize,
    from: Option<usize>,
    out: &mut [u8],
) {
    let out = out.as_chunks_mut::<BLOCK>().0;
    let whole = len / PANEL_LINE;
    for (block, out) in out.iter_mut().enumerate().take(whole) {
        let here = start.wrapping_add(block * PANEL_LINE);
        if let Some(from) = from {
            ask_ahead::<R>(here, from + block * PANEL_LINE, stride, AHEAD);
        }
        // SAFETY: 64 bytes of each row from here on; the instruction set is there.
        unsafe { R::transpose(here, stride, out) };
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
