//! A team of threads that splits one job at a time.
//!
//! A token step forks and joins hundreds of times, so the team keeps its threads,
//! lets them spin for some microseconds between jobs, and parks them after that:
//! an idle team uses no processor time. The caller works too. A job is complete when
//! all its parts have run; a worker that wakes up late simply finds nothing to do.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread spins before it parks.
const SPIN: Duration = Duration::from_micros(30);
/// Set in [`Shared::state`] while workers may join the job.
const OPEN: u64 = 1 << 31;
/// The bits of [`Shared::state`] that count the workers inside the job.
const INSIDE: u64 = OPEN - 1;
/// One more job, in [`Shared::state`].
const NEXT: u64 = 1 << 32;

thread_local! {
    /// Whether this thread is running a part: a team called from there runs inline.
    static IN_PART: Cell<bool> = const { Cell::new(false) };
}

/// A fixed set of threads, the caller included.
#[derive(Debug)]
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the caller whose job is running.
    turn: Mutex<()>,
}

/// One job: what to call and which parts are still to be claimed.
struct Job {
    /// Lives until the job is closed and empty; see [`Team::run_parts`].
    body: *const (dyn Fn(usize, usize) + Sync),
    parts: usize,
    caller: Thread,
}

/// A counter on its own cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Cursor(AtomicUsize);

struct Shared {
    /// Number of the job (upper 32 bits), [`OPEN`], workers inside.
    state: AtomicU64,
    /// Written by the caller while no worker is inside and the state is closed.
    job: UnsafeCell<Option<Job>>,
    /// Next unclaimed part of each thread's share.
    cursors: Box<[Cursor]>,
    /// The first panic of the job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    failed: AtomicBool,
    stop: AtomicBool,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written only by the caller
// that holds `turn`, before the state is opened, and read only by workers that joined through
// the open state (acquire after that release) and by that caller. `body` is a `Sync` closure.
unsafe impl Sync for Shared {}
// SAFETY: as above; a job's body is borrowed, never moved to or dropped by another thread.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("threads", &self.cursors.len()).finish_non_exhaustive()
    }
}

impl Team {
    /// A team of `threads` threads (at least one), the caller being one of them.
    ///
    /// # Errors
    /// The system's error if a thread cannot be started.
    pub fn new(threads: usize) -> std::io::Result<Self> {
        Self::named("forebay", threads)
    }

    /// As [`new`](Self::new), with threads called `name-1`, `name-2` ...
    ///
    /// # Errors
    /// The system's error if a thread cannot be started.
    pub fn named(name: &str, threads: usize) -> std::io::Result<Self> {
        let threads = threads.max(1);
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(None),
            cursors: (0..threads).map(|_| Cursor(AtomicUsize::new(0))).collect(),
            panic: Mutex::new(None),
            failed: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        // Built up in the team itself, so that its Drop stops those already started.
        let mut team = Self { shared, workers: Vec::with_capacity(threads - 1), turn: Mutex::new(()) };
        for index in 1..threads {
            let shared = Arc::clone(&team.shared);
            let worker = thread::Builder::new().name(format!("{name}-{index}"));
            team.workers.push(worker.spawn(move || shared.work(index))?);
        }
        Ok(team)
    }

    /// As many threads as this process may use processors (affinity and cgroup limits included).
    pub fn default_threads() -> usize {
        thread::available_parallelism().map_or(1, usize::from)
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
    fn run_parts(&self, parts: usize, body: &(dyn Fn(usize, usize) + Sync)) {
        if parts == 0 {
            return;
        }
        if parts == 1 || self.workers.is_empty() || IN_PART.get() {
            for part in 0..parts {
                body(0, part);
            }
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = &*self.shared;
        for (i, cursor) in shared.cursors.iter().enumerate() {
            cursor.0.store(share(parts, shared.cursors.len(), i), Ordering::Relaxed);
        }
        shared.failed.store(false, Ordering::Relaxed);
        // SAFETY: the type differs in lifetime only. The pointer is used by this function and by
        // workers inside the job, and this function returns only when none is left inside.
        let body = unsafe { std::mem::transmute::<&(dyn Fn(usize, usize) + Sync), *const _>(body) };
        let job = Job { body, parts, caller: thread::current() };
        // SAFETY: we hold the turn, the state is closed and nobody is inside: the cell is ours.
        let job = unsafe { &*(*shared.job.get()).insert(job) };
        let number = (shared.state.load(Ordering::Relaxed) & !INSIDE & !OPEN).wrapping_add(NEXT);
        shared.state.store(number | OPEN, Ordering::Release);
        for worker in self.workers.iter().take(parts - 1) {
            worker.thread().unpark();
        }
        shared.claim(job, 0);
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        wait_until(|| shared.state.load(Ordering::Acquire) & INSIDE == 0);
        let panic = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of a part, so there is nothing to pass on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// The life of a worker.
    fn work(&self, index: usize) {
        let mut done = 0;
        loop {
            wait_until(|| {
                let state = self.state.load(Ordering::Relaxed);
                (state & OPEN != 0 && state / NEXT != done) || self.stop.load(Ordering::Acquire)
            });
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            let state = self.state.load(Ordering::Relaxed);
            let joined = state & OPEN != 0
                && self
                    .state
                    .compare_exchange(state, state + 1, Ordering::Acquire, Ordering::Relaxed)
                    .is_ok();
            if !joined {
                continue;
            }
            done = state / NEXT;
            // SAFETY: we are inside an open job; the caller waits for us before it touches the cell.
            let job = unsafe { &*self.job.get() };
            if let Some(job) = job {
                let caller = job.caller.clone();
                self.claim(job, index);
                // From here on the job may end at any moment.
                let before = self.state.fetch_sub(1, Ordering::AcqRel);
                if before & (OPEN | INSIDE) == 1 {
                    caller.unpark();
                }
            }
        }
    }

    /// Runs parts until none is left: first this thread's share, then the others'.
    fn claim(&self, job: &Job, thread: usize) {
        let threads = self.cursors.len();
        IN_PART.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            for i in 0..threads {
                let owner = (thread + i) % threads;
                let end = share(job.parts, threads, owner + 1);
                while !self.failed.load(Ordering::Relaxed) {
                    let part = self.cursors[owner].0.fetch_add(1, Ordering::Relaxed);
                    if part >= end {
                        break;
                    }
                    // SAFETY: the caller keeps the body alive while anybody is inside the job.
                    unsafe { (*job.body)(thread, part) };
                }
            }
        }));
        IN_PART.set(false);
        if let Err(panic) = result {
            self.failed.store(true, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }
}

/// The first part of thread `thread`'s share.
fn share(parts: usize, threads: usize, thread: usize) -> usize {
    // parts * thread / threads without overflow.
    parts / threads * thread + parts % threads * thread / threads
}

/// Spins for a moment, then parks until `ready`.
fn wait_until(ready: impl Fn() -> bool) {
    let mut started = None;
    loop {
        for _ in 0..64 {
            if ready() {
                return;
            }
            std::hint::spin_loop();
        }
        if started.get_or_insert_with(Instant::now).elapsed() > SPIN {
            break;
        }
    }
    // Whoever makes `ready` true unparks this thread afterwards, so no wake-up is lost.
    while !ready() {
        thread::park();
    }
}

/// A slice cut into chunks that may be taken from several threads.
struct Chunks<T> {
    start: *mut T,
    total: usize,
    len: usize,
}

// SAFETY: chunks are disjoint exclusive parts of a slice of `T: Send` (see `get`).
unsafe impl<T: Send> Sync for Chunks<T> {}

impl<T> Chunks<T> {
    fn new(data: &mut [T], len: usize) -> Self {
        assert!(len > 0, "a chunk has at least one element");
        Self { start: data.as_mut_ptr(), total: data.len(), len }
    }

    fn count(&self) -> usize {
        self.total.div_ceil(self.len)
    }

    /// # Safety
    /// The slice must outlive the result, and nobody else may hold the same chunk meanwhile.
    #[allow(clippy::mut_from_ref)]
    unsafe fn get(&self, index: usize) -> &mut [T] {
        let from = index * self.len;
        let len = self.len.min(self.total - from);
        // SAFETY: inside the slice; exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}
