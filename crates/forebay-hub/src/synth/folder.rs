//! The folder that a model is written to: whose it is, what is there already, and whether the rest fits.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use forebay_io::file::read_regular;
use forebay_store::json::parse_object;
use serde_json::{Map, Value};

use super::error::SynthError;
use super::plan::Plan;
use super::shard::is_complete;
use super::spec::TextFiles;
use crate::output::file::{PARTIAL, write_whole};
use crate::output::folder::{changes, free_bytes, lock, names};

/// The options of a synthetic model, in its folder. Written first.
pub const STAMP: &str = "synth.json";
/// Held while a process writes.
const LOCK: &str = "synth.lock";
/// Room that is left on the disk.
const MARGIN: u64 = 64 << 20;
/// Longer files are none that were written here, unless the model's own are.
const MAX_TEXT: u64 = 1 << 20;

/// A folder that only this process writes to.
pub struct Folder {
    dir: PathBuf,
    /// Unlocked when it is closed.
    _lock: File,
}

impl Folder {
    /// Takes `dir`, which is made if it is not there. It must be empty, or hold this very model of `bytes` bytes or
    /// a part of it.
    pub fn take(dir: &Path, stamp: &Value, bytes: u64) -> Result<Self, SynthError> {
        if !dir.exists() {
            room(dir, bytes, free_bytes(dir))?;
        }
        fs::create_dir_all(dir).map_err(|cause| SynthError::at("create", dir, cause))?;
        let found = names(dir)?;
        let begun = found.contains(STAMP);
        // A run that was killed at once leaves only these.
        let harmless = |name: &&String| *name != LOCK && **name != format!("{STAMP}{PARTIAL}");
        if let (false, Some(other)) = (begun, found.iter().find(harmless)) {
            return Err(SynthError::Occupied { dir: dir.to_owned(), found: other.clone() });
        }
        if begun {
            check_stamp(dir, stamp)?;
        }
        let lock = lock(dir, LOCK)?.ok_or_else(|| SynthError::Busy { dir: dir.to_owned() })?;
        if !begun {
            let text = serde_json::to_string_pretty(stamp).unwrap_or_else(|_| stamp.to_string());
            write_whole(dir, STAMP, (text + "\n").as_bytes())?;
        }
        Ok(Self { dir: dir.to_owned(), _lock: lock })
    }

    /// The numbers of the plan's files that are still to be written.
    pub fn missing(&self, plan: &Plan) -> Result<Vec<usize>, SynthError> {
        let mut missing = Vec::new();
        for (number, shard) in plan.shards.iter().enumerate() {
            if !is_complete(&self.dir.join(&shard.name), shard)? {
                missing.push(number);
            }
        }
        let ours: BTreeSet<&str> = plan.shards.iter().map(|shard| shard.name.as_str()).collect();
        let foreign = names(&self.dir)?
            .into_iter()
            .find(|name| name.ends_with(".safetensors") && !ours.contains(name.as_str()));
        match foreign {
            Some(found) => Err(SynthError::Occupied { dir: self.dir.clone(), found }),
            None => Ok(missing),
        }
    }

    /// Refuses to begin what the disk has no room for.
    pub fn check_room(&self, bytes: u64) -> Result<(), SynthError> {
        room(&self.dir, bytes, free_bytes(&self.dir))
    }

    /// Writes the tokenizer's files and, last of all, what makes a folder a model. A file of that name with other
    /// contents is never replaced.
    pub fn finish(&self, text: &TextFiles, config: &Value) -> Result<(), SynthError> {
        let config = serde_json::to_string_pretty(config).unwrap_or_else(|_| config.to_string()) + "\n";
        let last = [("config.json".to_owned(), config.into_bytes())];
        for (name, bytes) in text.files.iter().chain(&last) {
            let path = self.dir.join(name);
            match read_regular(&path, MAX_TEXT.max(bytes.len() as u64)) {
                Ok(found) if found == *bytes => {}
                Ok(_) => return Err(SynthError::Occupied { dir: self.dir.clone(), found: name.clone() }),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
                    write_whole(&self.dir, name, bytes)?;
                }
                Err(cause) => return Err(SynthError::at("read", &path, cause)),
            }
        }
        // Still locked, but no longer needed; should it stay, it does no harm.
        let _ = fs::remove_file(self.dir.join(LOCK));
        Ok(())
    }
}

fn check_stamp(dir: &Path, wanted: &Value) -> Result<(), SynthError> {
    let path = dir.join(STAMP);
    let bytes = read_regular(&path, MAX_TEXT).map_err(|cause| SynthError::at("read", &path, cause))?;
    let found = parse_object(&bytes).unwrap_or_default();
    let empty = Map::new();
    let changed = changes(&found, wanted.as_object().unwrap_or(&empty));
    match changed.is_empty() {
        true => Ok(()),
        false => Err(SynthError::OtherOptions { dir: dir.to_owned(), changed: changed.join(", ") }),
    }
}

fn room(dir: &Path, bytes: u64, free: Option<u64>) -> Result<(), SynthError> {
    let needed = bytes.saturating_add(MARGIN);
    match free {
        Some(free) if free < needed => Err(SynthError::NoRoom { dir: dir.to_owned(), needed, free }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_noticed_before_anything_is_written() {
        let dir = Path::new("somewhere");
        room(dir, 1000, None).unwrap();
        room(dir, 1000, Some(1000 + MARGIN)).unwrap();
        let message = room(dir, 1000, Some(MARGIN)).unwrap_err().to_string();
        assert!(message.contains("free 1.00 kB"), "{message}");
        assert!(room(dir, u64::MAX, Some(u64::MAX - 1)).is_err());
        assert!(free_bytes(&std::env::temp_dir()).is_none_or(|free| free > 0));
    }
}
