//! Attention over cached keys: blocks of softmax tiles, all heads per block, online softmax.
//!
//! The keys of a block are widened into lines once. Register tiles of a few heads times a
//! few keys then compute the scores, and of a few heads times a few columns the values, so
//! that the cache is read once for all heads of a row, and of neighbouring rows.

mod softmax;
mod tile;

pub(crate) use softmax::Run;
pub(crate) use tile::{BLOCK_ROWS, Layout, to_lines};

use super::Room;
use super::lanes::LANES;
use super::registers::{self, Line, Panel, Sums};
use crate::attention::{AttendScratch, Attended, AttentionRows, KeyCache};
use std::ops::Range;
use tile::Block;

/// Keys that stay in the first cache while the heads go by.
const NEAR_KEYS: usize = 8;

/// The keys of a block, and where its softmax tiles end.
struct Keys<'a> {
    layout: Layout,
    tile: &'a [Line],
    tile_ends: &'a [usize],
    scale: f32,
}

/// The state of one query row.
struct RowState<'a> {
    queries: &'a [Line],
    /// `[heads][BLOCK_ROWS]`, inside a group `[key][head]`.
    scores: &'a mut [f32],
    max: &'a mut [f32],
    sum: &'a mut [f32],
    values: &'a mut [Line],
    runs: &'a mut Vec<Run>,
}

/// Attends one query row, or several neighbouring ones; `out` is `rows x heads x latent`.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn attend<R: Room>(
    query: &AttentionRows<'_>,
    keys: KeyCache<'_>,
    attended: Attended<'_>,
    scratch: &mut AttendScratch,
    out: &mut [f32],
) {
    let layout = Layout::new(query.latent_dim, query.rope_dim);
    let (rows, heads) = (query.rows, query.heads);
    scratch.begin(rows * heads, layout);
    // SAFETY: passed on to the caller.
    unsafe { pack_queries::<R>(query, layout, &mut scratch.queries) };
    // A row of a range attends to one position more than the row before.
    let first_row_end = match &attended {
        Attended::Range(range) => range.end,
        Attended::List(_) => usize::MAX - rows,
    };
    let mut rest = match attended {
        Attended::Range(range) => Attended::Range(range.start..range.end + rows - 1),
        list => list,
    };
    let mut block = Block::new();
    while block.take(&mut rest) {
        let positions = block.positions();
        let dims = (query.latent_dim, query.rope_dim);
        // SAFETY: passed on to the caller.
        unsafe { tile::pack::<R>(keys, dims, positions, layout, &mut scratch.tile) };
        let keys = Keys { layout, tile: &scratch.tile, tile_ends: block.tile_ends(), scale: query.scale };
        for row in 0..rows {
            let len = positions.partition_point(|position| *position < first_row_end + row);
            if len == 0 {
                continue;
            }
            let pairs = row * heads..(row + 1) * heads;
            let mut state = RowState {
                queries: &scratch.queries[pairs.start * layout.stride..pairs.end * layout.stride],
                scores: &mut scratch.scores,
                max: &mut scratch.max[pairs.clone()],
                sum: &mut scratch.sum[pairs.clone()],
                values: &mut scratch.values
                    [pairs.start * layout.latent_lines..pairs.end * layout.latent_lines],
                runs: &mut scratch.runs,
            };
            // SAFETY: passed on to the caller.
            unsafe {
                let rest = if R::REGISTERS >= 32 {
                    groups::<R, 4, 4, 4>(&keys, len, 0..heads, &mut state)
                } else {
                    groups::<R, 2, 2, 2>(&keys, len, 0..heads, &mut state)
                };
                groups::<R, 1, 4, 4>(&keys, len, rest, &mut state);
            }
        }
    }
    let values = scratch.values.chunks_exact(layout.latent_lines).zip(&scratch.sum);
    for ((values, sum), out) in values.zip(out.chunks_exact_mut(query.latent_dim)) {
        for (out, value) in out.iter_mut().zip(bytemuck::cast_slice::<Line, f32>(values)) {
            *out = value / *sum;
        }
    }
}

/// Attends `len` keys of a block with as many of `heads` as form whole groups of `M`; returns
/// the others. Register tiles are `M` heads by `N` keys and `M` heads by `V` lines.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn groups<R: Room, const M: usize, const N: usize, const V: usize>(
    keys: &Keys<'_>,
    len: usize,
    heads: Range<usize>,
    state: &mut RowState<'_>,
) -> Range<usize> {
    let layout = keys.layout;
    let groups = heads.len() / M;
    let firsts = (0..groups).map(|g| heads.start + g * M);
    let queries = Panel { lines: state.queries, stride: layout.stride };
    let tile = Panel { lines: keys.tile, stride: layout.stride };
    for near in (0..len).step_by(NEAR_KEYS) {
        for head in firsts.clone() {
            let query = queries.skip_rows(head);
            let scores = group_scores::<M>(state.scores, head);
            for t in (near..len.min(near + NEAR_KEYS)).step_by(N) {
                let key = tile.skip_rows(t);
                // SAFETY: passed on to the caller.
                let (latent, rope) = unsafe {
                    let (query_rope, key_rope) =
                        (query.skip_lines(layout.latent_lines), key.skip_lines(layout.latent_lines));
                    (
                        registers::dots::<R, M, N>(query, key, layout.latent_lines),
                        registers::dots::<R, M, N>(query_rope, key_rope, layout.rope_lines),
                    )
                };
                for n in 0..N {
                    for m in 0..M {
                        scores[t + n][m] = (latent[n][m] + rope[n][m]) * keys.scale;
                    }
                }
            }
        }
    }
    state.runs.clear();
    for head in firsts {
        let scores = &mut group_scores::<M>(state.scores, head)[..len];
        let max = state.max[head..].first_chunk_mut().expect("a whole group");
        let sum = state.sum[head..].first_chunk_mut().expect("a whole group");
        softmax::softmax(scores, keys.tile_ends, head, max, sum, state.runs);
    }
    let mut line = 0;
    while line < layout.latent_lines {
        // SAFETY: passed on to the caller.
        unsafe {
            if line + V <= layout.latent_lines {
                mix_columns::<R, M, V>(keys, line, state);
                line += V;
            } else {
                mix_columns::<R, M, 1>(keys, line, state);
                line += 1;
            }
        }
    }
    heads.start + groups * M..heads.end
}

/// Adds the values of all runs in the `V` lines from `line` on.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn mix_columns<R: Room, const M: usize, const V: usize>(
    keys: &Keys<'_>,
    line: usize,
    state: &mut RowState<'_>,
) {
    let lines = keys.layout.latent_lines;
    let tile = Panel { lines: keys.tile, stride: keys.layout.stride }.skip_lines(line);
    for run in state.runs.iter() {
        let weights = &group_scores::<M>(state.scores, run.head)[run.from..run.to];
        let factors = run.factors.as_ref().and_then(|factors| factors.first_chunk::<M>());
        let values = &mut state.values[run.head * lines + line..][..(M - 1) * lines + V];
        let sums = Sums { ptr: values.as_mut_ptr().cast(), stride: lines * LANES };
        // SAFETY: passed on to the caller; `values` spans M rows of V lines.
        unsafe {
            let weight = |t: usize, m: usize| weights[t][m];
            registers::mix::<R, M, V>(weights.len(), weight, tile.skip_rows(run.from), factors, sums);
        }
    }
}

/// The scores `[key][head]` of the group of `M` heads that starts with `head`.
#[inline(always)]
fn group_scores<const M: usize>(scores: &mut [f32], head: usize) -> &mut [[f32; M]] {
    let (scores, _) = scores[head * BLOCK_ROWS..(head + M) * BLOCK_ROWS].as_chunks_mut::<M>();
    scores
}

/// Copies all queries into lines. Columns past a part's end are -0: with keys of 0 there,
/// `fma` adds -0, which leaves every lane as it is.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn pack_queries<R: Room>(query: &AttentionRows<'_>, layout: Layout, lines: &mut [Line]) {
    let pairs = (0..query.rows).flat_map(|row| (0..query.heads).map(move |head| (row, head)));
    for ((row, head), lines) in pairs.zip(lines.chunks_exact_mut(layout.stride)) {
        let (latent, rope) = lines.split_at_mut(layout.latent_lines);
        // SAFETY: passed on to the caller.
        unsafe {
            to_lines::<R, f32>(query.latent_queries.get(row, head, query.latent_dim), -0.0, latent);
            to_lines::<R, f32>(query.rope_queries.get(row, head, query.rope_dim), -0.0, rope);
        }
    }
}
