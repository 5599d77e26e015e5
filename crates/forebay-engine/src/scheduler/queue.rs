//! What waits, in which order, and what is counted.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use forebay_core::{CancelToken, Constraint};
use forebay_model::kv::{BLOCK, SPARE_BLOCKS};
use forebay_tiers::{Counters, ExpertStore};

use super::job::{Events, JobError, JobId, Priority, Refused};
use super::rates::Rates;
use super::watch::{EndedJob, JobState, RECENT, RunJob, SeenPass};
use crate::draft::DraftStats;
use crate::engine::Engine;
use crate::sample::Sampling;
use crate::session::{Finish, Outcome, PassStats};

/// Tokens of an answer that KV blocks are kept for. Longer ones take what is there, and may have to wait for others.
const USUAL_ANSWER: usize = 1024;

/// A job whose turn has not come.
pub(super) struct Waiting {
    pub id: JobId,
    pub prompt: Vec<u32>,
    pub max_tokens: Option<usize>,
    pub sampling: Sampling,
    pub stops: Vec<u32>,
    pub constraint: Option<Box<dyn Constraint + Send>>,
    pub priority: Priority,
    pub cancel: CancelToken,
    pub events: Events,
    /// When it was taken on.
    pub since: Instant,
    /// Tokens of its prompt that were probably to be computed then.
    pub unknown: usize,
}

/// A job that runs.
struct Running {
    id: JobId,
    cancel: CancelToken,
    since: Instant,
    /// How long it takes in all, by what was measured.
    expected: Option<Duration>,
    batch: bool,
    /// KV blocks that it is expected to need.
    blocks: usize,
    prompt: usize,
    max_tokens: Option<usize>,
    waited: Duration,
    /// As of the pass that runs.
    state: RunJob,
}

/// Whether jobs are taken on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    /// They are.
    Ready,
    /// Not any more: the program is ending.
    Draining,
    /// Never again: the engine has failed.
    Failed {
        /// What happened.
        reason: String,
    },
}

/// What was done since the start, in numbers that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Totals {
    /// Jobs taken on.
    pub submitted: u64,
    /// Jobs not taken on because too many waited.
    pub refused: u64,
    /// Jobs that were answered.
    pub completed: u64,
    /// Jobs that were cancelled, waiting or running.
    pub cancelled: u64,
    /// Jobs that failed.
    pub failed: u64,
    /// Tokens of prompts that were computed.
    pub prompt_tokens: u64,
    /// Tokens of prompts that were known.
    pub reused_tokens: u64,
    /// Tokens that were run again, because the KV blocks that held them had been given up for others.
    pub rerun_tokens: u64,
    /// Tokens of answers.
    pub new_tokens: u64,
    /// Passes.
    pub passes: u64,
    /// Rows of all of them: tokens that were run, wrong drafts among them.
    pub rows: u64,
    /// Sequences that had rows in a pass, over all passes.
    pub shares: u64,
    /// Time that prompts took, each for itself: those that run at once count as often as they are.
    pub prefill: Duration,
    /// Time that answers took.
    pub decode: Duration,
    /// Time between the submission of jobs and their turn.
    pub waited: Duration,
    /// What became of drafts.
    pub drafts: DraftStats,
}

impl Totals {
    /// Adds those of another scheduler.
    pub fn join(&mut self, other: &Self) {
        let Self {
            submitted,
            refused,
            completed,
            cancelled,
            failed,
            prompt_tokens,
            reused_tokens,
            rerun_tokens,
            new_tokens,
            passes,
            rows,
            shares,
            prefill,
            decode,
            waited,
            drafts,
        } = other;
        self.submitted += submitted;
        self.refused += refused;
        self.completed += completed;
        self.cancelled += cancelled;
        self.failed += failed;
        self.prompt_tokens += prompt_tokens;
        self.reused_tokens += reused_tokens;
        self.rerun_tokens += rerun_tokens;
        self.new_tokens += new_tokens;
        self.passes += passes;
        self.rows += rows;
        self.shares += shares;
        self.prefill += *prefill;
        self.decode += *decode;
        self.waited += *waited;
        self.drafts.join(drafts);
    }
}

/// How a scheduler stands.
#[derive(Clone, Debug)]
pub struct SchedulerState {
    /// Whether jobs are taken on.
    pub health: Health,
    /// Jobs that wait and somebody waits for.
    pub waiting: usize,
    /// Batch jobs that wait.
    pub waiting_batch: usize,
    /// Jobs that run.
    pub running: usize,
    /// Jobs that may wait at most.
    pub queue: usize,
    /// What was done.
    pub totals: Totals,
    /// Expert streaming, as of the last pass.
    pub experts: Counters,
    /// KV blocks that hold sequences, and KV blocks that there may be.
    pub kv_blocks: (usize, usize),
    /// Slots for experts.
    pub slots: usize,
    /// What is wrong with keeping prefixes on disk, if anything.
    pub keeping: Option<String>,
}

/// Jobs and counts, behind one lock.
pub(super) struct Queue {
    health: Health,
    waiting: VecDeque<Waiting>,
    /// Jobs that were taken on and are about to be pushed: those that somebody waits for, and batch work.
    reserved: [usize; 2],
    running: Vec<Running>,
    /// Jobs that may run at once.
    places: usize,
    /// KV blocks that there may be, and positions of a sequence.
    room: (usize, usize),
    next_id: u64,
    pub totals: Totals,
    pub rates: Rates,
    /// The last jobs that ended, the last one first.
    recent: VecDeque<EndedJob>,
    /// The last pass that computed a prompt, and the last one that only generated.
    pub last_passes: [Option<SeenPass>; 2],
    experts: Counters,
    kv_blocks: (usize, usize),
    slots: usize,
    pub keeping: Option<String>,
    /// When those who drain it want it to be over.
    pub ends: Option<Instant>,
    /// The engine, once its thread is over.
    pub engine: Option<Engine>,
    over: bool,
}

impl Queue {
    /// An empty one; `places` jobs may run at once.
    pub fn new(engine: &Engine, places: usize) -> Self {
        let mut queue = Self {
            health: Health::Ready,
            waiting: VecDeque::new(),
            reserved: [0; 2],
            running: Vec::new(),
            places,
            room: (engine.kv_blocks(), engine.plan().context),
            next_id: 1,
            totals: Totals::default(),
            rates: Rates::default(),
            recent: VecDeque::new(),
            last_passes: [None; 2],
            experts: Counters::default(),
            kv_blocks: (0, 0),
            slots: 0,
            keeping: None,
            ends: None,
            engine: None,
            over: false,
        };
        queue.look_at(engine);
        queue
    }

    /// Takes over what the engine counts.
    pub fn look_at(&mut self, engine: &Engine) {
        self.kv_blocks = engine.prefix_blocks();
        self.look_at_store(&engine.store);
    }

    /// The part of it that changes while nothing runs.
    pub fn look_at_store(&mut self, store: &ExpertStore) {
        self.experts = store.counters();
        self.slots = store.slots();
    }

    /// An error unless jobs are taken on.
    pub fn open(&self) -> Result<(), Refused> {
        match &self.health {
            Health::Ready => Ok(()),
            Health::Draining => Err(Refused::Draining),
            Health::Failed { reason } => Err(Refused::EngineFailed { reason: reason.clone() }),
        }
    }

    /// Jobs whose turn has not come.
    pub fn waiting(&self) -> usize {
        self.waiting.len() + self.reserved.iter().sum::<usize>()
    }

    /// Those of one priority.
    pub fn waiting_of(&self, priority: Priority) -> usize {
        let waiting = self.waiting.iter().filter(|waiting| waiting.priority == priority).count();
        waiting + self.reserved[usize::from(priority == Priority::Batch)]
    }

    /// KV blocks that a job is expected to need.
    fn needed(&self, prompt: usize, most: Option<usize>) -> usize {
        let answer = most.map_or(USUAL_ANSWER, |most| most.min(USUAL_ANSWER));
        (prompt + answer).min(self.room.1).div_ceil(BLOCK) + SPARE_BLOCKS
    }

    /// KV blocks of those that run and do not give way to a job of this priority.
    fn taken(&self, priority: Priority) -> usize {
        let before = self.running.iter().filter(|running| priority == Priority::Batch || !running.batch);
        before.map(|running| running.blocks).sum()
    }

    /// Takes over how many KV blocks the jobs that run are expected to need by now.
    pub fn hold(&mut self, blocks: impl Iterator<Item = (JobId, usize)>) {
        for (id, blocks) in blocks {
            let known = self.running.iter_mut().filter(|running| running.id == id);
            known.for_each(|running| running.blocks = blocks);
        }
    }

    /// Places that are free, for those that somebody waits for or for others: none behind one that has to wait for KV blocks.
    pub fn free(&self) -> usize {
        let places = self.places.saturating_sub(self.running.len());
        let waiting = self.waiting.iter().filter(|waiting| waiting.priority == Priority::Interactive);
        let mut taken = self.taken(Priority::Interactive);
        for (at, waiting) in waiting.take(places).enumerate() {
            let needed = self.needed(waiting.prompt.len(), waiting.max_tokens);
            if !self.has_room(taken, needed) {
                return at;
            }
            taken += needed;
        }
        places
    }

    /// Whether a job can have so many KV blocks beside those that are taken.
    fn has_room(&self, taken: usize, needed: usize) -> bool {
        taken == 0 || taken + needed <= self.room.0
    }

    /// Whether a job that somebody waits for, and that came now, would begin at once.
    fn begins_at_once(&self, prompt: usize, most: Option<usize>) -> bool {
        let waiting = self.waiting.iter().filter(|waiting| waiting.priority == Priority::Interactive);
        let ahead: usize = waiting.map(|job| self.needed(job.prompt.len(), job.max_tokens)).sum();
        let taken = self.taken(Priority::Interactive) + ahead;
        self.waiting_of(Priority::Interactive) < self.free()
            && self.has_room(taken, self.needed(prompt, most))
    }

    /// A name and a place for a job; how many are ahead of it.
    pub fn reserve(&mut self, priority: Priority) -> (JobId, usize) {
        // Batch work that waits does so behind everybody.
        let waiting = match priority {
            Priority::Interactive => self.waiting_of(priority),
            Priority::Batch => self.waiting(),
        };
        let ahead = waiting + self.running.len();
        let id = JobId(self.next_id);
        self.next_id += 1;
        self.reserved[usize::from(priority == Priority::Batch)] += 1;
        self.totals.submitted += 1;
        (id, ahead)
    }

    /// Puts a job into its reserved place, or gives it back where that is no more.
    pub fn push(&mut self, waiting: Waiting) -> Result<(), Box<(Waiting, JobError)>> {
        self.reserved[usize::from(waiting.priority == Priority::Batch)] -= 1;
        match &self.health {
            Health::Ready => {
                self.waiting.push_back(waiting);
                Ok(())
            }
            Health::Draining => {
                self.totals.failed += 1;
                Err(Box::new((waiting, JobError::ShuttingDown)))
            }
            Health::Failed { reason } => {
                self.totals.failed += 1;
                let reason = reason.clone();
                Err(Box::new((waiting, JobError::EngineFailed { reason })))
            }
        }
    }

    /// The job whose turn it is, running from now on: the first that somebody waits for, else the first, if there is a
    /// place for it and there are KV blocks for it: how many it is expected to need. Those behind it do not overtake it.
    ///
    /// Batch work begins while nobody waits, and leaves half of the places: what runs cannot be sent away.
    pub fn next(&mut self) -> Option<(Waiting, usize)> {
        let interactive = |waiting: &Waiting| waiting.priority == Priority::Interactive;
        let first = self.waiting.iter().position(interactive);
        let places = match first {
            Some(_) => self.places,
            None if self.running.iter().all(|running| running.batch) => self.places.div_ceil(2),
            None => 0,
        };
        let at = first.unwrap_or(0);
        let next = self.waiting.get(at)?;
        let blocks = self.needed(next.prompt.len(), next.max_tokens);
        if self.running.len() >= places || !self.has_room(self.taken(next.priority), blocks) {
            return None;
        }
        let next = self.waiting.remove(at)?;
        let now = Instant::now();
        let waited = now - next.since;
        self.totals.waited += waited;
        let expected = self.expected(&next);
        let batch = next.priority == Priority::Batch;
        self.running.push(Running {
            id: next.id,
            cancel: next.cancel.clone(),
            since: now,
            expected,
            batch,
            blocks,
            prompt: next.prompt.len(),
            max_tokens: next.max_tokens,
            waited,
            state: RunJob::default(),
        });
        Some((next, blocks))
    }

    /// The number of the pass that comes.
    pub fn next_pass(&self) -> u64 {
        self.totals.passes + 1
    }

    /// Counts a pass over rows of so many sequences.
    pub fn passed(&mut self, pass: &PassStats, sequences: usize, engine: &Engine) {
        self.totals.passes += 1;
        self.totals.rows += pass.rows as u64;
        self.totals.shares += sequences as u64;
        self.look_at(engine);
    }

    /// Takes over how the jobs stand that run.
    pub fn run_on(&mut self, jobs: impl Iterator<Item = (JobId, RunJob)>) {
        for (id, state) in jobs {
            let known = self.running.iter_mut().filter(|running| running.id == id);
            known.for_each(|running| running.state = state);
        }
    }

    /// The jobs that run, then those that wait, in their order.
    pub fn jobs(&self, now: Instant) -> Vec<JobState> {
        let running = self.running.iter().map(|job| JobState {
            id: job.id,
            batch: job.batch,
            prompt: job.prompt,
            max_tokens: job.max_tokens,
            waited: job.waited,
            expected: job.expected,
            running: Some((now - job.since, job.state)),
        });
        let waiting = self.waiting.iter().map(|job| JobState {
            id: job.id,
            batch: job.priority == Priority::Batch,
            prompt: job.prompt.len(),
            max_tokens: job.max_tokens,
            waited: now - job.since,
            expected: self.expected(job),
            running: None,
        });
        running.chain(waiting).collect()
    }

    /// The last jobs that ended, the last one first.
    pub fn recent(&self) -> Vec<EndedJob> {
        self.recent.iter().copied().collect()
    }

    /// Keeps how a job fared beside what was expected of it.
    fn remember(&mut self, job: &Running, outcome: Option<&Outcome>) {
        self.recent.truncate(RECENT - 1);
        self.recent.push_front(EndedJob {
            id: job.id,
            batch: job.batch,
            prompt: job.prompt,
            waited: job.waited,
            took: job.since.elapsed(),
            expected: job.expected,
            reused: job.state.reused,
            forecast: job.state.forecast,
            outcome: outcome.copied(),
        });
    }

    fn expected(&self, job: &Waiting) -> Option<Duration> {
        self.rates.whole(job.unknown, job.max_tokens)
    }

    /// Counts what became of a job that ran.
    pub fn ended(&mut self, id: JobId, reused: usize, outcome: Option<&Outcome>) {
        if let Some(at) = self.running.iter().position(|running| running.id == id) {
            let job = self.running.remove(at);
            self.remember(&job, outcome);
        }
        let Some(Outcome { finish, stats }) = outcome else {
            self.totals.failed += 1;
            return;
        };
        match finish {
            Finish::Cancelled => self.totals.cancelled += 1,
            _ => self.totals.completed += 1,
        }
        self.totals.prompt_tokens += stats.prompt_tokens as u64;
        self.totals.reused_tokens += reused as u64;
        self.totals.rerun_tokens += stats.rerun_tokens as u64;
        self.totals.new_tokens += stats.new_tokens as u64;
        self.totals.prefill += stats.prefill;
        self.totals.decode += stats.decode;
        self.totals.drafts.join(&stats.drafts);
        self.rates.learn(stats, *finish == Finish::Cancelled);
    }

    /// How long a job would wait that somebody waits for, that came now, and has so many tokens of a prompt and at most so
    /// many of an answer.
    pub fn wait(&self, now: Instant, prompt: usize, most: Option<usize>) -> Option<Duration> {
        if self.begins_at_once(prompt, most) {
            return Some(Duration::ZERO);
        }
        let running = self.running.iter().map(|job| Some(job.expected?.saturating_sub(now - job.since)));
        let first = self.waiting.iter().filter(|job| job.priority == Priority::Interactive);
        let waiting = first.map(|job| self.expected(job));
        // Those that run at once share the work of all: a place is free when its part of that is done.
        let work = running.chain(waiting).sum::<Option<Duration>>()?;
        // Where KV blocks are short, that is no more than run now.
        let at_once = self.running.len().clamp(1, self.places);
        Some(work / u32::try_from(at_once).unwrap_or(u32::MAX))
    }

    /// Raises the token of a job.
    pub fn cancel(&mut self, id: JobId) {
        let running = self.running.iter().map(|running| (running.id, &running.cancel));
        let waiting = self.waiting.iter().map(|waiting| (waiting.id, &waiting.cancel));
        running.chain(waiting).filter(|(known, _)| *known == id).for_each(|(_, cancel)| cancel.cancel());
    }

    /// Raises the tokens of all jobs.
    pub fn cancel_all(&mut self) {
        self.running.iter().for_each(|running| running.cancel.cancel());
        self.waiting.iter().for_each(|waiting| waiting.cancel.cancel());
    }

    /// Takes out what was cancelled while it waited.
    pub fn take_cancelled(&mut self) -> Vec<Waiting> {
        let cancelled = take(&mut self.waiting, |waiting| waiting.cancel.is_cancelled());
        self.totals.cancelled += cancelled.len() as u64;
        cancelled
    }

    /// Takes nothing on any more, and takes out the batch work that waits; all is to be over when this `ends`.
    pub fn close(&mut self, ends: Instant) -> Vec<Waiting> {
        self.ends = Some(ends);
        if self.health == Health::Ready {
            self.health = Health::Draining;
        }
        let batch = take(&mut self.waiting, |waiting| waiting.priority == Priority::Batch);
        self.totals.failed += batch.len() as u64;
        batch
    }

    /// The engine cannot go on; all that waits is taken out.
    pub fn fail(&mut self, reason: &str) -> Vec<Waiting> {
        self.health = Health::Failed { reason: reason.to_owned() };
        let running = std::mem::take(&mut self.running);
        let waiting = take(&mut self.waiting, |_| true);
        self.totals.failed += (running.len() + waiting.len()) as u64;
        waiting
    }

    /// Whether the engine's thread has nothing left to do, and gets nothing more.
    pub fn is_finished(&self) -> bool {
        self.health != Health::Ready && self.waiting() == 0
    }

    /// Whether there is something to do, or the end has come.
    pub fn wants_attention(&self) -> bool {
        !self.waiting.is_empty() || self.is_finished()
    }

    /// The engine's thread is over.
    pub fn leave(&mut self, engine: Option<Engine>) {
        self.engine = engine;
        self.over = true;
    }

    /// Whether the engine's thread is over.
    pub fn is_over(&self) -> bool {
        self.over
    }

    pub fn state(&self, queue: usize) -> SchedulerState {
        let waiting_batch = self.waiting_of(Priority::Batch);
        SchedulerState {
            health: self.health.clone(),
            waiting: self.waiting() - waiting_batch,
            waiting_batch,
            running: self.running.len(),
            queue,
            totals: self.totals,
            experts: self.experts,
            kv_blocks: self.kv_blocks,
            slots: self.slots,
            keeping: self.keeping.clone(),
        }
    }
}

/// Takes out what `wanted` says, in order.
fn take(waiting: &mut VecDeque<Waiting>, wanted: impl Fn(&Waiting) -> bool) -> Vec<Waiting> {
    let (taken, left) = std::mem::take(waiting).into_iter().partition::<Vec<_>, _>(wanted);
    *waiting = left.into();
    taken
}
