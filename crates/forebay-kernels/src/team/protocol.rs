//! How the threads of a team agree on a job: one state word, one cursor per thread, parking.
//!
//! All hand-overs go through read-modify-writes of the state word, so for any two of them one
//! comes first and sees no more than the other: a worker joins only an open job, a caller that
//! opens a job learns of every worker that went to sleep before, a worker that leaves last
//! learns of a caller that went to sleep before. `model.rs` checks this under loom.

use super::sync::{
    AtomicBool, AtomicU64, AtomicUsize, IN_PART, Mutex, Ordering, SharedCell, Thread, current, park,
    spin_until,
};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

/// What a job calls: `(thread, part)`.
pub(super) type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// The most threads of a team: what the counters in [`Shared::state`] hold.
pub(super) const MAX_THREADS: usize = 1 << 13;

// The state word: counts in the lower half, then marks, then the number of the job.
/// One worker inside the job (or just finding out that it is closed).
const ONE_INSIDE: u64 = 1;
/// All workers inside.
const INSIDE: u64 = (1 << 14) - 1;
/// One worker that parks or is about to; cleared by itself.
const ONE_ASLEEP: u64 = 1 << 14;
/// All workers asleep.
const ASLEEP: u64 = INSIDE * ONE_ASLEEP;
/// The team ends.
const STOP: u64 = 1 << 29;
/// The caller parks, or is about to, until nobody is inside.
const WAITING: u64 = 1 << 30;
/// Workers may join the job.
const OPEN: u64 = 1 << 31;
/// One more job.
const NEXT: u64 = 1 << 32;

/// One job: what to call and how many times.
struct Job {
    /// Lives until the job is closed and nobody is inside; see [`Shared::run`].
    body: *const Body<'static>,
    parts: usize,
}

/// What belongs to one thread, on a cache line of its own (two, for processors that fetch pairs).
#[repr(align(128))]
struct Seat {
    /// Next unclaimed part of this thread's share.
    cursor: AtomicUsize,
    /// Whether the thread has to be unparked to see a job. Means something only to those who
    /// have seen it counted in [`ASLEEP`].
    asleep: AtomicBool,
}

/// The state word alone on its lines: spinning threads read it all the time.
#[repr(align(128))]
struct State(AtomicU64);

/// What the threads of a team share.
pub(super) struct Shared {
    state: State,
    seats: Box<[Seat]>,
    /// Written by the caller while the job is closed and nobody is inside.
    job: SharedCell<Job>,
    /// Whether a part has panicked: the rest are skipped.
    failed: AtomicBool,
    /// The first panic of the job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The caller to unpark; set before [`WAITING`] is.
    waiter: Mutex<Option<Thread>>,
}

// SAFETY: `job` is the only field that is not Sync by itself. It is written only by the one caller
// whose turn it is, while the job is closed and nobody is inside, and read only by workers that
// joined while it was open (acquire after that caller's release). The body is `Sync`.
unsafe impl Sync for Shared {}
// SAFETY: as above; a job's body is borrowed, never moved to or dropped by another thread.
unsafe impl Send for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("threads", &self.seats.len()).finish_non_exhaustive()
    }
}

impl Shared {
    /// For `threads` threads, at most [`MAX_THREADS`]; seat 0 is the caller's.
    pub(super) fn new(threads: usize) -> Self {
        let seat = |_| Seat { cursor: AtomicUsize::new(0), asleep: AtomicBool::new(false) };
        Self {
            state: State(AtomicU64::new(0)),
            seats: (0..threads).map(seat).collect(),
            job: SharedCell::new(Job { body: &|_, _| {}, parts: 0 }),
            failed: AtomicBool::new(false),
            panic: Mutex::new(None),
            waiter: Mutex::new(None),
        }
    }

    /// Runs a job as thread 0 and returns when every part has run; the panic of a part if there
    /// was one. `unpark(seat)` wakes a worker.
    ///
    /// # Safety
    /// One caller at a time.
    pub(super) unsafe fn run(
        &self,
        parts: usize,
        body: &Body<'_>,
        unpark: impl Fn(usize),
    ) -> Result<(), Box<dyn Any + Send>> {
        for (i, seat) in self.seats.iter().enumerate() {
            seat.cursor.store(self.share(parts, i), Ordering::Relaxed);
        }
        self.failed.store(false, Ordering::Relaxed);
        // SAFETY: the type differs in lifetime only. The pointer is used by this function and by
        // workers inside the job, and this function returns only when none is left inside.
        let body = unsafe { std::mem::transmute::<&Body<'_>, *const Body<'static>>(body) };
        // SAFETY: the job is closed, nobody is inside, and we are the only caller.
        self.job.with_mut(|job| unsafe { *job = Job { body, parts } });

        // Release: workers that join see the job. Acquire: we see the marks of those asleep.
        let before = self.state.0.fetch_add(NEXT + OPEN, Ordering::AcqRel);
        if before & ASLEEP != 0 {
            for (i, seat) in self.seats.iter().enumerate().take(parts).skip(1) {
                if seat.asleep.load(Ordering::Relaxed) {
                    unpark(i);
                }
            }
        }
        self.claim(&Job { body, parts }, 0);
        // Acquire, here and below: what the parts of those who left have written.
        let before = self.state.0.fetch_sub(OPEN, Ordering::AcqRel);
        if before & INSIDE != 0 {
            self.wait_until_empty();
        }
        if self.failed.load(Ordering::Relaxed)
            && let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
        {
            return Err(panic);
        }
        Ok(())
    }

    /// Tells the workers to end; they have to be unparked after it.
    pub(super) fn stop(&self) {
        self.state.0.fetch_or(STOP, Ordering::Relaxed);
    }

    /// The life of the worker in `seat`.
    pub(super) fn work(&self, seat: usize) {
        let mut done = 0;
        loop {
            self.wait_for_job(seat, done);
            let before = self.state.0.fetch_add(ONE_INSIDE, Ordering::Acquire);
            if before & OPEN != 0 {
                done = before / NEXT;
                // SAFETY: we are inside an open job; the caller does not touch it until we leave.
                self.job.with(|job| self.claim(unsafe { &*job }, seat));
            }
            self.leave();
            if before & STOP != 0 {
                return;
            }
        }
    }

    /// Waits for a job other than number `done`, or for the end.
    fn wait_for_job(&self, seat: usize, done: u64) {
        let called = |state: u64| state & STOP != 0 || state & OPEN != 0 && state / NEXT != done;
        if spin_until(|| called(self.state.0.load(Ordering::Relaxed))) {
            return;
        }
        let asleep = &self.seats[seat].asleep;
        asleep.store(true, Ordering::Relaxed);
        let mut state = self.state.0.load(Ordering::Relaxed);
        while !called(state) {
            // Release: who finds us counted finds the mark above.
            match self.state.0.compare_exchange_weak(
                state,
                state + ONE_ASLEEP,
                Ordering::Release,
                Ordering::Relaxed,
            ) {
                Err(now) => state = now,
                Ok(_) => {
                    while !called(self.state.0.load(Ordering::Relaxed)) {
                        park();
                    }
                    self.state.0.fetch_sub(ONE_ASLEEP, Ordering::Relaxed);
                    break;
                }
            }
        }
        asleep.store(false, Ordering::Relaxed);
    }

    /// Leaves the job; it may end at this moment. The last one out wakes a caller that sleeps.
    fn leave(&self) {
        let before = self.state.0.fetch_sub(ONE_INSIDE, Ordering::AcqRel);
        if before & (INSIDE | WAITING) == ONE_INSIDE | WAITING
            && let Some(caller) = &*self.waiter.lock().unwrap_or_else(PoisonError::into_inner)
        {
            // Maybe the caller of a later job already: it looks at the state and parks again.
            caller.unpark();
        }
    }

    /// The caller's wait for the workers inside a closed job.
    fn wait_until_empty(&self) {
        let empty = || self.state.0.load(Ordering::Acquire) & INSIDE == 0;
        if spin_until(empty) {
            return;
        }
        *self.waiter.lock().unwrap_or_else(PoisonError::into_inner) = Some(current());
        self.state.0.fetch_add(WAITING, Ordering::AcqRel);
        while !empty() {
            park();
        }
        self.state.0.fetch_sub(WAITING, Ordering::Relaxed);
    }

    /// Runs parts until none is left: first this thread's share, then the others'.
    fn claim(&self, job: &Job, thread: usize) {
        let threads = self.seats.len();
        let result = catch_unwind(AssertUnwindSafe(|| {
            IN_PART.with(|inside| inside.set(true));
            for i in 0..threads {
                let owner = (thread + i) % threads;
                let cursor = &self.seats[owner].cursor;
                let end = self.share(job.parts, owner + 1);
                // Looked at before it is raised: a share that is used up is not worth taking its
                // cache line from the others who look at it.
                while !self.failed.load(Ordering::Relaxed) && cursor.load(Ordering::Relaxed) < end {
                    let part = cursor.fetch_add(1, Ordering::Relaxed);
                    if part >= end {
                        break;
                    }
                    // SAFETY: the caller keeps the body alive while anybody is inside the job.
                    unsafe { (*job.body)(thread, part) };
                }
            }
        }));
        IN_PART.with(|inside| inside.set(false));
        if let Err(panic) = result {
            self.failed.store(true, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
    }

    /// The first part of thread `thread`'s share. With fewer parts than threads the first
    /// threads have one each: they are the ones that are woken.
    fn share(&self, parts: usize, thread: usize) -> usize {
        let sharing = self.seats.len().min(parts);
        let thread = thread.min(sharing);
        // parts * thread / sharing without overflow.
        parts / sharing * thread + parts % sharing * thread / sharing
    }
}
