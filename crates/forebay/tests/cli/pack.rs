//! `forebay pack`.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tempfile::TempDir;

use crate::support::{arg, command, demo, forebay};

fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

#[test]
fn a_packed_model_answers_as_before() {
    let (packed, back) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let (source, packed, back) = (demo(), arg(packed.path()), arg(back.path()));
    let source = arg(&source);
    let done = forebay(&["pack", source, packed, "--margin", "0", "--json"]).ok().json();
    assert_eq!(done["bytes"], done["bytes_written"]);
    let ask = |dir: &str| {
        let args = [
            "run",
            "--model",
            dir,
            "--max-tokens",
            "24",
            "--temperature",
            "0",
            "--memory",
            "60M",
            // A guess that is given up half read is read, and not checked.
            "--look-ahead",
            "off",
            "--json",
            "What is 2+2?",
        ];
        forebay(&args).ok().json()
    };
    let (a, b) = (ask(source), ask(packed));
    assert_eq!(a["text"], b["text"]);
    assert_eq!(
        (&a["experts"]["checked_bytes"], &b["experts"]["checked_bytes"]),
        (&0.into(), &b["experts"]["bytes_read"])
    );
    let score = |dir: &str| {
        forebay(&["score", "--model", dir, "--json", "Water runs down to the turbine."]).ok().json()
    };
    assert_eq!(score(source)["perplexity"], score(packed)["perplexity"]);
    let found = forebay(&["inspect", "--json", packed]).ok().json();
    assert_eq!(found["container"]["version"], 1);
    assert_eq!(found["formats"], forebay(&["inspect", "--json", source]).ok().json()["formats"]);
    assert!(forebay(&["plan", packed]).ok().stdout.contains("experts"));
    assert!(forebay(&["verify", packed]).ok().stdout.contains("whole, by its header"));
    assert!(forebay(&["verify", packed, "--hash"]).ok().stdout.contains("every byte is what was packed"));
    forebay(&["verify", packed, "--record"]).fails(2, &["leave out --record"]);
    forebay(&["pack", packed, back, "--to-reference", "--margin", "0"]).ok();
    assert_eq!(score(source)["perplexity"], score(back)["perplexity"]);
    forebay(&["pack", packed, back]).fails(2, &["container already", "--to-reference"]);
    forebay(&["pack", source, back, "--to-reference"]).fails(2, &["not a Forebay container"]);
    // One wrong byte in the largest file: found by its checksum, which names the place.
    let weights = files(Path::new(packed)).into_iter().max_by_key(|(_, bytes)| bytes.len());
    let (name, mut bytes) = weights.unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(Path::new(packed).join(&name), bytes).unwrap();
    let done = forebay(&["verify", packed, "--hash", "--json"]);
    let found = done.json();
    assert_eq!((done.code, &found["sound"]), (3, &false.into()));
    assert_eq!(found["problems"].as_array().unwrap().len(), 1);
    let problem = found["problems"][0].as_str().unwrap();
    assert!(problem.contains(&name) && problem.contains("checksum"), "{problem}");
}

/// Killed as no program can prevent, at growing times from the start, and given again each time.
#[test]
fn killed_again_and_again_it_ends_with_the_same_bytes() {
    let model = TempDir::new().unwrap();
    let (model, whole) = (arg(model.path()), TempDir::new().unwrap());
    let shape =
        ["--shape", "tiny", "--experts", "32", "--dense", "1", "--moe", "12", "--expert-width", "256"];
    forebay(&[&["synth", model][..], &shape].concat()).ok();
    forebay(&["pack", model, arg(whole.path()), "--margin", "0", "--threads", "1"]).ok();
    let dir = TempDir::new().unwrap();
    let (mut killed, mut wait) = (0, Duration::from_millis(15));
    loop {
        let args = ["pack", model, arg(dir.path()), "--margin", "0"];
        let mut child = command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(wait);
        let ended = child.try_wait().unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        if ended.is_some_and(|status| status.success()) {
            break;
        }
        killed += 1;
        wait += Duration::from_millis(if killed < 50 { 3 } else { 100 });
        assert!(killed < 200);
    }
    assert!(killed > 1, "it was too fast to be killed");
    assert!(files(dir.path()) == files(whole.path()), "{killed} kills");
}
