//! Multi-head latent attention with a compressed cache, and the DSA indexer.
//!
//! Scores and values are always evaluated in absorbed form, whatever the number of
//! rows: `q . k = (kv_bK^T q) . latent`, and the softmax mixes latents before `kv_bV`
//! expands them (forward spec sections 7 and 8).

use forebay_kernels::{
    AttendScratch, Attended, Attention, Input, KeyCache, KeyRows, SelectScratch, attend, combine_rows,
    indexer_scores, matmul_rows, select_top_k,
};

use crate::families::roles::Role;
use crate::forward::{Context, Quantised, quantised_values, resize};
use crate::kv::{KvCache, Rows};
use crate::spec::{IndexerKind, IndexerSpec, ModelSpec};
use crate::trace::Trace;
use crate::weights::{AttentionWeights, IndexerWeights};

/// Epsilon of the index key's layer norm; fixed by the architecture.
const INDEX_NORM_EPS: f32 = 1e-6;

/// Rows whose absorbed queries are held at once.
const ROW_BLOCK: usize = 32;

/// Keys that one part of a scoring run covers.
const SCORE_BLOCK: usize = 1024;

/// Buffers of attention, reused from layer to layer.
#[derive(Default)]
pub(crate) struct AttentionScratch {
    /// `[rows, q_rank]`, normalised.
    low_rank: Vec<f32>,
    /// `[rows, q_rank]`, before the norm.
    raw: Vec<f32>,
    /// `[rows, heads, nope + rope]`, the rope part rotated.
    queries: Vec<f32>,
    /// `[rows, kv_rank + rope]`
    latent_rope: Vec<f32>,
    /// `[kv_rank]`
    latent: Vec<f32>,
    /// `[rows, heads, rope]`: the rotated part of the queries.
    rope_queries: Vec<f32>,
    /// `[ROW_BLOCK, heads, kv_rank]`
    absorbed: Vec<f32>,
    /// `[ROW_BLOCK, heads, kv_rank]`
    mixed: Vec<f32>,
    /// `[rows, heads, value]`
    context: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
    per_thread: Vec<AttendScratch>,
    index_keys: Vec<f32>,
    index_queries: Vec<f32>,
    index_weights: Vec<f32>,
    scores: Vec<f32>,
    select: SelectScratch,
    list: Vec<u32>,
    /// Per row: the last full layer's selection, ascending; `None` attends to everything.
    selections: Vec<Option<Vec<u32>>>,
}

impl AttentionScratch {
    /// Forgets the selections of the pass before.
    pub(crate) fn begin(&mut self, rows: usize) {
        self.selections.clear();
        self.selections.resize(rows, None);
    }

    /// Four-byte values that attention over `rows` rows and `context` positions holds.
    pub(crate) fn planned_values(spec: &ModelSpec, rows: usize, context: usize, threads: usize) -> usize {
        let a = &spec.attention;
        let per_row = 2 * a.q_rank
            + a.heads * (a.qk() + a.rope + a.value)
            + a.kv_rank
            + a.rope
            + quantised_values(a.heads * a.value);
        let block = 2 * rows.min(ROW_BLOCK) * a.heads * a.kv_rank + 2 * threads * a.heads;
        let index = spec
            .indexer
            .map_or(0, |i| rows * (i.dim + i.heads * (i.dim + 1) + i.top_k.min(context)) + 3 * context);
        rows * per_row + block + index
    }
}

/// Attention of layer `layer` over the input-normed rows `x` at positions `start..`, into `out`.
#[allow(clippy::too_many_arguments)] // Eight independent pieces; a struct would only rename them.
pub(crate) fn attention(
    ctx: Context<'_>,
    layer: usize,
    kv: &mut KvCache,
    start: usize,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
    trace: Option<&mut (dyn Trace + '_)>,
    out: &mut [f32],
) {
    let spec = &ctx.model.spec;
    let weights = &ctx.model.layers[layer].attention;
    project(ctx, weights, x, quantised, scratch);
    rotate_and_cache(ctx, layer, weights, kv, start, scratch);
    if let (Some(indexer), Some(index)) = (&weights.indexer, &spec.indexer) {
        select(ctx, layer, indexer, index, kv, start, x, quantised, scratch, trace);
    }
    mix_values(ctx, layer, weights, kv, start, scratch);
    ctx.linear(Role::AttentionOut, &weights.o, &scratch.context, quantised, out);
}

/// Compressed and expanded queries, and the new latents with their rope keys.
fn project(
    ctx: Context<'_>,
    weights: &AttentionWeights,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
) {
    let spec = &ctx.model.spec;
    let (a, rows) = (&spec.attention, x.len() / spec.hidden);
    resize(&mut scratch.raw, rows * a.q_rank);
    resize(&mut scratch.low_rank, rows * a.q_rank);
    resize(&mut scratch.queries, rows * a.heads * a.qk());
    resize(&mut scratch.latent_rope, rows * (a.kv_rank + a.rope));
    ctx.linear(Role::QueryDown, &weights.q_a, x, quantised, &mut scratch.raw);
    ctx.rms_norms(&scratch.raw, &weights.q_a_norm, spec.low_rank_norm_eps, &mut scratch.low_rank);
    ctx.linear(Role::QueryUp, &weights.q_b, &scratch.low_rank, quantised, &mut scratch.queries);
    ctx.linear(Role::KvDown, &weights.kv_a, x, quantised, &mut scratch.latent_rope);
}

/// Rotates the rope parts and writes the layer's new cache rows, all of them before any is read.
fn rotate_and_cache(
    ctx: Context<'_>,
    layer: usize,
    weights: &AttentionWeights,
    kv: &mut KvCache,
    start: usize,
    scratch: &mut AttentionScratch,
) {
    let spec = &ctx.model.spec;
    let a = &spec.attention;
    let rows = scratch.latent_rope.len() / (a.kv_rank + a.rope);
    resize(&mut scratch.rope_queries, rows * a.heads * a.rope);
    resize(&mut scratch.latent, a.kv_rank);
    resize(&mut scratch.cos, a.rope / 2);
    resize(&mut scratch.sin, a.rope / 2);
    for row in 0..rows {
        let position = start + row;
        ctx.model.rope.angles(position, &mut scratch.cos, &mut scratch.sin);
        let queries = scratch.queries[row * a.heads * a.qk()..].chunks_exact(a.qk());
        let rotated = scratch.rope_queries[row * a.heads * a.rope..].chunks_exact_mut(a.rope);
        for (query, rotated) in queries.zip(rotated).take(a.heads) {
            rotated.copy_from_slice(&query[a.nope..]);
            ctx.model.rope.rotate(rotated, &scratch.cos, &scratch.sin);
        }
        let both = &mut scratch.latent_rope[row * (a.kv_rank + a.rope)..][..a.kv_rank + a.rope];
        let (latent, rope_key) = both.split_at_mut(a.kv_rank);
        ctx.kernels.rms_norm(latent, &weights.kv_a_norm, spec.low_rank_norm_eps, &mut scratch.latent);
        ctx.model.rope.rotate(rope_key, &scratch.cos, &scratch.sin);
        kv.write(layer, position, &scratch.latent, rope_key);
    }
}

/// A full layer's part in sparse attention: caches index keys and selects for every row that
/// has more keys than the selection keeps (forward spec section 8).
#[allow(clippy::too_many_arguments)] // As for `attention`.
fn select(
    ctx: Context<'_>,
    layer: usize,
    weights: &IndexerWeights,
    index: &IndexerSpec,
    kv: &mut KvCache,
    start: usize,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
    mut trace: Option<&mut (dyn Trace + '_)>,
) {
    debug_assert_eq!(ctx.model.spec.layers[layer].indexer, IndexerKind::Full);
    let rope = ctx.model.spec.attention.rope;
    let rows = x.len() / ctx.model.spec.hidden;
    resize(&mut scratch.index_keys, rows * index.dim);
    ctx.linear(Role::IndexKey, &weights.k, x, quantised, &mut scratch.index_keys);
    let mut normed = vec![0.0; index.dim];
    for (row, key) in scratch.index_keys.chunks_exact(index.dim).enumerate() {
        ctx.kernels.layer_norm(key, &weights.k_norm, &weights.k_norm_bias, INDEX_NORM_EPS, &mut normed);
        ctx.model.rope.angles(start + row, &mut scratch.cos, &mut scratch.sin);
        ctx.model.rope.rotate(&mut normed[..rope], &scratch.cos, &scratch.sin);
        kv.write_index(layer, start + row, &normed);
    }
    let selects = |row: usize| start + row + 1 > index.top_k || ctx.force_selection;
    if !(0..rows).any(selects) {
        scratch.selections.fill(None);
        return;
    }
    resize(&mut scratch.index_queries, rows * index.heads * index.dim);
    resize(&mut scratch.index_weights, rows * index.heads);
    ctx.linear(Role::IndexQuery, &weights.q, &scratch.low_rank, quantised, &mut scratch.index_queries);
    ctx.linear(Role::IndexWeight, &weights.head_weights, x, quantised, &mut scratch.index_weights);
    let keys = kv.layer(layer).index_keys.as_ref().expect("a full layer keeps index keys while it selects");
    for row in 0..rows {
        if !selects(row) {
            scratch.selections[row] = None;
            continue;
        }
        let position = start + row;
        let queries = &mut scratch.index_queries[row * index.heads * index.dim..][..index.heads * index.dim];
        ctx.model.rope.angles(position, &mut scratch.cos, &mut scratch.sin);
        for head in queries.chunks_exact_mut(index.dim) {
            ctx.model.rope.rotate(&mut head[..rope], &scratch.cos, &scratch.sin);
        }
        let head_weights = &scratch.index_weights[row * index.heads..][..index.heads];
        resize(&mut scratch.scores, position + 1);
        let queries = &*queries;
        ctx.team.for_each_chunk(&mut scratch.scores, SCORE_BLOCK, &|part, scores| {
            let from = part * SCORE_BLOCK * index.dim;
            let keys = key_rows(keys, from..from + scores.len() * index.dim);
            indexer_scores(ctx.kernels, queries, head_weights, keys, index.dim, scores);
        });
        select_top_k(&scratch.scores, index.top_k, &mut scratch.select, &mut scratch.list);
        if let Some(trace) = &mut trace {
            trace.selected(layer, position, &scratch.list);
        }
        // Attention goes through its tiles by position, so the order of ties plays no part.
        let selection = scratch.selections[row].get_or_insert_default();
        selection.clone_from(&scratch.list);
        selection.sort_unstable();
    }
}

/// Softmax attention in latent space, then the value expansion, into `scratch.context`.
fn mix_values(
    ctx: Context<'_>,
    layer: usize,
    weights: &AttentionWeights,
    kv: &KvCache,
    start: usize,
    scratch: &mut AttentionScratch,
) {
    let a = &ctx.model.spec.attention;
    let kv_b = weights.kv_b.view();
    let rows = scratch.selections.len();
    let cached = kv.layer(layer);
    let end = start + rows;
    let keys = KeyCache {
        latents: key_rows(&cached.latents, 0..end * a.kv_rank),
        rope_keys: key_rows(&cached.rope_keys, 0..end * a.rope),
    };
    scratch.per_thread.resize_with(ctx.team.threads(), AttendScratch::default);
    resize(&mut scratch.context, rows * a.heads * a.value);
    for first in (0..rows).step_by(ROW_BLOCK) {
        let block = ROW_BLOCK.min(rows - first);
        let (queries, rope_queries) = (&scratch.queries, &scratch.rope_queries);
        let selections = &scratch.selections;

        scratch.absorbed.clear();
        scratch.absorbed.resize(block * a.heads * a.kv_rank, 0.0);
        ctx.team.for_each_chunk(&mut scratch.absorbed, a.kv_rank, &|part, absorbed| {
            let head = part % a.heads;
            let query = &queries[(first * a.heads + part) * a.qk()..][..a.nope];
            let key_part = head * a.kv_b_rows()..head * a.kv_b_rows() + a.nope;
            combine_rows(ctx.kernels, kv_b, key_part, query, absorbed);
        });

        resize(&mut scratch.mixed, block * a.heads * a.kv_rank);
        let heads = heads_per_part(a.heads, block, ctx.team.threads());
        let parts_per_row = a.heads / heads;
        let absorbed = &scratch.absorbed;
        ctx.team.for_each_chunk_with(
            &mut scratch.per_thread,
            &mut scratch.mixed,
            heads * a.kv_rank,
            &|part, mixed, per_thread| {
                let row = first + part / parts_per_row;
                let rope_at = (first * a.heads + part * heads) * a.rope;
                let query = Attention {
                    latent_queries: &absorbed[part * heads * a.kv_rank..][..heads * a.kv_rank],
                    rope_queries: &rope_queries[rope_at..][..heads * a.rope],
                    heads,
                    scale: a.scale(),
                };
                let attended = match &selections[row] {
                    Some(list) => Attended::List(list),
                    None => Attended::Range(0..start + row + 1),
                };
                attend(ctx.kernels, &query, keys, attended, per_thread, mixed);
            },
        );

        let mixed = &scratch.mixed;
        let context = &mut scratch.context[first * a.heads * a.value..][..block * a.heads * a.value];
        ctx.team.for_each_chunk(context, a.value, &|part, values| {
            let head = part % a.heads;
            let value_part = head * a.kv_b_rows() + a.nope..(head + 1) * a.kv_b_rows();
            let latent = &mixed[part * a.kv_rank..][..a.kv_rank];
            matmul_rows(ctx.kernels, kv_b, value_part, Input::exact(latent), values);
        });
    }
}

/// Heads that one part of a run attends with: all of them when there are enough rows to share
/// out (the cache is then read once per row), else a divisor that gives every thread some.
fn heads_per_part(heads: usize, rows: usize, threads: usize) -> usize {
    let wanted = heads.div_ceil(threads.div_ceil(rows).max(1));
    (1..=wanted).rev().find(|n| heads.is_multiple_of(*n)).unwrap_or(1)
}

fn key_rows(rows: &Rows, range: std::ops::Range<usize>) -> KeyRows<'_> {
    match rows {
        Rows::Bf16(all) => KeyRows::Bf16(&all[range]),
        Rows::F32(all) => KeyRows::F32(&all[range]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_all_heads_evenly() {
        for (heads, rows, threads, wanted) in
            [(64, 1, 2, 32), (64, 4, 2, 64), (64, 1, 3, 16), (7, 1, 2, 1), (1, 1, 8, 1), (8, 2, 8, 2)]
        {
            assert_eq!(heads_per_part(heads, rows, threads), wanted, "{heads} {rows} {threads}");
        }
    }
}
