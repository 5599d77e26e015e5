//! The forward pass: embedding, decoder layers, head.
//!
//! `x += attention(norm(x)); x += ffn(norm(x))` per layer, pre-norm, residual in f32
//! (forward spec section 6). Every row's result depends only on that row and on the
//! cached rows before it: never on the batch, the threads, or where experts were.

use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::CancelToken;
use forebay_kernels::{
    Activations, Input, Kernels, MatmulJob, RouterError, Team, matmul_many, matmul_swiglu,
};
use forebay_tiers::{ExpertError, ExpertStore};

use crate::arith::Arith;
use crate::attention::{self, AttentionScratch};
use crate::experts::ExpertTable;
use crate::families::roles::Role;
use crate::kv::KvCache;
use crate::moe::{self, MoeScratch};
use crate::profile::{Phase, Profile};
use crate::spec::ModelSpec;
use crate::trace::Trace;
use crate::weights::{Ffn, Matrix, Mlp, Model};

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

/// Buffers of the forward pass, reused from pass to pass.
#[derive(Default)]
pub struct Workspace {
    /// `[rows, hidden]`: the residual stream; after a pass, the hidden states before the final norm.
    x: Vec<f32>,
    normed: Vec<f32>,
    /// `[rows, hidden]`: what attention or the feed-forward part adds.
    update: Vec<f32>,
    quantised: Quantised,
    attention: AttentionScratch,
    mlp: MlpScratch,
    moe: MoeScratch,
    logits: Vec<f32>,
    /// Where the time went, over all passes since it was last reset.
    pub profile: Profile,
}

impl Workspace {
    /// The hidden state of row `row` of the last pass, before the final norm.
    pub fn hidden(&self, spec: &ModelSpec, row: usize) -> &[f32] {
        &self.x[row * spec.hidden..(row + 1) * spec.hidden]
    }

    /// Bytes of buffers that passes of up to `rows` rows, with `context` positions, can need.
    pub fn planned_bytes(spec: &ModelSpec, rows: usize, context: usize, threads: usize) -> u64 {
        let hidden = spec.hidden;
        // x, normed, update, and the quantised copy of normed.
        let stream = rows * (3 * hidden + quantised_values(hidden));
        let attention = AttentionScratch::planned_values(spec, rows, context, threads);
        let dense = MlpScratch::planned_values(rows, spec.dense_width.max(spec.moe.shared_width))
            + rows * quantised_values(spec.moe.shared_width);
        let moe = MoeScratch::planned_values(spec, rows);
        let logits = LOGIT_ROWS * spec.vocab;
        4 * (stream + attention + dense + moe + logits) as u64
    }
}

/// At most this many rows of logits are asked for at once.
pub const LOGIT_ROWS: usize = 8;

/// Four-byte values that the quantised copy of a row of `width` takes: per group of 64 its codes,
/// a scale and four corrections.
pub(crate) fn quantised_values(width: usize) -> usize {
    width.div_ceil(forebay_kernels::GROUP) * 21
}

/// Rows that a thread takes at once where a row is little work.
const SOME_ROWS: usize = 8;

/// One buffer of quantised activations per width.
#[derive(Default)]
pub(crate) struct Quantised(Vec<Activations>);

impl Quantised {
    /// The buffer for rows of `cols` values.
    pub(crate) fn of_width(&mut self, cols: usize) -> &mut Activations {
        let at = self.0.iter().position(|a| a.cols() == cols).unwrap_or_else(|| {
            self.0.push(Activations::new(cols));
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

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
    fn input<'i, const N: usize>(
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

/// Runs `tokens` at the positions after `kv`'s length and appends them to the cache.
///
/// On success the cache is longer by the tokens, [`Workspace::hidden`] holds their hidden
/// states and [`logits`] can be asked for. On any error the cache keeps its length.
pub fn forward(
    ctx: Context<'_>,
    store: &mut ExpertStore,
    kv: &mut KvCache,
    tokens: &[u32],
    ws: &mut Workspace,
    cancel: &CancelToken,
    mut trace: Option<&mut (dyn Trace + '_)>,
) -> Result<(), ForwardError> {
    let spec = &ctx.model.spec;
    let start = kv.len();
    check_tokens(spec, kv, tokens)?;
    ws.profile.start();
    resize(&mut ws.x, tokens.len() * spec.hidden);
    for (token, row) in tokens.iter().zip(ws.x.chunks_exact_mut(spec.hidden)) {
        ctx.model.embedding.decode_row(*token as usize, row);
    }
    ws.attention.begin(ctx.model, start, tokens.len());
    for (l, layer) in ctx.model.layers.iter().enumerate() {
        if cancel.is_cancelled() {
            return Err(ForwardError::Cancelled);
        }
        resize(&mut ws.normed, ws.x.len());
        resize(&mut ws.update, ws.x.len());
        ctx.rms_norms(&ws.x, &layer.input_norm, spec.norm_eps, &mut ws.normed);
        ws.profile.lap(Phase::Norms);
        attention::attention(
            ctx,
            l,
            kv,
            start,
            &ws.normed,
            &mut ws.quantised,
            &mut ws.attention,
            &mut ws.profile,
            trace.as_deref_mut(),
            &mut ws.update,
        );
        ctx.add(&mut ws.x, &ws.update);

        ctx.rms_norms(&ws.x, &layer.post_norm, spec.norm_eps, &mut ws.normed);
        ws.profile.lap(Phase::Norms);
        match &layer.ffn {
            Ffn::Dense(weights) => {
                mlp(ctx, Role::DenseMlp, weights, &ws.normed, &mut ws.quantised, &mut ws.mlp, &mut ws.update);
                ws.profile.lap(Phase::DenseMlp);
            }
            Ffn::Sparse { router, bias, shared } => {
                let site = moe::Site { layer: l, start, router, bias, cancel };
                let (quantised, scratch) = (&mut ws.quantised, &mut ws.moe);
                moe::routed(
                    ctx,
                    site,
                    store,
                    &ws.normed,
                    quantised,
                    scratch,
                    &mut ws.profile,
                    trace.as_deref_mut(),
                    &mut ws.update,
                )?;
                if let Some(weights) = shared {
                    let out = scratch.shared_out(ws.update.len());
                    mlp(ctx, Role::SharedExpert, weights, &ws.normed, quantised, &mut ws.mlp, out);
                    ctx.add(&mut ws.update, out);
                    ws.profile.lap(Phase::SharedExpert);
                }
            }
        }
        ctx.add(&mut ws.x, &ws.update);
        check_finite(ctx, &ws.x, l, start)?;
        ws.profile.lap(Phase::Norms);
    }
    kv.advance(tokens.len());
    Ok(())
}

/// The logits `[rows.len(), vocab]` of some rows of the last pass.
///
/// # Panics
/// If more than [`LOGIT_ROWS`] rows are asked for, or rows the pass did not have.
pub fn logits<'w>(ctx: Context<'_>, ws: &'w mut Workspace, rows: std::ops::Range<usize>) -> &'w [f32] {
    let spec = &ctx.model.spec;
    assert!(rows.len() <= LOGIT_ROWS, "at most {LOGIT_ROWS} rows of logits at once");
    ws.profile.start();
    let x = &ws.x[rows.start * spec.hidden..rows.end * spec.hidden];
    let normed = &mut ws.normed[..x.len()];
    ctx.rms_norms(x, &ctx.model.final_norm, spec.norm_eps, normed);
    resize(&mut ws.logits, rows.len() * spec.vocab);
    ctx.linear(Role::Head, &ctx.model.head, normed, &mut ws.quantised, &mut ws.logits);
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

fn check_finite(ctx: Context<'_>, x: &[f32], layer: usize, start: usize) -> Result<(), ForwardError> {
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

/// What an MLP has between its products.
#[derive(Default)]
pub(crate) struct MlpScratch {
    up: Vec<f32>,
    inner: Vec<f32>,
}

impl MlpScratch {
    /// Values held for `rows` rows of `width`, the quantised copy included.
    fn planned_values(rows: usize, width: usize) -> usize {
        rows * (2 * width + quantised_values(width))
    }
}

/// `out = down(silu(gate x) * up x)` for every row.
fn mlp(
    ctx: Context<'_>,
    role: Role,
    weights: &Mlp,
    x: &[f32],
    quantised: &mut Quantised,
    scratch: &mut MlpScratch,
    out: &mut [f32],
) {
    let rows = x.len() / ctx.model.spec.hidden;
    let width = weights.gate.rows();
    for buffer in [&mut scratch.up, &mut scratch.inner] {
        resize(buffer, rows * width);
    }
    let input = ctx.input(role, [&weights.gate, &weights.up], x, quantised);
    let gate_and_up = [weights.gate.weights(), weights.up.weights()];
    matmul_swiglu(ctx.kernels, ctx.team, gate_and_up, input, &mut scratch.up, &mut scratch.inner);
    ctx.linear(role, &weights.down, &scratch.inner, quantised, out);
}

/// Makes `buffer` exactly `len` long. Its old contents mean nothing afterwards.
pub(crate) fn resize(buffer: &mut Vec<f32>, len: usize) {
    buffer.resize(len, 0.0);
}
