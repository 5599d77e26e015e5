//! Attention over cached keys: tiles of absolute positions, online softmax.

use super::Room;
use super::exp::{exp, exp_all};
use super::lanes::{self, Element};
use crate::attention::{Attended, Heads, TILE};

/// Attends one query row with all its heads. `max` and `sum` hold one entry per head;
/// `out` is `heads x latent`.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
pub(crate) unsafe fn attend<R: Room, E: Element>(
    heads: &Heads<'_>,
    latents: &[E],
    rope_keys: &[E],
    attended: Attended<'_>,
    max: &mut [f32],
    sum: &mut [f32],
    out: &mut [f32],
) {
    let (r, p) = (heads.latent_dim, heads.rope_dim);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    out.fill(0.0);
    let mut tile = Tile { positions: [0; TILE], len: 0 };
    let mut rest = attended;
    while tile.take(&mut rest) {
        let positions = &tile.positions[..tile.len];
        for (h, acc) in out.chunks_exact_mut(r).enumerate() {
            let mut scores = [0f32; TILE];
            let q = &heads.latent[h * r..(h + 1) * r];
            let q_rope = &heads.rope[h * p..(h + 1) * p];
            // SAFETY: passed on to the caller.
            unsafe { score::<R, E>(q, q_rope, latents, rope_keys, positions, heads.scale, &mut scores) };
            let weights = &mut scores[..positions.len()];
            let before = max[h];
            let now = weights.iter().fold(before, |m, s| if *s > m { *s } else { m });
            if now > before {
                let shrink = exp(before - now);
                sum[h] *= shrink;
                for a in acc.iter_mut() {
                    *a *= shrink;
                }
                max[h] = now;
            }
            for s in weights.iter_mut() {
                *s -= now;
            }
            exp_all(weights);
            sum[h] += weights.iter().fold(0.0, |total, w| total + w);
            let latent = |i: usize| &latents[positions[i] * r..(positions[i] + 1) * r];
            // SAFETY: passed on to the caller.
            unsafe { lanes::add_rows::<R, E>(weights, latent, acc) };
        }
    }
    for (acc, total) in out.chunks_exact_mut(r).zip(sum) {
        for a in acc {
            *a /= *total;
        }
    }
}

/// `scores[i] = (q . latent + q_rope . rope key) * scale` at `positions[i]`.
///
/// # Safety
/// The processor has the room's instruction set.
#[inline(always)]
unsafe fn score<R: Room, E: Element>(
    q: &[f32],
    q_rope: &[f32],
    latents: &[E],
    rope_keys: &[E],
    positions: &[usize],
    scale: f32,
    scores: &mut [f32],
) {
    let latent = |t: usize| &latents[t * q.len()..(t + 1) * q.len()];
    let rope_key = |t: usize| &rope_keys[t * q_rope.len()..(t + 1) * q_rope.len()];
    let (fours, rest) = positions.as_chunks::<4>();
    for (four, scores) in fours.iter().zip(scores.chunks_exact_mut(4)) {
        // SAFETY: passed on to the caller.
        let (a, b) = unsafe {
            (lanes::dots::<R, E, 4>(q, four.map(latent)), lanes::dots::<R, E, 4>(q_rope, four.map(rope_key)))
        };
        for i in 0..4 {
            scores[i] = (a[i] + b[i]) * scale;
        }
    }
    for (t, score) in rest.iter().zip(&mut scores[4 * fours.len()..]) {
        // SAFETY: passed on to the caller.
        let (a, b) = unsafe { (lanes::dot::<R, E>(q, latent(*t)), lanes::dot::<R, E>(q_rope, rope_key(*t))) };
        *score = (a + b) * scale;
    }
}

/// The attended positions of one tile.
struct Tile {
    positions: [usize; TILE],
    len: usize,
}

impl Tile {
    /// Moves the positions of the next non-empty tile out of `rest`; false when nothing is left.
    #[inline(always)]
    fn take(&mut self, rest: &mut Attended<'_>) -> bool {
        match rest {
            Attended::Range(range) => {
                let end = (range.start / TILE + 1).saturating_mul(TILE).min(range.end);
                self.len = end.saturating_sub(range.start);
                for (i, position) in self.positions[..self.len].iter_mut().enumerate() {
                    *position = range.start + i;
                }
                range.start = end.max(range.start);
            }
            Attended::List(list) => {
                let tile = list.first().map(|t| *t as usize / TILE);
                self.len = 0;
                while let Some((t, after)) = list.split_first()
                    && Some(*t as usize / TILE) == tile
                {
                    // Ascending and distinct, so a tile never overflows.
                    self.positions[self.len] = *t as usize;
                    self.len += 1;
                    *list = after;
                }
            }
        }
        self.len > 0
    }
}
