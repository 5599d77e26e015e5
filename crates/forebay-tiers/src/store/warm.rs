//! Reads into slots that nobody has taken yet: what earlier runs used most, while the disk is idle.
//!
//! They wait for everything else ([`Priority::WarmUp`]) and nobody leaves for what they bring, so
//! they cost at most as many reads as there are free slots. The slab of a slot travels with its
//! read; a step that needs the slot meanwhile takes the slab back or, if it is being read into,
//! borrows a staging slab. Which experts are resident then depends on time, and so do hits; what is
//! computed does not.

use forebay_io::{JobStats, Priority, ReadError, Slab};

use super::{ExpertStore, Flight};

/// One expert on its way into a free slot.
pub(super) struct Warming {
    tag: u64,
    expert: u32,
    slot: usize,
}

impl super::Layer {
    /// Whether the expert is being read into a free slot, or is to be.
    pub(super) fn is_warming(&self, expert: u32) -> bool {
        self.warming.iter().any(|warming| warming.expert == expert)
    }
}

impl ExpertStore {
    /// Whether [`warm_up`](Self::warm_up) does anything; at first it does not.
    pub fn set_warm_up(&mut self, on: bool) {
        self.warms_up = on;
        if !on {
            self.stop_warm_up();
        }
    }

    /// Begins to read the experts that are worth most by what is known, a [seed](Self::seed) above
    /// all, into the free slots, and returns at once. To be called when nothing is demanded for a
    /// while: before the first prompt, and between two turns.
    pub fn warm_up(&mut self) {
        if !self.warms_up {
            return;
        }
        self.settle();
        self.collect();
        self.govern();
        let mut wanted: Vec<(f64, usize, u32, usize)> = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            // A step may want to borrow one.
            if self.staging[layer.class].is_empty() {
                continue;
            }
            let experts =
                layer.cache.wanted().into_iter().filter(|(expert, _)| {
                    (*expert as usize) < layer.experts.len() && !layer.is_warming(*expert)
                });
            // A step takes the first free slots: the best come to the last ones.
            let slots =
                layer.cache.free_slots().into_iter().rev().filter(|slot| layer.slots[*slot].is_some());
            wanted.extend(experts.zip(slots).map(|((expert, worth), slot)| (worth, at, expert, slot)));
        }
        // Stable: equals stay in the order of layers.
        wanted.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, at, expert, slot) in wanted {
            let Some(slab) = self.layers[at].slots[slot].take() else { continue };
            let tag = self.submit(at, expert, slab, Priority::WarmUp, Flight::WarmUp(at));
            self.layers[at].warming.push(Warming { tag, expert, slot });
        }
    }

    /// Experts that are being read into free slots, or are to be.
    pub fn warming_up(&self) -> usize {
        self.layers.iter().map(|layer| layer.warming.len()).sum()
    }

    /// Ends what was begun. It waits for the pieces that are being read.
    pub(super) fn stop_warm_up(&mut self) {
        for job in self.reader.withdraw(Priority::WarmUp) {
            if let Some(Flight::WarmUp(at)) = self.flights.remove(&job.tag) {
                self.warming_ended(at, job.tag, job.slab);
            }
        }
        for warming in self.layers.iter().flat_map(|layer| &layer.warming) {
            self.reader.abort(warming.tag);
        }
        while self.warming_up() > 0 && self.await_one() {}
    }

    /// A step is about to look up `union`: what of it is being read for a free slot becomes
    /// resident first, and what only waits to be read is the step's own affair.
    pub(super) fn hurry_warm_up(&mut self, at: usize, union: &[u32]) {
        let warming = &self.layers[at].warming;
        let members = warming.iter().filter(|warming| union.contains(&warming.expert));
        let mut tags: Vec<u64> = members.map(|warming| warming.tag).collect();
        tags.retain(|&tag| match self.reader.cancel(tag) {
            Some(job) => {
                self.flights.remove(&tag);
                self.warming_ended(at, tag, job.slab);
                false
            }
            None => {
                self.reader.promote(tag);
                true
            }
        });
        while self.layers[at].warming.iter().any(|warming| tags.contains(&warming.tag)) && self.await_one() {}
    }

    /// The slab of a slot that a step is to read into, if it only waits to be read into.
    pub(super) fn take_back(&mut self, at: usize, slot: usize) -> Option<Slab> {
        let warming = &mut self.layers[at].warming;
        let found = warming.iter().position(|warming| warming.slot == slot)?;
        let job = self.reader.cancel(warming[found].tag)?;
        warming.swap_remove(found);
        self.flights.remove(&job.tag);
        Some(job.slab)
    }

    /// An expert has been read for a free slot. One that failed is read again by the step that
    /// wants it, which reports what is wrong if it still is.
    pub(super) fn warm_up_arrived(
        &mut self,
        at: usize,
        tag: u64,
        slab: Slab,
        result: Result<JobStats, ReadError>,
    ) {
        let layer = &mut self.layers[at];
        let warming = layer.warming.iter().find(|warming| warming.tag == tag);
        let warming = warming.map(|warming| (warming.expert, warming.slot));
        if let (Some((expert, slot)), Ok(stats)) = (warming, result) {
            // A step may have put another slab there meanwhile and given its expert up: the slot is free
            // again, and what lies in it is not this expert.
            let in_place = layer.slots.get(slot).is_some_and(Option::is_none);
            if !in_place || !layer.cache.move_in(expert, slot) {
                self.counters.warm_up_wasted_bytes += stats.bytes;
            }
        }
        self.warming_ended(at, tag, slab);
    }

    /// The slab goes to its slot or, if that got another one meanwhile, to where that came from.
    fn warming_ended(&mut self, at: usize, tag: u64, slab: Slab) {
        let layer = &mut self.layers[at];
        let found = layer.warming.iter().position(|warming| warming.tag == tag);
        let slot = found.map(|found| layer.warming.swap_remove(found).slot);
        match slot.and_then(|slot| layer.slots.get_mut(slot)) {
            Some(place @ None) => {
                *place = Some(slab);
                // The step may have been waiting for it.
                self.start_loads();
            }
            _ => self.give_back(slab),
        }
    }
}
