//! Drafts that are certain: what a constraint forces comes first, and what may follow it behind.

use std::time::Instant;

use forebay_core::CancelToken;

use super::drafts::Verified;
use super::{GenerateError, Session};
use crate::choose::Chooser;
use crate::draft::{Choice, DraftStats, MAX_DEPTH, Observed};
use crate::engine::Engine;

/// Most forced tokens of a pass: from some number on, more rows bring no more speed.
const MOST_FORCED: usize = 24;

/// What is drafted for a pass.
pub(super) struct Proposed {
    seen: Observed,
    /// So many drafts, from the first one on, are forced.
    forced: usize,
}

impl Session {
    /// Drafts what may follow `next`, of which at most `left` tokens are wanted: what is forced, and behind it what the
    /// model's own drafts are, as deep as without. What is not allowed is not verified.
    pub(super) fn propose_within(
        &mut self,
        engine: &mut Engine,
        next: u32,
        left: usize,
        chooser: &mut Chooser<'_, '_>,
        cancel: &CancelToken,
    ) -> Result<Proposed, GenerateError> {
        let room = (self.kv.capacity() - self.kv.len()).saturating_sub(2).min(left);
        let rows = engine.plan().chunk.saturating_sub(1);
        let mut forced = Vec::new();
        chooser.forced(room.min(rows).min(MOST_FORCED), &mut forced)?;
        let mut seen = if forced.is_empty() {
            self.propose(engine, next, left, cancel)?
        } else {
            self.propose_behind(engine, next, &forced, room, cancel)?
        };
        chooser.cut(&mut self.drafts)?;
        seen.verified = self.drafts.len();
        Ok(Proposed { seen, forced: forced.len().min(self.drafts.len()) })
    }

    /// The forced tokens, and what may follow them: together as many as are drafted without them, if those are more.
    fn propose_behind(
        &mut self,
        engine: &mut Engine,
        next: u32,
        forced: &[u32],
        room: usize,
        cancel: &CancelToken,
    ) -> Result<Observed, GenerateError> {
        let started = Instant::now();
        let choice = self.choose_drafts(engine, next, forced, MAX_DEPTH);
        let depth = choice.depth.min(room).saturating_sub(forced.len());
        let choice = Choice { depth, ..choice };
        let drafted = self.draft_behind(engine, next, forced, choice, cancel)?.len();
        self.drafts.splice(..0, forced.iter().copied());
        Ok(Observed { source: choice.source, drafted, drafting: started.elapsed(), ..Observed::default() })
    }
}

impl Proposed {
    /// Counts what became of the drafts, and tells the controller. It is not told of passes with forced tokens: what
    /// they cost and bring says nothing about the model's drafts.
    pub(super) fn count(mut self, engine: &mut Engine, verified: &Verified, drafts: &mut DraftStats) {
        let waited = verified.pass.phases[forebay_model::Phase::ExpertWait as usize];
        let right = verified.accepted.min(self.forced);
        self.seen.accepted = verified.accepted - right;
        (self.seen.pass, self.seen.waited) = (verified.pass.time, waited);
        if self.forced == 0 {
            engine.drafting.observe(&self.seen);
        }
        self.seen.verified -= self.forced;
        drafts.forced += self.forced as u64;
        drafts.forced_accepted += right as u64;
        drafts.add(&self.seen);
    }
}
