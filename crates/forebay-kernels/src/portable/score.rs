//! Scores of the DSA indexer.

use super::Room;
use super::attend::to_lines;
use super::lanes::LANES;
use super::registers::{self, Line, Panel};
use crate::attention::{KeyRows, bf16};
use crate::indexer::{IndexQueries, ScoreScratch};

/// Keys that are scored together: one per lane when the heads are summed up.
const KEYS: usize = LANES;

/// `out[row][t] = (sum_h fma(w[h], relu(dot(q[h], k[t]) * per_dim), ..)) * per_head`, ascending h.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn scores<R: Room>(
    query: &IndexQueries<'_>,
    keys: KeyRows<'_>,
    scratch: &mut ScoreScratch,
    out: &mut [f32],
) {
    let IndexQueries { heads, dim, .. } = *query;
    let rows = query.weights.len() / heads;
    let count = out.len() / rows;
    let lines = dim.div_ceil(LANES);
    scratch.queries.resize(rows * heads * lines, Line::ZERO);
    scratch.keys.resize(KEYS * lines, Line::ZERO);
    for (query, lines) in query.queries.chunks_exact(dim).zip(scratch.queries.chunks_exact_mut(lines)) {
        // Keys are 0 where queries are -0: `fma` adds -0 there, which changes no lane.
        // SAFETY: passed on to the caller.
        unsafe { to_lines::<R, f32>(query, -0.0, lines) };
    }
    for first in (0..count).step_by(KEYS) {
        let some = KEYS.min(count - first);
        for (t, lines) in (first..first + some).zip(scratch.keys.chunks_exact_mut(lines)) {
            let numbers = t * dim..(t + 1) * dim;
            // SAFETY: passed on to the caller.
            unsafe {
                match keys {
                    KeyRows::F32(keys) => to_lines::<R, f32>(&keys[numbers], 0.0, lines),
                    KeyRows::Bf16(keys) => to_lines::<R, _>(&bf16(keys)[numbers], 0.0, lines),
                    KeyRows::F32Blocks(keys) => to_lines::<R, f32>(keys.row(t, dim), 0.0, lines),
                    KeyRows::Bf16Blocks(keys) => to_lines::<R, _>(bf16(keys.row(t, dim)), 0.0, lines),
                }
            }
        }
        let keys = Panel { lines: &scratch.keys, stride: lines };
        let queries = scratch.queries.chunks_exact(heads * lines).zip(query.weights.chunks_exact(heads));
        for ((queries, weights), out) in queries.zip(out.chunks_exact_mut(count)) {
            let queries = Panel { lines: queries, stride: lines };
            // SAFETY: passed on to the caller.
            let sums = unsafe { row::<R>(queries, weights, keys, 1.0 / (dim as f32).sqrt()) };
            let per_head = 1.0 / (heads as f32).sqrt();
            for (out, sum) in out[first..first + some].iter_mut().zip(sums) {
                *out = sum * per_head;
            }
        }
    }
}

/// The weighted sums over the heads of one row, for all keys of the tile.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn row<R: Room>(queries: Panel<'_>, weights: &[f32], keys: Panel<'_>, per_dim: f32) -> [f32; KEYS] {
    let mut sums = [0f32; KEYS];
    // SAFETY: passed on to the caller.
    unsafe {
        let done = if R::REGISTERS >= 32 {
            heads::<R, 4, 4>(queries, weights, keys, per_dim, &mut sums)
        } else {
            heads::<R, 2, 2>(queries, weights, keys, per_dim, &mut sums)
        };
        heads::<R, 4, 1>(queries.skip_rows(done), &weights[done..], keys, per_dim, &mut sums);
    }
    sums
}

/// Adds the heads that form whole groups of `H`, and returns how many those are. Register
/// tiles are `K` keys by `H` heads.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn heads<R: Room, const K: usize, const H: usize>(
    queries: Panel<'_>,
    weights: &[f32],
    keys: Panel<'_>,
    per_dim: f32,
    sums: &mut [f32; KEYS],
) -> usize {
    let (groups, _) = weights.as_chunks::<H>();
    for (g, weights) in groups.iter().enumerate() {
        let queries = queries.skip_rows(g * H);
        let mut similarities = [[0f32; KEYS]; H];
        for first in (0..KEYS).step_by(K) {
            // SAFETY: passed on to the caller.
            let dots = unsafe { registers::dots::<R, K, H>(keys.skip_rows(first), queries, keys.stride) };
            for (similarities, dots) in similarities.iter_mut().zip(dots) {
                similarities[first..first + K].copy_from_slice(&dots);
            }
        }
        for (similarities, weight) in similarities.iter().zip(weights) {
            for (sum, similarity) in sums.iter_mut().zip(similarities) {
                let similarity = similarity * per_dim;
                // A select, not max(), so that NaN stays NaN.
                let positive = if similarity < 0.0 { 0.0 } else { similarity };
                *sum = weight.mul_add(positive, *sum);
            }
        }
    }
    groups.len() * H
}
