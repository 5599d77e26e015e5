//! The DSA lightning indexer: scores of cached positions, and the selection of the best.

use crate::Kernels;
use crate::attention::{KeyRows, bf16};

/// Scores `out.len()` positions whose keys (`[positions, dim]`) start at `keys`' first row:
/// `out[t] = (sum_h w[h] * max(0, q[h] . k[t] / sqrt(dim))) / sqrt(heads)`.
///
/// `queries` is `[heads, dim]`, `weights` `[heads]`. Positions are independent: a long
/// cache may be scored in pieces.
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
    assert!(dim > 0, "an indexer key has at least one element");
    assert_eq!(queries.len(), weights.len() * dim, "one query per head");
    assert_eq!(keys.len(), out.len() * dim, "one key per score");
    let table = kernels.table();
    match keys {
        // SAFETY: the processor has the instruction set (see `Kernels::table`).
        KeyRows::F32(keys) => unsafe { (table.scores_f32)(queries, weights, keys, dim, out) },
        // SAFETY: as above.
        KeyRows::Bf16(keys) => unsafe { (table.scores_bf16)(queries, weights, bf16(keys), dim, out) },
    }
}

/// Work space of [`select_top_k`], reused from call to call.
#[derive(Clone, Debug, Default)]
pub struct SelectScratch {
    ranks: Vec<u32>,
}

/// Puts the positions of the `keep` best scores into `out`: first those above the
/// `keep`-th largest score, ascending, then those equal to it, ascending, until `keep`
/// are found. Ties therefore go to the lowest position. NaN ranks below everything, and
/// -0 equals 0. Takes linear time.
///
/// With fewer than `keep` scores, all positions are selected.
pub fn select_top_k(scores: &[f32], keep: usize, scratch: &mut SelectScratch, out: &mut Vec<u32>) {
    out.clear();
    let keep = keep.min(scores.len());
    if keep == 0 {
        return;
    }
    scratch.ranks.clear();
    scratch.ranks.extend(scores.iter().map(|s| rank(*s)));
    let cut = scores.len() - keep;
    let (_, threshold, _) = scratch.ranks.select_nth_unstable(cut);
    let threshold = *threshold;
    let positions = |wanted: fn(&u32, &u32) -> bool| {
        scores.iter().enumerate().filter(move |(_, s)| wanted(&rank(**s), &threshold)).map(|(t, _)| t as u32)
    };
    out.extend(positions(u32::gt));
    out.extend(positions(u32::eq).take(keep - out.len()));
}

/// An integer that orders like the score: NaN lowest, then -infinity, up to +infinity.
fn rank(score: f32) -> u32 {
    if score.is_nan() {
        return 0;
    }
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}
