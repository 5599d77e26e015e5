//! A few batch rows with weights in panels: a register holds one virtual lane of the sums of
//! sixteen weight rows. Lane `j` takes the columns `16 k + j`, and a column of a panel lies in the
//! lanes of a register as it is; so nothing is transposed, and the tree at the end adds registers.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::Sum;
use crate::portable::lanes::LANES;
use crate::portable::{CHUNK, Out, Room};
use forebay_core::format::Format;
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelShape, PanelView};
use std::ops::Range;

/// Batch rows that are multiplied together.
const TILE: usize = 4;
/// Most batch rows: several tiles read the codes again, from the cache.
const MOST: usize = 15;
/// How far ahead of its use a panel is asked for.
const AHEAD: usize = 4096;

/// The sums of one batch row and the rows of a panel: `sums[lane][row]`.
type RowSums = [Sum; LANES];

/// A format of panels.
trait Unit {
    /// Columns of one unit.
    const COLS: usize;
    /// Units of sixteen columns.
    const UNITS: usize = LANES / Self::COLS;

    /// The codes of one column of sixteen rows.
    ///
    /// # Safety
    /// The processor has the room's instruction set; `column < COLS`.
    unsafe fn column<R: Room>(unit: &[u8; PANEL_LINE], column: usize) -> R::Lanes;
}

/// Two's complement.
struct Int8;

impl Unit for Int8 {
    const COLS: usize = 4;

    #[inline(always)]
    unsafe fn column<R: Room>(unit: &[u8; PANEL_LINE], column: usize) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::int8_column(unit, column) }
    }
}

/// Value + 8, even column in the low nibble.
struct Int4;

impl Unit for Int4 {
    const COLS: usize = 8;

    #[inline(always)]
    unsafe fn column<R: Room>(unit: &[u8; PANEL_LINE], column: usize) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe { R::int4_column(unit, column) }
    }
}

/// Batch rows that are not worth decoding the weights to memory.
#[inline(always)]
fn most<R: Room>() -> usize {
    if R::REGISTERS >= 32 { MOST } else { TILE }
}

/// As [`super::panels`]; false, and nothing done, if the weights are better decoded first.
///
/// # Safety
/// As [`super::panels`].
#[inline(always)]
pub(super) unsafe fn panels<R: Room>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) -> bool {
    if x.len() / view.shape().cols() > most::<R>() {
        return false;
    }
    // SAFETY: passed on to the caller; these are the formats of the units.
    unsafe {
        if view.shape().format() == Format::Int8Row {
            each_panel::<R, Int8>(view, rows, x, out);
        } else {
            each_panel::<R, Int4>(view, rows, x, out);
        }
    }
    true
}

#[inline(always)]
unsafe fn each_panel<R: Room, F: Unit>(view: &PanelView<'_>, rows: Range<usize>, x: &[f32], out: Out) {
    let shape = view.shape();
    let cols = shape.cols();
    let batch = x.len() / cols;
    let tile = batch.div_ceil(batch.div_ceil(TILE).max(1)).max(1);
    let mut sums = [[[0f32; PANEL_ROWS]; LANES]; MOST];
    for first in rows.clone().step_by(PANEL_ROWS) {
        let sums = &mut sums[..batch];
        sums.fill([[0.0; PANEL_ROWS]; LANES]);
        let panel = view.panel(first / PANEL_ROWS);
        // What all tiles and passes read stays in the first cache.
        for start in (0..cols).step_by(CHUNK) {
            let part = Part::<F>::new(&shape, panel, start..cols.min(start + CHUNK));
            for (t, sums) in sums.chunks_mut(tile).enumerate() {
                let x = &x[t * tile * cols..];
                // SAFETY: passed on to the caller.
                unsafe {
                    match (sums.len(), R::REGISTERS >= 32) {
                        (1, true) => part.add::<R, 2, 8, 1>(x, sums),
                        (2, true) => part.add::<R, 1, 8, 2>(x, sums),
                        (3, true) => part.add::<R, 1, 8, 3>(x, sums),
                        (_, true) => part.add::<R, 1, 4, 4>(x, sums),
                        (1, false) => part.add::<R, 1, 4, 1>(x, sums),
                        (2, false) => part.add::<R, 1, 2, 2>(x, sums),
                        (3, false) => part.add::<R, 1, 1, 3>(x, sums),
                        (_, false) => part.add::<R, 1, 1, 4>(x, sums),
                    }
                }
            }
        }
        let here = PANEL_ROWS.min(rows.end - first);
        for (b, sums) in sums.iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe {
                for (i, result) in tree::<R>(sums).into_iter().enumerate().take(here) {
                    out.put(b, first + i, result);
                }
            }
        }
    }
}

/// Some columns of a panel, starting with a weight group.
struct Part<'a, F> {
    panel: &'a [u8],
    /// Columns of the matrix, and those of this part.
    all: usize,
    cols: Range<usize>,
    /// Where the codes start.
    codes: usize,
    /// Whole lines of sixteen columns, and those of a weight group.
    lines: usize,
    group: usize,
    /// Bytes of a weight group with the scales behind it; 0 if there is one scale a row.
    stride: usize,
    unit: std::marker::PhantomData<F>,
}

impl<'a, F: Unit> Part<'a, F> {
    #[inline(always)]
    fn new(shape: &PanelShape, panel: &'a [u8], cols: Range<usize>) -> Self {
        let grouped = shape.codes_at(0) == 0;
        let group = shape.group_cols() / LANES;
        let stride = if grouped { (group * F::UNITS + 1) * PANEL_LINE } else { 0 };
        let codes = shape.codes_at(cols.start);
        let lines = cols.len() / LANES;
        let groups = if grouped { lines.div_ceil(group) } else { 0 };
        assert!(codes + (lines * F::UNITS + groups) * PANEL_LINE <= panel.len());
        assert_eq!((shape.unit_cols(), panel.len()), (F::COLS, shape.panel_bytes()));
        Self { panel, all: shape.cols(), cols, codes, lines, group, stride, unit: std::marker::PhantomData }
    }

    /// Where the scales of the group lie whose codes start at `codes`.
    #[inline(always)]
    fn scales(&self, codes: usize) -> usize {
        // The last group may have fewer codes, and its scales end the panel.
        if self.stride == 0 { 0 } else { (codes + self.stride).min(self.panel.len()) - PANEL_LINE }
    }

    /// Adds these columns of `S` batch rows to their sums, `T` times `L` lanes at a time.
    ///
    /// # Safety
    /// The processor has the room's instruction set.
    #[inline(always)]
    unsafe fn add<R: Room, const T: usize, const L: usize, const S: usize>(
        &self,
        x: &[f32],
        sums: &mut [RowSums],
    ) {
        let Some(sums) = sums.first_chunk_mut::<S>() else { unreachable!("a tile has its size") };
        assert!(x.len() >= (S - 1) * self.all + self.cols.end);
        // SAFETY: passed on to the caller; every batch row has these columns.
        unsafe {
            let mut rows = [x.as_ptr().wrapping_add(self.cols.start); S];
            for s in 0..S {
                rows[s] = rows[s].wrapping_add(s * self.all);
            }
            for unit in (0..F::UNITS).step_by((T * L / F::COLS).max(1)) {
                // One after the other, so that the column is a constant.
                self.pass::<R, T, L, S>(unit, 0, rows, sums);
                if L < F::COLS {
                    self.pass::<R, T, L, S>(unit, L, rows, sums);
                }
                if 2 * L < F::COLS {
                    self.pass::<R, T, L, S>(unit, 2 * L, rows, sums);
                    self.pass::<R, T, L, S>(unit, 3 * L, rows, sums);
                }
                if 4 * L < F::COLS {
                    self.pass::<R, T, L, S>(unit, 4 * L, rows, sums);
                    self.pass::<R, T, L, S>(unit, 5 * L, rows, sums);
                    self.pass::<R, T, L, S>(unit, 6 * L, rows, sums);
                    self.pass::<R, T, L, S>(unit, 7 * L, rows, sums);
                }
            }
            self.tail::<R, S>(rows, sums);
        }
    }

    /// The lanes from that of column `column` of unit `unit` on, `L` of them `T` times (once or
    /// twice), in whole lines.
    ///
    /// # Safety
    /// As [`add`](Self::add); the rows of `x` have these lines; a line has these lanes.
    #[inline(always)]
    unsafe fn pass<R: Room, const T: usize, const L: usize, const S: usize>(
        &self,
        unit: usize,
        column: usize,
        x: [*const f32; S],
        sums: &mut [RowSums; S],
    ) {
        let first = unit * F::COLS + column;
        let units = (L / F::COLS).max(1);
        // The other passes read the units between, so it is as far in time.
        let ahead = AHEAD * F::UNITS / (T * units);
        // SAFETY: `new` has checked that the panel has these units and their scales.
        unsafe {
            // Two arrays, because the compiler leaves longer ones in memory.
            let mut low = load::<R, L, S>(sums, first);
            let mut high = if T == 2 { load::<R, L, S>(sums, first + L) } else { low };
            let mut group_start = self.codes;
            let mut line = 0;
            while line < self.lines {
                let scales = self.panel.as_ptr().add(self.scales(group_start)).cast::<[f32; PANEL_ROWS]>();
                let scales = R::load(&scales.read_unaligned());
                let end = self.lines.min(line + self.group);
                let mut at = self.panel.as_ptr().add(group_start + unit * PANEL_LINE);
                while line < end {
                    if column == 0 {
                        for u in 0..T * units {
                            R::prefetch(at.wrapping_add(u * PANEL_LINE + ahead));
                        }
                    }
                    let mut x = x;
                    for s in 0..S {
                        x[s] = x[s].add(line * LANES + first);
                    }
                    step::<R, F, L, S>(at, column, x, scales, &mut low);
                    if T == 2 {
                        for s in 0..S {
                            x[s] = x[s].add(L);
                        }
                        step::<R, F, L, S>(at.add(units * PANEL_LINE), column, x, scales, &mut high);
                    }
                    at = at.add(F::UNITS * PANEL_LINE);
                    line += 1;
                }
                group_start += self.stride;
            }
            store::<R, L, S>(low, sums, first);
            if T == 2 {
                store::<R, L, S>(high, sums, first + L);
            }
        }
    }

    /// The columns after the last whole line: some lanes take one more step.
    ///
    /// # Safety
    /// As [`add`](Self::add); the rows of `x` have these columns.
    #[inline(always)]
    unsafe fn tail<R: Room, const S: usize>(&self, x: [*const f32; S], sums: &mut [RowSums; S]) {
        let start = self.lines * LANES;
        if start == self.cols.len() {
            return;
        }
        // Of a format with groups, the scales of those before lie between the codes.
        let groups = if self.stride == 0 { 0 } else { self.lines / self.group };
        let codes = self.codes + (self.lines * F::UNITS + groups) * PANEL_LINE;
        let scales = self.scales(self.codes + groups * self.stride);
        let line = |at: usize| self.panel[at..].first_chunk::<PANEL_LINE>().expect("a panel has whole lines");
        // SAFETY: passed on to the caller.
        unsafe {
            let scales = R::load(&bytemuck::pod_read_unaligned(line(scales)));
            for lane in 0..self.cols.len() - start {
                let unit = line(codes + lane / F::COLS * PANEL_LINE);
                let weights = R::mul(F::column::<R>(unit, lane % F::COLS), scales);
                for s in 0..S {
                    let x = R::splat(*x[s].add(start + lane));
                    let sum = &mut sums[s][lane];
                    R::store(R::fma(x, weights, R::load(sum)), sum);
                }
            }
        }
    }
}

/// The sums of `L` lanes from lane `first` on.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn load<R: Room, const L: usize, const S: usize>(
    sums: &[RowSums; S],
    first: usize,
) -> [[R::Lanes; S]; L] {
    // SAFETY: passed on to the caller.
    unsafe {
        let mut acc = [[R::splat(0.0); S]; L];
        for l in 0..L {
            for s in 0..S {
                acc[l][s] = R::load(&sums[s][first + l]);
            }
        }
        acc
    }
}

/// The way back.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn store<R: Room, const L: usize, const S: usize>(
    acc: [[R::Lanes; S]; L],
    sums: &mut [RowSums; S],
    first: usize,
) {
    for l in 0..L {
        for s in 0..S {
            // SAFETY: passed on to the caller.
            unsafe { R::store(acc[l][s], &mut sums[s][first + l]) };
        }
    }
}

/// One step of `L` lanes: the columns from `column` of the unit at `at` on.
///
/// # Safety
/// The processor has the room's instruction set; the units are there; each row of `x` has `L` columns.
#[inline(always)]
unsafe fn step<R: Room, F: Unit, const L: usize, const S: usize>(
    at: *const u8,
    column: usize,
    x: [*const f32; S],
    scales: R::Lanes,
    acc: &mut [[R::Lanes; S]; L],
) {
    for l in 0..L {
        // SAFETY: passed on to the caller.
        unsafe {
            let unit = at.add((column + l) / F::COLS * PANEL_LINE).cast();
            let weights = R::mul(F::column::<R>(&*unit, (column + l) % F::COLS), scales);
            for s in 0..S {
                acc[l][s] = R::fma(R::splat(*x[s].add(l)), weights, acc[l][s]);
            }
        }
    }
}

/// The fixed tree 8-4-2-1 over the lanes, for every row.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn tree<R: Room>(sums: &RowSums) -> Sum {
    // SAFETY: passed on to the caller.
    unsafe {
        let one = R::splat(1.0);
        let mut lanes = [one; LANES];
        for j in 0..LANES {
            lanes[j] = R::load(&sums[j]);
        }
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                // Multiplied by one, which changes nothing, it is the sum, rounded.
                lanes[i] = R::fma(lanes[i + half], one, lanes[i]);
            }
        }
        let mut out = [0f32; PANEL_ROWS];
        R::store(lanes[0], &mut out);
        out
    }
}
