//! What can go wrong while a model is written, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use forebay_core::quant::EncodeError;
use forebay_core::{ByteSize, Format};
use forebay_store::config::ConfigError;
use forebay_store::json::JsonError;

use crate::output::FileError;

/// Why a synthetic model was not written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SynthError {
    /// A reader would take the groups for others.
    #[error(
        "{asked} in matrices of {cols} columns would be read as {read}; choose another format or another width"
    )]
    Ambiguous {
        /// The format asked for.
        asked: Format,
        /// What a reader takes it for.
        read: Format,
        /// Columns of the matrix.
        cols: usize,
    },
    /// The vocabulary has no room for the tokenizer.
    #[error(
        "a vocabulary of {vocab} has no room for the tokenizer's {tokens} tokens; ask for at least {tokens}"
    )]
    Vocabulary {
        /// Ids asked for.
        vocab: usize,
        /// Ids of the tokenizer.
        tokens: usize,
    },
    /// The sizes make no model.
    #[error("these sizes make no model: {0}")]
    Config(ConfigError),
    /// The config that would be written cannot be read back.
    #[error("these sizes make no readable config: {0}")]
    Json(JsonError),
    /// A pool's format cannot be written.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A byte count does not fit into 64 bits.
    #[error("{tensor} would be too large to address; choose smaller sizes")]
    TooLarge {
        /// The tensor.
        tensor: String,
    },
    /// More files than a reader takes.
    #[error(
        "the model would have {shards} weight files and readers take {limit}; allow larger files or write fewer layers"
    )]
    TooManyShards {
        /// Files it would have.
        shards: usize,
        /// Most files.
        limit: usize,
    },
    /// The folder has something else in it.
    #[error("{} already holds {found}; nothing was changed: name a new folder", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// What was found.
        found: String,
    },
    /// The folder holds another synthetic model.
    #[error(
        "{} holds a synthetic model made with other options ({changed}); nothing was changed: name a new folder, \
         or use the options of {}", dir.display(), dir.join(super::STAMP).display()
    )]
    OtherOptions {
        /// The folder.
        dir: PathBuf,
        /// Which, with both values.
        changed: String,
    },
    /// Another process writes there.
    #[error("another forebay is writing to {}; wait for it, or name another folder", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// The disk has too little room for all of it.
    #[error(
        "{} needs {} more and its disk has {} free; free {}, write fewer layers, or name a folder on another disk",
        dir.display(), ByteSize(*needed), ByteSize(*free), ByteSize(needed.saturating_sub(*free))
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes still to be written, with a margin.
        needed: u64,
        /// Bytes that may be written.
        free: u64,
    },
    /// The disk became full on the way.
    #[error(
        "the disk became full at {}: {cause}; complete files are kept: free some space and give the same command again",
        path.display()
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file could not be read or written.
    #[error(
        "cannot {action} {}: {cause}; complete files are kept: when that is mended, give the same command again",
        path.display()
    )]
    Io {
        /// What was tried, such as "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// The user stopped it.
    #[error("stopped; complete files are kept, and the same command continues")]
    Cancelled,
}

impl From<FileError> for SynthError {
    fn from(error: FileError) -> Self {
        Self::at(error.action, &error.path, error.cause)
    }
}

impl SynthError {
    /// A failure at `path`; a full disk is told apart.
    pub(crate) fn at(action: &'static str, path: &Path, cause: io::Error) -> Self {
        let path = path.to_owned();
        match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path, cause },
            _ => Self::Io { action, path, cause },
        }
    }
}
