//! Which keys a row attends to: the DSA indexer (forward spec section 8).

use std::ops::Range;

use forebay_kernels::{IndexQueries, KeyRows, index_scores, select_positions, select_top_k};

use super::{AttentionScratch, PerThread};
use crate::families::roles::Role;
use crate::forward::Context;
use crate::kv::BLOCK;
use crate::pass::{Pass, Span, keep_rows};
use crate::spec::{IndexerKind, IndexerSpec};
use crate::trace::Trace;
use crate::weights::IndexerWeights;
use crate::workspace::{Quantised, resize};

/// Epsilon of the index key's layer norm; fixed by the architecture.
const INDEX_NORM_EPS: f32 = 1e-6;

/// Rows whose scores are held at once.
pub(super) const SELECT_ROWS: usize = 32;

/// Rows that one part of a scoring run takes at most: they share the reading of the keys.
const PART_ROWS: usize = 8;

/// Keys that one part covers when there are too few rows to share out: whole blocks of the cache.
const SCORE_BLOCK: usize = 1024;
const _: () = assert!(SCORE_BLOCK.is_multiple_of(BLOCK));

/// The attended positions of every row of a pass. Rows are counted in the block that was entered.
#[derive(Default)]
pub(super) struct Selections {
    /// `[rows of the pass, keep]`, the start of each row in use.
    lists: Vec<u32>,
    keep: usize,
    /// Per row of the pass: how many positions are listed, ascending; `None` attends to everything.
    lens: Vec<Option<usize>>,
    /// The rows of the block.
    block: Range<usize>,
}

impl Selections {
    /// Starts a pass: every row attends to everything.
    pub(super) fn begin(&mut self, rows: usize, keep: usize) {
        self.keep = keep;
        self.lists.clear();
        self.lens.clear();
        self.lens.resize(rows, None);
        self.block = 0..rows;
    }

    /// Goes on with the rows `stay` of the pass alone.
    pub(super) fn keep_rows(&mut self, stay: &[Range<usize>]) {
        if !self.lists.is_empty() {
            keep_rows(&mut self.lists, self.keep, stay);
        }
        keep_rows(&mut self.lens, 1, stay);
        self.block = 0..self.lens.len();
    }

    /// From now on, row 0 is the first of `block`.
    pub(super) fn enter(&mut self, block: Range<usize>) {
        self.block = block;
    }

    /// Rows of the block.
    pub(super) fn rows(&self) -> usize {
        self.block.len()
    }

    /// The selection of `row`, ascending.
    pub(super) fn get(&self, row: usize) -> Option<&[u32]> {
        let row = self.block.start + row;
        let len = self.lens[row]?;
        Some(&self.lists[row * self.keep..][..len])
    }

    /// How many positions each row of the block lists.
    fn lens_mut(&mut self) -> &mut [Option<usize>] {
        &mut self.lens[self.block.clone()]
    }

    /// The lists of some rows of the block, `keep` entries each.
    fn lists_mut(&mut self, rows: Range<usize>) -> &mut [u32] {
        self.lists.resize(self.lens.len() * self.keep, 0);
        let first = self.block.start;
        &mut self.lists[(first + rows.start) * self.keep..(first + rows.end) * self.keep]
    }
}

/// A full layer's part in sparse attention: caches index keys and selects for every row that
/// has more keys than the selection keeps.
#[allow(clippy::too_many_arguments)] // As for `attention`.
pub(super) fn select(
    ctx: Context<'_>,
    layer: usize,
    weights: &IndexerWeights,
    index: &IndexerSpec,
    pass: &mut Pass<'_, '_>,
    spans: &[Span],
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
    mut trace: Option<&mut (dyn Trace + '_)>,
) {
    debug_assert_eq!(ctx.model.spec.layers[layer].indexer, IndexerKind::Full);
    cache_keys(ctx, layer, weights, index, pass, spans, x, quantised, scratch);
    // Later rows have more keys, so all rows of a sequence from the first selecting one on select.
    let all_of = |span: &Span| match ctx.force_selection {
        true => 0,
        false => index.top_k.saturating_sub(span.position).min(span.rows),
    };
    for span in spans {
        scratch.selections.lens_mut()[span.first..span.first + all_of(span)].fill(None);
    }
    let selecting = |span: &&Span| all_of(span) < span.rows;
    let Some(from) = spans.iter().find(selecting).map(|span| span.first + all_of(span)) else { return };
    project_queries(ctx, weights, index, &x[from * ctx.model.spec.hidden..], quantised, scratch);
    scratch.per_thread.resize_with(ctx.team.threads(), PerThread::default);
    let keep = scratch.selections.keep;
    for span in spans.iter().filter(selecting) {
        let keys = pass.parts[span.part].kv.index_keys(layer);
        let keys = keys.expect("a full layer keeps index keys while it selects");
        for first in (span.first + all_of(span)..span.end()).step_by(SELECT_ROWS) {
            let block = SELECT_ROWS.min(span.end() - first);
            // The number of keys of row `i` of the block.
            let known = |i: usize| span.position + first - span.first + i + 1;
            let positions = known(block - 1);
            score(ctx, index, first - from..first - from + block, keys.rows(positions), positions, scratch);

            let scores = &scratch.scores;
            let of_row = |i: usize| &scores[i * positions..][..known(i)];
            let lists = scratch.selections.lists_mut(first..first + block);
            ctx.team.for_each_chunk_with(&mut scratch.per_thread, lists, keep, &|i, list, space| {
                select_positions(ctx.kernels, of_row(i), keep, &mut space.select, list);
            });
            for i in 0..block {
                scratch.selections.lens_mut()[first + i] = Some(keep.min(known(i)));
                if let Some(trace) = trace.as_mut().filter(|trace| trace.wants_selected()) {
                    select_top_k(of_row(i), keep, &mut scratch.per_thread[0].select, &mut scratch.traced);
                    trace.selected(layer, known(i) - 1, &scratch.traced);
                }
            }
        }
    }
}

/// Writes the index keys of all rows, whether anything is selected yet or not.
#[allow(clippy::too_many_arguments)] // As for `attention`.
fn cache_keys(
    ctx: Context<'_>,
    layer: usize,
    weights: &IndexerWeights,
    index: &IndexerSpec,
    pass: &mut Pass<'_, '_>,
    spans: &[Span],
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
) {
    let rope = ctx.model.spec.attention.rope;
    resize(&mut scratch.index_keys, scratch.selections.rows() * index.dim);
    resize(&mut scratch.index_key, index.dim);
    ctx.linear(Role::IndexKey, &weights.k, x, quantised, &mut scratch.index_keys);
    let normed = &mut scratch.index_key;
    let mut keys = scratch.index_keys.chunks_exact(index.dim);
    for span in spans {
        for (row, key) in keys.by_ref().take(span.rows).enumerate() {
            ctx.kernels.layer_norm(key, &weights.k_norm, &weights.k_norm_bias, INDEX_NORM_EPS, normed);
            scratch.angles.rotate(&ctx.model.rope, span.first + row, &mut normed[..rope]);
            pass.parts[span.part].kv.write_index(layer, span.position + row, normed);
        }
    }
}

/// Rotated index queries and head weights of the rows `x`, which are the last ones of the block.
fn project_queries(
    ctx: Context<'_>,
    weights: &IndexerWeights,
    index: &IndexerSpec,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
) {
    let spec = &ctx.model.spec;
    let rope = spec.attention.rope;
    let rows = x.len() / spec.hidden;
    let all = scratch.selections.rows() - rows;
    resize(&mut scratch.index_queries, rows * index.heads * index.dim);
    resize(&mut scratch.index_weights, rows * index.heads);
    let low_rank = &scratch.low_rank[all * spec.attention.q_rank..];
    ctx.linear(Role::IndexQuery, &weights.q, low_rank, quantised, &mut scratch.index_queries);
    ctx.linear(Role::IndexWeight, &weights.head_weights, x, quantised, &mut scratch.index_weights);
    let angles = &scratch.angles;
    ctx.team.for_each_chunk(&mut scratch.index_queries, index.heads * index.dim, &|row, heads| {
        for head in heads.chunks_exact_mut(index.dim) {
            angles.rotate(&ctx.model.rope, all + row, &mut head[..rope]);
        }
    });
}

/// Scores all `positions` for `rows` of the projected queries into `scratch.scores`.
fn score(
    ctx: Context<'_>,
    index: &IndexerSpec,
    rows: Range<usize>,
    keys: KeyRows<'_>,
    positions: usize,
    scratch: &mut AttentionScratch,
) {
    let (queries, weights) = (&scratch.index_queries, &scratch.index_weights);
    let of_rows = |from: usize, count: usize| IndexQueries {
        queries: &queries[from * index.heads * index.dim..][..count * index.heads * index.dim],
        weights: &weights[from * index.heads..][..count * index.heads],
        heads: index.heads,
        dim: index.dim,
    };
    resize(&mut scratch.scores, rows.len() * positions);
    let threads = ctx.team.threads();
    if rows.len() >= threads {
        let part_rows = rows.len().div_ceil(threads).min(PART_ROWS);
        let len = part_rows * positions;
        ctx.team.for_each_chunk_with(
            &mut scratch.per_thread,
            &mut scratch.scores,
            len,
            &|part, scores, space| {
                let query = of_rows(rows.start + part * part_rows, scores.len() / positions);
                index_scores(ctx.kernels, &query, keys, &mut space.score, scores);
            },
        );
        return;
    }
    for (row, scores) in rows.zip(scratch.scores.chunks_exact_mut(positions)) {
        let query = of_rows(row, 1);
        ctx.team.for_each_chunk_with(&mut scratch.per_thread, scores, SCORE_BLOCK, &|part, scores, space| {
            let from = part * SCORE_BLOCK * index.dim;
            let keys = keys.slice(from..from + scores.len() * index.dim);
            index_scores(ctx.kernels, &query, keys, &mut space.score, scores);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows move with their lists, whatever the pass before had.
    #[test]
    fn rows_that_stay_keep_their_selections() {
        let mut selections = Selections::default();
        selections.begin(1, 6);
        selections.lists_mut(0..1).fill(9);
        selections.begin(5, 2);
        // Nothing is selected yet.
        selections.keep_rows(std::slice::from_ref(&(1..5)));
        assert_eq!((selections.rows(), selections.get(3)), (4, None));
        for row in 0..4 {
            selections.lists_mut(row..row + 1).fill(row as u32);
            selections.lens_mut()[row] = (row != 2).then_some(1 + row % 2);
        }
        selections.keep_rows(&[1..2, 3..4]);
        assert_eq!(selections.rows(), 2);
        assert_eq!((selections.get(0), selections.get(1)), (Some(&[1, 1][..]), Some(&[3, 3][..])));
    }
}
