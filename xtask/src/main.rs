//! Chores of Forebay's developers: making and measuring the bundled model.
//!
//! `cargo xtask quantise SRC DST EXPERTS REST` writes a container of `SRC` (a float
//! checkpoint) to `DST/model.safetensors`: routed experts in format `EXPERTS`, other
//! decoder matrices in `REST`, embeddings, head, indexer and MTP in int8.
//!
//! `cargo xtask perplexity MODEL HELDOUT [exact|int8] [bf16|f32]` prints the perplexity of the
//! held-out windows, by segment and over all.

mod perplexity;
mod quantise;

use std::error::Error;
use std::path::Path;
use std::process::ExitCode;

/// What every chore returns.
type Outcome<T = ()> = Result<T, Box<dyn Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["quantise", source, target, experts, rest] => {
            quantise::quantise(Path::new(source), Path::new(target), experts, rest)
        }
        ["perplexity", model, heldout, ref options @ ..] => {
            perplexity::perplexity(Path::new(model), Path::new(heldout), options)
        }
        _ => Err("usage: cargo xtask quantise SRC DST EXPERTS REST\n       \
                  cargo xtask perplexity MODEL HELDOUT [exact|int8] [bf16|f32]"
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
