//! `forebay convert`: a checkpoint, here or on a hub, becomes a model of small integers.

mod checked;
mod quality;

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::{ByteSize, CancelToken};
use forebay_hub::convert::{
    ConvertError, Converted, GgufModel, GgufSourceError, HubSource, Job, LocalFolder, Loss, Options, Source,
};
use forebay_hub::get::{Hub, Watch, parse_reference};
use forebay_kernels::Team;
use serde_json::{Map, Value, json};

use crate::args::{Container, ConvertArgs};
use crate::console::{self, Output};
use crate::failure::{Exit, Failure};
use crate::get::{Notes, surroundings};
use crate::interrupt::Interrupt;
use crate::outputs::check_apart;
use crate::progress::{Progress, Unit};
use crate::prompt;
use checked::Checked;

/// Runs the verb.
pub fn run(args: &ConvertArgs) -> Result<(), Failure> {
    // Read now: nobody wants to learn after hours that the name was mistyped.
    let text = args.check_text.as_deref().map(prompt::read_file).transpose()?;
    let interrupt = Interrupt::install()?;
    let begun = Begun { args };
    let started = Instant::now();
    let source = Given::of(args)?;
    if source == Given::Folder {
        check_apart(&args.source, &args.out)?;
    }
    let done = interrupt.during(|cancel| match source {
        Given::Folder => begun.convert(&mut LocalFolder::new(&args.source), cancel),
        Given::Gguf => {
            let mut model = GgufModel::open(&args.source, args.tokenizer.as_deref())?;
            if args.tokenizer.is_none() {
                console::note(
                    "the tokenizer is made from the file's metadata, which name GLM's way to cut a text; \
                     --tokenizer DIR takes the original one",
                );
            }
            begun.convert(&mut model, cancel)
        }
        Given::Repository => begun.fetch_and_convert(cancel),
    });
    let (Some(done), time) = (done?, started.elapsed()) else { return Ok(()) };
    let report = Checked::of(&args.out);
    let source = args.source.is_dir().then_some(args.source.as_path());
    let quality = match &text {
        Some(text) if report.is_sound() => {
            Some(interrupt.during(|cancel| quality::compare(source, &args.out, text, cancel))?)
        }
        _ => None,
    };
    let mut out = Output::new();
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
            let mut shown = summary(args, &done, time) + &losses_text(&done) + &report.description();
            shown.extend(quality.map(|quality| quality.text()));
            out.write(&(shown + &report.verdict()))?;
        }
    }
    match report.is_sound() {
        true => Ok(()),
        false => Err(Failure::Reported { exit: Exit::Model }),
    }
}

/// What the source is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Given {
    Folder,
    Gguf,
    Repository,
}

impl Given {
    fn of(args: &ConvertArgs) -> Result<Self, Failure> {
        let is_gguf = args.source.extension().is_some_and(|end| end.eq_ignore_ascii_case("gguf"));
        let given = match args.source.is_dir() {
            true => Self::Folder,
            false if is_gguf => Self::Gguf,
            false => Self::Repository,
        };
        match given != Self::Gguf && args.tokenizer.is_some() {
            true => Err(Failure::usage(
                "--tokenizer is for GGUF files; the tokenizer of any other source is copied: leave the option out",
            )),
            false => Ok(given),
        }
    }
}

/// A conversion under way.
struct Begun<'a> {
    args: &'a ConvertArgs,
}

impl Begun<'_> {
    /// From a repository; what happens while its files are fetched is said.
    fn fetch_and_convert(&self, cancel: &CancelToken) -> Result<Option<Converted>, Failure> {
        let args = self.args;
        let given = args.source.to_str().unwrap_or_default();
        let (repo, revision) = parse_reference(given).map_err(|_| {
            let shown = args.source.display();
            Failure::usage(format!(
                "{shown} is no folder that exists, and no repository (OWNER/NAME or OWNER/NAME@REVISION)"
            ))
        })?;
        let hub = Hub::new(&surroundings::config(&args.hub)?)?;
        let notes = Notes::default();
        let seen = |event| notes.say(&event);
        let watch = Watch { cancel, seen: &seen };
        let asking = Progress::start("asking the hub", Unit::Bytes, 0);
        let mut source = HubSource::open(&hub, &repo, &revision, &args.out, watch)?;
        drop(asking);
        let listing = source.listing();
        console::note(&match listing.revision == revision {
            true => format!("{given} is no folder here: converting {repo} at commit {}", listing.commit),
            false => format!("going on with {repo} at commit {}, which this was begun from", listing.commit),
        });
        self.convert(&mut source, cancel)
    }

    /// Plans and converts; nothing, if only the plan is asked for.
    fn convert(&self, source: &mut dyn Source, cancel: &CancelToken) -> Result<Option<Converted>, Failure> {
        let args = self.args;
        let threads = args.threads.map_or_else(Team::default_threads, usize::from).max(1);
        let (mtp, indexer) = (!args.skip_mtp, !args.skip_indexer);
        let kind = args.container.into();
        let options = Options { targets: args.targets(), kind, mtp, indexer, margin: args.margin.0, threads };
        let looking = Progress::start("reading headers", Unit::Bytes, 0);
        let job = Job::new(source, options)?;
        drop(looking);
        job.plan.notes.iter().for_each(|note| console::note(note));
        if args.plan {
            let mut out = Output::new();
            match args.json {
                true => out.json(&plan_json(&job, threads))?,
                false => out.write(&plan_text(&args.out, &job, threads))?,
            }
            return Ok(None);
        }
        console::diagnose(&format!(
            "writing {} with {threads} threads and at most {} of memory\n",
            ByteSize(job.result_bytes()),
            ByteSize(job.memory_bound(threads)),
        ));
        let progress = Progress::start("converting", Unit::Bytes, job.plan.bytes());
        let done = job.run(source, &args.out, cancel, &mut |done, total| progress.update(done, total))?;
        Ok(Some(done))
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

fn summary(args: &ConvertArgs, done: &Converted, time: Duration) -> String {
    let (dir, bytes) = (args.out.display(), ByteSize(done.bytes));
    // A container has a file for every layer; what is converted at a time is a file of the source all the same.
    let unit = match args.container {
        Container::Reference => "weight files",
        Container::Forebay => "steps",
    };
    match (done.written, done.kept) {
        (0, steps) => format!("{dir}: complete already, {bytes} in {steps} {unit}\n"),
        (steps, 0) => {
            let rate = ByteSize((done.bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            format!("{dir}: wrote {bytes} in {steps} {unit}, {rate}/s\n")
        }
        (steps, kept) => format!("{dir}: wrote {steps} {unit}, {kept} were there; {bytes} in all\n"),
    }
}

fn plan_text(dir: &Path, job: &Job, threads: usize) -> String {
    let plan = &job.plan;
    let (read, room) = match job.fetch_bytes() {
        None => (plan.read_bytes, "the source stays as it is"),
        Some(bytes) => (bytes, "the result, one file of the source, and what is set aside of others"),
    };
    let verb = if job.fetch_bytes().is_some() { "fetch" } else { "read" };
    format!(
        "{verb:<20}{} of weights\n\
         write               {} in {} weight files to {}\n\
         peak disk           {} ({room})\n\
         memory              at most {} with {threads} threads\n",
        ByteSize(read),
        ByteSize(job.result_bytes()),
        job.result_files().len(),
        dir.display(),
        ByteSize(job.disk_bytes()),
        ByteSize(job.memory_bound(threads)),
    )
}

fn plan_json(job: &Job, threads: usize) -> Value {
    let plan = &job.plan;
    let files = job.result_files().into_iter().map(|(name, bytes)| json!({"name": name, "bytes": bytes}));
    json!({
        "read_bytes": plan.read_bytes,
        "bytes": job.result_bytes(),
        "fetch_bytes": job.fetch_bytes(),
        "peak_disk_bytes": job.disk_bytes(),
        "streamed_peak_disk_bytes": job.streamed_disk_bytes(),
        "memory_bound_bytes": job.memory_bound(threads),
        "threads": threads,
        "files": files.collect::<Vec<_>>(),
        "notes": plan.notes,
    })
}

impl From<ConvertError> for Failure {
    fn from(error: ConvertError) -> Self {
        let error = match error {
            ConvertError::Get(error) => return error.into(),
            ConvertError::Pack(error) => return error.into(),
            other => other,
        };
        let exit = match &error {
            ConvertError::Gguf { error, .. }
                if matches!(
                    **error,
                    GgufSourceError::NoTokenizer { .. } | GgufSourceError::Tokenizer { .. }
                ) =>
            {
                Exit::Usage
            }
            ConvertError::Cancelled => return Self::Interrupted,
            ConvertError::Config(_)
            | ConvertError::Json(_)
            | ConvertError::Catalog(_)
            | ConvertError::Shard(_)
            | ConvertError::Known(_)
            | ConvertError::Damaged { .. }
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
