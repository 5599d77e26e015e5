//! What was done already: `forebay-convert.json` in the result's folder.
//!
//! It is written as a whole after every file. A file of the result is trusted only if the manifest has it and it is
//! still what the manifest says: same size and time of writing, or same hash.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forebay_io::file::read_regular;
use forebay_store::json::parse_object;
use serde_json::{Map, Value, json};

use super::error::ConvertError;
use super::source::modified;
use crate::digest::{FileDigest, hash_file};
use crate::digests::write_json;
use crate::output::folder::{MAX_STATE_BYTES, changes};

/// What the names of the files begin with that conversion leaves beside a model.
pub const OWN: &str = "forebay-convert.";
/// The name of the file.
pub const MANIFEST: &str = forebay_store::folder::BEGUN_CONVERSION;
/// The key of the version, and the version.
const VERSION_KEY: &str = "forebay_convert";
/// Grows when the same source and options give other bytes.
const VERSION: u64 = 1;

/// The keys of where the source was, and of what of it was compared with its digest.
const FROM: &str = "from";
const VERIFIED: &str = "verified";

/// Differences that a message names.
const SHOWN: usize = 6;

/// A file that was completed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its size and hash.
    pub digest: FileDigest,
    /// When it was written, in nanoseconds since 1970.
    pub modified: u128,
}

/// The manifest, in memory.
#[derive(Clone, Debug)]
pub struct Manifest {
    dir: PathBuf,
    /// Source and options.
    stamp: Map<String, Value>,
    /// Where the source is; another place with the same files will do.
    from: String,
    /// Files of the source whose bytes were compared with what was known of them, with the digest.
    pub verified: BTreeMap<String, String>,
    /// Complete files by their path within the folder.
    pub done: BTreeMap<String, Done>,
}

impl Manifest {
    /// The manifest of a conversion with this stamp into `dir`; what an earlier run did if it was begun before.
    pub fn open(dir: &Path, stamp: Map<String, Value>, from: &Path) -> Result<Self, ConvertError> {
        let path = dir.join(MANIFEST);
        let (dir, from) = (dir.to_owned(), from.display().to_string());
        let mut manifest = Self { dir, stamp, from, verified: BTreeMap::new(), done: BTreeMap::new() };
        let bytes = match read_regular(&path, MAX_STATE_BYTES) {
            Ok(bytes) => bytes,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(manifest),
            Err(cause) => return Err(ConvertError::at("read", &path, cause)),
        };
        let malformed = |what: String| ConvertError::Manifest { path: path.clone(), what };
        let map = parse_object(&bytes).map_err(|error| malformed(error.to_string()))?;
        if map.get(VERSION_KEY) != Some(&json!(VERSION)) {
            return Err(malformed(format!("it is not version {VERSION} of a record of conversion")));
        }
        let mut changed = changes(&map, &manifest.stamp);
        if !changed.is_empty() {
            if changed.len() > SHOWN {
                let more = changed.len() - SHOWN;
                changed.truncate(SHOWN);
                changed.push(format!("and {more} more"));
            }
            return Err(ConvertError::OtherOptions { dir: manifest.dir, changed: changed.join(", ") });
        }
        for (name, digest) in map.get(VERIFIED).and_then(Value::as_object).into_iter().flatten() {
            manifest.verified.extend(digest.as_str().map(|digest| (name.clone(), digest.to_owned())));
        }
        for (name, entry) in map.get("done").and_then(Value::as_object).into_iter().flatten() {
            let entry = done(entry).ok_or_else(|| malformed(format!("the entry {name:?} is malformed")))?;
            manifest.done.insert(name.clone(), entry);
        }
        Ok(manifest)
    }

    /// Writes it.
    pub fn write(&self) -> Result<(), ConvertError> {
        let entry = |done: &Done| {
            let mut entry = done.digest.json();
            entry["modified"] = json!(done.modified.to_string());
            entry
        };
        let done: Map<_, _> = self.done.iter().map(|(name, done)| (name.clone(), entry(done))).collect();
        let mut map = Map::from_iter([(VERSION_KEY.to_owned(), json!(VERSION))]);
        map.insert(FROM.to_owned(), json!(self.from));
        map.extend(self.stamp.clone());
        map.insert(VERIFIED.to_owned(), json!(self.verified));
        map.insert("done".to_owned(), Value::Object(done));
        Ok(write_json(&self.dir, MANIFEST, &Value::Object(map))?)
    }

    /// Enters a file that is complete, and writes the manifest.
    pub fn complete(&mut self, name: &str, digest: FileDigest) -> Result<(), ConvertError> {
        let modified = modified(&self.dir.join(name))?;
        self.done.insert(name.to_owned(), Done { digest, modified });
        self.write()
    }

    /// Whether the file `name` of `bytes` bytes is complete and as it was written.
    pub fn trusts(&mut self, name: &str, bytes: u64) -> Result<bool, ConvertError> {
        let Some(done) = self.done.get_mut(name) else { return Ok(false) };
        let path = self.dir.join(name);
        let size = fs::metadata(&path).ok().filter(fs::Metadata::is_file).map(|meta| meta.len());
        if size != Some(bytes) || done.digest.size != bytes {
            return Ok(false);
        }
        let now = modified(&path)?;
        if now == done.modified {
            return Ok(true);
        }
        // Copied, or touched: its bytes decide.
        let found = hash_file(&path, done.digest.digest.algorithm(), &mut |_| true)?;
        let same = found.as_ref() == Some(&done.digest);
        if same {
            done.modified = now;
        }
        Ok(same)
    }
}

/// Where the source is that a conversion into `dir` was begun from, if there is a record that says so.
pub fn begun_from(dir: &Path) -> Option<String> {
    let map = parse_object(&read_regular(&dir.join(MANIFEST), MAX_STATE_BYTES).ok()?).ok()?;
    map.get(FROM)?.as_str().map(str::to_owned)
}

fn done(entry: &Value) -> Option<Done> {
    let modified = entry.get("modified")?.as_str()?.parse().ok()?;
    Some(Done { digest: FileDigest::parse(entry)?, modified })
}
