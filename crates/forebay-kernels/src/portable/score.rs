//! Scores of the DSA indexer.

use super::lanes::{self, Element};

/// `out[t] = (sum_h fma(w[h], relu(dot(q[h], k[t]) * per_dim), ..)) * per_head`, ascending h.
#[inline(always)]
pub(crate) fn scores<E: Element>(q: &[f32], weights: &[f32], keys: &[E], dim: usize, out: &mut [f32]) {
    let per_dim = 1.0 / (dim as f32).sqrt();
    let per_head = 1.0 / (weights.len() as f32).sqrt();
    for (key, score) in keys.chunks_exact(dim).zip(out) {
        let mut sum = 0f32;
        for (q, w) in q.chunks_exact(dim).zip(weights) {
            let similarity = lanes::dot(q, key) * per_dim;
            // A select, not max(), so that NaN stays NaN.
            let positive = if similarity < 0.0 { 0.0 } else { similarity };
            sum = w.mul_add(positive, sum);
        }
        *score = sum * per_head;
    }
}
