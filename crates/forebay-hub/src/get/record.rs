//! What was fetched: written beside the files, so that they can be checked against it later.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use forebay_io::file::read_regular;
use forebay_store::json::parse_object;
use serde_json::{Map, Value, json};

use crate::digest::{Digest, FileDigest};
use crate::output::{FileError, file};

use super::error::GetError;
use super::name;

/// Changes when a field changes its meaning.
const SCHEMA_VERSION: u64 = 1;
/// The longest record.
const MAX_BYTES: u64 = 64 << 20;

/// A commit of a repository, and those of its files that were fetched and verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The hub.
    pub endpoint: String,
    /// The repository.
    pub repo: String,
    /// The revision that was asked for.
    pub revision: String,
    /// The commit that it stood for.
    pub commit: String,
    /// Every file that was verified.
    pub files: BTreeMap<String, Fetched>,
}

/// A file that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetched {
    /// Its size and digest.
    pub proof: FileDigest,
    /// When it was last written, in nanoseconds since 1970. A file that was written since is another one until it is
    /// hashed again, as is one of which this is not known.
    pub modified: Option<u128>,
}

impl Record {
    /// The record of a folder that `get` has filled: of a snapshot in the cache, or of a folder of its own.
    ///
    /// # Errors
    /// A record that is there and cannot be read.
    pub fn of_folder(dir: &Path) -> Result<Option<Self>, GetError> {
        if let Some(record) = Self::read(&dir.join(name::OURS).join("get.json"))? {
            return Ok(Some(record));
        }
        // .../models--owner--name/snapshots/COMMIT
        let Some(commit) = dir.file_name().and_then(|name| name.to_str()) else { return Ok(None) };
        let Some(repo) = dir.parent().and_then(Path::parent) else { return Ok(None) };
        Self::read(&repo.join("forebay").join(format!("{commit}.json")))
    }

    /// Reads a record, if there is one.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, GetError> {
        let damaged = |why: String| GetError::Record { path: path.to_owned(), why };
        let bytes = match read_regular(path, MAX_BYTES) {
            Ok(bytes) => bytes,
            Err(cause) => {
                return match cause.kind() {
                    io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => Ok(None),
                    io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => {
                        Err(damaged(cause.to_string()))
                    }
                    _ => Err(GetError::at("read", path, cause)),
                };
            }
        };
        let root = parse_object(&bytes).map_err(|error| damaged(error.to_string()))?;
        match Self::parse(&root) {
            Some(record) => Ok(Some(record)),
            None => Err(damaged("a field is missing or malformed".to_owned())),
        }
    }

    fn parse(root: &Map<String, Value>) -> Option<Self> {
        let text = |key: &str| Some(root.get(key)?.as_str()?.to_owned());
        if root.get("schema_version")?.as_u64()? != SCHEMA_VERSION {
            return None;
        }
        let file = |(name, entry): (&String, &Value)| {
            let digest = Digest::parse(entry.get("digest")?.as_str()?)?;
            name::fault(name).is_none().then_some(())?;
            let modified = entry.get("modified").and_then(Value::as_str).and_then(|text| text.parse().ok());
            let proof = FileDigest { size: entry.get("bytes")?.as_u64()?, digest };
            Some((name.clone(), Fetched { proof, modified }))
        };
        Some(Self {
            endpoint: text("endpoint")?,
            repo: text("repo")?,
            revision: text("revision")?,
            commit: text("commit")?,
            files: root.get("files")?.as_object()?.iter().map(file).collect::<Option<_>>()?,
        })
    }

    /// Writes the record, whole or not at all.
    pub(super) fn write(&self, path: &Path) -> Result<(), GetError> {
        let files = self.files.iter();
        let files: Map<String, Value> = files
            .map(|(name, Fetched { proof, modified })| {
                // Beyond what other programs read as a number.
                let modified = modified.map(|time| time.to_string());
                let digest = proof.digest.to_string();
                (name.clone(), json!({"bytes": proof.size, "digest": digest, "modified": modified}))
            })
            .collect();
        let root = json!({
            "schema_version": SCHEMA_VERSION,
            "endpoint": self.endpoint,
            "repo": self.repo,
            "revision": self.revision,
            "commit": self.commit,
            "files": files,
        });
        let text = serde_json::to_string_pretty(&root).unwrap_or_else(|_| root.to_string()) + "\n";
        file::write_path(path, text.as_bytes())
            .map_err(|FileError { cause, .. }| GetError::at("write", path, cause))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_found_beside_its_files_and_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let digest = Digest::git_blob(&"ab".repeat(20)).unwrap();
        let record = Record {
            endpoint: "https://h".to_owned(),
            repo: "a/b".to_owned(),
            revision: "main".to_owned(),
            commit: "c".repeat(40),
            files: BTreeMap::from([(
                "x/y.json".to_owned(),
                Fetched { proof: FileDigest { size: 7, digest }, modified: Some(u128::from(u64::MAX) + 7) },
            )]),
        };
        let snapshot = dir.path().join("snapshots").join("c".repeat(40));
        for (path, folder) in [
            (dir.path().join(".forebay/get.json"), dir.path()),
            (dir.path().join("forebay").join(format!("{}.json", "c".repeat(40))), snapshot.as_path()),
        ] {
            assert_eq!(Record::of_folder(folder).unwrap(), None);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            record.write(&path).unwrap();
            assert_eq!(Record::of_folder(folder).unwrap().as_ref(), Some(&record));
            for bad in ["", "{}", "{\"schema_version\": 1}"] {
                std::fs::write(&path, bad).unwrap();
                assert!(matches!(Record::of_folder(folder), Err(GetError::Record { .. })), "{bad}");
            }
        }
    }
}
