//! A recording of the bundled model, replayed by the simulator, comes to the very hits and
//! misses that the engine counted.

mod common;

use common::demo;
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Request, RouteRecorder, Sampling, Session, inspect};
use forebay_tiers::routes::file::{Header, read_routes};
use forebay_tiers::sim::{Outcome, play};
use forebay_tiers::{LayerCache, Policy};

#[test]
fn the_simulator_agrees_with_the_engine() {
    let prompt: Vec<u32> = (0..40).map(|i| (i * 197 + 11) % 8000).collect();
    for slots in [0, 1, 2, 5, 11] {
        // A token a pass: what is counted must not hang on how a long union is weighed.
        let mut options = EngineOptions { context: Some(100), chunk: Some(1), ..Default::default() };
        let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
        let slab =
            plan.demand.classes.iter().map(|c| c.slab_bytes.next_multiple_of(4096) as u64).max().unwrap();
        options.memory = Some(ByteSize(plan.minimum + slots * slab * plan.demand.layers.len() as u64));
        let mut engine = Engine::open(&demo(), options, &mut |_, _| {}).unwrap();

        let moe = &engine.spec().moe;
        let header = Header::new("demo", moe.experts, moe.top_k);
        let mut recorder = RouteRecorder::new(Vec::new(), header, prompt.len()).unwrap();
        let mut session = Session::new(&engine);
        let request = Request { prompt: &prompt, max_tokens: 40, sampling: Sampling::default(), stops: &[] };
        let outcome =
            session.generate(&mut engine, &request, &CancelToken::new(), Some(&mut recorder), &mut |_| ());
        let counted = outcome.unwrap().stats.experts;

        let bytes = recorder.finish().unwrap();
        let (_, routes) = read_routes(bytes.as_slice()).unwrap();
        let quotas = &engine.plan().slots.quotas;
        assert_eq!(routes.layers.len(), quotas.len());
        let mut replayed = Outcome::default();
        for (steps, quota) in routes.layers.iter().zip(quotas) {
            assert_eq!(steps.len(), 40 + 39, "a pass per token but the last");
            play(&mut LayerCache::new(*quota, Policy::default()), steps, &mut replayed);
        }
        assert_eq!((replayed.hits, replayed.misses), (counted.hits, counted.misses), "{slots} slots");
        assert!(slots == 0 || replayed.hits > 0);
    }
}
