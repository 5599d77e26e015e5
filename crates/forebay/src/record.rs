//! `--record`: what every pass of a run cost, as JSON lines.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use forebay_engine::PassStats;
use serde_json::{Value, json};

use crate::closing;
use crate::failure::Failure;
use crate::report;

/// A file that is being written.
pub struct Record {
    path: PathBuf,
    out: BufWriter<File>,
    passes: u64,
    /// The first thing that went wrong; nothing is written after it.
    failed: Option<std::io::Error>,
}

impl Record {
    /// Writes to `file`, which lies at `path`.
    pub fn new(file: File, path: &Path) -> Self {
        Self { path: path.to_owned(), out: BufWriter::new(file), passes: 0, failed: None }
    }

    /// A pass is over.
    pub fn pass(&mut self, stats: &PassStats) {
        let line = json!({
            "schema": 1,
            "kind": "pass",
            "pass": self.passes,
            "rows": stats.rows,
            "time": closing::pass_time_json(stats),
            "experts": report::experts_json(&stats.experts),
        });
        self.passes += 1;
        self.write(&line);
    }

    /// The run is over.
    pub fn finish(mut self, run: &Value) -> Result<(), Failure> {
        self.write(&json!({ "schema": 1, "kind": "run", "run": run }));
        let flushed = self.out.flush();
        match self.failed.or(flushed.err()) {
            None => Ok(()),
            Some(error) => Err(Failure::runtime(format!(
                "the record {} is incomplete: {error}; free some space or choose another path",
                self.path.display()
            ))),
        }
    }

    fn write(&mut self, line: &Value) {
        if self.failed.is_none() {
            self.failed = writeln!(self.out, "{line}").err();
        }
    }
}
