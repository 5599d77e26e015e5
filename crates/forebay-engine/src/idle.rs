//! What an engine does while nobody asks for anything: between the turns of a chat, say.

use std::thread::{self, Thread};
use std::time::Duration;

use forebay_core::CancelToken;
use forebay_tiers::ExpertStore;

use crate::engine::Engine;

/// Between two looks while experts are read.
const BUSY: Duration = Duration::from_millis(20);

/// Between two looks when there is nothing to do but to give way to other programs.
const QUIET: Duration = Duration::from_millis(500);

impl Engine {
    /// Runs `wait`, which waits for somebody to ask for something, and uses the time until it returns: memory that
    /// other programs need is given back, and with `warm_up` free memory is filled with the experts that are worth
    /// most by what is known of earlier runs. Which experts are resident then depends on time; no result does.
    ///
    /// It ends at once when `wait` returns: at most a batch of reads is left, which wait for everything else.
    pub fn idle_during<T>(&mut self, warm_up: bool, wait: impl FnOnce() -> T) -> T {
        self.idle_watched(warm_up, |_| (), wait)
    }

    /// The same; `look` sees the store from time to time, at least every half second.
    pub(crate) fn idle_watched<T>(
        &mut self,
        warm_up: bool,
        look: impl FnMut(&ExpertStore) + Send,
        wait: impl FnOnce() -> T,
    ) -> T {
        let over = CancelToken::new();
        let store = &mut self.store;
        thread::scope(|scope| {
            let idle = thread::Builder::new().name("idle".to_owned());
            let idle = idle.spawn_scoped(scope, || idle_until(&over, store, warm_up, look));
            // Where there is no thread to be had, nothing of this is done, and nothing depends on it.
            let _end = idle.map(|thread| End { over: &over, thread: thread.thread().clone() });
            wait()
        })
    }
}

/// Ends idling when it is dropped, even by a panic.
struct End<'a> {
    over: &'a CancelToken,
    thread: Thread,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.over.cancel();
        self.thread.unpark();
    }
}

fn idle_until(
    over: &CancelToken,
    store: &mut ExpertStore,
    warm_up: bool,
    mut look: impl FnMut(&ExpertStore),
) {
    let mut filled = !warm_up;
    loop {
        // First of all: who answers at once leaves no time to use.
        thread::park_timeout(if filled { QUIET } else { BUSY });
        if over.is_cancelled() {
            return;
        }
        let slots = store.slots();
        match filled {
            true => store.rest(),
            false => filled = store.warm_up() == 0,
        }
        // Slots that came back are free.
        filled &= !warm_up || store.slots() <= slots;
        look(store);
    }
}
