//! Multi-head latent attention with a compressed cache, and the DSA indexer.
//!
//! Scores and values are always evaluated in absorbed form, whatever the number of
//! rows: `q . k = (kv_bK^T q) . latent`, and the softmax mixes latents before `kv_bV`
//! expands them (forward spec sections 7 and 8).

mod mix;
mod select;

use std::ops::Range;

use forebay_kernels::{Activations, AttendScratch, Rope, ScoreScratch, SelectScratch};

use crate::families::roles::Role;
use crate::forward::Context;
use crate::kv::{KeyBlocks, KvCache};
use crate::pass::{Pass, Span, keep_rows};
use crate::profile::{Phase, Profile};
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::weights::{AttentionWeights, Model};
use crate::workspace::{Quantised, resize};
use mix::{NEIGHBOURS, ROW_BLOCK};
use select::{SELECT_ROWS, Selections};

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
    /// `[heads, ROW_BLOCK, kv_rank]`
    absorbed: Vec<f32>,
    /// `[ROW_BLOCK, heads, kv_rank]`
    mixed: Vec<f32>,
    /// `[heads, ROW_BLOCK, value]`
    expanded: Vec<f32>,
    /// `[rows, heads, value]`
    context: Vec<f32>,
    angles: Angles,
    per_thread: Vec<PerThread>,
    /// `[rows, index dim]`
    index_keys: Vec<f32>,
    /// One normalised index key.
    index_key: Vec<f32>,
    /// `[rows, index heads, index dim]`
    index_queries: Vec<f32>,
    /// `[rows, index heads]`
    index_weights: Vec<f32>,
    /// `[SELECT_ROWS, positions]`
    scores: Vec<f32>,
    /// One selection in the order of the rule, for a trace.
    traced: Vec<u32>,
    /// The last full layer's selections.
    selections: Selections,
}

/// Cosines and sines of a pass's positions, `[rows, rope / 2]` each.
#[derive(Default)]
struct Angles {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
    /// The pass's row that is row 0 of the block.
    first: usize,
}

impl Angles {
    /// For `rows` rows at these positions.
    fn fill(&mut self, rope: &Rope, rows: usize, positions: impl Iterator<Item = usize>) {
        self.half = rope.dim() / 2;
        resize(&mut self.cos, rows * self.half);
        resize(&mut self.sin, rows * self.half);
        let rows = self.cos.chunks_exact_mut(self.half).zip(self.sin.chunks_exact_mut(self.half));
        for (position, (cos, sin)) in positions.zip(rows) {
            rope.angles(position, cos, sin);
        }
    }

    /// Rotates a vector of the block's row `row`.
    fn rotate(&self, rope: &Rope, row: usize, v: &mut [f32]) {
        let row = self.first + row;
        let at = row * self.half..(row + 1) * self.half;
        rope.rotate(v, &self.cos[at.clone()], &self.sin[at]);
    }
}

/// What each thread works with.
#[derive(Default)]
struct PerThread {
    attend: AttendScratch,
    score: ScoreScratch,
    select: SelectScratch,
    /// `[ROW_BLOCK, kv_rank]`: one head's mixed latents.
    latents: Vec<f32>,
}

impl AttentionScratch {
    /// Starts a pass over the rows of `spans`.
    pub(crate) fn begin(&mut self, model: &Model, spans: &[Span]) {
        let top_k = model.spec.indexer.map_or(0, |index| index.top_k);
        let keep = spans.iter().map(|span| top_k.min(span.end_position())).max().unwrap_or(0);
        let rows = spans.last().map_or(0, Span::end);
        self.selections.begin(rows, keep);
        let positions = spans.iter().flat_map(|span| span.position..span.end_position());
        self.angles.fill(&model.rope, rows, positions);
    }

    /// Goes on with the rows `stay` of the pass alone.
    pub(crate) fn keep_rows(&mut self, stay: &[Range<usize>]) {
        self.selections.keep_rows(stay);
        keep_rows(&mut self.angles.cos, self.angles.half, stay);
        keep_rows(&mut self.angles.sin, self.angles.half, stay);
    }

    /// Bytes that attention over blocks of `rows` rows, in passes of `pass` rows of `sequences` sequences
    /// of `context` positions, holds.
    pub(crate) fn planned_bytes(
        spec: &ModelSpec,
        pass: usize,
        rows: usize,
        context: usize,
        sequences: usize,
        threads: usize,
    ) -> usize {
        let a = &spec.attention;
        let per_row = 2 * a.q_rank + a.heads * (a.qk() + a.rope + a.value) + a.kv_rank + a.rope;
        let quantised = [a.q_rank, a.heads * a.value].map(|width| Activations::planned_bytes(rows, width));
        let block = rows.min(ROW_BLOCK);
        let block_values = block * a.heads * (2 * a.kv_rank + a.value);
        let pairs = rows.min(NEIGHBOURS) * a.heads;
        let mut per_thread = AttendScratch::planned_values(pairs, a.kv_rank, a.rope) + block * a.kv_rank;
        let mut index_values = 0;
        if let Some(index) = &spec.indexer {
            let keep = index.top_k.min(context);
            let select_rows = rows.min(SELECT_ROWS);
            per_thread += ScoreScratch::planned_values(select_rows * index.heads, index.dim) + context;
            index_values = pass * (keep + 4)
                + rows * (index.dim + index.heads * (index.dim + 1))
                + select_rows * context
                + index.dim
                + keep;
        }
        let values = pass * a.rope + rows * per_row + block_values + index_values + threads * per_thread;
        4 * values + quantised.iter().sum::<usize>() + sequences * KeyBlocks::planned_bytes(context)
    }
}

/// Attention of layer `layer` over the input-normed rows `x`, which are rows `block` of a pass,
/// into `out`. Every row attends to the cache of its own sequence; all else is done for all rows at once.
#[allow(clippy::too_many_arguments)] // Independent pieces; a struct would only rename them.
pub(crate) fn attention(
    ctx: Context<'_>,
    layer: usize,
    pass: &mut Pass<'_, '_>,
    block: Range<usize>,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
    profile: &mut Profile,
    trace: Option<&mut (dyn Trace + '_)>,
    out: &mut [f32],
) {
    let spec = &ctx.model.spec;
    let weights = &ctx.model.layer(layer).attention;
    let spans = pass.spans_in(&block);
    scratch.angles.first = block.start;
    scratch.selections.enter(block);
    project(ctx, weights, x, quantised, scratch);
    rotate_queries(ctx, scratch);
    cache_latents(ctx, weights, &spans, scratch, &mut |span, row, latent, rope_key| {
        pass.parts[span.part].kv.write(layer, span.position + row, latent, rope_key);
    });
    profile.lap(Phase::Projections);
    if let (Some(indexer), Some(index)) = (&weights.indexer, &spec.indexer) {
        select::select(ctx, layer, indexer, index, pass, &spans, x, quantised, scratch, trace);
        profile.lap(Phase::Indexer);
    }
    mix::mix_values(ctx, layer, weights, pass, &spans, scratch, profile);
    ctx.linear(Role::AttentionOut, &weights.o, &scratch.context, quantised, out);
    profile.lap(Phase::AttentionOut);
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
    // Both take the layer's input, quantised once.
    debug_assert_eq!(Role::QueryDown.arith(ctx.arith), Role::KvDown.arith(ctx.arith));
    let products = [(&weights.q_a, &mut scratch.raw[..]), (&weights.kv_a, &mut scratch.latent_rope[..])];
    ctx.linears(Role::QueryDown, x, quantised, products);
    ctx.rms_norms(&scratch.raw, &weights.q_a_norm, spec.low_rank_norm_eps, &mut scratch.low_rank);
    ctx.linear(Role::QueryUp, &weights.q_b, &scratch.low_rank, quantised, &mut scratch.queries);
}

/// A layer's cache rows alone, for the input-normed rows `x` at the positions from `start` on.
pub(crate) fn cache_rows(
    ctx: Context<'_>,
    layer: usize,
    kv: &mut KvCache,
    start: usize,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
) {
    let (a, weights) = (&ctx.model.spec.attention, &ctx.model.layer(layer).attention);
    let rows = x.len() / ctx.model.spec.hidden;
    let spans = [Span { part: 0, first: 0, rows, position: start }];
    scratch.begin(ctx.model, &spans);
    scratch.angles.first = 0;
    resize(&mut scratch.latent_rope, rows * (a.kv_rank + a.rope));
    ctx.linear(Role::KvDown, &weights.kv_a, x, quantised, &mut scratch.latent_rope);
    cache_latents(ctx, weights, &spans, scratch, &mut |span, row, latent, rope_key| {
        kv.write(layer, span.position + row, latent, rope_key);
    });
}

/// Rotates the rope parts of the queries.
fn rotate_queries(ctx: Context<'_>, scratch: &mut AttentionScratch) {
    let a = &ctx.model.spec.attention;
    let rows = scratch.latent_rope.len() / (a.kv_rank + a.rope);
    resize(&mut scratch.rope_queries, rows * a.heads * a.rope);
    let (angles, rope, queries) = (&scratch.angles, &ctx.model.rope, &scratch.queries);
    ctx.team.for_each_chunk(&mut scratch.rope_queries, a.heads * a.rope, &|row, rotated| {
        let queries = queries[row * a.heads * a.qk()..].chunks_exact(a.qk());
        for (query, rotated) in queries.zip(rotated.chunks_exact_mut(a.rope)) {
            rotated.copy_from_slice(&query[a.nope..]);
            angles.rotate(rope, row, rotated);
        }
    });
}

/// Takes a latent and a rotated rope key: whose they are, and which row of that span.
type WriteRow<'w> = &'w mut dyn FnMut(Span, usize, &[f32], &[f32]);

/// Hands the cache rows of `scratch.latent_rope` to `write`, all of them before any is read.
fn cache_latents(
    ctx: Context<'_>,
    weights: &AttentionWeights,
    spans: &[Span],
    scratch: &mut AttentionScratch,
    write: WriteRow<'_>,
) {
    let (spec, rope) = (&ctx.model.spec, &ctx.model.rope);
    let (a, angles) = (&spec.attention, &scratch.angles);
    resize(&mut scratch.latent, a.kv_rank);
    let mut rows = scratch.latent_rope.chunks_exact_mut(a.kv_rank + a.rope);
    for span in spans {
        for (row, both) in rows.by_ref().take(span.rows).enumerate() {
            let (latent, rope_key) = both.split_at_mut(a.kv_rank);
            ctx.kernels.rms_norm(latent, &weights.kv_a_norm, spec.low_rank_norm_eps, &mut scratch.latent);
            angles.rotate(rope, span.first + row, rope_key);
            write(*span, row, &scratch.latent, rope_key);
        }
    }
}
