//! The expert store: one layer's experts for one step, residents first, the
//! rest as they arrive.
//!
//! The store owns every slab. A layer's slots hold its residents; staging slabs,
//! shared by the layers of a class, hold experts that pass through. A [`Step`]
//! borrows the store, so steps never overlap, and however a step ends (to the
//! end, by an error, by cancellation, by being dropped) no read is left running
//! and every slab is back.

mod config;
mod error;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use forebay_core::{CancelToken, ExpertKey, ReadSegment};
use forebay_io::{Arena, Done, Job, Reader, Slab, Transform};

pub use config::{ConfigError, LayerExperts, StoreConfig};
pub use error::ExpertError;

use crate::cache::LayerCache;
use crate::counters::Counters;

/// Experts in memory and on disk, behind one door.
pub struct ExpertStore {
    /// Decoder layer to index in `layers`.
    index: BTreeMap<u32, usize>,
    layers: Vec<Layer>,
    /// Per class: staging slabs that are not in use.
    staging: Vec<Vec<Slab>>,
    reader: Reader,
    counters: Counters,
    run: Run,
}

struct Layer {
    layer: u32,
    class: usize,
    slab_len: usize,
    experts: Vec<Arc<[ReadSegment]>>,
    transform: Option<Arc<dyn Transform>>,
    cache: LayerCache,
    /// The slab of each cache slot; away while it is being read into.
    slots: Vec<Option<Slab>>,
}

/// The step in progress. Kept here and not in [`Step`], so that the store can
/// clean up even after a step that was leaked.
#[derive(Default)]
struct Run {
    /// Index of the layer.
    at: usize,
    /// Residents in routing order, and how many were handed out.
    hits: Vec<(u32, usize)>,
    hits_shown: usize,
    /// Every miss in disk order; a job's tag is an index into this.
    loads: Vec<Load>,
    /// Transient loads that wait for a staging slab.
    waiting: VecDeque<usize>,
    in_flight: usize,
    /// The staging slab that the caller is looking at.
    shown: Option<Slab>,
    abandoned: bool,
}

struct Load {
    expert: u32,
    /// Cache slot of a miss that stays; `None` passes through.
    slot: Option<usize>,
    shown: bool,
}

/// The experts of one layer for one step, one at a time.
///
/// [`next_ready`](Self::next_ready) lends them out; see there for the order.
/// Dropping a step early abandons what was not handed out.
pub struct Step<'s> {
    store: &'s mut ExpertStore,
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
            .map(|(layer, LayerExperts { class, quota, slab_len, experts, transform })| Layer {
                layer,
                class,
                slab_len,
                experts,
                transform,
                cache: LayerCache::new(quota),
                slots: take(class, quota).into_iter().map(Some).collect(),
            })
            .collect();
        Ok(Self { index, layers, staging, reader, counters: Counters::default(), run: Run::default() })
    }

    /// Starts a step: decides who stays and starts reading.
    ///
    /// `union` holds the distinct experts that the rows of the step selected, in
    /// routing order; `requests` is how many selections that were (for the
    /// counters). An error leaves the store as it was.
    pub fn step<'s>(
        &'s mut self,
        layer: u32,
        union: &[u32],
        requests: u64,
        cancel: Option<&'s CancelToken>,
    ) -> Result<Step<'s>, ExpertError> {
        let at = *self.index.get(&layer).ok_or(ExpertError::UnknownLayer { layer })?;
        self.layers[at].check_union(union)?;
        if cancel.is_some_and(CancelToken::is_cancelled) {
            return Err(ExpertError::Cancelled { layer });
        }
        self.settle();

        let plan = self.layers[at].cache.plan(union);
        self.counters.requests += requests;
        self.counters.hits += plan.hits.len() as u64;
        self.counters.misses += (plan.kept.len() + plan.transient.len()) as u64;

        let kept = plan.kept.iter().map(|&(expert, slot)| (expert, Some(slot)));
        let transient = plan.transient.iter().map(|&expert| (expert, None));
        let misses = kept.chain(transient).map(|(expert, slot)| Load { expert, slot, shown: false });
        let mut loads: Vec<Load> = misses.collect();
        loads.sort_by_cached_key(|load| self.layers[at].disk_position(load.expert));
        self.run = Run { at, hits: plan.hits, loads, ..Run::default() };
        self.start_loads();
        Ok(Step { store: self, cancel })
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

    /// Forgets every resident expert, as if the store were new.
    pub fn reset_residency(&mut self) {
        self.settle();
        for layer in &mut self.layers {
            layer.cache.clear();
        }
    }

    /// The reader, for its figures.
    pub fn reader(&self) -> &Reader {
        &self.reader
    }

    /// Submits, in disk order, every load that has a slab: those that stay own one,
    /// the others take staging slabs while there are any.
    fn start_loads(&mut self) {
        for tag in 0..self.run.loads.len() {
            let layer = &mut self.layers[self.run.at];
            let slab = match self.run.loads[tag].slot {
                Some(slot) => layer.slots[slot].take(),
                None => self.staging[layer.class].pop(),
            };
            match slab {
                Some(slab) => self.submit(tag, slab),
                None => self.run.waiting.push_back(tag),
            }
        }
    }

    fn submit(&mut self, tag: usize, slab: Slab) {
        let layer = &self.layers[self.run.at];
        self.reader.submit(Job {
            tag: tag as u64,
            segments: Arc::clone(&layer.experts[self.run.loads[tag].expert as usize]),
            slab,
            len: layer.slab_len,
            transform: layer.transform.clone(),
        });
        self.run.in_flight += 1;
    }

    /// Takes back the slab that was handed out last, and reads the next expert into it.
    fn reuse_shown(&mut self) {
        if let Some(slab) = self.run.shown.take() {
            match self.run.waiting.pop_front() {
                Some(tag) => self.submit(tag, slab),
                None => self.staging[slab.class()].push(slab),
            }
        }
    }

    /// Waits for a load, counting the wait; `None` when nothing is in flight.
    fn receive(&mut self) -> Option<Done> {
        let done = match self.reader.try_recv() {
            Some(done) => done,
            None => {
                let start = Instant::now();
                let done = self.reader.recv();
                self.counters.wait_ns += start.elapsed().as_nanos() as u64;
                done?
            }
        };
        self.count(&done);
        Some(done)
    }

    fn count(&mut self, done: &Done) {
        self.run.in_flight -= 1;
        match &done.result {
            Ok(stats) => {
                self.counters.loads += 1;
                self.counters.bytes += stats.bytes;
                self.counters.reads += stats.reads;
                self.counters.service_ns += stats.service.as_nanos() as u64;
            }
            Err(_) => self.counters.failures += 1,
        }
    }

    /// Puts the slab of a load that is not handed out where it came from.
    fn put_back(&mut self, tag: u64, slab: Slab) {
        match self.run.loads[tag as usize].slot {
            Some(slot) => self.layers[self.run.at].slots[slot] = Some(slab),
            None => self.staging[slab.class()].push(slab),
        }
    }

    /// Ends the step in progress: nothing is in flight afterwards, every slab is back,
    /// and a miss that was not handed out is not resident. Does nothing the second time.
    fn settle(&mut self) {
        self.run.waiting.clear();
        self.reuse_shown();
        if self.run.in_flight > 0 {
            for job in self.reader.withdraw() {
                self.run.in_flight -= 1;
                self.put_back(job.tag, job.slab);
            }
            while let Some(done) = self.reader.recv() {
                self.count(&done);
                self.put_back(done.tag, done.slab);
            }
        }
        for load in self.run.loads.drain(..).filter(|load| !load.shown) {
            self.layers[self.run.at].cache.forget(load.expert);
        }
    }

    /// Gives up the step in progress.
    fn abandon(&mut self) {
        self.run.abandoned = true;
        self.settle();
    }

    fn ready_in_slot(&self, expert: u32, slot: usize) -> Ready<'_> {
        let layer = &self.layers[self.run.at];
        let slab = layer.slots[slot].as_ref().expect("the slab of a resident is in its slot");
        Ready { expert, bytes: &slab[..layer.slab_len] }
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

    /// Where an expert's first byte lies.
    fn disk_position(&self, expert: u32) -> Option<(u32, u64)> {
        self.experts[expert as usize].iter().map(|segment| (segment.shard, segment.offset)).min()
    }
}

impl Step<'_> {
    /// The next expert of the union; `None` after the last one.
    ///
    /// Residents come first, in routing order and without waiting, then the others as
    /// their reads complete. The caller must not let the order show in what it
    /// computes. An error (a failed read, a cancellation) abandons the step: no more
    /// experts come, and the store is ready for the next step.
    pub fn next_ready(&mut self) -> Result<Option<Ready<'_>>, ExpertError> {
        let store = &mut *self.store;
        let layer = store.layers[store.run.at].layer;
        if store.run.abandoned {
            return Err(ExpertError::Abandoned { layer });
        }
        if self.cancel.is_some_and(CancelToken::is_cancelled) {
            store.abandon();
            return Err(ExpertError::Cancelled { layer });
        }
        store.reuse_shown();
        if let Some(&(expert, slot)) = store.run.hits.get(store.run.hits_shown) {
            store.run.hits_shown += 1;
            return Ok(Some(store.ready_in_slot(expert, slot)));
        }
        if store.run.in_flight == 0 {
            return Ok(None);
        }
        let Some(Done { tag, slab, result }) = store.receive() else {
            store.abandon();
            return Err(ExpertError::Abandoned { layer });
        };
        let Load { expert, slot, .. } = store.run.loads[tag as usize];
        if let Err(cause) = result {
            store.put_back(tag, slab);
            store.abandon();
            return Err(ExpertError::Load { key: ExpertKey { layer, expert }, cause });
        }
        store.run.loads[tag as usize].shown = true;
        match slot {
            Some(slot) => {
                store.put_back(tag, slab);
                Ok(Some(store.ready_in_slot(expert, slot)))
            }
            None => {
                let len = store.layers[store.run.at].slab_len;
                Ok(Some(Ready { expert, bytes: &store.run.shown.insert(slab)[..len] }))
            }
        }
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        self.store.settle();
    }
}
