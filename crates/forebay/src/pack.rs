//! `forebay pack`: a model in Forebay's own container, and back.

use std::time::{Duration, Instant};

use forebay_core::ByteSize;
use forebay_hub::pack::{self, PackError, PackOptions, Packed};
use forebay_kernels::Team;
use serde_json::json;

use crate::args::PackArgs;
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
        let options = PackOptions { threads, margin: args.margin.0, cancel };
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
            "seconds": time.as_secs_f64(),
        })),
        false => out.write(&summary(args, packed, time)),
    }
}

fn summary(args: &PackArgs, packed: Packed, time: Duration) -> String {
    let (dir, total) = (args.out.display(), ByteSize(packed.total));
    match (packed.files, packed.kept) {
        (0, files) => format!("{dir}: complete already, {total} in {files} weight files\n"),
        (files, kept) => {
            let bytes = ByteSize(packed.bytes);
            let rate = ByteSize((packed.bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            let kept = if kept > 0 { format!("; {kept} were there") } else { String::new() };
            format!(
                "{dir}: wrote {bytes} in {files} weight files, {rate}/s{kept}\ntry: forebay inspect {dir}\n"
            )
        }
    }
}

impl From<PackError> for Failure {
    fn from(error: PackError) -> Self {
        let exit = match error {
            PackError::Cancelled => return Self::Interrupted,
            PackError::Snapshot(_) | PackError::Native(_) | PackError::Layout(_) => Exit::Model,
            PackError::Packed { .. } | PackError::NotPacked { .. } => Exit::Usage,
            PackError::Occupied { .. } | PackError::Other { .. } => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
