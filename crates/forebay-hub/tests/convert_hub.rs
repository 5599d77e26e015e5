//! Conversion of a checkpoint that is on a hub: the same bytes, with one file of the source on the disk at a time.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{CASES, convert, golden, int4_g64, model_files};
use forebay_core::CancelToken;
use forebay_hub::convert::{
    ConvertError, Converted, HubSource, Job, LocalFolder, Options, ResultKind, Source,
};
use forebay_hub::get::{Event, GetError, Hub, HubConfig, Retry, Watch};
use forebay_hub::pack::verify_native;
use forebay_store::native::Native;
use forebay_testkit::hub::{COMMIT, Hub as Server, REPO};
use serde_json::Value;
use tempfile::TempDir;

/// Bytes from which on a file is a large one.
const LARGE: usize = 10_000;

fn files(case: &str) -> BTreeMap<String, Vec<u8>> {
    let all = fs::read_dir(golden(case)).unwrap().map(|entry| entry.unwrap().path());
    let model = all.filter(|path| path.file_name().unwrap() != "expected.json");
    let named = model.map(|path| (path.file_name().unwrap().to_str().unwrap().to_owned(), path));
    named.map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

fn server(case: &str) -> Server {
    // What a hub has besides must not be in the way.
    let more = [("README.md", "a model"), ("other/model.safetensors", "not at the top")];
    let more = more.map(|(name, text)| (name.to_owned(), text.as_bytes().to_vec()));
    Server::start(files(case).into_iter().chain(more), LARGE).unwrap()
}

fn hub(server: &Server) -> Hub {
    let milliseconds = Duration::from_millis;
    let retry = Retry { first: milliseconds(5), longest: milliseconds(20), ..Retry::default() };
    let endpoint = server.url.clone();
    Hub::new(&HubConfig { endpoint, connections: 2, retry, ..HubConfig::default() }).unwrap()
}

/// Converts into `out`. `seen` gets events of fetching, `step` is called whenever something was written.
fn run_with(
    server: &Server,
    revision: &str,
    out: &Path,
    options: Options,
    cancel: &CancelToken,
    seen: &(dyn Fn(Event) + Sync),
) -> Result<Converted, ConvertError> {
    let hub = hub(server);
    let watch = Watch { cancel, seen };
    let mut source = HubSource::open(&hub, &REPO.parse().unwrap(), revision, out, watch)?;
    let job = Job::new(&mut source, options)?;
    let step = Event::Progress { done: 0, total: 0, arrived: 0 };
    job.run(&mut source, out, cancel, &mut |_, _| seen(step.clone()))
}

fn run(server: &Server, out: &Path) -> Result<Converted, ConvertError> {
    run_with(server, "main", out, int4_g64(), &CancelToken::new(), &|_| {})
}

/// Bytes of weights in a folder and those below it, whole or not, and of files with other names.
fn weights_in(dir: &Path) -> (u64, u64) {
    let (mut all, mut source) = (0, 0);
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if path.is_dir() {
            let below = weights_in(&path).0;
            all += below;
            source += if name == "forebay-convert.source" { below } else { 0 };
        } else if !name.contains(".json") && !name.contains(".ranges") {
            // Another thread may have renamed or deleted it.
            all += fs::metadata(path).map_or(0, |meta| meta.len());
        }
    }
    (all, source)
}

#[test]
fn the_bytes_are_those_of_a_local_conversion_and_the_disk_holds_what_was_announced() {
    for case in CASES {
        let (local, out, server) = (TempDir::new().unwrap(), TempDir::new().unwrap(), server(case));
        convert(&golden(case), local.path(), int4_g64()).unwrap();
        let cancel = CancelToken::new();
        let hub = hub(&server);
        let (most, most_source) = (AtomicU64::new(0), AtomicU64::new(0));
        let measure = |_: Event| {
            let (all, source) = weights_in(out.path());
            most.fetch_max(all, Ordering::Relaxed);
            most_source.fetch_max(source, Ordering::Relaxed);
        };
        let watch = Watch { cancel: &cancel, seen: &measure };
        let mut source = HubSource::open(&hub, &REPO.parse().unwrap(), "main", out.path(), watch).unwrap();
        let job = Job::new(&mut source, int4_g64()).unwrap();
        // To plan means headers and the config: no file of weights was asked for as a whole.
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
        let weights: Vec<u64> = source.files().unwrap().iter().map(|file| file.size).collect();
        assert_eq!(job.fetch_bytes(), Some(weights.iter().sum()));
        server.faults(|faults| faults.rate = Some(2_000_000));
        job.run(&mut source, out.path(), &cancel, &mut |_, _| {
            measure(Event::Finished { file: String::new() })
        })
        .unwrap();
        assert!(model_files(out.path()) == model_files(local.path()), "{case}");
        let largest = *weights.iter().max().unwrap();
        let (most, most_source) = (most.into_inner(), most_source.into_inner());
        assert!(most_source > 0 && most_source <= largest, "{case}: {most_source} of {largest}");
        assert!(most <= job.disk_bytes(), "{case}: {most} of {}", job.disk_bytes());
        assert!(!out.path().join("forebay-convert.source").exists());
        // What was verified is written down.
        let text = fs::read(out.path().join("forebay-convert.json")).unwrap();
        let record: Value = serde_json::from_slice(&text).unwrap();
        assert_eq!(record["from"], format!("{REPO}@{COMMIT}"));
        let digest = |bytes: &[u8]| match bytes.len() >= LARGE {
            true => format!("sha256:{}", forebay_testkit::hub::sha256(bytes)),
            false => format!("git:{}", forebay_testkit::hub::git_blob(bytes)),
        };
        for (name, bytes) in files(case).iter().filter(|(name, _)| name.ends_with(".safetensors")) {
            assert_eq!(record["verified"][name], digest(bytes), "{case}: {name}");
        }
        // Again: nothing is fetched but headers and small files, and nothing is written.
        let again = run(&server, out.path()).unwrap();
        assert_eq!((again.written, again.kept), (0, job.plan.outputs.len()));
    }
}

#[test]
fn a_container_says_what_it_was_made_of() {
    let (out, server) = (TempDir::new().unwrap(), server("bf16"));
    let options = Options { kind: ResultKind::Forebay, ..int4_g64() };
    run_with(&server, "v1", out.path(), options, &CancelToken::new(), &|_| {}).unwrap();
    let native = Native::open(out.path()).unwrap();
    let source = &native.header().source;
    // The commit, not the tag.
    assert_eq!((source.repository.as_str(), source.revision.as_str()), (REPO, COMMIT));
    let findings = verify_native(out.path(), true, &CancelToken::new(), &mut |_, _| {}).unwrap();
    assert!(findings.is_empty(), "{findings:?}");
}

#[test]
fn wrong_bytes_are_named_and_nothing_is_made_of_them() {
    let (server, local) = (server("fp8"), TempDir::new().unwrap());
    convert(&golden("fp8"), local.path(), int4_g64()).unwrap();
    let out = TempDir::new().unwrap();
    let name = "model-00001-of-00003.safetensors";
    let last = files("fp8")[name].len() - 1;
    let always =
        |name: &str, at| server.faults(|faults| faults.flip = Some((usize::MAX, name.to_owned(), at)));
    always(name, last);
    let error = run(&server, out.path()).unwrap_err();
    assert!(matches!(&error, ConvertError::Get(GetError::Mismatch { file, .. }) if file == name), "{error}");
    assert!(!out.path().join("out-00000.safetensors").exists() && !out.path().join("config.json").exists());
    // Once is not for ever.
    server.faults(|faults| faults.flip = Some((1, name.to_owned(), last)));
    run(&server, out.path()).unwrap();
    assert!(model_files(out.path()) == model_files(local.path()));
    let out = TempDir::new().unwrap();
    always("config.json", 5);
    let error = run(&server, out.path()).unwrap_err();
    let named = matches!(&error, ConvertError::Get(GetError::Mismatch { file, .. }) if file == "config.json");
    assert!(named, "{error}");
    // A header that differs from the file's is no header to plan with.
    always(name, 40);
    let error = run(&server, out.path()).unwrap_err().to_string();
    assert!(error.contains(name), "{error}");
}

/// Stopped in the middle of every file, by a branch that is gone afterwards.
#[test]
fn a_file_half_fetched_goes_on_and_the_commit_stays() {
    let (server, out, local) = (server("bf16"), TempDir::new().unwrap(), TempDir::new().unwrap());
    convert(&golden("bf16"), local.path(), int4_g64()).unwrap();
    server.faults(|faults| faults.rate = Some(400_000));
    let (sizes, mut revision) = (files("bf16"), "main");
    for (name, bytes) in sizes.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        let cancel = CancelToken::new();
        let began = AtomicU64::new(0);
        let half = bytes.len() as u64 / 2;
        let seen = |event| match event {
            Event::Started { file, .. } => began.store(u64::from(file == *name), Ordering::Relaxed),
            Event::Progress { done, .. } if began.load(Ordering::Relaxed) == 1 && done >= half => {
                cancel.cancel()
            }
            _ => {}
        };
        let error = run_with(&server, revision, out.path(), int4_g64(), &cancel, &seen).unwrap_err();
        assert!(matches!(error, ConvertError::Cancelled), "{name}: {error}");
        let part = out.path().join("forebay-convert.source").join(format!("{name}.forebay.incomplete"));
        assert!(part.exists(), "{name}");
        // No such branch: the commit that was begun is gone on with.
        revision = "v9";
        // What of this file is there is not fetched again.
        let first = AtomicU64::new(u64::MAX);
        let cancel = CancelToken::new();
        let seen = |event| match event {
            Event::Progress { done, total, .. } if total == bytes.len() as u64 => {
                first.fetch_min(done, Ordering::Relaxed);
                cancel.cancel();
            }
            _ => {}
        };
        let _ = run_with(&server, revision, out.path(), int4_g64(), &cancel, &seen);
        let first = first.into_inner();
        assert!(first >= half && first < u64::MAX, "{name}: {first} of {half}");
    }
    server.faults(|faults| faults.rate = None);
    run_with(&server, revision, out.path(), int4_g64(), &CancelToken::new(), &|_| {}).unwrap();
    assert!(model_files(out.path()) == model_files(local.path()));
    let error =
        run_with(&server, "v9", TempDir::new().unwrap().path(), int4_g64(), &CancelToken::new(), &|_| {});
    assert!(matches!(error, Err(ConvertError::Get(GetError::NoRevision { .. }))));
}

#[test]
fn what_killed_runs_leave_is_checked_or_deleted() {
    let (server, out, local) = (server("bf16"), TempDir::new().unwrap(), TempDir::new().unwrap());
    convert(&golden("bf16"), local.path(), int4_g64()).unwrap();
    run(&server, out.path()).unwrap();
    let work = out.path().join("forebay-convert.source");
    let name = "model-00002-of-00003.safetensors";
    let right = files("bf16").remove(name).unwrap();
    for (left, is_right) in [(right.clone(), true), (right.iter().map(|b| b ^ 1).collect(), false)] {
        fs::remove_file(out.path().join("out-00001.safetensors")).unwrap();
        fs::create_dir_all(&work).unwrap();
        fs::write(work.join(name), left).unwrap();
        fs::write(work.join("model-00001-of-00003.safetensors.forebay.incomplete"), "left").unwrap();
        let started = AtomicU64::new(0);
        let seen = |event| {
            if let Event::Started { file, .. } = event {
                started.fetch_add(u64::from(file == name), Ordering::Relaxed);
            }
        };
        run_with(&server, "main", out.path(), int4_g64(), &CancelToken::new(), &seen).unwrap();
        assert_eq!(started.into_inner(), u64::from(!is_right), "one that is whole and right is not fetched");
        assert!(model_files(out.path()) == model_files(local.path()) && !work.exists());
    }
    // A local folder with the same bytes, known by the same digests, is the same source.
    let source = TempDir::new().unwrap();
    for (name, bytes) in files("bf16") {
        fs::write(source.path().join(name), bytes).unwrap();
    }
    let error = convert(source.path(), out.path(), int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::OtherOptions { .. }), "nobody vouches for these: {error}");
}

#[test]
fn room_is_looked_for_before_anything_is_fetched() {
    let (server, out) = (server("bf16"), TempDir::new().unwrap());
    let started = AtomicU64::new(0);
    let seen = |event| {
        started.fetch_add(u64::from(matches!(event, Event::Started { .. })), Ordering::Relaxed);
    };
    let full = Options { margin: 1 << 62, ..int4_g64() };
    let error = run_with(&server, "main", out.path(), full, &CancelToken::new(), &seen).unwrap_err();
    let ConvertError::NoRoom { bytes, .. } = error else { panic!("{error}") };
    // The result and a file of the source.
    let local = Job::new(&mut LocalFolder::new(&golden("bf16")), int4_g64()).unwrap();
    let largest = files("bf16").into_iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let largest = largest.map(|(_, bytes)| bytes.len() as u64).max().unwrap();
    assert_eq!((bytes, started.into_inner()), (local.plan.bytes() + largest, 0));
}

#[test]
fn repositories_without_a_checkpoint_are_refused() {
    let only = |names: &[&str]| {
        let files = files("bf16").into_iter().filter(|(name, _)| names.contains(&name.as_str()));
        let server = Server::start(files.collect::<Vec<_>>(), LARGE).unwrap();
        run(&server, TempDir::new().unwrap().path()).unwrap_err().to_string()
    };
    assert!(only(&["config.json"]).contains(&format!("{REPO}@{COMMIT}")));
    assert!(only(&["model-00001-of-00003.safetensors"]).contains("config.json"));
    let header = [(1u64 << 40).to_le_bytes().to_vec(), vec![0; 100]].concat();
    let files = [("config.json".to_owned(), b"{}".to_vec()), ("x.safetensors".to_owned(), header)];
    let server = Server::start(files, LARGE).unwrap();
    let hub = hub(&server);
    let cancel = CancelToken::new();
    let watch = Watch { cancel: &cancel, seen: &|_| {} };
    let out = TempDir::new().unwrap();
    let mut source = HubSource::open(&hub, &REPO.parse().unwrap(), "main", out.path(), watch).unwrap();
    let error = source.files().unwrap_err();
    assert!(matches!(error, ConvertError::Get(GetError::Header { .. })), "{error}");
}
