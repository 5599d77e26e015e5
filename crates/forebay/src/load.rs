//! A model opened for use, with everything that turns text into ids and back.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_engine::{Engine, EngineOptions};
use forebay_store::config::ConfigFile;
use forebay_text::{ChatTemplate, StopSet, Tokenizer};

use crate::console;
use crate::failure::Failure;
use crate::inspect;
use crate::progress::{Progress, Unit};

/// What a model folder says about text.
pub struct TextSide {
    /// Text to ids and back.
    pub tokenizer: Tokenizer,
    /// Conversations to prompts.
    pub template: ChatTemplate,
}

impl TextSide {
    /// Reads tokenizer and template.
    pub fn read(dir: &Path) -> Result<Self, Failure> {
        let tokenizer = tokenizer(dir)?;
        let template = ChatTemplate::load(dir, &tokenizer)?;
        Ok(Self { tokenizer, template })
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
    /// The engine.
    pub engine: Engine,
    /// Tokenizer and template.
    pub text: TextSide,
    /// Tokens that end an answer.
    pub stops: StopSet,
    /// Time that opening the weights took.
    pub load_time: Duration,
}

impl Loaded {
    /// Opens the weights of `dir`, whose text side has been read.
    pub fn open(dir: PathBuf, text: TextSide, options: EngineOptions) -> Result<Self, Failure> {
        let started = Instant::now();
        let engine = open_engine(&dir, options)?;
        let stops = StopSet::new(engine.stop_ids().iter().copied(), &text.tokenizer);
        Ok(Self { dir, engine, text, stops, load_time: started.elapsed() })
    }
}

/// Opens the weights of `dir`, showing progress, and says what a user should know about them.
pub fn open_engine(dir: &Path, mut options: EngineOptions) -> Result<Engine, Failure> {
    if let Some(format) = options.quantise {
        if inspect::is_requantised(&forebay_engine::inspect(dir, &options)?.snapshot, format) {
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
    let progress = Progress::start("loading the model", Unit::Bytes, 0);
    let engine = Engine::open(dir, options, &mut |done, total| progress.update(done, total))?;
    drop(progress);
    for fact in engine.notes() {
        console::note(fact);
    }
    Ok(engine)
}
