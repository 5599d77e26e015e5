//! `forebay tune`: how this machine reads this model best, measured once and kept.
//!
//! The result lies in the user's cache folder, one file per model folder, beside the identity of machine, disk and
//! files it was measured with: a result with another identity is not used.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use forebay_core::coded::{CodedView, encode};
use forebay_core::{ByteSize, Format, PanelShape};
use forebay_engine::EngineOptions;
use forebay_io::file::read_regular;
use forebay_io::probe::Way;
use forebay_io::{Access, Backend, Rates};
use forebay_kernels::{Buffer, Kernels, Team, limits};
use forebay_model::Snapshot;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::args::TuneArgs;
use crate::bench::disk::{Effort, Line, Target, measure};
use crate::bench::median;
use crate::bundled;
use crate::console::{self, Output};
use crate::dirs;
use crate::doctor::Machine;
use crate::failure::{Exit, Failure};
use crate::settings;

/// What a stored result looks like; another version is not used.
const VERSION: u64 = 1;
/// More than any stored result has: it takes half a kilobyte.
const MAX_BYTES: u64 = 64 << 10;
/// Everything together takes less than half a minute.
const EFFORT: Effort =
    Effort { rounds: 3, sample: Duration::from_millis(250), limit: Duration::from_secs(20) };
/// A way that is this little slower than the best, and simpler, is taken.
const CLOSE: f64 = 0.97;
/// Bytes that are read to measure memory: much more than any cache.
const MEMORY: usize = 256 << 20;
/// How often memory and the decoder are measured.
const MEMORY_ROUNDS: usize = 5;
/// Rows and columns of the matrix that is decoded to measure that.
const DECODED_ROWS: usize = 1024;

/// What was measured, and what follows.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Tuned {
    /// The way to read experts.
    pub way: Way,
    /// What the machine delivers, that way.
    pub rates: Rates,
}

/// Runs the verb.
pub fn run(args: &TuneArgs) -> Result<(), Failure> {
    let dir = settings::model_dir(args.model.as_deref())?;
    let target = Target::of_model(&dir)?;
    let identity = identity(&target, &Machine::read());
    let file = place(&dir);
    let tuned = if args.show {
        let stored = read(&file);
        stored.as_ref().and_then(|stored| parse(stored, &identity)).ok_or_else(|| {
            let shown = dir.display();
            let why = match stored {
                Some(_) => "this machine, the disk or the files changed since",
                None => "nothing was measured yet for",
            };
            Failure::new(Exit::Runtime, format!("{why} {shown}; run: forebay tune --model {shown}"))
        })?
    } else {
        let tuned = tune(&target)?;
        keep(&tuned, &file, &identity);
        tuned
    };
    let mut out = Output::new();
    match args.json {
        true => out.json(&to_json(&tuned, &identity)),
        false => out.write(&text(&tuned, target.block)),
    }
}

/// What was measured for a model, if it still holds.
pub fn stored(snapshot: &Snapshot) -> Option<Tuned> {
    // First: most folders have none, and asking for the times of hundreds of files takes a moment.
    let stored = read(&place(&snapshot.dir))?;
    parse(&stored, &identity(&Target::of(snapshot), &Machine::read()))
}

/// Measures a model and keeps the result.
pub fn measure_now(snapshot: &Snapshot) -> Result<Tuned, Failure> {
    let target = Target::of(snapshot);
    let tuned = tune(&target)?;
    keep(&tuned, &place(&snapshot.dir), &identity(&target, &Machine::read()));
    Ok(tuned)
}

impl Tuned {
    /// Reads experts like this where nothing else was asked for, and expects what was measured.
    pub fn apply(&self, options: &mut EngineOptions) {
        let Way { backend, access, depth } = self.way;
        options.io.backend.get_or_insert(backend);
        options.io.depth.get_or_insert(depth);
        // Past the page cache is the default as well, but only while something is read twice.
        if access != Access::Direct {
            options.io.access.get_or_insert(access);
        }
        options.rates.disk = options.rates.disk.or(self.rates.disk);
        options.rates.memory = options.rates.memory.or(self.rates.memory);
        options.rates.decode = options.rates.decode.or(self.rates.decode);
    }
}

/// A way to read in words: `direct, 8 reads at a time, by worker threads`.
pub fn way_text(way: Way) -> String {
    let backend = match way.backend {
        Backend::Pool => "worker threads",
        Backend::Uring => "io_uring",
    };
    format!("{}, {} reads at a time, by {backend}", way.access, way.depth)
}

/// What is in a file of results; `None` if it cannot be read, or is none.
fn read(file: &Path) -> Option<Value> {
    serde_json::from_slice(&read_regular(file, MAX_BYTES).ok()?).ok()
}

/// Writes a result down; a cache folder that cannot be written only costs measuring again.
fn keep(tuned: &Tuned, file: &Path, identity: &Value) {
    let bytes = format!("{}\n", to_json(tuned, identity));
    if let Err(cause) = bundled::replace(file, bytes.as_bytes()) {
        console::note(&format!(
            "the result cannot be kept in {}: {cause}; set FOREBAY_CACHE to a folder that can be written",
            file.display()
        ));
    }
}

/// Measures.
fn tune(target: &Target) -> Result<Tuned, Failure> {
    let way = |backend, access, depth| Way { backend, access, depth };
    let ways = [
        way(Backend::Pool, Access::Direct, 1),
        way(Backend::Pool, Access::Direct, 2),
        way(Backend::Pool, Access::Direct, 4),
        way(Backend::Pool, Access::Direct, 8),
        way(Backend::Pool, Access::Direct, 16),
        way(Backend::Uring, Access::Direct, 2),
        way(Backend::Uring, Access::Direct, 8),
        way(Backend::Pool, Access::Uncached, 4),
        way(Backend::Pool, Access::Uncached, 8),
    ];
    let (lines, notes) = measure(target, &ways, EFFORT)?;
    for note in &notes {
        console::note(note);
    }
    let best = pick(&lines).ok_or_else(|| {
        Failure::runtime(
            "nothing could be read in the time there is; look at the disk with: forebay bench io",
        )
    })?;
    Ok(Tuned { way: best.way, rates: Rates { disk: Some(best.rate()), memory: memory(), decode: decode() } })
}

/// The simplest of the ways that are about as fast as the fastest: past the page cache, with worker threads, with
/// few reads at a time.
fn pick(lines: &[Line]) -> Option<&Line> {
    let best = lines.iter().map(Line::rate).fold(0.0, f64::max);
    let close = lines.iter().filter(|line| line.rate() >= CLOSE * best);
    close.min_by_key(|line| {
        let Way { backend, access, depth } = line.way;
        (access != Access::Direct, backend != Backend::Pool, depth)
    })
}

/// Bytes per second that all compute threads read from memory.
fn memory() -> Option<f64> {
    let team = Team::new(Team::default_threads()).ok()?;
    let mut bytes = Buffer::zeroed(MEMORY)?;
    bytes.fill(1);
    let kernels = Kernels::detect();
    let rates = (0..MEMORY_ROUNDS).map(|_| {
        let started = Instant::now();
        std::hint::black_box(limits::read(kernels, &team, &bytes));
        MEMORY as f64 / started.elapsed().as_secs_f64()
    });
    Some(median(&rates.collect::<Vec<_>>()))
}

/// Bytes per second of int4 panels that one thread decodes.
fn decode() -> Option<f64> {
    let shape = PanelShape::new(Format::Int4Row, DECODED_ROWS, DECODED_ROWS)?;
    let mut panels = vec![0; shape.bytes()];
    // Codes that are as uneven as those of weights: sums of random numbers.
    let mut state = 1u64;
    let mut code = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (0..5).map(|i| (state >> (24 + 8 * i)) as u8 & 3).sum::<u8>()
    };
    panels.iter_mut().for_each(|byte| *byte = code() | code() << 4);
    let coded = encode(&shape, &panels)?;
    let view = CodedView::new(shape, &coded).ok()?;
    let kernels = Kernels::detect();
    let rates = (0..MEMORY_ROUNDS).map(|_| {
        let started = Instant::now();
        kernels.decode_panels(&view, 0..shape.panels(), std::hint::black_box(&mut panels));
        shape.bytes() as f64 / started.elapsed().as_secs_f64()
    });
    Some(median(&rates.collect::<Vec<_>>()))
}

/// The file that keeps the result for a model folder.
fn place(dir: &Path) -> PathBuf {
    let dir = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let name = bundled::hex(&Sha256::digest(dir.as_os_str().as_encoded_bytes())[..8]);
    dirs::cache().unwrap_or_else(dirs::temporary_cache).join("tune").join(format!("{name}.json"))
}

/// What a result depends on: the machine, the disk, and names, sizes and times of the files.
fn identity(target: &Target, machine: &Machine) -> Value {
    let mut digest = Sha256::new();
    let mut bytes = 0;
    for path in &target.paths {
        let facts = std::fs::metadata(path).ok();
        let changed = facts.as_ref().and_then(|facts| facts.modified().ok());
        let changed = changed.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
        let size = facts.map_or(0, |facts| facts.len());
        bytes += size;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        digest.update(format!("{name}\0{size}\0{}\0", changed.unwrap_or_default().as_nanos()));
    }
    json!({
        "processor": machine.processor,
        "threads": Team::default_threads(),
        "memory": machine.memory.total,
        "device": target.paths.first().and_then(|path| device(path)),
        "block_bytes": target.block,
        "files": target.paths.len(),
        "file_bytes": bytes,
        "files_digest": bundled::hex(&digest.finalize()),
    })
}

/// The number of the disk that a file lies on.
#[cfg(unix)]
fn device(path: &Path) -> Option<u64> {
    std::fs::metadata(path).ok().map(|facts| std::os::unix::fs::MetadataExt::dev(&facts))
}

#[cfg(not(unix))]
fn device(_path: &Path) -> Option<u64> {
    None
}

fn to_json(tuned: &Tuned, identity: &Value) -> Value {
    json!({
        "version": VERSION,
        "backend": tuned.way.backend.to_string(),
        "access": tuned.way.access.to_string(),
        "depth": tuned.way.depth,
        "disk_bytes_per_second": tuned.rates.disk,
        "memory_bytes_per_second": tuned.rates.memory,
        "decoded_bytes_per_second_and_core": tuned.rates.decode,
        "measured_with": identity,
    })
}

/// `None` for what is of another version, was measured with something else, or makes no sense.
fn parse(stored: &Value, identity: &Value) -> Option<Tuned> {
    if stored["version"].as_u64() != Some(VERSION) || stored["measured_with"] != *identity {
        return None;
    }
    let named = |value: &Value, name: String| value.as_str() == Some(&name);
    let backends = [Backend::Pool, Backend::Uring];
    let accesses = [Access::Direct, Access::Uncached, Access::Buffered];
    let way = Way {
        backend: backends.into_iter().find(|backend| named(&stored["backend"], backend.to_string()))?,
        access: accesses.into_iter().find(|access| named(&stored["access"], access.to_string()))?,
        depth: stored["depth"].as_u64().filter(|depth| (1..=64).contains(depth))? as usize,
    };
    let rate = |name: &str| stored[name].as_f64().filter(|rate| *rate > 0.0);
    let rates = Rates {
        disk: rate("disk_bytes_per_second"),
        memory: rate("memory_bytes_per_second"),
        decode: rate("decoded_bytes_per_second_and_core"),
    };
    Some(Tuned { way, rates })
}

fn text(tuned: &Tuned, block: usize) -> String {
    let Tuned { way, rates } = tuned;
    let rate = |rate: Option<f64>| match rate {
        Some(rate) => format!("{}/s", ByteSize(rate as u64)),
        None => "not measured".to_owned(),
    };
    format!(
        "experts    {}\ndisk       {} in reads of {}\nmemory     {}\ndecoder    {} of int4 codes on one core\n",
        way_text(*way),
        rate(rates.disk),
        ByteSize(block as u64),
        rate(rates.memory),
        rate(rates.decode),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tuned() -> Tuned {
        let way = Way { backend: Backend::Uring, access: Access::Direct, depth: 4 };
        Tuned { way, rates: Rates { disk: Some(2.5e9), memory: None, decode: Some(4e9) } }
    }

    #[test]
    fn a_result_is_read_back_only_where_it_was_measured() {
        let here = json!({"processor": "a", "device": 1});
        let stored = to_json(&tuned(), &here);
        assert_eq!(parse(&stored, &here), Some(tuned()));
        assert_eq!(parse(&stored, &json!({"processor": "b", "device": 1})), None);
        for (field, value) in
            [("version", json!(2)), ("backend", json!("x")), ("access", json!(1)), ("depth", json!(0))]
        {
            let mut stored = stored.clone();
            stored[field] = value;
            assert_eq!(parse(&stored, &here), None, "{field}");
        }
    }

    #[test]
    fn the_identity_follows_the_files() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("m.safetensors");
        std::fs::write(&path, [1, 2, 3]).unwrap();
        let target = Target { paths: vec![path.clone()], block: 10 };
        let machine = Machine::default();
        let before = identity(&target, &machine);
        assert_eq!(before, identity(&target, &machine));
        std::fs::write(&path, [1, 2, 3, 4]).unwrap();
        assert_ne!(before, identity(&target, &machine));
        assert_ne!(place(dir.path()), place(&dir.path().join("..")));
    }

    #[test]
    fn simple_ways_win_when_they_are_about_as_fast() {
        let line = |backend, access, depth, rate| Line::measured(Way { backend, access, depth }, vec![rate]);
        let lines = [
            line(Backend::Pool, Access::Direct, 1, 50.0),
            line(Backend::Pool, Access::Direct, 4, 98.0),
            line(Backend::Pool, Access::Direct, 8, 99.0),
            line(Backend::Uring, Access::Direct, 2, 100.0),
            line(Backend::Pool, Access::Uncached, 4, 99.5),
        ];
        let picked = |lines: &[Line]| pick(lines).map(|line| line.way);
        assert_eq!(picked(&lines), Some(lines[1].way));
        assert_eq!(picked(&lines[2..]), Some(lines[2].way));
        assert_eq!(picked(&lines[3..]), Some(lines[3].way));
        assert_eq!(picked(&[]), None);
        let fast =
            [line(Backend::Pool, Access::Direct, 4, 90.0), line(Backend::Pool, Access::Uncached, 4, 100.0)];
        assert_eq!(picked(&fast), Some(fast[1].way));
    }
}
