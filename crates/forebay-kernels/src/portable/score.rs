//! Scores of the DSA indexer.

use super::Room;
use super::lanes::{self, Element};

/// `out[t] = (sum_h fma(w[h], relu(dot(q[h], k[t]) * per_dim), ..)) * per_head`, ascending h.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn scores<R: Room, E: Element>(
    q: &[f32],
    weights: &[f32],
    keys: &[E],
    dim: usize,
    out: &mut [f32],
) {
    let per_dim = 1.0 / (dim as f32).sqrt();
    let per_head = 1.0 / (weights.len() as f32).sqrt();
    let (fours, rest) = out.as_chunks_mut::<4>();
    let cut = 4 * fours.len();
    let key = |t: usize| &keys[t * dim..(t + 1) * dim];
    for (i, four) in fours.iter_mut().enumerate() {
        let keys = [0, 1, 2, 3].map(|n| key(4 * i + n));
        // SAFETY: passed on to the caller.
        *four = unsafe { score::<R, E, 4>(q, weights, keys, dim, per_dim) };
    }
    for (i, score_of) in rest.iter_mut().enumerate() {
        // SAFETY: passed on to the caller.
        [*score_of] = unsafe { score::<R, E, 1>(q, weights, [key(cut + i)], dim, per_dim) };
    }
    for score in out {
        *score *= per_head;
    }
}

/// The weighted sums over the heads for `N` keys.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn score<R: Room, E: Element, const N: usize>(
    q: &[f32],
    weights: &[f32],
    keys: [&[E]; N],
    dim: usize,
    per_dim: f32,
) -> [f32; N] {
    let mut sums = [0f32; N];
    for (q, w) in q.chunks_exact(dim).zip(weights) {
        // SAFETY: passed on to the caller.
        let dots = unsafe { lanes::dots::<R, E, N>(q, keys) };
        for (sum, dot) in sums.iter_mut().zip(dots) {
            let similarity = dot * per_dim;
            // A select, not max(), so that NaN stays NaN.
            let positive = if similarity < 0.0 { 0.0 } else { similarity };
            *sum = w.mul_add(positive, *sum);
        }
    }
    sums
}
