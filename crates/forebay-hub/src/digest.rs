//! What proves a file: its digest, as hubs and models record it, and hashing to check it.

use std::fmt;
use std::io::{self, Read};
use std::path::Path;

use forebay_io::file::open_regular;
use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use crate::output::FileError;

/// Bytes read at a time.
const BLOCK: usize = 4 << 20;

/// How a digest is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Algorithm {
    /// SHA-256 of the bytes.
    Sha256,
    /// Git's id of a blob: SHA-1 over a header with the length, and the bytes.
    GitBlob,
}

impl Algorithm {
    /// What messages call it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::GitBlob => "git blob sha1",
        }
    }

    /// What records call it.
    fn key(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::GitBlob => "git",
        }
    }
}

/// What proves a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Digest {
    /// SHA-256 of the bytes, as 64 lower-case hex digits: large files (LFS).
    Sha256(String),
    /// Git's id of a blob, SHA-1 over a header with the length and the bytes, as 40 lower-case hex digits.
    GitBlob(String),
}

impl Digest {
    /// A SHA-256 in hex, of either case.
    pub fn sha256(hex: &str) -> Option<Self> {
        is_hex(hex, 64).then(|| Self::Sha256(hex.to_ascii_lowercase()))
    }

    /// A git blob id in hex, of either case.
    pub fn git_blob(hex: &str) -> Option<Self> {
        is_hex(hex, 40).then(|| Self::GitBlob(hex.to_ascii_lowercase()))
    }

    /// The hex digits.
    pub fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// What the digits are.
    pub fn algorithm(&self) -> Algorithm {
        match self {
            Self::Sha256(_) => Algorithm::Sha256,
            Self::GitBlob(_) => Algorithm::GitBlob,
        }
    }

    /// The SHA-256 of `bytes`.
    pub fn sha256_of(bytes: &[u8]) -> Self {
        Self::of(Algorithm::Sha256, bytes)
    }

    /// The digest of `bytes`.
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(algorithm, bytes.len() as u64);
        hasher.update(bytes);
        hasher.finish()
    }

    /// Reads what `Display` writes.
    pub(crate) fn parse(text: &str) -> Option<Self> {
        match text.split_once(':')? {
            ("sha256", hex) => Self::sha256(hex),
            ("git", hex) => Self::git_blob(hex),
            _ => None,
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm().key(), self.hex())
    }
}

/// Size and digest of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileDigest {
    /// Bytes.
    pub size: u64,
    /// What proves them.
    pub digest: Digest,
}

impl FileDigest {
    /// Size and digest of a file with these bytes.
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        Self { size: bytes.len() as u64, digest: Digest::of(algorithm, bytes) }
    }

    /// As in `{"size": 7, "sha256": "64 digits"}`; `git` for the id of a blob.
    pub(crate) fn json(&self) -> Value {
        json!({"size": self.size, self.digest.algorithm().key(): self.digest.hex()})
    }

    /// Reads what [`json`](Self::json) writes; other fields are not looked at.
    pub(crate) fn parse(entry: &Value) -> Option<Self> {
        let size = entry.get("size")?.as_u64()?;
        let text = |algorithm: Algorithm| entry.get(algorithm.key());
        let digest = match (text(Algorithm::Sha256), text(Algorithm::GitBlob)) {
            (Some(hex), None) => Digest::sha256(hex.as_str()?)?,
            (None, Some(hex)) => Digest::git_blob(hex.as_str()?)?,
            _ => return None,
        };
        Some(Self { size, digest })
    }

    /// How a file that is `found` differs from this, if it does: what to say behind its name.
    pub fn difference(&self, found: &Self) -> Option<String> {
        if self.size != found.size {
            return Some(format!("has {} bytes, expected {}", found.size, self.size));
        }
        let (name, found, expected) = (self.digest.algorithm().name(), &found.digest, &self.digest);
        (found != expected).then(|| format!("has the {name} {}, expected {}", found.hex(), expected.hex()))
    }
}

/// Whether `text` is `digits` hex digits.
pub(crate) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Bytes in hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hashes a file's bytes as they come.
pub(crate) enum Hasher {
    Sha256(Box<Sha256>),
    GitBlob(Box<Sha1>),
}

impl Hasher {
    /// A hasher for a file of `size` bytes.
    pub fn new(algorithm: Algorithm, size: u64) -> Self {
        match algorithm {
            Algorithm::Sha256 => Self::Sha256(Box::default()),
            Algorithm::GitBlob => {
                let mut hasher = Sha1::new();
                hasher.update(format!("blob {size}\0"));
                Self::GitBlob(Box::new(hasher))
            }
        }
    }

    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(hasher) => hasher.update(bytes),
            Self::GitBlob(hasher) => hasher.update(bytes),
        }
    }

    pub fn finish(self) -> Digest {
        match self {
            Self::Sha256(hasher) => Digest::Sha256(hex(&hasher.finalize())),
            Self::GitBlob(hasher) => Digest::GitBlob(hex(&hasher.finalize())),
        }
    }
}

/// Size and digest of a file. `seen` gets the bytes of every step, and stops it by saying false: then there is none.
pub(crate) fn hash_file(
    path: &Path,
    algorithm: Algorithm,
    seen: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<FileDigest>, FileError> {
    let failed = |cause| FileError::new("read", path, cause);
    let mut file = open_regular(path).map_err(failed)?;
    // Should it grow meanwhile, its digest is another and its size says so.
    let length = file.metadata().map_err(failed)?.len();
    let (mut hasher, mut size) = (Hasher::new(algorithm, length), 0);
    let mut block = vec![0; BLOCK.min(usize::try_from(length).unwrap_or(BLOCK)).max(1)];
    loop {
        match file.read(&mut block) {
            Ok(0) => return Ok(Some(FileDigest { size, digest: hasher.finish() })),
            Ok(read) => {
                hasher.update(&block[..read]);
                size += read as u64;
                if !seen(read as u64) {
                    return Ok(None);
                }
            }
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(failed(cause)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(algorithm: Algorithm, bytes: &[u8]) -> String {
        let mut hasher = Hasher::new(algorithm, bytes.len() as u64);
        bytes.chunks(3).for_each(|chunk| hasher.update(chunk));
        assert_eq!(hasher.finish(), Digest::of(algorithm, bytes));
        Digest::of(algorithm, bytes).hex().to_owned()
    }

    #[test]
    fn known_digests_come_out() {
        // `git hash-object` of a file with "hello\n", and of an empty one.
        assert_eq!(of(Algorithm::GitBlob, b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(of(Algorithm::GitBlob, b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        // FIPS 180-4, example B.1.
        let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(of(Algorithm::Sha256, b"abc"), abc);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "abc").unwrap();
        let found = hash_file(file.path(), Algorithm::Sha256, &mut |_| true).unwrap();
        assert_eq!(found, Some(FileDigest { size: 3, digest: Digest::sha256(abc).unwrap() }));
        assert_eq!(hash_file(file.path(), Algorithm::Sha256, &mut |_| false).unwrap(), None);
    }

    #[test]
    fn only_digests_are_taken_for_digests() {
        for text in ["", "xyz", "sha256:xyz", &"0".repeat(63), &"0".repeat(65), &"g".repeat(64)] {
            assert_eq!(Digest::sha256(text), None, "{text}");
        }
        let upper = Digest::sha256(&"AB".repeat(32)).unwrap();
        assert_eq!(upper.hex(), "ab".repeat(32));
        assert_eq!(Digest::parse(&upper.to_string()), Some(upper));
        assert_eq!(Digest::parse("md5:00"), None);
    }
}
