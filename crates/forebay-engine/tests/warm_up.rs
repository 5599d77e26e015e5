//! What earlier runs used is read before anybody asks: no other token, and more hits.

mod common;

use common::{demo, greedy};
use forebay_core::ByteSize;
use forebay_engine::{Engine, EngineOptions, inspect};

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
    let slots = engine.plan().resident_slots();
    let store = engine.store();
    store.seed(top_k, &|layer| counts[layers.iter().position(|l| *l == layer).unwrap()].clone());
    store.set_warm_up(true);
    store.warm_up();
    let begun = store.warming_up();
    assert!(begun > 0 && begun <= slots);
    while store.warming_up() > 0 {
        std::thread::sleep(std::time::Duration::from_micros(200));
        store.collect();
    }
    let warm = engine.counters();
    assert_eq!((warm.warm_up_loads, warm.loads, warm.misses), (begun as u64, begun as u64, 0));
    assert_eq!(warm.warm_up_bytes, warm.bytes);
    assert_eq!(engine.store().resident().len(), begun);
    assert_eq!(greedy(&mut engine, &prompt, ANSWER), right);
    let after = engine.counters().since(&warm);
    assert_eq!(after.hits + after.misses, cold.hits + cold.misses);
    assert!(after.misses * 10 < cold.misses * 9, "{} misses, {} without history", after.misses, cold.misses);

    // Interrupted by its first demand: the same tokens.
    let mut engine = open();
    let store = engine.store();
    store.seed(top_k, &|layer| counts[layers.iter().position(|l| *l == layer).unwrap()].clone());
    store.set_warm_up(true);
    store.warm_up();
    assert_eq!(greedy(&mut engine, &prompt, ANSWER), right);
}
