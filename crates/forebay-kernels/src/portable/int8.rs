//! The `int8` arithmetic: integer weights against quantised activations.
//!
//! Everything is multiplied in panel order (`forebay_core::panel`): sixteen weight rows in
//! sixteen lanes, so that no sum ever crosses lanes. Panels are used where they lie; row-major
//! weights are turned into the same order a chunk of columns at a time, in the cache.

use super::pack::{Chunk, RowSource};
use super::space::Space;
use super::{CHUNK, Out, Room, direct};
use crate::Activations;
use crate::activations::{GROUP, GroupTotals, QuantRows};
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelView};
use forebay_core::view::MatrixView;
use std::ops::Range;

/// Batch rows whose sums are kept while a block of weight rows goes by.
const BATCH: usize = 64;
/// Panels, or pairs of them, that a tile of batch rows meets before the next tile.
const TOGETHER: usize = 4;
/// Columns of such a tile that are near together; a multiple of every weight group.
const BLOCK: usize = 4 * CHUNK;
/// From this many batch rows on, two panels share each load of the activations.
const PAIR_FROM: usize = 4;

/// The sums of one panel and one batch row.
type Sums = [f32; PANEL_ROWS];

/// A run of columns of `P` panels.
#[derive(Clone, Copy)]
pub(crate) struct Strip<const P: usize> {
    /// The units of the first weight group.
    pub codes: [*const u8; P],
    /// The scales of the first weight group; `None` if each group's lie behind its codes.
    pub scales: Option<[*const u8; P]>,
    /// What is asked for while the codes go by: as many bytes from here on as there are codes.
    pub ahead: Option<*const u8>,
    /// Columns of the run.
    pub cols: usize,
    /// Columns of a weight group; the run starts with a whole one.
    pub group: usize,
    /// Columns of a unit: 4 (int8) or 8 (int4).
    pub unit_cols: usize,
}

/// `y[b][row]` for weights in panels, every batch row `b` and `row` of `rows`, which start
/// with a panel. `FREE` is for `free_order` alone.
///
/// # Safety
/// The processor has the room's instruction set; `rows` lie inside the matrix; `x` has as
/// many columns; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn panels<R: Room, const FREE: bool>(
    view: &PanelView<'_>,
    rows: Range<usize>,
    x: &Activations,
    out: Out,
) {
    let shape = view.shape();
    let (cols, batch) = (shape.cols(), x.batch());
    let panels = if R::PAIRS && batch >= PAIR_FROM { 2 } else { 1 };
    // Where several tiles of the batch go by, each is read for many panels while it is near.
    let (together, block) = if batch > BATCH { (TOGETHER, BLOCK) } else { (1, cols.max(1)) };
    let mut space = Space::<[Sums; 2], { TOGETHER * BATCH }>::new();
    for row in rows.clone().step_by(together * panels * PANEL_ROWS) {
        let some = row..rows.end.min(row + together * panels * PANEL_ROWS);
        for first in (0..batch).step_by(BATCH) {
            let tile = BATCH.min(batch - first);
            let sums = space.zeros(together * tile);
            for start in (0..cols).step_by(block) {
                let columns = start..cols.min(start + block);
                for (row, sums) in some.clone().step_by(panels * PANEL_ROWS).zip(sums.chunks_exact_mut(tile))
                {
                    let group = start / GROUP;
                    // SAFETY: passed on to the caller; the panels are there.
                    unsafe {
                        if panels == 2 && row + PANEL_ROWS < some.end {
                            let strip = panel_strip::<2>(view, row / PANEL_ROWS, columns.clone());
                            rows_of_batch::<R, 2, FREE>(&strip, x, first, group, sums);
                        } else {
                            let strip = panel_strip::<1>(view, row / PANEL_ROWS, columns.clone());
                            rows_of_batch::<R, 1, FREE>(&strip, x, first, group, sums);
                        }
                    }
                }
            }
            for (row, sums) in some.clone().step_by(panels * PANEL_ROWS).zip(sums.chunks_exact(tile)) {
                let end = some.end.min(row + panels * PANEL_ROWS);
                // SAFETY: passed on to the caller.
                unsafe { put(sums, first, row, end, out) };
            }
        }
    }
}

/// Columns of `P` panels from panel `panel` on; they start with a weight group.
///
/// # Safety
/// There are `P` such panels.
#[inline(always)]
unsafe fn panel_strip<const P: usize>(view: &PanelView<'_>, panel: usize, columns: Range<usize>) -> Strip<P> {
    let shape = view.shape();
    let start: [*const u8; P] = std::array::from_fn(|p| view.panel(panel + p).as_ptr());
    Strip {
        // SAFETY: inside the panels.
        codes: start.map(|start| unsafe { start.add(shape.codes_at(columns.start)) }),
        // A panel of a format with one scale a row starts with a line of scales.
        scales: (shape.codes_at(0) > 0).then_some(start),
        ahead: None,
        cols: columns.len(),
        group: shape.group_cols(),
        unit_cols: shape.unit_cols(),
    }
}

/// As [`panels`] for row-major weights of an integer format; `rows` may be any.
///
/// # Safety
/// As [`panels`].
#[inline(always)]
pub(crate) unsafe fn rows<R: Room>(view: &MatrixView<'_>, rows: Range<usize>, x: &Activations, out: Out) {
    let source = RowSource::new(view);
    let mut row = rows.start;
    if source.is_direct() && x.batch() <= direct::MOST {
        while row + PANEL_ROWS <= rows.end {
            // SAFETY: passed on to the caller.
            unsafe {
                match x.batch() {
                    0 => {}
                    1 => direct::sixteen::<R, 1>(&source, row, x, out),
                    2 => direct::sixteen::<R, 2>(&source, row, x, out),
                    _ => direct::sixteen::<R, 3>(&source, row, x, out),
                }
            }
            row += PANEL_ROWS;
        }
    }
    if row == rows.end {
        return;
    }
    let mut chunks = [Chunk::new(), Chunk::new()];
    let mut space = Space::<[Sums; 2], BATCH>::new();
    while row < rows.end {
        let pair = R::PAIRS && x.batch() >= PAIR_FROM && row + PANEL_ROWS < rows.end;
        for first in (0..x.batch()).step_by(BATCH) {
            let tile = BATCH.min(x.batch() - first);
            let sums = space.zeros(tile);
            for start in (0..view.cols()).step_by(CHUNK) {
                let len = CHUNK.min(view.cols() - start);
                let group = start / GROUP;
                // The rows below, in the order of the memory.
                let below = row + if pair { 2 * PANEL_ROWS } else { PANEL_ROWS };
                // A single row has too little to do meanwhile: the chunks alone look after themselves.
                let ahead =
                    (first == 0 && x.batch() >= PAIR_FROM).then(|| source.below(below, below - row, start));
                // SAFETY: passed on to the caller; the chunks hold what the strips ask for.
                unsafe {
                    chunks[0].fill::<R>(&source, row..rows.end, start, len);
                    if pair {
                        chunks[1].fill::<R>(&source, row + PANEL_ROWS..rows.end, start, len);
                        let strip = chunk_strip::<2>(&chunks, len, ahead);
                        rows_of_batch::<R, 2, false>(&strip, x, first, group, sums);
                    } else {
                        let strip = chunk_strip::<1>(&chunks, len, ahead);
                        rows_of_batch::<R, 1, false>(&strip, x, first, group, sums);
                    }
                }
            }
            // SAFETY: passed on to the caller.
            unsafe { put(sums, first, row, rows.end, out) };
        }
        row += if pair { 2 * PANEL_ROWS } else { PANEL_ROWS };
    }
}

/// The first `cols` columns of the first `P` chunks.
#[inline(always)]
fn chunk_strip<const P: usize>(chunks: &[Chunk; 2], cols: usize, ahead: Option<*const u8>) -> Strip<P> {
    Strip {
        codes: std::array::from_fn(|p| chunks[p].codes()),
        scales: Some(std::array::from_fn(|p| chunks[p].scales())),
        ahead,
        cols,
        group: chunks[0].group,
        unit_cols: chunks[0].unit_cols,
    }
}

/// Stores sums of up to two panels that start at weight row `row`.
///
/// # Safety
/// `out` has a place for rows `row..end` of these batch rows.
#[inline(always)]
unsafe fn put(sums: &[[Sums; 2]], first: usize, row: usize, end: usize, out: Out) {
    for (b, sums) in sums.iter().enumerate() {
        for (i, sum) in sums.as_flattened()[..(end - row).min(2 * PANEL_ROWS)].iter().enumerate() {
            // SAFETY: passed on to the caller.
            unsafe { out.put(first + b, row + i, *sum) };
        }
    }
}

/// Adds one strip to the sums of batch rows `first..`; `group` is the strip's first
/// activation group.
///
/// # Safety
/// As the methods of [`Room`]; the strip's pointers cover its columns.
#[inline(always)]
unsafe fn rows_of_batch<R: Room, const P: usize, const FREE: bool>(
    strip: &Strip<P>,
    x: &Activations,
    first: usize,
    group: usize,
    sums: &mut [[Sums; 2]],
) {
    let (mut b, mut strip) = (0, *strip);
    while b < sums.len() {
        let left = sums.len() - b;
        macro_rules! tile_of {
            ($rows:literal) => {
                some_rows::<R, P, $rows, FREE>(&strip, x, first + b, group, &mut sums[b..b + $rows])
            };
        }
        // SAFETY: passed on to the caller.
        b += unsafe {
            match (left, R::PAIRS && R::BATCH >= 8) {
                (8.., _) if R::BATCH >= 8 => tile_of!(8),
                (7, true) => tile_of!(7),
                (6, true) => tile_of!(6),
                (5, true) => tile_of!(5),
                (4.., _) => tile_of!(4),
                (3, true) => tile_of!(3),
                (2.., _) => tile_of!(2),
                _ => tile_of!(1),
            }
        };
        strip.ahead = None;
    }
}

/// `S` batch rows against one strip. Returns `S`.
#[inline(always)]
unsafe fn some_rows<R: Room, const P: usize, const S: usize, const FREE: bool>(
    strip: &Strip<P>,
    x: &Activations,
    first: usize,
    group: usize,
    sums: &mut [[Sums; 2]],
) -> usize {
    let x = x.rows(first, S, group);
    // SAFETY: passed on to the caller.
    unsafe {
        let mut acc = [[R::splat(0.0); S]; P];
        for (p, acc) in acc.iter_mut().enumerate() {
            for (s, acc) in acc.iter_mut().enumerate() {
                *acc = R::load(&sums[s][p]);
            }
        }
        if strip.unit_cols == 8 {
            tile::<R, 8, P, S, FREE>(strip, x, &mut acc);
        } else {
            tile::<R, 4, P, S, FREE>(strip, x, &mut acc);
        }
        for (p, acc) in acc.iter().enumerate() {
            for (s, acc) in acc.iter().enumerate() {
                R::store(*acc, &mut sums[s][p]);
            }
        }
    }
    S
}

/// The segments of a strip, in ascending order, for `P` panels and `S` batch rows; a unit
/// holds `U` columns. With `FREE` every second segment goes to sums of its own, which are
/// added at the end: another order, other bits.
#[inline(always)]
unsafe fn tile<R: Room, const U: usize, const P: usize, const S: usize, const FREE: bool>(
    strip: &Strip<P>,
    x: QuantRows,
    acc: &mut [[R::Lanes; S]; P],
) {
    let mut codes = strip.codes;
    let mut scales = strip.scales;
    let mut ahead = strip.ahead;
    let mut from = 0;
    // SAFETY: passed on to the caller.
    let mut other = [[unsafe { R::splat(0.0) }; S]; P];
    while from < strip.cols {
        let weight_end = (from + strip.group).min(strip.cols);
        // SAFETY: the strip covers its columns, padded to sixteen, and their scales.
        unsafe {
            let behind = (weight_end - from).next_multiple_of(16) / U * PANEL_LINE;
            let here = scales.unwrap_or_else(|| codes.map(|codes| codes.add(behind)));
            let mut sw = [R::splat(0.0); P];
            for p in 0..P {
                sw[p] = R::load(&here[p].cast::<Sums>().read_unaligned());
            }
            while from < weight_end {
                let (group, column) = (from / GROUP, from % GROUP);
                let to = weight_end.min((group + 1) * GROUP);
                let totals: [&GroupTotals; S] = std::array::from_fn(|s| &*x.totals.add(group * x.stride + s));
                // Columns beyond the last one are padding: zero on both sides.
                let units = (to - from).next_multiple_of(16) / U;
                if let Some(at) = &mut ahead {
                    for _ in 0..units * P {
                        R::prefetch(*at);
                        *at = at.wrapping_add(PANEL_LINE);
                    }
                }
                let dots = if to - from == GROUP {
                    segment::<R, U, P, S>(codes, GROUP / U, x, group, 0, totals.map(|t| t.negated_sum))
                } else {
                    let parts = column / 16..(column + to - from).div_ceil(16);
                    let sums = totals.map(|t| t.negated_parts[parts.clone()].iter().sum());
                    segment::<R, U, P, S>(codes, units, x, group, column, sums)
                };
                for s in 0..S {
                    let sx = R::splat(totals[s].scale);
                    for p in 0..P {
                        acc[p][s] = R::fma(R::from_ints(dots[p][s]), R::mul(sw[p], sx), acc[p][s]);
                    }
                }
                if FREE {
                    std::mem::swap(acc, &mut other);
                }
                codes = codes.map(|codes| codes.add(units * PANEL_LINE));
                from = to;
            }
            match &mut scales {
                Some(scales) => *scales = scales.map(|scales| scales.add(PANEL_LINE)),
                None => codes = codes.map(|codes| codes.add(PANEL_LINE)),
            }
        }
    }
    if FREE {
        for (acc, other) in acc.as_flattened_mut().iter_mut().zip(other.as_flattened()) {
            // SAFETY: passed on to the caller. Times one: a sum.
            *acc = unsafe { R::fma(*other, R::splat(1.0), *acc) };
        }
    }
}

/// The exact dots of one segment, which starts at `column` of activation group `group`.
#[inline(always)]
unsafe fn segment<R: Room, const U: usize, const P: usize, const S: usize>(
    codes: [*const u8; P],
    units: usize,
    x: QuantRows,
    group: usize,
    column: usize,
    negated_sums: [i32; S],
) -> [[R::Ints; S]; P] {
    // SAFETY: passed on to the caller.
    unsafe {
        if U == 8 {
            let x = x.split.add(group * x.stride).cast::<i8>().add(column / 2);
            R::dot_int4(codes, units, x, negated_sums)
        } else {
            let x = x.codes.add(group * x.stride).cast::<i8>().add(column);
            R::dot_int8(codes, units, x, negated_sums)
        }
    }
}
