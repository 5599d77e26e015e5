//! One positioned read: the trait behind every file, and the loop that turns
//! what an operating system may return (short counts, interruptions, end of
//! file) into "all of it" or an error that says what was missing.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use forebay_core::ReadSegment;

use crate::transfer::{Ask, Tally, Transfer};

/// Something that can be read at any offset by several threads at once.
///
/// Implemented by [`File`] and by the fault twin in `forebay-testkit`.
pub trait ReadAt: Send + Sync {
    /// Reads at most `buf.len()` bytes from `offset`, counted from the start.
    /// Returns how many were read; 0 means end of file (or an empty `buf`).
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Bytes in the file.
    fn size(&self) -> io::Result<u64>;

    /// Whether the file can be read past the page cache.
    fn is_direct(&self) -> bool {
        false
    }

    /// As [`read_at`](Self::read_at), past the page cache. The address and the length of `buf` and the offset
    /// are multiples of [`DIRECT_ALIGN`](forebay_core::DIRECT_ALIGN).
    fn read_direct_at(&self, _buf: &mut [u8], _offset: u64) -> io::Result<usize> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The bytes were read through the page cache and need not stay there.
    fn forget(&self, _offset: u64, _len: usize) {}

    /// What a ring reads from; `None` if this is no file of the system.
    #[cfg(target_os = "linux")]
    fn descriptors(&self) -> Option<Descriptors> {
        None
    }
}

/// The descriptors of a file, open as long as the file is.
#[cfg(target_os = "linux")]
#[derive(Clone, Copy, Debug)]
pub struct Descriptors {
    /// Reads through the page cache.
    pub buffered: std::os::fd::RawFd,
    /// Reads past it.
    pub direct: Option<std::os::fd::RawFd>,
}

impl ReadAt for File {
    #[cfg(unix)]
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::unix::fs::FileExt::read_at(self, buf, offset)
    }

    #[cfg(windows)]
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        std::os::windows::fs::FileExt::seek_read(self, buf, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }
}

/// Why bytes did not arrive. Every variant that concerns a file names it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file ended before the last wanted byte.
    #[error(
        "{path}: file ends early: got {got} of {wanted} bytes at offset {offset}; \
         the file is cut short, fetch it again"
    )]
    EndOfFile {
        /// File that was read.
        path: PathBuf,
        /// Offset of the first wanted byte.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that arrived.
        got: usize,
    },
    /// The operating system refused the read.
    #[error(
        "{path}: read failed: got {got} of {wanted} bytes at offset {offset}: {message}; \
         check the disk (the system log says more) or copy the file to another one"
    )]
    Os {
        /// File that was read.
        path: PathBuf,
        /// Offset of the first wanted byte.
        offset: u64,
        /// Bytes asked for.
        wanted: usize,
        /// Bytes that arrived before the error.
        got: usize,
        /// Kind of the system's error.
        kind: io::ErrorKind,
        /// The system's error number, where there is one.
        os_code: Option<i32>,
        /// The system's words.
        message: String,
    },
    /// The bytes arrived, but they are not those that were written.
    #[error(
        "{path}: the {len} bytes from offset {offset} have checksum {found:#010x}, expected {expected:#010x}; \
         the file is damaged: verify it and fetch or pack it again"
    )]
    Checksum {
        /// File that was read.
        path: PathBuf,
        /// Offset of the first byte.
        offset: u64,
        /// Bytes.
        len: usize,
        /// Their CRC32C when they were written.
        expected: u32,
        /// Their CRC32C now.
        found: u32,
    },
    /// The bytes arrived, but the transform found them to be wrong.
    #[error("{path}: the bytes from offset {offset} are not usable: {reason}; verify the file")]
    Transform {
        /// File of the first segment.
        path: PathBuf,
        /// Offset of the first segment.
        offset: u64,
        /// What the transform said.
        reason: String,
    },
    /// The code that handled the bytes panicked.
    #[error(
        "{path}: handling the bytes from offset {offset} panicked: {message}; please report this as a bug"
    )]
    Panicked {
        /// File of the first segment.
        path: PathBuf,
        /// Offset of the first segment.
        offset: u64,
        /// The panic message.
        message: String,
    },
    /// The job was given up while it was read.
    #[error("{path}: reading was given up after {bytes} bytes")]
    Aborted {
        /// File that was being read.
        path: PathBuf,
        /// Bytes read from files before.
        bytes: u64,
        /// Reads issued for them.
        reads: u64,
    },
    /// A segment does not fit in the buffer it is meant for.
    #[error(
        "{path}: a read of {len} bytes at offset {offset} should land at byte {dst} of a buffer of {room}; \
         please report this as a bug"
    )]
    OutsideBuffer {
        /// File of the segment.
        path: PathBuf,
        /// Offset of the segment in the file.
        offset: u64,
        /// Bytes of the segment.
        len: usize,
        /// Where it should start in the buffer.
        dst: usize,
        /// Bytes of the buffer.
        room: usize,
    },
    /// A segment names a shard that was never opened.
    #[error("shard {shard} does not exist, only {shards} are open; please report this as a bug")]
    UnknownShard {
        /// Shard that was named.
        shard: u32,
        /// Shards that are open.
        shards: usize,
    },
    /// A transform wants more scratch memory than a worker may hold.
    #[error(
        "a transform needs {needed} bytes of scratch per worker and the limit is {limit}; \
         please report this as a bug"
    )]
    ScratchLimit {
        /// Bytes needed.
        needed: usize,
        /// Bytes allowed per worker.
        limit: usize,
    },
    /// The system had no memory left for a worker's scratch buffer.
    #[error("no memory for {needed} bytes of scratch; lower the memory budget or the number of read workers")]
    NoScratch {
        /// Bytes needed.
        needed: usize,
    },
}

impl ReadError {
    /// Whether the same read may go well the next time: the system or the disk failed, or delivered something else than
    /// what was written.
    pub fn may_pass(&self) -> bool {
        matches!(self, Self::EndOfFile { .. } | Self::Os { .. } | Self::Checksum { .. })
    }
}

/// Fills `buf` from `offset`. `path` is only for the error.
///
/// Short reads are continued and interrupted ones retried, as any read may be
/// (docs/streaming.md, "What is read when things go wrong").
pub fn read_exact_at(src: &dyn ReadAt, path: &Path, buf: &mut [u8], offset: u64) -> Result<(), ReadError> {
    let segment = ReadSegment { shard: 0, offset, len: buf.len(), dst: 0 };
    let mut transfer = Transfer::new(segment, None, path)?;
    while let Some(ask) = transfer.next(usize::MAX) {
        step(&mut transfer, &ask, src, path, buf, &mut Tally::default())?;
    }
    Ok(())
}

/// Does one read of a transfer.
pub(crate) fn step(
    transfer: &mut Transfer,
    ask: &Ask,
    src: &dyn ReadAt,
    path: &Path,
    buf: &mut [u8],
    tally: &mut Tally,
) -> Result<(), ReadError> {
    let target = &mut buf[ask.dst..ask.dst + ask.len];
    let result = match ask.direct {
        true => src.read_direct_at(target, ask.offset),
        false => src.read_at(target, ask.offset),
    };
    transfer.digest(ask, result, path, tally)?;
    let pause = transfer.pause();
    if !pause.is_zero() {
        std::thread::sleep(pause);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn reads_the_middle_of_a_file_and_names_what_is_missing_at_its_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("shard");
        let bytes: Vec<u8> = (0..=255).collect();
        File::create(&path).unwrap().write_all(&bytes).unwrap();
        let file = File::open(&path).unwrap();

        let mut buf = [0; 10];
        read_exact_at(&file, &path, &mut buf, 100).unwrap();
        assert_eq!(buf, bytes[100..110]);
        assert_eq!(file.size().unwrap(), 256);

        let error = read_exact_at(&file, &path, &mut buf, 247).unwrap_err();
        assert_eq!(error, ReadError::EndOfFile { path: path.clone(), offset: 247, wanted: 10, got: 9 });
        let text = error.to_string();
        assert!(text.contains("got 9 of 10 bytes at offset 247"), "{text}");
        assert!(text.contains(path.to_str().unwrap()), "{text}");
    }

    #[test]
    fn an_offset_past_the_end_of_u64_is_an_error() {
        struct One;
        impl ReadAt for One {
            fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
                Ok(1)
            }
            fn size(&self) -> io::Result<u64> {
                Ok(u64::MAX)
            }
        }
        let error = read_exact_at(&One, Path::new("one"), &mut [0; 4], u64::MAX - 1).unwrap_err();
        assert!(
            matches!(error, ReadError::Os { got: 0, kind: io::ErrorKind::InvalidInput, .. }),
            "{error:?}"
        );
    }
}
