//! The `int8` arithmetic for few batch rows and row-major weights, which are multiplied where
//! they lie: sixteen rows, a line of 64 bytes of each at a time. Bringing them into panel order
//! first would take longer than the products do.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::pack::{RowSource, ask_ahead, transpose};
use super::{Out, Room};
use crate::Activations;
use crate::activations::{GROUP, QuantRows};
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS};

/// With more batch rows than this, panel order pays off.
pub(crate) const MOST: usize = 3;

/// How far ahead of its use a row is asked for, in bytes of that row. All sixteen are under way
/// at once; a whole block of rows ahead, in the order of the memory, is more than the first
/// cache holds, and slower.
const AHEAD: usize = 512;

/// `y[b][row]` for sixteen weight rows from `row` on and all `S` batch rows.
///
/// # Safety
/// As the methods of [`Room`]; the rows exist and [`RowSource::is_direct`]; `x` has `S` rows as
/// wide as these; `out` has a place for every result.
#[inline(always)]
pub(crate) unsafe fn sixteen<R: Room, const S: usize>(
    source: &RowSource<'_>,
    row: usize,
    x: &Activations,
    out: Out,
) {
    let x = x.rows(0, S, 0);
    // SAFETY: passed on to the caller.
    unsafe {
        let sums = match source.unit_cols() {
            8 => lines::<R, 2, S>(source, row, x),
            _ => lines::<R, 1, S>(source, row, x),
        };
        for (b, sums) in sums.iter().enumerate() {
            for (i, sum) in sums.iter().enumerate() {
                out.put(b, row + i, *sum);
            }
        }
    }
}

/// The sums of sixteen rows whose lines hold `G` activation groups each: 2 (int4) or 1 (int8).
#[inline(always)]
unsafe fn lines<R: Room, const G: usize, const S: usize>(
    source: &RowSource<'_>,
    row: usize,
    x: QuantRows,
) -> [[f32; PANEL_ROWS]; S] {
    let (bytes, groups) = (source.row_bytes, source.cols.div_ceil(GROUP));
    let codes = source.codes[row * bytes..(row + PANEL_ROWS) * bytes].as_ptr();
    let mut scales = Scales::new(source, row);
    let mut padded = [[0u8; PANEL_LINE]; PANEL_ROWS];
    // SAFETY: whole lines of the rows, or a copy of what they end with; groups that `x` has.
    unsafe {
        let mut acc = [R::splat(0.0); S];
        let mut sw = [R::splat(0.0); G];
        for line in 0..groups.div_ceil(G) {
            let (from, first) = (line * PANEL_LINE, line * G);
            ask_ahead::<R>(codes.wrapping_add(from), from, bytes, AHEAD);
            let (mut start, mut stride) = (codes.wrapping_add(from), bytes);
            if from + PANEL_LINE > bytes {
                // Whatever lies beyond the last column meets activations of zero.
                for (i, padded) in padded.iter_mut().enumerate() {
                    std::ptr::copy_nonoverlapping(start.add(i * bytes), padded.as_mut_ptr(), bytes - from);
                }
                (start, stride) = (padded.as_ptr().cast(), PANEL_LINE);
            }
            let here = G.min(groups - first);
            for g in 0..here {
                sw[g] = scales.next::<R>();
            }
            for s in 0..S {
                // A last group alone stands in for the one that is not there.
                let entries = [first * x.stride + s, (first + here - 1) * x.stride + s];
                let totals = [&*x.totals.add(entries[0]), &*x.totals.add(entries[1])];
                let dots = if G == 2 {
                    let x = [x.split.add(entries[0]).cast(), x.split.add(entries[1]).cast()];
                    let sums = [totals[0].negated_sum, totals[1].negated_sum];
                    R::line_int4(start, stride, x, sums)
                } else {
                    let x = x.codes.add(entries[0]).cast();
                    [R::line_int8(start, stride, x, totals[0].negated_sum); 2]
                };
                for g in 0..G {
                    if g < here {
                        let scale = R::mul(sw[g], R::splat(totals[g].scale));
                        acc[s] = R::fma(R::from_ints(dots[g]), scale, acc[s]);
                    }
                }
            }
        }
        let mut sums = [[0f32; PANEL_ROWS]; S];
        for s in 0..S {
            R::store(acc[s], &mut sums[s]);
        }
        sums
    }
}

/// The scales of sixteen rows, one activation group after the other.
struct Scales {
    /// Of the first row, from its next sixteen scales on.
    next: *const u8,
    /// Bytes from one row's scales to those of the next, and how many of these have not been
    /// turned into lanes.
    stride: usize,
    left: usize,
    /// Sixteen scales of every row, in panel order.
    lanes: [[f32; PANEL_ROWS]; 16],
    /// The line of `lanes` in use, for how many more activation groups it is, and for how many
    /// any line is.
    at: usize,
    uses: usize,
    groups: usize,
}

impl Scales {
    #[inline(always)]
    fn new(source: &RowSource<'_>, row: usize) -> Self {
        let n = source.row_scales;
        let scales = &source.scales[row * n..(row + PANEL_ROWS) * n];
        let mut lanes = [[0f32; PANEL_ROWS]; 16];
        let (mut groups, mut at, mut uses) = (source.group / GROUP, 16, 0);
        if n == 1 {
            lanes[0].copy_from_slice(scales);
            (groups, at, uses) = (usize::MAX, 0, usize::MAX);
        }
        Self { next: scales.as_ptr().cast(), stride: 4 * n, left: 4 * n, lanes, at, uses, groups }
    }

    /// # Safety
    /// As the methods of [`Room`]; there is a next group.
    #[inline(always)]
    unsafe fn next<R: Room>(&mut self) -> R::Lanes {
        // SAFETY: passed on to the caller.
        unsafe {
            if self.uses == 0 {
                (self.at, self.uses) = (self.at + 1, self.groups);
                if self.at >= 16 {
                    self.refill::<R>();
                }
            }
            self.uses -= 1;
            R::load(&self.lanes[self.at])
        }
    }

    /// # Safety
    /// As [`next`](Self::next).
    #[inline(always)]
    unsafe fn refill<R: Room>(&mut self) {
        let len = self.left.min(PANEL_LINE);
        // The rows below are next.
        let below = self.next.wrapping_add(PANEL_ROWS * self.stride);
        for i in 0..PANEL_ROWS {
            R::prefetch(below.wrapping_add(i * self.stride));
        }
        let lanes = bytemuck::cast_slice_mut(&mut self.lanes);
        // SAFETY: passed on to the caller.
        unsafe { transpose::<R>(self.next, self.stride, len, None, lanes) };
        (self.next, self.left, self.at) = (self.next.wrapping_add(len), self.left - len, 0);
    }
}
