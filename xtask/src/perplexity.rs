//! Perplexity over the held-out windows of the bundled model.

use std::path::Path;

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Session};
use forebay_model::families::glm::TRANSFORMERS_LOW_RANK_EPS;

use crate::Outcome;

/// Tokens at the start of every window that are given, not scored.
const GIVEN: usize = 2;

/// Prints the perplexity of every segment of `heldout` and of all, with the epsilon of the
/// low-rank norms that transformers has, so that its numbers can be compared.
pub(crate) fn perplexity(model: &Path, heldout: &Path, options: EngineOptions) -> Outcome {
    let engine_options = EngineOptions { low_rank_norm_eps: Some(TRANSFORMERS_LOW_RANK_EPS), ..options };
    let mut engine = Engine::open(model, engine_options, &mut |_, _| {})?;
    let text: serde_json::Value = serde_json::from_slice(&std::fs::read(heldout)?)?;
    let mut session = Session::new(&engine);
    let (mut all, mut count) = (0.0, 0);
    for segment in text["segments"].as_array().ok_or("no segments in the held-out file")? {
        let (mut sum, mut scored) = (0.0, 0);
        for window in segment["windows"].as_array().ok_or("a segment has no windows")? {
            let ids: Vec<u32> = serde_json::from_value(window.clone())?;
            let scores = session.score(&mut engine, &ids, &CancelToken::new(), None, &mut |_| {})?;
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
