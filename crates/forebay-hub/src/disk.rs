//! Small things about disks that several ways of getting a model need.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Bytes that may still be written to the disk of `dir`, where the system says.
pub(crate) fn free_bytes(dir: &Path) -> Option<u64> {
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

/// The nearest folder above `dir`, or `dir` itself, that is there.
pub(crate) fn existing(dir: &Path) -> Option<&Path> {
    dir.ancestors().find(|above| above.exists() || above.as_os_str().is_empty())
}

/// Makes the names in `dir` survive a power failure.
pub(crate) fn sync_folder(dir: &Path) {
    // Not every system lets a folder be synchronised; the files themselves are on the disk already.
    let _ = File::open(dir).and_then(|dir| dir.sync_all());
}

/// Writes a small file so that it is there as a whole or not at all, whatever happens.
pub(crate) fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".new");
    let partial = PathBuf::from(partial);
    let mut file = File::create(&partial)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&partial, path)?;
    path.parent().into_iter().for_each(sync_folder);
    Ok(())
}
