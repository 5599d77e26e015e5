//! What conversion cost, on a text: perplexity before and after, and how often both predict the same token.

use std::path::Path;

use forebay_core::CancelToken;
use forebay_engine::{EngineOptions, TokenScore};
use serde_json::{Value, json};

use crate::failure::{Exit, Failure};
use crate::score;

/// Tokens of a window that is scored from nothing, at most.
const WINDOW: usize = 512;

/// The result on one text.
pub struct Quality {
    /// Of the result.
    after: Vec<TokenScore>,
    /// Of the source, or why it cannot be run.
    before: Result<Vec<TokenScore>, String>,
}

/// Scores `text` with both models, one after the other, or with the result alone if the source is not on this machine.
pub fn compare(
    source: Option<&Path>,
    result: &Path,
    text: &str,
    cancel: &CancelToken,
) -> Result<Quality, Failure> {
    let options = EngineOptions { context: Some(WINDOW), ..Default::default() };
    let after = score::text(result, text, &options, "measuring the result", cancel)?;
    let Some(source) = source else {
        return Ok(Quality { after, before: Err("it is on a hub".to_owned()) });
    };
    let before = match score::text(source, text, &options, "measuring the source", cancel) {
        Ok(scores) => Ok(scores),
        // Not every source can be run: NVFP4 cannot, and BF16 takes four times the memory.
        Err(Failure::Error { exit: Exit::Model | Exit::Memory, message }) => Err(message),
        Err(other) => return Err(other),
    };
    Ok(Quality { after, before })
}

fn perplexity(scores: &[TokenScore]) -> f64 {
    let sum: f64 = scores.iter().map(|score| score.log_probability).sum();
    (-sum / scores.len().max(1) as f64).exp()
}

impl Quality {
    fn agreement(&self) -> Option<f64> {
        let before = self.before.as_ref().ok()?;
        let same = before.iter().zip(&self.after).filter(|(a, b)| a.best == b.best).count();
        Some(same as f64 / self.after.len().max(1) as f64)
    }

    /// For people.
    pub fn text(&self) -> String {
        let (after, tokens) = (perplexity(&self.after), self.after.len());
        match (&self.before, self.agreement()) {
            (Ok(before), Some(agreement)) => format!(
                "perplexity          {:.4} before, {after:.4} after, over {tokens} tokens\n\
                 same prediction     {:.2} % of them\n",
                perplexity(before),
                100.0 * agreement
            ),
            (Err(why), _) => {
                format!(
                    "perplexity          {after:.4} over {tokens} tokens; the source cannot be run here: {why}\n"
                )
            }
            _ => String::new(),
        }
    }

    /// For programs.
    pub fn json(&self) -> Value {
        json!({
            "tokens": self.after.len(),
            "perplexity": perplexity(&self.after),
            "source_perplexity": self.before.as_ref().ok().map(|scores| perplexity(scores)),
            "top1_agreement": self.agreement(),
            "source_error": self.before.as_ref().err(),
        })
    }
}
