//! Reads for a step that has not begun: guesses at what the next layer's router will choose.
//!
//! A guess never changes which experts are resident: the cache decides that from the unions of
//! the steps alone, so that hits and misses are the same with and without guesses. A guess only
//! changes when an expert is read.

use forebay_io::{JobStats, Priority, ReadError, Slab};

use super::{ExpertStore, Flight};

/// The guesses at one layer's next step.
#[derive(Default)]
pub(super) struct Ahead {
    /// Index of the layer.
    at: usize,
    guesses: Vec<Guess>,
}

/// One expert that was asked for.
pub(super) struct Guess {
    expert: u32,
    pub(super) tag: u64,
    /// Its slab and the bytes that were read, once they are there.
    pub(super) arrived: Option<(Slab, u64)>,
}

impl Ahead {
    /// Whether this expert was asked for.
    pub(super) fn has(&self, at: usize, expert: u32) -> bool {
        at == self.at && self.guesses.iter().any(|guess| guess.expert == expert)
    }

    /// The guess at this expert, if there is one.
    pub(super) fn take(&mut self, at: usize, expert: u32) -> Option<Guess> {
        if at != self.at {
            return None;
        }
        let found = self.guesses.iter().position(|guess| guess.expert == expert)?;
        Some(self.guesses.swap_remove(found))
    }
}

impl ExpertStore {
    /// Whether guesses at the next layer's experts are worth computing now.
    pub fn wants_look_ahead(&self) -> bool {
        self.look_ahead.is_on()
    }

    /// Asks for experts that the step of layer `layer` will probably want, best guess first.
    /// What is resident, being read already, or has no staging slab left is passed over; what only waits to be
    /// read into a free slot waits no longer. Earlier guesses at the layer that are not among them, and are not
    /// there yet, are given up.
    pub fn look_ahead(&mut self, layer: u32, experts: &[u32]) {
        let Some(&at) = self.index.get(&layer) else { return };
        self.collect();
        if at != self.ahead.at {
            self.forget_guesses();
            self.ahead.at = at;
        }
        self.revise_guesses(experts);
        for &expert in experts {
            // The step in progress comes first where both want staging slabs.
            if !self.all_started() {
                return;
            }
            let layer = &self.layers[at];
            let known = expert as usize >= layer.experts.len()
                || layer.cache.is_resident(expert)
                || self.ahead.has(at, expert);
            if known {
                continue;
            }
            let class = layer.class;
            if self.staging[class].is_empty() {
                return;
            }
            if !self.leave_warm_up(at, expert) {
                continue;
            }
            let Some(slab) = self.staging[class].pop() else { return };
            let tag = self.submit(at, expert, slab, Priority::Predicted, Flight::Ahead);
            self.counters.ahead_asked += 1;
            self.ahead.guesses.push(Guess { expert, tag, arrived: None });
        }
    }

    /// Gives up what is no longer guessed, unless it is there already: it may have been right.
    fn revise_guesses(&mut self, experts: &[u32]) {
        let outdated = |guess: &Guess| guess.arrived.is_none() && !experts.contains(&guess.expert);
        let (outdated, kept) = std::mem::take(&mut self.ahead.guesses).into_iter().partition(outdated);
        self.ahead.guesses = kept;
        self.forget(outdated);
    }

    /// A guess has been read. One that failed is forgotten: the step that wants the expert reads
    /// it again, and reports what is wrong if it still is.
    pub(super) fn guess_arrived(&mut self, tag: u64, slab: Slab, result: Result<JobStats, ReadError>) {
        let at = self.ahead.guesses.iter().position(|guess| guess.tag == tag);
        match (at, result) {
            (Some(at), Ok(stats)) => self.ahead.guesses[at].arrived = Some((slab, stats.bytes)),
            (at, _) => {
                if let Some(at) = at {
                    self.ahead.guesses.swap_remove(at);
                }
                self.give_back(slab);
            }
        }
    }

    /// Gives the slabs of all guesses back, now or as soon as their reads end.
    pub(super) fn forget_guesses(&mut self) {
        let guesses = std::mem::take(&mut self.ahead.guesses);
        self.forget(guesses);
    }

    fn forget(&mut self, guesses: Vec<Guess>) {
        for guess in guesses {
            match guess.arrived {
                Some((slab, bytes)) => {
                    self.counters.wasted(bytes);
                    self.give_back(slab);
                }
                None => match self.reader.cancel(guess.tag) {
                    Some(job) => {
                        self.flights.remove(&guess.tag);
                        self.counters.ahead_dropped += 1;
                        self.give_back(job.slab);
                    }
                    None => {
                        self.flights.insert(guess.tag, Flight::Nobody);
                        self.reader.abort(guess.tag);
                    }
                },
            }
        }
    }
}
