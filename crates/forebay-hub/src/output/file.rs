//! Files that are there as a whole or not at all: they have another name until every byte is on the disk.

use std::fs::{self, File, Metadata};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use super::FileError;
use super::behind::Behind;

/// What an incomplete file's name ends with.
pub const PARTIAL: &str = ".partial";

/// A file that is being written. Unless it is [published](Self::publish), dropping it removes what there is of it:
/// half a file is of no use, least of all on a full disk.
#[derive(Debug)]
pub struct NewFile {
    dir: PathBuf,
    name: String,
    file: Behind,
    published: bool,
}

impl NewFile {
    /// Begins the file `name` of `dir`, anew if it was begun before.
    pub fn create(dir: &Path, name: &str) -> Result<Self, FileError> {
        let path = partial(dir, name);
        let file = begin(&path).map_err(|cause| FileError::new("create", &path, cause))?;
        Ok(Self { dir: dir.to_owned(), name: name.to_owned(), file: Behind::new(file), published: false })
    }

    /// Appends bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        self.file.write_all(bytes).map_err(|cause| self.failed("write", cause))
    }

    /// Makes sure that the bytes are on the disk, and gives the file its name.
    pub fn publish(mut self) -> Result<(), FileError> {
        self.file.sync().map_err(|cause| self.failed("write", cause))?;
        publish(&self.dir, &self.name)?;
        self.published = true;
        Ok(())
    }

    fn failed(&self, action: &'static str, cause: std::io::Error) -> FileError {
        FileError::new(action, &partial(&self.dir, &self.name), cause)
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.published {
            // If this fails, the next run replaces it.
            let _ = fs::remove_file(partial(&self.dir, &self.name));
        }
    }
}

/// Begins the file at `path` anew. What is there is removed before: nothing is written through a link to somewhere else,
/// and nobody waits for the other end of a pipe.
pub fn begin(path: &Path) -> io::Result<File> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => File::create_new(path),
    }
}

fn partial(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}{PARTIAL}"))
}

/// Gives the file `name` of `dir`, whose bytes are on the disk under its partial name, its own name.
pub fn publish(dir: &Path, name: &str) -> Result<(), FileError> {
    let partial = partial(dir, name);
    fs::rename(&partial, dir.join(name)).map_err(|cause| FileError::new("rename", &partial, cause))?;
    sync_folder(dir);
    Ok(())
}

/// Writes a small file.
pub fn write_whole(dir: &Path, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    let mut file = NewFile::create(dir, name)?;
    file.write(bytes)?;
    file.publish()
}

/// Writes the small file `path`.
pub fn write_path(path: &Path, bytes: &[u8]) -> Result<(), FileError> {
    let dir = path.parent().unwrap_or(Path::new(""));
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    write_whole(dir, &name, bytes)
}

/// When a file was last written, in nanoseconds since 1970.
pub fn modified(meta: &Metadata) -> io::Result<u128> {
    Ok(meta.modified()?.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()))
}

/// Makes the names in `dir` survive a power failure.
pub fn sync_folder(dir: &Path) {
    // Not every system lets a folder be synchronised; the files themselves are on the disk already.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;
    use std::process::Command;

    #[test]
    fn what_lies_where_a_file_begins_is_replaced_and_never_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let (other, link, pipe) =
            (dir.path().join("other"), dir.path().join("link.partial"), dir.path().join("pipe.partial"));
        fs::write(&other, "mine").unwrap();
        symlink(&other, &link).unwrap();
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        for name in ["link", "pipe", "new"] {
            write_whole(dir.path(), name, b"theirs").unwrap();
            assert_eq!(fs::read(dir.path().join(name)).unwrap(), b"theirs");
        }
        assert_eq!(fs::read(&other).unwrap(), b"mine");
        fs::create_dir(dir.path().join("folder.partial")).unwrap();
        assert!(write_whole(dir.path(), "folder", b"").is_err());
    }
}
