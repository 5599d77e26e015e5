//! What the team's protocol is built from: the standard library's atomics, locks and
//! threads, or loom's twins of them under `--cfg loom` (see `model.rs` and `.ci/loom`).

#[cfg(not(loom))]
pub(super) use self::real::*;
#[cfg(not(loom))]
mod real {
    pub(in super::super) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(in super::super) use std::sync::{Arc, Mutex};
    pub(in super::super) use std::thread::{Builder, JoinHandle, Thread, current, park};
    use std::time::{Duration, Instant};

    /// How long a thread spins before it parks: about what waking a parked thread costs.
    const SPIN: Duration = Duration::from_micros(30);

    std::thread_local! {
        /// Whether this thread is running a part: a team called from there runs inline.
        pub(in super::super) static IN_PART: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }

    /// A cell whose users promise that nobody reads while somebody writes; loom checks it.
    pub(in super::super) struct SharedCell<T>(std::cell::UnsafeCell<T>);

    impl<T> SharedCell<T> {
        pub(in super::super) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        pub(in super::super) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        pub(in super::super) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }

    /// Spins for a moment; whether `ready` came true meanwhile.
    pub(in super::super) fn spin_until(ready: impl Fn() -> bool) -> bool {
        let mut started = None;
        loop {
            for _ in 0..64 {
                if ready() {
                    return true;
                }
                std::hint::spin_loop();
            }
            if started.get_or_insert_with(Instant::now).elapsed() > SPIN {
                return false;
            }
        }
    }
}

#[cfg(loom)]
pub(super) use self::modelled::*;
#[cfg(loom)]
mod modelled {
    pub(in super::super) use loom::cell::UnsafeCell as SharedCell;
    pub(in super::super) use loom::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
    pub(in super::super) use loom::sync::{Arc, Mutex};
    pub(in super::super) use loom::thread::{Builder, JoinHandle, Thread, current, park};

    loom::thread_local! {
        pub(in super::super) static IN_PART: std::cell::Cell<bool> = std::cell::Cell::new(false);
    }

    /// One look: loom tries every moment for it, and a longer spin has no more outcomes.
    pub(in super::super) fn spin_until(ready: impl Fn() -> bool) -> bool {
        ready()
    }
}
