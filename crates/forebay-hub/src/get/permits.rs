//! What the files of a run share: a number of connections, and counts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::client::lock;
use super::error::GetError;
use super::watch::{Event, Stop};

/// How often one who waits for a connection looks whether to stop.
const LOOK: Duration = Duration::from_millis(50);

/// Counts for the one who watches.
#[derive(Default)]
pub(super) struct Tally {
    pub done: AtomicU64,
    pub arrived: AtomicU64,
    pub total: u64,
}

impl Tally {
    pub fn event(&self) -> Event {
        let done = self.done.load(Ordering::Relaxed);
        Event::Progress { done, total: self.total, arrived: self.arrived.load(Ordering::Relaxed) }
    }
}

/// Connections that may be used at the same time.
pub(super) struct Permits {
    free: Mutex<usize>,
    wake: Condvar,
    pub all: usize,
}

/// One of them; dropping it gives it back.
pub(super) struct Permit<'p>(&'p Permits);

impl Permits {
    pub fn new(connections: usize) -> Self {
        let all = connections.max(1);
        Self { free: Mutex::new(all), wake: Condvar::new(), all }
    }

    pub fn take(&self, stop: &Stop<'_>) -> Result<Permit<'_>, GetError> {
        let mut free = lock(&self.free);
        while *free == 0 {
            stop.check()?;
            free = self.wake.wait_timeout(free, LOOK).unwrap_or_else(PoisonError::into_inner).0;
        }
        *free -= 1;
        Ok(Permit(self))
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        *lock(&self.0.free) += 1;
        self.0.wake.notify_one();
    }
}
