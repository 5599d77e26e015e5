//! From rows of a layer's input to the experts that its router chooses, for a layer and for a guess at one.

use forebay_kernels::{Input, RouterError, RouterRule, matmul, route};

use crate::forward::Context;
use crate::weights::Matrix;
use crate::workspace::resize;

/// Chooses the experts of the normalised rows `x`, best first, and their weights: `[rows, top_k]` each. `logits` is
/// a buffer. `failed` is told of rows for which nothing can be chosen.
#[allow(clippy::too_many_arguments)] // The router, its rows, and what comes of them.
pub(super) fn choose(
    ctx: Context<'_>,
    router: &Matrix,
    bias: &[f32],
    x: &[f32],
    logits: &mut Vec<f32>,
    ids: &mut [u32],
    weights: &mut [f32],
    failed: &mut dyn FnMut(usize, RouterError),
) {
    let m = &ctx.model.spec.moe;
    let rows = x.len() / ctx.model.spec.hidden;
    resize(logits, rows * m.experts);
    matmul(ctx.kernels, ctx.team, router.weights(), Input::exact(x), logits);
    let rule = RouterRule { normalise: m.normalise, scaling: m.scaling };
    let chosen = ids.chunks_exact_mut(m.top_k).zip(weights.chunks_exact_mut(m.top_k));
    for (row, (logits, (ids, weights))) in logits.chunks_exact_mut(m.experts).zip(chosen).enumerate() {
        if let Err(cause) = route(ctx.kernels, logits, bias, rule, ids, weights) {
            failed(row, cause);
        }
    }
}
