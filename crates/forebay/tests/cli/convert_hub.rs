//! `forebay convert OWNER/NAME`, with the hub on this machine, also when it is killed.

use std::collections::BTreeMap;
use std::fs;
use std::process::Stdio;
use std::time::Duration;

use forebay_testkit::hub::{COMMIT, Hub, REPO};
use tempfile::TempDir;

use crate::convert::{checkpoint_in, model_files};
use crate::support::{Done, arg, forebay, online};

/// A checkpoint on a hub, and what a local conversion with these options makes of it.
fn published(format: &str, more: &[&str]) -> (Hub, BTreeMap<String, Vec<u8>>, u64) {
    let (source, whole) = (checkpoint_in(format), TempDir::new().unwrap());
    forebay(&[&["convert", arg(source.path()), arg(whole.path()), "--margin", "0"], more].concat()).ok();
    let files = fs::read_dir(source.path()).unwrap().map(|entry| entry.unwrap());
    let files = files
        .filter(|entry| entry.file_type().unwrap().is_file())
        .map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap()));
    let files: BTreeMap<_, _> = files.collect();
    let weights = files.iter().filter(|(name, _)| name.ends_with(".safetensors"));
    let bytes = weights.map(|(_, bytes)| bytes.len() as u64).sum();
    (Hub::start(files, 100_000).unwrap(), model_files(whole.path()), bytes)
}

fn args<'a>(hub: &'a Hub, out: &'a TempDir, more: &[&'a str]) -> Vec<&'a str> {
    [&["convert", REPO, arg(out.path()), "--endpoint", &hub.url, "--margin", "0"], more].concat()
}

#[test]
fn a_checkpoint_on_a_hub_becomes_the_same_model() {
    let (hub, want, bytes) = published("bf16", &[]);
    let out = TempDir::new().unwrap();
    let run = |more: &[&str]| Done::of(online(&args(&hub, &out, more)).output().unwrap());
    let plan = run(&["--plan", "--json"]).ok().json();
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "a plan writes nothing");
    assert_eq!(plan["fetch_bytes"], bytes, "{plan:#}");
    assert_eq!(plan["peak_disk_bytes"], plan["streamed_peak_disk_bytes"]);
    assert!(plan["peak_disk_bytes"].as_u64() > plan["bytes"].as_u64());
    let shown = run(&["--plan"]).ok();
    for words in ["fetch  ", "one file of the source"] {
        assert!(shown.stdout.contains(words), "{shown:#?}");
    }
    assert!(shown.stderr.contains(COMMIT), "{shown:#?}");
    let done = run(&[]).ok();
    assert!(done.stderr.contains("fetching out-00001.safetensors"), "{done:#?}");
    assert!(model_files(out.path()) == want);
    forebay(&["verify", arg(out.path()), "--hash"]).ok();
    let again = run(&["--json"]).ok().json();
    assert_eq!(again["files_written"], 0);
}

#[test]
fn what_is_neither_a_folder_nor_a_repository_is_said() {
    let (hub, _, _) = published("bf16", &[]);
    let out = TempDir::new().unwrap();
    let run = |source: &str, more: &[&str]| {
        let args = ["convert", source, arg(out.path()), "--endpoint", &hub.url, "--margin", "0"];
        Done::of(online(&[&args[..], more].concat()).output().unwrap())
    };
    run("/no/such/folder", &[]).fails(2, &["/no/such/folder", "no folder", "OWNER/NAME"]);
    run("other/model", &[]).fails(1, &["other/model", "HF_TOKEN"]);
    run(&format!("{REPO}@v9"), &[]).fails(2, &["v9", "branch"]);
    if cfg!(unix) {
        let args = ["convert", REPO, arg(out.path()), "--endpoint", &hub.url, "--margin", "900000T"];
        Done::of(online(&args).output().unwrap()).fails(1, &["free", "--margin"]);
    }
    hub.faults(|faults| faults.flip = Some((usize::MAX, "out-00001.safetensors".to_owned(), 1_000_000)));
    run(REPO, &[]).fails(1, &["out-00001.safetensors", "damaged", "sha256"]);
}

/// kill -9 at moments spread over fetching and converting: it ends with the same bytes, and what had arrived of a file is
/// not fetched again.
fn killed(format: &str, more: &[&str]) {
    let (hub, local, bytes) = published(format, more);
    let undisturbed = TempDir::new().unwrap();
    Done::of(online(&args(&hub, &undisturbed, more)).output().unwrap()).ok();
    let want = model_files(undisturbed.path());
    // A container says where it comes from, a folder or a repository; nothing else may differ.
    let others = |files: &BTreeMap<String, Vec<u8>>| {
        let kept = files.iter().filter(|(name, _)| *name != "model.forebay");
        kept.map(|(name, bytes)| (name.clone(), bytes.clone())).collect::<BTreeMap<_, _>>()
    };
    assert!(others(&want) == others(&local));
    let options = [&["--connections", "2"], more].concat();
    let (mut out, mut kills, mut rounds, mut random) = (TempDir::new().unwrap(), 0, 1u64, 11u64);
    while kills < 50 {
        hub.faults(|faults| faults.rate = Some(8_000_000));
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let kill_at = hub.served() + (random >> 33) % (bytes / 4);
        let command = &mut online(&args(&hub, &out, &options));
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis((random >> 40) % 60));
        let ended = loop {
            match run.try_wait().unwrap() {
                None if hub.served() < kill_at => std::thread::sleep(Duration::from_millis(1)),
                ended => break ended,
            }
        };
        match ended {
            Some(status) => {
                assert!(status.success());
                assert!(model_files(out.path()) == want, "after {kills} kills");
                (out, rounds) = (TempDir::new().unwrap(), rounds + 1);
            }
            None => {
                run.kill().unwrap();
                run.wait().unwrap();
                kills += 1;
                // Half a model does not look like one, and what has its name is whole.
                for (name, bytes) in model_files(out.path()) {
                    let ours = name.ends_with(".partial") || name == "forebay-digests.json";
                    assert!(ours || want[&name] == bytes, "{name}");
                }
            }
        }
    }
    // No killed run was given the bytes of the first file and the headers: it came in parts, which were kept.
    let first = ["out-00000.safetensors", "forebay-convert.parts/00000.made"];
    assert!(rounds > 1 || first.iter().any(|name| out.path().join(name).exists()), "after {kills} kills");
    hub.faults(|faults| faults.rate = None);
    let done = Done::of(online(&args(&hub, &out, more)).output().unwrap()).ok();
    assert!(model_files(out.path()) == want, "{done:#?}");
    let served = hub.served() - bytes;
    println!("{kills} kills, {rounds} rounds of {bytes} bytes: {served} served");
}

#[test]
fn killed_anywhere_it_goes_on_to_the_same_bytes() {
    killed("bf16", &[]);
}

#[test]
fn killed_anywhere_on_the_way_from_fp8_to_a_container_it_goes_on_to_the_same_bytes() {
    killed("fp8-e4m3", &["--container", "forebay"]);
}
