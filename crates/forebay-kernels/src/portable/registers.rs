//! Products of a few rows with a few others, all sums held in registers.
//!
//! A register tile reads `M + N` rows and does `M * N` multiply-adds per line, so the
//! processor waits for its arithmetic and not for loads. Every single sum keeps the
//! canonical order: the tile only decides which sums are in flight together.
#![allow(clippy::needless_range_loop, reason = "indices are the numbers of registers")]

use super::Room;
use super::lanes::LANES;

/// Sixteen numbers on a cache line of their own.
#[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(crate) struct Line(pub [f32; LANES]);

impl Line {
    pub(crate) const ZERO: Self = Self([0.0; LANES]);
}

/// Equally long rows of lines, `stride` lines from one to the next.
#[derive(Clone, Copy)]
pub(crate) struct Panel<'a> {
    pub lines: &'a [Line],
    pub stride: usize,
}

impl<'a> Panel<'a> {
    /// Without its first rows.
    #[inline(always)]
    pub(crate) fn skip_rows(self, count: usize) -> Self {
        Self { lines: &self.lines[count * self.stride..], ..self }
    }

    /// Without the first lines of every row.
    #[inline(always)]
    pub(crate) fn skip_lines(self, count: usize) -> Self {
        Self { lines: &self.lines[count..], ..self }
    }

    /// The first `N` rows, `count` lines each.
    #[inline(always)]
    fn rows<const N: usize>(self, count: usize) -> [&'a [Line]; N] {
        std::array::from_fn(|n| &self.lines[n * self.stride..][..count])
    }
}

/// `out[n][m]` = the canonical dot product of row `m` of `a` and row `n` of `b` over their first
/// `lines` lines. `M * N` is a multiple of four.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn dots<R: Room, const M: usize, const N: usize>(
    a: Panel<'_>,
    b: Panel<'_>,
    lines: usize,
) -> [[f32; M]; N] {
    const { assert!((M * N).is_multiple_of(4)) };
    let (a, b) = (a.rows::<M>(lines), b.rows::<N>(lines));
    let mut out = [[0f32; M]; N];
    // SAFETY: passed on to the caller; every row has `lines` lines.
    unsafe {
        let mut sums = [[R::splat(0.0); M]; N];
        for k in 0..lines {
            let a = a.map(|a| R::load(&a.get_unchecked(k).0));
            for (sums, b) in sums.iter_mut().zip(b) {
                let b = R::load(&b.get_unchecked(k).0);
                for (sum, a) in sums.iter_mut().zip(a) {
                    *sum = R::fma(a, b, *sum);
                }
            }
        }
        let (fours, _) = out.as_flattened_mut().as_chunks_mut::<4>();
        for (i, four) in fours.iter_mut().enumerate() {
            *four = R::trees(std::array::from_fn(|j| sums[(4 * i + j) / M][(4 * i + j) % M]));
        }
    }
    out
}

/// Rows of numbers that [`mix`] adds up into.
#[derive(Clone, Copy)]
pub(crate) struct Sums {
    /// The first number of the first row.
    pub ptr: *mut f32,
    /// Numbers from one row to the next.
    pub stride: usize,
}

/// `sums[m][c] = fma(coefficient(t, m), rows[t][c], sums[m][c])` for ascending `t` below `count`,
/// over the `16 V` columns from the start of `rows` and `sums`. With `factors`,
/// `sums[m][c] *= factors[m]` comes first.
///
/// # Safety
/// The processor has the room's instruction set; `sums` has `M` rows of that many columns,
/// which nobody else touches meanwhile.
#[inline(always)]
pub(crate) unsafe fn mix<R: Room, const M: usize, const V: usize>(
    count: usize,
    coefficient: impl Fn(usize, usize) -> f32,
    rows: Panel<'_>,
    factors: Option<&[f32; M]>,
    sums: Sums,
) {
    let needed = count.checked_sub(1).map_or(0, |last| last * rows.stride + V);
    assert!(needed <= rows.lines.len(), "one row per coefficient");
    // SAFETY: passed on to the caller; `rows` was just checked.
    unsafe {
        let place = |m: usize, v: usize| sums.ptr.add(m * sums.stride + v * LANES).cast::<[f32; LANES]>();
        let mut acc = [[R::splat(0.0); V]; M];
        for m in 0..M {
            for v in 0..V {
                acc[m][v] = R::load(&*place(m, v));
            }
        }
        if let Some(factors) = factors {
            for m in 0..M {
                let factor = R::splat(factors[m]);
                for v in 0..V {
                    // Adding -0 changes nothing: the product is rounded, and that is all.
                    acc[m][v] = R::fma(acc[m][v], factor, R::splat(-0.0));
                }
            }
        }
        let mut row = rows.lines.as_ptr();
        for t in 0..count {
            let mut values = [R::splat(0.0); V];
            for v in 0..V {
                values[v] = R::load(&(*row.add(v)).0);
            }
            for m in 0..M {
                let coefficient = R::splat(coefficient(t, m));
                for v in 0..V {
                    acc[m][v] = R::fma(coefficient, values[v], acc[m][v]);
                }
            }
            row = row.wrapping_add(rows.stride);
        }
        for m in 0..M {
            for v in 0..V {
                R::store(acc[m][v], &mut *place(m, v));
            }
        }
    }
}
