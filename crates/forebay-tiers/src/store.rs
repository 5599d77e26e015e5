//! The expert store: one layer's experts for one step, and reads that run ahead of it.
//!
//! The store owns every slab. A layer's slots hold its residents; staging slabs, shared by the
//! layers of a class, hold experts that pass through and experts that were read ahead. A [`Step`]
//! borrows the store, so steps never overlap, and however a step ends (to the end, by an error,
//! by cancellation, by being dropped) none of its reads is left running and every slab is back.
//! Reads ahead go on between steps; what they bring is taken by the step that wants it, or its
//! slab goes back.

mod ahead;
mod config;
mod error;
mod recording;
mod slots;
mod step;
mod warm;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use forebay_core::{CancelToken, ExpertKey, ReadSegment};
use forebay_io::{Arena, Done, Job, Priority, Reader, Slab, Transform};

pub use config::{ConfigError, LayerExperts, StoreConfig};
pub use error::ExpertError;
pub use recording::recording_bytes;
pub use step::{Ready, Step};

use crate::cache::LayerCache;
use crate::counters::Counters;
use crate::governor::{Governor, Machine};
use crate::look_ahead::{Controller, LookAhead};
use crate::routes::Union;
use ahead::Ahead;
use recording::Recording;
use step::Run;
use warm::Warming;

/// The order in which a step hands its experts out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Order {
    /// Residents first, in routing order, then the others as they arrive. Nothing waits for
    /// what it does not need.
    #[default]
    Arrival,
    /// By expert id. What arrives early waits in its slab.
    Ascending,
}

/// Experts in memory and on disk, behind one door.
pub struct ExpertStore {
    /// Decoder layer to index in `layers`.
    index: BTreeMap<u32, usize>,
    layers: Vec<Layer>,
    /// Per class: staging slabs that are not in use.
    staging: Vec<Vec<Slab>>,
    reader: Reader,
    counters: Counters,
    /// What every job in the reader is for, by tag.
    flights: HashMap<u64, Flight>,
    next_tag: u64,
    run: Run,
    ahead: Ahead,
    look_ahead: Controller,
    governed: Option<Governed>,
    recording: Option<Recording>,
}

/// What keeps the number of slots in step with the machine.
struct Governed {
    governor: Governor,
    machine: Box<dyn Machine>,
}

struct Layer {
    layer: u32,
    class: usize,
    slab_len: usize,
    experts: Vec<Arc<[ReadSegment]>>,
    checks: Vec<u32>,
    transforms: Vec<Option<Arc<dyn Transform>>>,
    cache: LayerCache,
    /// The slab of each cache slot; away while it is being read into.
    slots: Vec<Option<Slab>>,
    /// What is being read into free slots.
    warming: Vec<Warming>,
    /// What could not be read into a free slot and is not tried again there.
    unreadable: Vec<u32>,
}

/// Who waits for a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flight {
    /// The step in progress: an index into its loads.
    Load(usize),
    /// A later step, perhaps.
    Ahead,
    /// A free slot of the layer with this index.
    WarmUp(usize),
    /// Nobody any more.
    Nobody,
}

impl ExpertStore {
    /// Checks the configuration and takes all slabs it will ever use from the arena.
    pub fn new(config: StoreConfig, arena: &Arena, reader: Reader) -> Result<Self, ConfigError> {
        config.check(arena, &reader)?;
        let take =
            |class: usize, count: usize| (0..count).map_while(|_| arena.take(class)).collect::<Vec<_>>();
        let staging = config.staging.iter().enumerate().map(|(class, &depth)| take(class, depth)).collect();
        let index = config.layers.keys().enumerate().map(|(at, &layer)| (layer, at)).collect();
        let layers = config
            .layers
            .into_iter()
            .map(|(layer, LayerExperts { class, quota, slab_len, experts, checks, transforms })| Layer {
                layer,
                class,
                slab_len,
                experts,
                checks,
                transforms,
                cache: LayerCache::new(quota, config.policy),
                slots: take(class, quota).into_iter().map(Some).collect(),
                warming: Vec::new(),
                unreadable: Vec::new(),
            })
            .collect();
        Ok(Self {
            index,
            layers,
            staging,
            reader,
            counters: Counters::default(),
            flights: HashMap::new(),
            next_tag: 0,
            run: Run::default(),
            ahead: Ahead::default(),
            look_ahead: Controller::new(config.look_ahead),
            governed: config
                .governed
                .map(|(plan, machine)| Governed { governor: Governor::new(plan), machine }),
            recording: None,
        })
    }

    /// Starts a step: decides who stays and starts reading. An error leaves the store as it was.
    pub fn step<'s>(
        &'s mut self,
        layer: u32,
        union: &Union,
        order: Order,
        cancel: Option<&'s CancelToken>,
    ) -> Result<Step<'s>, ExpertError> {
        let at = *self.index.get(&layer).ok_or(ExpertError::UnknownLayer { layer })?;
        self.layers[at].check_union(&union.experts)?;
        if cancel.is_some_and(CancelToken::is_cancelled) {
            return Err(ExpertError::Cancelled { layer });
        }
        self.rest();
        if !self.hurry_warm_up(at, &union.experts, cancel) {
            return Err(ExpertError::Cancelled { layer });
        }
        if let Some(recording) = &mut self.recording {
            recording.add(at, union);
        }
        self.begin_run(at, union, order);
        Ok(Step::new(self, cancel))
    }

    /// Somebody asks for something, after a time in which nobody did: what was read meanwhile is dealt with, so
    /// that it counts as read before, and that time says nothing about reading ahead.
    pub fn work_begins(&mut self) {
        self.collect();
        self.look_ahead.work_begins(Instant::now());
    }

    /// Nobody asks for anything any more, until [`work_begins`](Self::work_begins).
    pub fn work_ends(&mut self) {
        self.look_ahead.work_ends(Instant::now());
    }

    /// What a store does that nobody asks for anything, as often as may be: deals with what was read, and gives
    /// memory up or takes it back as the machine wants it. Every step begins with it.
    pub fn rest(&mut self) {
        self.settle();
        self.collect();
        self.govern();
    }

    /// What streaming cost so far.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// The resident experts, by layer, then expert.
    pub fn resident(&self) -> Vec<ExpertKey> {
        let mut keys = Vec::new();
        for Layer { layer, cache, .. } in &self.layers {
            keys.extend(cache.residents().into_iter().map(|expert| ExpertKey { layer: *layer, expert }));
        }
        keys
    }

    /// The resident experts of one layer, in ascending order; none of a layer that the store does not have.
    pub fn resident_in(&self, layer: u32) -> Vec<u32> {
        self.index.get(&layer).map_or_else(Vec::new, |&at| self.layers[at].cache.residents())
    }

    /// Forgets every resident expert and everything that was read ahead, as if the store were new.
    pub fn reset_residency(&mut self) {
        self.settle();
        self.forget_guesses();
        self.stop_warm_up();
        for layer in &mut self.layers {
            layer.cache.clear();
            layer.unreadable.clear();
        }
    }

    /// Forgets what was read ahead: the next step is about something else.
    pub fn forget_ahead(&mut self) {
        self.collect();
        self.forget_guesses();
    }

    /// Changes whether experts are read ahead. What was learnt about it stays.
    pub fn set_look_ahead(&mut self, mode: LookAhead) {
        self.forget_ahead();
        self.look_ahead.set_mode(mode);
    }

    /// Slabs that are in their places, neither being read into nor lost. After a step ended and
    /// while nothing is read ahead or to warm up, that is all of them.
    pub fn slabs_at_home(&self) -> usize {
        let slots = self.layers.iter().flat_map(|layer| &layer.slots).flatten().count();
        slots + self.staging.iter().map(Vec::len).sum::<usize>()
    }

    /// The reader, for its figures.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Queues the read of an expert into a slab.
    fn submit(&mut self, at: usize, expert: u32, slab: Slab, priority: Priority, flight: Flight) -> u64 {
        let layer = &self.layers[at];
        let tag = self.next_tag;
        self.next_tag += 1;
        self.flights.insert(tag, flight);
        self.reader.submit(
            priority,
            Job {
                tag,
                segments: Arc::clone(&layer.experts[expert as usize]),
                check: layer.checks.get(expert as usize).copied(),
                slab,
                len: layer.slab_len,
                transform: layer.transforms.get(expert as usize).cloned().flatten(),
            },
        );
        tag
    }

    /// Deals with everything that has been read, without waiting: what was read before then counts as
    /// read now. Every step begins with it.
    pub fn collect(&mut self) {
        while let Some(done) = self.reader.try_recv() {
            self.arrived(done);
        }
    }

    /// Waits for one read, counting the wait; `false` if there is nothing to wait for.
    fn await_one(&mut self) -> bool {
        self.await_with(Reader::recv)
    }

    /// Waits as `wait` does, counting the wait; `false` if that brought nothing.
    fn await_with(&mut self, wait: impl FnOnce(&Reader) -> Option<Done>) -> bool {
        let started = Instant::now();
        let done = wait(&self.reader);
        self.counters.waited(started.elapsed());
        done.map(|done| self.arrived(done)).is_some()
    }

    /// Hands what a job brought to whoever waits for it.
    fn arrived(&mut self, done: Done) {
        let Done { tag, slab, result } = done;
        let flight = self.flights.remove(&tag);
        self.counters.finished(&result, matches!(flight, Some(Flight::WarmUp(_))));
        match flight {
            Some(Flight::WarmUp(at)) => self.warm_up_arrived(at, tag, slab, result),
            Some(Flight::Load(load)) => self.load_arrived(load, slab, result),
            Some(Flight::Ahead) => self.guess_arrived(tag, slab, result),
            Some(Flight::Nobody) | None => {
                if let Ok(stats) = result {
                    self.counters.wasted(stats.bytes);
                }
                self.give_back(slab);
            }
        }
    }

    /// A staging slab is free: the next load of the step may want it.
    fn give_back(&mut self, slab: Slab) {
        self.staging[slab.class()].push(slab);
        self.start_loads();
    }
}

impl Layer {
    fn check_union(&self, union: &[u32]) -> Result<(), ExpertError> {
        let mut seen = vec![false; self.experts.len()];
        for &expert in union {
            let key = ExpertKey { layer: self.layer, expert };
            match seen.get_mut(expert as usize) {
                None => return Err(ExpertError::UnknownExpert { key, experts: self.experts.len() }),
                Some(true) => return Err(ExpertError::Repeated { key }),
                Some(seen) => *seen = true,
            }
        }
        Ok(())
    }

    /// Bytes of an expert in the files.
    fn read_bytes(&self, expert: u32) -> u64 {
        self.experts[expert as usize].iter().map(|segment| segment.len as u64).sum()
    }

    /// Where an expert's first byte lies.
    fn disk_position(&self, expert: u32) -> Option<(u32, u64)> {
        self.experts[expert as usize].iter().map(|segment| (segment.shard, segment.offset)).min()
    }
}
