//! A recording of the bundled model, replayed by the simulator, comes to the very hits, misses
//! and evictions that the engine counted: for every policy, with passes of one row and of many.

mod common;

use std::ops::ControlFlow;

use common::demo;
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Request, RouteRecorder, Sampling, Session, inspect};
use forebay_tiers::routes::Routes;
use forebay_tiers::routes::file::{Header, read_routes};
use forebay_tiers::sim::{Contestant, replay_with};
use forebay_tiers::{Counters, LookAhead, Policy};

const POLICIES: [Policy; 4] =
    [Policy::Lru, Policy::Lfru { halve_every: 16 }, Policy::Aged { half_life: 23 }, Policy::Blend];

/// An engine with room for `slots` experts in each layer, and passes of at most `chunk` rows.
fn open(slots: u64, chunk: usize, policy: Policy) -> Engine {
    let look_ahead = if chunk.is_multiple_of(2) { LookAhead::On } else { LookAhead::Off };
    let mut options =
        EngineOptions { context: Some(240), chunk: Some(chunk), policy, look_ahead, ..Default::default() };
    let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize(plan.minimum + slots * plan.slot_row()));
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

/// What a run chose, and what it counted.
fn recorded(engine: &mut Engine, prompt: &[u32], answer: usize) -> (Routes, Counters) {
    let moe = &engine.spec().moe;
    let header = Header::new("demo", moe.experts, moe.top_k);
    let mut recorder = RouteRecorder::new(Vec::new(), header, prompt.len()).unwrap();
    let mut session = Session::new(engine);
    let request = Request { prompt, max_tokens: answer, sampling: Sampling::greedy(), stops: &[] };
    let outcome = session.generate(engine, &request, &CancelToken::new(), Some(&mut recorder), &mut |_| {
        ControlFlow::Continue(())
    });
    let counted = outcome.unwrap().stats.experts;
    let bytes = recorder.finish().unwrap();
    (read_routes(bytes.as_slice()).unwrap().1, counted)
}

#[test]
fn the_simulator_agrees_with_the_engine() {
    // Passes of one row, of some, of more than the engine computes in one block, and of so many
    // that experts are handed out in another order; the last pass of a prompt is a short one.
    for (chunk, tokens, answer, slots) in [
        (1, 30, 20, [0, 1, 5, 11].as_slice()),
        (2, 31, 6, &[2, 5]),
        (7, 40, 6, &[5, 40]),
        (64, 150, 4, &[1, 40]),
        (200, 210, 4, &[5, 48]),
    ] {
        let prompt: Vec<u32> = (0..tokens).map(|i| (i * 197 + 11) % 8000).collect();
        for &slots in slots {
            for policy in POLICIES {
                let mut engine = open(slots, chunk, policy);
                // A history, so that seeds are compared as well; only some policies listen.
                let moe = engine.spec().moe;
                let counts = |layer: u32| {
                    (0..moe.experts as u64).map(|expert| (expert * 7 + u64::from(layer)) % 13).collect()
                };
                let seeded = slots % 2 == 1;
                if seeded {
                    engine.store().seed(moe.top_k, &counts);
                }
                let history: Vec<Vec<u64>> = engine.store().layers().filter(|_| seeded).map(counts).collect();
                let (routes, counted) = recorded(&mut engine, &prompt, answer);
                let passes = (tokens as usize).div_ceil(chunk) + answer - 1;
                assert!(routes.layers.iter().all(|steps| steps.len() == passes));
                let quotas = &engine.plan().slots.quotas;
                let replayed = replay_with(&routes, Contestant::Policy(policy), quotas, &history);
                assert_eq!(
                    (replayed.hits, replayed.misses, replayed.evictions),
                    (counted.hits, counted.misses, counted.evictions),
                    "{policy:?}, {slots} slots, passes of {chunk} rows"
                );
                assert_eq!(replayed.hits > 0, slots > 0, "{policy:?}, {slots} slots, {chunk} rows");
                assert!(slots != 5 || chunk > 2 || replayed.evictions > 0, "{policy:?}: nobody left");
            }
        }
    }
}
