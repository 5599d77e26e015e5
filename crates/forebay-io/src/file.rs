//! Files that are opened as a whole: state, settings, texts. What is no regular file is never opened, because that may
//! wait for ever: a pipe for its other end, a device for anything.

use std::fs::{File, FileType, Metadata};
use std::io::{self, Read};
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// What the system says, or [`InvalidInput`](io::ErrorKind::InvalidInput) with words that say what is there instead.
pub fn open_regular(path: &Path) -> io::Result<File> {
    require_regular(&std::fs::metadata(path)?)?;
    File::open(path)
}

/// The bytes of a regular file.
///
/// # Errors
/// As [`open_regular`], and [`InvalidData`](io::ErrorKind::InvalidData) if there are more than `limit` bytes. The
/// length that the folder tells is not trusted: a file may grow.
pub fn read_regular(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_regular(path)?.take(limit.saturating_add(1)).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > limit {
        true => Err(io::Error::new(io::ErrorKind::InvalidData, format!("it is longer than {limit} bytes"))),
        false => Ok(bytes),
    }
}

/// An error if there is something at `path` that is no regular file; nothing at all is fine. For what is opened
/// elsewhere, or to write.
pub fn check_irregular(path: &Path) -> io::Result<()> {
    std::fs::metadata(path).map_or(Ok(()), |found| require_regular(&found))
}

fn require_regular(found: &Metadata) -> io::Result<()> {
    match irregular(found.file_type()) {
        None => Ok(()),
        Some(kind) => {
            Err(io::Error::new(io::ErrorKind::InvalidInput, format!("it is {kind}, not a regular file")))
        }
    }
}

/// What something is called that is no regular file, such as `a folder`; `None` for a regular file.
pub fn irregular(kind: FileType) -> Option<&'static str> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return Some("a named pipe");
        }
        if kind.is_socket() {
            return Some("a socket");
        }
        if kind.is_char_device() || kind.is_block_device() {
            return Some("a device");
        }
    }
    match (kind.is_file(), kind.is_dir()) {
        (true, _) => None,
        (_, true) => Some("a folder"),
        _ => Some("something else"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        assert_eq!(read_regular(&path, 9).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(check_irregular(&path).is_ok());
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_regular(&path, 5).unwrap(), b"12345");
        let error = read_regular(&path, 4).unwrap_err();
        assert!(error.to_string().contains("longer than 4 bytes"), "{error}");
        assert!(check_irregular(&path).is_ok());
    }

    /// Whoever opened the pipe would wait for ever.
    #[cfg(unix)]
    #[test]
    fn what_is_no_file_is_named_and_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let (pipe, socket) = (dir.path().join("pipe"), dir.path().join("socket"));
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let _socket = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        for (path, kind) in [
            (pipe.as_path(), "a named pipe"),
            (&socket, "a socket"),
            (dir.path(), "a folder"),
            (Path::new("/dev/zero"), "a device"),
        ] {
            for error in [read_regular(path, 1).unwrap_err(), check_irregular(path).unwrap_err()] {
                assert!(error.to_string().contains(kind), "{error}");
            }
        }
    }
}
