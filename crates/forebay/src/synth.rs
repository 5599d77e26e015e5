//! `forebay synth`: writes a model of random weights with the true shape of GLM-5.2.

use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::ByteSize;
use forebay_hub::synth::{self, Dims, Plan, SynthError, SynthSpec, TextFiles, Written};
use forebay_kernels::Team;
use forebay_store::config::{ConfigFile, stop_ids};
use forebay_text::tokenizer::Tokenizer;
use serde_json::{Value, json};

use crate::args::{ShapeArg, SynthArgs};
use crate::bundled;
use crate::console::Output;
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::{Progress, Unit};

/// Runs the verb.
pub fn run(args: &SynthArgs) -> Result<(), Failure> {
    let text = text_files()?;
    let spec = spec(args)?;
    let plan = Plan::new(&spec, &text)?;
    let mut out = Output::new();
    if args.dry_run {
        return match args.json {
            true => out.json(&plan_json(&plan)),
            false => out.write(&plan_text(args, &plan)),
        };
    }
    let threads = args.threads.map_or_else(Team::default_threads, usize::from).max(1);
    let interrupt = Interrupt::install()?;
    let progress = Progress::start("writing", Unit::Bytes, plan.bytes());
    let started = Instant::now();
    let written = interrupt.during(|cancel| {
        synth::write(&args.out, &spec, &text, threads, cancel, &mut |done, total| {
            progress.update(done, total)
        })
    });
    drop(progress);
    let (written, time) = (written?, started.elapsed());
    match args.json {
        true => out.json(&json!({
            "path": args.out.display().to_string(),
            "bytes": plan.bytes(),
            "bytes_written": written.bytes,
            "files_written": written.shards,
            "files_kept": written.kept,
            "seconds": time.as_secs_f64(),
        })),
        false => out.write(&summary(&args.out, &plan, &written, time)),
    }
}

/// The options, completed by those of the shape.
fn spec(args: &SynthArgs) -> Result<SynthSpec, Failure> {
    let (dense, moe) = match (args.layers, args.dense, args.moe) {
        // As in the real model, the first three layers are dense.
        (Some(layers), ..) => (layers.min(3), layers - layers.min(3)),
        (None, dense, moe) => (dense.unwrap_or(3), moe.unwrap_or(1)),
    };
    if dense + moe == 0 {
        return Err(Failure::usage("a model needs at least one layer; use --layers, --dense or --moe"));
    }
    let shape = match args.shape {
        ShapeArg::Glm52 => Dims::GLM_5_2,
        ShapeArg::Tiny => Dims::TINY,
    };
    let or = |asked: Option<u32>, otherwise: usize| asked.map_or(otherwise, |n| n as usize);
    let experts = or(args.experts, shape.experts);
    let dims = Dims {
        hidden: or(args.hidden, shape.hidden),
        expert_width: or(args.expert_width, shape.expert_width),
        experts,
        top_k: shape.top_k.min(experts),
        vocab: or(args.vocab, shape.vocab),
        ..shape
    };
    let (dense, moe) = (usize::from(dense), usize::from(moe));
    let shard_bytes = args.file_size.0;
    let (format, mtp, dsa, seed) = (args.format, args.mtp, args.dsa, args.seed);
    Ok(SynthSpec { dims, dense, moe, format, mtp, dsa, seed, shard_bytes })
}

/// The bundled model's tokenizer and template.
fn text_files() -> Result<TextFiles, Failure> {
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
    let files: Vec<_> =
        bundled::files(&names).map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).collect();
    let contents = |wanted: &str| {
        let found = bundled::files(&names).find(|(name, _)| *name == wanted);
        found.map_or(&[][..], |(_, bytes)| bytes)
    };
    let tokenizer = Tokenizer::from_bytes(contents("tokenizer.json"), "tokenizer.json")?;
    let generation = ConfigFile::parse("generation_config.json", contents("generation_config.json"));
    let generation = generation.map_err(|error| Failure::new(Exit::Model, error.to_string()))?;
    Ok(TextFiles { files, tokens: tokenizer.vocab_size(), stop_ids: stop_ids(&generation, None)? })
}

fn summary(dir: &Path, plan: &Plan, written: &Written, time: Duration) -> String {
    let total = ByteSize(plan.bytes());
    let dir = dir.display();
    match (written.shards, written.kept) {
        (0, files) => format!("{dir}: complete already, {total} in {files} weight files\n"),
        (files, kept) => {
            let bytes = ByteSize(written.bytes);
            let rate = ByteSize((written.bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            let kept = if kept > 0 { format!("; {kept} were there") } else { String::new() };
            format!(
                "{dir}: wrote {bytes} in {files} weight files, {rate}/s{kept}\ntry: forebay inspect {dir}\n"
            )
        }
    }
}

fn plan_text(args: &SynthArgs, plan: &Plan) -> String {
    let mut text = format!(
        "{} would hold {} in {} weight files with {} tensors\n",
        args.out.display(),
        ByteSize(plan.bytes()),
        plan.shards.len(),
        plan.tensors()
    );
    for shard in &plan.shards {
        let _ = writeln!(text, "  {}  {}", shard.name, ByteSize(shard.bytes));
    }
    text
}

fn plan_json(plan: &Plan) -> Value {
    let files = plan.shards.iter().map(|shard| json!({"name": shard.name, "bytes": shard.bytes}));
    json!({"bytes": plan.bytes(), "tensors": plan.tensors(), "files": files.collect::<Vec<_>>()})
}

impl From<SynthError> for Failure {
    fn from(error: SynthError) -> Self {
        let exit = match error {
            SynthError::Cancelled => return Self::Interrupted,
            SynthError::Full { .. } | SynthError::NoRoom { .. } => Exit::Runtime,
            SynthError::Io { .. } | SynthError::Busy { .. } => Exit::Runtime,
            _ => Exit::Usage,
        };
        Self::new(exit, error.to_string())
    }
}
