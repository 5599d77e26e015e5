//! The folder that is written to: whose it is, what is finished already, and whether the rest fits.
//!
//! A file is finished when the progress file says so and its bytes still have the checksums that are written there.
//! Whatever else a run that was killed left behind is written again.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use forebay_io::file::read_regular;
use forebay_store::folder::UNFINISHED_PACK;
use forebay_store::json::parse_object;
use forebay_store::native::header::Checked;
use serde_json::{Map, Value, json};

use super::error::PackError;
use super::scan::scan;
use super::{Codes, hex};
use crate::output::file::{self, PARTIAL};
use crate::output::folder::{MAX_STATE_BYTES, free_bytes, lock, names};

/// Held while a process writes.
const LOCK: &str = "pack.lock";

/// A folder that only this process writes to.
pub struct Folder {
    dir: PathBuf,
    stamp: Value,
    finished: Map<String, Value>,
    /// Unlocked when it is closed.
    _lock: File,
}

impl Folder {
    /// Takes `dir`, which is made if it is not there. It must be empty, or hold a part of what `stamp` names.
    pub fn take(dir: &Path, made_by: &str, identity: &[u8; 32], codes: Codes) -> Result<Self, PackError> {
        fs::create_dir_all(dir).map_err(|cause| PackError::at("create", dir, cause))?;
        let found = names(dir)?;
        let begun = found.contains(UNFINISHED_PACK);
        // A run that was killed at once leaves only these.
        let foreign = |name: &&String| *name != LOCK && **name != format!("{UNFINISHED_PACK}{PARTIAL}");
        if let (false, Some(other)) = (begun, found.iter().find(foreign)) {
            return Err(PackError::Occupied { dir: dir.to_owned(), found: other.clone() });
        }
        let lock = lock(dir, LOCK)?.ok_or_else(|| PackError::Busy { dir: dir.to_owned() })?;
        let codes = codes.to_string();
        let stamp =
            json!({"made_by": made_by, "version": super::VERSION, "identity": hex(identity), "codes": codes});
        let mut folder = Self { dir: dir.to_owned(), stamp, finished: Map::new(), _lock: lock };
        if begun {
            folder.read_progress()?;
        } else {
            folder.write_progress()?;
        }
        Ok(folder)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    fn read_progress(&mut self) -> Result<(), PackError> {
        let path = self.dir.join(UNFINISHED_PACK);
        let bytes =
            read_regular(&path, MAX_STATE_BYTES).map_err(|cause| PackError::at("read", &path, cause))?;
        let found = parse_object(&bytes).unwrap_or_default();
        if found.get("of") != Some(&self.stamp) {
            return Err(PackError::Other { dir: self.dir.clone() });
        }
        if let Some(Value::Object(files)) = found.get("files") {
            self.finished = files.clone();
        }
        Ok(())
    }

    fn write_progress(&self) -> Result<(), PackError> {
        let text = json!({"of": self.stamp, "files": self.finished}).to_string();
        self.write_whole(UNFINISHED_PACK, text.as_bytes())
    }

    /// What was remembered of the records of a finished file; nothing if it is not finished.
    pub fn records(&self, name: &str) -> Option<&Value> {
        self.finished.get(name)?.get("records")
    }

    /// The checksums of a file that is finished: those of `parts`, whose checksums are not looked at. `None` if the
    /// file must be written. It has `size` bytes and begins with `start`.
    pub fn finished(
        &self,
        name: &str,
        size: u64,
        start: &[u8],
        parts: &[Checked],
    ) -> Result<Option<Vec<u32>>, PackError> {
        let Some(entry) = self.finished.get(name) else { return Ok(None) };
        let path = self.dir.join(name);
        if !fs::metadata(&path).is_ok_and(|found| found.is_file() && found.len() == size) {
            return Ok(None);
        }
        let found = scan(&path, start, parts, size, &mut |_| Ok(()))
            .map_err(|cause| PackError::at("read", &path, cause))?;
        let same = entry["size"] == json!(size) && entry["crc32c"] == json!(found.crcs);
        Ok((same && found.stray.is_none()).then_some(found.crcs))
    }

    /// Publishes a file that was written to its partial name, and remembers its checksums and what there is to be
    /// remembered of its `records`.
    pub fn finish(&mut self, name: &str, size: u64, crcs: &[u32], records: Value) -> Result<(), PackError> {
        file::publish(&self.dir, name)?;
        self.finished.insert(name.to_owned(), json!({"size": size, "crc32c": crcs, "records": records}));
        self.write_progress()
    }

    /// The name of a file while it is written.
    pub fn partial(&self, name: &str) -> PathBuf {
        self.dir.join(format!("{name}{PARTIAL}"))
    }

    /// Writes a small file.
    pub fn write_whole(&self, name: &str, bytes: &[u8]) -> Result<(), PackError> {
        Ok(file::write_whole(&self.dir, name, bytes)?)
    }

    /// Refuses to begin what the disk has no room for.
    pub fn check_room(&self, bytes: u64, margin: u64) -> Result<(), PackError> {
        let needed = bytes.saturating_add(margin);
        match free_bytes(&self.dir) {
            Some(free) if bytes > 0 && free < needed => {
                Err(PackError::NoRoom { dir: self.dir.clone(), needed, free })
            }
            _ => Ok(()),
        }
    }

    /// Everything is there: takes away what was only needed on the way.
    pub fn complete(self) -> Result<(), PackError> {
        // Still locked. It goes first: a run that is killed here is taken up again, and then nothing is left over.
        let _ = fs::remove_file(self.dir.join(LOCK));
        let path = self.dir.join(UNFINISHED_PACK);
        match fs::remove_file(&path) {
            // One that began just before was as far.
            Err(cause) if cause.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|cause| PackError::at("remove", &path, cause)),
        }
    }
}
