//! A file in front of another one that lets chosen reads wait, so that a test decides what comes first.

use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use forebay_io::ReadAt;

/// No test waits as long; one that does has hung.
const LONG: Duration = Duration::from_secs(5);

pub struct Gate {
    inner: Arc<dyn ReadAt>,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Where reads that begin wait.
    closed: Vec<u64>,
    /// Where reads wait now.
    waiting: Vec<u64>,
    /// One waited too long and was let through.
    gave_way: bool,
}

impl Gate {
    pub fn before(inner: Arc<dyn ReadAt>) -> Self {
        Self { inner, state: Mutex::default(), changed: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Lets reads that begin at `offset` wait.
    pub fn close(&self, offset: u64) {
        self.state().closed.push(offset);
    }

    /// Lets them go on.
    pub fn open(&self, offset: u64) {
        self.state().closed.retain(|closed| *closed != offset);
        self.changed.notify_all();
    }

    /// Returns when a read waits at `offset`.
    pub fn await_read(&self, offset: u64) {
        let missing = |state: &mut State| !state.waiting.contains(&offset);
        let found = self.changed.wait_timeout_while(self.state(), LONG, missing).unwrap();
        assert!(!found.1.timed_out(), "nobody reads at {offset}");
    }

    /// Whether every read waited until its gate was opened.
    pub fn held(&self) -> bool {
        !self.state().gave_way
    }
}

impl ReadAt for Gate {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let mut state = self.state();
        if state.closed.contains(&offset) {
            state.waiting.push(offset);
            self.changed.notify_all();
            let shut = |state: &mut State| state.closed.contains(&offset);
            let (after, waited) = self.changed.wait_timeout_while(state, LONG, shut).unwrap();
            state = after;
            state.waiting.retain(|waiting| *waiting != offset);
            state.gave_way |= waited.timed_out();
        }
        drop(state);
        self.inner.read_at(buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.inner.size()
    }
}
