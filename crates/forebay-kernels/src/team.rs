//! A team of threads that splits one job at a time.
//!
//! A token step forks and joins hundreds of times, so the team keeps its threads,
//! lets them spin for some microseconds between jobs, and parks them after that:
//! an idle team uses no processor time. The caller works too. A job is complete when
//! all its parts have run; a worker that wakes up late simply finds nothing to do.
//!
//! `protocol` is how the threads agree, `sync` what that is built from (loom checks it in
//! `model`), `cores` how many threads are worth having.

mod chunks;
mod cores;
#[cfg(all(test, loom))]
mod model;
mod protocol;
mod sync;

pub(crate) use chunks::Chunks;
use protocol::{Body, MAX_THREADS, Shared};
use std::panic::resume_unwind;
use std::sync::PoisonError;
use sync::{Arc, Builder, IN_PART, JoinHandle, Mutex};

/// A fixed set of threads, the caller included.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job is running.
    turn: Mutex<()>,
}

impl Team {
    /// A team of `threads` threads (at least one), the caller being one of them.
    ///
    /// # Errors
    /// The system's error if a thread cannot be started, or if there are more than 8192.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::named("forebay", threads)
    }

    /// As [`new`](Self::new), with threads called `name-1`, `name-2` ...
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn named(name: &str, threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        if threads > MAX_THREADS {
            let text = format!("a team has at most {MAX_THREADS} threads, not {threads}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, text));
        }
        // Built up in the team itself, so that its Drop stops those already started.
        let shared = Arc::new(Shared::new(threads));
        let mut team = Self { shared, workers: Vec::with_capacity(threads - 1), turn: Mutex::new(()) };
        for seat in 1..threads {
            let shared = Arc::clone(&team.shared);
            let worker = Builder::new().name(format!("{name}-{seat}"));
            team.workers.push(worker.spawn(move || shared.work(seat))?);
        }
        Ok(team)
    }

    /// How many threads are worth having: one per processor core that this process may use
    /// (two hardware threads of a core count once), and no more than its control group's quota.
    pub fn default_threads() -> usize {
        cores::usable()
    }

    /// Threads of the team, the caller included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(part)` once for every `part` below `parts`, and returns when all are done.
    ///
    /// Each thread starts with an equal share of neighbouring parts and then helps with the
    /// shares of others. Called from inside a part, it runs on the calling thread alone.
    ///
    /// # Panics
    /// If a part panics: the first panic goes on in the caller, after the other threads
    /// have stopped; parts not yet started are skipped.
    pub fn run(&self, parts: usize, body: &(dyn Fn(usize) + Sync)) {
        self.run_parts(parts, &|_, part| body(part));
    }

    /// Calls `body(i, chunk)` for every chunk of `len` elements of `data` (the last may be
    /// shorter), the chunks split over the team.
    ///
    /// # Panics
    /// If `len` is 0, or as [`run`](Self::run).
    pub fn for_each_chunk<T: Send>(
        &self,
        data: &mut [T],
        len: usize,
        body: &(dyn Fn(usize, &mut [T]) + Sync),
    ) {
        let chunks = Chunks::new(data, len);
        self.run_parts(chunks.count(), &|_, part| {
            // SAFETY: every part is run once.
            body(part, unsafe { chunks.get(part) });
        });
    }

    /// As [`for_each_chunk`](Self::for_each_chunk), with one work space per thread: a work
    /// space is never used by two parts at once.
    ///
    /// # Panics
    /// If there are fewer work spaces than [`threads`](Self::threads), or as `for_each_chunk`.
    pub fn for_each_chunk_with<T: Send, S: Send>(
        &self,
        scratch: &mut [S],
        data: &mut [T],
        len: usize,
        body: &(dyn Fn(usize, &mut [T], &mut S) + Sync),
    ) {
        assert!(scratch.len() >= self.threads(), "one work space per thread is needed");
        let chunks = Chunks::new(data, len);
        let scratch = Chunks::new(scratch, 1);
        self.run_parts(chunks.count(), &|thread, part| {
            // SAFETY: every part is run once; a thread runs one part at a time.
            let (chunk, space) = unsafe { (chunks.get(part), scratch.get(thread)) };
            body(part, chunk, &mut space[0]);
        });
    }

    /// Calls `body(thread, part)` once per part; `thread` is below [`threads`](Self::threads)
    /// and no two parts run with the same one at the same time.
    fn run_parts(&self, parts: usize, body: &Body<'_>) {
        if parts == 0 {
            return;
        }
        if parts == 1 || self.workers.is_empty() || IN_PART.with(std::cell::Cell::get) {
            for part in 0..parts {
                body(0, part);
            }
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: we hold the turn.
        let result = unsafe { self.shared.run(parts, body, |seat| self.workers[seat - 1].thread().unpark()) };
        drop(turn);
        if let Err(panic) = result {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop();
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a part, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}
