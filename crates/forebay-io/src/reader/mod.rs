//! What fills slabs while compute goes on.
//!
//! A [`Job`] carries its slab in and its [`Done`] carries it back, so there is no
//! shared mutable memory: whoever holds the slab owns the bytes. The number of
//! jobs is bounded by the number of slabs. Completions come in the order the
//! disk delivers them; whoever needs an order restores it.
//!
//! `queue` decides what is read next, `pool` reads it on worker threads and `uring` through a ring of the
//! kernel, `throttle` pretends that the disk is slow.

mod pool;
mod queue;
mod throttle;
#[cfg(target_os = "linux")]
mod uring;

use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_core::{DIRECT_ALIGN, ReadSegment};

use crate::open::Shard;
use crate::read::ReadError;
use crate::roots::{RootStats, Roots, Sources};
use crate::slab::Slab;
use crate::transfer::Tally;
use queue::{Kind, Queue, Side};
use throttle::Throttle;

pub use queue::{Gauge, Priority};

/// What turns the bytes of a file into the bytes of a slab, on the worker that
/// read them (for example a quantiser, or a decoder).
pub trait Transform: Send + Sync {
    /// Bytes to read first; segments of the job count in these.
    fn raw_len(&self) -> usize;

    /// Whether they are read to the end of the job's `len` bytes of slab, which must have room for them; otherwise they
    /// are read into a scratch buffer of the worker's.
    fn reads_into_slab(&self) -> bool {
        false
    }

    /// Makes the job's `len` bytes of slab from the raw bytes; `raw` is empty if they are in the slab. An error says
    /// what is wrong with the raw bytes; it (or a panic) fails the job, not the process.
    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;
}

/// One slab to fill.
pub struct Job {
    /// Returned with the completion; means nothing to the reader.
    pub tag: u64,
    /// What to read. `dst` counts in the slab or, with a transform, in its raw bytes.
    pub segments: Arc<[ReadSegment]>,
    /// CRC32C that the bytes of the job's only segment must have; what has another comes from the next root,
    /// or is an error. With several segments there is none.
    pub check: Option<u32>,
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
    /// Bytes wanted from files; what pages around them were read too is not counted.
    pub bytes: u64,
    /// Reads issued, repeats after short or interrupted ones included.
    pub reads: u64,
    /// From the start of the job to its end, transform and pauses included.
    pub service: Duration,
    /// Reads that went past the page cache.
    pub direct_reads: u64,
    /// Segments that were begun past the page cache and ended through it.
    pub fallbacks: u64,
    /// Reads issued again after a short direct one, an interruption, a "try again" or, once for a segment, a failure.
    pub retries: u64,
    /// The root that delivered the last segment.
    pub root: usize,
    /// Bytes whose checksum was compared, copies that turned out to be wrong included.
    pub checked: u64,
    /// Time that took; part of `service`.
    pub checking: Duration,
}

impl JobStats {
    fn new(bytes: u64, tally: &Tally, checks: Checks, root: usize, start: Instant) -> Self {
        let &Tally { reads, direct_reads, fallbacks, retries } = tally;
        let Checks { bytes: checked, time: checking } = checks;
        let service = start.elapsed();
        Self { bytes, reads, service, direct_reads, fallbacks, retries, root, checked, checking }
    }
}

/// What comparing checksums cost a job.
#[derive(Clone, Copy, Debug, Default)]
struct Checks {
    bytes: u64,
    time: Duration,
}

impl Checks {
    /// Compares the checksum of the bytes that `segment` brought from `path`.
    fn compare(
        &mut self,
        bytes: &[u8],
        expected: u32,
        segment: &ReadSegment,
        path: &Path,
    ) -> Result<(), ReadError> {
        let start = Instant::now();
        let found = crc32c::crc32c(bytes);
        self.time += start.elapsed();
        self.bytes += bytes.len() as u64;
        if found == expected {
            return Ok(());
        }
        let &ReadSegment { offset, len, .. } = segment;
        Err(ReadError::Checksum { path: path.to_owned(), offset, len, expected, found })
    }
}

/// Who reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Backend {
    /// Worker threads.
    #[default]
    Pool,
    /// One thread and a ring of the Linux kernel; worker threads where there is none, and for jobs with a
    /// transform.
    Uring,
}

impl std::fmt::Display for Backend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Backend::Pool => "pool",
            Backend::Uring => "uring",
        })
    }
}

/// How a [`Reader`] reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReaderConfig {
    /// Demands that are read at a time; 0 counts as 1. With [`Backend::Pool`] that many threads.
    pub workers: usize,
    /// Jobs of lower priority that may be read at a time, while no demand is outstanding; 0 counts as 1.
    /// They have workers (and raw buffers) of their own, so that none that paused stands in a demand's way.
    pub ahead: usize,
    /// Bytes after which a job of lower priority looks for demands, in whole pages.
    pub piece: usize,
    /// Bytes of raw buffer a worker may hold; 0 if no job has a transform that needs one.
    pub scratch_per_worker: usize,
    /// Who reads.
    pub backend: Backend,
    /// Bytes per second that are not exceeded, for experiments (at least 1 MiB/s). Meant for
    /// [`Buffered`](crate::Access::Buffered) files, to pretend that the page cache is a disk. The worker
    /// threads then read whatever `backend` says.
    pub throttle: Option<u64>,
}

impl Default for ReaderConfig {
    fn default() -> Self {
        let backend = Backend::Pool;
        Self { workers: 8, ahead: 2, piece: 4 << 20, scratch_per_worker: 0, backend, throttle: None }
    }
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

/// Reads jobs, the most urgent first. Dropping it discards what has not started, gives up what is not demanded
/// and waits for the rest.
pub struct Reader {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    workers: usize,
    backend: Backend,
    notes: Vec<String>,
}

struct Shared {
    sources: Sources,
    queue: Queue,
    throttle: Option<Throttle>,
    piece: usize,
    scratch_limit: usize,
}

impl Reader {
    /// Starts to wait for jobs. Shard numbers in jobs are indices into `shards`.
    pub fn new(shards: Vec<Shard>, config: ReaderConfig) -> Result<Self, StartError> {
        Self::with_roots(shards.into(), config)
    }

    /// As [`new`](Self::new), with copies of the shards on further disks.
    pub fn with_roots(roots: Roots, config: ReaderConfig) -> Result<Self, StartError> {
        let (workers, ahead) = (config.workers.max(1), config.ahead.max(1));
        let shared = Arc::new(Shared {
            sources: Sources::new(roots),
            queue: Queue::new(ahead),
            throttle: config.throttle.map(Throttle::new),
            piece: config.piece.max(1).checked_next_multiple_of(DIRECT_ALIGN).unwrap_or(usize::MAX),
            scratch_limit: config.scratch_per_worker,
        });
        let backend = Backend::Pool;
        // Built before the threads, so that a failed start joins those already running.
        let mut reader = Self { shared, threads: Vec::new(), workers, backend, notes: Vec::new() };
        if config.backend == Backend::Uring {
            match reader.start_ring(&config) {
                Ok(()) => reader.backend = Backend::Uring,
                Err(why) => reader.notes.push(format!("{why}; worker threads read instead of io_uring")),
            }
        }
        let kind = if reader.backend == Backend::Uring { Kind::Transformed } else { Kind::Any };
        for worker in 0..workers + ahead {
            let side = if worker < workers { Side::Demand } else { Side::Ahead };
            let shared = Arc::clone(&reader.shared);
            let handle = std::thread::Builder::new()
                .name(format!("read-{worker}"))
                .spawn(move || pool::work(&shared, side, kind))
                .map_err(|cause| StartError { worker, workers: workers + ahead, cause })?;
            reader.threads.push(handle);
        }
        Ok(reader)
    }

    #[cfg(target_os = "linux")]
    fn start_ring(&mut self, config: &ReaderConfig) -> Result<(), String> {
        if config.throttle.is_some() {
            return Err("a throttled disk needs worker threads".to_owned());
        }
        let thread = uring::start(&self.shared, self.workers, config.ahead.max(1))?;
        self.threads.push(thread);
        Ok(())
    }

    #[cfg(not(target_os = "linux"))]
    fn start_ring(&mut self, _config: &ReaderConfig) -> Result<(), String> {
        Err("this system has no io_uring".to_owned())
    }

    /// Queues a job. Jobs of one priority start in the order they are submitted, and none while a more urgent
    /// one is queued.
    pub fn submit(&self, priority: Priority, job: Job) {
        self.shared.queue.submit(priority, job);
    }

    /// Waits for the next completion; `None` when nothing is in flight.
    pub fn recv(&self) -> Option<Done> {
        self.shared.queue.recv()
    }

    /// The same, but not longer than about `most`: `None` also when that is over.
    pub fn recv_timeout(&self, most: Duration) -> Option<Done> {
        self.shared.queue.recv_timeout(most)
    }

    /// The next completion, if one is there.
    pub fn try_recv(&self) -> Option<Done> {
        self.shared.queue.try_recv()
    }

    /// Takes back every job of this or a lower priority that has not started, the most urgent first, then in
    /// submission order. All of them with [`Priority::Demand`].
    pub fn withdraw(&self, priority: Priority) -> Vec<Job> {
        self.shared.queue.withdraw(priority)
    }

    /// Takes back the job with this tag, if it has not started.
    pub fn cancel(&self, tag: u64) -> Option<Job> {
        self.shared.queue.cancel(tag)
    }

    /// Makes a demand of a job of lower priority, queued or being read. `false` if there is none with this tag.
    pub fn promote(&self, tag: u64) -> bool {
        self.shared.queue.promote(tag)
    }

    /// Ends the reading of a job of lower priority after its present piece: it completes with
    /// [`ReadError::Aborted`] (or as usual, if that was the last piece). `false` if none with this tag is being
    /// read.
    pub fn abort(&self, tag: u64) -> bool {
        self.shared.queue.abort(tag)
    }

    /// Jobs submitted and neither received nor taken back.
    pub fn in_flight(&self) -> usize {
        self.shared.queue.in_flight()
    }

    /// How well demands were served so far.
    pub fn gauge(&self) -> Gauge {
        self.shared.queue.gauge()
    }

    /// What each root did so far.
    pub fn roots(&self) -> Vec<RootStats> {
        self.shared.sources.stats()
    }

    /// Whether a job is queued or being read.
    pub fn is_busy(&self) -> bool {
        self.shared.queue.is_busy()
    }

    /// The files that jobs may name.
    pub fn shards(&self) -> &[Shard] {
        self.shared.sources.shards()
    }

    /// Demands that are read at a time.
    pub fn workers(&self) -> usize {
        self.workers
    }

    /// Who reads.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// What is not as it was asked for, for the user.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Bytes of raw buffer a worker may hold.
    pub fn scratch_per_worker(&self) -> usize {
        self.shared.scratch_limit
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        // Slabs go home outside the lock.
        drop(self.shared.queue.close());
        for thread in self.threads.drain(..) {
            // A worker catches every panic of a job; if one died all the same there
            // is nothing left to do about it here.
            let _ = thread.join();
        }
    }
}
