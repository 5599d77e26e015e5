//! A batch while the server runs: its record on disk, and what is counted in between.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::disk;
use super::files::is_id;
use super::record::{BatchRecord, PREFIX};

/// A batch.
#[derive(Debug)]
pub struct Batch {
    path: PathBuf,
    record: Mutex<BatchRecord>,
    /// Held while the record is written, so that no change is lost.
    writing: Mutex<()>,
    /// Whether somebody runs it.
    pub running: AtomicBool,
    /// Raised when it is given up.
    pub cancelled: watch::Sender<bool>,
    /// Answers so far.
    pub completed: AtomicU64,
    /// Requests without an answer so far.
    pub failed: AtomicU64,
    /// What was measured of it since the server started.
    pub pace: Mutex<Pace>,
}

impl Batch {
    /// A batch with this record, in this folder.
    pub fn new(dir: &Path, record: BatchRecord) -> Self {
        Self {
            path: dir.join(format!("{}.json", record.id)),
            completed: AtomicU64::new(record.completed),
            failed: AtomicU64::new(record.failed),
            record: Mutex::new(record),
            writing: Mutex::default(),
            running: AtomicBool::new(false),
            cancelled: watch::Sender::new(false),
            pace: Mutex::default(),
        }
    }

    /// Reads a batch; why it cannot be understood otherwise.
    pub fn read(dir: &Path, path: &Path) -> Result<Self, String> {
        let text = std::fs::read(path).map_err(|error| error.to_string())?;
        let record: BatchRecord = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let ids = [(&record.input_file_id), (&record.output_file_id), (&record.error_file_id)];
        if record.id != stem || !is_id(&record.id, PREFIX) || !ids.into_iter().all(|id| is_id(id, "file-")) {
            return Err("it names itself or its files in another way than it should".to_owned());
        }
        Ok(Self::new(dir, record))
    }

    /// Where its record is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its record, with what was counted since it was written.
    pub fn record(&self) -> BatchRecord {
        let mut record = self.record.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if !record.status.is_final() {
            record.completed = self.completed.load(Ordering::Relaxed);
            record.failed = self.failed.load(Ordering::Relaxed);
        }
        record
    }

    /// Changes the record, on disk and then here. Blocks for as long as the disk does.
    pub fn change(&self, change: impl Fn(&mut BatchRecord)) -> io::Result<BatchRecord> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let mut record = self.record();
        change(&mut record);
        disk::write_whole(&self.path, &serde_json::to_vec(&record)?)?;
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = record.clone();
        Ok(record)
    }

    /// Requests that have no result yet.
    pub fn left(&self) -> u64 {
        let record = self.record();
        record.total.saturating_sub(record.completed + record.failed)
    }

    /// What was measured.
    pub fn pace(&self) -> MutexGuard<'_, Pace> {
        self.pace.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How fast requests are answered, while any are.
#[derive(Debug, Default)]
pub struct Pace {
    /// Requests under way.
    pub running: u64,
    since: Option<Instant>,
    spent: Duration,
    done: u64,
    tokens: u64,
}

impl Pace {
    /// A request begins.
    pub fn begin(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    /// A request is over: with so many tokens of an answer, or given up.
    pub fn end(&mut self, now: Instant, tokens: Option<u64>) {
        self.running = self.running.saturating_sub(1);
        if let Some(tokens) = tokens {
            self.done += 1;
            self.tokens += tokens;
        }
        if self.running == 0
            && let Some(since) = self.since.take()
        {
            self.spent += now - since;
        }
    }

    fn busy(&self, now: Instant) -> Duration {
        self.spent + self.since.map_or(Duration::ZERO, |since| now - since)
    }

    /// Time that a request takes, with what runs beside it; `None` before one is done.
    pub fn per_request(&self, now: Instant) -> Option<Duration> {
        (self.done > 0).then(|| self.busy(now).div_f64(self.done as f64))
    }

    /// Tokens of answers a second.
    pub fn tokens_per_second(&self, now: Instant) -> Option<f64> {
        let busy = self.busy(now).as_secs_f64();
        (self.done > 0 && busy > 0.0).then(|| self.tokens as f64 / busy)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pace_counts_time_in_which_something_runs_once() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut pace = Pace::default();
        assert_eq!(pace.per_request(at(0)), None);
        pace.begin(at(0));
        pace.begin(at(2));
        pace.end(at(4), Some(30));
        assert_eq!(pace.per_request(at(6)), Some(Duration::from_secs(6)));
        pace.end(at(10), Some(10));
        // Nothing runs for ten seconds, and one is given up.
        pace.begin(at(20));
        pace.end(at(22), None);
        assert_eq!(pace.per_request(at(99)), Some(Duration::from_secs(6)));
        assert_eq!(pace.tokens_per_second(at(99)), Some(40.0 / 12.0));
    }
}
