//! The gated MLP: dense layers, shared and routed experts.

use forebay_kernels::{Activations, Input, Weights, matmul, matmul_swiglu};

use crate::arith::Arith;
use crate::families::roles::Role;
use crate::forward::Context;
use crate::workspace::{Quantised, resize};

/// What an MLP has between its products.
#[derive(Default)]
pub(crate) struct MlpScratch {
    up: Vec<f32>,
    inner: Vec<f32>,
    quantised: Quantised,
}

impl MlpScratch {
    /// Bytes held for `rows` rows of `width`.
    pub(crate) fn planned_bytes(rows: usize, width: usize) -> usize {
        2 * 4 * rows * width + Activations::planned_bytes(rows, width)
    }
}

/// `out = down(silu(gate x) * up x)` for every row; `weights` are gate, up and down.
pub(crate) fn mlp(
    ctx: Context<'_>,
    role: Role,
    weights: [Weights<'_>; 3],
    input: Input<'_>,
    scratch: &mut MlpScratch,
    out: &mut [f32],
) {
    let [gate, up, down] = weights;
    let rows = out.len() / ctx.model.spec.hidden;
    let width = gate.rows();
    for buffer in [&mut scratch.up, &mut scratch.inner] {
        resize(buffer, rows * width);
    }
    matmul_swiglu(ctx.kernels, ctx.team, [gate, up], input, &mut scratch.up, &mut scratch.inner);
    let input = if role.arith(ctx.arith) == Arith::Int8 && down.format().is_integer() {
        let activations = scratch.quantised.of_width(width);
        activations.quantise(ctx.kernels, ctx.team, &scratch.inner);
        Input::int8(&scratch.inner, activations)
    } else {
        Input::exact(&scratch.inner)
    };
    matmul(ctx.kernels, ctx.team, down, input, out);
}
