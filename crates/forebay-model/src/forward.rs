//! The forward pass: embedding, decoder layers, head.
//!
//! `x += attention(norm(x)); x += ffn(norm(x))` per layer, pre-norm, residual in f32
//! (forward spec section 6). Every row's result depends only on that row and on the
//! cached rows before it: never on the batch, the threads, or where experts were.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::CancelToken;
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

/// What may look on while a pass runs, and stop it.
pub struct Watch<'w> {
    /// Raised to stop.
    pub cancel: &'w CancelToken,
    /// Sees what was chosen.
    pub trace: Option<&'w mut (dyn Trace + 'w)>,
    /// Told after each layer how many are done, and how many bytes of experts were read for steps since the store was
    /// opened.
    pub layers_done: &'w mut dyn FnMut(usize, u64),
}

/// Runs `tokens` at the positions after `kv`'s length and appends them to the cache.
///
/// Layer after layer, all rows of the pass go through each: an expert is read once for all of
/// them. Where rows need room, they go through in blocks.
///
/// On success the cache is longer by the tokens, [`Workspace::hidden`] holds their hidden
/// states and [`logits`] can be asked for. On any error the cache keeps its length.
pub fn forward(
    ctx: Context<'_>,
    store: &mut ExpertStore,
    kv: &mut KvCache,
    tokens: &[u32],
    ws: &mut Workspace,
    watch: &mut Watch<'_>,
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let start = kv.len();
    check_tokens(spec, kv, tokens)?;
    kv.prepare(start..start + tokens.len())?;
    if let Some(trace) = watch.trace.as_deref_mut() {
        trace.began(start, tokens.len());
    }
    ws.profile.start();
    resize(&mut ws.x, tokens.len() * spec.hidden);
    ctx.model.embedding.rows(tokens, &mut ws.x)?;
    ws.attention.begin(ctx.model, start, tokens.len());
    // The disk need not wait until the dense layers are done.
    moe::guess_on_the_way(ctx, 0, store, &mut ws.moe, &mut ws.profile, &ws.x);
    for l in 0..ctx.model.layers.len() {
        run_layer(ctx, l, store, kv, ws, watch)?;
        check_finite(ctx, &ws.x, l, start)?;
        ws.profile.lap(Phase::Norms);
        (watch.layers_done)(l + 1, store.counters().step_bytes());
    }
    kv.advance(tokens.len());
    Ok(())
}

/// One layer over all rows of the pass.
pub(crate) fn run_layer(
    ctx: Context<'_>,
    l: usize,
    store: &mut ExpertStore,
    kv: &mut KvCache,
    ws: &mut Workspace,
    watch: &mut Watch<'_>,
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let layer = ctx.model.layer(l);
    let (start, rows) = (ws.attention.start(), ws.x.len() / spec.hidden);
    let site = match &layer.ffn {
        Ffn::Dense(_) => None,
        Ffn::Sparse { router, bias, shared } => {
            let shared = shared.as_ref();
            Some(moe::Site { layer: l, start, router, bias, shared, cancel: watch.cancel })
        }
    };
    if let Some(site) = &site {
        moe::begin(ctx, site, rows, &mut ws.moe);
        if let Some(trace) = watch.trace.as_deref_mut() {
            trace.resident(l, &store.resident_in(l as u32));
        }
    }
    for first in (0..rows).step_by(ws.block_rows()) {
        if watch.cancel.is_cancelled() {
            return Err(ForwardError::Cancelled);
        }
        let block = first..rows.min(first + ws.block_rows());
        let x = &mut ws.x[block.start * spec.hidden..block.end * spec.hidden];
        resize(&mut ws.normed, x.len());
        resize(&mut ws.update, x.len());
        ctx.rms_norms(x, &layer.input_norm, spec.norm_eps, &mut ws.normed);
        ws.profile.lap(Phase::Norms);
        attention::attention(
            ctx,
            l,
            kv,
            block,
            &ws.normed,
            &mut ws.quantised,
            &mut ws.attention,
            &mut ws.profile,
            watch.trace.as_deref_mut(),
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
                let trace = watch.trace.as_deref_mut();
                moe::admit(ctx, site, &ws.normed, &mut ws.quantised, &mut ws.moe, trace)?;
                ws.profile.lap(Phase::Router);
            }
            (Ffn::Sparse { .. }, None) => unreachable!("every sparse layer has a site"),
        }
    }
    match site {
        Some(site) => moe::add_experts(ctx, &site, store, &mut ws.moe, &mut ws.profile, &mut ws.x),
        None => {
            moe::guess_on_the_way(ctx, l + 1, store, &mut ws.moe, &mut ws.profile, &ws.x);
            Ok(())
        }
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
pub fn logits<'w>(ctx: Context<'_>, ws: &'w mut Workspace, rows: std::ops::Range<usize>) -> &'w [f32] {
    let spec = &ctx.model.spec;
    assert!(rows.len() <= LOGIT_ROWS, "at most {LOGIT_ROWS} rows of logits at once");
    ws.profile.start();
    head(ctx, ws, rows.start * spec.hidden..rows.end * spec.hidden, &ctx.model.final_norm)
}

/// The logits of values `range` of the residual stream, after this norm.
pub(crate) fn head<'w>(
    ctx: Context<'_>,
    ws: &'w mut Workspace,
    range: std::ops::Range<usize>,
    norm: &[f32],
) -> &'w [f32] {
    let spec = &ctx.model.spec;
    let x = &ws.x[range];
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

pub(crate) fn check_finite(
    ctx: Context<'_>,
    x: &[f32],
    layer: usize,
    start: usize,
) -> Result<(), ForwardError> {
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
        return Ok(());
    }
    let row = x.chunks_exact(hidden).position(|row| !all_finite(row)).unwrap_or(0);
    Err(ForwardError::NonFinite { layer, position: start + row })
}
