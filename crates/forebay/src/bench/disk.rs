//! `forebay bench io`: reads of the size of an expert from random places, in several ways and in turns.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_core::ByteSize;
use forebay_engine::{EngineOptions, ModelFacts};
use forebay_io::probe::{ProbeConfig, ProbeError, Way, probe};
use forebay_io::{Access, Backend};
use forebay_model::Snapshot;
use serde_json::{Value, json};

use super::measure::median;
use super::show::Table;
use crate::args::BenchIoArgs;
use crate::console::{self, Output};
use crate::failure::Failure;
use crate::progress::{Progress, Unit};
use crate::settings;

/// An expert of GLM-5.2 in int4 with a scale per row, scales included.
const USUAL_BLOCK: usize = 18_915_328;
/// Largest block: memory is needed for as many as are read at a time.
const MAX_BLOCK: u64 = 256 << 20;
/// Bytes of one sample, at most.
const SAMPLE_BYTES: u64 = 1 << 30;

/// What is read.
pub struct Target {
    /// The files.
    pub paths: Vec<PathBuf>,
    /// Bytes of one read.
    pub block: usize,
}

impl Target {
    /// The shards of a model, in blocks as large as its largest expert.
    pub fn of_model(dir: &Path) -> Result<Self, Failure> {
        Ok(Self::of(&Snapshot::open(dir, EngineOptions::default().snapshot_options())?))
    }

    /// The same of a model that is open.
    pub fn of(snapshot: &Snapshot) -> Self {
        let largest = ModelFacts::of(snapshot).largest_expert as usize;
        let paths = snapshot.catalog.shards().iter().map(|shard| shard.path.clone()).collect();
        Self { paths, block: if largest > 0 { largest } else { USUAL_BLOCK } }
    }
}

/// One way to read, measured several times.
pub struct Line {
    /// The way.
    pub way: Way,
    /// Bytes per second, by round.
    pub rates: Vec<f64>,
    /// Seconds of a read, by round: the middle one.
    p50: Vec<f64>,
    /// The same: 99 of 100 are not slower.
    p99: Vec<f64>,
}

impl Line {
    /// A way with the bytes per second of each round, for tests of what is made of them.
    #[cfg(test)]
    pub fn measured(way: Way, rates: Vec<f64>) -> Self {
        Self { way, rates, p50: Vec::new(), p99: Vec::new() }
    }

    /// Bytes per second, in the middle round.
    pub fn rate(&self) -> f64 {
        median(&self.rates)
    }
}

/// How long measuring goes on.
#[derive(Clone, Copy)]
pub struct Effort {
    /// How often everything is measured, in turns.
    pub rounds: usize,
    /// Time of one sample, about.
    pub sample: Duration,
    /// No sample starts later than this.
    pub limit: Duration,
}

/// Measures every way once a round, so that all meet the same disturbances. Ways that were not measured, for want
/// of time or because the system does not have them, are left out. Also returns what the user should know.
pub fn measure(target: &Target, ways: &[Way], effort: Effort) -> Result<(Vec<Line>, Vec<String>), Failure> {
    let line = |way: &Way| Line { way: *way, rates: Vec::new(), p50: Vec::new(), p99: Vec::new() };
    let mut lines: Vec<Line> = ways.iter().map(line).collect();
    let mut notes: Vec<String> = Vec::new();
    let progress = Progress::start("measuring", Unit::Share, 0);
    let started = Instant::now();
    let total = (effort.rounds * lines.len()) as u64;
    let sizes = target.paths.iter().filter_map(|path| std::fs::metadata(path).ok());
    // A small file says nothing more when it is read many times.
    let bytes = sizes.map(|facts| facts.len()).sum::<u64>().saturating_mul(4).clamp(1, SAMPLE_BYTES);
    let mut seed = 0;
    for _ in 0..effort.rounds {
        for line in &mut lines {
            if started.elapsed() > effort.limit {
                break;
            }
            seed += 1;
            progress.update(seed, total);
            let (way, block) = (line.way, target.block);
            let config = ProbeConfig { way, block, bytes, time: effort.sample, seed };
            let found = probe(&target.paths, &config).map_err(failure)?;
            for note in found.notes {
                if !notes.contains(&note) {
                    notes.push(note);
                }
            }
            if found.backend == way.backend {
                line.rates.push(found.bytes as f64 / found.elapsed.as_secs_f64().max(1e-9));
                line.p50.push(found.p50.as_secs_f64());
                line.p99.push(found.p99.as_secs_f64());
            }
        }
    }
    lines.retain(|line| !line.rates.is_empty());
    Ok((lines, notes))
}

fn failure(error: ProbeError) -> Failure {
    match error {
        ProbeError::Empty | ProbeError::Open(_) => Failure::usage(error.to_string()),
        _ => Failure::runtime(error.to_string()),
    }
}

/// Runs the verb.
pub fn run(args: &BenchIoArgs) -> Result<(), Failure> {
    let mut target = match &args.file {
        Some(file) => Target { paths: vec![file.clone()], block: USUAL_BLOCK },
        None => Target::of_model(&settings::model_dir(args.model.as_deref())?)?,
    };
    if let Some(block) = args.block {
        if block.0 == 0 || block.0 > MAX_BLOCK {
            return Err(Failure::usage(format!("--block is from 1 byte to {}", ByteSize(MAX_BLOCK))));
        }
        target.block = block.0 as usize;
    }
    let ways = args.depth.iter().flat_map(|depth| {
        [Access::Direct, Access::Uncached].into_iter().flat_map(move |access| {
            [Backend::Pool, Backend::Uring].map(|backend| Way { backend, access, depth: usize::from(*depth) })
        })
    });
    let ways: Vec<Way> = ways.collect();
    let sample = Duration::from_millis(args.sample.into());
    let effort = Effort { rounds: usize::from(args.rounds), sample, limit: Duration::MAX };
    let started = Instant::now();
    let (lines, notes) = measure(&target, &ways, effort)?;
    let elapsed = started.elapsed();
    let mut out = Output::new();
    if args.json {
        return out.json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "block_bytes": target.block,
            "files": target.paths.len(),
            "rounds": args.rounds,
            "elapsed_s": elapsed.as_secs_f64(),
            "lines": lines.iter().map(line_json).collect::<Vec<_>>(),
            "notes": notes,
        }));
    }
    for note in &notes {
        console::note(note);
    }
    out.write(&text(&target, &lines, args.rounds, elapsed))
}

fn line_json(line: &Line) -> Value {
    let rates: Vec<f64> = line.rates.iter().map(|rate| rate / 1e9).collect();
    json!({
        "backend": line.way.backend.to_string(),
        "access": line.way.access.to_string(),
        "depth": line.way.depth,
        "gb_s": {"median": median(&rates), "rounds": rates},
        "p50_s": median(&line.p50),
        "p99_s": median(&line.p99),
    })
}

fn text(target: &Target, lines: &[Line], rounds: u16, elapsed: Duration) -> String {
    let best = lines.iter().map(Line::rate).fold(0.0, f64::max);
    let mut table = Table::new(&["depth", "access", "backend", "GB/s", "% best", "p50 ms", "p99 ms"]);
    table.text_columns = 1..3;
    for line in lines {
        let digits = |value: f64, digits: usize| format!("{value:.digits$}");
        table.row([
            line.way.depth.to_string(),
            line.way.access.to_string(),
            line.way.backend.to_string(),
            digits(line.rate() / 1e9, 3),
            digits(100.0 * line.rate() / best, 1),
            digits(1e3 * median(&line.p50), 2),
            digits(1e3 * median(&line.p99), 2),
        ]);
    }
    format!(
        "reads of {} at random places of {} file{}; medians of {rounds} round{}, {:.0} s in all\n\
         uncached reads go through the page cache, which was emptied of what they read\n{}",
        ByteSize(target.block as u64),
        target.paths.len(),
        if target.paths.len() == 1 { "" } else { "s" },
        if rounds == 1 { "" } else { "s" },
        elapsed.as_secs_f64(),
        table.text(),
    )
}
