//! Writing models: what synthesis and conversion share.
//!
//! - [`ordered`]: threads make pieces, one takes them in order.
//! - [`file`](mod@file): files that are there as a whole or not at all.
//! - [`behind`]: bytes on their way to the disk while further ones are made.
//! - [`folder`]: who writes to a folder, and how much room its disk has.

pub mod behind;
pub mod file;
pub mod folder;
pub mod ordered;

use std::io;
use std::path::{Path, PathBuf};

/// Something that the system would not do with a file.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {}: {cause}", path.display())]
pub struct FileError {
    /// What was tried, such as "write".
    pub action: &'static str,
    /// The file or folder.
    pub path: PathBuf,
    /// What the system said.
    pub cause: io::Error,
}

impl FileError {
    /// A failure at `path`.
    pub fn new(action: &'static str, path: &Path, cause: io::Error) -> Self {
        Self { action, path: path.to_owned(), cause }
    }

    /// Whether there is no room left on the disk.
    pub fn is_full(&self) -> bool {
        matches!(self.cause.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
    }
}
