//! Quantised activations: int8 codes with one scale per group of 64 columns.

use crate::Kernels;
use crate::portable::QuantGroup;

/// Columns that share one activation scale.
pub const GROUP: usize = 64;

/// A batch of activation rows, quantised to int8 (docs/numerics.md, "int8").
///
/// The buffers are reused: after the largest batch has been seen once,
/// [`quantise`](Self::quantise) and [`gather`](Self::gather) allocate nothing.
#[derive(Clone, Debug)]
pub struct Activations {
    cols: usize,
    batch: usize,
    /// Groups of a row; the last one may be partial and is filled up with zeros.
    groups: usize,
    codes: Vec<[i8; GROUP]>,
    scales: Vec<f32>,
    corrections: Vec<[i32; 4]>,
}

/// One quantised row, or its end: one entry per group in each slice.
#[derive(Clone, Copy)]
pub(crate) struct QuantRow<'a> {
    pub codes: &'a [[i8; GROUP]],
    pub scales: &'a [f32],
    /// `-128 * sum of codes` of each sixteen columns.
    pub corrections: &'a [[i32; 4]],
}

impl<'a> QuantRow<'a> {
    /// Group `g` alone.
    #[inline(always)]
    pub(crate) fn group(self, g: usize) -> QuantGroup<'a> {
        QuantGroup { codes: &self.codes[g], corrections: &self.corrections[g], scale: self.scales[g] }
    }

    /// The row without its first `groups` groups.
    #[inline(always)]
    pub(crate) fn from(self, groups: usize) -> Self {
        Self {
            codes: &self.codes[groups..],
            scales: &self.scales[groups..],
            corrections: &self.corrections[groups..],
        }
    }
}

impl Activations {
    /// An empty batch of rows of `cols` columns.
    pub fn new(cols: usize) -> Self {
        Self {
            cols,
            batch: 0,
            groups: cols.div_ceil(GROUP),
            codes: Vec::new(),
            scales: Vec::new(),
            corrections: Vec::new(),
        }
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows held.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Replaces the contents by the rows of `x` (`[batch, cols]`, row-major).
    ///
    /// A group that holds NaN or an infinity gets the scale NaN, so that every
    /// result that depends on it is NaN.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows.
    pub fn quantise(&mut self, kernels: Kernels, x: &[f32]) {
        assert_eq!(x.len() % self.cols.max(1), 0, "activations must be whole rows of {} columns", self.cols);
        self.resize(x.len() / self.cols.max(1));
        let (codes, scales) = (&mut self.codes, &mut self.scales);
        let groups = self.groups.max(1);
        let outputs = codes.chunks_mut(groups).zip(scales.chunks_mut(groups));
        for ((row, (codes, scales)), corrections) in
            x.chunks(self.cols.max(1)).zip(outputs).zip(self.corrections.chunks_mut(groups))
        {
            kernels.quantise_row(row, codes, scales, corrections);
        }
    }

    /// Replaces the contents by rows `rows` of `source`, in that order: the same
    /// bits as quantising those rows again.
    ///
    /// # Panics
    /// If the widths differ or a row is out of range.
    pub fn gather(&mut self, source: &Activations, rows: &[usize]) {
        assert_eq!(self.cols, source.cols, "gathered rows must have the same width");
        self.resize(rows.len());
        let groups = self.groups;
        for (to, from) in rows.iter().enumerate() {
            assert!(*from < source.batch, "row {from} of a batch of {}", source.batch);
            let (to, from) = (to * groups..(to + 1) * groups, from * groups..(from + 1) * groups);
            self.codes[to.clone()].copy_from_slice(&source.codes[from.clone()]);
            self.scales[to.clone()].copy_from_slice(&source.scales[from.clone()]);
            self.corrections[to].copy_from_slice(&source.corrections[from]);
        }
    }

    /// The codes of row `row`, without the zeros that fill up the last group.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn codes(&self, row: usize) -> &[i8] {
        &self.row(row).codes.as_flattened()[..self.cols]
    }

    /// The scales of row `row`, one per started group of [`GROUP`] columns.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn scales(&self, row: usize) -> &[f32] {
        self.row(row).scales
    }

    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> QuantRow<'_> {
        let range = row * self.groups..(row + 1) * self.groups;
        QuantRow {
            codes: &self.codes[range.clone()],
            scales: &self.scales[range.clone()],
            corrections: &self.corrections[range],
        }
    }

    fn resize(&mut self, batch: usize) {
        self.batch = batch;
        self.codes.resize(batch * self.groups, [0; GROUP]);
        self.scales.resize(batch * self.groups, 0.0);
        self.corrections.resize(batch * self.groups, [0; 4]);
    }
}
