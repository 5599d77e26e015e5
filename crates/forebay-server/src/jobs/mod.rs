//! Work for the night: files of requests, batches of them, and their results, in a folder that outlives the server.
//!
//! - `files`: the files of clients, and results. `batch`, `record`: what is known of a batch.
//! - `input`: a batch's requests, line by line. `log`: its results, line by line.
//! - `runner`: from the one to the other. `disk`: how things are written that have to last.
//!
//! In the folder: `files/ID.jsonl` and `files/ID.json`, `batches/ID.json`, and `lock`. The results of a batch are
//! appended to the files that they will be, each forced to the disk before it counts: whatever happens, a request whose line
//! is whole is not run again, and one whose line is not is. docs/serving.md says the same to users.

mod batch;
mod disk;
mod files;
mod input;
mod log;
mod record;
mod runner;

use std::collections::BTreeMap;
use std::fs::{File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;

pub use batch::{Batch, Pace};
pub use files::{FileError, FileRecord, Files, Purpose, Upload};
pub use input::{MAX_CUSTOM_ID, MAX_REQUESTS};
pub use record::{BatchRecord, LineError, Status};

use crate::app::App;

/// Most batches that are not over.
pub const MAX_UNFINISHED: usize = 100;
/// Most batches in all; the oldest of those that are over are forgotten.
const MAX_BATCHES: usize = 10_000;
/// For the last results to be written when the server ends.
const LAST_WRITES: Duration = Duration::from_secs(5);

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// Another process has it.
    #[error("another server keeps its batches in {}; give each server a folder of its own with --jobs", .0.display())]
    Busy(PathBuf),
    /// The disk.
    #[error("batches cannot be kept in {}: {cause}; name another folder with --jobs", .dir.display())]
    Io {
        /// The folder.
        dir: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
}

/// How much is taken on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Most bytes of a client's file.
    pub file: u64,
    /// Most bytes of all files, when one more is taken.
    pub files: u64,
    /// Most bytes of a request in a batch.
    pub line: usize,
    /// Requests of batches under way at a time.
    pub places: usize,
}

/// Files, batches, and what runs of them.
#[derive(Debug)]
pub struct Jobs {
    /// All files.
    pub files: Files,
    limits: Limits,
    dir: PathBuf,
    batches: Mutex<BTreeMap<String, Arc<Batch>>>,
    /// Whose requests are taken: one batch after the other.
    turn: tokio::sync::Mutex<()>,
    places: Arc<Semaphore>,
    /// Raised when the server ends.
    stop: watch::Sender<bool>,
    tasks: Mutex<JoinSet<()>>,
    /// What cannot be written, and why.
    stuck: Mutex<(usize, String)>,
    /// What was measured of all batches.
    pace: Mutex<Pace>,
    /// Held for as long as the folder is ours.
    _lock: File,
}

impl Jobs {
    /// Takes over a folder, which is made where it is missing, and reads what is in it. What is damaged is set aside.
    pub fn open(dir: &Path, limits: Limits) -> Result<Self, OpenError> {
        let failed = |cause| OpenError::Io { dir: dir.to_owned(), cause };
        let batches_dir = dir.join("batches");
        disk::private_dir(&batches_dir).map_err(failed)?;
        let lock = disk::private_file().truncate(false).open(dir.join("lock")).map_err(failed)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(OpenError::Busy(dir.to_owned())),
            // Some network disks have no locks. Then it is on the user to start only one.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let files = Files::open(dir.join("files"), limits.file, limits.files).map_err(failed)?;
        let mut batches = BTreeMap::new();
        for entry in std::fs::read_dir(&batches_dir).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|end| end == "json") {
                match Batch::read(&batches_dir, &path) {
                    Ok(batch) => _ = batches.insert(batch.record().id, Arc::new(batch)),
                    Err(why) => disk::set_aside(&path, &why),
                }
            }
        }
        Ok(Self {
            files,
            limits,
            dir: batches_dir,
            batches: Mutex::new(batches),
            turn: tokio::sync::Mutex::default(),
            places: Arc::new(Semaphore::new(limits.places.max(1))),
            stop: watch::Sender::new(false),
            tasks: Mutex::default(),
            stuck: Mutex::default(),
            pace: Mutex::default(),
            _lock: lock,
        })
    }

    fn batches(&self) -> MutexGuard<'_, BTreeMap<String, Arc<Batch>>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A batch.
    pub fn batch(&self, id: &str) -> Option<Arc<Batch>> {
        self.batches().get(id).cloned()
    }

    /// All batches, the newest first.
    pub fn all(&self) -> Vec<Arc<Batch>> {
        let mut all: Vec<_> =
            self.batches().values().map(|batch| (batch.record(), Arc::clone(batch))).collect();
        all.sort_by(|(one, _), (other, _)| (other.created_at, &other.id).cmp(&(one.created_at, &one.id)));
        all.into_iter().map(|(_, batch)| batch).collect()
    }

    /// Those that are not over, the oldest first.
    fn unfinished(&self) -> Vec<Arc<Batch>> {
        let mut all = self.all();
        all.retain(|batch| !batch.record().status.is_final());
        all.reverse();
        all
    }

    /// How many are not over.
    pub fn count_unfinished(&self) -> usize {
        self.batches().values().filter(|batch| !batch.record().status.is_final()).count()
    }

    /// Whether a batch that is not over reads this file.
    pub fn reads(&self, file: &str) -> bool {
        let reads = |record: BatchRecord| !record.status.is_final() && record.input_file_id == file;
        self.batches().values().any(|batch| reads(batch.record()))
    }

    /// Adds a batch, which is there for good when this returns. Blocks for as long as the disk does.
    pub fn add(&self, record: BatchRecord) -> io::Result<Arc<Batch>> {
        let id = record.id.clone();
        let batch = Arc::new(Batch::new(&self.dir, record));
        batch.change(|_| {})?;
        self.batches().insert(id, Arc::clone(&batch));
        for old in self.all().iter().skip(MAX_BATCHES).filter(|old| old.record().status.is_final()) {
            std::fs::remove_file(old.path())?;
            self.batches().remove(&old.record().id);
        }
        Ok(batch)
    }

    /// Goes on with a batch, unless somebody does already.
    pub fn run(&self, app: &Arc<App>, batch: Arc<Batch>) {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        while tasks.try_join_next().is_some() {}
        tasks.spawn(runner::run(Arc::clone(app), batch));
    }

    /// Goes on with all that is not over.
    pub fn start(&self, app: &Arc<App>) {
        for batch in self.unfinished() {
            let record = batch.record();
            tracing::info!(batch = %record.id, status = record.status.name(), "a batch goes on");
            self.run(app, batch);
        }
    }

    /// Begins nothing new from now on.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Waits until everything that was computed is written, for some time.
    pub async fn finished(&self) {
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(LAST_WRITES, all).await.is_err() {
            tracing::warn!("batches were left in the middle; what is not written is computed again");
        }
    }

    /// Why results cannot be written, if so.
    pub fn trouble(&self) -> Option<String> {
        let stuck = self.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        (stuck.0 > 0).then(|| stuck.1.clone())
    }

    /// A batch as clients see it, with its progress and what is expected of it.
    pub fn shown(&self, batch: &Batch) -> Value {
        let record = batch.record();
        let now = Instant::now();
        let (running, tokens_per_second) = {
            let pace = batch.pace();
            (pace.running, pace.tokens_per_second(now))
        };
        let over = record.status.is_final();
        let trouble = if over { None } else { self.trouble() };
        let extension = json!({
            "running": running,
            "eta_seconds": if over { Some(0) } else { self.left(&record.id, now).map(|left| left.as_secs()) },
            "tokens_per_second": tokens_per_second,
            "model": record.model,
            "models": record.needs(),
            "paused": trouble,
        });
        record.shown(extension)
    }

    /// Time until a batch is done, those before it included, by what was measured.
    fn left(&self, id: &str, now: Instant) -> Option<Duration> {
        let usual = self.pace().per_request(now);
        let mut sum = Duration::ZERO;
        for batch in self.unfinished() {
            let record = batch.record();
            if record.status == Status::Validating {
                return None;
            }
            let each = batch.pace().per_request(now).or(usual)?;
            sum += each.checked_mul(u32::try_from(batch.left()).unwrap_or(u32::MAX))?;
            if record.id == id {
                return Some(sum);
            }
        }
        None
    }

    /// What is counted, for metrics.
    pub fn counts(&self) -> Counts {
        let mut counts =
            Counts { stuck: self.trouble().is_some(), file_bytes: self.files.used(), ..Counts::default() };
        for batch in self.batches().values() {
            let record = batch.record();
            let status = Status::ALL.iter().position(|status| *status == record.status).unwrap_or(0);
            counts.batches[status] += 1;
            counts.completed += record.completed;
            counts.failed += record.failed;
            if !record.status.is_final() {
                let running = batch.pace().running;
                counts.running += running;
                let open = record.total.saturating_sub(record.completed + record.failed);
                counts.waiting += open.saturating_sub(running);
            }
        }
        counts
    }

    /// What a client who asks for health is told.
    pub fn health(&self) -> Value {
        json!({"unfinished": self.count_unfinished(), "paused": self.trouble()})
    }
}

/// Batches and their requests, in numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Batches by [`Status::ALL`].
    pub batches: [u64; Status::ALL.len()],
    /// Requests with an answer.
    pub completed: u64,
    /// Requests with an error.
    pub failed: u64,
    /// Requests under way.
    pub running: u64,
    /// Requests of batches that are not over, neither done nor under way.
    pub waiting: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Whether results cannot be written.
    pub stuck: bool,
}

/// Counts what cannot be written for as long as it lives.
struct Stuck<'j>(&'j Jobs);

impl<'j> Stuck<'j> {
    fn new(jobs: &'j Jobs, why: String) -> Self {
        let mut stuck = jobs.stuck.lock().unwrap_or_else(PoisonError::into_inner);
        *stuck = (stuck.0 + 1, why);
        Self(jobs)
    }
}

impl Drop for Stuck<'_> {
    fn drop(&mut self) {
        self.0.stuck.lock().unwrap_or_else(PoisonError::into_inner).0 -= 1;
    }
}

/// Waits until a flag is raised.
async fn raised(flag: &watch::Sender<bool>) {
    _ = flag.subscribe().wait_for(|raised| *raised).await;
}

/// Whether a flag is raised.
fn is_raised(flag: &watch::Sender<bool>) -> bool {
    *flag.borrow()
}

/// Marks that a batch is run by one task only.
fn claim(batch: &Batch) -> bool {
    !batch.running.swap(true, Ordering::AcqRel)
}
