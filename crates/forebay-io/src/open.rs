//! Paths to open shards.
//!
//! Files are read, never mapped: a read of a mapped file that was cut short or that the disk cannot deliver ends the
//! process with a signal, where it has to be an error of the request that needed it.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::file::irregular;
#[cfg(target_os = "linux")]
use crate::read::Descriptors;
use crate::read::ReadAt;
use crate::system;

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
    #[error("{path}: it is {kind}, not a regular file; put the model's own file there")]
    NotAFile {
        /// What was asked for.
        path: PathBuf,
        /// What it is instead, such as `a folder`.
        kind: &'static str,
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

/// How files are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Through the page cache, which keeps what it can.
    #[default]
    Buffered,
    /// Through the page cache, which is told after each read of a [`Reader`](crate::Reader) that the bytes are
    /// not needed again; what was there before is dropped too.
    Uncached,
    /// Past the page cache, straight into slabs. What cannot be read like that is read as
    /// [`Uncached`](Self::Uncached).
    Direct,
}

impl std::fmt::Display for Access {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Access::Buffered => "buffered",
            Access::Uncached => "uncached",
            Access::Direct => "direct",
        })
    }
}

/// Files that were opened.
pub struct Opened {
    /// In the order asked for.
    pub shards: Vec<Shard>,
    /// What is not as it was asked for, for the user.
    pub notes: Vec<String>,
}

/// Opens every file for reading, in order. One that cannot be opened fails the
/// whole call, with its name; nothing is left open then. A file system that refuses
/// direct access is no error: its files are read through the page cache, and a note says so.
pub fn open_files<P: AsRef<Path>>(paths: &[P], access: Access) -> Result<Opened, OpenError> {
    let mut shards = Vec::with_capacity(paths.len());
    let mut refused: Vec<(PathBuf, io::Error)> = Vec::new();
    for path in paths {
        let path = path.as_ref().to_owned();
        let plain = match open_regular(&path) {
            Ok(Ok(file)) => file,
            Ok(Err(kind)) => return Err(OpenError::NotAFile { path, kind }),
            Err(cause) => return Err(describe(path, cause, shards.len(), paths.len())),
        };
        let direct = match (access == Access::Direct).then(|| system::open_direct(&path)) {
            Some(Ok(file)) => Some(file),
            Some(Err(cause)) => {
                refused.push((path.clone(), cause));
                None
            }
            None => None,
        };
        let file = ShardFile { plain, direct, drop_pages: access != Access::Buffered };
        shards.push(Shard { path, file: Arc::new(file) });
    }
    let notes = refused.first().map(|(path, cause)| {
        format!(
            "{} of {} files cannot be read past the page cache and are read through it ({}: {cause})",
            refused.len(),
            paths.len(),
            path.display(),
        )
    });
    Ok(Opened { shards, notes: notes.into_iter().collect() })
}

/// The file, or what there is that is no regular file. Asked before opening, because
/// opening a pipe would block and opening a directory fails differently everywhere.
fn open_regular(path: &Path) -> io::Result<Result<File, &'static str>> {
    match irregular(std::fs::metadata(path)?.file_type()) {
        Some(kind) => Ok(Err(kind)),
        None => File::open(path).map(Ok),
    }
}

/// A file of the system, opened once or twice.
struct ShardFile {
    plain: File,
    /// Reads past the page cache.
    direct: Option<File>,
    /// What was read through the page cache need not stay there.
    drop_pages: bool,
}

impl ReadAt for ShardFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        self.plain.read_at(buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        self.plain.size()
    }

    fn is_direct(&self) -> bool {
        self.direct.is_some()
    }

    fn read_direct_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.direct {
            Some(file) => file.read_at(buf, offset),
            None => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    fn forget(&self, offset: u64, len: usize) {
        if self.drop_pages {
            system::forget(&self.plain, offset, len);
        }
    }

    #[cfg(target_os = "linux")]
    fn descriptors(&self) -> Option<Descriptors> {
        use std::os::fd::AsRawFd;
        let direct = self.direct.as_ref().map(|file| file.as_raw_fd());
        Some(Descriptors { buffered: self.plain.as_raw_fd(), direct })
    }
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

        let shards = open_files(&[&good, &good], Access::Buffered).unwrap().shards;
        assert_eq!(shards.len(), 2);
        assert_eq!(shards[1].path, good);
        assert_eq!(shards[1].file.size().unwrap(), 3);

        let error = open_files(&[&good, &gone], Access::Direct).err().unwrap();
        assert!(matches!(&error, OpenError::NotFound { path } if *path == gone), "{error}");
        let error = open_files(&[dir.path()], Access::Uncached).err().unwrap();
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
