//! What earlier runs used is read before anybody asks: no other token, and more hits.

mod common;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{demo, greedy};
use forebay_core::ByteSize;
use forebay_engine::{Engine, EngineOptions, inspect};
use forebay_io::MemoryInfo;
use forebay_tiers::Machine;

/// Tokens of the answer.
const ANSWER: usize = 12;

fn open() -> Engine {
    let mut options = EngineOptions { context: Some(64), ..Default::default() };
    let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize(plan.minimum + 24 * plan.slot_row()));
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

#[test]
fn a_history_is_read_while_nobody_asks() {
    let prompt = [300, 17, 2041];
    let mut engine = open();
    let top_k = engine.spec().moe.top_k;
    engine.store().start_recording(top_k);
    let right = greedy(&mut engine, &prompt, ANSWER);
    let cold = engine.counters();
    let counts = engine.store().recorded().unwrap().counts();
    let layers: Vec<u32> = engine.store().layers().collect();

    let mut engine = open();
    let quotas = engine.plan().slots.quotas.clone();
    let store = engine.store();
    store.seed(top_k, &|layer| counts[layers.iter().position(|l| *l == layer).unwrap()].clone());
    let known = counts.iter().map(|layer| layer.iter().filter(|count| **count > 0).count());
    let known: usize = known.zip(&quotas).map(|(known, quota)| known.min(*quota)).sum();
    assert!(known > 32, "more than a batch");
    wait_until(&mut engine, true, |engine| engine.store().resident().len() == known);
    let warm = engine.counters();
    assert_eq!((warm.warm_up_loads, warm.loads, warm.misses), (known as u64, known as u64, 0));
    assert_eq!(warm.warm_up_bytes, warm.bytes);
    assert_eq!(greedy(&mut engine, &prompt, ANSWER), right);
    let after = engine.counters().since(&warm);
    assert_eq!(after.hits + after.misses, cold.hits + cold.misses);
    assert!(after.misses * 10 < cold.misses * 9, "{} misses, {} without history", after.misses, cold.misses);

    // Interrupted by its first demand: the same tokens.
    let mut engine = open();
    let store = engine.store();
    store.seed(top_k, &|layer| counts[layers.iter().position(|l| *l == layer).unwrap()].clone());
    assert!(store.warm_up() > 0);
    assert_eq!(greedy(&mut engine, &prompt, ANSWER), right);

    // Whoever asks once and waits for nothing pays for no read beside his own.
    let mut engine = open();
    let store = engine.store();
    store.seed(top_k, &|layer| counts[layers.iter().position(|l| *l == layer).unwrap()].clone());
    assert_eq!(greedy(&mut engine, &prompt, ANSWER), right);
    assert_eq!((engine.store().warming_up(), engine.counters().warm_up_loads), (0, 0));
}

/// Lets the engine idle until something is true.
fn wait_until(engine: &mut Engine, warm_up: bool, mut done: impl FnMut(&mut Engine) -> bool) {
    for _ in 0..400 {
        engine.idle_during(warm_up, || std::thread::sleep(Duration::from_millis(40)));
        engine.store().collect();
        if done(engine) {
            return;
        }
    }
    panic!("nothing comes of idling");
}

/// A machine without any memory left, which counts how often it is looked at.
struct Short(Arc<AtomicU64>);

impl Machine for Short {
    fn now_ms(&mut self) -> u64 {
        100 * self.0.load(Ordering::SeqCst)
    }

    fn memory(&mut self) -> MemoryInfo {
        self.0.fetch_add(1, Ordering::SeqCst);
        MemoryInfo { available: Some(0), ..MemoryInfo::default() }
    }
}

/// Nobody asks for anything, another program takes the memory: slots go.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_given_back_while_nobody_asks() {
    let mut engine = open();
    let plan = engine.plan().governed(&MemoryInfo::assumed(16_000_000_000));
    let looks = Arc::new(AtomicU64::new(0));
    engine.store().govern_by(plan, Box::new(Short(Arc::clone(&looks))));
    let slots = engine.store().slots();
    let answer = engine.idle_during(false, || {
        let looked = || looks.load(Ordering::SeqCst) > 1;
        (0..2000).any(|_| {
            std::thread::sleep(Duration::from_millis(5));
            looked()
        })
    });
    assert!(answer, "nobody looked");
    assert!(engine.store().slots() < slots - slots / 8, "{} of {slots}", engine.store().slots());
}

#[test]
fn idling_ends_with_what_it_waits_for() {
    let mut engine = open();
    assert_eq!(engine.idle_during(true, || 7), 7);
    let failed = catch_unwind(AssertUnwindSafe(|| engine.idle_during(true, || panic!("no more input"))));
    assert_eq!(failed.unwrap_err().downcast_ref::<&str>(), Some(&"no more input"));
}
