//! Drafting and verifying: what a session guesses at, and what of it stays (docs/drafting.md).

use std::time::Instant;

use forebay_core::CancelToken;
use forebay_model::workspace::LOGIT_ROWS;
use forebay_model::{ForwardError, Trace, logits, mtp};

use super::{GenerateError, PassStats, Request, Session};
use crate::draft::{Drafting, MAX_DEPTH, Observed, look_up};
use crate::engine::Engine;
use crate::sample::Sampler;

/// What became of the drafts of a pass.
struct Judged {
    /// Drafts that are what was chosen, from the first one on.
    accepted: usize,
    /// The last of them is a stop token.
    stopped: bool,
    /// What was chosen in place of the next one.
    chosen: Option<u32>,
}

/// What a verifying pass brought.
pub(super) struct Verified {
    /// Drafts that belong to the answer.
    pub(super) emitted: usize,
    /// Drafts that the model agreed with: one more, if the last one ends the answer.
    pub(super) accepted: usize,
    /// The token behind them, if it is known.
    pub(super) chosen: Option<u32>,
    pub(super) pass: PassStats,
}

impl Session {
    /// Takes the last token back, to be run again, if drafting needs its hidden state and that is gone.
    /// `next` comes next, unless a token is pending.
    pub(super) fn hidden_again(&mut self, engine: &mut Engine, next: u32) {
        if self.behind.take() != Some(self.pending.unwrap_or(next)) {
            self.kv.another_token_comes();
        }
        let (ctx, _) = engine.split();
        if ctx.model.mtp.is_some() && !mtp::is_carried(&self.kv, &self.workspace) {
            mtp::rewind(&mut self.kv);
            self.pending = self.tokens.pop();
        }
    }

    /// Drafts what may follow `next`, of which at most `left` tokens are wanted.
    pub(super) fn propose(
        &mut self,
        engine: &mut Engine,
        next: u32,
        left: usize,
        cancel: &CancelToken,
    ) -> Result<Observed, GenerateError> {
        let started = Instant::now();
        let room = (self.kv.capacity() - self.kv.len()).saturating_sub(2);
        let depth = match engine.options().drafting {
            Drafting::Off => 0,
            Drafting::Depth(depth) => depth.min(MAX_DEPTH),
            // What cannot be verified need not be drafted.
            Drafting::Auto => engine.drafting.depth().min(left).min(room),
        };
        let drafted = self.draft(engine, next, depth, cancel)?.len();
        self.drafts.truncate(left.min(room));
        let (verified, drafting) = (self.drafts.len(), started.elapsed());
        Ok(Observed { drafted, verified, drafting, ..Observed::default() })
    }

    /// What may follow `next` behind the tokens in the cache: up to `depth` tokens, none if nothing can be said. A
    /// cancellation cuts it short.
    pub fn draft(
        &mut self,
        engine: &mut Engine,
        next: u32,
        depth: usize,
        cancel: &CancelToken,
    ) -> Result<&[u32], GenerateError> {
        self.drafts.clear();
        if depth == 0 {
            return Ok(&self.drafts);
        }
        if let Some(foretold) = &mut self.foretold {
            foretold.draft(self.tokens.len(), depth, &mut self.drafts);
            return Ok(&self.drafts);
        }
        let room = self.kv.len()..self.kv.len() + depth;
        if engine.has_mtp() && engine.prefixes.make_room(&mut self.kv, room).is_err() {
            // The pass to come says so, unless it needs less.
            return Ok(&self.drafts);
        }
        let (ctx, store) = engine.split();
        if ctx.model.mtp.is_some() {
            let (kv, ws) = (&mut self.kv, &mut self.workspace);
            match mtp::draft(ctx, store, kv, next, depth, cancel, ws, &mut self.drafts) {
                // The pass to come notices by itself.
                Ok(()) | Err(ForwardError::Cancelled) => {}
                Err(other) => return Err(other.into()),
            }
        } else {
            look_up(&self.tokens, next, depth, &mut self.drafts);
        }
        Ok(&self.drafts)
    }

    /// One pass over `next` and the drafts; what of it is right is in the cache afterwards. `None` if it was
    /// cancelled.
    pub(super) fn verify(
        &mut self,
        engine: &mut Engine,
        next: u32,
        request: &Request<'_>,
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        sampler: &mut Sampler,
    ) -> Result<Option<Verified>, GenerateError> {
        let start = self.pass_starts(engine);
        let tokens: Vec<u32> = std::iter::once(next).chain(self.drafts.iter().copied()).collect();
        if !self.pass(engine, &tokens, cancel, trace, &mut |_, _| ())? {
            return Ok(None);
        }
        let judged = self.judge(engine, tokens.len(), request.stops, sampler);
        let Judged { accepted, stopped, chosen } =
            judged.inspect_err(|_| self.kv.truncate(self.tokens.len()))?;
        // A stop token ends the answer without being part of it.
        let emitted = accepted - usize::from(stopped);
        self.keep(engine, &tokens[..1 + emitted], tokens.len())?;
        let pass = self.pass_stats(engine, tokens.len(), &start);
        Ok(Some(Verified { emitted, accepted, chosen, pass }))
    }

    /// Chooses a token behind every row of the last pass over `rows` tokens, as long as the draft that comes next is
    /// that token: so what is generated is what would be without drafts, sampled tokens included.
    ///
    /// Afterwards the logits are those behind the last token that stays.
    fn judge(
        &mut self,
        engine: &mut Engine,
        rows: usize,
        stops: &[u32],
        sampler: &mut Sampler,
    ) -> Result<Judged, GenerateError> {
        let (ctx, _) = engine.split();
        let vocab = ctx.model.spec.vocab;
        for first in (0..rows).step_by(LOGIT_ROWS) {
            let block = logits(ctx, &mut self.workspace, first..rows.min(first + LOGIT_ROWS));
            for (row, logits) in (first..).zip(block.chunks_exact(vocab)) {
                self.logits.clear();
                self.logits.extend_from_slice(logits);
                // Behind the last draft the loop chooses.
                let Some(draft) = self.drafts.get(row) else { break };
                let token = sampler.pick(logits)?;
                if token != *draft {
                    return Ok(Judged { accepted: row, stopped: false, chosen: Some(token) });
                }
                if stops.contains(draft) {
                    return Ok(Judged { accepted: row + 1, stopped: true, chosen: None });
                }
            }
        }
        Ok(Judged { accepted: self.drafts.len(), stopped: false, chosen: None })
    }

    /// Of the last pass over `rows` tokens, keeps the first ones: `tokens`.
    pub(super) fn keep(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        rows: usize,
    ) -> Result<(), GenerateError> {
        let len = self.kv.len() - rows + tokens.len();
        self.kv.truncate(len);
        let (ctx, _) = engine.split();
        if let Err(error) = mtp::absorb(ctx, &mut self.kv, tokens, &mut self.workspace) {
            // As if the pass had failed.
            self.kv.truncate(len - tokens.len());
            return Err(error.into());
        }
        self.pending = None;
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }
}
