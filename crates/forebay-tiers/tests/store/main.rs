//! The store against a small synthetic model on disks that misbehave: what is
//! delivered never depends on the disk, and no fault outlives its step.

mod ahead;
mod gate;
mod warm;
mod world;

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

use crate::world::*;

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
        try_config(&|c| layer(c, &|l| l.transforms = vec![None, Some(Arc::new(Negate { fail_on: None }))])),
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
    let transforms = vec![transform; experts.len()];
    let layer =
        LayerExperts { class: 0, quota: 2, slab_len: LEN[0], experts, checks: Vec::new(), transforms };
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

#[test]
fn the_store_moves_to_the_compute_thread() {
    fn is_send<T: Send>() {}
    is_send::<ExpertStore>();
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
