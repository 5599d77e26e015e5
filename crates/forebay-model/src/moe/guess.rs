//! Which experts the next layer will probably choose.
//!
//! Its router is applied to this layer's residual stream, in which only the routed experts are
//! missing: those are what the disk is busy with. A wrong guess costs idle disk time and nothing
//! else, and no result depends on one.

use super::choose::choose;
use crate::forward::Context;
use crate::weights::{Ffn, LayerWeights, Matrix};
use crate::workspace::resize;

/// Passes of more rows choose most experts anyway.
const ROWS: usize = 8;

/// Buffers of a guess.
#[derive(Default)]
pub(super) struct GuessScratch {
    stream: Vec<f32>,
    normed: Vec<f32>,
    logits: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    /// Distinct experts, the best of every row first.
    pub(super) experts: Vec<u32>,
}

impl GuessScratch {
    /// Bytes held.
    pub(super) fn planned_bytes(hidden: usize, experts: usize, top_k: usize, rows: usize) -> usize {
        4 * rows.min(ROWS) * (2 * hidden + experts + 3 * top_k)
    }
}

/// The first sparse layer from layer `from` on: its number, itself, its router and the router's bias.
pub(super) fn next_sparse(ctx: Context<'_>, from: usize) -> Option<(usize, &LayerWeights, &Matrix, &[f32])> {
    let later = ctx.model.layers.iter().enumerate().skip(from);
    later.into_iter().find_map(|(at, next)| match &next.ffn {
        Ffn::Sparse { router, bias, .. } => Some((at, next, router, &bias[..])),
        Ffn::Dense(_) => None,
    })
}

/// Guesses into `guess.experts` which experts the first sparse layer from `from` on will choose, from
/// the rows `x` of the residual stream and the shared expert's output, if it is still to be added.
/// The layer guessed at, or `None` if there is nothing to guess.
pub(super) fn next_layer(
    ctx: Context<'_>,
    from: usize,
    x: &[f32],
    shared: Option<&[f32]>,
    guess: &mut GuessScratch,
) -> Option<u32> {
    let spec = &ctx.model.spec;
    let m = &spec.moe;
    let (at, next, router, bias) = next_sparse(ctx, from)?;
    let rows = x.len() / spec.hidden;
    if rows > ROWS {
        return None;
    }
    guess.stream.clear();
    guess.stream.extend_from_slice(x);
    if let Some(shared) = shared {
        ctx.add(&mut guess.stream, shared);
    }
    resize(&mut guess.normed, x.len());
    ctx.rms_norms(&guess.stream, &next.post_norm, spec.norm_eps, &mut guess.normed);
    guess.ids.resize(rows * m.top_k, 0);
    resize(&mut guess.weights, rows * m.top_k);
    // What cannot be guessed at is not: the pass itself reports what is wrong.
    let mut complete = true;
    let (logits, ids, weights) = (&mut guess.logits, &mut guess.ids, &mut guess.weights);
    choose(ctx, router, bias, &guess.normed, logits, ids, weights, &mut |_, _| complete = false);
    if !complete {
        return None;
    }
    guess.experts.clear();
    for rank in 0..m.top_k {
        for row in 0..rows {
            let expert = guess.ids[row * m.top_k + rank];
            if !guess.experts.contains(&expert) {
                guess.experts.push(expert);
            }
        }
    }
    Some(at as u32)
}
