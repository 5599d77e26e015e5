//! Reads into slots that nobody has taken yet: what earlier runs used most, while the disk is idle.
//!
//! Whoever has nothing to ask for says so, again and again ([`ExpertStore::warm_up`]): some are queued
//! each time, and nothing new after the last time.
//!
//! They wait for everything else ([`Priority::WarmUp`]) and nobody leaves for what they bring, so
//! they cost at most as many reads as there are free slots. The slab of a slot travels with its
//! read; a step that needs the slot meanwhile takes the slab back or, if it is being read into,
//! borrows a staging slab. Which experts are resident then depends on time, and so do hits; what is
//! computed does not.

use std::time::Duration;

use forebay_core::CancelToken;
use forebay_io::{JobStats, Priority, ReadError, Slab};

use super::{ExpertStore, Flight};

/// Experts that are queued and being read at most; the next ones follow when half of them are there.
const BATCH: usize = 32;

/// How long a cancellation may go unnoticed.
const SLICE: Duration = Duration::from_millis(10);

/// One expert that a free slot may have.
struct Wanted {
    worth: f64,
    at: usize,
    expert: u32,
    slot: usize,
}

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
    /// Does what a [resting](Self::rest) store does, and sees to it that some of the experts that are worth
    /// most by what is known, a [seed](Self::seed) above all, are being read into the free slots. Returns at
    /// once and says how many; 0 if there is nothing to do until something changes. To be called again and again
    /// while nobody asks for anything: before the first prompt, and between two turns.
    pub fn warm_up(&mut self) -> usize {
        self.rest();
        let begun = self.warming_up();
        if begun > BATCH / 2 {
            return begun;
        }
        let mut wanted = self.wanted();
        wanted.truncate(BATCH - begun);
        for Wanted { at, expert, slot, .. } in wanted {
            let Some(slab) = self.layers[at].slots[slot].take() else { continue };
            let tag = self.submit(at, expert, slab, Priority::WarmUp, Flight::WarmUp(at));
            self.layers[at].warming.push(Warming { tag, expert, slot });
        }
        self.warming_up()
    }

    /// Free slots and who is worth most there, the best first.
    fn wanted(&self) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for (at, layer) in self.layers.iter().enumerate() {
            let free = layer.cache.free_slots();
            // A step may want to borrow a staging slab.
            if free.is_empty() || self.staging[layer.class].is_empty() {
                continue;
            }
            let mut experts = layer.cache.wanted();
            experts.retain(|&(expert, _)| {
                let on_its_way = layer.is_warming(expert) || self.ahead.has(at, expert);
                (expert as usize) < layer.experts.len() && !on_its_way && !layer.unreadable.contains(&expert)
            });
            // A step takes the first free slots: the best come to the last ones.
            let slots = free.into_iter().rev().filter(|slot| layer.slots[*slot].is_some());
            let both = experts.into_iter().zip(slots);
            wanted.extend(both.map(|((expert, worth), slot)| Wanted { worth, at, expert, slot }));
        }
        // Stable: equals stay in the order of layers.
        wanted.sort_by(|a, b| b.worth.total_cmp(&a.worth));
        wanted
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
    /// resident first, and what only waits to be read is the step's own affair. `false` if it was cancelled
    /// meanwhile; what is being read then becomes resident when it is there.
    pub(super) fn hurry_warm_up(&mut self, at: usize, union: &[u32], cancel: Option<&CancelToken>) -> bool {
        let warming = &self.layers[at].warming;
        let members = warming.iter().filter(|warming| union.contains(&warming.expert));
        let mut tags: Vec<u64> = members.map(|warming| warming.tag).collect();
        tags.retain(|&tag| !self.unqueue(at, tag));
        for &tag in &tags {
            self.reader.promote(tag);
        }
        while self.layers[at].warming.iter().any(|warming| tags.contains(&warming.tag)) {
            if cancel.is_some_and(CancelToken::is_cancelled) {
                return false;
            }
            self.await_with(|reader| reader.recv_timeout(SLICE));
        }
        true
    }

    /// Sees to it that an expert is not to be read into a free slot, because it is wanted sooner; `false` if it
    /// is being read there already.
    pub(super) fn leave_warm_up(&mut self, at: usize, expert: u32) -> bool {
        let found = self.layers[at].warming.iter().find(|warming| warming.expert == expert);
        found.map(|warming| warming.tag).is_none_or(|tag| self.unqueue(at, tag))
    }

    /// Takes back what only waits to be read; `false` if it is being read.
    fn unqueue(&mut self, at: usize, tag: u64) -> bool {
        let Some(job) = self.reader.cancel(tag) else { return false };
        self.flights.remove(&tag);
        self.warming_ended(at, tag, job.slab);
        true
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
        match (warming, result) {
            (Some((expert, slot)), Ok(stats)) => {
                // A step may have put another slab there meanwhile and given its expert up: the slot is free
                // again, and what lies in it is not this expert.
                let in_place = layer.slots.get(slot).is_some_and(Option::is_none);
                if !in_place || !layer.cache.move_in(expert, slot) {
                    self.counters.warm_up_wasted_bytes += stats.bytes;
                }
            }
            (None, _) | (Some(_), Err(ReadError::Aborted { .. })) => {}
            (Some((expert, _)), Err(_)) => layer.unreadable.push(expert),
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
