//! Digests that the hub promises, and hashing to check them.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

use super::error::GetError;
use super::watch::Stop;

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
    pub fn algorithm(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "sha256",
            Self::GitBlob(_) => "git blob sha1",
        }
    }

    /// Reads what `Display` writes.
    pub(super) fn parse(text: &str) -> Option<Self> {
        match text.split_once(':')? {
            ("sha256", hex) => Self::sha256(hex),
            ("git", hex) => Self::git_blob(hex),
            _ => None,
        }
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sha256(hex) => write!(f, "sha256:{hex}"),
            Self::GitBlob(hex) => write!(f, "git:{hex}"),
        }
    }
}

/// Whether `text` is `digits` hex digits.
pub(super) fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Hashes a file's bytes as they come.
pub(super) enum Hasher {
    Sha256(Box<Sha256>),
    GitBlob(Box<Sha1>),
}

impl Hasher {
    /// A hasher for a file of `size` bytes that should have `digest`.
    pub fn new(digest: &Digest, size: u64) -> Self {
        match digest {
            Digest::Sha256(_) => Self::Sha256(Box::default()),
            Digest::GitBlob(_) => {
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

    /// The digest in hex.
    pub fn finish(self) -> String {
        let bytes = match self {
            Self::Sha256(hasher) => hasher.finalize().to_vec(),
            Self::GitBlob(hasher) => hasher.finalize().to_vec(),
        };
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The digest in hex of a file that should have `digest`. `seen` gets the bytes of every step.
pub(super) fn hash_file(
    path: &Path,
    digest: &Digest,
    size: u64,
    stop: &Stop<'_>,
    seen: &dyn Fn(u64),
) -> Result<String, GetError> {
    let failed = |cause| GetError::at("read", path, cause);
    let mut file = File::open(path).map_err(failed)?;
    let mut hasher = Hasher::new(digest, size);
    let mut buffer = vec![0; 1 << 20];
    loop {
        stop.check()?;
        let read = file.read(&mut buffer).map_err(failed)?;
        if read == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(&buffer[..read]);
        seen(read as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(digest: &Digest, bytes: &[u8]) -> String {
        let mut hasher = Hasher::new(digest, bytes.len() as u64);
        bytes.chunks(3).for_each(|chunk| hasher.update(chunk));
        hasher.finish()
    }

    #[test]
    fn known_digests_come_out() {
        let git = Digest::git_blob(&"0".repeat(40)).unwrap();
        // `git hash-object` of a file with "hello\n", and of an empty one.
        assert_eq!(of(&git, b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(of(&git, b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        let sha = Digest::sha256(&"0".repeat(64)).unwrap();
        // FIPS 180-4, example B.1.
        assert_eq!(of(&sha, b"abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
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
