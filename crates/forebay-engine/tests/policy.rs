//! The default policy on what the bundled model chose, beside the others.

mod common;

use std::ops::ControlFlow;

use common::{demo, eval, ids};
use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Request, Sampling, Session};
use forebay_model::Trace;
use forebay_tiers::Policy;
use forebay_tiers::routes::{Routes, Union};
use forebay_tiers::sim::{Contestant, replay};

/// Tokens of each window.
const TOKENS: usize = 300;

/// Every router's choices, a row a step.
struct Rows {
    index: Vec<usize>,
    routes: Routes,
}

impl Trace for Rows {
    fn routed(&mut self, layer: usize, _position: usize, experts: &[u32], _weights: &[f32]) {
        let at = self.index.iter().position(|known| *known == layer).unwrap_or_else(|| {
            self.index.push(layer);
            self.routes.layers.push(Vec::new());
            self.index.len() - 1
        });
        self.routes.layers[at].push(Union::of([experts]));
    }
}

/// Two windows of each held-out text.
fn recorded() -> Routes {
    let options = EngineOptions { context: Some(TOKENS), ..Default::default() };
    let mut engine = Engine::open(&demo(), options, &mut |_, _| {}).unwrap();
    let (experts, top_k) = (engine.spec().moe.experts, engine.spec().moe.top_k);
    let mut rows = Rows { index: Vec::new(), routes: Routes { experts, top_k, layers: Vec::new() } };
    for segment in eval("heldout.json")["segments"].as_array().unwrap() {
        for window in segment["windows"].as_array().unwrap().iter().take(2) {
            let prompt = &ids(window)[..TOKENS];
            let request = Request { prompt, max_tokens: 0, sampling: Sampling::greedy(), stops: &[] };
            let mut session = Session::new(&engine);
            let cancel = CancelToken::new();
            session
                .generate(&mut engine, &request, &cancel, Some(&mut rows), &mut |_| ControlFlow::Continue(()))
                .unwrap();
        }
    }
    rows.routes
}

/// The windows `order` of a recording, one after another.
fn windows(routes: &Routes, order: &[usize]) -> Routes {
    let pick = |steps: &Vec<Union>| {
        order.iter().flat_map(|at| &steps[at * TOKENS..(at + 1) * TOKENS]).cloned().collect()
    };
    Routes { layers: routes.layers.iter().map(pick).collect(), ..*routes }
}

/// The budgets of `forebay bench cache`, with and without a history: of the same texts (the first
/// window of each is the history of the second), and of other ones (books, then stories and chats).
#[test]
fn the_default_is_never_below_recency_and_close_to_the_best() {
    let routes = recorded();
    for order in [[0, 2, 4, 6, 1, 3, 5, 7], [0, 1, 2, 3, 4, 5, 6, 7], [4, 5, 6, 7, 0, 1, 2, 3]] {
        let (first, second) = windows(&routes, &order).split(4 * TOKENS);
        for history in [first.counts(), Vec::new()] {
            for slots in [1, 2, 4, 6, 8, 10, 12, 16, 25, 32, 48] {
                let rate = |contestant| replay(&second, contestant, slots, &history).hit_rate();
                let ours = rate(Contestant::Policy(Policy::default()));
                let recency = rate(Contestant::Policy(Policy::Lru)).max(rate(Contestant::TrimmedLru));
                let known = !history.is_empty();
                assert!(
                    ours >= recency,
                    "{order:?} {known} {slots}: {ours:.4} is below recency, {recency:.4}"
                );
                let aged =
                    [7, 23, 69, 138].map(|half_life| rate(Contestant::Policy(Policy::Aged { half_life })));
                let heat = rate(Contestant::Policy(Policy::Lfru { halve_every: 64 }));
                let best = aged.into_iter().fold(heat.max(recency), f64::max);
                assert!(ours >= best - 0.01, "{order:?} {known} {slots}: {ours:.4} against {best:.4}");
            }
        }
    }
}
