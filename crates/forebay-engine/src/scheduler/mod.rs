//! Who is served when: an engine on its own thread, and the jobs that wait for it.
//!
//! A [`Scheduler`] is a handle: cheap to clone, to be used from any thread. It takes [`Job`]s, tells each through its
//! events how it fares, and says of every one exactly once how it ended. Text is none of its business.
//!
//! - `job`: what is asked for, and what is told of it.
//! - `queue`: what waits, in which order, and what is counted.
//! - `rates`: what was measured, and what it says about the next job.
//! - `seen`: what of a prompt is probably in the KV cache.
//! - `worker`: the engine's thread, which runs passes over the rows of several jobs.
//! - `compose`: whose rows those are. `sequence`: one job between two passes.
//! - `watch`: what somebody sees who looks at all this; `reuse`: what caches of other sizes would have held.

mod compose;
mod job;
mod queue;
mod rates;
mod reuse;
mod seen;
mod sequence;
mod watch;
mod worker;

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use forebay_model::kv::BLOCK;

use crate::engine::Engine;
use crate::plan::MOST_SEQUENCES;

pub use job::{Forecast, Job, JobError, JobEvent, JobId, Priority, Refused};
pub use queue::{Health, SchedulerState, Totals};
pub use reuse::Reuse;
pub use watch::{About, Cell, EndedJob, JobState, RunJob, SeenPass, SparseLayer, View};

use job::Events;
use queue::{Queue, Waiting};
use seen::Seen;
use watch::Watched;

/// Most [batch](Priority::Batch) jobs that wait. They take nobody's place in the queue, and whoever has many of them
/// keeps them until some are done.
const BATCH_QUEUE: usize = 1024;

/// How much is taken on, and what is done in between.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most jobs that wait and somebody waits for, beside what runs; more are refused.
    pub queue: usize,
    /// Most jobs that run at the same time, as far as there are KV blocks for all that they may come to need; 0 counts
    /// as 1.
    pub running: usize,
    /// Whether free memory is filled with the experts that earlier runs used most while nothing is asked for.
    pub warm_up: bool,
}

impl Default for Limits {
    /// 64 waiting jobs, [`MOST_SEQUENCES`] running ones, and memory is filled.
    fn default() -> Self {
        Self { queue: 64, running: MOST_SEQUENCES, warm_up: true }
    }
}

/// What is fixed for as long as the engine runs, and decides what can be asked for.
#[derive(Clone, Copy, Debug)]
struct Facts {
    context: usize,
    vocab: usize,
    limits: Limits,
}

/// An engine that serves jobs. Clones are the same one.
#[derive(Clone)]
pub struct Scheduler {
    shared: Arc<Shared>,
}

struct Shared {
    facts: Facts,
    watch: Watched,
    queue: Mutex<Queue>,
    /// What is probably in the KV cache; never locked for longer than a comparison, nor together with the queue.
    seen: Mutex<Seen>,
    /// Something changed: a job came, one ended, or the end began.
    changed: Condvar,
}

impl Shared {
    /// A panic elsewhere leaves the queue as it was: nothing is half done while it is locked.
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tokens of a prompt that are probably to be computed.
    fn unknown(&self, prompt: &[u32]) -> usize {
        prompt.len() - self.seen().known(prompt)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends jobs that were cancelled while they waited.
    fn sweep(&self) {
        let cancelled = self.lock().take_cancelled();
        for mut waiting in cancelled {
            waiting.events.cancelled();
            self.changed.notify_all();
        }
    }
}

impl Scheduler {
    /// Takes over an engine and starts its thread.
    ///
    /// # Errors
    /// What the system says where there is no thread to be had.
    pub fn start(engine: Engine, limits: Limits) -> std::io::Result<Self> {
        let facts = Facts { context: engine.plan().context, vocab: engine.spec().vocab, limits };
        let queue = Mutex::new(Queue::new(&engine, limits.running.max(1)));
        let watch = Watched::new(About::of(&engine));
        let seen = Mutex::new(Seen::new(engine.kv_blocks() * BLOCK));
        let shared = Arc::new(Shared { facts, watch, queue, seen, changed: Condvar::new() });
        let of_worker = Arc::clone(&shared);
        thread::Builder::new().name("engine".to_owned()).spawn(move || worker::run(engine, &of_worker))?;
        Ok(Self { shared })
    }

    /// Takes on a job. Its events come from other threads, and the first of them, [`JobEvent::Queued`], from this one
    /// before this returns. After a refusal no event comes.
    ///
    /// # Errors
    /// If it can never be served, or not now.
    pub fn submit(&self, job: Job) -> Result<JobId, Refused> {
        let Facts { context, vocab, limits } = self.shared.facts;
        job.check(context, vocab)?;
        // What takes long is done before the queue is locked: the engine's thread wants it at every layer.
        let unknown = self.shared.unknown(&job.prompt);
        let (id, first) = {
            let mut queue = self.shared.lock();
            check_room(&mut queue, limits, job.priority, (job.prompt.len(), job.max_tokens))?;
            queue.reserve(job.priority)
        };
        let Job { prompt, max_tokens, sampling, stops, constraint, priority, cancel, events } = job;
        let mut events = Events::new(events);
        // Told before the engine's thread can see the job, and not while the queue is locked.
        let told = events.tell(JobEvent::Queued { ahead: first });
        let waiting = Waiting {
            id,
            prompt,
            max_tokens,
            sampling,
            stops,
            constraint,
            priority,
            cancel,
            events,
            since: Instant::now(),
            unknown,
        };
        if told.is_none() {
            waiting.cancel.cancel();
        }
        let lost = self.shared.lock().push(waiting);
        self.shared.changed.notify_all();
        if let Err(lost) = lost {
            let (mut waiting, error) = *lost;
            waiting.events.failed(error);
        }
        Ok(id)
    }

    /// Whether a job of this priority would be taken on now, whatever it asks for.
    ///
    /// # Errors
    /// As [`submit`](Self::submit), of which this is the first step: a refusal counts.
    pub fn check_room(&self, priority: Priority) -> Result<(), Refused> {
        check_room(&mut self.shared.lock(), self.shared.facts.limits, priority, (1, Some(1)))
    }

    /// Ends a job soon: at once where it still waits, else at the next layer.
    pub fn cancel(&self, id: JobId) {
        self.shared.lock().cancel(id);
        self.shared.sweep();
    }

    /// What is expected of a job with this prompt, and at most so many tokens of an answer, if it came now.
    pub fn forecast(&self, prompt: &[u32], max_tokens: Option<usize>) -> Forecast {
        let unknown = self.shared.unknown(prompt);
        let queue = self.shared.lock();
        let wait = queue.wait(Instant::now(), prompt.len(), max_tokens);
        queue.rates.forecast(unknown, wait)
    }

    /// Positions of a sequence: prompt and answer together.
    pub fn context(&self) -> usize {
        self.shared.facts.context
    }

    /// How it stands.
    pub fn state(&self) -> SchedulerState {
        self.shared.lock().state(self.shared.facts.limits.queue)
    }

    /// What is fixed about the engine.
    pub fn about(&self) -> &About {
        &self.shared.watch.about
    }

    /// Everything there is to see. For some seconds after a look the engine notes which experts are used: those who
    /// watch look several times in that time, and where nobody does, nothing is noted.
    pub fn look(&self) -> View {
        let watch = &self.shared.watch;
        watch.looked();
        let (cells, watched, reuse) = watch.experts();
        let layers_done = watch.progress();
        let queue = self.shared.lock();
        let [prefill, decode] = queue.last_passes;
        View {
            state: queue.state(self.shared.facts.limits.queue),
            jobs: queue.jobs(Instant::now()),
            recent: queue.recent(),
            prefill,
            decode,
            layers_done,
            cells,
            watched,
            reuse,
        }
    }

    /// Refuses what comes from now on, finishes what is there, and gives the engine back. Waiting
    /// [batch](Priority::Batch) work fails at once, to be done another time; after `deadline` the rest is cancelled. What is
    /// kept of prefixes on disk takes the time that is left, or some seconds where there is none.
    /// `None` if the engine is lost, or another call has it.
    pub fn drain(&self, deadline: Duration) -> Option<Engine> {
        let ends = Instant::now() + deadline;
        let batch = self.shared.lock().close(ends);
        for mut waiting in batch {
            waiting.events.failed(JobError::ShuttingDown);
        }
        self.shared.changed.notify_all();
        let mut queue = self.shared.lock();
        while !queue.is_over() {
            let left = ends.saturating_duration_since(Instant::now());
            if left.is_zero() {
                queue.cancel_all();
                drop(queue);
                self.shared.sweep();
                self.shared.changed.notify_all();
                queue = self.shared.lock();
            }
            // A cancelled pass ends at its next layer.
            let step = if left.is_zero() { Duration::from_millis(20) } else { left };
            queue = self.shared.changed.wait_timeout(queue, step).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.engine.take()
    }
}

/// An error if no job of this priority, with so many tokens of a prompt and at most so many of an answer, is taken on now.
fn check_room(
    queue: &mut Queue,
    limits: Limits,
    priority: Priority,
    (prompt, most): (usize, Option<usize>),
) -> Result<(), Refused> {
    queue.open()?;
    // What comes while there are places does not wait.
    let waiting = queue.waiting_of(priority);
    let room = match priority {
        Priority::Interactive => limits.queue,
        Priority::Batch => BATCH_QUEUE,
    };
    if waiting >= room + queue.free() {
        queue.totals.refused += 1;
        let retry_after = queue.wait(Instant::now(), prompt, most).unwrap_or(Duration::from_secs(1));
        return Err(Refused::QueueFull { waiting, retry_after });
    }
    Ok(())
}
