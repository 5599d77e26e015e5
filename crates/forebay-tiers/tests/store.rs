//! The store against a small synthetic model on disks that misbehave: what is
//! delivered never depends on the disk, and no fault outlives its step.

use std::collections::BTreeMap;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::{CancelToken, ExpertKey, ReadSegment};
use forebay_io::{Arena, ReadError, Reader, ReaderConfig, Shard, SlabClass, Transform};
use forebay_testkit::fault::{EIO, Faults, FaultyDisk};
use forebay_tiers::routes::Union;
use forebay_tiers::{
    ConfigError, Counters, ExpertError, ExpertStore, LayerExperts, LookAhead, Order, Policy, StoreConfig,
};
use proptest::prelude::*;

/// Layers 3 and 4 are of class 0, layer 9 of class 1 (as an MTP layer would be).
const LAYERS: [(u32, usize); 3] = [(3, 0), (4, 0), (9, 1)];
const EXPERTS: u32 = 12;
/// Bytes of one expert, per class, and how much of that is its weights; the rest
/// are its scales, which lie elsewhere in the shard.
const LEN: [usize; 2] = [5000, 9100];
const WEIGHTS: [usize; 2] = [4600, 9000];

struct World {
    disks: Vec<Arc<FaultyDisk>>,
    arena: Arena,
    store: ExpertStore,
}

/// Byte `at` of an expert; no two experts agree for long.
fn byte(layer: u32, expert: u32, at: usize) -> u8 {
    let mixed = (layer as usize * 57 + expert as usize * 131 + at) * 2_654_435_761;
    (mixed >> 7) as u8
}

fn content(layer: u32, class: usize, expert: u32) -> Vec<u8> {
    (0..LEN[class]).map(|at| byte(layer, expert, at)).collect()
}

/// One shard per layer: weights of all experts in descending order (so that disk
/// order and number order differ), then their scales.
fn shard_of(layer: u32, class: usize) -> (Vec<u8>, Vec<Arc<[ReadSegment]>>) {
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

fn weight_offset(class: usize, expert: u32) -> u64 {
    u64::from(EXPERTS - 1 - expert) * WEIGHTS[class] as u64
}

fn layers(quota: usize) -> BTreeMap<u32, LayerExperts> {
    let of = |&(layer, class): &(u32, usize)| {
        let experts = shard_of(layer, class).1;
        (
            layer,
            LayerExperts { class, quota, slab_len: LEN[class], experts, checks: Vec::new(), transform: None },
        )
    };
    LAYERS.iter().map(of).collect()
}

fn world(quota: usize, staging: usize, workers: usize, faults: &Faults) -> World {
    world_of(quota, staging, workers, faults, Policy::Lru)
}

fn world_of(quota: usize, staging: usize, workers: usize, faults: &Faults, policy: Policy) -> World {
    let disk = |&(layer, class): &(u32, usize)| {
        Arc::new(FaultyDisk::of_bytes(shard_of(layer, class).0, faults.clone()))
    };
    let disks: Vec<_> = LAYERS.iter().map(disk).collect();
    let shards = disks.iter().zip(LAYERS).map(|(disk, (layer, _))| Shard {
        path: format!("layer-{layer}").into(),
        file: Arc::clone(disk) as _,
    });
    let reader = Reader::new(
        shards.collect(),
        ReaderConfig { workers, scratch_per_worker: 0, ..ReaderConfig::default() },
    )
    .unwrap();
    let slabs =
        |class: usize, layers: usize| SlabClass { bytes: LEN[class], count: layers * quota + staging };
    let arena = Arena::new(&[slabs(0, 2), slabs(1, 1)]).unwrap();
    let config = StoreConfig {
        layers: layers(quota),
        staging: vec![staging; 2],
        policy,
        look_ahead: LookAhead::Off,
        governed: None,
    };
    let store = ExpertStore::new(config, &arena, reader).unwrap();
    World { disks, arena, store }
}

fn class_of(layer: u32) -> usize {
    LAYERS.iter().find(|l| l.0 == layer).unwrap().1
}

fn one_row(experts: &[u32]) -> Union {
    Union::of([experts])
}

/// Runs a step to its end; checks every byte; returns the experts in delivery order.
fn run(store: &mut ExpertStore, layer: u32, union: &[u32]) -> Result<Vec<u32>, ExpertError> {
    run_in(store, layer, union, Order::Arrival, None)
}

/// The same in any order, with guesses at another layer's next step.
fn run_in(
    store: &mut ExpertStore,
    layer: u32,
    union: &[u32],
    how: Order,
    guess: Option<(u32, &[u32])>,
) -> Result<Vec<u32>, ExpertError> {
    let mut order = Vec::new();
    let mut step = store.step(layer, &one_row(union), how, None)?;
    if let Some((layer, experts)) = guess {
        step.store().look_ahead(layer, experts);
    }
    while let Some(ready) = step.next_ready()? {
        assert!(ready.bytes == content(layer, class_of(layer), ready.expert), "expert {}", ready.expert);
        order.push(ready.expert);
    }
    let mut sorted = order.clone();
    sorted.sort_unstable();
    let mut wanted = union.to_vec();
    wanted.sort_unstable();
    assert_eq!(sorted, wanted, "each expert once");
    assert!(how == Order::Arrival || order == sorted);
    Ok(order)
}

fn resident(store: &ExpertStore, layer: u32) -> Vec<u32> {
    store.resident().into_iter().filter(|key| key.layer == layer).map(|key| key.expert).collect()
}

#[test]
fn residents_come_first_and_disk_order_follows() {
    let mut world = world(3, 2, 1, &Faults::default());
    let store = &mut world.store;
    // One worker completes in submission order: higher experts lie first on disk. Of
    // the misses 1 and 0 are transient, and with two staging slabs all start at once.
    assert_eq!(run(store, 3, &[4, 2, 6, 1, 0]).unwrap(), [6, 4, 2, 1, 0]);
    assert_eq!(resident(store, 3), [2, 4, 6]);
    assert_eq!(run(store, 3, &[9, 6, 5, 2]).unwrap(), [6, 2, 9, 5], "hits in routing order, then disk order");
    assert_eq!(resident(store, 3), [2, 6, 9]);
    assert_eq!(resident(store, 4), [0; 0]);
    let reads = 2 * 7; // seven loads of two segments
    assert_eq!(world.disks[0].reads(), reads);
    let Counters { requests, hits, misses, loads, bytes, reads: counted, failures, .. } = store.counters();
    assert_eq!((requests, hits, misses, loads), (9, 2, 7, 7));
    assert_eq!((bytes, counted, failures), (7 * 5000, reads, 0));

    let before = store.counters();
    store.reset_residency();
    assert!(store.resident().is_empty());
    run(store, 3, &[6]).unwrap();
    let window = store.counters().since(&before);
    assert_eq!((window.requests, window.hits, window.loads, window.bytes), (1, 0, 1, 5000));
}

/// Waits until the reader has nothing to do.
fn finish_reads(store: &ExpertStore) {
    while store.reader().is_busy() {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Guesses change when an expert is read and nothing else: not who is resident, not what counts
/// as a hit or a miss.
#[test]
fn right_guesses_are_there_and_wrong_ones_are_forgotten() {
    let mut world = world(2, 4, 2, &Faults::default());
    let store = &mut world.store;
    run(store, 4, &[1]).unwrap();
    // Expert 1 is resident and 2 is asked for twice: 2, 3 and 7 are read.
    run_in(store, 3, &[0], Order::Arrival, Some((4, &[2, 1, 3, 2, 7, 99]))).unwrap();
    finish_reads(store);
    let before = store.counters();
    let order = run(store, 4, &[8, 3, 2]).unwrap();
    assert_eq!(order, [3, 2, 8], "what was read ahead needs no wait");
    let found = store.counters().since(&before);
    assert_eq!((found.hits, found.misses, found.ahead_ready, found.ahead_late), (0, 3, 2, 0));
    assert_eq!((found.ahead_useful_bytes, found.ahead_wasted, found.ahead_wasted_bytes), (10_000, 1, 5000));
    let all = store.counters();
    assert_eq!((all.ahead_asked, all.loads), (3, all.misses + 1));
    assert_eq!(resident(store, 4), [3, 8], "as without guesses");
    // A guess at a step that does not come.
    run_in(store, 3, &[0], Order::Arrival, Some((4, &[5]))).unwrap();
    finish_reads(store);
    run(store, 9, &[0, 1]).unwrap();
    assert_eq!(store.counters().ahead_wasted, 2);
    store.reset_residency();
    drop(world.store);
    assert_eq!(world.arena.stats().in_use_bytes, 0);
}

#[test]
fn a_guess_that_cannot_be_read_fails_nothing_until_it_is_wanted() {
    let bad = weight_offset(0, 5) + 1000;
    let mut world = world(2, 4, 2, &Faults::default());
    world.disks[1].set(Faults { bad: Some(bad..bad + 1), ..Faults::default() });
    let store = &mut world.store;
    run_in(store, 3, &[0], Order::Arrival, Some((4, &[5, 6]))).unwrap();
    finish_reads(store);
    run_in(store, 4, &[6, 7], Order::Arrival, None).unwrap();
    run_in(store, 3, &[0], Order::Arrival, Some((4, &[5]))).unwrap();
    finish_reads(store);
    assert!(matches!(run(store, 4, &[5, 8]), Err(ExpertError::Load { .. })));
    run(store, 4, &[8]).unwrap();
}

#[test]
fn one_staging_slab_streams_any_union() {
    let mut world = world(0, 1, 3, &Faults::default());
    let all: Vec<u32> = (0..EXPERTS).collect();
    for (layer, order) in [(3, Order::Arrival), (9, Order::Ascending), (4, Order::Ascending)] {
        run_in(&mut world.store, layer, &all, order, Some((3, &[1, 2]))).unwrap();
    }
    assert!(world.store.resident().is_empty());
    assert_eq!(world.arena.available(0) + world.arena.available(1), 0, "the store owns its slabs");
    drop(world.store);
    assert_eq!(world.arena.stats().in_use_bytes, 0);
}

#[test]
fn a_bad_sector_fails_the_step_and_no_other() {
    let bad = weight_offset(0, 5) + 1000;
    let mut world = world(4, 2, 2, &Faults::default());
    world.disks[0].set(Faults { bad: Some(bad..bad + 1), ..Faults::default() });
    let store = &mut world.store;
    run(store, 3, &[1, 2]).unwrap();
    let error = run(store, 3, &[2, 5, 7, 8, 9, 10, 11]).unwrap_err();
    let ExpertError::Load { key, cause } = &error else { panic!("{error:?}") };
    assert_eq!(*key, ExpertKey { layer: 3, expert: 5 });
    assert!(
        matches!(cause, ReadError::Os { path, offset, got: 1000, os_code: Some(EIO), .. }
            if path.to_str() == Some("layer-3") && *offset == weight_offset(0, 5)),
        "{cause:?}"
    );
    let text = error.to_string();
    for part in
        ["expert 5 of layer 3", "layer-3", &format!("offset {}", weight_offset(0, 5)), "check the disk"]
    {
        assert!(text.contains(part), "{text}");
    }
    assert!(!resident(store, 3).contains(&5));
    assert_eq!(store.counters().failures, 1);

    run(store, 3, &[1, 2, 7, 8, 9]).unwrap();
    // The other layers are on other disks; this one recovers when its disk does.
    run(store, 4, &[5]).unwrap();
    assert!(run(store, 3, &[5]).is_err());
    world.disks[0].set(Faults::default());
    run(store, 3, &[5]).unwrap();
    assert!(resident(store, 3).contains(&5));
}

#[test]
fn a_shard_cut_by_one_byte_fails_its_last_expert() {
    let size = shard_of(9, 1).0.len() as u64;
    let mut world = world(2, 1, 1, &Faults { truncate_to: Some(size - 1), ..Faults::default() });
    run(&mut world.store, 9, &[0, EXPERTS - 2]).unwrap();
    let error = run(&mut world.store, 9, &[EXPERTS - 1]).unwrap_err();
    assert!(
        matches!(error, ExpertError::Load { cause: ReadError::EndOfFile { wanted: 100, got: 99, .. }, .. }),
        "{error:?}"
    );
}

#[test]
fn what_was_not_handed_out_is_not_resident() {
    let mut world = world(4, 2, 2, &Faults::default());
    let store = &mut world.store;
    run(store, 3, &[0]).unwrap();
    {
        let mut step = store.step(3, &one_row(&[0, 1, 2, 3, 4, 5]), Order::Arrival, None).unwrap();
        assert_eq!(step.next_ready().unwrap().unwrap().expert, 0);
    }
    assert_eq!(resident(store, 3), [0]);
    assert_eq!(store.reader().in_flight(), 0);

    // Cancelled between two experts.
    let token = CancelToken::new();
    let mut step = store.step(3, &one_row(&[0, 1, 2, 3, 4, 5]), Order::Arrival, Some(&token)).unwrap();
    assert_eq!(step.next_ready().unwrap().unwrap().expert, 0);
    let second = step.next_ready().unwrap().unwrap().expert;
    token.cancel();
    assert_eq!(step.next_ready().unwrap_err(), ExpertError::Cancelled { layer: 3 });
    assert_eq!(step.next_ready().unwrap_err(), ExpertError::Abandoned { layer: 3 });
    drop(step);
    let stays = if second <= 3 { vec![0, second] } else { vec![0] };
    assert_eq!(resident(store, 3), stays);

    // Cancelled before it starts: nothing changes.
    let before = store.counters();
    assert!(matches!(
        store.step(3, &one_row(&[7]), Order::Arrival, Some(&token)),
        Err(ExpertError::Cancelled { layer: 3 })
    ));
    assert_eq!(store.counters(), before);
    token.reset();
    store.step(3, &one_row(&[7]), Order::Arrival, Some(&token)).unwrap().next_ready().unwrap();

    // Even a step that nobody dropped is cleaned up by the next.
    std::mem::forget(store.step(4, &one_row(&[1, 2, 3, 4, 5, 6, 7]), Order::Arrival, None).unwrap());
    run(store, 4, &[1, 8, 9]).unwrap();
    assert_eq!(resident(store, 4), [1, 8, 9]);
    drop(world.store);
    assert_eq!(world.arena.stats().in_use_bytes, 0);
}

#[test]
fn an_abandoned_step_does_not_read_what_it_has_not_started() {
    let mut world = world(12, 1, 1, &Faults { latency: Duration::from_millis(2), ..Faults::default() });
    let all: Vec<u32> = (0..EXPERTS).collect();
    drop(world.store.step(3, &one_row(&all), Order::Arrival, None).unwrap());
    // The one worker may have started one expert, or two if this thread was slow.
    assert!(world.store.counters().loads < 6, "{:?}", world.store.counters());
    assert_eq!(world.store.reader().in_flight(), 0);
    assert!(world.store.resident().is_empty());
    run(&mut world.store, 3, &all).unwrap();
}

#[test]
fn unions_that_make_no_sense_are_refused() {
    let mut world = world(1, 1, 1, &Faults::default());
    let before = world.store.counters();
    let mut refuse =
        |layer, union: &[u32]| world.store.step(layer, &one_row(union), Order::Arrival, None).err().unwrap();
    assert_eq!(refuse(5, &[0]), ExpertError::UnknownLayer { layer: 5 });
    let key = ExpertKey { layer: 3, expert: 12 };
    assert_eq!(refuse(3, &[0, 12]), ExpertError::UnknownExpert { key, experts: 12 });
    let twice = Union { experts: vec![4, 0, 4], uses: vec![1; 3], rows: 1 };
    let error = world.store.step(3, &twice, Order::Arrival, None).err().unwrap();
    assert_eq!(error, ExpertError::Repeated { key: ExpertKey { layer: 3, expert: 4 } });
    assert_eq!(world.store.counters(), before);
    assert_eq!(run(&mut world.store, 3, &[]).unwrap(), [0; 0]);
}

#[test]
fn configurations_that_cannot_work_are_refused() {
    let try_config = |change: &dyn Fn(&mut StoreConfig)| {
        let shard = |name: &str| Shard {
            path: name.into(),
            file: Arc::new(FaultyDisk::of_bytes(Vec::new(), Faults::default())),
        };
        let shards = vec![shard("a"), shard("b"), shard("c")];
        let reader = Reader::new(
            shards,
            ReaderConfig { workers: 1, scratch_per_worker: 100, ..ReaderConfig::default() },
        )
        .unwrap();
        let arena =
            Arena::new(&[SlabClass { bytes: 8192, count: 6 }, SlabClass { bytes: 12288, count: 4 }]).unwrap();
        let mut config = StoreConfig {
            layers: layers(2),
            staging: vec![2; 2],
            policy: Policy::Lru,
            look_ahead: LookAhead::Off,
            governed: None,
        };
        change(&mut config);
        ExpertStore::new(config, &arena, reader).err()
    };
    let layer =
        |c: &mut StoreConfig, change: &dyn Fn(&mut LayerExperts)| change(c.layers.get_mut(&4).unwrap());
    assert_eq!(try_config(&|_| ()), None);
    assert_eq!(
        try_config(&|c| layer(c, &|l| l.class = 2)),
        Some(ConfigError::UnknownClass { layer: 4, class: 2 })
    );
    assert_eq!(
        try_config(&|c| layer(c, &|l| l.slab_len = 8193)),
        Some(ConfigError::SlabTooSmall { layer: 4, class: 0, slab_len: 8193, slab_bytes: 8192 })
    );
    assert_eq!(
        try_config(&|c| c.staging[1] = 0),
        Some(ConfigError::NoStaging { layer: 9, class: 1, quota: 2, experts: 12 })
    );
    assert_eq!(
        try_config(&|c| layer(c, &|l| l.quota = 3)),
        Some(ConfigError::ArenaTooSmall { class: 0, needed: 7, available: 6 })
    );
    let key = ExpertKey { layer: 4, expert: 1 };
    assert_eq!(
        try_config(&|c| layer(c, &|l| l.experts[1] = [].into())),
        Some(ConfigError::NoSegments { key })
    );
    let good = ReadSegment { shard: 0, offset: 0, len: 5000, dst: 0 };
    for segment in [
        ReadSegment { shard: 3, ..good },
        ReadSegment { len: 0, ..good },
        ReadSegment { dst: 1, ..good },
        ReadSegment { dst: usize::MAX, ..good },
    ] {
        let error = try_config(&|c| layer(c, &|l| l.experts[1] = [good, segment].into()));
        assert_eq!(error, Some(ConfigError::BadSegment { key, segment, shards: 3, room: 5000 }));
    }
    assert_eq!(
        try_config(&|c| layer(c, &|l| l.transform = Some(Arc::new(Negate { fail_on: None })))),
        Some(ConfigError::ScratchTooSmall { layer: 4, needed: 5000, limit: 100 })
    );
}

/// Flips every bit; refuses an expert that starts with a given byte.
struct Negate {
    fail_on: Option<u8>,
}

impl Transform for Negate {
    fn raw_len(&self) -> usize {
        LEN[0]
    }
    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        if self.fail_on == Some(raw[0]) {
            return Err("refused".into());
        }
        for (out, byte) in slab.iter_mut().zip(raw) {
            *out = !byte;
        }
        Ok(())
    }
}

#[test]
fn transforms_run_on_the_way_in() {
    let (bytes, experts) = shard_of(3, 0);
    let shard = Shard { path: "raw".into(), file: Arc::new(FaultyDisk::of_bytes(bytes, Faults::default())) };
    let reader = Reader::new(
        vec![shard],
        ReaderConfig { workers: 2, scratch_per_worker: LEN[0], ..ReaderConfig::default() },
    )
    .unwrap();
    let arena = Arena::new(&[SlabClass { bytes: LEN[0], count: 3 }]).unwrap();
    let transform = Some(Arc::new(Negate { fail_on: Some(byte(3, 7, 0)) }) as _);
    let layer = LayerExperts { class: 0, quota: 2, slab_len: LEN[0], experts, checks: Vec::new(), transform };
    let config = StoreConfig {
        layers: [(3, layer)].into(),
        staging: vec![1],
        policy: Policy::Lru,
        look_ahead: LookAhead::Off,
        governed: None,
    };
    let mut store = ExpertStore::new(config, &arena, reader).unwrap();
    for _ in 0..2 {
        let mut step = store.step(3, &one_row(&[0, 1, 2]), Order::Arrival, None).unwrap();
        while let Some(ready) = step.next_ready().unwrap() {
            let plain = content(3, 0, ready.expert);
            assert!(
                ready.bytes.iter().zip(&plain).all(|(a, b)| *a == !*b) && ready.bytes.len() == plain.len()
            );
        }
    }
    let error = store.step(3, &one_row(&[7]), Order::Arrival, None).unwrap().next_ready().unwrap_err();
    assert!(
        matches!(&error, ExpertError::Load { key, cause: ReadError::Transform { reason, .. } }
            if key.expert == 7 && reason == "refused"),
        "{error:?}"
    );
    assert_eq!(store.counters().hits, 2);
}

/// Tells the caches that earlier runs used low ids most.
fn seed(store: &mut ExpertStore) {
    store.seed(2, &|_| (0..u64::from(EXPERTS)).map(|expert| 100 - expert).collect());
    store.set_warm_up(true);
}

/// A seeded world with frequency in its caches.
fn warm_world(quota: usize, faults: &Faults) -> World {
    let mut world = world_of(quota, 2, 2, faults, Policy::Blend);
    seed(&mut world.store);
    world
}

/// Waits for what is being read to warm up.
fn warmed(store: &mut ExpertStore) {
    while store.warming_up() > 0 {
        finish_reads(store);
        store.collect();
    }
}

#[test]
fn free_slots_are_filled_from_history() {
    let mut world = warm_world(4, &Faults::default());
    let store = &mut world.store;
    run(store, 3, &[9, 0]).unwrap();
    let slabs = store.slabs_at_home();
    store.warm_up();
    warmed(store);
    // Those that history ranks highest, beside those that are there; nobody left.
    assert_eq!(resident(store, 3), [0, 1, 2, 9]);
    assert_eq!((resident(store, 4), resident(store, 9)), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]));
    let c = store.counters();
    assert_eq!((c.warm_up_loads, c.warm_up_wasted_bytes, c.misses, c.evictions), (10, 0, 2, 0));
    let read = 6 * LEN[0] + 4 * LEN[1];
    assert_eq!((c.loads, c.warm_up_bytes, c.bytes), (12, read as u64, (read + 2 * LEN[0]) as u64));
    assert_eq!(store.slabs_at_home(), slabs);
    // There is nothing left to fill.
    store.warm_up();
    assert_eq!(store.warming_up(), 0);
    run(store, 4, &[3, 1]).unwrap();
    assert_eq!(store.counters().since(&c).hits, 2);
    // Fewer slots and more again: what is lost comes back.
    store.set_slots(3);
    store.set_slots(12);
    store.warm_up();
    warmed(store);
    assert_eq!(store.resident().len(), 12);
    store.reset_residency();
    assert_eq!((store.resident().len(), store.slabs_at_home()), (0, slabs));
}

#[test]
fn nothing_warms_up_unasked_or_without_history() {
    let mut world = world_of(4, 2, 2, &Faults::default(), Policy::Blend);
    world.store.set_warm_up(true);
    world.store.warm_up();
    assert_eq!(world.store.warming_up(), 0, "nothing is known");
    seed(&mut world.store);
    world.store.set_warm_up(false);
    world.store.warm_up();
    assert_eq!(world.store.warming_up(), 0);
}

#[test]
fn a_bad_sector_while_warming_up_is_nobodys_error() {
    let mut world = warm_world(4, &Faults::default());
    let bad = weight_offset(0, 1) + 1000;
    world.disks[0].set(Faults { bad: Some(bad..bad + 1), ..Faults::default() });
    let store = &mut world.store;
    let slabs = store.slabs_at_home();
    store.warm_up();
    warmed(store);
    assert_eq!((resident(store, 3), store.counters().failures), (vec![0, 2, 3], 1));
    assert_eq!(store.slabs_at_home(), slabs);
    assert!(run(store, 3, &[1]).is_err());
    world.disks[0].set(Faults::default());
    run(&mut world.store, 3, &[1, 2]).unwrap();
}

/// Both staging slabs hold guesses that come late in the union, so the last one makes room: it was
/// wasted, and not useful as well.
#[test]
fn a_guess_that_is_given_up_counts_once() {
    let mut world = world_of(0, 2, 2, &Faults::default(), Policy::Lru);
    let store = &mut world.store;
    store.set_look_ahead(LookAhead::On);
    store.look_ahead(3, &[7, 8]);
    finish_reads(store);
    run_in(store, 3, &[0, 1, 7, 8], Order::Ascending, None).unwrap();
    let c = store.counters();
    assert_eq!((c.ahead_asked, c.ahead_ready, c.ahead_late, c.ahead_dropped), (2, 1, 0, 0));
    assert_eq!((c.ahead_wasted, c.misses, c.loads), (1, 4, 5));
    let one = LEN[0] as u64;
    assert_eq!((c.ahead_useful_bytes, c.ahead_wasted_bytes, c.bytes), (one, one, 5 * one));
}

#[test]
fn the_store_moves_to_the_compute_thread() {
    fn is_send<T: Send>() {}
    is_send::<ExpertStore>();
}

fn unions() -> impl Strategy<Value = Vec<(u32, Vec<u32>)>> {
    let all: Vec<u32> = (0..EXPERTS).collect();
    let union = prop::sample::subsequence(all, 1..=EXPERTS as usize).prop_shuffle();
    prop::collection::vec((prop::sample::select(vec![3u32, 4, 9]), union), 1..10)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// A slow, stuttering disk, any number of workers, any order and any guesses: the same
    /// bytes, the same residents after every step, the same counts as a calm one.
    #[test]
    fn the_disk_never_shows(
        seed: u64,
        steps in unions(),
        guesses in prop::collection::vec(prop::option::of(unions()), 10),
        ascending in prop::collection::vec(any::<bool>(), 10),
        quota in 0usize..=13,
        staging in 1usize..4,
        workers in 1usize..5,
    ) {
        let latency = Duration::from_micros(150);
        let tired = Faults { seed, short_reads: 30, interrupts: 20, latency, ..Faults::default() };
        let mut calm = world(quota, staging, 1, &Faults::default());
        let mut tired = world(quota, staging, workers, &tired);
        for (((layer, union), guess), ascending) in steps.iter().zip(&guesses).zip(ascending) {
            let order = if ascending { Order::Ascending } else { Order::Arrival };
            let guess = guess.as_ref().map(|guess| (guess[0].0, &guess[0].1[..]));
            run(&mut calm.store, *layer, union).unwrap();
            run_in(&mut tired.store, *layer, union, order, guess).unwrap();
            prop_assert_eq!(calm.store.resident(), tired.store.resident());
        }
        for world in [&mut calm, &mut tired] {
            // Guesses at a step that did not come end here.
            world.store.forget_ahead();
            finish_reads(&world.store);
            world.store.forget_ahead();
            let c = world.store.counters();
            let resolutions: usize = steps.iter().map(|(_, union)| union.len()).sum();
            prop_assert_eq!(c.hits + c.misses, resolutions as u64);
            prop_assert_eq!(c.loads, c.misses + c.ahead_wasted);
            prop_assert_eq!((c.requests, c.failures), (resolutions as u64, 0));
            prop_assert_eq!(c.reads, world.disks.iter().map(|disk| disk.reads()).sum::<u64>());
        }
        let (calm, tired) = (calm.store.counters(), tired.store.counters());
        prop_assert_eq!((calm.hits, calm.bytes), (tired.hits, tired.bytes - tired.ahead_wasted_bytes));
        // Every miss came of one cause. An expert has 5000 bytes, or 9100.
        let (demand, useful, late) = (tired.demand_bytes(), tired.ahead_useful_bytes, tired.ahead_late_bytes);
        prop_assert_eq!(demand + useful + late, calm.bytes);
        prop_assert!(useful <= 9100 * tired.ahead_ready && late <= 9100 * tired.ahead_late, "{tired:?}");
        prop_assert!(demand >= 5000 * (tired.misses - tired.ahead_ready - tired.ahead_late), "{tired:?}");
    }

    /// Warming up at any moment, on a slow and failing disk, with guesses and changes of the number of
    /// slots in between: right bytes, no lost slab, nobody who leaves for it.
    #[test]
    fn warming_up_never_shows(
        seed_of_disk: u64,
        steps in unions(),
        guesses in prop::collection::vec(prop::option::of(unions()), 10),
        between in prop::collection::vec(0u8..6, 10),
        quota in 1usize..=13,
        errors in prop::sample::select(vec![0u16, 0, 30]),
    ) {
        let latency = Duration::from_micros(120);
        let faults = Faults { seed: seed_of_disk, short_reads: 20, errors, latency, ..Faults::default() };
        let mut world = warm_world(quota, &faults);
        let slabs = world.store.slabs_at_home();
        for ((at, (layer, union)), guess) in steps.iter().enumerate().zip(&guesses) {
            match between[at] {
                0 => world.store.set_slots(3 * quota / 2),
                1 => world.store.set_slots(3 * quota),
                2 => warmed(&mut world.store),
                _ => world.store.warm_up(),
            }
            let before = world.store.resident();
            let order = if at % 2 == 0 { Order::Ascending } else { Order::Arrival };
            let guess = guess.as_ref().map(|guess| (guess[0].0, &guess[0].1[..]));
            let c = world.store.counters();
            let done = run_in(&mut world.store, *layer, union, order, guess);
            prop_assert!(done.is_ok() || errors > 0, "{:?}", done);
            let left = before.iter().filter(|key| !world.store.resident().contains(key)).count();
            prop_assert!(left as u64 <= world.store.counters().since(&c).evictions);
        }
        world.store.forget_ahead();
        warmed(&mut world.store);
        finish_reads(&world.store);
        world.store.forget_ahead();
        prop_assert_eq!(world.store.slabs_at_home(), slabs);
        let c = world.store.counters();
        prop_assert!(c.warm_up_bytes <= c.bytes && c.warm_up_wasted_bytes <= c.warm_up_bytes);
        if errors == 0 {
            prop_assert_eq!(c.loads, c.misses + c.ahead_wasted + c.warm_up_loads);
        }
    }

    /// Steps that fail, are cut short or run through, in any order: bytes are always
    /// right, books always balance, and a repaired disk serves everything.
    #[test]
    fn no_fault_outlives_its_step(
        seed: u64,
        steps in unions(),
        stops in prop::collection::vec(prop::option::of(0usize..6), 10),
        bad in 0u64..60_000,
        quota in 0usize..6,
        staging in 1usize..3,
        workers in 1usize..4,
    ) {
        let latency = Duration::from_micros(50);
        let faults = Faults { seed, short_reads: 20, bad: Some(bad..bad + 500), latency, ..Faults::default() };
        let mut world = world(quota, staging, workers, &faults);
        for ((layer, union), stop) in steps.iter().zip(stops) {
            let before: Vec<u32> = resident(&world.store, *layer);
            let mut shown = Vec::new();
            let mut step = world.store.step(*layer, &one_row(union), Order::Arrival, None).unwrap();
            while shown.len() < stop.unwrap_or(usize::MAX) {
                match step.next_ready() {
                    Ok(Some(ready)) => {
                        prop_assert!(ready.bytes == content(*layer, class_of(*layer), ready.expert));
                        shown.push(ready.expert);
                    }
                    Ok(None) => break,
                    Err(error) => {
                        let ours = matches!(error, ExpertError::Load { key, .. } if union.contains(&key.expert));
                        prop_assert!(ours, "{}", error);
                        break;
                    }
                }
            }
            drop(step);
            let after = resident(&world.store, *layer);
            prop_assert!(after.len() <= quota);
            prop_assert!(after.iter().all(|e| before.contains(e) || shown.contains(e)));
            prop_assert_eq!(world.store.reader().in_flight(), 0);
        }
        let c = world.store.counters();
        prop_assert!(c.loads + c.failures <= c.misses);
        for disk in &world.disks {
            disk.set(Faults::default());
        }
        let all: Vec<u32> = (0..EXPERTS).collect();
        for (layer, _) in LAYERS {
            run(&mut world.store, layer, &all).unwrap();
        }
    }
}
