//! `forebay verify`: whether a folder holds a whole model.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use forebay_core::ByteSize;
use forebay_hub::digest::Digest;
use forebay_hub::digests::DIGESTS;
use forebay_hub::known::{Known, KnownError, Origin};
use forebay_hub::output::folder::files;
use forebay_hub::pack::verify_native;
use forebay_hub::verify::hash::{HashError, compare, hash_all};
use forebay_hub::verify::{Report, census};
use forebay_kernels::Team;
use forebay_store::native::Native;
use serde_json::{Value, json};

use crate::args::VerifyArgs;
use crate::console::{self, Output};
use crate::dirs;
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::{Progress, Unit};

/// Problems shown as text; `--json` has all.
const SHOWN: usize = 200;
/// More threads than this read no faster from one disk.
const MOST_THREADS: usize = 8;

/// Runs the verb.
pub fn run(args: &VerifyArgs) -> Result<(), Failure> {
    if Native::is_at(&args.dir) {
        return container(args);
    }
    let progress = Progress::start("reading headers", Unit::Bytes, 0);
    let mut report = census(&args.dir);
    drop(progress);
    let hashed = match args.hash || args.record {
        // Where there is no folder, there is nothing to read.
        true if !report.files.is_empty() => Some(hash(args, &mut report)?),
        _ => None,
    };
    let mut out = Output::new();
    match args.json {
        true => {
            let mut value = report.json();
            value["hash"] = hashed.as_ref().map_or(Value::Null, Hashed::json);
            out.json(&value)?;
        }
        false => {
            let mut text = describe(&report);
            if let Some(hashed) = &hashed {
                row(&mut text, "digests", hashed.sentence());
            }
            text.push_str(&verdict(&report, hashed.is_some()));
            out.write(&text)?;
        }
    }
    match report.is_sound() {
        true => Ok(()),
        false => Err(Failure::Reported { exit: Exit::Model }),
    }
}

/// A Forebay container says itself what it should be.
fn container(args: &VerifyArgs) -> Result<(), Failure> {
    if args.record {
        return Err(Failure::usage(format!(
            "{} is a Forebay container, which carries the checksums of its bytes; leave out --record",
            args.dir.display()
        )));
    }
    let interrupt = Interrupt::install()?;
    let progress = Progress::start("reading", Unit::Bytes, 0);
    let findings = interrupt.during(|cancel| {
        verify_native(&args.dir, args.hash, cancel, &mut |done, total| progress.update(done, total))
    });
    drop(progress);
    let findings = findings.ok_or(Failure::Interrupted)?;
    let mut out = Output::new();
    match args.json {
        true => out.json(&json!({
            "folder": args.dir.display().to_string(),
            "container": true,
            "hashed": args.hash,
            "sound": findings.is_empty(),
            "problems": findings.iter().map(ToString::to_string).collect::<Vec<_>>(),
        }))?,
        false => {
            let mut text = String::new();
            row(&mut text, "container", args.dir.display());
            for finding in findings.iter().take(SHOWN) {
                row(&mut text, "bad", finding);
            }
            if findings.len() > SHOWN {
                row(&mut text, "", format!("and {} more; --json lists all", findings.len() - SHOWN));
            }
            let verdict = match (findings.len(), args.hash) {
                (0, true) => "whole: every byte is what was packed".to_owned(),
                (0, false) => "whole, by its header and sizes (--hash checks every byte)".to_owned(),
                (count, _) => counted(count),
            };
            row(&mut text, "verdict", verdict);
            out.write(&text)?;
        }
    }
    if findings.is_empty() { Ok(()) } else { Err(Failure::Reported { exit: Exit::Model }) }
}

/// What became of the bytes.
struct Hashed {
    origins: BTreeSet<Origin>,
    files: usize,
    bytes: u64,
    unchecked: usize,
    recorded: bool,
}

impl Hashed {
    fn sentence(&self) -> String {
        let Self { files, unchecked, .. } = self;
        let bytes = ByteSize(self.bytes);
        let rest = match unchecked {
            0 => String::new(),
            n => format!("; {n} other files have no recorded digest and were not read"),
        };
        if self.recorded {
            return format!("recorded in {DIGESTS}: {files} files, {bytes}");
        }
        let origins: Vec<&str> = self.origins.iter().map(|origin| source(*origin)).collect();
        format!("{files} files, {bytes}, compared with {}{rest}", origins.join(" and "))
    }

    fn json(&self) -> Value {
        json!({
            "origins": self.origins.iter().map(|origin| origin.word()).collect::<Vec<_>>(),
            "files": self.files,
            "bytes": self.bytes,
            "files_without_digest": self.unchecked,
            "recorded": self.recorded,
        })
    }
}

/// What the bytes were compared with.
fn source(origin: Origin) -> &'static str {
    match origin {
        Origin::Hub => "what the hub promised",
        Origin::Recorded => DIGESTS,
        Origin::Cache => "the names of their blobs",
        Origin::Published => "the published digests of the MTP shards",
    }
}

/// Reads every byte that a digest is known of, or all of them to record theirs.
fn hash(args: &VerifyArgs, report: &mut Report) -> Result<Hashed, Failure> {
    let Known { digests: wanted, origins } = Known::of_folder(&args.dir).map_err(HashError::from)?;
    if origins.is_empty() && !args.record {
        return Err(Failure::usage(format!(
            "{} has no recorded digests (of `forebay get`, or {DIGESTS}), so there is nothing to compare its bytes with; if you trust them as \
             they are, record them with --record",
            args.dir.display()
        )));
    }
    let record = args.record && origins.is_empty();
    if record && !report.is_sound() {
        let first = report.problems.first().map_or("", |problem| &problem.message);
        return Err(Failure::new(
            Exit::Model,
            format!(
                "digests of an incomplete model are not recorded: {first}; `forebay verify` lists all that is wrong"
            ),
        ));
    }
    if args.record && !record {
        console::note("digests are known already; the files are compared with them, and none are recorded");
    }
    let threads = args.threads.map_or_else(|| Team::default_threads().min(MOST_THREADS), usize::from);
    let interrupt = Interrupt::install()?;
    let progress = Progress::start("hashing", Unit::Bytes, 0);
    let found = interrupt.during(|cancel| {
        let wanted = (!record).then_some(&wanted);
        hash_all(&args.dir, wanted, &state_path(&args.dir), threads, cancel, &mut |done, total| {
            progress.update(done, total);
        })
    });
    drop(progress);
    let found = found?;
    if !record {
        compare(&wanted, &found, report);
    }
    if record && report.is_sound() {
        found.write(&args.dir).map_err(|error| Failure::runtime(error.to_string()))?;
    }
    let all = files(&args.dir).map_err(HashError::from)?;
    let unchecked = all.iter().filter(|(name, _)| !found.0.contains_key(name)).count();
    Ok(Hashed {
        origins,
        files: found.0.len(),
        bytes: found.0.values().map(|digest| digest.size).sum(),
        unchecked,
        recorded: record && report.is_sound(),
    })
}

/// Where it is remembered what was hashed of this folder.
fn state_path(dir: &Path) -> PathBuf {
    let real = std::fs::canonicalize(dir).unwrap_or_else(|_| dir.to_owned());
    let name = Digest::sha256_of(real.as_os_str().as_encoded_bytes());
    let cache = dirs::cache().unwrap_or_else(dirs::temporary_cache);
    cache.join("verify").join(format!("{}.json", &name.hex()[..32]))
}

fn row(text: &mut String, name: &str, value: impl std::fmt::Display) {
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{name:<20}{}", console::one_line(&value.to_string()));
}

/// The census as text.
pub fn describe(report: &Report) -> String {
    let mut text = String::new();
    row(&mut text, "model", report.dir.display());
    let (files, bytes) = (report.files.len(), ByteSize(report.bytes()));
    row(&mut text, "files", format!("{files}, {bytes}; {} tensors", report.tensors));
    let families = report.families();
    if families.len() > 1 {
        let family = |(name, (files, bytes)): (&String, &(usize, u64))| {
            format!("{files} {name}-*, {}", ByteSize(*bytes))
        };
        row(&mut text, "", families.iter().map(family).collect::<Vec<_>>().join("; "));
    }
    let (resident, experts) = (ByteSize(report.resident_bytes), ByteSize(report.expert_bytes));
    row(&mut text, "weights", format!("{resident} stay in memory, {experts} are experts"));
    let list = |formats: &BTreeMap<String, usize>| {
        formats.iter().map(|(name, count)| format!("{name} x {count}")).collect::<Vec<_>>().join(", ")
    };
    for (role, formats) in &report.formats {
        row(&mut text, &format!("  {role}"), list(formats));
    }
    if let Some(mtp) = &report.mtp {
        let widths = match mtp.dense.is_empty() && mtp.experts.is_empty() {
            true => mtp.state.to_string(),
            false => format!("dense {}; experts {}", list(&mtp.dense), list(&mtp.experts)),
        };
        row(&mut text, "MTP layer", format!("{}: {widths}", mtp.word()));
    }
    if let Some(sparse) = &report.sparse_attention {
        row(&mut text, "sparse attention", sparse);
    }
    for note in &report.notes {
        row(&mut text, "note", note);
    }
    text
}

/// All that is wrong, or that nothing is.
pub fn verdict(report: &Report, hashed: bool) -> String {
    let mut text = String::new();
    for problem in report.problems.iter().take(SHOWN) {
        row(&mut text, &format!("bad: {}", problem.kind), &problem.message);
    }
    let count = report.problems.len();
    if count > SHOWN {
        row(&mut text, "", format!("and {} more; --json lists all", count - SHOWN));
    }
    let sound = match hashed {
        true => "whole: every tensor is there, and every byte that was recorded",
        false => "whole: every tensor is there, by the headers (--hash checks the bytes)",
    };
    row(&mut text, "verdict", if count == 0 { sound.to_owned() } else { counted(count) });
    text
}

/// `1 problem`, `2 problems`.
fn counted(problems: usize) -> String {
    format!("{problems} problem{}", if problems == 1 { "" } else { "s" })
}

impl From<HashError> for Failure {
    fn from(error: HashError) -> Self {
        let exit = match error {
            HashError::Cancelled => return Self::Interrupted,
            HashError::Known(KnownError::Digests(_) | KnownError::Record(_)) => Exit::Model,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
