//! The DSA lightning indexer: scores of cached positions, and the selection of the best.

use crate::Kernels;
use crate::attention::KeyRows;
use crate::portable::lanes::LANES;
use crate::portable::registers::Line;
use crate::portable::select;

/// Neighbouring query rows of the indexer.
#[derive(Clone, Copy, Debug)]
pub struct IndexQueries<'a> {
    /// `[rows, heads, dim]`, rotated.
    pub queries: &'a [f32],
    /// `[rows, heads]`
    pub weights: &'a [f32],
    /// Number of heads.
    pub heads: usize,
    /// Width of a key.
    pub dim: usize,
}

/// Work space of [`index_scores`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct ScoreScratch {
    pub(crate) queries: Vec<Line>,
    pub(crate) keys: Vec<Line>,
}

impl ScoreScratch {
    /// Four-byte values that it holds after calls with up to `pairs` query rows times heads.
    pub fn planned_values(pairs: usize, dim: usize) -> usize {
        (pairs + LANES) * dim.next_multiple_of(LANES)
    }
}

/// Scores of cached positions, for every query row; `out` is `[rows, positions]`:
/// `out[row][t] = (sum_h w[row][h] * max(0, q[row][h] . k[t] / sqrt(dim))) / sqrt(heads)`.
///
/// `keys` is `[positions, dim]`. Rows and positions are independent: a long cache may be
/// scored in pieces.
///
/// # Panics
/// If the shapes do not fit.
pub fn index_scores(
    kernels: Kernels,
    query: &IndexQueries<'_>,
    keys: KeyRows<'_>,
    scratch: &mut ScoreScratch,
    out: &mut [f32],
) {
    let IndexQueries { heads, dim, .. } = *query;
    assert!(dim > 0 && heads > 0, "an indexer has at least one head and one column");
    let rows = query.weights.len() / heads;
    assert_eq!(query.weights.len(), rows * heads, "one weight per row and head");
    assert_eq!(query.queries.len(), rows * heads * dim, "one query per row and head");
    assert_eq!(out.len() * dim, rows * keys.len(), "one score per row and position");
    assert_eq!(keys.len() % dim, 0, "keys must be whole rows of {dim} columns");
    if !out.is_empty() {
        // SAFETY: the processor has the instruction set (see `Kernels::table`).
        unsafe { (kernels.table().scores)(query, keys, scratch, out) }
    }
}

/// [`index_scores`] of one query row, with a work space of its own: for single calls.
///
/// # Panics
/// If the shapes do not fit.
pub fn indexer_scores(
    kernels: Kernels,
    queries: &[f32],
    weights: &[f32],
    keys: KeyRows<'_>,
    dim: usize,
    out: &mut [f32],
) {
    let query = IndexQueries { queries, weights, heads: weights.len(), dim };
    index_scores(kernels, &query, keys, &mut ScoreScratch::default(), out);
}

/// Work space of the selections, reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct SelectScratch {
    ranks: Vec<i32>,
}

/// Puts the positions of the `keep` best scores into `out`: first those above the
/// `keep`-th largest score, ascending, then those equal to it, ascending, until `keep`
/// are found. Ties therefore go to the lowest position. NaN ranks below everything, and
/// -0 equals 0. Takes linear time.
///
/// With fewer than `keep` scores, all positions are selected.
pub fn select_top_k(scores: &[f32], keep: usize, scratch: &mut SelectScratch, out: &mut Vec<u32>) {
    out.clear();
    let Some(cut) = select::find_cut(scores, keep, &mut scratch.ranks) else { return };
    let ranks = || (0..).zip(&scratch.ranks);
    out.extend(ranks().filter(|(_, rank)| **rank > cut.rank).map(|(t, _)| t));
    out.extend(ranks().filter(|(_, rank)| **rank == cut.rank).map(|(t, _)| t).take(cut.ties));
}

/// The positions that [`select_top_k`] selects, in ascending order, as attention takes them:
/// the start of `out` gets `min(keep, scores)` of them, and their number is returned.
///
/// # Panics
/// If `out` is shorter than that.
pub fn select_positions(
    kernels: Kernels,
    scores: &[f32],
    keep: usize,
    scratch: &mut SelectScratch,
    out: &mut [u32],
) -> usize {
    // SAFETY: the processor has the instruction set (see `Kernels::table`).
    unsafe { (kernels.table().select)(scores, keep, &mut scratch.ranks, out) }
}
