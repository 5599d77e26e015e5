//! Paths to open shards.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::read::ReadAt;

/// One open file of a model; a segment's `shard` is an index into a list of these.
#[derive(Clone)]
pub struct Shard {
    /// Where it was opened; used in errors only.
    pub path: PathBuf,
    /// How it is read.
    pub file: Arc<dyn ReadAt>,
}

/// Why a shard could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// No such file.
    #[error("{path}: no such file; check the model directory, or fetch the model again")]
    NotFound {
        /// File that was asked for.
        path: PathBuf,
    },
    /// The file exists but may not be read.
    #[error("{path}: not allowed to read it; give this user read permission")]
    Denied {
        /// File that was asked for.
        path: PathBuf,
    },
    /// A directory or something else that is no regular file.
    #[error("{path}: not a regular file; fetch the model again")]
    NotAFile {
        /// What was asked for.
        path: PathBuf,
    },
    /// The process may not hold more open files.
    #[error(
        "{path}: too many open files ({opened} of this model's {wanted} were open); \
         raise the limit (ulimit -n 4096) and start again"
    )]
    TooMany {
        /// File that did not open.
        path: PathBuf,
        /// Files of this list opened before it.
        opened: usize,
        /// Files in the list.
        wanted: usize,
    },
    /// Anything else.
    #[error("{path}: cannot be opened: {cause}; check the disk")]
    Os {
        /// File that was asked for.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
}

/// Opens every file for reading, in order. One that cannot be opened fails the
/// whole call, with its name; nothing is left open then.
pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<Shard>, OpenError> {
    let mut shards = Vec::with_capacity(paths.len());
    for path in paths {
        let path = path.as_ref().to_owned();
        match open_regular(&path) {
            Ok(Some(file)) => shards.push(Shard { path, file: Arc::new(file) }),
            Ok(None) => return Err(OpenError::NotAFile { path }),
            Err(cause) => return Err(describe(path, cause, shards.len(), paths.len())),
        }
    }
    Ok(shards)
}

/// `None` for what exists but is no regular file. Asked before opening, because
/// opening a pipe would block and opening a directory fails differently everywhere.
fn open_regular(path: &Path) -> io::Result<Option<File>> {
    if !std::fs::metadata(path)?.is_file() {
        return Ok(None);
    }
    File::open(path).map(Some)
}

fn describe(path: PathBuf, cause: io::Error, opened: usize, wanted: usize) -> OpenError {
    // EMFILE and ENFILE have these numbers on every Unix we build for.
    let too_many = cfg!(unix) && matches!(cause.raw_os_error(), Some(23 | 24));
    match cause.kind() {
        _ if too_many => OpenError::TooMany { path, opened, wanted },
        io::ErrorKind::NotFound => OpenError::NotFound { path },
        io::ErrorKind::PermissionDenied => OpenError::Denied { path },
        _ => OpenError::Os { path, cause },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_all_or_names_the_one_that_fails() {
        let dir = tempfile::tempdir().unwrap();
        let good = dir.path().join("a");
        std::fs::write(&good, b"abc").unwrap();
        let gone = dir.path().join("b");

        let shards = open_files(&[&good, &good]).unwrap();
        assert_eq!(shards.len(), 2);
        assert_eq!(shards[1].path, good);
        assert_eq!(shards[1].file.size().unwrap(), 3);

        let error = open_files(&[&good, &gone]).err().unwrap();
        assert!(matches!(&error, OpenError::NotFound { path } if *path == gone), "{error}");
        let error = open_files(&[dir.path()]).err().unwrap();
        assert!(matches!(&error, OpenError::NotAFile { .. }), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn a_full_descriptor_table_is_explained() {
        let error = describe("x".into(), io::Error::from_raw_os_error(24), 250, 1000);
        assert!(matches!(error, OpenError::TooMany { opened: 250, wanted: 1000, .. }));
        assert!(error.to_string().contains("ulimit"));
    }
}
