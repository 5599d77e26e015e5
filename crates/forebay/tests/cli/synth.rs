//! `forebay synth`.

use tempfile::TempDir;

use crate::support::{arg, forebay};

const SMALL: [&str; 10] =
    ["--shape", "tiny", "--experts", "16", "--dense", "1", "--moe", "2", "--expert-width", "128"];

fn synth(dir: &str, more: &[&str]) -> crate::support::Done {
    forebay(&[&["synth", dir][..], &SMALL, more].concat())
}

#[test]
fn a_model_is_written_described_and_run() {
    let dir = TempDir::new().unwrap();
    let dir = arg(dir.path());
    let plan = synth(dir, &["--mtp", "--dsa", "--dry-run", "--json"]).ok().json();
    let written = synth(dir, &["--mtp", "--dsa", "--json", "--threads", "1"]).ok().json();
    assert_eq!(written["bytes_written"], plan["bytes"]);
    assert_eq!(written["files_kept"], 0);
    let found = forebay(&["inspect", "--json", dir]).ok().json();
    assert_eq!(found["layers"], serde_json::json!({"total": 3, "dense": 1, "sparse": 2}));
    assert_eq!((&found["experts"]["total"], &found["vocabulary"]), (&32.into(), &8192.into()));
    assert_eq!(found["formats"]["routed experts"], serde_json::json!({"int4-row": 2 * 16 * 3}));
    assert_eq!(
        (&found["sparse_attention"]["active"], &found["mtp"]["complete"]),
        (&true.into(), &true.into())
    );
    let scored = forebay(&["score", "--model", dir, "--json", "Water runs down to the turbine."]).ok().json();
    // Random weights know nothing: about as bad as guessing among 8192, worse by the spread of the logits.
    let perplexity = scored["perplexity"].as_f64().unwrap();
    assert!((1000.0..10_000_000.0).contains(&perplexity), "{scored:#}");
    let answer = forebay(&["run", "--model", dir, "--max-tokens", "4", "hello"]).ok();
    assert!(!answer.stdout.is_empty(), "{answer:#?}");

    let again = synth(dir, &["--mtp", "--dsa", "--json"]).ok().json();
    assert_eq!((&again["bytes_written"], &again["files_kept"]), (&0.into(), &written["files_written"]));
    synth(dir, &["--mtp"]).fails(2, &["other options", "dsa: true there, false asked for", "new folder"]);
}

#[test]
fn what_cannot_be_written_is_refused_before_anything_is() {
    let dir = TempDir::new().unwrap();
    let new = dir.path().join("new");
    let new = arg(&new);
    synth(new, &["--vocab", "100"]).fails(2, &["8192"]);
    forebay(&["synth", new, "--dense", "0", "--moe", "0"]).fails(2, &["--layers"]);
    // 5 TB fit on no disk that runs tests.
    let huge = ["synth", new, "--layers", "128", "--format", "f32", "--file-size", "1T"];
    forebay(&huge).fails(1, &["needs", "free"]);
    assert!(!dir.path().join("new").exists());
    std::fs::write(dir.path().join("notes"), "mine").unwrap();
    synth(arg(dir.path()), &[]).fails(2, &["already holds", "new"]);
}
