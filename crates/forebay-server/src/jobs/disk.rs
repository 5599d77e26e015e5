//! Writing so that it is still there after a crash, and reading what a crash left.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, BufRead, Read, Write};
use std::path::{Path, PathBuf};

/// Makes a folder, and those above it, for this user alone.
pub fn private_dir(path: &Path) -> io::Result<()> {
    let mut builder = DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// How files are opened for writing: for this user alone.
pub fn private_file() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).create(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options
}

/// Makes sure that names in a folder last. Windows has no such thing.
pub fn sync_dir(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(path)?.sync_all() } else { Ok(()) }
}

/// Writes a whole file: what was there before stays until the new one lasts.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let new = path.with_extension("tmp");
    let written = (|| {
        let mut file = private_file().truncate(true).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()
    })();
    if let Err(error) = written {
        _ = fs::remove_file(&new);
        return Err(error);
    }
    fs::rename(&new, path)?;
    sync_dir(path.parent().unwrap_or(Path::new(".")))
}

/// Renames what cannot be understood, so that a person can look at it and nobody stumbles over it again.
pub fn set_aside(path: &Path, why: &str) {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let free = (0..1000).map(|number| match number {
        0 => path.with_file_name(format!("{name}.damaged")),
        _ => path.with_file_name(format!("{name}.damaged-{number}")),
    });
    let aside: Option<PathBuf> = free.into_iter().find(|aside| !aside.exists());
    let moved = aside.as_ref().map(|aside| fs::rename(path, aside));
    match (aside, moved) {
        (Some(aside), Some(Ok(()))) => tracing::error!(
            file = %path.display(), moved_to = %aside.display(), why,
            "damaged, and set aside; everything else goes on"
        ),
        _ => {
            tracing::error!(file = %path.display(), why, "damaged, and left where it is; everything else goes on")
        }
    }
}

/// A line of a file.
#[derive(Debug, PartialEq, Eq)]
pub enum Line {
    /// The line, without its end.
    Whole(Vec<u8>),
    /// It is longer than it may be.
    TooLong,
    /// The file ends before the line does.
    Torn(Vec<u8>),
}

/// The next line, of at most `most` bytes; `None` at the end of the file. No more of it than that is kept in memory.
pub fn next_line(reader: &mut impl BufRead, most: usize) -> io::Result<Option<Line>> {
    let mut line = Vec::new();
    let limit = (most as u64).saturating_add(1);
    let read = reader.by_ref().take(limit).read_until(b'\n', &mut line)?;
    if read == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        line.pop();
        return Ok(Some(Line::Whole(line)));
    }
    if line.len() <= most {
        return Ok(Some(Line::Torn(line)));
    }
    drop(line);
    loop {
        let buffer = reader.fill_buf()?;
        let end = buffer.iter().position(|byte| *byte == b'\n');
        let (done, used) = match end {
            Some(end) => (true, end + 1),
            None => (buffer.is_empty(), buffer.len()),
        };
        reader.consume(used);
        if done {
            return Ok(Some(Line::TooLong));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_whole_torn_or_too_long() {
        let text = b"one\n\n12345\n123456\ntwo\nto".as_slice();
        let mut reader = io::BufReader::with_capacity(3, text);
        let mut next = || next_line(&mut reader, 5).unwrap();
        assert_eq!(next(), Some(Line::Whole(b"one".to_vec())));
        assert_eq!(next(), Some(Line::Whole(Vec::new())));
        assert_eq!(next(), Some(Line::Whole(b"12345".to_vec())));
        assert_eq!(next(), Some(Line::TooLong));
        assert_eq!(next(), Some(Line::Whole(b"two".to_vec())));
        assert_eq!(next(), Some(Line::Torn(b"to".to_vec())));
        assert_eq!(next(), None);
    }

    #[test]
    fn a_file_is_replaced_in_one_piece_and_what_is_damaged_keeps_its_bytes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.json");
        write_whole(&path, b"old").unwrap();
        write_whole(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        set_aside(&path, "a test");
        write_whole(&path, b"newer").unwrap();
        set_aside(&path, "a test");
        assert_eq!(fs::read(dir.path().join("x.json.damaged")).unwrap(), b"new");
        assert_eq!(fs::read(dir.path().join("x.json.damaged-1")).unwrap(), b"newer");
        assert!(!path.exists() && fs::read_dir(dir.path()).unwrap().count() == 2);
    }
}
