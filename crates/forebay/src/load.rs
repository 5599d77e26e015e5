//! A model opened for use, with everything that turns text into ids and back.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_engine::{Engine, EngineOptions, Inspection};
use forebay_store::config::ConfigFile;
use forebay_text::{ChatTemplate, StopSet, Tokenizer};

use crate::args::DiskArgs;
use crate::console;
use crate::failure::Failure;
use crate::inspect;
use crate::learnt::Learnt;
use crate::progress::{Progress, Unit};
use crate::tune;
use crate::usage::Usage;

/// What a model folder says about text.
pub struct TextSide {
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to prompts.
    pub template: ChatTemplate,
}

impl TextSide {
    /// Reads tokenizer and template.
    pub fn read(dir: &Path) -> Result<Self, Failure> {
        let tokenizer = tokenizer(dir)?;
        let template = ChatTemplate::load(dir, &tokenizer)?;
        Ok(Self { tokenizer: Arc::new(tokenizer), template })
    }
}

/// Reads the tokenizer. The folder is looked at first, so that a path that is no model folder is called that
/// and not a folder without tokenizer.
pub fn tokenizer(dir: &Path) -> Result<Tokenizer, Failure> {
    ConfigFile::read(dir)?;
    Ok(Tokenizer::from_file(&dir.join("tokenizer.json"))?)
}

/// A model ready to answer.
pub struct Loaded {
    /// Its folder.
    pub dir: PathBuf,
    /// The folders that its files are read from: its own, then the mirrors.
    pub roots: Vec<PathBuf>,
    /// The engine.
    pub engine: Engine,
    /// Tokenizer and template.
    pub text: TextSide,
    /// Tokens that end an answer.
    pub stops: StopSet,
    /// Time that opening the weights took.
    pub load_time: Duration,
    /// What earlier runs used.
    usage: Option<Usage>,
    /// What earlier runs found out about drafting.
    learnt: Option<Learnt>,
}

impl Loaded {
    /// Opens the weights of `dir`, whose text side has been read, as have its headers if there is a `found`.
    pub fn open(
        dir: PathBuf,
        found: Option<Inspection>,
        text: TextSide,
        options: EngineOptions,
        disk: &DiskArgs,
    ) -> Result<Self, Failure> {
        let started = Instant::now();
        let found = found.map_or_else(|| inspect_folder(&dir, &options), Ok)?;
        let (engine, Afterwards { usage, learnt }) = weights(&dir, found, options, &disk.mirror, &|_, _| ())?;
        let stops = StopSet::new(engine.stop_ids().iter().copied(), &text.tokenizer);
        let roots = roots(&dir, &disk.mirror);
        Ok(Self { dir, roots, engine, text, stops, load_time: started.elapsed(), usage, learnt })
    }

    /// Remembers for later runs what this one used and found out.
    pub fn remember(&mut self) {
        Afterwards { usage: self.usage.take(), learnt: self.learnt.take() }.remember(&mut self.engine);
    }
}

/// Opens the weights of `dir`, whose headers were read with the same options, and tells the engine what earlier runs used
/// and found out. `tell` hears how far it is: bytes done, and all.
pub fn weights(
    dir: &Path,
    found: Inspection,
    options: EngineOptions,
    mirrors: &[PathBuf],
    tell: &dyn Fn(u64, u64),
) -> Result<(Engine, Afterwards), Failure> {
    let mut engine = open_found(found, options, mirrors, tell)?;
    let usage = Usage::begin(dir, &mut engine);
    let learnt = Learnt::begin(dir, &mut engine);
    Ok((engine, Afterwards { usage, learnt }))
}

/// What is left to do when an engine is not needed any more.
pub struct Afterwards {
    usage: Option<Usage>,
    learnt: Option<Learnt>,
}

impl Afterwards {
    /// Remembers for later runs what this one used and found out.
    pub fn remember(self, engine: &mut Engine) {
        if let Some(usage) = self.usage {
            usage.end(engine);
        }
        if let Some(learnt) = self.learnt {
            learnt.end(engine);
        }
    }
}

/// The folders that a model is read from.
pub fn roots(dir: &Path, mirrors: &[PathBuf]) -> Vec<PathBuf> {
    std::iter::once(dir.to_owned()).chain(mirrors.iter().cloned()).collect()
}

/// Experts of fewer bytes are soon read, whatever the way.
const WORTH_TUNING: u64 = 4_000_000_000;

/// Reads experts as `forebay tune` found best, where nothing else was asked for. A large model that does not fit
/// into memory is measured at its first start on a machine.
fn tune_for(found: &Inspection, options: &mut EngineOptions) -> Result<(), Failure> {
    if options.io.throttle.is_some() {
        return Ok(());
    }
    let snapshot = &found.snapshot;
    let streams = found.plan.as_ref().is_ok_and(|plan| !plan.holds_everything());
    let large = snapshot.experts.file_bytes >= WORTH_TUNING;
    let tuned = match tune::stored(snapshot) {
        Some(tuned) => tuned,
        None if streams && large => {
            console::note(
                "measuring once how this machine reads the model best; this takes less than 30 seconds",
            );
            match tune::measure_now(snapshot) {
                Ok(tuned) => tuned,
                Err(Failure::Error { message, .. }) => {
                    console::note(&format!("that did not work, and the usual way is taken: {message}"));
                    return Ok(());
                }
                Err(other) => return Err(other),
            }
        }
        None => return Ok(()),
    };
    tuned.apply(options);
    Ok(())
}

/// Opens the weights of `dir`, showing progress, and says what a user should know about them. Experts are also
/// read from the copies in `mirrors`.
pub fn open_engine(dir: &Path, options: EngineOptions, mirrors: &[PathBuf]) -> Result<Engine, Failure> {
    open_found(inspect_folder(dir, &options)?, options, mirrors, &|_, _| ())
}

/// Checks a folder and plans a run of it, reading headers only.
pub fn inspect_folder(dir: &Path, options: &EngineOptions) -> Result<Inspection, Failure> {
    Ok(forebay_engine::inspect(dir, options)?)
}

/// Opens a model whose headers were read with the same options.
fn open_found(
    found: Inspection,
    mut options: EngineOptions,
    mirrors: &[PathBuf],
    tell: &dyn Fn(u64, u64),
) -> Result<Engine, Failure> {
    if let Some(format) = options.quantise {
        if inspect::is_requantised(&found.snapshot, format) {
            console::note(&format!(
                "weights are re-encoded to {format} while loading, which changes results"
            ));
        } else {
            console::note(&format!(
                "--quantize {format} changes nothing: no matrix is stored in a float format"
            ));
            // What is reported of this run should not name it.
            options.quantise = None;
        }
    }
    tune_for(&found, &mut options)?;
    let progress = Progress::start("loading the model", Unit::Bytes, 0);
    let mut engine = Engine::load(found.snapshot, mirrors, options, &mut |done, total| {
        tell(done, total);
        progress.update(done, total);
    })?;
    drop(progress);
    for fact in engine.notes() {
        console::note(fact);
    }
    let top_k = engine.spec().moe.top_k;
    engine.store().start_recording(top_k);
    Ok(engine)
}
