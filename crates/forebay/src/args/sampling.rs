//! Options of the verbs that generate: how tokens are chosen, where an answer ends, and what it may be.

use std::path::PathBuf;

use clap::Args;
use forebay_engine::sample::MAX_BIAS;
use forebay_text::stop_strings::MAX_STOP_BYTES;

/// How to answer.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Answer")]
pub struct AnswerArgs {
    /// Most tokens in an answer
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..))]
    pub max_tokens: u32,
    /// 0 always takes the likeliest token, higher is more varied, up to 2 [default: the model's, else 0.7]
    #[arg(long, value_name = "T", value_parser = temperature, allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Choose among the likeliest tokens that together have this probability [default: the model's, else 0.9]
    #[arg(long, value_name = "P", value_parser = top_p, allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Choose among this many of the likeliest tokens; 0 among all [default: the model's, else 0]
    #[arg(long, value_name = "N")]
    pub top_k: Option<u32>,
    /// Leave out tokens less likely than this share of the likeliest one [default: the model's, else 0]
    #[arg(long, value_name = "P", value_parser = min_p, allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Make tokens of prompt and answer less likely: above 1, up to 2 [default: the model's, else 1]
    #[arg(long, value_name = "X", value_parser = repetition, allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Make tokens of the answer less likely, from -2 to 2
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = penalty, allow_negative_numbers = true)]
    pub presence_penalty: f32,
    /// The same for every time that the token is in the answer
    #[arg(long, value_name = "X", default_value_t = 0.0, value_parser = penalty, allow_negative_numbers = true)]
    pub frequency_penalty: f32,
    /// Make a token more or less likely, from -100 (never) to 100; may be given several times
    #[arg(long, value_name = "ID=BIAS", value_parser = bias)]
    pub logit_bias: Vec<(u32, f32)>,
    /// End the answer in front of this text; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = stop, allow_hyphen_values = true)]
    pub stop: Vec<String>,
    /// Same seed, same answer [default: a new one every time]
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
    /// Instructions for the model, before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Let the model reason before it answers; the reasoning is shown on standard error, dim on a terminal
    #[arg(long)]
    pub think: bool,
}

/// What the answer may be. It cannot be anything else, whatever the model would like to say.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Answer")]
pub struct StructureArgs {
    /// Answer with a JSON document that this schema allows: a file, or the schema itself
    #[arg(long, value_name = "FILE|TEXT", conflicts_with_all = ["grammar", "regex"])]
    pub json_schema: Option<String>,
    /// Answer with a text of this grammar: GBNF (.gbnf) or Lark (.lark); docs/structured-output.md
    #[arg(long, value_name = "FILE", conflicts_with = "regex")]
    pub grammar: Option<PathBuf>,
    /// Answer with a text that this regular expression matches as a whole
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub regex: Option<String>,
}

impl StructureArgs {
    /// The name of the option that was given.
    pub fn kind(&self) -> Option<&'static str> {
        let given = [
            ("json-schema", self.json_schema.is_some()),
            ("grammar", self.grammar.is_some()),
            ("regex", self.regex.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }
}

fn temperature(text: &str) -> Result<f32, String> {
    number(text, |t| (0.0..=2.0).contains(&t), "a number from 0 to 2")
}

fn top_p(text: &str) -> Result<f32, String> {
    number(text, |p| p > 0.0 && p <= 1.0, "a number above 0 and up to 1")
}

fn min_p(text: &str) -> Result<f32, String> {
    number(text, |p| (0.0..=1.0).contains(&p), "a number from 0 to 1")
}

fn repetition(text: &str) -> Result<f32, String> {
    number(text, |x| x > 0.0 && x <= 2.0, "a number above 0 and up to 2, such as 1.1")
}

fn penalty(text: &str) -> Result<f32, String> {
    number(text, |x| (-2.0..=2.0).contains(&x), "a number from -2 to 2")
}

fn number(text: &str, allowed: impl Fn(f32) -> bool, expected: &str) -> Result<f32, String> {
    text.parse().ok().filter(|&value| allowed(value)).ok_or_else(|| format!("use {expected}"))
}

fn bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text.split_once('=').and_then(|(id, bias)| Some((id.parse().ok()?, bias.parse().ok()?)));
    pair.filter(|(_, bias)| (-MAX_BIAS..=MAX_BIAS).contains(bias))
        .ok_or_else(|| "use a token id and a number from -100 to 100, such as 123=-100".to_owned())
}

fn stop(text: &str) -> Result<String, String> {
    match text.len() {
        0 => Err("give some text".to_owned()),
        1..=MAX_STOP_BYTES => Ok(text.to_owned()),
        _ => Err(format!("use at most {MAX_STOP_BYTES} bytes")),
    }
}
