//! Files that are there as a whole or not at all, and the folder they are written to.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::Path;

/// What an incomplete file's name ends with.
pub const PARTIAL: &str = ".partial";

/// Gives a complete file its name, and makes sure that the disk knows.
pub fn publish(dir: &Path, partial: &Path, name: &str) -> io::Result<()> {
    fs::rename(partial, dir.join(name))?;
    // Not every system lets a folder be synchronised; the file itself is on the disk already.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
    Ok(())
}

/// Writes a small file so that it is there as a whole or not at all.
pub fn write_whole(dir: &Path, name: &str, bytes: &[u8]) -> io::Result<()> {
    let partial = dir.join(format!("{name}{PARTIAL}"));
    let mut file = File::create(&partial)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    publish(dir, &partial, name)
}

/// The names in a folder.
pub fn names(dir: &Path) -> io::Result<BTreeSet<String>> {
    fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
}

/// Takes the lock of the file `path`, which is made if it is not there; it is held until the file is closed. `None`
/// if another process has it.
pub fn lock(path: &Path) -> io::Result<Option<File>> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path)?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(None),
        // Some network disks have no locks. Then it is on the user to start only one.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
    }
}

/// Bytes that may still be written to the disk of `dir`, where the system says.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    // The parent of a relative name is written as nothing at all.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    #[cfg(unix)]
    return rustix::fs::statvfs(dir).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    #[cfg(not(unix))]
    return {
        let _ = dir;
        None
    };
}

/// As [`free_bytes`], of the disk on which `dir` is or would be made.
pub fn free_bytes_for(dir: &Path) -> Option<u64> {
    let there = dir.ancestors().find(|above| above.exists() || above.as_os_str().is_empty());
    there.and_then(free_bytes)
}
