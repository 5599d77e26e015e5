//! The layer that drafts tokens: multi-token prediction (forward spec section 14).
//!
//! It takes the hidden state of position p and the token at p + 1, and predicts the one at p + 2. Its
//! cache has a row for every p. A row stems from a verified pair ([`absorb`]) or from a
//! guess ([`draft`]); [`KvCache::drafting`] says how far the verified ones go, and
//! since every pair is absorbed there are no holes among them.
//!
//! Nothing here decides what is generated: drafts are verified by the decoder, whose rows do not depend on
//! how many there are.

use forebay_core::CancelToken;
use forebay_tiers::ExpertStore;

use crate::attention;
use crate::families::roles::Role;
use crate::forward::{Context, ForwardError, check_finite, head, run_layer};
use crate::kv::KvCache;
use crate::pass::{Part, Pass};
use crate::profile::Phase;
use crate::weights::Mtp;
use crate::workspace::{Workspace, resize};

/// Pairs that are absorbed at once.
const ABSORB_ROWS: usize = 64;

/// What the MTP layer keeps of a sequence from pass to pass, beside its rows in the cache.
#[derive(Clone, Debug, Default)]
pub(crate) struct MtpState {
    /// The hidden state, before the final norm, of the last position that was absorbed up to.
    carry: Vec<f32>,
    /// Its position plus one; 0 if there is none.
    carried: usize,
    /// The position and the token of the pair whose row the last draft wrote, until the next absorption.
    begun: Option<(usize, u32)>,
}

/// Buffers of the MTP layer.
#[derive(Default)]
pub(crate) struct MtpScratch {
    /// `[rows, hidden]`: hidden states, then their norm.
    hidden: Vec<f32>,
    /// `[rows, hidden]`
    normed: Vec<f32>,
    /// `[rows, hidden]`
    embedded: Vec<f32>,
    /// `[rows, 2 * hidden]`
    joined: Vec<f32>,
    /// `[rows, hidden]`: the layer's residual stream.
    x: Vec<f32>,
}

impl MtpScratch {
    /// Bytes held.
    pub(crate) fn planned_bytes(hidden: usize) -> usize {
        // Hidden, normed, embedded, joined twice as wide, x, and the quantised copy of joined.
        ABSORB_ROWS * hidden * (4 * 6 + 4) + 4 * hidden
    }
}

/// Which norm a hidden state has had already.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It comes from the decoder: the decoder's final norm comes first.
    Decoder,
    /// It comes from an earlier step of the MTP layer.
    Step,
}

/// Whether the last hidden state is at hand of a sequence that `kv` holds, or not needed because the row that stems
/// from it is there: else the next pass would leave a hole, and [`rewind`] has to be called first.
pub fn is_carried(kv: &KvCache) -> bool {
    kv.is_empty() || kv.mtp.carried == kv.len() || kv.drafting() == kv.len()
}

/// The hidden state, before the final norm, of the last position, if it is at hand.
pub fn carry(kv: &KvCache) -> Option<&[f32]> {
    (!kv.is_empty() && kv.mtp.carried == kv.len()).then_some(&kv.mtp.carry)
}

/// Forgets what belongs to the sequence that was in `kv` before; `carry` is the hidden state of the last
/// position of the one that is there now, if it is known.
pub fn set_carry(kv: &mut KvCache, carry: Option<&[f32]>) {
    let len = kv.len();
    kv.mtp.begun = None;
    kv.mtp.carried = 0;
    if let Some(carry) = carry {
        kv.mtp.carry.clear();
        kv.mtp.carry.extend_from_slice(carry);
        kv.mtp.carried = len;
    }
}

/// Takes back the last position, whose token the caller runs again: that brings its hidden state.
pub fn rewind(kv: &mut KvCache) {
    kv.rewind(kv.len().saturating_sub(1));
}

/// Takes in the pairs of the last pass: `tokens` are those of its rows from `row` on that were kept, the cache ends with
/// them.
///
/// # Errors
/// If an embedding cannot be read.
pub fn absorb(
    ctx: Context<'_>,
    kv: &mut KvCache,
    tokens: &[u32],
    row: usize,
    ws: &mut Workspace,
) -> Result<(), ForwardError> {
    let Some(mtp) = &ctx.model.mtp else { return Ok(()) };
    let hidden = ctx.model.spec.hidden;
    let start = kv.len() - tokens.len();
    ws.profile.start();
    // The pair of position p needs the token at p + 1: the one before the pass is completed by its first token.
    if let Some((position, token)) = kv.mtp.begun.take()
        && position == kv.drafting()
        && position + 1 == start
        && token == tokens[0]
    {
        kv.drafting_reaches(position + 1);
    }
    let first = kv.drafting();
    debug_assert!(first + 1 >= start, "the caller rewound where there would be a hole");
    for from in (first..kv.len() - 1).step_by(ABSORB_ROWS) {
        let positions = from..(kv.len() - 1).min(from + ABSORB_ROWS);
        ws.mtp.hidden.clear();
        for position in positions.clone() {
            let row = match position.checked_sub(start) {
                Some(at) => &ws.x[(row + at) * hidden..(row + at + 1) * hidden],
                None => &kv.mtp.carry[..],
            };
            ws.mtp.hidden.extend_from_slice(row);
        }
        let tokens = &tokens[positions.start + 1 - start..positions.end + 1 - start];
        join(ctx, mtp, Origin::Decoder, tokens, ws)?;
        let scratch = &mut ws.mtp;
        resize(&mut scratch.normed, scratch.x.len());
        ctx.rms_norms(&scratch.x, &mtp.layer.input_norm, ctx.model.spec.norm_eps, &mut scratch.normed);
        let layer = ctx.model.layers.len();
        let (quantised, attention) = (&mut ws.quantised, &mut ws.attention);
        attention::cache_rows(ctx, layer, kv, positions.start, &scratch.normed, quantised, attention);
        kv.drafting_reaches(positions.end);
    }
    let last = row + tokens.len() - 1;
    kv.mtp.carry.clear();
    kv.mtp.carry.extend_from_slice(&ws.x[last * hidden..(last + 1) * hidden]);
    kv.mtp.carried = kv.len();
    ws.profile.lap(Phase::Draft);
    Ok(())
}

/// Drafts up to `depth` tokens that may follow `next`, the token behind the cache's last, and behind it `given`, into
/// `drafts`. Always the most likely ones; fewer where the cache ends.
///
/// # Errors
/// As a pass. The cache keeps its length, and what was drafted by then is in `drafts`.
#[allow(clippy::too_many_arguments)] // What a pass takes, and what is drafted.
pub fn draft(
    ctx: Context<'_>,
    store: &mut ExpertStore,
    kv: &mut KvCache,
    next: u32,
    given: &[u32],
    depth: usize,
    cancel: &CancelToken,
    ws: &mut Workspace,
    drafts: &mut Vec<u32>,
) -> Result<(), ForwardError> {
    drafts.clear();
    let Some(mtp) = &ctx.model.mtp else { return Ok(()) };
    if carry(kv).is_none() {
        return Ok(());
    }
    // Row p stands with token p + 1; what is given has rows too.
    kv.prepare(kv.len()..kv.len() + given.len() + depth)?;
    let before = ws.profile.all();
    let mut steps = || {
        let mut token = next;
        for step in 0..given.len() + depth {
            let position = kv.len() - 1 + step;
            if position + 2 >= kv.capacity() {
                break;
            }
            ws.profile.start();
            let origin = if step == 0 { Origin::Decoder } else { Origin::Step };
            ws.mtp.hidden.clear();
            match origin {
                Origin::Decoder => ws.mtp.hidden.extend_from_slice(&kv.mtp.carry),
                Origin::Step => ws.mtp.hidden.extend_from_slice(&ws.mtp.x),
            }
            join(ctx, mtp, origin, &[token], ws)?;
            let drafted = one_step(ctx, mtp, store, kv, position, cancel, ws)?;
            if step == 0 {
                kv.mtp.begun = Some((position, next));
            }
            token = given.get(step).copied().unwrap_or(drafted);
            if step >= given.len() {
                drafts.push(drafted);
            }
        }
        Ok(())
    };
    let drafted = steps();
    ws.profile.fold(before, Phase::Draft);
    drafted
}

/// The layer over the one row of `ws.mtp.x`, and the head: the most likely token.
fn one_step(
    ctx: Context<'_>,
    mtp: &Mtp,
    store: &mut ExpertStore,
    kv: &mut KvCache,
    position: usize,
    cancel: &CancelToken,
    ws: &mut Workspace,
) -> Result<u32, ForwardError> {
    let layer = ctx.model.layers.len();
    // One row, which is there already.
    let mut parts = [Part::new(kv, &[0], cancel)];
    let mut ignored = |_: usize, _: &ForwardError| ();
    let mut pass = Pass::new(&mut parts, &mut ignored);
    pass.lay_out(|_| position);
    ws.attention.begin(ctx.model, pass.spans());
    // The decoder's hidden states are still wanted afterwards.
    std::mem::swap(&mut ws.x, &mut ws.mtp.x);
    run_layer(ctx, layer, store, &mut pass, ws, None);
    check_finite(ctx, &ws.x, layer, &mut pass);
    std::mem::swap(&mut ws.x, &mut ws.mtp.x);
    let [part] = parts;
    part.result()?;
    ws.update.clone_from(&ws.mtp.x);
    Ok(best_of(head(ctx, ws, &mtp.final_norm)))
}

/// The largest finite logit's index, the first one on a tie; 0 if there is none: a draft is only a guess.
fn best_of(logits: &[f32]) -> u32 {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_finite() && logit > best.1 {
            best = (id as u32, logit);
        }
    }
    best.0
}

/// `ws.mtp.x = join(norm(embedding of tokens), norm(ws.mtp.hidden))`.
fn join(
    ctx: Context<'_>,
    mtp: &Mtp,
    origin: Origin,
    tokens: &[u32],
    ws: &mut Workspace,
) -> Result<(), ForwardError> {
    let (spec, scratch) = (&ctx.model.spec, &mut ws.mtp);
    let values = tokens.len() * spec.hidden;
    resize(&mut scratch.embedded, values);
    resize(&mut scratch.normed, values);
    ctx.model.embedding.rows(tokens, &mut scratch.embedded)?;
    ctx.rms_norms(&scratch.embedded, &mtp.embedding_norm, spec.norm_eps, &mut scratch.normed);
    scratch.joined.clear();
    scratch.joined.resize(2 * values, 0.0);
    let halves = |joined: &mut [f32], at: usize, rows: &[f32]| {
        for (joined, row) in joined.chunks_exact_mut(2 * spec.hidden).zip(rows.chunks_exact(spec.hidden)) {
            joined[at..at + spec.hidden].copy_from_slice(row);
        }
    };
    halves(&mut scratch.joined, 0, &scratch.normed);
    if origin == Origin::Decoder {
        // Both norms, one after the other, are what the layer was trained with.
        ctx.rms_norms(&scratch.hidden, &ctx.model.final_norm, spec.norm_eps, &mut scratch.normed);
        std::mem::swap(&mut scratch.hidden, &mut scratch.normed);
    }
    ctx.rms_norms(&scratch.hidden, &mtp.hidden_norm, spec.norm_eps, &mut scratch.normed);
    halves(&mut scratch.joined, spec.hidden, &scratch.normed);
    resize(&mut scratch.x, values);
    ctx.linear(Role::Mtp, &mtp.join, &scratch.joined, &mut ws.quantised, &mut scratch.x);
    Ok(())
}
