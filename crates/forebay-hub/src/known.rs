//! What is known of the bytes of a folder, from whoever vouches for them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::digest::{Digest, FileDigest};
use crate::digests::{DigestError, Digests};
use crate::get::{GetError, Record};
use crate::output::FileError;
use crate::output::folder::files;

/// Who vouches for a file. Where several do, the first of these counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Origin {
    /// The hub that `get` fetched it from, in the record that `get` keeps.
    Hub,
    /// `forebay-digests.json`.
    Recorded,
    /// The name of the blob in a Hugging Face cache.
    Cache,
    /// A table in the program: see [`MTP_SHARDS`].
    Published,
}

impl Origin {
    /// A word for programs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Hub => "hub",
            Self::Recorded => "recorded",
            Self::Cache => "cache",
            Self::Published => "published",
        }
    }
}

/// Sizes and SHA-256 of the three files `out-mtp-*` of `mateogrgic/GLM-5.2-colibri-int4-with-int8-mtp` at commit
/// `3cc8db99b1b13fc79325d987ba3c1c430766b3b8`, as its hub lists them (conversion spec section 6). Earlier uploads had
/// MTP shards that could not be used, and copies of both are about.
pub const MTP_SHARDS: [(u64, &str); 3] = [
    (3_527_131_672, "dc020ddbb87347f7e6711c9e8cd2715ac79a2a9f2b4599ff11b7980a35e3cf88"),
    (5_366_238_584, "172b49be499a1070505cd13718c47c82165c663d6422e537b1335aae28c331bf"),
    (1_065_950_496, "534a1a2a05188dc372f1e0e4f6d72503cbe86fc9a94f085dc6a6a0941b45975d"),
];

/// What is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    /// Size and digest by path within the folder, with `/`.
    pub digests: Digests,
    /// Who vouches for at least one of them.
    pub origins: BTreeSet<Origin>,
}

/// Why what is known of a folder cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KnownError {
    /// `forebay-digests.json` cannot be used.
    #[error(transparent)]
    Digests(#[from] DigestError),
    /// The record of `get` cannot be used.
    #[error(transparent)]
    Record(#[from] GetError),
    /// The folder cannot be read.
    #[error(transparent)]
    File(#[from] FileError),
}

impl Known {
    /// What is known of the folder `dir`; nothing, if nobody vouches for its files.
    ///
    /// # Errors
    /// A record that is there and cannot be used.
    pub fn of_folder(dir: &Path) -> Result<Self, KnownError> {
        let mut known = Self::default();
        // A snapshot of a cache is known by its own name.
        let real = fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
        if let Some(record) = Record::of_folder(&real)? {
            record.files.into_iter().for_each(|(name, at)| known.add(Origin::Hub, name, at.proof));
        }
        if let Some(digests) = Digests::read(dir)? {
            digests.0.into_iter().for_each(|(name, proof)| known.add(Origin::Recorded, name, proof));
        }
        if !dir.is_dir() {
            return Ok(known);
        }
        let mut mtp = Vec::new();
        for (name, path) in files(dir)? {
            let size = fs::metadata(&path).map_err(|cause| FileError::new("look at", &path, cause))?.len();
            let blob = fs::read_link(&path).ok().and_then(|to| to.file_name().map(|name| name.to_owned()));
            let blob = blob.and_then(|name| name.into_string().ok());
            let digest = blob.and_then(|name| Digest::sha256(&name).or_else(|| Digest::git_blob(&name)));
            if let Some(digest) = digest {
                known.add(Origin::Cache, name.clone(), FileDigest { size, digest });
            }
            if name.starts_with("out-mtp-") {
                mtp.push((name, size));
            }
        }
        // All three sizes together are nobody else's.
        let published =
            |wanted: u64| mtp.iter().find(|(_, size)| *size == wanted).map(|(name, _)| name.clone());
        let names: Vec<String> = MTP_SHARDS.iter().filter_map(|(size, _)| published(*size)).collect();
        if names.len() == MTP_SHARDS.len() {
            for (name, (size, sha256)) in names.into_iter().zip(MTP_SHARDS) {
                let proof = Digest::sha256(sha256).map(|digest| FileDigest { size, digest });
                proof.into_iter().for_each(|proof| known.add(Origin::Published, name.clone(), proof));
            }
        }
        Ok(known)
    }

    fn add(&mut self, origin: Origin, name: String, proof: FileDigest) {
        self.digests.0.entry(name).or_insert_with(|| {
            self.origins.insert(origin);
            proof
        });
    }
}
