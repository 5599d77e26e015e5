//! Every byte of a folder, against the digests that were recorded when it was written.
//!
//! Files are hashed side by side, each from front to back. What was hashed is kept in a file outside the folder, so
//! that a run that was stopped goes on behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use forebay_core::CancelToken;
use forebay_io::file::read_regular;
use forebay_store::json::parse_object;
use serde_json::{Map, Value, json};

use super::report::{Kind, Report};
use crate::digest::{self, Algorithm, FileDigest};
use crate::digests::{Digests, write_json};
use crate::known::KnownError;
use crate::output::FileError;
use crate::output::file::modified;
use crate::output::folder::{MAX_STATE_BYTES, files};

/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// Why a folder could not be hashed. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HashError {
    /// What is known of the folder cannot be used.
    #[error(transparent)]
    Known(#[from] KnownError),
    /// A file could not be read.
    #[error("{0}; when that is mended, give the same command again")]
    File(#[from] FileError),
    /// The user stopped it.
    #[error("stopped; the same command goes on behind the files that are remembered")]
    Cancelled,
}

/// What was hashed before, by file; kept outside of the folder.
struct State {
    path: PathBuf,
    done: BTreeMap<String, (FileDigest, u128)>,
}

impl State {
    /// A state that cannot be read or understood is none.
    fn open(path: &Path) -> Self {
        let entry =
            |value: &Value| Some((FileDigest::parse(value)?, value.get("modified")?.as_str()?.parse().ok()?));
        let map = read_regular(path, MAX_STATE_BYTES)
            .ok()
            .and_then(|bytes| parse_object(&bytes).ok())
            .unwrap_or_default();
        let done = map.iter().filter_map(|(name, value)| Some((name.clone(), entry(value)?))).collect();
        Self { path: path.to_owned(), done }
    }

    fn save(&self) -> Result<(), FileError> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|cause| FileError::new("create", folder, cause))?;
        let entry = |(digest, modified): &(FileDigest, u128)| {
            let mut entry = digest.json();
            entry["modified"] = json!(modified.to_string());
            entry
        };
        let map: Map<_, _> = self.done.iter().map(|(name, done)| (name.clone(), entry(done))).collect();
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        write_json(folder, &name, &Value::Object(map))
    }
}

/// Hashes the files of `dir` with `threads` threads, and remembers in the file `state` what was done. `progress`
/// gets bytes hashed and bytes in all.
///
/// With `wanted`, only its files are hashed, each as it is known; else all that may be part of a model, with SHA-256.
/// The state is removed at the end.
pub fn hash_all(
    dir: &Path,
    wanted: Option<&Digests>,
    state: &Path,
    threads: usize,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Digests, HashError> {
    let mut known = State::open(state);
    let mut total = 0;
    let mut open = Vec::new();
    let mut hashed = 0;
    for (name, path, algorithm) in work_list(dir, wanted)? {
        let look = |cause| FileError::new("look at", &path, cause);
        let meta = fs::metadata(&path).map_err(look)?;
        let (size, time) = (meta.len(), modified(&meta).map_err(look)?);
        total = u64::saturating_add(total, size);
        match known.done.get(&name) {
            Some((found, then))
                if found.size == size && *then == time && found.digest.algorithm() == algorithm =>
            {
                hashed += size;
            }
            _ => open.push((name, path, time, algorithm)),
        }
    }
    let names: BTreeSet<String> = open.iter().map(|(name, ..)| name.clone()).collect();
    known.done.retain(|name, _| !names.contains(name));
    let (hashed, next) = (AtomicU64::new(hashed), AtomicUsize::new(0));
    let known = Mutex::new(known);
    let failed: Mutex<Option<FileError>> = Mutex::new(None);
    let work = || {
        while let Some((name, path, time, algorithm)) = open.get(next.fetch_add(1, Ordering::Relaxed)) {
            let mut seen = |bytes| {
                hashed.fetch_add(bytes, Ordering::Relaxed);
                !cancel.is_cancelled() && lock(&failed).is_none()
            };
            if !seen(0) {
                return;
            }
            let result = digest::hash_file(path, *algorithm, &mut seen).map(|digest| {
                let Some(digest) = digest else { return false };
                let mut known = lock(&known);
                known.done.insert(name.clone(), (digest, *time));
                // It is a saving for a run that is stopped. Where it cannot be kept, that one begins anew.
                let _ = known.save();
                true
            });
            match result {
                Ok(true) => {}
                Ok(false) => return,
                Err(error) => {
                    lock(&failed).get_or_insert(error);
                    return;
                }
            }
        }
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..threads.clamp(1, open.len().max(1))).map(|_| scope.spawn(work)).collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            progress(hashed.load(Ordering::Relaxed), total);
            thread::park_timeout(TICK);
        }
    });
    progress(hashed.load(Ordering::Relaxed), total);
    if let Some(error) = lock(&failed).take() {
        return Err(error.into());
    }
    if cancel.is_cancelled() {
        return Err(HashError::Cancelled);
    }
    let known = known.into_inner().unwrap_or_else(PoisonError::into_inner);
    // The next run reads everything again. Should the state stay, times and sizes still have to match.
    let _ = fs::remove_file(state);
    let there: BTreeSet<String> = work_list(dir, wanted)?.into_iter().map(|(name, ..)| name).collect();
    let all = known.done.into_iter().filter(|(name, _)| there.contains(name));
    Ok(Digests(all.map(|(name, (digest, _))| (name, digest)).collect()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is to be hashed, and how.
fn work_list(dir: &Path, wanted: Option<&Digests>) -> Result<Vec<(String, PathBuf, Algorithm)>, FileError> {
    let Some(wanted) = wanted else {
        let all = files(dir)?.into_iter();
        return Ok(all.map(|(name, path)| (name, path, Algorithm::Sha256)).collect());
    };
    let all = wanted.0.iter().map(|(name, known)| (name.clone(), dir.join(name), known.digest.algorithm()));
    Ok(all.filter(|(_, path, _)| path.is_file()).collect())
}

/// Adds to `report` where `found` differs from `expected`.
pub fn compare(expected: &Digests, found: &Digests, report: &mut Report) {
    for (name, wanted) in &expected.0 {
        match found.0.get(name) {
            None => {
                report.add(Kind::Absent, name, format!("{name} was recorded and is not there; get it again"))
            }
            Some(found) => {
                if let Some(difference) = wanted.difference(found) {
                    // In a cache it is the blob: a link alone would be made again.
                    let path = report.dir.join(name);
                    let real = fs::canonicalize(&path).unwrap_or(path);
                    report.add(
                        Kind::Digest,
                        name,
                        format!("{name} {difference}; delete {} and get it again", real.display()),
                    );
                }
            }
        }
    }
    let unknown: Vec<String> =
        report.files.keys().filter(|name| !expected.0.contains_key(*name)).cloned().collect();
    for name in unknown {
        let message = format!(
            "{name} is a weight file and no digest was recorded for it; nothing says what it should be"
        );
        report.add(Kind::NotRecorded, name, message);
    }
}
