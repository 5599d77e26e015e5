//! The forward pass: embedding, decoder layers, head.
//!
//! `x += attention(norm(x)); x += ffn(norm(x))` per layer, pre-norm, residual in f32
//! (forward spec section 6). Every row's result depends only on that row and on the
//! cached rows before it: never on the batch, the threads, or where experts were.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::coded::CodedError;
use forebay_kernels::{Input, Kernels, MatmulJob, RouterError, Team, matmul_many};
use forebay_tiers::{ExpertError, ExpertStore};

use crate::arith::Arith;
use crate::attention;
use crate::experts::ExpertTable;
use crate::families::roles::Role;
use crate::kv::{KvCache, NoBlock};
use crate::mlp::{MlpScratch, mlp};
use crate::moe;
use crate::pass::{Part, Pass, keep_rows};
use crate::profile::Phase;
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::weights::{Ffn, Matrix, Mlp, Model, WeightError};
use crate::workspace::{LOGIT_ROWS, Quantised, Workspace, resize};

/// What a forward pass computes with. Nothing in here changes from pass to pass.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Resident weights.
    pub model: &'a Model,
    /// Where routed experts are, and their layout in a slab.
    pub table: &'a ExpertTable,
    /// The instruction set's arithmetic.
    pub kernels: Kernels,
    /// The threads.
    pub team: &'a Team,
    /// Arithmetic mode.
    pub arith: Arith,
    /// Select keys even where all of them fit into the selection. Changes nothing
    /// but the work done; tests rely on that.
    pub force_selection: bool,
}

/// Why a forward pass stopped.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ForwardError {
    /// No tokens were given.
    #[error("there are no tokens to run; give at least one")]
    NoTokens,
    /// A token id has no embedding.
    #[error("token {token} is outside the vocabulary of {vocab} ids; the tokenizer does not fit the model")]
    Token {
        /// The id.
        token: u32,
        /// Ids there are.
        vocab: usize,
    },
    /// The KV cache is too small.
    #[error(
        "{tokens} tokens do not fit: a context of {capacity} has room for {} more; \
         shorten the text or raise --context", capacity - used
    )]
    ContextFull {
        /// Tokens to add.
        tokens: usize,
        /// Positions already used.
        used: usize,
        /// Positions there are.
        capacity: usize,
    },
    /// Other sequences hold all of the KV cache.
    #[error(transparent)]
    NoBlock(#[from] NoBlock),
    /// The router of a layer could not choose.
    #[error("layer {layer}, position {position}: {cause}")]
    Router {
        /// The layer.
        layer: usize,
        /// The row's position.
        position: usize,
        /// Why.
        cause: RouterError,
    },
    /// The embedding of a token could not be read.
    #[error(transparent)]
    Embedding(#[from] WeightError),
    /// A coded expert is none, although every byte is what was written.
    #[error(
        "expert {expert} of layer {layer} cannot be decoded: {cause}; if it finds nothing, pack the model again"
    )]
    Coded {
        /// The layer.
        layer: usize,
        /// The expert.
        expert: u32,
        /// What is wrong.
        cause: CodedError,
    },
    /// A routed expert could not be read.
    #[error(transparent)]
    Expert(#[from] ExpertError),
    /// A row of the residual stream is no longer finite.
    #[error(
        "layer {layer} produced a value that is not finite at position {position}; \
         compare the model files with their source, or try another text"
    )]
    NonFinite {
        /// The layer.
        layer: usize,
        /// The row's position.
        position: usize,
    },
    /// The caller asked to stop.
    #[error("cancelled")]
    Cancelled,
}

/// Rows that a thread takes at once where a row is little work.
pub(crate) const SOME_ROWS: usize = 8;

impl Context<'_> {
    /// Whether a matrix of this role is multiplied with int8 activations.
    pub(crate) fn uses_int8(&self, role: Role, weights: &Matrix) -> bool {
        role.arith(self.arith) == Arith::Int8 && weights.format().is_integer()
    }

    /// `y = W x` for every row of `x`.
    pub(crate) fn linear(
        &self,
        role: Role,
        weights: &Matrix,
        x: &[f32],
        quantised: &mut Quantised,
        y: &mut [f32],
    ) {
        self.linears(role, x, quantised, [(weights, y)]);
    }

    /// Several matrices of one role over the same rows, the activations quantised once.
    pub(crate) fn linears<const N: usize>(
        &self,
        role: Role,
        x: &[f32],
        quantised: &mut Quantised,
        products: [(&Matrix, &mut [f32]); N],
    ) {
        let input = self.input(role, products.each_ref().map(|(weights, _)| *weights), x, quantised);
        let mut jobs = products.map(|(weights, y)| MatmulJob::new(weights.weights(), input, y));
        matmul_many(self.kernels, self.team, &mut jobs);
    }

    /// Rows as matrices of one role and width take them: quantised, if any of the matrices wants that.
    pub(crate) fn input<'i, const N: usize>(
        &self,
        role: Role,
        weights: [&Matrix; N],
        x: &'i [f32],
        quantised: &'i mut Quantised,
    ) -> Input<'i> {
        if !weights.iter().any(|weights| self.uses_int8(role, weights)) {
            return Input::exact(x);
        }
        let activations = quantised.of_width(weights[0].cols());
        activations.quantise(self.kernels, self.team, x);
        Input::int8(x, activations)
    }

    /// RMS norm of every row of `x`.
    pub(crate) fn rms_norms(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let width = weight.len();
        self.team.for_each_chunk(out, SOME_ROWS * width, &|part, out| {
            let x = x[part * SOME_ROWS * width..].chunks_exact(width);
            for (x, out) in x.zip(out.chunks_exact_mut(width)) {
                self.kernels.rms_norm(x, weight, eps, out);
            }
        });
    }

    /// `x += update`, element by element.
    pub(crate) fn add(&self, x: &mut [f32], update: &[f32]) {
        let some = SOME_ROWS * self.model.spec.hidden;
        self.team.for_each_chunk(x, some, &|part, x| {
            for (x, update) in x.iter_mut().zip(&update[part * some..]) {
                *x += update;
            }
        });
    }
}

/// What may look on while a pass runs.
pub struct Watch<'w> {
    /// Sees what was chosen.
    pub trace: Option<&'w mut (dyn Trace + 'w)>,
    /// Told after each layer how many are done, and how many bytes of experts were read for steps since the store was
    /// opened.
    pub layers_done: &'w mut dyn FnMut(usize, u64),
    /// Told at once when a sequence leaves the pass, which may take long to end for the others: its place among the
    /// parts, and why.
    pub left: &'w mut dyn FnMut(usize, &ForwardError),
}

/// Runs the tokens of every part at the positions after its cache's length and appends them to it.
///
/// Layer after layer, all rows of the pass go through each: an expert is read once for all of
/// them, whichever sequences they belong to. Where rows need room, they go through in blocks. A row's result is the
/// same to the last bit whatever rows are beside it.
///
/// A part whose tokens ran has a cache that is longer by them; [`Part::result`] says which rows were its own,
/// [`Workspace::hidden`] holds their hidden states and [`logits`] can be asked for. An error ends the part that it is
/// about, whose cache keeps its length, and no other: a token or a context that does not fit, a cancellation, a value
/// that is not finite, an expert that cannot be had and that it chose.
pub fn forward(
    ctx: Context<'_>,
    store: &mut ExpertStore,
    parts: &mut [Part<'_>],
    ws: &mut Workspace,
    watch: &mut Watch<'_>,
) {
    let spec = &ctx.model.spec;
    let mut pass = Pass::new(parts, &mut *watch.left);
    for at in 0..pass.parts.len() {
        if let Err(error) = prepare(spec, &mut pass.parts[at]) {
            pass.fail(at, error);
        }
    }
    pass.lay_out(|part| part.kv.len());
    ws.profile.start();
    ws.moe.uses.begin();
    resize(&mut ws.x, pass.rows() * spec.hidden);
    for span in pass.spans().to_vec() {
        if let Some(trace) = watch.trace.as_deref_mut() {
            trace.began(span.position, span.rows);
        }
        let x = &mut ws.x[span.first * spec.hidden..span.end() * spec.hidden];
        if let Err(error) = ctx.model.embedding.rows(pass.parts[span.part].tokens, x) {
            pass.fail(span.part, error.into());
        }
    }
    ws.attention.begin(ctx.model, pass.spans());
    take_out(spec, &mut pass, ws);
    if pass.is_over() {
        return;
    }
    // The disk need not wait until the dense layers are done.
    moe::guess_on_the_way(ctx, 0, store, &mut ws.moe, &mut ws.profile, &ws.x);
    for l in 0..ctx.model.layers.len() {
        run_layer(ctx, l, store, &mut pass, ws, watch.trace.as_deref_mut());
        if pass.is_over() {
            return;
        }
        check_finite(ctx, &ws.x, l, &mut pass);
        take_out(spec, &mut pass, ws);
        if pass.is_over() {
            return;
        }
        ws.profile.lap(Phase::Norms);
        (watch.layers_done)(l + 1, store.counters().step_bytes());
    }
    pass.advance();
}

/// Whether a part can run, which then has room for its rows.
fn prepare(spec: &ModelSpec, part: &mut Part<'_>) -> Result<(), ForwardError> {
    check_tokens(spec, part.kv, part.tokens)?;
    let start = part.kv.len();
    Ok(part.kv.prepare(start..start + part.tokens.len())?)
}

/// Takes the rows of sequences that left out of the pass.
fn take_out(spec: &ModelSpec, pass: &mut Pass<'_, '_>, ws: &mut Workspace) {
    if let Some(stay) = pass.take_out() {
        keep_rows(&mut ws.x, spec.hidden, &stay);
        ws.attention.keep_rows(&stay);
        ws.moe.uses.keep_rows(&stay);
    }
}

/// One layer over all rows of the pass.
pub(crate) fn run_layer(
    ctx: Context<'_>,
    l: usize,
    store: &mut ExpertStore,
    pass: &mut Pass<'_, '_>,
    ws: &mut Workspace,
    mut trace: Option<&mut (dyn Trace + '_)>,
) {
    let spec = &ctx.model.spec;
    let layer = ctx.model.layer(l);
    let rows = pass.rows();
    let site = match &layer.ffn {
        Ffn::Dense(_) => None,
        Ffn::Sparse { router, bias, shared } => {
            Some(moe::Site { layer: l, router, bias, shared: shared.as_ref() })
        }
    };
    if let Some(site) = &site {
        moe::begin(ctx, site, rows, &mut ws.moe);
        if let Some(trace) = trace.as_deref_mut() {
            trace.resident(l, &store.resident_in(l as u32));
        }
    }
    for first in (0..rows).step_by(ws.block_rows()) {
        pass.look_for_cancellations();
        if pass.is_over() {
            return;
        }
        let block = first..rows.min(first + ws.block_rows());
        let x = &mut ws.x[block.start * spec.hidden..block.end * spec.hidden];
        if pass.all_left(&block) {
            if site.is_some() {
                moe::pass_over(ctx, x, &mut ws.quantised, &mut ws.moe);
            }
            continue;
        }
        resize(&mut ws.normed, x.len());
        resize(&mut ws.update, x.len());
        ctx.rms_norms(x, &layer.input_norm, spec.norm_eps, &mut ws.normed);
        ws.profile.lap(Phase::Norms);
        attention::attention(
            ctx,
            l,
            pass,
            block,
            &ws.normed,
            &mut ws.quantised,
            &mut ws.attention,
            &mut ws.profile,
            trace.as_deref_mut(),
            &mut ws.update,
        );
        ctx.add(x, &ws.update);
        ctx.rms_norms(x, &layer.post_norm, spec.norm_eps, &mut ws.normed);
        ws.profile.lap(Phase::Norms);
        match (&layer.ffn, &site) {
            (Ffn::Dense(mlp), _) => {
                dense(ctx, mlp, &ws.normed, &mut ws.quantised, &mut ws.mlp, &mut ws.update);
                ws.profile.lap(Phase::DenseMlp);
                ctx.add(x, &ws.update);
            }
            (Ffn::Sparse { .. }, Some(site)) => {
                let trace = trace.as_deref_mut();
                moe::admit(ctx, site, pass, &ws.normed, &mut ws.quantised, &mut ws.moe, trace);
                ws.profile.lap(Phase::Router);
            }
            (Ffn::Sparse { .. }, None) => unreachable!("every sparse layer has a site"),
        }
    }
    match site {
        Some(site) => moe::add_experts(ctx, &site, store, pass, &mut ws.moe, &mut ws.profile, &mut ws.x),
        None => moe::guess_on_the_way(ctx, l + 1, store, &mut ws.moe, &mut ws.profile, &ws.x),
    }
}

/// `out = mlp(x)` of a dense layer.
fn dense(
    ctx: Context<'_>,
    weights: &Mlp,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MlpScratch,
    out: &mut [f32],
) {
    let input = ctx.input(Role::DenseMlp, [&weights.gate, &weights.up], x, quantised);
    mlp(ctx, Role::DenseMlp, weights.matrices().map(Matrix::weights), input, scratch, out);
}

/// The logits `[rows.len(), vocab]` of some rows of the last pass.
///
/// # Panics
/// If more than [`LOGIT_ROWS`] rows are asked for, or rows the pass did not have.
pub fn logits<'w>(
    ctx: Context<'_>,
    ws: &'w mut Workspace,
    rows: impl ExactSizeIterator<Item = usize>,
) -> &'w [f32] {
    let spec = &ctx.model.spec;
    assert!(rows.len() <= LOGIT_ROWS, "at most {LOGIT_ROWS} rows of logits at once");
    ws.profile.start();
    ws.update.clear();
    for row in rows {
        ws.update.extend_from_slice(&ws.x[row * spec.hidden..(row + 1) * spec.hidden]);
    }
    head(ctx, ws, &ctx.model.final_norm)
}

/// The logits of the rows of `ws.update`, after this norm.
pub(crate) fn head<'w>(ctx: Context<'_>, ws: &'w mut Workspace, norm: &[f32]) -> &'w [f32] {
    let spec = &ctx.model.spec;
    let x = &ws.update;
    resize(&mut ws.normed, x.len());
    ctx.rms_norms(x, norm, spec.norm_eps, &mut ws.normed);
    resize(&mut ws.logits, x.len() / spec.hidden * spec.vocab);
    ctx.linear(Role::Head, &ctx.model.head, &ws.normed, &mut ws.quantised, &mut ws.logits);
    ws.profile.lap(Phase::Head);
    &ws.logits
}

fn check_tokens(spec: &ModelSpec, kv: &KvCache, tokens: &[u32]) -> Result<(), ForwardError> {
    if tokens.is_empty() {
        return Err(ForwardError::NoTokens);
    }
    if let Some(&token) = tokens.iter().find(|&&t| t as usize >= spec.vocab) {
        return Err(ForwardError::Token { token, vocab: spec.vocab });
    }
    let (used, capacity) = (kv.len(), kv.capacity());
    if tokens.len() > capacity - used {
        return Err(ForwardError::ContextFull { tokens: tokens.len(), used, capacity });
    }
    Ok(())
}

/// Sequences leave whose residual stream is no longer finite.
pub(crate) fn check_finite(ctx: Context<'_>, x: &[f32], layer: usize, pass: &mut Pass<'_, '_>) {
    let hidden = ctx.model.spec.hidden;
    let all_finite = |x: &[f32]| x.iter().fold(true, |all, v| all & v.is_finite());
    let found = AtomicBool::new(false);
    let some = SOME_ROWS * hidden;
    ctx.team.run(x.len().div_ceil(some), &|part| {
        if !all_finite(&x[part * some..x.len().min((part + 1) * some)]) {
            found.store(true, Ordering::Relaxed);
        }
    });
    if !found.into_inner() {
        return;
    }
    for span in pass.spans().to_vec() {
        let rows = x[span.first * hidden..span.end() * hidden].chunks_exact(hidden);
        let found = rows.enumerate().find(|(_, row)| !all_finite(row));
        if let Some((row, _)) = found {
            pass.fail(span.part, ForwardError::NonFinite { layer, position: span.position + row });
        }
    }
}
