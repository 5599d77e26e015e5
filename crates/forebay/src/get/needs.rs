//! What memory a model needs, before it is downloaded: planned from its config and the headers of its weight files.
//!
//! The planner reads folders, and of weight files only headers. So it gets a folder with `config.json` and files that
//! have their headers and their true lengths and are otherwise holes, which take no room.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::ByteSize;
use forebay_engine::{Drafting, EngineOptions};
use forebay_hub::get::{GetError, Hub, Prepared, RemoteFile, Watch};
use serde_json::{Value, json};

use crate::dirs;

/// Most weight files whose headers are asked for.
const MAX_FILES: usize = 1000;
/// Longest config that is asked for.
const LONGEST: u64 = 32 << 20;

/// What sketches are called, before the number of a process.
const SKETCH: &str = "sketch-";
/// Nobody looks at a model for so long.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// What memory a model needs.
pub struct Needs {
    known: Result<Memory, String>,
}

struct Memory {
    minimum: u64,
    everything: u64,
    context: usize,
    available: Option<u64>,
}

impl Needs {
    /// Asks the hub for config and headers, and plans. What cannot be planned is said, and stops nothing.
    pub fn look(hub: &Hub, prepared: &Prepared<'_>, watch: &Watch<'_>) -> Result<Self, GetError> {
        match plan(hub, prepared, watch) {
            Err(Unplanned::Fetch(GetError::Cancelled)) => Err(GetError::Cancelled),
            Err(Unplanned::Fetch(error)) => Ok(Self { known: Err(error.to_string()) }),
            Err(Unplanned::Because(why)) => Ok(Self { known: Err(why) }),
            Ok(memory) => Ok(Self { known: Ok(memory) }),
        }
    }

    /// For people.
    pub fn rows(&self) -> Vec<(&'static str, String)> {
        let memory = match &self.known {
            Ok(memory) => memory,
            Err(why) => return vec![("memory", format!("not known: {why}"))],
        };
        let available =
            memory.available.map_or("this system does not say what is available".to_owned(), |bytes| {
                let verdict = if bytes < memory.minimum { "too little" } else { "enough to run" };
                format!("{} are available here, {verdict}", ByteSize(bytes))
            });
        let (least, all) = (ByteSize(memory.minimum), ByteSize(memory.everything));
        vec![
            (
                "memory",
                format!(
                    "{least} at least, {all} to hold every expert, with {} tokens of context",
                    memory.context
                ),
            ),
            ("", available),
        ]
    }

    /// For programs.
    pub fn json(&self) -> Value {
        match &self.known {
            Ok(memory) => json!({
                "minimum": memory.minimum,
                "everything": memory.everything,
                "context": memory.context,
                "available": memory.available,
            }),
            Err(why) => json!({"unknown": why}),
        }
    }
}

/// Why there is no plan.
enum Unplanned {
    Fetch(GetError),
    Because(String),
}

impl From<GetError> for Unplanned {
    fn from(error: GetError) -> Self {
        Self::Fetch(error)
    }
}

fn plan(hub: &Hub, prepared: &Prepared<'_>, watch: &Watch<'_>) -> Result<Memory, Unplanned> {
    let because = |why: &str| Unplanned::Because(why.to_owned());
    if cfg!(windows) {
        return Err(because("this system makes no files with holes, which planning before a download needs"));
    }
    let config = prepared.files().iter().find(|file| file.name == "config.json" && file.size <= LONGEST);
    let config = config.ok_or_else(|| because("config.json is not among the files"))?;
    let is_weights = |file: &&RemoteFile| file.name.ends_with(".safetensors") && !file.name.contains('/');
    let weights: Vec<&RemoteFile> = prepared.files().iter().filter(is_weights).collect();
    if weights.is_empty() {
        return Err(because("there are no .safetensors files"));
    }
    if weights.len() > MAX_FILES {
        return Err(because("there are too many .safetensors files to look into before"));
    }
    let sketch =
        Sketch::new().map_err(|error| Unplanned::Because(format!("no folder for a sketch: {error}")))?;
    let bytes = hub.read_range(prepared.listing(), config, 0..config.size, watch)?;
    sketch.write("config.json", &bytes, config.size)?;
    if let Some(tokenizer) = prepared.files().iter().find(|file| file.name == "tokenizer.json") {
        // Its length alone says what memory it takes.
        sketch.write("tokenizer.json", &[], tokenizer.size)?;
    }
    let headers = hub.headers(prepared.listing(), &weights, watch)?;
    for (file, header) in weights.iter().zip(&headers) {
        sketch.write(&file.name, header, file.size)?;
    }
    let usual = EngineOptions { drafting: Drafting::Auto, ..EngineOptions::default() };
    let found = forebay_engine::inspect(&sketch.0, &usual);
    // Its path means nothing to the user.
    let sketched = format!("{}", sketch.0.display());
    let named = |text: String| Unplanned::Because(text.replace(&sketched, prepared.listing().repo.as_str()));
    let found = found.map_err(|error| named(error.to_string()))?;
    let plan = found.plan.map_err(|error| named(error.to_string()))?;
    Ok(Memory {
        minimum: plan.minimum,
        everything: plan.everything,
        context: plan.context,
        available: found.memory.available,
    })
}

/// A folder that looks like the model to somebody who reads headers. Dropping it deletes it.
struct Sketch(PathBuf);

impl Sketch {
    fn new() -> std::io::Result<Self> {
        let parent = dirs::cache().unwrap_or_else(dirs::temporary_cache);
        sweep(&parent);
        let path = parent.join(format!("{SKETCH}{}", std::process::id()));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    fn write(&self, name: &str, bytes: &[u8], size: u64) -> Result<(), Unplanned> {
        let path: &Path = &self.0.join(name);
        let write = || {
            let mut file = File::create(path)?;
            file.write_all(bytes)?;
            file.set_len(size)
        };
        write().map_err(|error| Unplanned::Because(format!("{} cannot be sketched: {error}", path.display())))
    }
}

/// Deletes what runs have left that were killed a while ago.
fn sweep(parent: &Path) {
    let is_old = |entry: &fs::DirEntry| {
        let age = entry.metadata().and_then(|meta| meta.modified()).ok().and_then(|at| at.elapsed().ok());
        age.is_some_and(|age| age > OLD)
    };
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    for entry in
        entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(SKETCH)).filter(is_old)
    {
        // Whatever the reason that it cannot be deleted, it does no harm.
        let _ = fs::remove_dir_all(entry.path());
    }
}

impl Drop for Sketch {
    fn drop(&mut self) {
        // It holds nothing of worth, and the next run uses another.
        let _ = fs::remove_dir_all(&self.0);
    }
}
