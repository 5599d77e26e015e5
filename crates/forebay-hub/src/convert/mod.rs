//! A checkpoint becomes a model of small integers.
//!
//! - [`source`]: where the checkpoint is; [`gguf`]: it may be a GGUF file. [`targets`]: what every part of it becomes.
//! - [`plan`], [`layout`]: every byte's place, before the first is written. `weight`, `input`: one matrix, read and decoded.
//! - `container`: the bytes of those files on their way into a Forebay container instead.
//! - `write`, [`manifest`]: one file after another, and what was done already. [`Loss`]: what that changed.
//!
//! docs/convert.md says what comes out, and how much memory and disk it takes.

mod container;
mod error;
pub mod gguf;
mod input;
pub mod layout;
mod loss;
pub mod manifest;
pub mod plan;
pub mod source;
pub mod targets;
mod weight;
mod write;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use forebay_core::CancelToken;
use forebay_io::file::read_regular;
use forebay_model::ModelSpec;
use forebay_model::families::glm;
use forebay_model::families::roles::Role;
use forebay_store::config::ConfigFile;
use forebay_store::json::parse_object;
use forebay_store::native::Native;
use serde_json::{Map, Value, json};

pub use error::ConvertError;
pub use gguf::{GgufModel, GgufSourceError};
pub use loss::Loss;
pub use plan::Plan;
pub use source::hub::HubSource;
pub use source::{LocalFolder, Source, SourceFile};
pub use targets::Targets;

use crate::digest::{Algorithm, Digest, FileDigest};
use crate::digests::Digests;
use crate::output::file::{PARTIAL, write_whole};
use crate::output::folder::{lock, names};
use crate::pack::PackError;
use container::Container;
use manifest::{MANIFEST, Manifest};
use write::{Run, tidy};

/// Held while a process writes.
const LOCK: &str = "forebay-convert.lock";
/// Small files that are copied if the source has them. `config.json` comes after them.
pub const TEXT_FILES: [&str; 5] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
];
/// Room that is left on the disk unless another margin is asked for, in bytes.
pub const DEFAULT_MARGIN: u64 = 20_000_000_000;

/// What the result is written as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResultKind {
    /// Safetensors files that the reference engine reads too.
    #[default]
    Reference,
    /// Forebay's own container (docs/format.md): the bytes that [packing](crate::pack) the other one makes.
    Forebay,
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// The format of every part.
    pub targets: Targets,
    /// What it is written as.
    pub kind: ResultKind,
    /// Whether the MTP layer is converted, if there is one.
    pub mtp: bool,
    /// Whether the indexer is converted, if there is one.
    pub indexer: bool,
    /// Bytes that stay free on the disk.
    pub margin: u64,
    /// Threads. They do not change a byte.
    pub threads: usize,
}

/// A conversion that can be done.
#[derive(Debug)]
pub struct Job {
    /// What will be read and written.
    pub plan: Plan,
    /// The container that the result is, if it is one.
    container: Option<Container>,
    files: Vec<SourceFile>,
    /// The result's `config.json`.
    config: Vec<u8>,
    options: Options,
    /// Whether the source hands out one file after another.
    streamed: bool,
}

/// What a run did.
#[derive(Clone, Debug, PartialEq)]
pub struct Converted {
    /// Bytes of all weight files.
    pub bytes: u64,
    /// Weight files written by this run.
    pub written: usize,
    /// Weight files that were there.
    pub kept: usize,
    /// What the files written by this run lost, by kind of weight. Measured for sources that were quantised before.
    pub losses: BTreeMap<Role, Loss>,
}

impl Job {
    /// Reads the headers of `source` and plans its conversion.
    ///
    /// # Errors
    /// If a weight that the config asks for is missing, malformed, or quantised already.
    pub fn new(source: &mut dyn Source, options: Options) -> Result<Self, ConvertError> {
        options.targets.check()?;
        let (spec, config) = config(source)?;
        let files = source.files()?;
        let catalog = source::catalog(&source.place(), &files)?;
        let plan = Plan::new(&spec, &catalog, &options)?;
        let container = match options.kind {
            ResultKind::Reference => None,
            ResultKind::Forebay => {
                let generation = source.text("generation_config.json")?;
                Some(Container::new(&plan, &config, generation.as_deref())?)
            }
        };
        Ok(Self { plan, container, files, config, options, streamed: !source.keeps_files() })
    }

    /// Names and sizes of the weight files of the result.
    pub fn result_files(&self) -> Vec<(&str, u64)> {
        match &self.container {
            None => self.plan.outputs.iter().map(|output| (output.name.as_str(), output.bytes)).collect(),
            Some(container) => container.files().collect(),
        }
    }

    /// Their sizes together.
    pub fn result_bytes(&self) -> u64 {
        self.container.as_ref().map_or(self.plan.bytes(), Container::bytes)
    }

    /// The most memory that the conversion takes with so many threads, in bytes.
    pub fn memory_bound(&self, threads: usize) -> u64 {
        self.plan.memory_bound(threads) + self.container.as_ref().map_or(0, |container| container.memory)
    }

    /// Bytes of the weight files that are fetched, one after another; `None` if all of them are there.
    pub fn fetch_bytes(&self) -> Option<u64> {
        let outputs = self.plan.outputs.iter().map(|output| output.source);
        let later = self.plan.later.iter().enumerate().filter(|(_, pieces)| !pieces.is_empty());
        let needed: BTreeSet<usize> = outputs.chain(later.map(|(file, _)| file)).collect();
        let bytes = needed.iter().filter_map(|file| self.files.get(*file)).map(|file| file.size);
        self.streamed.then(|| bytes.fold(0, u64::saturating_add))
    }

    /// The most bytes of disk that the weights take while this is converted.
    pub fn disk_bytes(&self) -> u64 {
        if self.streamed { self.streamed_disk_bytes() } else { self.result_bytes() }
    }

    /// The most bytes of disk that the weights take while they are converted from a source that hands out one file
    /// after another: the result, one file of the source, and what is set aside of the others.
    pub fn streamed_disk_bytes(&self) -> u64 {
        let largest = self.files.iter().map(|file| file.size).max().unwrap_or(0);
        let aside = self.plan.later.iter().flatten().map(|extent| extent.len);
        aside.fold(self.result_bytes().saturating_add(largest), u64::saturating_add)
    }

    /// Writes the result into `dir`, or what is missing of it. `progress` gets the bytes that are there and those
    /// there will be.
    ///
    /// # Errors
    /// After any error complete files stay, and the next call goes on behind them.
    pub fn run(
        &self,
        source: &mut dyn Source,
        dir: &Path,
        cancel: &CancelToken,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Converted, ConvertError> {
        self.check_folder(source, dir)?;
        fs::create_dir_all(dir).map_err(|cause| ConvertError::at("create", dir, cause))?;
        let _lock = lock(dir, LOCK)?.ok_or_else(|| ConvertError::Busy { dir: dir.to_owned() })?;
        let manifest = Manifest::open(dir, self.stamp(), &source.place())?;
        self.check_shards(dir)?;
        manifest.write()?;
        let (plan, files, options) = (&self.plan, &self.files[..], &self.options);
        let (bytes, container) = (self.result_bytes(), self.container.as_ref());
        if container.is_some() && Native::is_at(dir) {
            // It was begun with the same source and options, so it is the one that is asked for.
            Native::open(dir).map_err(PackError::from)?;
            leave(dir);
            let kept = plan.outputs.len();
            return Ok(Converted { bytes, written: 0, kept, losses: BTreeMap::new() });
        }
        let mut run = Run {
            dir,
            plan,
            files,
            options,
            container,
            cancel,
            progress,
            manifest,
            written: 0,
            losses: BTreeMap::new(),
        };
        let written = run.all(source)?;
        self.finish(source, dir, &run.manifest)?;
        let kept = plan.outputs.len() - written;
        Ok(Converted { bytes, written, kept, losses: run.losses })
    }

    /// What must be the same for a run to go on where another ended.
    fn stamp(&self) -> Map<String, Value> {
        let Options { targets, mtp, indexer, .. } = &self.options;
        let file = |file: &SourceFile| (file.name.clone(), json!(format!("{} {}", file.size, file.identity)));
        let source: Map<_, _> = self.files.iter().map(file).collect();
        let Value::Object(map) = json!({
            "formats": targets.json(),
            "container": if self.container.is_some() { "forebay" } else { "reference" },
            "mtp": mtp,
            "indexer": indexer,
            "config": Digest::sha256_of(&self.config).hex(),
            "source": source,
            "source_files": self.files.len(),
        }) else {
            return Map::new();
        };
        map
    }

    /// A weight file of somebody else's would be read as part of the result.
    fn check_shards(&self, dir: &Path) -> Result<(), ConvertError> {
        let ours = |name: &String| {
            self.container.is_none() && self.plan.outputs.iter().any(|output| output.name == *name)
        };
        match names(dir)?.into_iter().find(|name| name.ends_with(".safetensors") && !ours(name)) {
            Some(found) => Err(ConvertError::Occupied { dir: dir.to_owned(), found }),
            None => Ok(()),
        }
    }

    /// The result goes to a folder of its own.
    fn check_folder(&self, source: &dyn Source, dir: &Path) -> Result<(), ConvertError> {
        let real = |path: &Path| fs::canonicalize(path).ok();
        if let (Some(from), Some(to)) = (real(&source.place()), real(dir))
            && from == to
        {
            return Err(ConvertError::SameFolder { dir: dir.to_owned() });
        }
        if !dir.exists() {
            return Ok(());
        }
        let found = names(dir)?;
        // A run that was killed at once leaves only these.
        let harmless = [LOCK.to_owned(), format!("{MANIFEST}{PARTIAL}")];
        match found.into_iter().find(|name| !harmless.contains(name)) {
            Some(found) if !dir.join(MANIFEST).exists() => {
                Err(ConvertError::Occupied { dir: dir.to_owned(), found })
            }
            _ => Ok(()),
        }
    }

    /// Writes the small files, the digests of all, and last of all what makes a folder a model.
    fn finish(&self, source: &mut dyn Source, dir: &Path, manifest: &Manifest) -> Result<(), ConvertError> {
        let mut small = Vec::new();
        for name in TEXT_FILES {
            small.extend(source.text(name)?.map(|bytes| (name, bytes)));
        }
        if let Some(container) = &self.container {
            small.push(("config.json", self.config.clone()));
            container::finish(container, &self.plan.outputs, dir, &small, source.on_hub())?;
            leave(dir);
            return Ok(());
        }
        let mut digests = BTreeMap::new();
        for output in &self.plan.outputs {
            if let Some(done) = manifest.done.get(&output.name) {
                digests.insert(output.name.clone(), done.digest.clone());
            }
        }
        let config = [("config.json", self.config.clone())];
        for (name, bytes) in small.iter().chain(&config) {
            digests.insert((*name).to_owned(), FileDigest::of(Algorithm::Sha256, bytes));
        }
        for (name, bytes) in &small {
            put(dir, name, bytes)?;
        }
        let digests = Digests(digests);
        if !matches!(Digests::read(dir), Ok(Some(found)) if found == digests) {
            digests.write(dir)?;
        }
        let leftovers =
            names(dir)?.into_iter().filter(|name| name.ends_with(&format!(".safetensors{PARTIAL}")));
        leftovers.for_each(|name| drop(fs::remove_file(dir.join(name))));
        put(dir, "config.json", &self.config)?;
        leave(dir);
        Ok(())
    }
}

/// Removes what only an unfinished conversion needs. Should any of it stay, it does no harm.
fn leave(dir: &Path) {
    tidy(dir);
    // Still locked, but no longer needed.
    let _ = fs::remove_file(dir.join(LOCK));
}

/// Writes a small file unless it is there.
fn put(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), ConvertError> {
    match read_regular(&dir.join(name), bytes.len() as u64) {
        Ok(found) if found == bytes => Ok(()),
        _ => Ok(write_whole(dir, name, bytes)?),
    }
}

/// What the source's config says, and the config of the result: the same without the source's quantisation.
fn config(source: &mut dyn Source) -> Result<(ModelSpec, Vec<u8>), ConvertError> {
    const NAME: &str = "config.json";
    let Some(bytes) = source.text(NAME)? else {
        // The error that says what the folder seems to be instead.
        ConfigFile::read(&source.place())?;
        return Err(ConvertError::Source { name: NAME.to_owned(), what: "the source has none".to_owned() });
    };
    let mut map = parse_object(&bytes)?;
    let quantisation = map.get("quantization_config").cloned();
    let method = quantisation.as_ref().and_then(|q| q.get("quant_method")).and_then(Value::as_str);
    if method != Some("modelopt") {
        let spec = glm::spec(&ConfigFile::parse(NAME, &bytes)?)?;
        if quantisation.is_none() {
            return Ok((spec, bytes));
        }
    }
    // ModelOpt's own fields are not those of FP8 checkpoints; its tensors are checked one by one instead.
    map.shift_remove("quantization_config");
    let text = serde_json::to_string_pretty(&Value::Object(map)).unwrap_or_default() + "\n";
    let spec = glm::spec(&ConfigFile::parse(NAME, text.as_bytes())?)?;
    Ok((spec, text.into_bytes()))
}
