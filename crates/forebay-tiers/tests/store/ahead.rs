//! Reads for steps that have not begun.

use std::time::Duration;

use forebay_io::PAGE;
use forebay_testkit::fault::Faults;
use forebay_tiers::{ExpertError, LookAhead, Order, Policy};

use crate::world::*;

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
    // What is certain only at the end is not counted before.
    assert_eq!((c.ahead_useful_bytes, c.ahead_wasted_bytes, c.bytes), (one, one, 5 * one));
}

/// Three guesses hold all staging slabs and the fourth expert passes through. It waits for no read to warm
/// up, of which one hangs.
#[test]
fn a_guess_is_given_up_before_anything_waits_for_a_warm_up() {
    let mut world = world_of(4, 3, 2, &Faults::default(), Policy::Blend);
    let hangs = weight_offset(0, 0);
    world.gates[1].close(hangs);
    let store = &mut world.store;
    store.seed(2, &|layer| (0..u64::from(EXPERTS)).map(|e| u64::from(layer == 4) * (100 - e)).collect());
    store.set_look_ahead(LookAhead::On);
    store.warm_up();
    world.gates[1].await_read(hangs);
    store.look_ahead(3, &[6, 7, 8]);
    let order = run_in(store, 3, &[0, 1, 2, 3, 4, 6, 7, 8], Order::Ascending, None).unwrap();
    assert_eq!(order.len(), 8);
    assert!(world.gates[1].held() && store.warming_up() > 0, "the step waited for a read to warm up");
    assert_eq!(store.counters().ahead_wasted, 1);
    world.gates[1].open(hangs);
}

/// What only waits to be read into a free slot, behind another one, is read at once when it is guessed at;
/// what is being read is left alone.
#[test]
fn what_waits_to_warm_up_is_read_ahead() {
    let mut world = world_of(4, 3, 2, &Faults::default(), Policy::Blend);
    let store = &mut world.store;
    store.seed(2, &|layer| (0..u64::from(EXPERTS)).map(|e| u64::from(layer == 9) * (100 - e)).collect());
    let hangs = weight_offset(1, 0) + PAGE as u64;
    world.gates[2].close(hangs);
    let slabs = store.slabs_at_home();
    assert_eq!(store.warm_up(), 4);
    world.gates[2].await_read(hangs);
    store.look_ahead(9, &[0, 1, 2]);
    assert_eq!((store.counters().ahead_asked, store.warming_up()), (2, 2));
    // They are not queued again beside the guesses: the next best have their slots.
    assert_eq!(store.warm_up(), 4);
    while store.counters().loads < 2 {
        std::thread::sleep(Duration::from_micros(100));
        store.collect();
    }
    assert!(world.gates[2].held(), "a guess waited for a read to warm up");
    world.gates[2].open(hangs);
    finish_reads(store);
    store.collect();
    assert_eq!(resident(store, 9), [0, 3, 4, 5]);
    run(store, 9, &[0, 1, 2]).unwrap();
    let c = store.counters();
    assert_eq!((c.ahead_ready, c.ahead_late, c.ahead_wasted, c.hits), (2, 0, 0, 1));
    store.reset_residency();
    finish_reads(store);
    store.collect();
    assert_eq!(store.slabs_at_home(), slabs);
}

/// A better guess takes the place of an earlier one, even of what is being read.
#[test]
fn outdated_guesses_are_given_up() {
    let slow = Faults { latency: Duration::from_millis(2), ..Faults::default() };
    let mut world = world(2, 6, 2, &slow);
    let store = &mut world.store;
    store.look_ahead(4, &[5, 6, 7, 8]);
    store.look_ahead(4, &[7, 9]);
    finish_reads(store);
    store.collect();
    let order = run(store, 4, &[9, 7]).unwrap();
    assert_eq!(order.len(), 2);
    let c = store.counters();
    assert_eq!((c.ahead_asked, c.ahead_ready, c.ahead_late), (5, 2, 0));
    assert_eq!(c.ahead_dropped + c.ahead_wasted, 3, "{c:?}");
    // At most two were being read when the better guess came; the others never were.
    assert!(c.ahead_wasted_bytes <= 2 * LEN[0] as u64, "{c:?}");
    store.forget_ahead();
    assert_eq!(store.slabs_at_home(), 2 * 3 + 2 * 6);
}
