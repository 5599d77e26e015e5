//! Softmax attention in latent space between the two halves of `kv_b`.

use forebay_kernels::{
    Attended, AttentionRows, HeadRows, Input, KeyCache, attend_rows, combine_batch, matmul_rows,
};

use super::{AttentionScratch, PerThread};
use crate::forward::Context;
use crate::kv::KeyBlocks;
use crate::pass::{Pass, Span};
use crate::profile::{Phase, Profile};
use crate::weights::AttentionWeights;
use crate::workspace::resize;

/// Rows that go through `kv_b` together: its rows are decoded once for them.
pub(super) const ROW_BLOCK: usize = 64;

/// Rows without a selection that share the reading of the cache at most.
pub(super) const NEIGHBOURS: usize = 4;

/// Absorbed queries, softmax attention in latent space, then the value expansion, into
/// `scratch.context`.
pub(super) fn mix_values(
    ctx: Context<'_>,
    layer: usize,
    weights: &AttentionWeights,
    pass: &Pass<'_, '_>,
    spans: &[Span],
    scratch: &mut AttentionScratch,
    profile: &mut Profile,
) {
    let a = &ctx.model.spec.attention;
    let rows = scratch.selections.rows();
    scratch.per_thread.resize_with(ctx.team.threads(), PerThread::default);
    resize(&mut scratch.context, rows * a.heads * a.value);
    for first in (0..rows).step_by(ROW_BLOCK) {
        let block = ROW_BLOCK.min(rows - first);
        absorb(ctx, weights, first, block, scratch);
        profile.lap(Phase::Absorb);
        let spans: Vec<Span> = spans.iter().filter_map(|span| span.within(&(first..first + block))).collect();
        attend_block(ctx, layer, pass, &spans, first, block, scratch);
        profile.lap(Phase::Attend);
        expand(ctx, weights, first, block, scratch);
        profile.lap(Phase::Expand);
    }
}

/// `scratch.absorbed = kv_bK^T q` for `block` rows from `first` on, head by head.
fn absorb(
    ctx: Context<'_>,
    weights: &AttentionWeights,
    first: usize,
    block: usize,
    scratch: &mut AttentionScratch,
) {
    let a = &ctx.model.spec.attention;
    let kv_b = weights.kv_b.view();
    let queries = &scratch.queries[first * a.heads * a.qk()..];
    resize(&mut scratch.absorbed, a.heads * block * a.kv_rank);
    ctx.team.for_each_chunk(&mut scratch.absorbed, block * a.kv_rank, &|head, absorbed| {
        let key_part = head * a.kv_b_rows()..head * a.kv_b_rows() + a.nope;
        absorbed.fill(0.0);
        combine_batch(ctx.kernels, kv_b, key_part, &queries[head * a.qk()..], a.heads * a.qk(), absorbed);
    });
}

/// `scratch.mixed` = the softmax mixture of latents, for every row of the block and every head; rows of `spans` are
/// counted in it.
fn attend_block(
    ctx: Context<'_>,
    layer: usize,
    pass: &Pass<'_, '_>,
    spans: &[Span],
    first: usize,
    block: usize,
    scratch: &mut AttentionScratch,
) {
    let a = &ctx.model.spec.attention;
    let lists: Vec<(KeyBlocks<'_>, KeyBlocks<'_>)> = spans
        .iter()
        .map(|span| (pass.parts[span.part].kv.latents(layer), pass.parts[span.part].kv.rope_keys(layer)))
        .collect();
    let keys: Vec<KeyCache<'_>> = spans
        .iter()
        .zip(&lists)
        .map(|(span, (latents, rope_keys))| {
            let end = span.end_position();
            KeyCache { latents: latents.rows(end), rope_keys: rope_keys.rows(end) }
        })
        .collect();
    let threads = ctx.team.threads();
    // Two parts or more for every thread, then rows that read the cache together.
    let part_rows = (block / (2 * threads)).clamp(1, NEIGHBOURS);
    let heads = heads_per_part(a.heads, block, threads);
    let parts_per_row = a.heads / heads;
    let (absorbed, rope_queries) = (&scratch.absorbed, &scratch.rope_queries);
    let selections = &scratch.selections;
    resize(&mut scratch.mixed, block * a.heads * a.kv_rank);
    ctx.team.for_each_chunk_with(
        &mut scratch.per_thread,
        &mut scratch.mixed,
        part_rows * heads * a.kv_rank,
        &|part, mixed, space| {
            let row = part / parts_per_row * part_rows;
            let head = part % parts_per_row * heads;
            let query = |row: usize, rows: usize| AttentionRows {
                latent_queries: HeadRows {
                    values: &absorbed[(head * block + row) * a.kv_rank..],
                    row: a.kv_rank,
                    head: block * a.kv_rank,
                },
                rope_queries: HeadRows {
                    values: &rope_queries[((first + row) * a.heads + head) * a.rope..],
                    row: a.heads * a.rope,
                    head: a.rope,
                },
                rows,
                heads,
                latent_dim: a.kv_rank,
                rope_dim: a.rope,
                scale: a.scale(),
            };
            let rows = mixed.len() / (heads * a.kv_rank);
            let mut rest = mixed;
            let first_span = spans.partition_point(|span| span.end() <= row);
            // Neighbours share the reading of the cache as far as it is that of one sequence.
            for (span, keys) in spans[first_span..].iter().zip(&keys[first_span..]) {
                let Some(here) = span.within(&(row..row + rows)) else { break };
                let (mixed, behind) = rest.split_at_mut(here.rows * heads * a.kv_rank);
                rest = behind;
                let row = row + here.first;
                let everything = |at: usize| Attended::Range(0..here.position + at + 1);
                if (0..here.rows).all(|at| selections.get(first + row + at).is_none()) {
                    let query = query(row, here.rows);
                    attend_rows(ctx.kernels, &query, *keys, everything(0), &mut space.attend, mixed);
                    continue;
                }
                for (at, mixed) in mixed.chunks_exact_mut(heads * a.kv_rank).enumerate() {
                    let selected = selections.get(first + row + at);
                    let attended = selected.map_or_else(|| everything(at), Attended::List);
                    attend_rows(ctx.kernels, &query(row + at, 1), *keys, attended, &mut space.attend, mixed);
                }
            }
        },
    );
}

/// `scratch.context` = `kv_bV` of the mixtures, for every row of the block and every head.
fn expand(
    ctx: Context<'_>,
    weights: &AttentionWeights,
    first: usize,
    block: usize,
    scratch: &mut AttentionScratch,
) {
    let a = &ctx.model.spec.attention;
    let kv_b = weights.kv_b.view();
    let mixed = &scratch.mixed;
    resize(&mut scratch.expanded, a.heads * block * a.value);
    ctx.team.for_each_chunk_with(
        &mut scratch.per_thread,
        &mut scratch.expanded,
        block * a.value,
        &|head, values, space| {
            let value_part = head * a.kv_b_rows() + a.nope..(head + 1) * a.kv_b_rows();
            resize(&mut space.latents, block * a.kv_rank);
            for (row, latent) in space.latents.chunks_exact_mut(a.kv_rank).enumerate() {
                latent.copy_from_slice(&mixed[(row * a.heads + head) * a.kv_rank..][..a.kv_rank]);
            }
            matmul_rows(ctx.kernels, kv_b, value_part, Input::exact(&space.latents), values);
        },
    );
    let expanded = &scratch.expanded;
    let context = &mut scratch.context[first * a.heads * a.value..][..block * a.heads * a.value];
    ctx.team.for_each_chunk(context, a.heads * a.value, &|row, context| {
        for (head, values) in context.chunks_exact_mut(a.value).enumerate() {
            values.copy_from_slice(&expanded[(head * block + row) * a.value..][..a.value]);
        }
    });
}

/// Heads that one part of a run attends with: all of them when there are enough rows to share
/// out (the cache is then read once per row), else a divisor that gives every thread some.
fn heads_per_part(heads: usize, rows: usize, threads: usize) -> usize {
    let wanted = heads.div_ceil(threads.div_ceil(rows).max(1));
    (1..=wanted).rev().find(|n| heads.is_multiple_of(*n)).unwrap_or(1)
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
