//! `forebay get`: downloads a model from a hub and verifies every byte of it.

mod needs;
pub mod surroundings;

use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay_core::{ByteSize, CancelToken};
use forebay_hub::get::{Event, GetError, Got, Hub, Prepared, Request, Target, Watch, parse_reference};
use serde_json::{Value, json};

use crate::args::GetArgs;
use crate::console::{self, Output};
use crate::failure::{Exit, Failure};
use crate::interrupt::Interrupt;
use crate::progress::{self, Progress, Unit};

use needs::Needs;

/// Shorter pauses are nothing to speak of.
const WORTH_A_NOTE: Duration = Duration::from_secs(2);
/// Time between two notes about pauses: when a network is down, all connections have one.
const NOTE_EVERY: Duration = Duration::from_secs(10);

/// Runs the verb.
pub fn run(args: &GetArgs) -> Result<(), Failure> {
    let (repo, revision) = parse_reference(&args.repo)?;
    let hub = Hub::new(&surroundings::config(&args.hub)?)?;
    let target = match &args.to {
        Some(dir) => Target::Folder(dir.clone()),
        None => Target::Cache(surroundings::cache()?),
    };
    let request = Request { repo, revision, include: args.include.clone(), target, margin: args.margin.0 };
    let interrupt = Interrupt::install()?;
    let (prepared, needs) = interrupt.during(|cancel| look(&hub, &request, cancel))?;
    let mut out = Output::new();
    if args.dry_run {
        return match args.json {
            true => out.json(&report(&prepared, needs.as_ref(), None)),
            false => out.write(&page(&prepared, needs.as_ref(), args.margin)),
        };
    }
    console::diagnose(&page(&prepared, needs.as_ref(), args.margin));
    let got = interrupt.during(|cancel| fetch(&prepared, cancel))?;
    match args.json {
        true => out.json(&report(&prepared, needs.as_ref(), Some(&got))),
        false => out.write(&format!("{}\n", got.folder.display())),
    }
}

/// What the hub has, what of it is here, and what the model needs.
fn look<'h>(
    hub: &'h Hub,
    request: &Request,
    cancel: &CancelToken,
) -> Result<(Prepared<'h>, Option<Needs>), Failure> {
    let _asking = Progress::start("asking the hub", Unit::Bytes, 0);
    let waiting = |event| {
        if let Event::Waiting { why, pause, .. } = event {
            progress::note(&format!("{why}; trying again in {:.1} s", pause.as_secs_f64()));
        }
    };
    let watch = Watch { cancel, seen: &waiting };
    let prepared = hub.prepare(request, &watch)?;
    let needs = (prepared.missing() > 0).then(|| Needs::look(hub, &prepared, &watch)).transpose()?;
    Ok((prepared, needs))
}

/// What a user should know while files are fetched.
#[derive(Default)]
pub struct Notes {
    /// When the last note about a pause was.
    waited: Mutex<Option<Instant>>,
}

impl Notes {
    /// Says what happened, unless it is too common to be worth it.
    pub fn say(&self, event: &Event) {
        match event {
            Event::Waiting { what, why, pause } if *pause >= WORTH_A_NOTE => {
                let Ok(mut waited) = self.waited.lock() else { return };
                if waited.is_none_or(|at| at.elapsed() >= NOTE_EVERY) {
                    progress::note(&format!("{what}: {why}; trying again in {} s", pause.as_secs()));
                    *waited = Some(Instant::now());
                }
            }
            Event::Restarted { file, why } => progress::note(&format!("{file}: {why}; it begins again")),
            Event::Started { file, bytes } => {
                progress::note(&format!("fetching {file}, {}", ByteSize(*bytes)))
            }
            _ => {}
        }
    }
}

fn fetch(prepared: &Prepared<'_>, cancel: &CancelToken) -> Result<Got, Failure> {
    let progress = Progress::start("downloading", Unit::Bytes, prepared.bytes());
    let (so_far, notes) = (Mutex::new((0, 0)), Notes::default());
    let started = Instant::now();
    let watch = Watch {
        cancel,
        seen: &|event| match event {
            Event::Progress { done, total, arrived } => {
                progress.update_arrived(done, total, arrived);
                if let Ok(mut so_far) = so_far.lock() {
                    *so_far = (done, total);
                }
            }
            other => notes.say(&other),
        },
    };
    let got = prepared.run(&watch);
    drop(progress);
    let (done, total) = so_far.lock().map_or((0, 0), |so_far| *so_far);
    match got {
        Ok(got) => {
            console::diagnose(&summary(prepared, &got, started.elapsed()));
            Ok(got)
        }
        Err(GetError::Cancelled) => {
            console::note(&format!(
                "stopped with {} of {} here; the same command goes on from there",
                ByteSize(done),
                ByteSize(total)
            ));
            Err(Failure::Interrupted)
        }
        Err(error) => Err(error.into()),
    }
}

/// What the model needs, and whether this machine has it.
fn page(prepared: &Prepared<'_>, needs: Option<&Needs>, margin: ByteSize) -> String {
    let listing = prepared.listing();
    let (bytes, missing) = (prepared.bytes(), prepared.missing());
    let mut rows = vec![
        ("model", format!("{} at commit {} ({})", listing.repo, listing.commit, listing.revision)),
        ("files", format!("{} in {} files", ByteSize(bytes), prepared.files().len())),
        ("to", prepared.folder().display().to_string()),
        (
            "to fetch",
            match missing {
                0 => "nothing, all of it is here".to_owned(),
                _ if missing < bytes => format!("{}; the rest is here", ByteSize(missing)),
                _ => ByteSize(missing).to_string(),
            },
        ),
    ];
    let disk = match prepared.free() {
        None => "this system does not say how much is free".to_owned(),
        Some(free) => {
            let verdict = if missing > 0 && free < missing.saturating_add(margin.0) {
                format!("that is too little: {margin} should stay free (--margin)")
            } else {
                format!("{} afterwards", ByteSize(free.saturating_sub(missing)))
            };
            format!("{} free, {verdict}", ByteSize(free))
        }
    };
    rows.push(("disk", disk));
    rows.extend(needs.iter().flat_map(|needs| needs.rows()));
    rows.into_iter().map(|(name, text)| format!("{name:<10}{}\n", console::one_line(&text))).collect()
}

fn summary(prepared: &Prepared<'_>, got: &Got, time: Duration) -> String {
    let files = prepared.files().len();
    let fetched = match got.arrived {
        0 => "nothing had to be fetched".to_owned(),
        bytes => {
            let rate = ByteSize((bytes as f64 / time.as_secs_f64().max(1e-3)) as u64);
            format!("{} fetched, {rate}/s", ByteSize(bytes))
        }
    };
    let next = match prepared.files().iter().any(|file| file.name == "config.json") {
        true => format!("try: forebay plan {}\n", got.folder.display()),
        false => String::new(),
    };
    console::printable(&format!("all {files} files are here and verified; {fetched}\n{next}"))
}

fn report(prepared: &Prepared<'_>, needs: Option<&Needs>, got: Option<&Got>) -> Value {
    let listing = prepared.listing();
    let files = prepared.files().iter();
    json!({
        "repo": listing.repo.as_str(),
        "revision": listing.revision,
        "commit": listing.commit,
        "path": prepared.folder().display().to_string(),
        "bytes": prepared.bytes(),
        "bytes_missing": if got.is_some() { 0 } else { prepared.missing() },
        "free_bytes": prepared.free(),
        "memory": needs.map(Needs::json),
        "bytes_fetched": got.map(|got| got.arrived),
        "files_kept": got.map(|got| got.kept),
        "files": files
            .map(|file| json!({"name": file.name, "bytes": file.size, "digest": file.digest.to_string()}))
            .collect::<Vec<_>>(),
    })
}

impl From<GetError> for Failure {
    fn from(error: GetError) -> Self {
        use GetError as E;
        let exit = match error {
            E::Cancelled => return Self::Interrupted,
            E::Repo { .. } | E::Revision { .. } | E::Endpoint { .. } | E::Proxy { .. } | E::Ca { .. } => {
                Exit::Usage
            }
            E::Token | E::NoMatch { .. } | E::NoRepo { .. } | E::NoRevision { .. } => Exit::Usage,
            E::OtherModel { .. } | E::Occupied { .. } => Exit::Usage,
            _ => Exit::Runtime,
        };
        Self::new(exit, error.to_string())
    }
}
