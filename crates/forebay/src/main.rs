//! The `forebay` command: verbs over the engine, for people and for scripts.
//!
//! - [`args`]: what can be typed, and [`config_file`] where it can be written instead. [`settings`]: what it means. [`failure`]: the exit statuses.
//! - One module per verb: [`run`], [`chat`], [`serve`], [`inspect`], [`plan`], [`score`], [`mod@bench`], [`doctor`], [`tune`],
//!   [`synth`], [`get`], [`verify`], [`convert`], [`mod@pack`].
//! - What they share: [`load`] a model, read a [`prompt`], show an [`answer`], [`progress`], Ctrl-C in
//!   [`interrupt`], measurements in [`report`], the end of a run in
//!   [`closing`] and [`hindsight`], files that a run writes in [`recordings`], what they must not replace in
//!   [`outputs`], the streams in [`console`].
//! - [`bundled`]: the model inside the program. [`dirs`]: the user's folders.
//!
//! Only this crate reads environment variables.

mod answer;
mod args;
mod bench;
mod bundled;
mod chat;
mod closing;
mod config_file;
mod console;
mod convert;
mod dirs;
mod doctor;
mod failure;
mod get;
mod hindsight;
mod identity;
mod inspect;
mod interrupt;
mod learnt;
mod load;
mod outputs;
mod pack;
mod plan;
mod prefixes;
mod progress;
mod prompt;
mod record;
mod recordings;
mod report;
mod run;
mod score;
mod serve;
mod served;
mod sessions;
mod settings;
mod structure;
mod synth;
mod tune;
mod usage;
mod verify;

use std::process::ExitCode;

use crate::args::Verb;
use crate::failure::Failure;

fn main() -> ExitCode {
    let cli = match config_file::command_line(std::env::args_os()) {
        Ok(cli) => cli,
        Err(failure) => return ended(&failure),
    };
    let done = match &cli.verb {
        Verb::Run(args) => run::run(args),
        Verb::Chat(args) => chat::run(args),
        Verb::Serve(args) => serve::run(args),
        Verb::Inspect(args) => inspect::run(args),
        Verb::Plan(args) => plan::run(args),
        Verb::Score(args) => score::run(args),
        Verb::Bench(args) => bench::run(args),
        Verb::Doctor(args) => doctor::run(args),
        Verb::Tune(args) => tune::run(args),
        Verb::Synth(args) => synth::run(args),
        Verb::Get(args) => get::run(args),
        Verb::Verify(args) => verify::run(args),
        Verb::Convert(args) => convert::run(args),
        Verb::Pack(args) => pack::run(args),
        Verb::Sessions(args) => sessions::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => ended(&failure),
    }
}

/// Says what went wrong, unless that was said.
fn ended(failure: &Failure) -> ExitCode {
    if let Failure::Error { message, .. } = failure {
        console::error(message);
    }
    ExitCode::from(failure.exit() as u8)
}
