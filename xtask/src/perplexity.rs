//! Perplexity over the held-out windows of the bundled model.

use std::path::Path;

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Session};
use forebay_model::families::glm::TRANSFORMERS_LOW_RANK_EPS;
use forebay_model::{Arith, KvDtype};

use crate::Outcome;

/// Tokens at the start of every window that are given, not scored.
const GIVEN: usize = 2;

pub(crate) fn perplexity(model: &Path, heldout: &Path, options: &[&str]) -> Outcome {
    let mut engine_options =
        EngineOptions { low_rank_norm_eps: Some(TRANSFORMERS_LOW_RANK_EPS), ..Default::default() };
    for option in options {
        match *option {
            "bf16" => engine_options.kv_dtype = KvDtype::Bf16,
            "f32" => engine_options.kv_dtype = KvDtype::F32,
            other => engine_options.arith = other.parse::<Arith>()?,
        }
    }
    let mut engine = Engine::open(model, engine_options, &mut |_, _| {})?;
    let text: serde_json::Value = serde_json::from_slice(&std::fs::read(heldout)?)?;
    let mut session = Session::new(&engine);
    let (mut all, mut count) = (0.0, 0);
    for segment in text["segments"].as_array().ok_or("no segments in the held-out file")? {
        let (mut sum, mut scored) = (0.0, 0);
        for window in segment["windows"].as_array().ok_or("a segment has no windows")? {
            let ids: Vec<u32> = serde_json::from_value(window.clone())?;
            let scores = session.score(&mut engine, &ids, &CancelToken::new(), &mut |_, _| {})?;
            for score in &scores[GIVEN - 1..] {
                sum -= score.log_probability;
                scored += 1;
            }
        }
        println!(
            "{:8} nll {:.5}  perplexity {:.4}",
            segment["name"],
            sum / f64::from(scored),
            (sum / f64::from(scored)).exp()
        );
        all += sum;
        count += scored;
    }
    println!(
        "{:8} nll {:.5}  perplexity {:.4}",
        "all",
        all / f64::from(count),
        (all / f64::from(count)).exp()
    );
    Ok(())
}
