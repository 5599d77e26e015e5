//! Another program takes the machine's memory for a while: the cache gives way, the tokens stay,
//! and the hits come back. The machine is made up and its clock is the engine's work, so that
//! everything here is counted and nothing is timed.
#![cfg(target_os = "linux")]

mod common;

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex};

use common::demo;
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Event, Request, Sampling, Session, inspect};
use forebay_io::MemoryInfo;
use forebay_tiers::{Counters, GovernorPlan, Machine};

/// Slots of each of the five layers, about: some of their memory may go to larger passes.
const SLOTS: u64 = 30;
/// Passes before the other program starts, and while it runs, and in all.
const BEFORE: usize = 110;
const DURING: usize = 60;
const ALL: usize = 400;
/// Memory of the machine.
const TOTAL: u64 = 16_000_000_000;

/// A machine on which this process takes what its slots take, and another one the rest.
struct Pretend {
    now_ms: u64,
    others: u64,
    slots: u64,
    plan: GovernorPlan,
}

struct Shared(Arc<Mutex<Pretend>>);

impl Machine for Shared {
    /// A step of a layer takes a fiftieth of a second: a token is a sample.
    fn now_ms(&mut self) -> u64 {
        let mut pretend = self.0.lock().unwrap();
        pretend.now_ms += 20;
        pretend.now_ms
    }

    fn memory(&mut self) -> MemoryInfo {
        let Pretend { others, slots, plan, .. } = *self.0.lock().unwrap();
        let ours = plan.planned_bytes - (plan.slots as u64 - slots) * plan.slot_bytes;
        MemoryInfo {
            total: Some(TOTAL),
            available: Some(TOTAL.saturating_sub(ours + others)),
            process_rss: Some(ours),
            ..MemoryInfo::default()
        }
    }
}

fn open() -> Engine {
    let mut options = EngineOptions { context: Some(ALL + 10), ..Default::default() };
    let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize(plan.minimum + SLOTS * plan.slot_row()));
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

/// The tokens of a long answer and what each pass cost; `after_pass` is told its number.
fn run(engine: &mut Engine, after_pass: &mut dyn FnMut(usize, &Counters)) -> (Vec<u32>, Vec<Counters>) {
    let (mut tokens, mut passes) = (Vec::new(), Vec::new());
    let mut session = Session::new(engine);
    let sampling = Sampling { temperature: 1.0, top_p: 1.0, seed: 5, ..Sampling::greedy() };
    let request = Request { prompt: &[300, 17, 2041], max_tokens: ALL, sampling, stops: &[] };
    session
        .generate(engine, &request, &CancelToken::new(), None, &mut |event| {
            match event {
                Event::Token(token) => tokens.push(token.id),
                Event::Pass(pass) => {
                    after_pass(passes.len(), &pass.experts);
                    passes.push(pass.experts);
                }
                Event::Prefill { .. } => {}
            }
            ControlFlow::Continue(())
        })
        .unwrap();
    (tokens, passes)
}

fn hit_rate(passes: &[Counters]) -> f64 {
    let (hits, misses) = passes.iter().fold((0, 0), |sum, pass| (sum.0 + pass.hits, sum.1 + pass.misses));
    hits as f64 / (hits + misses) as f64
}

#[test]
fn the_cache_gives_way_and_comes_back() {
    let mut calm = open();
    let figures = MemoryInfo::assumed(TOTAL);
    let plan = calm.plan().governed(&figures);
    assert!((100..=150).contains(&plan.slots) && plan.floor == 5, "{plan:?}");
    let machine = |slots| Arc::new(Mutex::new(Pretend { now_ms: 0, others: 0, slots, plan }));
    calm.store().govern_by(plan, Box::new(Shared(machine(plan.slots as u64))));
    let (right, usual) = run(&mut calm, &mut |_, _| ());
    assert_eq!(usual.iter().map(|pass| pass.slots_released).sum::<u64>(), 0, "nobody wants anything");

    let mut engine = open();
    let pretend = machine(plan.slots as u64);
    engine.store().govern_by(plan, Box::new(Shared(Arc::clone(&pretend))));
    let mut held = Vec::new();
    let (tokens, passes) = run(&mut engine, &mut |pass, cost| {
        let mut pretend = pretend.lock().unwrap();
        pretend.slots = pretend.slots + cost.slots_regained - cost.slots_released;
        held.push(pretend.slots);
        // So much that not even the floor is enough.
        pretend.others = if (BEFORE..BEFORE + DURING).contains(&(pass + 1)) { TOTAL } else { 0 };
    });
    assert_eq!(tokens, right, "memory changes no token");
    assert_eq!(engine.store().slots(), plan.slots, "all slots are back");

    // Down in small steps from the first pass on, to the floor and not further.
    assert!(held[..BEFORE].iter().all(|slots| *slots == plan.slots as u64));
    for pair in held[BEFORE - 1..BEFORE + DURING].windows(2) {
        assert!(pair[1] <= pair[0] && pair[0] - pair[1] <= (pair[0] / 8).max(1), "{pair:?}");
    }
    let reached = held.iter().position(|slots| *slots == plan.floor as u64).unwrap();
    assert!((BEFORE + 20..BEFORE + DURING).contains(&reached), "pass {reached}");
    assert!(held.iter().all(|slots| *slots >= plan.floor as u64));
    // Two calm seconds, which are twenty passes, then up again, never down.
    let calm_again = BEFORE + DURING;
    assert!(held[calm_again..calm_again + 18].iter().all(|slots| *slots == plan.floor as u64));
    assert!(held[calm_again..].is_sorted());
    let whole = held[calm_again..].iter().position(|slots| *slots == plan.slots as u64).unwrap();
    assert!((40..90).contains(&whole), "after {whole} passes");

    // Hits: as ever before it; few without slots; as in the undisturbed run once they are back.
    let part = |from: usize, to: usize| (hit_rate(&passes[from..to]), hit_rate(&usual[from..to]));
    let (first, undisturbed) = part(0, BEFORE);
    assert_eq!(first, undisturbed);
    let (starved, undisturbed) = part(BEFORE + 40, BEFORE + DURING);
    assert!(starved < undisturbed / 2.0, "{starved:.3} {undisturbed:.3}");
    let (last, undisturbed) = part(ALL - 100, ALL);
    assert!(last > undisturbed - 0.03, "{last:.3} {undisturbed:.3}");
}
