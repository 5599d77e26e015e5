//! A pool of threads that fill slabs.
//!
//! A [`Job`] carries its slab in and its [`Done`] carries it back, so there is no
//! shared mutable memory: whoever holds the slab owns the bytes. The number of
//! jobs is bounded by the number of slabs. Completions come in the order the
//! disk delivers them; whoever needs an order restores it.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_core::ReadSegment;

use crate::open::Shard;
use crate::read::{ReadError, read_counted};
use crate::slab::Slab;

/// What turns the bytes of a file into the bytes of a slab, on the worker that
/// read them (for example a quantiser, or a decoder).
pub trait Transform: Send + Sync {
    /// Bytes to read first; segments of the job land in a scratch buffer of this
    /// length instead of the slab.
    fn raw_len(&self) -> usize;

    /// Makes the job's `len` bytes of slab from the raw bytes. An error says what
    /// is wrong with the raw bytes; it (or a panic) fails the job, not the process.
    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// One slab to fill.
pub struct Job {
    /// Returned with the completion; means nothing to the reader.
    pub tag: u64,
    /// What to read. `dst` counts in the slab or, with a transform, in its raw buffer.
    pub segments: Arc<[ReadSegment]>,
    /// Where the result goes.
    pub slab: Slab,
    /// Bytes of the slab that the job fills; the rest is left alone.
    pub len: usize,
    /// What is done to the bytes before they enter the slab.
    pub transform: Option<Arc<dyn Transform>>,
}

/// A finished job.
#[derive(Debug)]
pub struct Done {
    /// The job's tag.
    pub tag: u64,
    /// The job's slab; its bytes are only meaningful if `result` is `Ok`.
    pub slab: Slab,
    /// What it cost, or why it failed.
    pub result: Result<JobStats, ReadError>,
}

/// What a successful job cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobStats {
    /// Bytes read from files.
    pub bytes: u64,
    /// Reads issued, repeats after short or interrupted ones included.
    pub reads: u64,
    /// Time on the worker, transform included.
    pub service: Duration,
}

/// Size of a [`Reader`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReaderConfig {
    /// Threads, which is also the number of reads in flight; 0 counts as 1.
    pub workers: usize,
    /// Bytes of raw buffer a worker may hold; 0 if no job has a transform.
    pub scratch_per_worker: usize,
}

/// A worker thread could not be started.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot start read worker {worker} of {workers}: {cause}; use fewer workers or raise the thread limit"
)]
pub struct StartError {
    /// Worker that did not start, from 0.
    pub worker: usize,
    /// Workers wanted.
    pub workers: usize,
    /// What the system said.
    pub cause: std::io::Error,
}

/// The pool. Dropping it discards what has not started and joins the workers.
pub struct Reader {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    shards: Vec<Shard>,
    scratch_limit: usize,
    scratch_held: AtomicUsize,
    state: Mutex<State>,
    /// Signalled when a job is queued or the pool closes.
    work: Condvar,
    /// Signalled when a job is done or withdrawn.
    done: Condvar,
}

#[derive(Default)]
struct State {
    queued: VecDeque<Job>,
    running: usize,
    done: VecDeque<Done>,
    closed: bool,
}

impl State {
    fn in_flight(&self) -> usize {
        self.queued.len() + self.running + self.done.len()
    }
}

impl Reader {
    /// Starts the workers. Shard numbers in jobs are indices into `shards`.
    pub fn new(shards: Vec<Shard>, config: ReaderConfig) -> Result<Self, StartError> {
        let shared = Arc::new(Shared {
            shards,
            scratch_limit: config.scratch_per_worker,
            scratch_held: AtomicUsize::new(0),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let workers = config.workers.max(1);
        // Built before the threads, so that a failed start joins those already running.
        let mut reader = Self { shared, workers: Vec::with_capacity(workers) };
        for worker in 0..workers {
            let shared = Arc::clone(&reader.shared);
            let handle = std::thread::Builder::new()
                .name(format!("read-{worker}"))
                .spawn(move || work(&shared))
                .map_err(|cause| StartError { worker, workers, cause })?;
            reader.workers.push(handle);
        }
        Ok(reader)
    }

    /// Queues a job. Jobs start in the order they are submitted.
    pub fn submit(&self, job: Job) {
        self.shared.lock().queued.push_back(job);
        self.shared.work.notify_one();
    }

    /// Waits for the next completion; `None` when nothing is in flight.
    pub fn recv(&self) -> Option<Done> {
        let mut state = self.shared.lock();
        loop {
            if let Some(done) = state.done.pop_front() {
                return Some(done);
            }
            if state.in_flight() == 0 {
                return None;
            }
            state = self.shared.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// The next completion, if one is there.
    pub fn try_recv(&self) -> Option<Done> {
        self.shared.lock().done.pop_front()
    }

    /// Takes back every job that no worker has started, in submission order.
    pub fn withdraw(&self) -> Vec<Job> {
        let jobs = std::mem::take(&mut self.shared.lock().queued).into();
        // Whoever waits may have been waiting for one of these.
        self.shared.done.notify_all();
        jobs
    }

    /// Jobs submitted and neither received nor withdrawn.
    pub fn in_flight(&self) -> usize {
        self.shared.lock().in_flight()
    }

    /// The files that jobs may name.
    pub fn shards(&self) -> &[Shard] {
        &self.shared.shards
    }

    /// Threads in the pool.
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// Raw buffers held now, in bytes.
    pub fn scratch_bytes(&self) -> usize {
        self.shared.scratch_held.load(Ordering::Relaxed)
    }

    /// Bytes of raw buffer a worker may hold.
    pub fn scratch_per_worker(&self) -> usize {
        self.shared.scratch_limit
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let discarded = {
            let mut state = self.shared.lock();
            state.closed = true;
            std::mem::take(&mut state.queued)
        };
        self.shared.work.notify_all();
        // Slabs go home outside the lock.
        drop(discarded);
        for worker in self.workers.drain(..) {
            // A worker catches every panic of a job; if one died all the same there
            // is nothing left to do about it here.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change of the state is complete when the lock is let go.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks until there is a job; `None` when the pool closes.
    fn next_job(&self) -> Option<Job> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.queued.pop_front() {
                state.running += 1;
                return Some(job);
            }
            state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, done: Done) {
        let mut state = self.lock();
        state.running -= 1;
        state.done.push_back(done);
        drop(state);
        self.done.notify_all();
    }

    fn shard(&self, shard: u32) -> Result<&Shard, ReadError> {
        self.shards.get(shard as usize).ok_or(ReadError::UnknownShard { shard, shards: self.shards.len() })
    }

    /// File and offset that stand for a whole job in an error.
    fn place(&self, segments: &[ReadSegment]) -> (PathBuf, u64) {
        let first = segments.first();
        let path = first.and_then(|s| self.shards.get(s.shard as usize)).map(|s| s.path.clone());
        (path.unwrap_or_default(), first.map_or(0, |s| s.offset))
    }
}

/// The life of a worker.
fn work(shared: &Shared) {
    let mut scratch = Vec::new();
    while let Some(Job { tag, segments, mut slab, len, transform }) = shared.next_job() {
        let run = || fill(shared, &segments, &mut slab, len, transform.as_deref(), &mut scratch);
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let (path, offset) = shared.place(&segments);
            Err(ReadError::Panicked { path, offset, message: panic_message(&*panic) })
        });
        shared.finish(Done { tag, slab, result });
    }
    shared.scratch_held.fetch_sub(scratch.len(), Ordering::Relaxed);
}

/// Reads and transforms one job.
fn fill(
    shared: &Shared,
    segments: &[ReadSegment],
    slab: &mut [u8],
    len: usize,
    transform: Option<&dyn Transform>,
    scratch: &mut Vec<u8>,
) -> Result<JobStats, ReadError> {
    let start = Instant::now();
    let room = slab.len();
    let Some(slab) = slab.get_mut(..len) else {
        let (path, offset) = shared.place(segments);
        return Err(ReadError::OutsideBuffer { path, offset, len, dst: 0, room });
    };
    let (bytes, reads) = match transform {
        None => read_segments(shared, segments, slab)?,
        Some(transform) => {
            let raw = raw_buffer(shared, scratch, transform.raw_len())?;
            let read = read_segments(shared, segments, raw)?;
            transform.apply(raw, slab).map_err(|reason| {
                let (path, offset) = shared.place(segments);
                ReadError::Transform { path, offset, reason: reason.to_string() }
            })?;
            read
        }
    };
    Ok(JobStats { bytes, reads, service: start.elapsed() })
}

/// Reads every segment to its place; returns bytes and reads issued.
fn read_segments(shared: &Shared, segments: &[ReadSegment], dst: &mut [u8]) -> Result<(u64, u64), ReadError> {
    let room = dst.len();
    let (mut bytes, mut reads) = (0, 0);
    for segment in segments {
        let shard = shared.shard(segment.shard)?;
        let end = segment.dst.checked_add(segment.len);
        let target = end.and_then(|end| dst.get_mut(segment.dst..end)).ok_or_else(|| {
            let &ReadSegment { offset, len, dst, .. } = segment;
            ReadError::OutsideBuffer { path: shard.path.clone(), offset, len, dst, room }
        })?;
        reads += read_counted(&*shard.file, &shard.path, target, segment.offset)?;
        bytes += segment.len as u64;
    }
    Ok((bytes, reads))
}

/// The worker's own buffer, grown to at least `len` and no further than the limit.
fn raw_buffer<'s>(shared: &Shared, scratch: &'s mut Vec<u8>, len: usize) -> Result<&'s mut [u8], ReadError> {
    if len > shared.scratch_limit {
        return Err(ReadError::ScratchLimit { needed: len, limit: shared.scratch_limit });
    }
    let grow = len.saturating_sub(scratch.len());
    if grow > 0 {
        scratch.try_reserve_exact(grow).map_err(|_| ReadError::NoScratch { needed: len })?;
        scratch.resize(len, 0);
        shared.scratch_held.fetch_add(grow, Ordering::Relaxed);
    }
    Ok(&mut scratch[..len])
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
