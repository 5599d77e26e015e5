//! The model, its disks and the store that the suites share.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::ReadSegment;
use forebay_io::{Arena, PAGE, Reader, ReaderConfig, Shard, SlabClass};
use forebay_testkit::fault::{Faults, FaultyDisk};
use forebay_tiers::routes::Union;
use forebay_tiers::{
    Counters, ExpertError, ExpertStore, GovernorPlan, LayerExperts, LookAhead, Machine, Order, Policy,
    StoreConfig,
};
use proptest::prelude::*;

use crate::gate::Gate;

/// Layers 3 and 4 are of class 0, layer 9 of class 1 (as an MTP layer would be).
pub const LAYERS: [(u32, usize); 3] = [(3, 0), (4, 0), (9, 1)];

pub const EXPERTS: u32 = 12;

/// Bytes of one expert, per class, and how much of that is its weights; the rest
/// are its scales, which lie elsewhere in the shard.
pub const LEN: [usize; 2] = [5000, 9100];

pub const WEIGHTS: [usize; 2] = [4600, 9000];

pub struct World {
    pub disks: Vec<Arc<FaultyDisk>>,
    /// Before each disk.
    pub gates: Vec<Arc<Gate>>,
    pub arena: Arena,
    pub store: ExpertStore,
}

/// Byte `at` of an expert; no two experts agree for long.
pub fn byte(layer: u32, expert: u32, at: usize) -> u8 {
    let mixed = (layer as usize * 57 + expert as usize * 131 + at) * 2_654_435_761;
    (mixed >> 7) as u8
}

pub fn content(layer: u32, class: usize, expert: u32) -> Vec<u8> {
    (0..LEN[class]).map(|at| byte(layer, expert, at)).collect()
}

/// One shard per layer: weights of all experts in descending order (so that disk
/// order and number order differ), then their scales.
pub fn shard_of(layer: u32, class: usize) -> (Vec<u8>, Vec<Arc<[ReadSegment]>>) {
    let (weights, scales) = (WEIGHTS[class], LEN[class] - WEIGHTS[class]);
    let shard = LAYERS.iter().position(|l| l.0 == layer).unwrap() as u32;
    let mut bytes = Vec::new();
    for expert in (0..EXPERTS).rev() {
        bytes.extend(&content(layer, class, expert)[..weights]);
    }
    for expert in 0..EXPERTS {
        bytes.extend(&content(layer, class, expert)[weights..]);
    }
    let segments = |expert: u32| -> Arc<[ReadSegment]> {
        let scale_offset = EXPERTS as usize * weights + expert as usize * scales;
        [
            ReadSegment { shard, offset: weight_offset(class, expert), len: weights, dst: 0 },
            ReadSegment { shard, offset: scale_offset as u64, len: scales, dst: weights },
        ]
        .into()
    };
    (bytes, (0..EXPERTS).map(segments).collect())
}

pub fn weight_offset(class: usize, expert: u32) -> u64 {
    u64::from(EXPERTS - 1 - expert) * WEIGHTS[class] as u64
}

pub fn layers(quota: usize) -> BTreeMap<u32, LayerExperts> {
    let of = |&(layer, class): &(u32, usize)| {
        let experts = shard_of(layer, class).1;
        (
            layer,
            LayerExperts {
                class,
                quota,
                slab_len: LEN[class],
                experts,
                checks: Vec::new(),
                transforms: Vec::new(),
            },
        )
    };
    LAYERS.iter().map(of).collect()
}

pub fn world(quota: usize, staging: usize, workers: usize, faults: &Faults) -> World {
    world_of(quota, staging, workers, faults, Policy::Lru)
}

pub fn world_of(quota: usize, staging: usize, workers: usize, faults: &Faults, policy: Policy) -> World {
    build(quota, staging, workers, faults, policy, None)
}

/// A calm one whose number of slots follows a machine.
pub fn governed_world(quota: usize, plan: GovernorPlan, machine: Box<dyn Machine>) -> World {
    build(quota, 2, 2, &Faults::default(), Policy::Blend, Some((plan, machine)))
}

fn build(
    quota: usize,
    staging: usize,
    workers: usize,
    faults: &Faults,
    policy: Policy,
    governed: Option<(GovernorPlan, Box<dyn Machine>)>,
) -> World {
    let disk = |&(layer, class): &(u32, usize)| {
        Arc::new(FaultyDisk::of_bytes(shard_of(layer, class).0, faults.clone()))
    };
    let disks: Vec<_> = LAYERS.iter().map(disk).collect();
    let gates: Vec<_> = disks.iter().map(|disk| Arc::new(Gate::before(Arc::clone(disk) as _))).collect();
    let shards = gates.iter().zip(LAYERS).map(|(gate, (layer, _))| Shard {
        path: format!("layer-{layer}").into(),
        file: Arc::clone(gate) as _,
    });
    // Pieces of a page, so that what is not demanded can be given up in the middle of an expert.
    let config = ReaderConfig { workers, piece: PAGE, scratch_per_worker: 0, ..ReaderConfig::default() };
    let reader = Reader::new(shards.collect(), config).unwrap();
    let slabs =
        |class: usize, layers: usize| SlabClass { bytes: LEN[class], count: layers * quota + staging };
    let arena = Arena::new(&[slabs(0, 2), slabs(1, 1)]).unwrap();
    let config = StoreConfig {
        layers: layers(quota),
        staging: vec![staging; 2],
        policy,
        look_ahead: LookAhead::Off,
        governed,
    };
    let store = ExpertStore::new(config, &arena, reader).unwrap();
    World { disks, gates, arena, store }
}

pub fn class_of(layer: u32) -> usize {
    LAYERS.iter().find(|l| l.0 == layer).unwrap().1
}

pub fn one_row(experts: &[u32]) -> Union {
    Union::of([experts])
}

/// Runs a step to its end; checks every byte; returns the experts in delivery order.
pub fn run(store: &mut ExpertStore, layer: u32, union: &[u32]) -> Result<Vec<u32>, ExpertError> {
    run_in(store, layer, union, Order::Arrival, None)
}

/// The same in any order, with guesses at another layer's next step.
pub fn run_in(
    store: &mut ExpertStore,
    layer: u32,
    union: &[u32],
    how: Order,
    guess: Option<(u32, &[u32])>,
) -> Result<Vec<u32>, ExpertError> {
    let mut order = Vec::new();
    let mut seen = store.counters();
    let mut step = store.step(layer, &one_row(union), how, None)?;
    if let Some((layer, experts)) = guess {
        step.store().look_ahead(layer, experts);
    }
    while let Some(ready) = step.next_ready()? {
        assert!(ready.bytes == content(layer, class_of(layer), ready.expert), "expert {}", ready.expert);
        order.push(ready.expert);
        let now = step.store().counters();
        assert_eq!(seen.since(&now), Counters::default(), "a counter went back");
        seen = now;
    }
    drop(step);
    assert_eq!(seen.since(&store.counters()), Counters::default(), "a counter went back");
    let mut sorted = order.clone();
    sorted.sort_unstable();
    let mut wanted = union.to_vec();
    wanted.sort_unstable();
    assert_eq!(sorted, wanted, "each expert once");
    assert!(how == Order::Arrival || order == sorted);
    Ok(order)
}

pub fn resident(store: &ExpertStore, layer: u32) -> Vec<u32> {
    store.resident().into_iter().filter(|key| key.layer == layer).map(|key| key.expert).collect()
}

/// Waits until the reader has nothing to do.
pub fn finish_reads(store: &ExpertStore) {
    while store.reader().is_busy() {
        std::thread::sleep(Duration::from_micros(100));
    }
}

pub fn unions() -> impl Strategy<Value = Vec<(u32, Vec<u32>)>> {
    let all: Vec<u32> = (0..EXPERTS).collect();
    let union = prop::sample::subsequence(all, 1..=EXPERTS as usize).prop_shuffle();
    prop::collection::vec((prop::sample::select(vec![3u32, 4, 9]), union), 1..10)
}
