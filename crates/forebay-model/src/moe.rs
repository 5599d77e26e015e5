//! The routed experts of one layer: route, fetch, compute as they arrive, add in canonical
//! order.
//!
//! A row's experts are added to the residual stream in ascending expert id, then the shared one
//! (docs/numerics.md section 9), whatever order they came in. A pass of few rows takes experts as
//! they arrive and keeps their outputs until all are there. A long one would need gigabytes for
//! that: it takes its experts in ascending order and adds each output at once, so that every
//! expert is read once for all rows of the pass.

mod choose;
mod guess;
mod kept;

use forebay_core::CancelToken;
use forebay_tiers::routes::Union;
use forebay_tiers::{ExpertError, ExpertStore, Order};

use crate::arith::Arith;
use crate::families::roles::Role;
use crate::forward::{Context, ForwardError, SOME_ROWS};
use crate::mlp::{MlpScratch, mlp};
use crate::profile::{Phase, Profile};
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::weights::{Matrix, Mlp};
use crate::workspace::{Quantised, resize};
use choose::choose;
use guess::GuessScratch;
use kept::KeptInput;

/// Passes of at most this many rows keep the outputs of experts and take these as they come.
const BUFFERED_ROWS: usize = 64;

/// Rows that one expert computes at once.
const EXPERT_ROWS: usize = 128;

/// No output.
const NONE: u32 = u32::MAX;

/// The sparse layer being computed.
#[derive(Clone, Copy)]
pub(crate) struct Site<'a> {
    /// The layer.
    pub layer: usize,
    /// Position of the pass's first row.
    pub start: usize,
    /// Router matrix.
    pub router: &'a Matrix,
    /// Selection bias.
    pub bias: &'a [f32],
    /// The expert that every row goes through.
    pub shared: Option<&'a Mlp>,
    /// Raised to stop.
    pub cancel: &'a CancelToken,
}

/// Buffers of the routed part, reused from layer to layer.
#[derive(Default)]
pub(crate) struct MoeScratch {
    /// `[block rows, experts]`
    logits: Vec<f32>,
    /// `[rows, top_k]`: chosen experts, best first.
    ids: Vec<u32>,
    /// `[rows, top_k]`: their weights.
    weights: Vec<f32>,
    /// Distinct experts in routing order, and how many rows chose each.
    union: Union,
    /// Per expert: the slots (`row * top_k + rank`) that chose it, ascending.
    users: Vec<Vec<u32>>,
    /// The normalised rows of the pass.
    input: KeptInput,
    /// Expert outputs: `[rows * top_k, hidden]` as they came, or those of one expert.
    outputs: Vec<f32>,
    /// Outputs there are.
    done: usize,
    /// Per slot, or per row for one expert: which of the outputs is its own.
    places: Vec<u32>,
    /// The rows that one expert computes at once.
    rows: Vec<usize>,
    mlp: MlpScratch,
    /// `[rows, hidden]`, or a part of the rows; nothing if there is no shared expert.
    shared: Vec<f32>,
    guess: GuessScratch,
    /// Every expert of a layer, ascending: what a long pass is expected to want.
    every: Vec<u32>,
}

impl MoeScratch {
    /// Bytes held for passes of `rows` rows that come in blocks of `block`; `floats` if the
    /// inputs have to be kept as they are.
    pub(crate) fn planned_bytes(spec: &ModelSpec, rows: usize, block: usize, floats: bool) -> usize {
        let m = &spec.moe;
        // Ids, weights, users (a vector may have grown to twice its length) and places.
        let routing = 4 * (block * m.experts + rows * 5 * m.top_k) + 64 * m.experts;
        let outputs = 4 * spec.hidden * (rows.min(BUFFERED_ROWS) * m.top_k).max(rows.min(EXPERT_ROWS));
        let width = m.expert_width.max(m.shared_width);
        let at_once = rows.min(EXPERT_ROWS);
        routing
            + 4 * m.experts
            + outputs
            + KeptInput::planned_bytes(spec.hidden, rows, at_once, floats)
            + MlpScratch::planned_bytes(at_once, width)
            + 4 * at_once * spec.hidden
            + GuessScratch::planned_bytes(spec.hidden, m.experts, m.top_k, rows)
    }
}

/// A new layer: no row is routed yet.
pub(crate) fn begin(ctx: Context<'_>, site: &Site<'_>, rows: usize, scratch: &mut MoeScratch) {
    let spec = &ctx.model.spec;
    scratch.ids.clear();
    scratch.weights.clear();
    scratch.union.experts.clear();
    scratch.users.resize(spec.moe.experts, Vec::new());
    scratch.users.iter_mut().for_each(Vec::clear);
    let experts = ctx.table.layer(site.layer).expect("every sparse layer has an expert table");
    let int8 = Role::RoutedExpert.arith(ctx.arith) == Arith::Int8;
    let shared_floats =
        site.shared.is_some_and(|mlp| mlp.matrices().iter().any(|m| !m.format().is_integer()));
    scratch.input.begin(spec.hidden, rows, int8, !int8 || !experts.all_integer || shared_floats);
}

/// Routes the next rows of the pass, whose normalised inputs are `x`, and keeps these.
pub(crate) fn admit(
    ctx: Context<'_>,
    site: &Site<'_>,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MoeScratch,
    mut trace: Option<&mut (dyn Trace + '_)>,
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let m = &spec.moe;
    let (first, rows) = (scratch.ids.len() / m.top_k, x.len() / spec.hidden);
    scratch.input.keep(ctx, x, quantised);
    scratch.ids.resize((first + rows) * m.top_k, 0);
    scratch.weights.resize((first + rows) * m.top_k, 0.0);
    let chosen = first * m.top_k..;
    let (ids, weights) = (&mut scratch.ids[chosen.clone()], &mut scratch.weights[chosen]);
    choose(ctx, site.router, site.bias, x, &mut scratch.logits, ids, weights).map_err(|(row, cause)| {
        ForwardError::Router { layer: site.layer, position: site.start + first + row, cause }
    })?;
    for row in first..first + rows {
        let slots = row * m.top_k..(row + 1) * m.top_k;
        let (ids, weights) = (&scratch.ids[slots.clone()], &scratch.weights[slots.clone()]);
        if let Some(trace) = &mut trace {
            trace.routed(site.layer, site.start + row, ids, weights);
        }
        for (slot, id) in slots.zip(ids) {
            let users = &mut scratch.users[*id as usize];
            if users.is_empty() {
                scratch.union.experts.push(*id);
            }
            users.push(slot as u32);
        }
    }
    Ok(())
}

/// Adds the outputs of all experts to the rows `x` of the residual stream.
pub(crate) fn add_experts(
    ctx: Context<'_>,
    site: &Site<'_>,
    store: &mut ExpertStore,
    scratch: &mut MoeScratch,
    profile: &mut Profile,
    x: &mut [f32],
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let rows = x.len() / spec.hidden;
    let buffered = rows <= BUFFERED_ROWS;
    let order = if buffered { Order::Arrival } else { Order::Ascending };
    scratch.done = 0;
    scratch.places.clear();
    scratch.places.resize(if buffered { scratch.ids.len() } else { rows }, NONE);
    let mut union = std::mem::take(&mut scratch.union);
    let uses = union.experts.iter().map(|expert| scratch.users[*expert as usize].len() as u32);
    union.uses.clear();
    union.uses.extend(uses);
    union.rows = rows as u64;
    let mut step = store.step(site.layer as u32, &union, order, Some(site.cancel)).map_err(cancelled)?;
    if buffered {
        // While the first reads are on their way.
        compute_shared(ctx, site, 0..rows, scratch);
        profile.lap(Phase::SharedExpert);
        if step.store().wants_look_ahead() {
            let shared = site.shared.map(|_| &scratch.shared[..]);
            if let Some(next) = guess::next_layer(ctx, site.layer + 1, x, shared, &mut scratch.guess) {
                step.store().look_ahead(next, &scratch.guess.experts);
            }
            profile.lap(Phase::Router);
        }
    }
    let experts = ctx.table.layer(site.layer).expect("every sparse layer has an expert table");
    let reads_on = !buffered && step.store().wants_look_ahead();
    while let Some(ready) = step.next_ready().map_err(cancelled)? {
        profile.lap(Phase::ExpertWait);
        let views = experts.views(ready.expert as usize, ready.bytes, ctx.table.slots);
        let weights = views.map_err(|cause| {
            let (layer, expert) = (site.layer, ready.expert);
            ForwardError::Coded { layer, expert, cause }
        })?;
        let users = std::mem::take(&mut scratch.users[ready.expert as usize]);
        for slots in users.chunks(EXPERT_ROWS) {
            scratch.rows.clear();
            scratch.rows.extend(slots.iter().map(|slot| *slot as usize / spec.moe.top_k));
            let at = scratch.done;
            resize(&mut scratch.outputs, (at + slots.len()) * spec.hidden);
            let input = scratch.input.gather(ctx, &scratch.rows);
            let out = &mut scratch.outputs[at * spec.hidden..];
            mlp(ctx, Role::RoutedExpert, weights, input, &mut scratch.mlp, out);
            if buffered {
                for (place, slot) in (at..).zip(slots) {
                    scratch.places[*slot as usize] = place as u32;
                }
                scratch.done += slots.len();
            } else {
                add_one(ctx, slots, scratch, x);
            }
        }
        scratch.users[ready.expert as usize] = users;
        if reads_on {
            read_on(ctx, site.layer + 1, step.store(), &mut scratch.every);
        }
        profile.lap(Phase::Experts);
    }
    drop(step);
    if reads_on {
        read_on(ctx, site.layer + 1, store, &mut scratch.every);
    }
    profile.lap(Phase::ExpertWait);
    scratch.union = union;
    if buffered {
        add_in_order(ctx, scratch, x);
        profile.lap(Phase::Experts);
        add_shared(ctx, site, 0..rows, scratch, x);
    } else {
        for first in (0..rows).step_by(EXPERT_ROWS) {
            let part = first..rows.min(first + EXPERT_ROWS);
            compute_shared(ctx, site, part.clone(), scratch);
            add_shared(ctx, site, part, scratch, x);
        }
    }
    profile.lap(Phase::SharedExpert);
    Ok(())
}

/// Guesses at the experts of the first sparse layer from `from` on, to which the residual stream `x` is on
/// its way: the embeddings, before layer 0, or what a dense layer made of them.
pub(crate) fn guess_on_the_way(
    ctx: Context<'_>,
    from: usize,
    store: &mut ExpertStore,
    scratch: &mut MoeScratch,
    profile: &mut Profile,
    x: &[f32],
) {
    if !store.wants_look_ahead() {
        return;
    }
    if x.len() > BUFFERED_ROWS * ctx.model.spec.hidden {
        read_on(ctx, from, store, &mut scratch.every);
    } else if let Some(next) = guess::next_layer(ctx, from, x, None, &mut scratch.guess) {
        store.look_ahead(next, &scratch.guess.experts);
    }
    profile.lap(Phase::Router);
}

/// Asks for the experts of the first sparse layer from `from` on as a long pass wants them: nearly all, in
/// order. `every` is the list of them, made once.
fn read_on(ctx: Context<'_>, from: usize, store: &mut ExpertStore, every: &mut Vec<u32>) {
    if let Some((next, ..)) = guess::next_sparse(ctx, from) {
        let experts = ctx.model.spec.moe.experts as u32;
        if every.is_empty() {
            every.extend(0..experts);
        }
        store.look_ahead(next as u32, every);
    }
}

/// A cancelled step is a cancelled pass, not a failed read.
fn cancelled(error: ExpertError) -> ForwardError {
    match error {
        ExpertError::Cancelled { .. } => ForwardError::Cancelled,
        other => ForwardError::Expert(other),
    }
}

/// Adds the outputs of the expert that `slots` chose, which all come next.
fn add_one(ctx: Context<'_>, slots: &[u32], scratch: &mut MoeScratch, x: &mut [f32]) {
    let hidden = ctx.model.spec.hidden;
    // An expert's rows are distinct, so every row has one output at most.
    for (place, row) in scratch.rows.iter().enumerate() {
        scratch.places[*row] = place as u32;
    }
    let (places, outputs, weights) = (&scratch.places, &scratch.outputs, &scratch.weights);
    ctx.team.for_each_chunk(x, SOME_ROWS * hidden, &|part, x| {
        for (row, x) in (part * SOME_ROWS..).zip(x.chunks_exact_mut(hidden)) {
            if places[row] != NONE {
                let place = places[row] as usize;
                let output = &outputs[place * hidden..(place + 1) * hidden];
                ctx.kernels.add_scaled(weights[slots[place] as usize], output, x);
            }
        }
    });
    for row in &scratch.rows {
        scratch.places[*row] = NONE;
    }
}

/// Adds every row's expert outputs in ascending expert id.
fn add_in_order(ctx: Context<'_>, scratch: &MoeScratch, x: &mut [f32]) {
    let (hidden, top_k) = (ctx.model.spec.hidden, ctx.model.spec.moe.top_k);
    ctx.team.for_each_chunk(x, hidden, &|row, x| {
        let slots = row * top_k..(row + 1) * top_k;
        let mut last = None;
        // A row's experts are distinct, so each turn finds the next one.
        let next = |last: Option<u32>| {
            let ids = slots.clone().map(|slot| (scratch.ids[slot], slot));
            ids.filter(|(id, _)| last.is_none_or(|last| *id > last)).min()
        };
        while let Some((id, slot)) = next(last) {
            let place = scratch.places[slot] as usize;
            let output = &scratch.outputs[place * hidden..(place + 1) * hidden];
            ctx.kernels.add_scaled(scratch.weights[slot], output, x);
            last = Some(id);
        }
    });
}

/// `scratch.shared` = the shared expert of rows `rows`.
fn compute_shared(ctx: Context<'_>, site: &Site<'_>, rows: std::ops::Range<usize>, scratch: &mut MoeScratch) {
    let Some(shared) = site.shared else { return };
    resize(&mut scratch.shared, rows.len() * ctx.model.spec.hidden);
    scratch.rows.clear();
    scratch.rows.extend(rows);
    let input = scratch.input.gather(ctx, &scratch.rows);
    let weights = shared.matrices().map(Matrix::weights);
    mlp(ctx, Role::SharedExpert, weights, input, &mut scratch.mlp, &mut scratch.shared);
}

/// Adds `scratch.shared` to rows `rows` of `x`.
fn add_shared(
    ctx: Context<'_>,
    site: &Site<'_>,
    rows: std::ops::Range<usize>,
    scratch: &MoeScratch,
    x: &mut [f32],
) {
    let hidden = ctx.model.spec.hidden;
    if site.shared.is_some() {
        ctx.add(&mut x[rows.start * hidden..rows.end * hidden], &scratch.shared);
    }
}
