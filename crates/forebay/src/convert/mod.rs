//! `forebay convert`: a checkpoint becomes a model of small integers.

mod quality;

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::ByteSize;
use forebay_hub::convert::{
    ConvertError, Converted, GgufModel, GgufSourceError, Job, LocalFolder, Loss, Options, Source,
};
use forebay_hub::verify::census;
use forebay_kernels::Team;
use serde_json::{Map, Value, json};

use crate::args::ConvertArgs;
use crate::console::{self, Output};
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::{Progress, Unit};
use crate::prompt;
use crate::verify;

/// Runs the verb.
pub fn run(args: &ConvertArgs) -> Result<(), Failure> {
    let threads = args.threads.map_or_else(Team::default_threads, usize::from).max(1);
    let (mtp, indexer) = (!args.skip_mtp, !args.skip_indexer);
    let options = Options { targets: args.targets(), mtp, indexer, margin: args.margin.0, threads };
    // Read now: nobody wants to learn after hours that the name was mistyped.
    let text = args.check_text.as_deref().map(prompt::read_file).transpose()?;
    let mut source = open(args)?;
    let job = Job::new(&mut *source, options)?;
    job.plan.notes.iter().for_each(|note| console::note(note));
    let mut out = Output::new();
    if args.plan {
        return match args.json {
            true => out.json(&plan_json(&job, threads)),
            false => out.write(&plan_text(&args.out, &job, threads)),
        };
    }
    console::diagnose(&format!(
        "writing {} with {threads} threads and at most {} of memory\n",
        ByteSize(job.plan.bytes()),
        ByteSize(job.plan.memory_bound(threads)),
    ));
    let interrupt = Interrupt::install()?;
    let progress = Progress::start("converting", Unit::Bytes, job.plan.bytes());
    let started = Instant::now();
    let done = interrupt.during(|cancel| {
        job.run(&mut *source, &args.out, cancel, &mut |done, total| progress.update(done, total))
    });
    drop(progress);
    let (done, time) = (done?, started.elapsed());
    let report = census(&args.out);
    let quality = match &text {
        Some(text) if report.is_sound() => {
            Some(interrupt.during(|cancel| quality::compare(&args.source, &args.out, text, cancel))?)
        }
        _ => None,
    };
    match args.json {
        true => out.json(&json!({
            "path": args.out.display().to_string(),
            "bytes": done.bytes,
            "files_written": done.written,
            "files_kept": done.kept,
            "seconds": time.as_secs_f64(),
            "losses": losses_json(&done),
            "census": report.json(),
            "quality": quality.as_ref().map(quality::Quality::json),
        }))?,
        false => {
            let mut shown =
                summary(&args.out, &done, time) + &losses_text(&done) + &verify::describe(&report);
            shown.extend(quality.map(|quality| quality.text()));
            out.write(&(shown + &verify::verdict(&report, false)))?;
        }
    }
    match report.is_sound() {
        true => Ok(()),
        false => Err(Failure::Reported { exit: Exit::Model }),
    }
}

/// The source: a folder, or a GGUF file.
fn open(args: &ConvertArgs) -> Result<Box<dyn Source>, Failure> {
    let is_gguf = args.source.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
    match (&args.tokenizer, is_gguf && !args.source.is_dir()) {
        (tokenizer, true) => Ok(Box::new(GgufModel::open(&args.source, tokenizer.as_deref())?)),
        (None, false) => Ok(Box::new(LocalFolder::new(&args.source))),
        (Some(_), false) => Err(Failure::new(
            Exit::Usage,
            "--tokenizer is for GGUF files; a folder's own tokenizer is copied: leave the option out"
                .to_owned(),
        )),
    }
}

fn losses_text(done: &Converted) -> String {
    if done.losses.is_empty() {
        return String::new();
    }
    let mut out = "lost on top of the source's own quantisation, by the files written now:\n".to_owned();
    for (role, loss) in &done.losses {
        let (rms, max) = (100.0 * loss.rms(), 100.0 * loss.max);
        out += &format!("  {:<18} {rms:.4} % RMS, at most {max:.4} % of a row's largest\n", role.to_string());
    }
    out
}

fn losses_json(done: &Converted) -> Value {
    let loss = |loss: &Loss| json!({"weights": loss.weights, "rms": loss.rms(), "max": loss.max});
    done.losses.iter().map(|(role, of)| (role.to_string(), loss(of))).collect::<Map<_, _>>().into()
}

fn summary(dir: &Path, done: &Converted, time: Duration) -> String {
    let (dir, bytes) = (dir.display(), ByteSize(done.bytes));
    match (done.written, done.kept) {
        (0, files) => format!("{dir}: complete already, {bytes} in {files} weight files\n"),
        (files, 0) => {
            let rate = ByteSize((done.bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            format!("{dir}: wrote {bytes} in {files} weight files, {rate}/s\n")
        }
        (files, kept) => format!("{dir}: wrote {files} weight files, {kept} were there; {bytes} in all\n"),
    }
}

fn plan_text(dir: &Path, job: &Job, threads: usize) -> String {
    let plan = &job.plan;
    format!(
        "read                {} of weights\n\
         write               {} in {} weight files to {}\n\
         peak disk           {} (the source stays as it is)\n\
         memory              at most {} with {threads} threads\n",
        ByteSize(plan.read_bytes),
        ByteSize(plan.bytes()),
        plan.outputs.len(),
        dir.display(),
        ByteSize(plan.bytes()),
        ByteSize(plan.memory_bound(threads)),
    )
}

fn plan_json(job: &Job, threads: usize) -> Value {
    let plan = &job.plan;
    let files = plan.outputs.iter().map(|output| json!({"name": output.name, "bytes": output.bytes}));
    json!({
        "read_bytes": plan.read_bytes,
        "bytes": plan.bytes(),
        "peak_disk_bytes": plan.bytes(),
        "streamed_peak_disk_bytes": job.streamed_disk_bytes(),
        "memory_bound_bytes": plan.memory_bound(threads),
        "threads": threads,
        "files": files.collect::<Vec<_>>(),
        "notes": plan.notes,
    })
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        let exit = match &error {
            ConvertError::Gguf { error, .. }
                if matches!(**error, GgufSourceError::NoTokenizer | GgufSourceError::Tokenizer { .. }) =>
            {
                Exit::Usage
            }
            ConvertError::Cancelled => return Self::Interrupted,
            ConvertError::Config(_)
            | ConvertError::Json(_)
            | ConvertError::Catalog(_)
            | ConvertError::Shard(_)
            | ConvertError::Digests(_)
            | ConvertError::Layout { .. }
            | ConvertError::Quantised { .. }
            | ConvertError::Nvfp4 { .. }
            | ConvertError::Nvfp4Scale { .. }
            | ConvertError::NotFinite { .. }
            | ConvertError::Gguf { .. }
            | ConvertError::TooLarge { .. } => Exit::Model,
            ConvertError::Ambiguous { .. }
            | ConvertError::Format { .. }
            | ConvertError::MtpFormat { .. }
            | ConvertError::Encode(_)
            | ConvertError::SameFolder { .. }
            | ConvertError::Occupied { .. }
            | ConvertError::OtherOptions { .. } => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
