//! `forebay pack`: a model in Forebay's own container, and back.

use std::time::{Duration, Instant};

use forebay_core::ByteSize;
use forebay_hub::pack::{self, Codes, ExpertBytes, PackError, PackOptions, Packed};
use forebay_kernels::Team;
use serde_json::json;

use crate::args::{CodesArg, PackArgs};
use crate::console::Output;
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::outputs::check_apart;
use crate::progress::{Progress, Unit};

/// Runs the verb.
pub fn run(args: &PackArgs) -> Result<(), Failure> {
    check_apart(&args.source, &args.out)?;
    let threads = args.threads.map_or_else(Team::default_threads, usize::from).max(1);
    let interrupt = Interrupt::install()?;
    let label = if args.to_reference { "unpacking" } else { "packing" };
    let progress = Progress::start(label, Unit::Bytes, 0);
    let started = Instant::now();
    let packed = interrupt.during(|cancel| {
        let codes = match args.codes {
            CodesArg::Auto => Codes::Auto,
            CodesArg::Raw => Codes::Raw,
            CodesArg::Coded => Codes::Coded,
        };
        let options = PackOptions { threads, codes, margin: args.margin.0, cancel };
        let mut update = |done, total| progress.update(done, total);
        match args.to_reference {
            false => pack::pack(&args.source, &args.out, options, &mut update),
            true => pack::unpack(&args.source, &args.out, options, &mut update),
        }
    });
    drop(progress);
    let (packed, time) = (packed?, started.elapsed());
    let mut out = Output::new();
    match args.json {
        true => out.json(&json!({
            "path": args.out.display().to_string(),
            "bytes": packed.total,
            "bytes_written": packed.bytes,
            "files_written": packed.files,
            "files_kept": packed.kept,
            "source_bytes": packed.source,
            "experts": packed.experts.all,
            "experts_coded": packed.experts.coded,
            "expert_bytes": packed.experts.bytes,
            "expert_bytes_raw": packed.experts.raw_bytes,
            "seconds": time.as_secs_f64(),
        })),
        false => out.write(&summary(args, packed, time)),
    }
}

fn summary(args: &PackArgs, packed: Packed, time: Duration) -> String {
    let (dir, total) = (args.out.display(), ByteSize(packed.total));
    let sizes = sizes(args, &packed);
    match (packed.files, packed.kept) {
        (0, files) => format!("{dir}: complete already, {total} in {files} weight files\n{sizes}"),
        (files, kept) => {
            let bytes = ByteSize(packed.bytes);
            let rate = ByteSize((packed.bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            let kept = if kept > 0 { format!("; {kept} were there") } else { String::new() };
            format!(
                "{dir}: wrote {bytes} in {files} weight files, {rate}/s{kept}\n{sizes}try: forebay inspect {dir}\n"
            )
        }
    }
}

/// What coding brought, if it was asked for.
fn sizes(args: &PackArgs, packed: &Packed) -> String {
    let Packed { total, source, experts: ExpertBytes { all, coded, bytes, raw_bytes }, .. } = *packed;
    let share = |part: u64, whole: u64| 100.0 * part as f64 / whole.max(1) as f64;
    match (args.to_reference, coded) {
        (true, _) => String::new(),
        (false, 0) if args.codes == CodesArg::Raw => String::new(),
        (false, 0) => format!("none of {all} experts would be smaller coded; they are raw\n"),
        (false, _) => format!(
            "{coded} of {all} experts coded: {} instead of {} ({:.1} %); the container has {:.1} % of the bytes that \
             it was packed from\n",
            ByteSize(bytes),
            ByteSize(raw_bytes),
            share(bytes, raw_bytes),
            share(total, source),
        ),
    }
}

impl From<PackError> for Failure {
    fn from(error: PackError) -> Self {
        let exit = match error {
            PackError::Cancelled => return Self::Interrupted,
            PackError::Snapshot(_) | PackError::Native(_) | PackError::Layout(_) => Exit::Model,
            PackError::Packed { .. } | PackError::NotPacked { .. } | PackError::NotCodable { .. } => {
                Exit::Usage
            }
            PackError::Occupied { .. } | PackError::Other { .. } => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
