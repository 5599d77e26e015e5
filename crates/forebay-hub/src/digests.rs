//! What the bytes of a folder should be: `forebay-digests.json`, the size and SHA-256 of every file.
//!
//! ```json
//! {"forebay_digests": 1,
//!  "files": {"out-00000.safetensors": {"size": 4096, "sha256": "64 hexadecimal digits"}}}
//! ```
//!
//! A git blob id may stand in place of the SHA-256 (`"git": "40 hexadecimal digits"`), as hubs prove small files. Written by whatever writes a model, or by `forebay verify --record`; docs/convert.md describes it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use forebay_store::config::{ConfigError, ConfigFile};
use serde_json::{Value, json};

use crate::digest::FileDigest;
use crate::output::FileError;
use crate::output::file::write_whole;

/// The name of the file.
pub const DIGESTS: &str = "forebay-digests.json";
/// Its version.
const VERSION: u64 = 1;

/// The files of a folder, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Digests(pub BTreeMap<String, FileDigest>);

/// Why the digests of a folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// The file cannot be read, or is not JSON.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// It holds something else than digests.
    #[error("{}: {what}; delete it, and record the digests again (`forebay verify --hash --record`)", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
}

impl Digests {
    /// Reads the digests of `dir`; `None` if none were recorded.
    pub fn read(dir: &Path) -> Result<Option<Self>, DigestError> {
        let Some(file) = ConfigFile::read_optional(dir, DIGESTS)? else { return Ok(None) };
        let malformed = |what: String| DigestError::Malformed { path: dir.join(DIGESTS), what };
        let root = file.root();
        root.u64("forebay_digests", VERSION..=VERSION)?;
        root.section("files")?;
        let files = root.raw("files").and_then(Value::as_object);
        let mut digests = BTreeMap::new();
        for (name, entry) in files.into_iter().flatten() {
            // A name is looked up in the folder: it must not lead out of it.
            if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\\', '\0', ':']) {
                return Err(malformed(format!("{name:?} is no name of a file in this folder")));
            }
            let Some(entry) = FileDigest::parse(entry) else {
                return Err(malformed(format!("{name:?} has no size and SHA-256 of 64 hexadecimal digits")));
            };
            digests.insert(name.clone(), entry);
        }
        Ok(Some(Self(digests)))
    }

    /// Records the digests in `dir`.
    pub fn write(&self, dir: &Path) -> Result<(), FileError> {
        let files: serde_json::Map<_, _> = self.0.iter().map(|(name, d)| (name.clone(), d.json())).collect();
        write_json(dir, DIGESTS, &json!({"forebay_digests": VERSION, "files": files}))
    }
}

/// Writes a JSON file for people, as a whole.
pub(crate) fn write_json(dir: &Path, name: &str, value: &Value) -> Result<(), FileError> {
    let text = serde_json::to_string_pretty(value).map_err(io::Error::from);
    let text = text.map_err(|cause| FileError::new("write", &dir.join(name), cause))?;
    write_whole(dir, name, (text + "\n").as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::digest::Digest;

    #[test]
    fn digests_come_back_and_nonsense_does_not() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(Digests::read(dir.path()).unwrap(), None);
        let sha256 = Digest::sha256(&("0af".repeat(21) + "b")).unwrap();
        let git = Digest::git_blob(&"0af1".repeat(10)).unwrap();
        let entry = |name: &str, size, digest| (name.to_owned(), FileDigest { size, digest });
        let digests = Digests(BTreeMap::from([entry("a.safetensors", 7, sha256), entry("b.json", 3, git)]));
        digests.write(dir.path()).unwrap();
        assert_eq!(Digests::read(dir.path()).unwrap(), Some(digests));
        let ok = "0".repeat(64);
        for bad in [
            "[]".to_owned(),
            "{}".to_owned(),
            r#"{"forebay_digests": 2, "files": {}}"#.to_owned(),
            r#"{"forebay_digests": 1}"#.to_owned(),
            r#"{"forebay_digests": 1, "files": {"a": {"size": 1}}}"#.to_owned(),
            r#"{"forebay_digests": 1, "files": {"a": {"size": 1, "sha256": "sha256:xyz"}}}"#.to_owned(),
            format!(r#"{{"forebay_digests": 1, "files": {{"a": {{"size": -1, "sha256": "{ok}"}}}}}}"#),
            format!(r#"{{"forebay_digests": 1, "files": {{"../a": {{"size": 1, "sha256": "{ok}"}}}}}}"#),
            format!(r#"{{"forebay_digests": 1, "files": {{"..": {{"size": 1, "sha256": "{ok}"}}}}}}"#),
        ] {
            std::fs::write(dir.path().join(DIGESTS), &bad).unwrap();
            assert!(Digests::read(dir.path()).is_err(), "{bad}");
        }
    }
}
