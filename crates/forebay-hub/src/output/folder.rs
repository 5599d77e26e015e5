//! Who writes to a folder, what is in it, and how much room its disk has.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};

use forebay_io::file::check_irregular;
use serde_json::{Map, Value};

use super::FileError;

/// The longest file that a run leaves behind for the next one to read.
pub const MAX_STATE_BYTES: u64 = 256 << 20;

/// The names in `dir`.
pub fn names(dir: &Path) -> Result<BTreeSet<String>, FileError> {
    let failed = |cause| FileError::new("list", dir, cause);
    let entries = fs::read_dir(dir).map_err(failed)?;
    entries.map(|entry| Ok(entry.map_err(failed)?.file_name().to_string_lossy().into_owned())).collect()
}

/// Regular files directly in `dir` that may be part of a model, links followed; hidden ones and Forebay's own apart.
pub fn files(dir: &Path) -> Result<Vec<(String, PathBuf)>, FileError> {
    let names = names(dir)?;
    let ours = |name: &String| name.starts_with("forebay-") || name.starts_with('.') || name == "synth.lock";
    let all = names.into_iter().filter(|name| !ours(name)).map(|name| (name.clone(), dir.join(name)));
    Ok(all.filter(|(_, path)| path.is_file()).collect())
}

/// Takes the lock file `name` of `dir`, which is free again when the result is dropped. `None` if another process
/// has it.
pub fn lock(dir: &Path, name: &str) -> Result<Option<File>, FileError> {
    let path = dir.join(name);
    let open = || OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    let file = check_irregular(&path)
        .and_then(|()| open())
        .map_err(|cause| FileError::new("create", &path, cause))?;
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Ok(None),
        // Some network disks have no locks. Then it is on the user to start only one.
        Ok(()) | Err(TryLockError::Error(_)) => Ok(Some(file)),
    }
}

/// Bytes that may still be written to the disk of `dir`, where the system says. If `dir` is not there yet, the
/// nearest folder above it is asked.
pub fn free_bytes(dir: &Path) -> Option<u64> {
    let there = |above: &&Path| above.exists() || above.as_os_str().is_empty();
    // The parent of a relative name is written as nothing at all.
    let found = dir.ancestors().find(there)?;
    let dir = if found.as_os_str().is_empty() { Path::new(".") } else { found };
    #[cfg(unix)]
    return rustix::fs::statvfs(dir).ok().map(|disk| disk.f_bavail.saturating_mul(disk.f_frsize));
    #[cfg(not(unix))]
    return {
        let _ = dir;
        None
    };
}

/// Bytes of disk that a file takes already; one that is incomplete has holes.
pub fn allocated(path: &Path) -> u64 {
    let Ok(meta) = fs::metadata(path) else { return 0 };
    #[cfg(unix)]
    return std::os::unix::fs::MetadataExt::blocks(&meta).saturating_mul(512).min(meta.len());
    #[cfg(not(unix))]
    return {
        let _ = meta;
        0
    };
}

/// Where the options that a folder was begun with differ from those asked for, as in
/// `hidden_size: 256 there, 512 asked for`.
pub fn changes(there: &Map<String, Value>, asked: &Map<String, Value>) -> Vec<String> {
    changes_below("", there, asked)
}

fn changes_below(prefix: &str, there: &Map<String, Value>, asked: &Map<String, Value>) -> Vec<String> {
    let mut changed = Vec::new();
    for (key, asked) in asked {
        let there = there.get(key).unwrap_or(&Value::Null);
        match (there, asked) {
            (Value::Object(there), Value::Object(asked)) => {
                changed.extend(changes_below(&format!("{prefix}{key}."), there, asked));
            }
            _ if there != asked => changed.push(format!("{prefix}{key}: {there} there, {asked} asked for")),
            _ => {}
        }
    }
    changed
}
