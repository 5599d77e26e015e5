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

use std::ops::Range;

use forebay_tiers::routes::Union;
use forebay_tiers::{ExpertError, ExpertStore, Order, Step};

use crate::arith::Arith;
use crate::families::roles::Role;
use crate::forward::{Context, ForwardError, SOME_ROWS};
use crate::mlp::{MlpScratch, mlp};
use crate::pass::Pass;
use crate::profile::{Phase, Profile};
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::uses::Uses;
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
    /// Router matrix.
    pub router: &'a Matrix,
    /// Selection bias.
    pub bias: &'a [f32],
    /// The expert that every row goes through.
    pub shared: Option<&'a Mlp>,
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
    /// Distinct experts in routing order that are still to be computed, and how many rows chose each.
    union: Union,
    /// Per expert: the slots (`row * top_k + rank`) that chose it, ascending; none any more once it was computed.
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
    pub(crate) uses: Uses,
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
            + Uses::planned_bytes(spec.layers.len(), m.experts, m.top_k, rows)
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

/// Routes the next rows of the pass, whose normalised inputs are `x`, and keeps these. Rows of sequences that left
/// choose nothing; a sequence leaves if nothing can be chosen for a row of it.
pub(crate) fn admit(
    ctx: Context<'_>,
    site: &Site<'_>,
    pass: &mut Pass<'_, '_>,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MoeScratch,
    mut trace: Option<&mut (dyn Trace + '_)>,
) {
    let top_k = ctx.model.spec.moe.top_k;
    let rows = pass_over(ctx, x, quantised, scratch);
    let chosen = rows.start * top_k..rows.end * top_k;
    let (ids, weights) = (&mut scratch.ids[chosen.clone()], &mut scratch.weights[chosen]);
    choose(ctx, site.router, site.bias, x, &mut scratch.logits, ids, weights, &mut |row, cause| {
        let row = rows.start + row;
        let position = pass.position(row);
        pass.fail_row(row, ForwardError::Router { layer: site.layer, position, cause });
    });
    for row in rows.filter(|row| pass.is_alive(*row)) {
        let slots = row * top_k..(row + 1) * top_k;
        let (ids, weights) = (&scratch.ids[slots.clone()], &scratch.weights[slots.clone()]);
        if let Some(trace) = &mut trace {
            trace.routed(site.layer, pass.position(row), ids, weights);
        }
        if site.layer < ctx.model.layers.len() {
            scratch.uses.chose(site.layer, row, pass.is_draft(row), ids);
        }
        for (slot, id) in slots.zip(ids) {
            let users = &mut scratch.users[*id as usize];
            if users.is_empty() {
                scratch.union.experts.push(*id);
            }
            users.push(slot as u32);
        }
    }
}

/// Keeps the next rows of the pass, `x`, without choosing anything for them. Which rows those are.
pub(crate) fn pass_over(
    ctx: Context<'_>,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MoeScratch,
) -> Range<usize> {
    let (top_k, hidden) = (ctx.model.spec.moe.top_k, ctx.model.spec.hidden);
    let first = scratch.ids.len() / top_k;
    let rows = first..first + x.len() / hidden;
    scratch.input.keep(ctx, x, quantised);
    scratch.ids.resize(rows.end * top_k, 0);
    scratch.weights.resize(rows.end * top_k, 0.0);
    rows
}

/// How handing out experts went.
enum Handed {
    /// All of them.
    All,
    /// Sequences left; what those want that stay is asked for again.
    Left,
}

/// Adds the outputs of all experts to the rows `x` of the residual stream.
///
/// An expert that cannot be had ends the sequences that chose it; the others get what they want all the same.
pub(crate) fn add_experts(
    ctx: Context<'_>,
    site: &Site<'_>,
    store: &mut ExpertStore,
    pass: &mut Pass<'_, '_>,
    scratch: &mut MoeScratch,
    profile: &mut Profile,
    x: &mut [f32],
) {
    let rows = x.len() / ctx.model.spec.hidden;
    let buffered = rows <= BUFFERED_ROWS;
    scratch.done = 0;
    scratch.places.clear();
    scratch.places.resize(if buffered { scratch.ids.len() } else { rows }, NONE);
    let mut union = std::mem::take(&mut scratch.union);
    for round in 0.. {
        if pass.is_over() {
            scratch.union = union;
            return;
        }
        still_wanted(pass, &mut union, scratch, rows);
        if round > 0 && union.experts.is_empty() {
            break;
        }
        match hand_out(ctx, site, store, pass, &union, round == 0, scratch, profile, x) {
            Handed::All => break,
            Handed::Left => {}
        }
    }
    if !buffered && store.wants_look_ahead() {
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
}

/// Leaves in `union` what is still to be computed for sequences that are still there.
fn still_wanted(pass: &Pass<'_, '_>, union: &mut Union, scratch: &mut MoeScratch, rows: usize) {
    let top_k = scratch.ids.len() / rows;
    if pass.has_dead() {
        for expert in &union.experts {
            scratch.users[*expert as usize].retain(|slot| pass.is_alive(*slot as usize / top_k));
        }
    }
    union.experts.retain(|expert| !scratch.users[*expert as usize].is_empty());
    union.uses.clear();
    union.uses.extend(union.experts.iter().map(|expert| scratch.users[*expert as usize].len() as u32));
    union.rows = rows as u64;
}

/// Computes the experts of `union` as they come, and adds them if the pass is long.
#[allow(clippy::too_many_arguments)] // What a layer's experts take.
fn hand_out(
    ctx: Context<'_>,
    site: &Site<'_>,
    store: &mut ExpertStore,
    pass: &mut Pass<'_, '_>,
    union: &Union,
    first: bool,
    scratch: &mut MoeScratch,
    profile: &mut Profile,
    x: &mut [f32],
) -> Handed {
    let spec = &ctx.model.spec;
    let rows = x.len() / spec.hidden;
    let buffered = rows <= BUFFERED_ROWS;
    let order = if buffered { Order::Arrival } else { Order::Ascending };
    let mut step = match store.step(site.layer as u32, union, order, pass.only_cancel()) {
        Ok(step) => step,
        Err(error) => return fail(pass, error),
    };
    if buffered && first {
        // While the first reads are on their way.
        compute_shared(ctx, site, 0..rows, scratch);
        profile.lap(Phase::SharedExpert);
        guess_the_next(ctx, site, &mut step, scratch, x);
        profile.lap(Phase::Router);
    }
    let experts = ctx.table.layer(site.layer).expect("every sparse layer has an expert table");
    let reads_on = !buffered && step.store().wants_look_ahead();
    loop {
        let ready = match step.next_ready() {
            Ok(Some(ready)) => ready,
            Ok(None) => return Handed::All,
            Err(ExpertError::Load { key, cause }) => {
                let error = || ForwardError::Expert(ExpertError::Load { key, cause: cause.clone() });
                return fail_users(spec, pass, &mut scratch.users[key.expert as usize], &error);
            }
            Err(other) => return fail(pass, other),
        };
        profile.lap(Phase::ExpertWait);
        let mut users = std::mem::take(&mut scratch.users[ready.expert as usize]);
        match experts.views(ready.expert as usize, ready.bytes, ctx.table.slots) {
            Ok(weights) => {
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
                users.clear();
            }
            Err(cause) => {
                let (layer, expert) = (site.layer, ready.expert);
                let error = || ForwardError::Coded { layer, expert, cause: cause.clone() };
                return fail_users(spec, pass, &mut users, &error);
            }
        }
        scratch.users[ready.expert as usize] = users;
        if reads_on {
            read_on(ctx, site.layer + 1, step.store(), &mut scratch.every);
        }
        profile.lap(Phase::Experts);
        if pass.look_for_cancellations() && (pass.is_over() || few_stay(spec, pass, union, scratch)) {
            return Handed::Left;
        }
    }
}

/// Whether those that stay want less than half of what has not been computed: then it is asked for anew. Else what is
/// on its way is waited for.
fn few_stay(spec: &ModelSpec, pass: &Pass<'_, '_>, union: &Union, scratch: &MoeScratch) -> bool {
    let all = union.experts.iter().map(|expert| &scratch.users[*expert as usize]);
    let (mut left, mut wanted) = (0, 0);
    for users in all.filter(|users| !users.is_empty()) {
        left += 1;
        wanted += usize::from(users.iter().any(|slot| pass.is_alive(*slot as usize / spec.moe.top_k)));
    }
    2 * wanted < left
}

/// The sequences leave that chose an expert, which nobody wants any more.
fn fail_users(
    spec: &ModelSpec,
    pass: &mut Pass<'_, '_>,
    users: &mut Vec<u32>,
    error: &dyn Fn() -> ForwardError,
) -> Handed {
    for slot in users.drain(..) {
        let row = slot as usize / spec.moe.top_k;
        if pass.is_alive(row) {
            pass.fail_row(row, error());
        }
    }
    Handed::Left
}

/// Everybody leaves whom a failed step leaves without experts: who was cancelled, or all.
fn fail(pass: &mut Pass<'_, '_>, error: ExpertError) -> Handed {
    if let ExpertError::Cancelled { .. } = error {
        // There was one sequence.
        pass.fail_all(&|| ForwardError::Cancelled);
    } else {
        pass.fail_all(&|| ForwardError::Expert(error.clone()));
    }
    Handed::Left
}

/// Guesses at the next sparse layer's experts, and asks for them.
fn guess_the_next(
    ctx: Context<'_>,
    site: &Site<'_>,
    step: &mut Step<'_>,
    scratch: &mut MoeScratch,
    x: &[f32],
) {
    if step.store().wants_look_ahead() {
        let shared = site.shared.map(|_| &scratch.shared[..]);
        if let Some(next) = guess::next_layer(ctx, site.layer + 1, x, shared, &mut scratch.guess) {
            step.store().look_ahead(next, &scratch.guess.experts);
        }
    }
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

/// Adds every row's expert outputs in ascending expert id; those there are of a row whose sequence left.
fn add_in_order(ctx: Context<'_>, scratch: &MoeScratch, x: &mut [f32]) {
    let (hidden, top_k) = (ctx.model.spec.hidden, ctx.model.spec.moe.top_k);
    ctx.team.for_each_chunk(x, hidden, &|row, x| {
        let slots = row * top_k..(row + 1) * top_k;
        let mut last = None;
        // A row's experts are distinct, so each turn finds the next one.
        let next = |last: Option<u32>| {
            let there = slots.clone().filter(|slot| scratch.places[*slot] != NONE);
            let ids = there.map(|slot| (scratch.ids[slot], slot));
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
fn compute_shared(ctx: Context<'_>, site: &Site<'_>, rows: Range<usize>, scratch: &mut MoeScratch) {
    let Some(shared) = site.shared else { return };
    resize(&mut scratch.shared, rows.len() * ctx.model.spec.hidden);
    scratch.rows.clear();
    scratch.rows.extend(rows);
    let input = scratch.input.gather(ctx, &scratch.rows);
    let weights = shared.matrices().map(Matrix::weights);
    mlp(ctx, Role::SharedExpert, weights, input, &mut scratch.mlp, &mut scratch.shared);
}

/// Adds `scratch.shared` to rows `rows` of `x`.
fn add_shared(ctx: Context<'_>, site: &Site<'_>, rows: Range<usize>, scratch: &MoeScratch, x: &mut [f32]) {
    let hidden = ctx.model.spec.hidden;
    if site.shared.is_some() {
        ctx.add(&mut x[rows.start * hidden..rows.end * hidden], &scratch.shared);
    }
}
