//! What can go wrong while a model is packed or unpacked, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use forebay_core::ByteSize;
use forebay_io::{OpenError, ReadError};
use forebay_model::SnapshotError;
use forebay_store::layout::LayoutError;
use forebay_store::native::NativeError;

use crate::output::FileError;

/// Why a model was not packed, or not unpacked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The source is no complete model.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// A tensor of the source is not what it was a moment ago.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The source, or what was written, is no sound container.
    #[error(transparent)]
    Native(#[from] NativeError),
    /// A file of the source could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file of the source could not be read, or its bytes are not those that were packed.
    #[error("{what}: {cause}")]
    Source {
        /// The tensor, or the expert.
        what: String,
        /// File, place and reason.
        cause: ReadError,
    },
    /// The source is packed already.
    #[error("{} is a Forebay container already; use it as it is, or turn it back with --to-reference", dir.display())]
    Packed {
        /// The folder.
        dir: PathBuf,
    },
    /// The source is not packed.
    #[error("{} is not a Forebay container, so there is nothing to turn back", dir.display())]
    NotPacked {
        /// The folder.
        dir: PathBuf,
    },
    /// Codes were asked for where there is nothing to code.
    #[error(
        "the experts are stored as {formats}; only int4 can be coded: leave --codes out, or convert the model to int4"
    )]
    NotCodable {
        /// What the experts are stored as.
        formats: String,
    },
    /// Sizes that cannot be addressed or numbered.
    #[error("{what} is too large for a Forebay container")]
    TooLarge {
        /// What is.
        what: String,
    },
    /// The folder has something else in it.
    #[error("{} already holds {found}; nothing was changed: name a new folder", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// What was found.
        found: String,
    },
    /// The folder holds a part of another model.
    #[error(
        "{} holds a part of another model, of the same one before it changed, or with other --codes; nothing was \
         changed: name a new folder, or remove that one", dir.display()
    )]
    Other {
        /// The folder.
        dir: PathBuf,
    },
    /// Another process writes there.
    #[error("another forebay is writing to {}; wait for it, or name another folder", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// The disk has too little room for all of it.
    #[error(
        "{} needs {} more, a margin included, and its disk has {} free; free {}, or name a folder on another disk",
        dir.display(), ByteSize(*needed), ByteSize(*free), ByteSize(needed.saturating_sub(*free))
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes still to be written, with the margin.
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

impl PackError {
    /// A failure at `path`; a full disk is told apart.
    pub(super) fn at(action: &'static str, path: &Path, cause: io::Error) -> Self {
        let path = path.to_owned();
        match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path, cause },
            _ => Self::Io { action, path, cause },
        }
    }

    /// A source that could not be read.
    pub(crate) fn source(what: impl Into<String>, cause: ReadError) -> Self {
        Self::Source { what: what.into(), cause }
    }
}

impl From<FileError> for PackError {
    fn from(FileError { action, path, cause }: FileError) -> Self {
        Self::at(action, &path, cause)
    }
}
