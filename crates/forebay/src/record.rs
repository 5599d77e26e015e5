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

/// Makes a file that a run writes. Not in the model's folder: a mistyped name could empty a part of the model.
pub fn create_outside(path: &Path, model: &Path, what: &str) -> Result<File, Failure> {
    let failed = |why: &str| {
        Failure::usage(format!("cannot write {what} {}: {why}; choose another path", path.display()))
    };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let real = std::fs::canonicalize(parent).ok().zip(std::fs::canonicalize(model).ok());
    if real.is_some_and(|(parent, model)| parent == model) {
        return Err(failed("that is in the model's folder"));
    }
    // Opening a pipe would wait for its other end.
    let pipe = |found: std::fs::Metadata| !found.is_file() && !path.starts_with("/dev");
    if std::fs::metadata(path).is_ok_and(pipe) {
        return Err(failed("it is no regular file"));
    }
    File::create(path).map_err(|error| failed(&error.to_string()))
}

impl Record {
    /// Makes the file, anywhere but in the model's folder.
    pub fn create(path: &Path, model: &Path) -> Result<Self, Failure> {
        let file = create_outside(path, model, "the record")?;
        Ok(Self { path: path.to_owned(), out: BufWriter::new(file), passes: 0, failed: None })
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
