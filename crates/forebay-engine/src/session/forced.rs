//! Drafts that are certain: what a constraint forces comes first, and what may follow it behind.

use std::time::Instant;

use forebay_core::CancelToken;

use super::{PassStats, Session};
use crate::choose::Chooser;
use crate::draft::{Choice, DraftStats, MAX_DEPTH, Observed};
use crate::engine::Engine;

/// Most forced tokens of a pass: from some number on, more rows bring no more speed.
const MOST_FORCED: usize = 24;

/// What is drafted for a pass.
pub(crate) struct Proposed {
    seen: Observed,
    /// So many drafts, from the first one on, are forced.
    forced: usize,
}

impl Session {
    /// Drafts what may follow `next`, of which at most `left` tokens are wanted: what is forced, and behind it what the
    /// model's own drafts are, as deep as without, if there is to be any `drafting`. What is not allowed is not verified.
    pub(crate) fn propose_within(
        &mut self,
        engine: &mut Engine,
        next: u32,
        left: usize,
        chooser: &mut Chooser<'_>,
        drafting: bool,
        cancel: &CancelToken,
    ) -> Proposed {
        let room = (self.kv.capacity() - self.kv.len()).saturating_sub(2).min(left);
        let rows = engine.plan().chunk.saturating_sub(1);
        let mut forced = Vec::new();
        // A constraint that cannot say what is forced, or what it agrees with, forces nothing and agrees with nothing: if it
        // cannot say what may come next either, the choice of that finds out.
        if chooser.forced(room.min(rows).min(MOST_FORCED), &mut forced).is_err() {
            forced.clear();
        }
        let mut seen = if forced.is_empty() {
            self.propose(engine, next, left, drafting, cancel)
        } else {
            self.propose_behind(engine, next, &forced, room, drafting, cancel)
        };
        if chooser.cut(&mut self.drafts).is_err() {
            self.drafts.clear();
        }
        seen.verified = self.drafts.len();
        Proposed { seen, forced: forced.len().min(self.drafts.len()) }
    }

    /// The forced tokens, and what may follow them: together as many as are drafted without them, if those are more.
    fn propose_behind(
        &mut self,
        engine: &mut Engine,
        next: u32,
        forced: &[u32],
        room: usize,
        drafting: bool,
        cancel: &CancelToken,
    ) -> Observed {
        let started = Instant::now();
        let choice = self.choose_drafts(engine, next, forced, MAX_DEPTH, drafting);
        let depth = choice.depth.min(room).saturating_sub(forced.len());
        let choice = Choice { depth, ..choice };
        let drafted = self.draft_behind(engine, next, forced, choice, cancel).len();
        self.drafts.splice(..0, forced.iter().copied());
        Observed { source: choice.source, drafted, drafting: started.elapsed(), ..Observed::default() }
    }
}

impl Proposed {
    /// Counts what became of the drafts, of which `accepted` were right, and tells the controller, unless the pass was not
    /// for this sequence `alone`. It is not told of passes with forced tokens: what they cost and bring says nothing
    /// about the model's drafts.
    pub(crate) fn count(
        mut self,
        engine: &mut Engine,
        accepted: usize,
        pass: &PassStats,
        alone: bool,
        drafts: &mut DraftStats,
    ) {
        let waited = pass.phases[forebay_model::Phase::ExpertWait as usize];
        let right = accepted.min(self.forced);
        self.seen.accepted = accepted - right;
        (self.seen.pass, self.seen.waited) = (pass.time, waited);
        if alone && self.forced == 0 {
            engine.drafting.observe(&self.seen);
        }
        self.seen.verified -= self.forced;
        drafts.forced += self.forced as u64;
        drafts.forced_accepted += right as u64;
        drafts.add(&self.seen);
    }
}
