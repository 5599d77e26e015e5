//! A job that runs: its sequence, from the first row of its prompt to the last token of its answer.
//!
//! What a session does in passes of its own ([`Session::generate`]) is done here in pieces, between passes that several
//! sequences share: the same tokens come out.

use std::any::Any;
use std::ops::{ControlFlow, Range};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use forebay_core::{CancelToken, Constraint, ConstraintError, Ending, TokenSet};
use forebay_model::kv::{BLOCK, SPARE_BLOCKS};
use forebay_model::{ForwardError, Part};
use forebay_tiers::Counters;

use super::compose::Wish;
use super::job::{Events, Forecast, JobEvent, JobId, Priority};
use super::queue::Waiting;
use super::rates::Rates;
use super::watch::RunJob;
use crate::choose::{Choice, Chooser};
use crate::engine::Engine;
use crate::session::{Finish, GenerateError, Outcome, PassStats, Proposed, Session, Stats, Token};

/// Blocks that must be free beside those that a sequence has to run again: else it would soon have to give them up.
const ROOM_TO_RESUME: usize = 4;

/// A prompt that begins as another one does, which is run, waits for it if they have so many tokens in common.
const WORTH_WAITING: usize = 64;

/// A job that runs.
pub(super) struct Sequence {
    pub id: JobId,
    pub events: Events,
    pub cancel: CancelToken,
    /// Tokens of its prompt that were known.
    pub reused: usize,
    /// KV blocks that it is expected to need.
    blocks: usize,
    batch: bool,
    forecast: Forecast,
    session: Session,
    chooser: Chooser<'static>,
    /// Its prompt, and how much of that is in the cache.
    prompt: Vec<u32>,
    done: usize,
    /// Whether its cache holds anything, or all that is known of it.
    begun: bool,
    /// Whether it was told that its turn has come.
    told: bool,
    /// Positions of its prompt that were known when it began, or were computed since. What is run again counts once.
    counted: usize,
    /// What comes next once a prompt is run again that gave its blocks up.
    resumes_with: Option<u32>,
    /// Whether it gave its blocks up and waits for others.
    paused: bool,
    /// What comes next, once the prompt is done.
    next: Option<u32>,
    max_tokens: usize,
    /// The tokens of the pass to come, or in progress, and what was drafted of them.
    tokens: Vec<u32>,
    proposed: Option<Proposed>,
    judged: Judged,
    /// The pass in which it last had rows.
    last: u64,
    stats: Stats,
    began: Began,
}

/// What there was when it began.
struct Began {
    at: Instant,
    experts: Counters,
    /// As it was when its prompt was done.
    prefilled: Counters,
    disk: Duration,
}

/// What was chosen behind the rows of a pass so far.
#[derive(Default)]
struct Judged {
    /// Drafts that are what was chosen.
    right: Vec<Token>,
    /// Whether the row behind them has been looked at: no later one counts.
    complete: bool,
    /// What comes behind them, unless nothing more is wanted.
    behind: Option<Result<Choice, GenerateError>>,
}

/// Whether a sequence goes on.
pub(super) type Next = Result<ControlFlow<Finish>, GenerateError>;

/// The rows of a pass that a sequence has, and what it does with them.
pub(super) struct Work<'s> {
    pub part: Part<'s>,
    pub teller: Teller<'s>,
}

/// Tells what happens to a sequence while a pass is in progress.
pub(super) struct Teller<'s> {
    events: &'s mut Events,
    cancel: &'s CancelToken,
    stats: &'s Stats,
    began: &'s Began,
    /// Tokens of the prompt before the pass, in it, and in all; none in it if it generates.
    prompt: (usize, usize, usize),
}

impl Sequence {
    /// Takes a job on; it has a place from now on, and KV blocks.
    pub fn new(engine: &Engine, job: Waiting, blocks: usize) -> Result<Self, (Events, GenerateError)> {
        let Waiting { id, prompt, max_tokens, sampling, stops, constraint, priority, cancel, events, .. } =
            job;
        let vocab = engine.spec().vocab;
        let constraint =
            constraint.map(|inner| Box::new(Guarded { inner, broken: None }) as Box<dyn Constraint>);
        let chooser = match Chooser::new(&sampling, constraint, stops, vocab, prompt.iter().copied()) {
            Ok(chooser) => chooser,
            Err(error) => return Err((events, error)),
        };
        let experts = engine.counters();
        let began = Began { at: Instant::now(), experts, prefilled: experts, disk: engine.store.disk_time() };
        Ok(Self {
            id,
            events,
            cancel,
            reused: 0,
            blocks,
            batch: priority == Priority::Batch,
            forecast: Forecast::default(),
            session: Session::new(engine),
            chooser,
            prompt,
            begun: false,
            told: false,
            counted: 0,
            resumes_with: None,
            paused: false,
            done: 0,
            next: None,
            // No answer has more tokens than the context, so that without a limit it is the context that ends it.
            max_tokens: max_tokens.unwrap_or(engine.plan().context + 1),
            tokens: Vec::new(),
            proposed: None,
            judged: Judged::default(),
            last: 0,
            stats: Stats::default(),
            began,
        })
    }

    /// Whether it is better to wait until `other`, which came before, has run its prompt: they begin alike, and what the
    /// other one computes need not be computed twice.
    pub fn waits_for(&self, other: &Self) -> bool {
        let common = || self.prompt.iter().zip(&other.prompt).take_while(|(a, b)| a == b).count();
        // Whoever gives way to others holds nobody up.
        !self.begun
            && !other.paused
            && other.next.is_none()
            && (self.batch || !other.batch)
            && common() >= WORTH_WAITING
    }

    /// Takes over what is known of its prompt.
    fn begin(&mut self, engine: &mut Engine, rates: &Rates) -> Result<(), GenerateError> {
        self.begun = true;
        let first = !std::mem::replace(&mut self.told, true);
        if first {
            self.began.at = Instant::now();
            self.began.experts = engine.counters();
        }
        let reused = self.session.start_from(engine, &self.prompt)?.tokens;
        self.session.hidden_again(engine, self.prompt[reused]);
        // The last one of those may have to be run again.
        self.session.pending = None;
        self.done = self.session.tokens().len();
        if first {
            self.reused = reused;
            self.counted = self.done;
            self.forecast = rates.forecast(self.prompt.len() - self.done, Some(Duration::ZERO));
            _ = self.tell(JobEvent::Started { reused, forecast: self.forecast });
        }
        Ok(())
    }

    /// Gives its KV blocks up, for others: what it had is run again when there are blocks for it.
    pub fn pause(&mut self, engine: &mut Engine) {
        self.session.enter(engine);
        if let Some(next) = self.next.take() {
            self.prompt = self.session.tokens().to_vec();
            self.counted = self.prompt.len();
            self.resumes_with = Some(next);
        }
        self.session = Session::new(engine);
        (self.begun, self.paused, self.done) = (false, true, 0);
        self.tokens.clear();
    }

    /// Goes on where it gave its blocks up.
    pub fn resume(&mut self) {
        self.paused = false;
    }

    /// Whether it gave its blocks up and waits for others.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Whether it gives way to all that are not so.
    pub fn is_batch(&self) -> bool {
        self.batch
    }

    /// Whether it has KV blocks to give up.
    pub fn has_blocks(&self) -> bool {
        self.begun
    }

    /// KV blocks that it has, and is expected to need before it ends, or for some time.
    pub fn blocks(&self) -> usize {
        let has = self.session.kv.len().max(self.prompt.len());
        self.blocks.max(has.div_ceil(BLOCK) + SPARE_BLOCKS + usize::from(self.paused) * ROOM_TO_RESUME)
    }

    /// What it could run.
    pub fn wish(&self) -> Wish {
        Wish { prompt: self.prompt.len() - self.done, batch: self.batch, last: self.last }
    }

    /// How it stands, for those who watch.
    pub fn state(&self) -> RunJob {
        RunJob {
            reused: self.reused,
            forecast: self.forecast,
            prompt: self.prompt.len(),
            done: self.done,
            rows: self.prompt_rows(),
            new_tokens: self.stats.new_tokens,
            prefill: self.stats.prefill,
            first_token: self.stats.first_token,
        }
    }

    /// Tokens of its answer.
    pub fn new_tokens(&self) -> usize {
        self.stats.new_tokens
    }

    /// Whether it has rows in the pass that is composed.
    pub fn takes_part(&self) -> bool {
        !self.tokens.is_empty()
    }

    /// Rows of its prompt in the pass that is composed.
    pub fn prompt_rows(&self) -> usize {
        if self.next.is_none() { self.tokens.len() } else { 0 }
    }

    /// Of the next rows of its prompt, how many are not run again.
    fn fresh(&self, rows: usize) -> usize {
        (self.done + rows).saturating_sub(self.counted.max(self.done))
    }

    /// Decides on the tokens of the next pass, of which there may be `rows`; with drafts, if there is to be any
    /// `drafting`.
    pub fn prepare(
        &mut self,
        engine: &mut Engine,
        rows: usize,
        drafting: bool,
        pass: u64,
        rates: &Rates,
    ) -> Result<(), GenerateError> {
        self.tokens.clear();
        self.proposed = None;
        self.session.drafts.clear();
        self.judged = Judged::default();
        if rows == 0 {
            return Ok(());
        }
        self.last = pass;
        if !self.begun {
            self.begin(engine, rates)?;
        }
        match self.next {
            None => {
                let rows = rows.min(self.prompt.len() - self.done);
                self.tokens.extend_from_slice(&self.prompt[self.done..self.done + rows]);
            }
            Some(next) => {
                let left = (self.max_tokens - self.stats.new_tokens).min(rows - 1);
                let (chooser, cancel) = (&mut self.chooser, &self.cancel);
                self.proposed =
                    Some(self.session.propose_within(engine, next, left, chooser, drafting, cancel));
                self.tokens.push(next);
                self.tokens.extend_from_slice(&self.session.drafts);
            }
        }
        let room = self.session.kv.len()..self.session.kv.len() + self.tokens.len();
        engine.prefixes.make_room(&mut self.session.kv, room).map_err(ForwardError::from)?;
        Ok(())
    }

    /// Its part of the pass, and who tells what happens to it.
    pub fn work(&mut self) -> Work<'_> {
        // What was known of its prompt does not count, nor what is run again.
        let rows = self.fresh(self.prompt_rows());
        let total = self.stats.prompt_tokens + self.prompt.len() - self.done.max(self.counted);
        Work {
            part: Part::new(&mut self.session.kv, &self.tokens, &self.cancel)
                .with_drafts(self.session.drafts.len()),
            teller: Teller {
                events: &mut self.events,
                cancel: &self.cancel,
                stats: &self.stats,
                began: &self.began,
                prompt: (self.stats.prompt_tokens, rows, total),
            },
        }
    }

    /// Which of its rows it wants logits of: the last one of its prompt, or all behind which something was drafted, and
    /// one more.
    pub fn logit_rows(&self) -> Range<usize> {
        match self.next {
            Some(_) => 0..self.tokens.len(),
            None if self.resumes_with.is_some() => 0..0,
            None if self.done + self.tokens.len() == self.prompt.len() => {
                self.tokens.len() - 1..self.tokens.len()
            }
            None => 0..0,
        }
    }

    /// Whether a row's logits still matter.
    pub fn wants_logits(&self) -> bool {
        !self.judged.complete
    }

    /// Looks at the logits of one of its rows, in their order.
    pub fn judge(&mut self, row: usize, logits: &[f32]) {
        // The row of a prompt stands for the first one: no draft is behind it.
        let row = if self.next.is_some() { row } else { 0 };
        let Judged { right, complete, behind } = &mut self.judged;
        let Some(known) = self.session.judge_row(row, logits, &mut self.chooser, right) else { return };
        *complete = true;
        // Chosen here, so that no sequence has to keep its logits.
        let wanted = self.stats.new_tokens + right.len() < self.max_tokens;
        *behind = known.or_else(|| wanted.then(|| self.chooser.choose(logits)));
    }

    /// The pass is over, and these were its rows; tells what came of it.
    pub fn after(&mut self, engine: &mut Engine, rows: Range<usize>, pass: &PassStats, alone: bool) -> Next {
        let tokens = std::mem::take(&mut self.tokens);
        let Judged { right, behind, .. } = std::mem::take(&mut self.judged);
        match self.next.take() {
            None => {
                self.session.keep(engine, &tokens, rows)?;
                let fresh = self.fresh(tokens.len());
                self.stats.prompt_tokens += fresh;
                self.stats.rerun_tokens += tokens.len() - fresh;
                self.done += tokens.len();
                self.counted = self.counted.max(self.done);
                if self.resumes_with.is_none() {
                    self.stats.prefill = self.began.at.elapsed();
                }
                if self.done < self.prompt.len() {
                    return Ok(ControlFlow::Continue(()));
                }
                if let Some(next) = self.resumes_with.take() {
                    self.next = Some(next);
                    return Ok(ControlFlow::Continue(()));
                }
                self.began.prefilled = engine.counters();
                self.began.disk = engine.store.disk_time();
                self.session.enter(engine);
            }
            Some(_) => {
                let known = behind.as_ref().and_then(|behind| behind.as_ref().ok());
                let accepted = self.session.accepted(right.len(), known);
                let (events, cancel) = (&mut self.events, &self.cancel);
                let mut tell_token = |token| tell(events, cancel, JobEvent::Token(token));
                let (emitted, ended) = self.session.take_in(engine, &tokens, rows, right, &mut tell_token)?;
                self.stats.decode_passes += 1;
                self.stats.new_tokens += emitted;
                if let Some(proposed) = self.proposed.take() {
                    proposed.count(engine, accepted, pass, alone, &mut self.stats.drafts);
                }
                self.stats.decode_experts = engine.counters().since(&self.began.prefilled);
                self.stats.decode_disk = engine.store.disk_time().saturating_sub(self.began.disk);
                if ended {
                    return Ok(ControlFlow::Break(Finish::Ended));
                }
            }
        }
        let Self { session, chooser, stats, max_tokens, began, events, cancel, .. } = self;
        let mut tell_token = |token| tell(events, cancel, JobEvent::Token(token));
        let chosen = behind.transpose()?;
        match session.go_on(chosen, chooser, stats, *max_tokens, began.at, &mut tell_token)? {
            ControlFlow::Continue(next) => {
                self.next = Some(next);
                Ok(ControlFlow::Continue(()))
            }
            ControlFlow::Break(finish) => Ok(ControlFlow::Break(finish)),
        }
    }

    fn tell(&mut self, event: JobEvent) -> ControlFlow<()> {
        tell(&mut self.events, &self.cancel, event)
    }

    /// What it cost so far.
    pub fn outcome(&self, engine: &Engine, finish: Finish) -> Outcome {
        let mut stats = Stats { experts: engine.counters().since(&self.began.experts), ..self.stats };
        stats.decode = self.began.at.elapsed().saturating_sub(stats.prefill);
        stats.non_finite_logits = self.chooser.non_finite();
        Outcome { finish, stats }
    }

    /// Leaves what was computed to others.
    pub fn leave(&self, engine: &mut Engine) {
        self.session.enter(engine);
    }

    /// What its cache holds.
    pub fn tokens(&self) -> &[u32] {
        self.session.tokens()
    }
}

impl Teller<'_> {
    /// So many layers of so many are done, and so many bytes were read since the store was opened.
    pub fn layers_done(&mut self, done: usize, layers: usize, bytes: u64) {
        let (before, rows, total) = self.prompt;
        if rows == 0 || self.cancel.is_cancelled() {
            return;
        }
        // A long pass takes minutes: what its layers have done counts as tokens.
        let share = (before * layers + rows * done) as f64 / (total * layers) as f64;
        let left = self.began.at.elapsed().mul_f64((1.0 - share) / share);
        let read = bytes.saturating_sub(self.began.experts.step_bytes());
        let event = JobEvent::Prefill {
            done: before + rows * done / layers,
            total,
            read: Some(read),
            left: Some(left),
        };
        _ = tell(self.events, self.cancel, event);
    }

    /// It has no rows in the pass: whoever cancelled it need not wait for the pass to end.
    pub fn look_for_cancellation(&mut self) {
        if self.cancel.is_cancelled() {
            self.left(&ForwardError::Cancelled);
        }
    }

    /// It left the pass: whoever cancelled it need not wait for the pass to end.
    pub fn left(&mut self, error: &ForwardError) {
        if let ForwardError::Cancelled = error {
            let mut stats = *self.stats;
            stats.decode = self.began.at.elapsed().saturating_sub(stats.prefill);
            self.events.done(Outcome { finish: Finish::Cancelled, stats });
        }
    }
}

/// Tells an event; a listener that panics hears nothing more, and its job is over.
fn tell(events: &mut Events, cancel: &CancelToken, event: JobEvent) -> ControlFlow<()> {
    events.tell(event).unwrap_or_else(|| {
        cancel.cancel();
        ControlFlow::Break(())
    })
}

/// A constraint whose panics are errors of its own job; after one it is not asked again.
struct Guarded {
    inner: Box<dyn Constraint + Send>,
    broken: Option<String>,
}

impl Guarded {
    fn ask<T>(
        &mut self,
        ask: impl FnOnce(&mut (dyn Constraint + Send)) -> Result<T, ConstraintError>,
    ) -> Result<T, ConstraintError> {
        if self.broken.is_none() {
            match catch_unwind(AssertUnwindSafe(|| ask(&mut *self.inner))) {
                Ok(answer) => return answer,
                Err(panic) => self.broken = Some(reason(panic.as_ref())),
            }
        }
        Err(ConstraintError::Broken { reason: self.broken.clone().unwrap_or_default() })
    }
}

impl Constraint for Guarded {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        self.ask(|inner| inner.ending())
    }

    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError> {
        self.ask(|inner| inner.allowed(set))
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        self.ask(|inner| inner.accept(token))
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        self.ask(|inner| inner.forced(tokens))
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        self.ask(|inner| inner.agrees(tokens))
    }
}

/// What a panic said.
pub(super) fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no reason given").to_owned()
}
