//! The step in progress: who is read, in which order, and who is handed out next.

use std::collections::VecDeque;
use std::time::Instant;

use forebay_core::{CancelToken, ExpertKey};
use forebay_io::{JobStats, Priority, ReadError, Slab};

use super::{ExpertError, ExpertStore, Flight, Order};
use crate::routes::Union;

/// The step in progress. Kept in the store and not in [`Step`], so that the store can clean up
/// even after a step that was leaked.
#[derive(Default)]
pub(super) struct Run {
    /// Index of the layer.
    pub(super) at: usize,
    order: Order,
    /// Residents in the order in which they are handed out.
    hits: VecDeque<(u32, usize)>,
    /// Every miss, in the order in which they are read.
    loads: Vec<Load>,
    /// Loads before this one have been started.
    next: usize,
    /// Loads that are there and were not handed out: in order of arrival, or by expert.
    ready: VecDeque<usize>,
    in_flight: usize,
    /// The staging slab that the caller is looking at.
    shown: Option<Slab>,
    /// A load that failed.
    failed: Option<(u32, ReadError)>,
    abandoned: bool,
    /// Tells runs apart.
    serial: u64,
}

struct Load {
    expert: u32,
    /// Cache slot of a miss that stays; `None` passes through.
    slot: Option<usize>,
    /// It is read into a staging slab although it stays: it was asked for ahead, or its slot's slab was away.
    staged: bool,
    asked: Asked,
    /// Bytes that were read because it was asked for ahead.
    ahead_bytes: u64,
    /// Its job, while it is in the reader.
    tag: Option<u64>,
    /// The staging slab that it lies in.
    slab: Option<Slab>,
    shown: bool,
}

/// When a load was asked for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Asked {
    /// By its step.
    #[default]
    Now,
    /// Ahead, and it was there when the step began.
    Early,
    /// Ahead, and it was still being read then.
    Late,
}

impl Load {
    fn new(expert: u32, slot: Option<usize>) -> Self {
        let asked = Asked::Now;
        Self { expert, slot, staged: false, asked, ahead_bytes: 0, tag: None, slab: None, shown: false }
    }
}

/// The experts of one layer for one step, one at a time.
///
/// [`next_ready`](Self::next_ready) lends them out; see there for the order.
/// Dropping a step early abandons what was not handed out.
pub struct Step<'s> {
    store: &'s mut ExpertStore,
    /// The run that it hands out.
    serial: u64,
    cancel: Option<&'s CancelToken>,
}

/// An expert that can be computed now.
#[derive(Clone, Copy, Debug)]
pub struct Ready<'s> {
    /// Its number in the layer.
    pub expert: u32,
    /// Its bytes, as the layer's segments (and transform) laid them out.
    pub bytes: &'s [u8],
}

impl ExpertStore {
    /// Looks the union up and starts reading what is missing.
    pub(super) fn begin_run(&mut self, at: usize, union: &Union, order: Order) {
        self.look_ahead.observe(&self.counters, Instant::now());
        let plan = self.layers[at].cache.plan_rows(&union.experts, &union.uses, union.rows);
        self.counters.requests += union.uses.iter().copied().map(u64::from).sum::<u64>();
        self.counters.hits += plan.hits.len() as u64;
        self.counters.misses += (plan.kept.len() + plan.transient.len()) as u64;
        self.counters.evictions += plan.evicted.len() as u64;

        let kept = plan.kept.iter().map(|&(expert, slot)| (expert, Some(slot)));
        let transient = plan.transient.iter().map(|&expert| (expert, None));
        let mut misses: Vec<(u32, Option<usize>)> = kept.chain(transient).collect();
        let mut hits = plan.hits;
        match order {
            Order::Arrival => misses.sort_by_cached_key(|miss| self.layers[at].disk_position(miss.0)),
            Order::Ascending => {
                misses.sort_unstable();
                hits.sort_unstable();
            }
        }
        self.run = Run { at, order, hits: hits.into(), serial: self.run.serial + 1, ..Run::default() };
        for (i, (expert, slot)) in misses.into_iter().enumerate() {
            self.run.loads.push(Load::new(expert, slot));
            self.claim_guess(i);
        }
        // What is left of the guesses was wrong.
        self.forget_guesses();
        self.start_loads();
    }

    /// Takes over what was read ahead for a load, or is being read. What came of it counts when the load is
    /// handed out or its step ends, as it may be [given up](Self::give_up_a_guess) before.
    fn claim_guess(&mut self, load: usize) {
        let expert = self.run.loads[load].expert;
        let Some(guess) = self.ahead.take(self.run.at, expert) else { return };
        self.run.loads[load].staged = true;
        match guess.arrived {
            Some((slab, bytes)) => {
                self.run.loads[load].asked = Asked::Early;
                self.run.loads[load].ahead_bytes = bytes;
                self.place(load, slab);
            }
            None => {
                self.run.loads[load].asked = Asked::Late;
                self.run.loads[load].tag = Some(guess.tag);
                self.run.in_flight += 1;
                self.flights.insert(guess.tag, Flight::Load(load));
                self.reader.promote(guess.tag);
            }
        }
    }

    /// Starts loads, in order, as long as there are slabs: those that stay own one, the others
    /// take staging slabs.
    pub(super) fn start_loads(&mut self) {
        while let Some(load) = self.run.loads.get(self.run.next) {
            if !load.staged {
                let (expert, slot) = (load.expert, load.slot);
                let own = slot.and_then(|slot| self.slab_of_slot(slot));
                let borrowed = own.is_none();
                let Some(slab) = own.or_else(|| self.staging[self.layers[self.run.at].class].pop()) else {
                    return;
                };
                self.run.loads[self.run.next].staged = borrowed && slot.is_some();
                let flight = Flight::Load(self.run.next);
                let tag = self.submit(self.run.at, expert, slab, Priority::Demand, flight);
                self.run.loads[self.run.next].tag = Some(tag);
                self.run.in_flight += 1;
            }
            self.run.next += 1;
        }
    }

    /// The slab of a slot of the layer, unless something that nobody waits for is being read into it.
    fn slab_of_slot(&mut self, slot: usize) -> Option<Slab> {
        let at = self.run.at;
        self.layers[at].slots[slot].take().or_else(|| self.take_back(at, slot))
    }

    /// Whether every load of the step has its slab.
    pub(super) fn all_started(&self) -> bool {
        self.run.next == self.run.loads.len()
    }

    /// A load of the step has been read, or could not be.
    pub(super) fn load_arrived(&mut self, load: usize, slab: Slab, result: Result<JobStats, ReadError>) {
        self.run.in_flight -= 1;
        self.run.loads[load].tag = None;
        match result {
            Ok(stats) => {
                if self.run.loads[load].asked == Asked::Late {
                    self.run.loads[load].ahead_bytes = stats.bytes;
                }
                self.place(load, slab);
            }
            Err(cause) => {
                self.run.failed = Some((self.run.loads[load].expert, cause));
                self.put_back(load, slab);
            }
        }
    }

    /// Puts the bytes of a load where they stay, and lists it as ready.
    fn place(&mut self, load: usize, slab: Slab) {
        let Load { slot, staged, .. } = self.run.loads[load];
        match slot {
            // What was read ahead changes places with the slab of whoever was evicted.
            Some(slot) if staged => {
                if let Some(evicted) = self.layers[self.run.at].slots[slot].replace(slab) {
                    self.give_back(evicted);
                }
            }
            Some(slot) => self.layers[self.run.at].slots[slot] = Some(slab),
            None => self.run.loads[load].slab = Some(slab),
        }
        let at = match self.run.order {
            Order::Arrival => self.run.ready.len(),
            // Loads lie in ascending order.
            Order::Ascending => self.run.ready.partition_point(|other| *other < load),
        };
        self.run.ready.insert(at, load);
    }

    /// Counts what reading ahead came to for a load, once.
    fn book_guess(&mut self, load: usize) {
        let load = &mut self.run.loads[load];
        let bytes = std::mem::take(&mut load.ahead_bytes);
        match std::mem::take(&mut load.asked) {
            Asked::Now => {}
            Asked::Early => {
                self.counters.ahead_ready += 1;
                self.counters.ahead_useful_bytes += bytes;
            }
            Asked::Late => {
                self.counters.ahead_late += 1;
                self.counters.ahead_late_bytes += bytes;
            }
        }
    }

    /// Whether the step can only go on with a slab that a guess holds: nothing is being read for it, and no
    /// slab of a guess that was wrong is about to come back.
    fn lacks_a_slab(&self) -> bool {
        self.run.in_flight == 0 && !self.flights.values().any(|flight| *flight == Flight::Nobody)
    }

    /// Frees the staging slab of the last load that was read ahead and whose turn has not come,
    /// because one that is due before it has none. It is read again in its turn.
    fn give_up_a_guess(&mut self) -> bool {
        let held = self.run.loads.iter().rposition(|load| load.slab.is_some());
        let Some(load) = held.filter(|load| *load > self.run.next) else { return false };
        self.run.ready.retain(|ready| *ready != load);
        self.run.loads[load].staged = false;
        if let Some(slab) = self.run.loads[load].slab.take() {
            self.run.loads[load].asked = Asked::Now;
            let bytes = std::mem::take(&mut self.run.loads[load].ahead_bytes);
            self.counters.wasted(bytes);
            self.give_back(slab);
        }
        true
    }

    /// Puts the slab of a load that brought nothing where it came from.
    fn put_back(&mut self, load: usize, slab: Slab) {
        match self.run.loads[load] {
            Load { slot: Some(slot), staged: false, .. } => {
                self.layers[self.run.at].slots[slot] = Some(slab);
            }
            _ => self.give_back(slab),
        }
    }

    /// Takes back the slab that was handed out last.
    fn reuse_shown(&mut self) {
        if let Some(slab) = self.run.shown.take() {
            self.give_back(slab);
        }
    }

    /// Ends the step in progress: none of its reads is in flight afterwards, every slab is back,
    /// and a miss that was not handed out is not resident. Does nothing the second time.
    pub(super) fn settle(&mut self) {
        // Whoever still holds the step must not take this for its end.
        self.run.abandoned |= !self.run.is_over();
        self.run.next = self.run.loads.len();
        self.reuse_shown();
        for load in 0..self.run.loads.len() {
            let Some(tag) = self.run.loads[load].tag else { continue };
            if let Some(job) = self.reader.cancel(tag) {
                self.flights.remove(&tag);
                self.run.in_flight -= 1;
                self.put_back(load, job.slab);
            }
        }
        while self.run.in_flight > 0 && self.await_one() {}
        (0..self.run.loads.len()).for_each(|load| self.book_guess(load));
        for load in std::mem::take(&mut self.run.loads) {
            if let Some(slab) = load.slab {
                self.staging[slab.class()].push(slab);
            }
            if !load.shown {
                self.layers[self.run.at].cache.forget(load.expert);
            }
        }
        self.run.next = 0;
        self.run.ready.clear();
        self.run.hits.clear();
    }

    /// Gives up the step in progress.
    fn abandon(&mut self) {
        self.run.abandoned = true;
        self.settle();
    }

    /// The expert that is next, if one can be handed out now.
    fn pick(&mut self) -> Option<Pick> {
        let run = &mut self.run;
        let hit = run.hits.front().copied();
        match run.order {
            Order::Arrival => match hit {
                Some(_) => run.hits.pop_front().map(Pick::Hit),
                None => run.ready.pop_front().map(Pick::Load),
            },
            Order::Ascending => {
                let load = run.loads.iter().position(|load| !load.shown);
                match (hit, load) {
                    (Some(hit), Some(load)) if hit.0 > run.loads[load].expert => run.take_ready(load),
                    (Some(_), _) => run.hits.pop_front().map(Pick::Hit),
                    (None, Some(load)) => run.take_ready(load),
                    (None, None) => None,
                }
            }
        }
    }

    fn ready_in_slot(&self, expert: u32, slot: usize) -> Ready<'_> {
        let layer = &self.layers[self.run.at];
        let slab = layer.slots[slot].as_ref().expect("the slab of a resident is in its slot");
        Ready { expert, bytes: &slab[..layer.slab_len] }
    }
}

enum Pick {
    Hit((u32, usize)),
    Load(usize),
}

impl Run {
    /// A load whose turn it is, if it is there.
    fn take_ready(&mut self, load: usize) -> Option<Pick> {
        let first = *self.ready.front()?;
        (first == load).then(|| {
            self.ready.pop_front();
            Pick::Load(load)
        })
    }

    /// Whether everything has been handed out.
    fn is_over(&self) -> bool {
        self.hits.is_empty() && self.loads.iter().all(|load| load.shown)
    }
}

impl<'s> Step<'s> {
    pub(super) fn new(store: &'s mut ExpertStore, cancel: Option<&'s CancelToken>) -> Self {
        Self { serial: store.run.serial, store, cancel }
    }

    /// The next expert of the union; `None` after the last one.
    ///
    /// In [`Order::Arrival`], residents come first, in routing order and without waiting, then the
    /// others as their reads complete; the caller must not let that order show in what it
    /// computes. An error (a failed read, a cancellation) abandons the step: no more experts
    /// come, and the store is ready for the next step.
    pub fn next_ready(&mut self) -> Result<Option<Ready<'_>>, ExpertError> {
        let store = &mut *self.store;
        let layer = store.layers[store.run.at].layer;
        if store.run.abandoned || store.run.serial != self.serial {
            return Err(ExpertError::Abandoned { layer });
        }
        store.reuse_shown();
        store.collect();
        loop {
            if self.cancel.is_some_and(CancelToken::is_cancelled) {
                store.abandon();
                return Err(ExpertError::Cancelled { layer });
            }
            if let Some((expert, cause)) = store.run.failed.take() {
                store.abandon();
                return Err(ExpertError::Load { key: ExpertKey { layer, expert }, cause });
            }
            match store.pick() {
                Some(Pick::Hit((expert, slot))) => return Ok(Some(store.ready_in_slot(expert, slot))),
                Some(Pick::Load(load)) => {
                    store.book_guess(load);
                    let len = store.layers[store.run.at].slab_len;
                    let Load { expert, slot, shown, slab, .. } = &mut store.run.loads[load];
                    *shown = true;
                    let (expert, slot, slab) = (*expert, *slot, slab.take());
                    if let Some(slot) = slot {
                        return Ok(Some(store.ready_in_slot(expert, slot)));
                    }
                    store.run.shown = slab;
                    let bytes = store.run.shown.as_deref().map_or(&[][..], |slab| &slab[..len]);
                    return Ok(Some(Ready { expert, bytes }));
                }
                None if store.run.is_over() => return Ok(None),
                None => {}
            }
            // What is read for others, to warm up above all, is no reason to wait.
            let freed = store.lacks_a_slab() && store.give_up_a_guess();
            if !freed && !store.await_one() {
                store.abandon();
                return Err(ExpertError::Abandoned { layer });
            }
        }
    }

    /// The store, to ask it for what a later step will want. What ends the step (another one, a
    /// change of slots) makes [`next_ready`](Self::next_ready) fail.
    pub fn store(&mut self) -> &mut ExpertStore {
        self.store
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.store.settle();
    }
}
