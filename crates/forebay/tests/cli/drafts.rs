//! `--draft auto`, the default: what it loads, and what it keeps for later runs.

use std::fs;
use std::path::PathBuf;

use serde_json::Value;

use crate::support::{Done, command, forebay, smallest_memory};

/// A run with a cache folder of its own, where the bundled model has to be unpacked first.
fn run(cache: &tempfile::TempDir, tokens: &str, more: &[&str]) -> Done {
    let args = ["run", "--json", "--context", "256", "--max-tokens", tokens, "Tell me a story."];
    Done::of(command(&[&args[..], more].concat()).env("FOREBAY_CACHE", cache.path()).output().unwrap()).ok()
}

fn kept(cache: &tempfile::TempDir) -> Vec<PathBuf> {
    let folder = fs::read_dir(cache.path().join("drafting"));
    let mut kept: Vec<PathBuf> = folder.into_iter().flatten().map(|entry| entry.unwrap().path()).collect();
    kept.sort();
    kept
}

#[test]
fn a_run_begins_with_what_an_earlier_one_found_out() {
    let cache = tempfile::tempdir().unwrap();
    let plain = run(&cache, "60", &["--draft", "off"]);
    assert!(kept(&cache).is_empty(), "nothing is chosen by measurements");
    let first = run(&cache, "60", &[]);
    assert_eq!(first.json()["token_ids"], plain.json()["token_ids"]);
    let files = kept(&cache);
    assert_eq!(files.len(), 1);
    let text = fs::read_to_string(&files[0]).unwrap();
    assert!(text.starts_with("forebay drafting 1\n"), "{text}");

    // Its first draft comes after two passes of one token and not after three, however slow drafts are said to be: one
    // that would always pay comes at once, of the largest depth.
    let passes = (0..9).map(|more| format!("pass {} 40\n", 0.1 + 0.001 * f64::from(more)));
    let shares = ["right 1 40\n".repeat(8), "repeated 1 40\n".repeat(4)].concat();
    let pays = format!("forebay drafting 1\nwaiting 0\ndrafting 0\n{}{shares}", passes.collect::<String>());
    fs::write(&files[0], pays).unwrap();
    let eager = run(&cache, "12", &[]);
    let drafts = &eager.json()["timings"]["drafts"];
    assert!(drafts["proposed"].as_u64() >= Some(8), "{drafts}");
    assert_eq!(
        eager.json()["token_ids"].as_array().unwrap()[..],
        plain.json()["token_ids"].as_array().unwrap()[..12]
    );

    // Other threads take other times.
    run(&cache, "60", &["--threads", "1"]);
    assert_eq!(kept(&cache).len(), 2);

    for damaged in ["", "forebay drafting 1\nwaiting 2\n", "\u{0}"] {
        fs::write(&files[0], damaged).unwrap();
        let again = run(&cache, "60", &[]);
        assert!(again.stderr.contains("drafting") && again.stderr.contains("written anew"), "{again:#?}");
        assert_eq!(again.json()["token_ids"], plain.json()["token_ids"]);
        assert!(fs::read_to_string(&files[0]).unwrap().starts_with("forebay drafting 1\n"));
    }
}

/// Drafting is no reason not to run: the smallest budget is that without the MTP layer, which is then left out.
#[test]
fn without_room_for_the_mtp_layer_drafts_come_from_the_text() {
    let free = ["--context", "256"];
    let memory = smallest_memory(&[&free[..], &["--draft", "off"]].concat());
    assert_eq!(memory, smallest_memory(&free));
    let of = |draft: &str| {
        let args =
            ["run", "--json", "--memory", &memory, "--draft", draft, "--max-tokens", "40", "Count to ten."];
        forebay(&[&args[..], &free].concat())
    };
    of("1").fails(4, &["--memory"]);
    let (plain, auto) = (of("off").ok(), of("auto").ok());
    assert!(auto.stderr.contains("MTP layer does not fit"), "{auto:#?}");
    assert!(!plain.stderr.contains("MTP layer does not fit"), "{plain:#?}");
    assert_eq!(auto.json()["token_ids"], plain.json()["token_ids"]);
    let drafts = &auto.json()["timings"]["drafts"];
    assert_eq!(drafts["verified"], drafts["looked_up"]);
}

/// Text that repeats itself is drafted from the text, also where the model could draft.
#[test]
fn what_was_said_before_is_looked_up() {
    let text = "The water runs down to the turbine, and the turbine turns. ".repeat(6);
    let args = ["run", "--json", "--no-template", "--context", "512", "--max-tokens", "120", &text];
    let of = |draft: &str| {
        let cache = tempfile::tempdir().unwrap();
        let args = [&args[..], &["--draft", draft]].concat();
        Done::of(command(&args).env("FOREBAY_CACHE", cache.path()).output().unwrap()).ok().json()
    };
    let plain = of("off");
    // Whether drafts pay is measured, and on a busy machine one slow pass can speak against them.
    let looked_up = |auto: &Value| auto["timings"]["drafts"]["looked_up"].as_u64() > Some(0);
    let mut auto = of("auto");
    for _ in 0..4 {
        assert_eq!(auto["token_ids"], plain["token_ids"]);
        if looked_up(&auto) {
            break;
        }
        auto = of("auto");
    }
    let drafts = &auto["timings"]["drafts"];
    assert!(looked_up(&auto), "{drafts}");
    assert!(drafts["looked_up_accepted"].as_u64() <= drafts["looked_up"].as_u64());
}
