//! Free slots that are filled from history.

use std::time::Duration;

use forebay_testkit::fault::Faults;
use forebay_tiers::{ExpertStore, Order, Policy};
use proptest::prelude::*;

use crate::world::*;

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
}
