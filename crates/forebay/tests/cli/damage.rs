//! Snapshots damaged in distinct ways, as the program tells them: status 3, one line, no output.

use std::fs;
use std::path::Path;

use crate::support::{arg, demo_copy, forebay};

const SHARD: &str = "model.safetensors";

/// Changes bytes of a file of the folder.
fn edit(dir: &Path, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
    let path = dir.join(name);
    let mut bytes = fs::read(&path).unwrap();
    change(&mut bytes);
    fs::write(path, bytes).unwrap();
}

/// Replaces the first `from` by `to` of the same length.
fn swap(bytes: &mut [u8], from: &str, to: &str) {
    assert_eq!(from.len(), to.len());
    let at = bytes.windows(from.len()).position(|part| part == from.as_bytes()).expect(from);
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
}

#[test]
fn every_kind_of_damage_is_one_line() {
    let dir = demo_copy();
    type Change = fn(&mut Vec<u8>);
    let cases: [(&str, &str, Change, &str); 16] = [
        ("no length", SHARD, |b| b.truncate(5), SHARD),
        ("nothing at all", SHARD, |b| b.clear(), SHARD),
        ("a header longer than the file", SHARD, |b| b[..8].copy_from_slice(&[0xFF; 8]), SHARD),
        ("a header cut short", SHARD, |b| b[..8].copy_from_slice(&100u64.to_le_bytes()), SHARD),
        ("a header that is no JSON", SHARD, |b| b[8] = b'!', SHARD),
        ("a header that is no text", SHARD, |b| b[12] = 0xFF, SHARD),
        ("a renamed tensor", SHARD, |b| swap(b, "lm_head.weight\"", "lm_heap.weight\""), "lm_head.weight"),
        ("another dtype", SHARD, |b| swap(b, "\"F32\"", "\"I64\""), SHARD),
        ("a dtype that is no text", SHARD, |b| swap(b, "\"F32\"", "12345"), SHARD),
        ("a negative offset", SHARD, |b| swap(b, "\"data_offsets\":[0", "\"data_offsets\":[-"), SHARD),
        ("a missing key", SHARD, |b| swap(b, "\"data_offsets\"", "\"data_offzets\""), "data_offsets"),
        ("no payload", SHARD, |b| b.truncate(300_000), SHARD),
        ("two values", "config.json", |b| b.extend_from_slice(b"{}"), "config.json"),
        ("not UTF-8", "config.json", |b| b[3] = 0xFF, "config.json"),
        (
            "a bad stop id",
            "generation_config.json",
            |b| *b = br#"{"eos_token_id": [null]}"#.to_vec(),
            "eos_token_id",
        ),
        ("a cut file", "generation_config.json", |b| b.truncate(20), "generation_config.json"),
    ];
    for (what, name, change, word) in cases {
        edit(dir.path(), name, change);
        let done = forebay(&["inspect", arg(dir.path())]).fails(3, &[word]);
        assert_eq!(done.stderr.lines().count(), 1, "{what}: {done:#?}");
        fs::copy(crate::support::demo().join(name), dir.path().join(name)).unwrap();
    }
    forebay(&["inspect", arg(dir.path())]).ok();
    for (what, name, change) in [
        ("a cut tokenizer", "tokenizer.json", (|b| b.truncate(100_000)) as Change),
        ("a template with an open block", "chat_template.jinja", |b| b.extend_from_slice(b"{% if x %}")),
    ] {
        edit(dir.path(), name, change);
        let done = forebay(&["run", "hi", "--model", arg(dir.path())]).fails(3, &[name]);
        assert_eq!(done.stderr.lines().count(), 1, "{what}: {done:#?}");
        fs::copy(crate::support::demo().join(name), dir.path().join(name)).unwrap();
    }
}
