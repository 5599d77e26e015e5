//! Who watches a fetch, and how it is stopped.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use forebay_core::CancelToken;

use super::error::GetError;

/// How often waiting work looks whether it should stop.
const LOOK: Duration = Duration::from_millis(25);

/// What happens on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// How far the work is.
    Progress {
        /// Bytes that are on the disk, those of earlier runs included.
        done: u64,
        /// Bytes that there will be.
        total: u64,
        /// Bytes that arrived in this run, those that had to be thrown away included.
        arrived: u64,
    },
    /// One file of many begins to be fetched.
    Started {
        /// The file.
        file: String,
        /// Its bytes.
        bytes: u64,
    },
    /// A pause before something is tried again.
    Waiting {
        /// What is being fetched.
        what: String,
        /// What happened.
        why: String,
        /// How long.
        pause: Duration,
    },
    /// A file begins again from its first byte.
    Restarted {
        /// The file.
        file: String,
        /// Why.
        why: &'static str,
    },
    /// A file is complete, verified and in its place.
    Finished {
        /// The file.
        file: String,
    },
}

/// The caller's side of a fetch.
#[derive(Clone, Copy)]
pub struct Watch<'a> {
    /// Raised to stop; a stopped fetch can be continued.
    pub cancel: &'a CancelToken,
    /// Called from several threads, often; it should be quick.
    pub seen: &'a (dyn Fn(Event) + Sync),
}

/// Tells the threads of one fetch to stop: because the user said so, or because one of them failed.
pub(super) struct Stop<'a> {
    cancel: &'a CancelToken,
    failed: AtomicBool,
}

impl<'a> Stop<'a> {
    pub fn new(cancel: &'a CancelToken) -> Self {
        Self { cancel, failed: AtomicBool::new(false) }
    }

    /// Something failed: the others may stop.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    pub fn is_raised(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.cancel.is_cancelled()
    }

    pub fn check(&self) -> Result<(), GetError> {
        if self.is_raised() { Err(GetError::Cancelled) } else { Ok(()) }
    }

    /// Waits, but not beyond the moment when the work should stop.
    pub fn sleep(&self, pause: Duration) -> Result<(), GetError> {
        let end = Instant::now() + pause;
        loop {
            self.check()?;
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Ok(());
            }
            thread::sleep(left.min(LOOK));
        }
    }

    /// Runs `work`. If it should stop meanwhile, `interrupt` is called until it has ended, so that nothing waits for
    /// a silent server.
    pub fn during<T>(&self, interrupt: impl Fn() + Sync, work: impl FnOnce() -> T) -> T {
        let interrupt = &interrupt;
        // Dropped when the work ends, be it with a panic.
        let (working, ended) = channel::<()>();
        thread::scope(|scope| {
            let working = working;
            scope.spawn(move || {
                while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    if self.is_raised() {
                        interrupt();
                    }
                }
            });
            let result = work();
            drop(working);
            result
        })
    }
}
