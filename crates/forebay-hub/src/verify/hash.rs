//! Every byte of a folder, against the digests that were recorded when it was written.
//!
//! Files are hashed side by side, each from front to back. What was hashed is kept in a file outside the folder, so
//! that a run that was stopped goes on behind it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use forebay_core::CancelToken;
use forebay_store::json::parse_object;
use serde_json::{Map, Value, json};
use sha2::{Digest as _, Sha256};

use super::report::{Kind, Report};
use crate::convert::source::modified;
use crate::digests::{Digest, DigestError, Digests, hex, is_sha256, write_json};
use crate::output::FileError;

/// Bytes read at a time.
const BLOCK: usize = 4 << 20;
/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// Where the digests of a folder come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// `forebay-digests.json`.
    Recorded,
    /// The names of the blobs that a Hugging Face cache links to.
    Cache,
    /// There are none.
    None,
}

/// Why a folder could not be hashed. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HashError {
    /// The recorded digests cannot be used.
    #[error(transparent)]
    Digests(#[from] DigestError),
    /// A file could not be read or written.
    #[error("{0}; when that is mended, give the same command again")]
    File(#[from] FileError),
    /// The user stopped it.
    #[error("stopped; what was hashed is remembered, and the same command continues")]
    Cancelled,
}

/// The digests that a folder should have.
pub fn expected(dir: &Path) -> Result<(Digests, Origin), HashError> {
    if let Some(digests) = Digests::read(dir)? {
        return Ok((digests, Origin::Recorded));
    }
    let mut found = BTreeMap::new();
    for (name, path) in files(dir)? {
        let blob = fs::read_link(&path).ok().and_then(|to| to.file_name().map(|name| name.to_owned()));
        let Some(sha256) = blob.and_then(|name| name.into_string().ok()).filter(|name| is_sha256(name))
        else {
            continue;
        };
        let size = fs::metadata(&path).map(|meta| meta.len());
        let size = size.map_err(|cause| FileError::new("look at", &path, cause))?;
        found.insert(name, Digest { size, sha256 });
    }
    let origin = if found.is_empty() { Origin::None } else { Origin::Cache };
    Ok((Digests(found), origin))
}

/// Regular files directly in `dir` that may be part of a model, links followed; hidden ones and Forebay's own apart.
pub fn files(dir: &Path) -> Result<Vec<(String, PathBuf)>, FileError> {
    let names = crate::output::folder::names(dir)?;
    let ours = |name: &String| name.starts_with("forebay-") || name.starts_with('.') || name == "synth.lock";
    let all = names.into_iter().filter(|name| !ours(name)).map(|name| (name.clone(), dir.join(name)));
    Ok(all.filter(|(_, path)| path.is_file()).collect())
}

/// What was hashed before, by file; kept outside of the folder.
struct State {
    path: PathBuf,
    done: BTreeMap<String, (Digest, u128)>,
}

impl State {
    /// A state that cannot be read or understood is none.
    fn open(path: &Path) -> Self {
        let entry = |value: &Value| {
            let sha256 = value.get("sha256")?.as_str().filter(|text| is_sha256(text))?.to_owned();
            let digest = Digest { size: value.get("size")?.as_u64()?, sha256 };
            Some((digest, value.get("modified")?.as_str()?.parse().ok()?))
        };
        let map = fs::read(path).ok().and_then(|bytes| parse_object(&bytes).ok()).unwrap_or_default();
        let done = map.iter().filter_map(|(name, value)| Some((name.clone(), entry(value)?))).collect();
        Self { path: path.to_owned(), done }
    }

    fn save(&self) -> Result<(), FileError> {
        let folder = self.path.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|cause| FileError::new("create", folder, cause))?;
        let entry = |(digest, modified): &(Digest, u128)| json!({"size": digest.size, "sha256": digest.sha256, "modified": modified.to_string()});
        let map: Map<_, _> = self.done.iter().map(|(name, done)| (name.clone(), entry(done))).collect();
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        write_json(folder, &name, &Value::Object(map))
    }
}

/// Hashes the files of `dir` with `threads` threads, and remembers in the file `state` what was done. `progress`
/// gets bytes hashed and bytes in all.
///
/// With `only`, only these files are hashed. The state is removed at the end.
pub fn hash_all(
    dir: &Path,
    only: Option<&BTreeSet<String>>,
    state: &Path,
    threads: usize,
    cancel: &CancelToken,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Digests, HashError> {
    let mut known = State::open(state);
    let mut total = 0;
    let mut open = Vec::new();
    let mut hashed = 0;
    for (name, path) in
        files(dir)?.into_iter().filter(|(name, _)| only.is_none_or(|only| only.contains(name)))
    {
        let look = |cause| FileError::new("look at", &path, cause);
        let size = fs::metadata(&path).map_err(look)?.len();
        let time = modified(&path).map_err(|error| look(io::Error::other(error.to_string())))?;
        total += size;
        match known.done.get(&name) {
            Some((digest, then)) if digest.size == size && *then == time => hashed += size,
            _ => open.push((name, path, time)),
        }
    }
    let names: BTreeSet<String> = open.iter().map(|(name, ..)| name.clone()).collect();
    known.done.retain(|name, _| !names.contains(name));
    let (hashed, next) = (AtomicU64::new(hashed), AtomicUsize::new(0));
    let known = Mutex::new(known);
    let failed: Mutex<Option<FileError>> = Mutex::new(None);
    let work = || {
        while let Some((name, path, time)) = open.get(next.fetch_add(1, Ordering::Relaxed)) {
            let stop = || cancel.is_cancelled() || lock(&failed).is_some();
            let result = hash_file(path, &hashed, &stop).and_then(|digest| {
                let Some(digest) = digest else { return Ok(false) };
                let mut known = lock(&known);
                known.done.insert(name.clone(), (digest, *time));
                known.save()?;
                Ok(true)
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
    let there: BTreeSet<String> = files(dir)?.into_iter().map(|(name, _)| name).collect();
    let wanted = |name: &String| there.contains(name) && only.is_none_or(|only| only.contains(name));
    let all = known.done.into_iter().filter(|(name, _)| wanted(name));
    Ok(Digests(all.map(|(name, (digest, _))| (name, digest)).collect()))
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The digest of one file; `None` if `stop` said so.
fn hash_file(path: &Path, hashed: &AtomicU64, stop: &dyn Fn() -> bool) -> Result<Option<Digest>, FileError> {
    let failed = |cause| FileError::new("read", path, cause);
    let mut file = File::open(path).map_err(failed)?;
    let (mut hash, mut size, mut block) = (Sha256::new(), 0, vec![0; BLOCK]);
    loop {
        if stop() {
            return Ok(None);
        }
        match file.read(&mut block) {
            Ok(0) => return Ok(Some(Digest { size, sha256: hex(&hash.finalize()) })),
            Ok(n) => {
                hash.update(&block[..n]);
                size += n as u64;
                hashed.fetch_add(n as u64, Ordering::Relaxed);
            }
            Err(cause) if cause.kind() == io::ErrorKind::Interrupted => {}
            Err(cause) => return Err(failed(cause)),
        }
    }
}

/// Adds to `report` where `found` differs from `expected`.
pub fn compare(expected: &Digests, found: &Digests, report: &mut Report) {
    for (name, wanted) in &expected.0 {
        match found.0.get(name) {
            None => {
                report.add(Kind::Absent, name, format!("{name} was recorded and is not there; get it again"))
            }
            Some(digest) if digest.size != wanted.size => report.add(
                Kind::Digest,
                name,
                format!("{name} has {} bytes, expected {}; get it again", digest.size, wanted.size),
            ),
            Some(digest) if digest.sha256 != wanted.sha256 => report.add(
                Kind::Digest,
                name,
                format!("{name} has SHA-256 {}, expected {}; get it again", digest.sha256, wanted.sha256),
            ),
            Some(_) => {}
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
