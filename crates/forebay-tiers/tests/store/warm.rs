//! Free slots that are filled from history.

use std::time::Duration;

use forebay_core::CancelToken;
use forebay_io::{MemoryInfo, PAGE};
use forebay_testkit::fault::Faults;
use forebay_tiers::{ExpertError, ExpertStore, GovernorPlan, Machine, Order, Policy};
use proptest::prelude::*;

use crate::world::*;

/// Tells the caches that earlier runs used low ids most.
fn seed(store: &mut ExpertStore) {
    store.seed(2, &|_| (0..u64::from(EXPERTS)).map(|expert| 100 - expert).collect());
}

/// The same for one layer; of the others nothing is known.
fn seed_only(store: &mut ExpertStore, only: u32) {
    let worth = |layer, expert| u64::from(layer == only) * (100 - expert);
    store.seed(2, &|layer| (0..u64::from(EXPERTS)).map(|expert| worth(layer, expert)).collect());
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

/// Warms up as long as there is something to read.
fn warm_up_fully(store: &mut ExpertStore) {
    for _ in 0..100 {
        if store.warm_up() == 0 {
            return;
        }
        finish_reads(store);
    }
    panic!("it never ends: {:?}", store.counters());
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
    assert_eq!(world.store.warm_up(), 0, "nothing is known");
    seed(&mut world.store);
    run(&mut world.store, 3, &[0]).unwrap();
    assert_eq!(world.store.warming_up(), 0, "nobody said that there is time");
}

/// 36 experts fit: not all of them are queued at once.
#[test]
fn it_comes_in_batches() {
    let slow = Faults { latency: Duration::from_micros(200), ..Faults::default() };
    let mut world = warm_world(12, &slow);
    let store = &mut world.store;
    assert_eq!(store.warm_up(), 32);
    let best = [(3, 0), (4, 0), (9, 0)];
    warmed(store);
    assert!(best.iter().all(|(layer, expert)| resident(store, *layer).contains(expert)));
    warm_up_fully(store);
    assert_eq!((store.resident().len(), store.counters().warm_up_loads), (36, 36));
}

/// Other programs take so much memory that slots have to go.
struct Short(u64);

impl Machine for Short {
    fn now_ms(&mut self) -> u64 {
        self.0 += 100;
        self.0
    }

    fn memory(&mut self) -> MemoryInfo {
        MemoryInfo { available: Some(0), ..MemoryInfo::default() }
    }
}

/// A machine that is short of memory is served while nobody asks for anything, with and without warming up.
#[test]
fn memory_is_given_back_while_nobody_asks() {
    for warm_up in [false, true] {
        let plan = GovernorPlan {
            slots: 12,
            floor: 3,
            slot_bytes: LEN[0] as u64,
            planned_bytes: 1 << 20,
            reserve_bytes: 1 << 30,
        };
        let mut world = governed_world(4, plan, Box::new(Short(0)));
        let store = &mut world.store;
        seed(store);
        for _ in 0..40 {
            match warm_up {
                true => assert!(store.warm_up() <= 12),
                false => store.rest(),
            }
        }
        assert_eq!((store.slots(), store.counters().slots_released), (3, 9));
        warm_up_fully(store);
        assert_eq!(store.resident().len(), 3);
    }
}

/// The read of an expert that a step wants hangs: cancelling ends the step, not the read.
#[test]
fn a_step_that_waits_for_a_warm_up_can_be_cancelled() {
    let mut world = world_of(1, 2, 2, &Faults::default(), Policy::Blend);
    let hangs = weight_offset(1, 0) + PAGE as u64;
    world.gates[2].close(hangs);
    let store = &mut world.store;
    seed_only(store, 9);
    let slabs = store.slabs_at_home();
    assert_eq!(store.warm_up(), 1);
    world.gates[2].await_read(hangs);
    let token = CancelToken::new();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(20));
            token.cancel();
        });
        let refused = store.step(9, &one_row(&[0, 5]), Order::Arrival, Some(&token)).err();
        assert_eq!(refused, Some(ExpertError::Cancelled { layer: 9 }));
    });
    assert!(world.gates[2].held(), "it waited for the read");
    world.gates[2].open(hangs);
    warmed(store);
    assert_eq!((resident(store, 9), store.slabs_at_home()), (vec![0], slabs));
    assert_eq!(run(store, 9, &[5, 0]).unwrap(), [0, 5]);
}

/// While an expert is being read into a free slot, a step puts another one there, fails and gives it up. The
/// slot is free again, and what lies in it is not the first expert.
#[test]
fn a_slot_that_a_failed_step_used_is_not_taken_for_another_expert() {
    let mut world = world_of(1, 2, 2, &Faults::default(), Policy::Blend);
    let (gate, disk) = (&world.gates[2], &world.disks[2]);
    let (warm, bad) = (weight_offset(1, 0) + PAGE as u64, weight_offset(1, 5));
    gate.close(warm);
    gate.close(bad);
    let store = &mut world.store;
    seed_only(store, 9);
    let slabs = store.slabs_at_home();
    // Expert 0, into the only slot of the layer; it hangs in its second piece.
    assert_eq!(store.warm_up(), 1);
    gate.await_read(warm);
    disk.set(Faults { bad: Some(bad + 1000..bad + 1001), ..Faults::default() });
    let mut step = store.step(9, &one_row(&[3, 5]), Order::Arrival, None).unwrap();
    // Expert 3 stays, in a slab that was borrowed, and is there before 5 fails.
    gate.await_read(bad);
    let collect_until = |step: &mut forebay_tiers::Step<'_>, home: usize| {
        while step.store().slabs_at_home() < home {
            std::thread::sleep(Duration::from_micros(100));
            step.store().collect();
        }
    };
    // Away are the slot's own slab, with the read that hangs, and that of expert 5.
    collect_until(&mut step, slabs - 2);
    gate.open(bad);
    collect_until(&mut step, slabs - 1);
    assert!(matches!(step.next_ready(), Err(ExpertError::Load { key, .. }) if key.expert == 5));
    drop(step);
    disk.set(Faults::default());
    gate.open(warm);
    warmed(store);
    assert!(gate.held());
    // Right bytes, which `run` checks, whether it is resident or read again.
    run(store, 9, &[0]).unwrap();
    assert_eq!(store.slabs_at_home(), slabs);
    let c = store.counters();
    assert_eq!((c.warm_up_loads, c.warm_up_wasted_bytes), (1, LEN[1] as u64));
    run(store, 9, &[3, 5, 0]).unwrap();
    assert_eq!(store.slabs_at_home(), slabs);
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
    // It is not tried again and again; the next one has its slot.
    warm_up_fully(store);
    assert_eq!((resident(store, 3), store.counters().failures), (vec![0, 2, 3, 4], 1));
    assert!(run(store, 3, &[1]).is_err());
    world.disks[0].set(Faults::default());
    run(&mut world.store, 3, &[1, 2]).unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

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
                _ => prop_assert!(world.store.warm_up() <= 3 * quota),
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
}
