//! What the suites that compare the engine with other implementations share.
#![allow(dead_code, reason = "every suite uses its own part")]

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Event, Request, Sampling, Session};
use forebay_model::families::glm::TRANSFORMERS_LOW_RANK_EPS;
use forebay_model::{Arith, KvDtype, Trace};
use serde_json::Value;

/// The bundled model.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// A file of the bundled model's `eval` folder.
pub fn eval(name: &str) -> Value {
    json(&demo().join("eval").join(name))
}

pub fn json(file: &Path) -> Value {
    let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    serde_json::from_slice(&bytes).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

pub fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

pub fn floats(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

/// As close to transformers in float32 as it gets, with room for the demo model's texts.
pub fn transformers_options() -> EngineOptions {
    EngineOptions {
        arith: Arith::Exact,
        kv_dtype: KvDtype::F32,
        low_rank_norm_eps: Some(TRANSFORMERS_LOW_RANK_EPS),
        context: Some(600),
        ..Default::default()
    }
}

/// The engine with these options.
pub fn open_as_transformers(dir: &Path) -> Engine {
    Engine::open(dir, transformers_options(), &mut |_, _| {}).unwrap()
}

/// The logits after each of `tokens`, in a sequence of their own.
pub fn all_logits(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = Session::new(engine);
    let mut rows = Vec::new();
    let mut keep = |_: usize, row: &[f32]| rows.push(row.to_vec());
    session.run_tokens(engine, tokens, &CancelToken::new(), &mut keep).unwrap();
    rows
}

/// What greedy decoding adds to the sequence of `session` and `prompt`, up to a stop token.
pub fn greedy_on(
    engine: &mut Engine,
    session: &mut Session,
    prompt: &[u32],
    max_tokens: usize,
    stops: &[u32],
) -> Vec<u32> {
    let request = Request { prompt, max_tokens, sampling: Sampling::greedy(), stops };
    let mut tokens = Vec::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            tokens.push(token.id);
        }
        ControlFlow::Continue(())
    };
    session.generate(engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
    tokens
}

/// Exactly `max_tokens` greedy tokens after `prompt`, whatever they are.
pub fn greedy(engine: &mut Engine, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    let mut session = Session::new(engine);
    greedy_on(engine, &mut session, prompt, max_tokens, &[])
}

pub fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

/// The perplexity over the first `limit` windows of a held-out segment: of every token but a
/// window's first two, given those before it.
pub fn perplexity(engine: &mut Engine, segment: &Value, limit: usize) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for window in segment["windows"].as_array().unwrap().iter().take(limit) {
        let mut session = Session::new(engine);
        let scores = session.score(engine, &ids(window), &CancelToken::new(), None, &mut |_| {}).unwrap();
        sum -= scores[1..].iter().map(|s| s.log_probability).sum::<f64>();
        count += scores.len() - 1;
    }
    (sum / f64::from(u32::try_from(count).unwrap())).exp()
}

/// The choices that a run made, by layer and position.
#[derive(Default)]
pub struct Choices {
    pub selected: BTreeMap<(usize, usize), Vec<u32>>,
    pub routed: BTreeMap<(usize, usize), Vec<(u32, f32)>>,
}

impl Trace for Choices {
    fn selected(&mut self, layer: usize, position: usize, positions: &[u32]) {
        self.selected.insert((layer, position), positions.to_vec());
    }

    fn routed(&mut self, layer: usize, position: usize, experts: &[u32], weights: &[f32]) {
        let pairs = experts.iter().copied().zip(weights.iter().copied()).collect();
        self.routed.insert((layer, position), pairs);
    }
}
