//! Drafting and verifying: what a session guesses at, and what of it stays (docs/drafting.md).

use std::borrow::Cow;
use std::ops::{ControlFlow, Range};
use std::time::{Duration, Instant};

use forebay_core::CancelToken;
use forebay_model::workspace::LOGIT_ROWS;
use forebay_model::{Trace, logits, mtp};

use super::{Event, GenerateError, PassStats, Session, Token, pass_starts, pass_stats};
use crate::choose::{Choice, Chooser};
use crate::draft::{Choice as Draft, Drafting, MAX_DEPTH, Match, Observed, Offers, Source, look_up};
use crate::engine::Engine;

/// What was chosen behind the rows of a pass.
struct Judged {
    /// The drafts that are what was chosen, from the first one on.
    right: Vec<Token>,
    /// What was chosen behind them, or why nothing can be; `None` behind the last draft, where nothing was asked yet.
    behind: Option<Chosen>,
}

/// What was chosen behind a row, or why nothing can be.
pub(crate) type Chosen = Result<Choice, GenerateError>;

/// What a verifying pass brought.
pub(super) struct Verified {
    /// Drafts that belong to the answer.
    pub(super) emitted: usize,
    /// Drafts that the model agreed with: one more, if the last one ends the answer.
    pub(super) accepted: usize,
    /// What comes behind them, or why nothing can; `None` if nothing was asked yet.
    pub(super) chosen: Option<Chosen>,
    /// Whether the caller ended the answer.
    pub(super) ended: bool,
    pub(super) pass: PassStats,
}

impl Session {
    /// Takes the last token back, to be run again, if drafting needs its hidden state and that is gone.
    /// `next` comes next, unless a token is pending.
    pub(crate) fn hidden_again(&mut self, engine: &mut Engine, next: u32) {
        if self.behind.take() != Some(self.pending.unwrap_or(next)) {
            self.kv.another_token_comes();
        }
        if engine.has_mtp() && !mtp::is_carried(&self.kv) {
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
        drafting: bool,
        cancel: &CancelToken,
    ) -> Observed {
        let started = Instant::now();
        let room = (self.kv.capacity() - self.kv.len()).saturating_sub(2);
        let choice = self.choose_drafts(engine, next, &[], left.min(room), drafting);
        let drafted = self.draft_behind(engine, next, &[], choice, cancel).len();
        Observed {
            source: choice.source,
            drafted,
            verified: drafted,
            drafting: started.elapsed(),
            ..Observed::default()
        }
    }

    /// What may follow `next` behind the tokens in the cache: up to `depth` tokens, none if nothing can be said. A
    /// cancellation cuts it short, and so does an expert that cannot be read.
    pub fn draft(&mut self, engine: &mut Engine, next: u32, depth: usize, cancel: &CancelToken) -> &[u32] {
        let choice = self.offers(engine, next, &[], depth).first(depth);
        self.draft_behind(engine, next, &[], choice, cancel)
    }

    /// What could be drafted behind `next` and `given`, `most` tokens at most.
    fn offers(&self, engine: &Engine, next: u32, given: &[u32], most: usize) -> Offers {
        if self.foretold.is_some() {
            return Offers::model(most);
        }
        let (said, last) = behind(&self.tokens, next, given);
        let text = Match::find(&said, last).map(|found| (found.repeated, found.len.min(most)));
        Offers { model: if engine.has_mtp() { most } else { 0 }, text }
    }

    /// What to draft behind `next` and `given` as the engine was told to, of which at most `most` tokens can be verified;
    /// nothing unless `drafting`.
    pub(super) fn choose_drafts(
        &self,
        engine: &Engine,
        next: u32,
        given: &[u32],
        most: usize,
        drafting: bool,
    ) -> Draft {
        match engine.options().drafting {
            // What cannot be verified need not be drafted.
            Drafting::Depth(depth) if drafting => {
                self.offers(engine, next, given, most.min(MAX_DEPTH)).first(depth)
            }
            Drafting::Auto if drafting => engine.drafting.choose(&self.offers(engine, next, given, most)),
            _ => Draft::default(),
        }
    }

    /// Drafts `choice` behind `next` and `given`, which is known to come behind it. Whatever goes wrong leaves fewer drafts:
    /// the answer needs none, and a fault that concerns it is found by the pass to come.
    pub(super) fn draft_behind(
        &mut self,
        engine: &mut Engine,
        next: u32,
        given: &[u32],
        Draft { source, depth }: Draft,
        cancel: &CancelToken,
    ) -> &[u32] {
        self.drafts.clear();
        if depth == 0 {
            return &self.drafts;
        }
        if let Some(foretold) = &mut self.foretold {
            foretold.draft(self.tokens.len() + given.len(), depth, &mut self.drafts);
            return &self.drafts;
        }
        if let Source::Text(_) = source {
            let (said, last) = behind(&self.tokens, next, given);
            look_up(&said, last, depth, &mut self.drafts);
            return &self.drafts;
        }
        let room = self.kv.len()..self.kv.len() + given.len() + depth;
        if engine.prefixes.make_room(&mut self.kv, room).is_ok() {
            let (ctx, store, ws) = engine.split();
            _ = mtp::draft(ctx, store, &mut self.kv, next, given, depth, cancel, ws, &mut self.drafts);
        }
        &self.drafts
    }

    /// One pass over `next` and the drafts; what of it is right is in the cache afterwards, as far as the caller did not
    /// end the answer. `None` if it was cancelled.
    pub(super) fn verify(
        &mut self,
        engine: &mut Engine,
        next: u32,
        chooser: &mut Chooser<'_>,
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Option<Verified>, GenerateError> {
        let mut start = pass_starts(engine);
        let tokens: Vec<u32> = std::iter::once(next).chain(self.drafts.iter().copied()).collect();
        if !self.pass(engine, &tokens, self.drafts.len(), cancel, trace, &mut |_, _| ())? {
            return Ok(None);
        }
        let Judged { right, behind } = self.judge(engine, tokens.len(), chooser);
        let known = behind.as_ref().and_then(|behind| behind.as_ref().ok());
        let accepted = self.accepted(right.len(), known);
        // What the caller does with the tokens is no part of the pass.
        let mut asked = Duration::ZERO;
        let mut tell = |token| {
            let since = Instant::now();
            let told = on_event(Event::Token(token));
            asked += since.elapsed();
            told
        };
        let (emitted, ended) = self.take_in(engine, &tokens, 0..tokens.len(), right, &mut tell)?;
        start.started += asked;
        let chosen = if ended { None } else { behind };
        if ended {
            let (ctx, _, ws) = engine.split();
            logits(ctx, ws, emitted..emitted + 1).clone_into(&mut self.logits);
        }
        let pass = pass_stats(engine, tokens.len(), &start);
        Ok(Some(Verified { emitted, accepted, chosen, ended, pass }))
    }

    /// Chooses a token behind every row of the last pass over `rows` tokens, as long as the draft that comes next is
    /// that token: so what is generated is what would be without drafts, sampled tokens included.
    ///
    /// Afterwards the logits are those behind the last draft that is right.
    fn judge(&mut self, engine: &mut Engine, rows: usize, chooser: &mut Chooser<'_>) -> Judged {
        let (ctx, _, ws) = engine.split();
        let vocab = ctx.model.spec.vocab;
        let (mut right, mut behind) = (Vec::new(), None);
        'rows: for first in (0..rows).step_by(LOGIT_ROWS) {
            let block = logits(ctx, ws, first..rows.min(first + LOGIT_ROWS));
            for (row, logits) in (first..).zip(block.chunks_exact(vocab)) {
                if let Some(known) = self.judge_row(row, logits, chooser, &mut right) {
                    logits.clone_into(&mut self.logits);
                    behind = known;
                    break 'rows;
                }
            }
        }
        Judged { right, behind }
    }

    /// Judges the draft behind row `row` of a pass of this sequence, by the logits of that row: `None` if it is right, and
    /// is added to `right`. Else what comes behind the row, as far as it is known, and no later row counts.
    pub(crate) fn judge_row(
        &self,
        row: usize,
        logits: &[f32],
        chooser: &mut Chooser<'_>,
        right: &mut Vec<Token>,
    ) -> Option<Option<Chosen>> {
        let draft = self.drafts.get(row).copied();
        judge_row(draft, logits, &mut |row| chooser.choose(row), right)
    }

    /// How many drafts the model agreed with, of which `right` are part of the answer: one more where the choice `behind`
    /// them ends the answer, and was drafted. A stop token ends the answer without being part of it.
    pub(crate) fn accepted(&self, right: usize, behind: Option<&Choice>) -> usize {
        let stopped = matches!(behind, Some(Choice::End(Some(stop))) if self.drafts.get(right) == Some(stop));
        right + usize::from(stopped)
    }

    /// Hands out the drafts that are `right` until the caller has enough, and keeps as much of the last pass over `tokens`,
    /// which had the rows `rows`: how many were handed out, and whether that ended the answer.
    pub(crate) fn take_in(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        rows: Range<usize>,
        right: Vec<Token>,
        tell: &mut dyn FnMut(Token) -> ControlFlow<()>,
    ) -> Result<(usize, bool), GenerateError> {
        let (mut emitted, mut ended) = (0, false);
        for token in right {
            emitted += 1;
            ended = tell(token).is_break();
            if ended {
                break;
            }
        }
        self.keep(engine, &tokens[..1 + emitted], rows)?;
        Ok((emitted, ended))
    }

    /// Of its rows `rows` of the last pass, keeps the first ones: `tokens`.
    pub(crate) fn keep(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        rows: Range<usize>,
    ) -> Result<(), GenerateError> {
        let len = self.kv.len() - rows.len() + tokens.len();
        self.kv.truncate(len);
        let (ctx, _, ws) = engine.split();
        ws.accept(rows.start..rows.start + tokens.len());
        if let Err(error) = mtp::absorb(ctx, &mut self.kv, tokens, rows.start, ws) {
            // As if the pass had failed.
            self.kv.truncate(len - tokens.len());
            return Err(error.into());
        }
        self.pending = None;
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }
}

/// Judges `draft`, which follows a row of logits: `None` if it is right, and is added to `right`. Else the row is the
/// last one, and what comes behind it is returned, as far as it is known: behind the last draft the loop chooses.
fn judge_row(
    draft: Option<u32>,
    logits: &[f32],
    choose: &mut dyn FnMut(&[f32]) -> Result<Choice, GenerateError>,
    right: &mut Vec<Token>,
) -> Option<Option<Chosen>> {
    match draft.map(|_| choose(logits)) {
        Some(Ok(Choice::Token(token))) if Some(token.id) == draft => {
            right.push(token);
            None
        }
        chosen => Some(chosen),
    }
}

/// The tokens up to the last of `given`, which come behind `tokens` and `next`, and that last one.
fn behind<'a>(tokens: &'a [u32], next: u32, given: &[u32]) -> (Cow<'a, [u32]>, u32) {
    match given.split_last() {
        None => (tokens.into(), next),
        Some((last, between)) => ([tokens, &[next], between].concat().into(), *last),
    }
}

#[cfg(test)]
mod tests;
