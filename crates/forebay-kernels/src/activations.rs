//! Quantised activations: int8 codes with one scale per group of 64 columns.

use crate::portable::quantise::split;
use crate::team::Chunks;
use crate::{Kernels, Team};

/// Columns that share one activation scale.
pub const GROUP: usize = 64;

/// A batch of activation rows, quantised to int8 (docs/numerics.md, "int8").
///
/// The rows lie in tiles of eight (the last may have fewer); in a tile, the first group
/// of all rows comes first, then the second one, so that a kernel reads one stream.
///
/// The buffers are reused: after the largest batch has been seen once,
/// [`quantise`](Self::quantise) and [`gather`](Self::gather) allocate nothing.
#[derive(Clone, Debug)]
pub struct Activations {
    cols: usize,
    batch: usize,
    /// Groups of a row; the last one may be partial and is filled up with zeros.
    groups: usize,
    /// In the order of the columns.
    codes: Vec<[i8; GROUP]>,
    /// The even columns of each group, then its odd ones.
    split: Vec<[i8; GROUP]>,
    totals: Vec<GroupTotals>,
}

/// What belongs to one group of a row beside its codes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct GroupTotals {
    /// What a code of 1 stands for.
    pub scale: f32,
    /// The sum of the codes, negated: what shifting weights to unsigned numbers costs, per
    /// unit of the shift.
    pub negated_sum: i32,
    /// The same for each sixteen columns.
    pub negated_parts: [i32; GROUP / 16],
}

/// Rows that lie side by side: as many as a kernel takes at once.
pub(crate) const TILE_ROWS: usize = 8;

/// Where some rows of a tile, or their ends, lie. In each of the three arrays, the entries of
/// the rows lie side by side, and those of the next group follow `stride` entries further.
#[derive(Clone, Copy)]
pub(crate) struct QuantRows {
    /// In the order of the columns, all within -127..=127.
    pub codes: *const [i8; GROUP],
    /// The even columns of each group, then its odd ones: the order of the nibbles of int4.
    pub split: *const [i8; GROUP],
    pub totals: *const GroupTotals,
    pub stride: usize,
}

impl Activations {
    /// An empty batch of rows of `cols` columns.
    pub fn new(cols: usize) -> Self {
        Self {
            cols,
            batch: 0,
            groups: cols.div_ceil(GROUP),
            codes: Vec::new(),
            split: Vec::new(),
            totals: Vec::new(),
        }
    }

    /// Bytes that `rows` rows of `cols` columns take.
    pub fn planned_bytes(rows: usize, cols: usize) -> usize {
        rows * cols.div_ceil(GROUP) * (2 * GROUP + size_of::<GroupTotals>())
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows held.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Replaces the contents by the rows of `x` (`[batch, cols]`, row-major), split over the team.
    ///
    /// A group that holds NaN or an infinity gets the scale NaN, so that every
    /// result that depends on it is NaN.
    ///
    /// # Panics
    /// If `x` is not a whole number of rows.
    pub fn quantise(&mut self, kernels: Kernels, team: &Team, x: &[f32]) {
        let cols = self.cols.max(1);
        assert_eq!(x.len() % cols, 0, "activations must be whole rows of {} columns", self.cols);
        self.resize(x.len() / cols);
        self.for_each_tile(team, &|first, rows, tile| {
            for (row, x) in x[first * cols..(first + rows) * cols].chunks(cols).enumerate() {
                let Tile { codes, split, totals } = tile;
                kernels.quantise_row(x, rows, &mut codes[row..], &mut split[row..], &mut totals[row..]);
            }
        });
    }

    /// Replaces the contents by rows `rows` of `kept`, in that order: the same bits as
    /// quantising those rows again.
    ///
    /// # Panics
    /// If the widths differ or a row is out of range.
    pub fn gather(&mut self, team: &Team, kept: &KeptRows, rows: &[usize]) {
        assert_eq!(self.cols, kept.cols, "gathered rows must have the same width");
        if let Some(row) = rows.iter().find(|row| **row >= kept.rows()) {
            panic!("row {row} of {} kept ones", kept.rows());
        }
        self.resize(rows.len());
        let groups = self.groups;
        self.for_each_tile(team, &|first, count, tile| {
            for (i, row) in rows[first..first + count].iter().enumerate() {
                for (g, from) in kept.groups[row * groups..(row + 1) * groups].iter().enumerate() {
                    let to = g * count + i;
                    tile.codes[to] = from.codes;
                    split(&from.codes, &mut tile.split[to]);
                    tile.totals[to] = from.totals;
                }
            }
        });
    }

    /// Calls `body(first row, rows, tile)` for every tile, split over the team.
    fn for_each_tile(&mut self, team: &Team, body: &(dyn Fn(usize, usize, &mut Tile<'_>) + Sync)) {
        let (batch, entries) = (self.batch, (TILE_ROWS * self.groups).max(1));
        let codes = Chunks::new(&mut self.codes, entries);
        let split = Chunks::new(&mut self.split, entries);
        let totals = Chunks::new(&mut self.totals, entries);
        team.run(codes.count(), &|tile| {
            let first = tile * TILE_ROWS;
            // SAFETY: the three have as many entries and chunks; every part is run once.
            let mut tile =
                unsafe { Tile { codes: codes.get(tile), split: split.get(tile), totals: totals.get(tile) } };
            body(first, TILE_ROWS.min(batch - first), &mut tile);
        });
    }

    /// The codes of row `row`, without the zeros that fill up the last group.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn codes(&self, row: usize) -> Vec<i8> {
        self.entries(row).flat_map(|i| self.codes[i]).take(self.cols).collect()
    }

    /// The scales of row `row`, one per started group of [`GROUP`] columns.
    ///
    /// # Panics
    /// If `row` is out of range.
    pub fn scales(&self, row: usize) -> Vec<f32> {
        self.entries(row).map(|i| self.totals[i].scale).collect()
    }

    /// Where `rows` rows from row `first` on, all of one tile, lie from group `group` on.
    ///
    /// # Panics
    /// If there are no such rows or no such group.
    #[inline(always)]
    pub(crate) fn rows(&self, first: usize, rows: usize, group: usize) -> QuantRows {
        assert!(first % TILE_ROWS + rows <= TILE_ROWS && first + rows <= self.batch && group < self.groups);
        let place = self.place(first);
        let from = place.start + group * place.stride;
        QuantRows {
            codes: self.codes[from..].as_ptr(),
            split: self.split[from..].as_ptr(),
            totals: self.totals[from..].as_ptr(),
            stride: place.stride,
        }
    }

    /// Where the entries of row `row` lie.
    fn place(&self, row: usize) -> Place {
        let first = row / TILE_ROWS * TILE_ROWS;
        let stride = TILE_ROWS.min(self.batch - first);
        Place { start: first * self.groups + row % TILE_ROWS, stride }
    }

    fn entries(&self, row: usize) -> impl Iterator<Item = usize> {
        let place = self.place(row);
        (0..self.groups).map(move |g| place.start + g * place.stride)
    }

    fn resize(&mut self, batch: usize) {
        self.batch = batch;
        self.codes.resize(batch * self.groups, [0; GROUP]);
        self.split.resize(batch * self.groups, [0; GROUP]);
        self.totals.resize(batch * self.groups, GroupTotals::default());
    }
}

/// Quantised rows that are kept for later, row after row, in less memory than [`Activations`]
/// takes and in no order that a kernel could read: what a long prompt's routed experts come back to.
#[derive(Clone, Debug)]
pub struct KeptRows {
    cols: usize,
    per_row: usize,
    groups: Vec<KeptGroup>,
}

/// One group of one row.
#[derive(Clone, Copy, Debug)]
struct KeptGroup {
    codes: [i8; GROUP],
    totals: GroupTotals,
}

impl KeptRows {
    /// No rows of `cols` columns.
    pub fn new(cols: usize) -> Self {
        Self { cols, per_row: cols.div_ceil(GROUP), groups: Vec::new() }
    }

    /// Bytes that `rows` rows of `cols` columns take.
    pub fn planned_bytes(rows: usize, cols: usize) -> usize {
        rows * cols.div_ceil(GROUP) * size_of::<KeptGroup>()
    }

    /// Columns of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Rows kept.
    pub fn rows(&self) -> usize {
        self.groups.len() / self.per_row.max(1)
    }

    /// Forgets all rows, and makes room for `rows` of them.
    pub fn clear(&mut self, rows: usize) {
        self.groups.clear();
        self.groups.reserve_exact(rows * self.per_row);
    }

    /// Keeps every row of `batch`, after those that are kept already.
    ///
    /// # Panics
    /// If the widths differ.
    pub fn keep(&mut self, batch: &Activations) {
        assert_eq!(self.cols, batch.cols, "kept rows must have the same width");
        for row in 0..batch.batch {
            let entries = batch.entries(row);
            self.groups.extend(entries.map(|i| KeptGroup { codes: batch.codes[i], totals: batch.totals[i] }));
        }
    }
}

/// The entries of a tile: those of its rows for the first group, then for the second one ...
struct Tile<'a> {
    codes: &'a mut [[i8; GROUP]],
    split: &'a mut [[i8; GROUP]],
    totals: &'a mut [GroupTotals],
}

/// Where the groups of a row lie: the first one, and the distance to the next.
struct Place {
    start: usize,
    stride: usize,
}
