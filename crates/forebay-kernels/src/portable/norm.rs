//! RMSNorm and LayerNorm: reductions in f64, sixteen lanes and the fixed tree.

use super::lanes::LANES;

/// `sum_k f(x[k])` with `lane[k mod 16] = step(x[k], lane)`.
#[inline(always)]
fn reduce(x: &[f32], step: impl Fn(f64, f64) -> f64) -> f64 {
    let mut lanes = [0f64; LANES];
    let (whole, tail) = x.as_chunks::<LANES>();
    for block in whole {
        for i in 0..LANES {
            lanes[i] = step(f64::from(block[i]), lanes[i]);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane = step(f64::from(*v), *lane);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
    }
    lanes[0]
}

/// `out = (x * r) * weight`, `r = 1 / sqrt(f32(mean of squares) + eps)`.
#[inline(always)]
pub(crate) fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    // The square of an f32 is exact in f64.
    let squares = reduce(x, |v, lane| v.mul_add(v, lane));
    let r = 1.0 / ((squares / x.len() as f64) as f32 + eps).sqrt();
    for ((o, v), w) in out.iter_mut().zip(x).zip(weight) {
        *o = (v * r) * w;
    }
}

/// `out = ((x - mean) * r) * weight + bias`, `r = 1 / sqrt(f32(biased variance) + eps)`.
#[inline(always)]
pub(crate) fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f64;
    let mean = reduce(x, |v, lane| lane + v) / n;
    let variance = reduce(x, |v, lane| (v - mean).mul_add(v - mean, lane)) / n;
    let r = 1.0 / (variance as f32 + eps).sqrt();
    for (((o, v), w), b) in out.iter_mut().zip(x).zip(weight).zip(bias) {
        let centred = (f64::from(*v) - mean) as f32;
        *o = (centred * r) * w + b;
    }
}
