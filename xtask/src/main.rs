//! Chores of Forebay's developers: making and measuring the bundled model.
//!
//! `cargo xtask quantise SRC DST EXPERTS REST` writes a container of `SRC` (a float
//! checkpoint) to `DST/model.safetensors`: routed experts in format `EXPERTS`, other
//! decoder matrices in `REST`, embeddings, head, indexer and MTP in int8.
//!
//! `cargo xtask perplexity MODEL HELDOUT [exact|int8] [bf16|f32]` prints the perplexity of the
//! held-out windows, by segment and over all.
//!
//! `cargo xtask tasks MODEL [exact|int8] [bf16|f32]` asks the questions of
//! `models/demo/eval/tasks.json` and prints how many answers are right, by group.

mod perplexity;
mod quantise;
mod tasks;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

use forebay_engine::EngineOptions;
use forebay_model::{Arith, KvDtype};

/// What every chore returns.
type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["quantise", source, target, experts, rest] => {
            quantise::quantise(Path::new(source), Path::new(target), experts, rest)
        }
        ["perplexity", model, heldout, ref options @ ..] => engine_options(options)
            .and_then(|options| perplexity::perplexity(Path::new(model), Path::new(heldout), options)),
        ["tasks", model, ref options @ ..] => {
            engine_options(options).and_then(|options| tasks::tasks(Path::new(model), options))
        }
        _ => Err("usage: cargo xtask quantise SRC DST EXPERTS REST\n       \
                  cargo xtask perplexity MODEL HELDOUT [exact|int8] [bf16|f32]\n       \
                  cargo xtask tasks MODEL [exact|int8] [bf16|f32]"
            .into()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The default engine, but with the arithmetic and the precision of the cache that are named.
fn engine_options(names: &[&str]) -> Outcome<EngineOptions> {
    let mut options = EngineOptions::default();
    for name in names {
        match *name {
            "bf16" => options.kv_dtype = KvDtype::Bf16,
            "f32" => options.kv_dtype = KvDtype::F32,
            other => options.arith = other.parse::<Arith>()?,
        }
    }
    Ok(options)
}
