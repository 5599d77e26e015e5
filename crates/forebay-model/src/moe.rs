//! The routed experts of one layer: route, fetch, compute as they arrive, sum in
//! canonical order.
//!
//! A token's experts are summed in ascending expert id, whatever order they came in
//! (docs/numerics.md), so each expert's output is kept until all of them are there.

use forebay_core::CancelToken;
use forebay_kernels::{Activations, Input, RouterRule, matmul, matmul_swiglu, route};
use forebay_tiers::{ExpertError, ExpertStore};

use crate::arith::Arith;
use crate::families::roles::Role;
use crate::forward::{Context, ForwardError, Quantised, quantised_values, resize};
use crate::profile::{Phase, Profile};
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::weights::Matrix;

/// The sparse layer being computed.
pub(crate) struct Site<'a> {
    /// The layer.
    pub layer: usize,
    /// Position of the first row.
    pub start: usize,
    /// Router matrix.
    pub router: &'a Matrix,
    /// Selection bias.
    pub bias: &'a [f32],
    /// Raised to stop.
    pub cancel: &'a CancelToken,
}

/// Buffers of the routed part, reused from layer to layer.
#[derive(Default)]
pub(crate) struct MoeScratch {
    /// `[rows, experts]`
    logits: Vec<f32>,
    /// `[rows, top_k]`: chosen experts, best first.
    ids: Vec<u32>,
    /// `[rows, top_k]`: their weights.
    weights: Vec<f32>,
    /// Distinct experts in routing order.
    union: Vec<u32>,
    /// Per expert: the slots (`row * top_k + rank`) that chose it.
    users: Vec<Vec<usize>>,
    /// `[rows * top_k, hidden]`: expert outputs as they came.
    outputs: Vec<f32>,
    /// Per slot: which of the outputs is its own.
    places: Vec<usize>,
    /// Outputs there are.
    done: usize,
    /// The rows of one expert, and its input.
    rows: Vec<usize>,
    input: Vec<f32>,
    gathered: Option<Activations>,
    up: Vec<f32>,
    inner: Vec<f32>,
    inner_quantised: Option<Activations>,
    shared: Vec<f32>,
}

impl MoeScratch {
    /// Four-byte values held for `rows` rows.
    pub(crate) fn planned_values(spec: &ModelSpec, rows: usize) -> usize {
        let m = &spec.moe;
        let routing = rows * (m.experts + 6 * m.top_k) + m.experts * 8;
        let outputs = rows * m.top_k * spec.hidden;
        let batch = rows
            * (spec.hidden
                + quantised_values(spec.hidden)
                + 2 * m.expert_width
                + quantised_values(m.expert_width));
        routing + outputs + batch + rows * spec.hidden
    }

    /// The buffer for the shared expert's output.
    pub(crate) fn shared_out(&mut self, len: usize) -> &mut [f32] {
        resize(&mut self.shared, len);
        &mut self.shared
    }
}

/// `out[row] = sum over the row's experts of weight * expert(x[row])`, the shared expert apart.
#[allow(clippy::too_many_arguments)] // Independent pieces; a struct would only rename them.
pub(crate) fn routed(
    ctx: Context<'_>,
    site: Site<'_>,
    store: &mut ExpertStore,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MoeScratch,
    profile: &mut Profile,
    trace: Option<&mut (dyn Trace + '_)>,
    out: &mut [f32],
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    choose(ctx, &site, x, scratch, trace)?;
    profile.lap(Phase::Router);
    let experts = ctx.table.layer(site.layer).expect("every sparse layer has an expert table");
    let int8 = Role::RoutedExpert.arith(ctx.arith) == Arith::Int8;
    if int8 {
        quantised.of_width(spec.hidden).quantise(ctx.kernels, ctx.team, x);
    }
    resize(&mut scratch.outputs, scratch.ids.len() * spec.hidden);
    scratch.places.resize(scratch.ids.len(), 0);
    scratch.done = 0;
    let requests = scratch.ids.len() as u64;
    let union = std::mem::take(&mut scratch.union);
    let mut step = store.step(site.layer as u32, &union, requests, Some(site.cancel)).map_err(cancelled)?;
    while let Some(ready) = step.next_ready().map_err(cancelled)? {
        profile.lap(Phase::ExpertWait);
        let views = experts.views(ready.expert as usize, ready.bytes);
        compute(ctx, ready.expert as usize, views, int8, x, quantised, scratch);
        profile.lap(Phase::Experts);
    }
    drop(step);
    scratch.union = union;
    sum_in_order(ctx, scratch, out);
    profile.lap(Phase::Experts);
    Ok(())
}

/// A cancelled step is a cancelled pass, not a failed read.
fn cancelled(error: ExpertError) -> ForwardError {
    match error {
        ExpertError::Cancelled { .. } => ForwardError::Cancelled,
        other => ForwardError::Expert(other),
    }
}

/// Routes every row and lists who uses which expert.
fn choose(
    ctx: Context<'_>,
    site: &Site<'_>,
    x: &[f32],
    scratch: &mut MoeScratch,
    mut trace: Option<&mut (dyn Trace + '_)>,
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let m = &spec.moe;
    let rows = x.len() / spec.hidden;
    resize(&mut scratch.logits, rows * m.experts);
    matmul(ctx.kernels, ctx.team, site.router.weights(), Input::exact(x), &mut scratch.logits);
    scratch.ids.resize(rows * m.top_k, 0);
    resize(&mut scratch.weights, rows * m.top_k);
    scratch.users.resize(m.experts, Vec::new());
    scratch.users.iter_mut().for_each(Vec::clear);
    scratch.union.clear();
    let rule = RouterRule { normalise: m.normalise, scaling: m.scaling };
    for row in 0..rows {
        let position = site.start + row;
        let slots = row * m.top_k..(row + 1) * m.top_k;
        let (ids, weights) = (&mut scratch.ids[slots.clone()], &mut scratch.weights[slots.clone()]);
        let logits = &mut scratch.logits[row * m.experts..(row + 1) * m.experts];
        route(ctx.kernels, logits, site.bias, rule, ids, weights).map_err(|cause| ForwardError::Router {
            layer: site.layer,
            position,
            cause,
        })?;
        if let Some(trace) = &mut trace {
            trace.routed(site.layer, position, ids, weights);
        }
        for (slot, id) in slots.zip(ids.iter()) {
            let users = &mut scratch.users[*id as usize];
            if users.is_empty() {
                scratch.union.push(*id);
            }
            users.push(slot);
        }
    }
    Ok(())
}

/// One expert over the rows that chose it: the next `scratch.outputs`.
fn compute(
    ctx: Context<'_>,
    expert: usize,
    [gate, up, down]: [forebay_core::MatrixView<'_>; 3],
    int8: bool,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MoeScratch,
) {
    let (hidden, width) = (ctx.model.spec.hidden, ctx.model.spec.moe.expert_width);
    let top_k = ctx.model.spec.moe.top_k;
    let users = &scratch.users[expert];
    let outputs = scratch.done..scratch.done + users.len();
    scratch.done = outputs.end;
    scratch.rows.clear();
    for (place, slot) in outputs.clone().zip(users) {
        scratch.places[*slot] = place;
        scratch.rows.push(slot / top_k);
    }
    let is_integer = |weights: forebay_core::MatrixView<'_>| weights.format().is_integer();
    let quantised = (int8 && (is_integer(gate) || is_integer(up))).then(|| {
        let gathered = scratch.gathered.get_or_insert_with(|| Activations::new(hidden));
        gathered.gather(ctx.team, quantised.of_width(hidden), &scratch.rows);
        &*gathered
    });
    scratch.input.clear();
    let input = match quantised {
        Some(quantised) if is_integer(gate) && is_integer(up) => Input::quantised(quantised),
        _ => {
            for row in &scratch.rows {
                scratch.input.extend_from_slice(&x[row * hidden..(row + 1) * hidden]);
            }
            Input { rows: &scratch.input, quantised }
        }
    };
    for buffer in [&mut scratch.up, &mut scratch.inner] {
        resize(buffer, outputs.len() * width);
    }
    let gate_and_up = [gate.into(), up.into()];
    matmul_swiglu(ctx.kernels, ctx.team, gate_and_up, input, &mut scratch.up, &mut scratch.inner);
    let input = if int8 && is_integer(down) {
        let activations = scratch.inner_quantised.get_or_insert_with(|| Activations::new(width));
        activations.quantise(ctx.kernels, ctx.team, &scratch.inner);
        Input::int8(&scratch.inner, activations)
    } else {
        Input::exact(&scratch.inner)
    };
    let out = &mut scratch.outputs[outputs.start * hidden..outputs.end * hidden];
    matmul(ctx.kernels, ctx.team, down, input, out);
}

/// Adds every row's expert outputs in ascending expert id.
fn sum_in_order(ctx: Context<'_>, scratch: &MoeScratch, out: &mut [f32]) {
    let (hidden, top_k) = (ctx.model.spec.hidden, ctx.model.spec.moe.top_k);
    ctx.team.for_each_chunk(out, hidden, &|row, out| {
        out.fill(0.0);
        let slots = row * top_k..(row + 1) * top_k;
        let mut last = None;
        // A row's experts are distinct, so each turn finds the next one.
        let next = |last: Option<u32>| {
            let ids = slots.clone().map(|slot| (scratch.ids[slot], slot));
            ids.filter(|(id, _)| last.is_none_or(|last| *id > last)).min()
        };
        while let Some((id, slot)) = next(last) {
            let place = scratch.places[slot];
            let output = &scratch.outputs[place * hidden..(place + 1) * hidden];
            ctx.kernels.add_scaled(scratch.weights[slot], output, out);
            last = Some(id);
        }
    });
}
