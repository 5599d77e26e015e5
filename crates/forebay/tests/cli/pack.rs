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

#[test]
fn coded_experts_are_fewer_bytes_and_the_same_words() {
    let [model, coded, back] = [(); 3].map(|()| TempDir::new().unwrap());
    let shape =
        ["--shape", "tiny", "--hidden", "384", "--expert-width", "256", "--experts", "8", "--moe", "2"];
    forebay(&[&["synth", arg(model.path()), "--format", "int4-row"][..], &shape].concat()).ok();
    let (source, coded, back) = (arg(model.path()), arg(coded.path()), arg(back.path()));
    let done = forebay(&["pack", source, coded, "--margin", "0", "--codes", "auto"]).ok();
    assert!(done.stdout.contains("16 of 16 experts coded:"), "{}", done.stdout);
    let again = forebay(&["pack", source, coded, "--codes", "auto", "--json"]).ok().json();
    assert_eq!((&again["bytes_written"], &again["experts_coded"]), (&0.into(), &16.into()));
    let share = again["expert_bytes"].as_f64().unwrap() / again["expert_bytes_raw"].as_f64().unwrap();
    // Records of 37 pages; those of real experts have 4620, and less of each page is book-keeping.
    assert!(share < 0.9, "{share}");
    forebay(&["pack", source, coded]).fails(2, &["the same model with coded experts"]);
    forebay(&["pack", coded, back, "--to-reference", "--codes", "raw"]).fails(2, &["--to-reference"]);
    let found = forebay(&["inspect", coded, "--json"]).ok().json();
    assert_eq!(found["experts"]["coded"], 16);
    assert_eq!(found["experts"]["decoded_bytes"], again["expert_bytes_raw"]);
    assert!(forebay(&["inspect", coded]).ok().stdout.contains("16 of them coded"));
    let score = |dir: &str, slots: &str| {
        let args = [
            "score",
            "--model",
            dir,
            "--expert-slots",
            slots,
            "--context",
            "64",
            "--json",
            "Water runs down.",
        ];
        forebay(&args).ok().json()
    };
    let want = score(source, "auto");
    for slots in ["auto", "coded", "decoded"] {
        assert_eq!(score(coded, slots)["windows"], want["windows"], "{slots}");
    }
    for (slots, words) in
        [("coded", "stay coded in memory, as asked"), ("decoded", "are decoded"), ("auto", "the other way")]
    {
        let args = ["plan", coded, "--machine-memory", "2G", "--expert-slots", slots];
        let text = forebay(&args).ok().stdout;
        assert!(text.contains(words), "{text}");
    }
    let auto =
        ["plan", coded, "--machine-memory", "2G", "--json", "--disk-rate", "1G", "--memory-rate", "50G"];
    let plan = forebay(&auto).ok().json();
    let codes = &plan["plan"]["codes"];
    assert_eq!(
        (&codes["asked"], &codes["disk"], &codes["assumed"]),
        (&false.into(), &1e9.into(), &true.into())
    );
    assert!(forebay(&["verify", coded, "--hash"]).ok().stdout.contains("every byte is what was packed"));
    forebay(&["pack", coded, back, "--to-reference", "--margin", "0"]).ok();
    assert_eq!(score(back, "auto")["windows"], want["windows"]);
}

/// Killed as no program can prevent, at growing times from the start, and given again each time.
#[test]
fn killed_again_and_again_it_ends_with_the_same_bytes() {
    killed_again_and_again("raw", "12");
}

/// The same while experts are coded: their lengths are known to the files that are there alone.
#[test]
fn killed_again_and_again_while_it_codes() {
    killed_again_and_again("coded", "6");
}

fn killed_again_and_again(codes: &str, layers: &str) {
    let model = TempDir::new().unwrap();
    let (model, whole) = (arg(model.path()), TempDir::new().unwrap());
    let shape =
        ["--shape", "tiny", "--experts", "32", "--dense", "1", "--moe", layers, "--expert-width", "256"];
    forebay(&[&["synth", model][..], &shape].concat()).ok();
    forebay(&["pack", model, arg(whole.path()), "--margin", "0", "--threads", "1", "--codes", codes]).ok();
    let dir = TempDir::new().unwrap();
    let (mut killed, mut wait) = (0, Duration::from_millis(15));
    loop {
        let args = ["pack", model, arg(dir.path()), "--margin", "0", "--codes", codes];
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
