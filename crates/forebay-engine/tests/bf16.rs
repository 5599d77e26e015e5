//! The bundled model's full-precision checkpoint against transformers' own outputs.
//!
//! The checkpoint (55 MiB of BF16) is not part of the repository; the environment variable
//! `FOREBAY_DEMO_BF16` names a folder that holds it. Without it these tests say that they
//! were skipped; the quantised weights that ship with Forebay are tested in `demo.rs`.

use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Event, Request, Sampling, Session};
use forebay_model::families::glm::TRANSFORMERS_LOW_RANK_EPS;
use forebay_model::{Arith, KvDtype};
use serde_json::Value;

fn checkpoint() -> Option<PathBuf> {
    let dir = std::env::var_os("FOREBAY_DEMO_BF16").map(PathBuf::from);
    if dir.is_none() {
        println!("skipped: FOREBAY_DEMO_BF16 does not name the full-precision demo checkpoint");
    }
    dir
}

fn eval(name: &str) -> Value {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/eval").join(name);
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn open(dir: &Path) -> Engine {
    let options = EngineOptions {
        arith: Arith::Exact,
        kv_dtype: KvDtype::F32,
        low_rank_norm_eps: Some(TRANSFORMERS_LOW_RANK_EPS),
        context: Some(600),
        ..Default::default()
    };
    Engine::open(dir, options, &mut |_, _| {}).unwrap()
}

fn rows(engine: &mut Engine, tokens: &[u32]) -> Vec<Vec<f32>> {
    let mut session = Session::new(engine);
    let mut rows = Vec::new();
    let mut keep = |_: usize, row: &[f32]| rows.push(row.to_vec());
    session.run_tokens(engine, tokens, &CancelToken::new(), &mut keep).unwrap();
    rows
}

fn argmax(row: &[f32]) -> u32 {
    (0..row.len()).fold(0, |best, i| if row[i] > row[best] { i } else { best }) as u32
}

/// All eight prompts of `greedy.json`, two of them longer than the selection: 64 tokens each,
/// and the most likely token at every position. Their smallest top-2 gap is 0.0025, far above
/// rounding, so no tie is excused.
#[test]
fn greedy_texts_are_those_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open(&dir);
    let golden = eval("greedy.json");
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 8);
    for prompt in prompts {
        let name = &prompt["name"];
        let (start, new) = (ids(&prompt["prompt_ids"]), ids(&prompt["new_ids"]));
        let mut have = Vec::new();
        let mut keep = |event| {
            if let Event::Token(token) = event {
                have.push(token);
            }
        };
        let request =
            Request { prompt: &start, max_tokens: new.len(), sampling: Sampling::greedy(), stops: &[] };
        let mut session = Session::new(&engine);
        session.generate(&mut engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
        assert_eq!(have, new, "{name}");
        let sequence: Vec<u32> = start.iter().chain(&new).copied().collect();
        let best: Vec<u32> = rows(&mut engine, &sequence).iter().map(|row| argmax(row)).collect();
        assert_eq!(best, ids(&prompt["tf_argmax"]), "{name}");
    }
}

#[test]
fn teacher_forced_logits_are_those_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open(&dir);
    for text in eval("teacher_forced.json")["texts"].as_array().unwrap() {
        let rows = rows(&mut engine, &ids(&text["ids"]));
        for (i, position) in ids(&text["positions"]).into_iter().enumerate() {
            let row = &rows[position as usize];
            assert_eq!(argmax(row), ids(&text["argmax"])[i], "{}: position {position}", text["name"]);
            let logits: Vec<f32> = serde_json::from_value(text["top5_logits"][i].clone()).unwrap();
            for (id, want) in ids(&text["top5_ids"][i]).into_iter().zip(logits) {
                let have = row[id as usize];
                // The file rounds to four digits; the logit range is about 30.
                assert!(
                    (have - want).abs() < 2e-3,
                    "{}: position {position}, {id}: {have}, want {want}",
                    text["name"]
                );
            }
        }
    }
}

#[test]
fn perplexity_is_that_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open(&dir);
    let want = eval("perplexity.json");
    for segment in eval("heldout.json")["segments"].as_array().unwrap() {
        let (mut sum, mut count) = (0.0, 0);
        for window in segment["windows"].as_array().unwrap() {
            let mut session = Session::new(&engine);
            let scores =
                session.score(&mut engine, &ids(window), &CancelToken::new(), &mut |_, _| {}).unwrap();
            sum -= scores[1..].iter().map(|s| s.log_probability).sum::<f64>();
            count += scores.len() - 1;
        }
        let name = segment["name"].as_str().unwrap();
        let have = (sum / count as f64).exp();
        let want = want[name]["f32"]["ppl"].as_f64().unwrap();
        assert!((have / want - 1.0).abs() < 1e-3, "{name}: perplexity {have}, want {want}");
    }
}
