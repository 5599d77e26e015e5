//! Multi-head latent attention with a compressed cache, and the DSA indexer.
//!
//! Scores and values are always evaluated in absorbed form, whatever the number of
//! rows: `q . k = (kv_bK^T q) . latent`, and the softmax mixes latents before `kv_bV`
//! expands them (forward spec sections 7 and 8).

mod mix;
mod select;

use forebay_kernels::{Activations, AttendScratch, Rope, ScoreScratch, SelectScratch};

use crate::families::roles::Role;
use crate::forward::Context;
use crate::kv::{KeyBlocks, KvCache};
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
    /// Position of the pass's first row.
    start: usize,
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
    fn fill(&mut self, rope: &Rope, positions: std::ops::Range<usize>) {
        self.half = rope.dim() / 2;
        resize(&mut self.cos, positions.len() * self.half);
        resize(&mut self.sin, positions.len() * self.half);
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
    /// Position of the pass's first row.
    pub(crate) fn start(&self) -> usize {
        self.start
    }

    /// Starts a pass of `rows` rows at the positions from `start` on.
    pub(crate) fn begin(&mut self, model: &Model, start: usize, rows: usize) {
        let keep = model.spec.indexer.map_or(0, |index| index.top_k.min(start + rows));
        self.start = start;
        self.selections.begin(rows, keep);
        self.angles.fill(&model.rope, start..start + rows);
    }

    /// Bytes that attention over blocks of `rows` rows, in passes of `pass` rows and with
    /// `context` positions, holds.
    pub(crate) fn planned_bytes(
        spec: &ModelSpec,
        pass: usize,
        rows: usize,
        context: usize,
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
        4 * values + quantised.iter().sum::<usize>() + KeyBlocks::planned_bytes(context)
    }
}

/// Attention of layer `layer` over the input-normed rows `x`, which are rows `block` of a pass,
/// into `out`. The pass starts where `scratch` was told that it begins.
#[allow(clippy::too_many_arguments)] // Eight independent pieces; a struct would only rename them.
pub(crate) fn attention(
    ctx: Context<'_>,
    layer: usize,
    kv: &mut KvCache,
    block: std::ops::Range<usize>,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut AttentionScratch,
    profile: &mut Profile,
    trace: Option<&mut (dyn Trace + '_)>,
    out: &mut [f32],
) {
    let spec = &ctx.model.spec;
    let weights = &ctx.model.layer(layer).attention;
    let start = scratch.start + block.start;
    scratch.angles.first = block.start;
    scratch.selections.enter(block);
    project(ctx, weights, x, quantised, scratch);
    rotate_and_cache(ctx, layer, weights, kv, start, scratch);
    profile.lap(Phase::Projections);
    if let (Some(indexer), Some(index)) = (&weights.indexer, &spec.indexer) {
        select::select(ctx, layer, indexer, index, kv, start, x, quantised, scratch, trace);
        profile.lap(Phase::Indexer);
    }
    mix::mix_values(ctx, layer, weights, kv, start, scratch, profile);
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
    scratch.begin(ctx.model, start, rows);
    scratch.angles.first = 0;
    resize(&mut scratch.latent_rope, rows * (a.kv_rank + a.rope));
    ctx.linear(Role::KvDown, &weights.kv_a, x, quantised, &mut scratch.latent_rope);
    cache_latents(ctx, layer, weights, kv, start, scratch);
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
    let (angles, rope, queries) = (&scratch.angles, &ctx.model.rope, &scratch.queries);
    ctx.team.for_each_chunk(&mut scratch.rope_queries, a.heads * a.rope, &|row, rotated| {
        let queries = queries[row * a.heads * a.qk()..].chunks_exact(a.qk());
        for (query, rotated) in queries.zip(rotated.chunks_exact_mut(a.rope)) {
            rotated.copy_from_slice(&query[a.nope..]);
            angles.rotate(rope, row, rotated);
        }
    });
    cache_latents(ctx, layer, weights, kv, start, scratch);
}

/// Writes the cache rows of `scratch.latent_rope`.
fn cache_latents(
    ctx: Context<'_>,
    layer: usize,
    weights: &AttentionWeights,
    kv: &mut KvCache,
    start: usize,
    scratch: &mut AttentionScratch,
) {
    let (spec, rope) = (&ctx.model.spec, &ctx.model.rope);
    let (a, angles) = (&spec.attention, &scratch.angles);
    resize(&mut scratch.latent, a.kv_rank);
    for (row, both) in scratch.latent_rope.chunks_exact_mut(a.kv_rank + a.rope).enumerate() {
        let (latent, rope_key) = both.split_at_mut(a.kv_rank);
        ctx.kernels.rms_norm(latent, &weights.kv_a_norm, spec.low_rank_norm_eps, &mut scratch.latent);
        angles.rotate(rope, row, rope_key);
        kv.write(layer, start + row, &scratch.latent, rope_key);
    }
}
