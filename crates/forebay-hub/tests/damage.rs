//! Damaged containers: every wrong byte is found by whoever looks, and never becomes a token.

mod packed;

use std::fs::{self, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use forebay_core::{ByteSize, Format};
use forebay_engine::{Engine, EngineOptions, inspect};
use forebay_hub::pack::Problem;
use forebay_model::{EmbeddingPlace, SlotCodes};
use forebay_store::native::{HEADER_NAME, Native};
use packed::{codable, files, logits, open, pack, pack_coded, small, unpack, verify_native, write_synth};
use tempfile::TempDir;

/// A packed model whose experts are coded, and its source.
fn coded() -> (TempDir, TempDir) {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_synth(source.path(), &codable("int4-g64"));
    let done = pack_coded(source.path(), dir.path()).unwrap();
    assert_eq!(done.experts.coded, 16);
    (source, dir)
}

/// A packed model, and its source.
fn packed() -> (TempDir, TempDir) {
    let (source, dir) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    write_synth(source.path(), &small(Format::Int4Row));
    pack(source.path(), dir.path()).unwrap();
    (source, dir)
}

/// Puts a byte into a file that stays the same file.
fn put(dir: &Path, name: &str, at: u64, byte: u8) {
    let mut file = OpenOptions::new().write(true).open(dir.join(name)).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[byte]).unwrap();
}

/// Options with which no expert stays in memory.
fn streaming(dir: &Path) -> EngineOptions {
    let base = EngineOptions { context: Some(64), threads: Some(1), ..Default::default() };
    let minimum = inspect(dir, &base).unwrap().plan.unwrap().minimum;
    EngineOptions { memory: Some(ByteSize(minimum)), embedding: Some(EmbeddingPlace::Disk), ..base }
}

#[test]
fn verify_finds_every_flipped_byte() {
    finds_every_flipped_byte(packed().1.path());
}

#[test]
fn verify_finds_every_flipped_byte_of_coded_experts() {
    finds_every_flipped_byte(coded().1.path());
}

fn finds_every_flipped_byte(dir: &Path) {
    assert!(verify_native(dir, true).is_empty());
    for (name, bytes) in files(dir) {
        // Every byte of the header, and some hundred all over each other file.
        let step = if name == HEADER_NAME { 1 } else { (bytes.len() / 60).max(1) | 1 };
        for at in (0..bytes.len()).step_by(step) {
            put(dir, &name, at as u64, bytes[at] ^ 1 << (at % 8));
            let findings = verify_native(dir, true);
            assert!(findings.iter().any(|finding| finding.file == name), "{name} byte {at}: {findings:?}");
            put(dir, &name, at as u64, bytes[at]);
        }
    }
    assert!(verify_native(dir, true).is_empty(), "all is whole again");
}

#[test]
fn verify_tells_what_is_wrong() {
    let (_source, dir) = packed();
    let dir = dir.path();
    let told = |hash: bool| verify_native(dir, hash).iter().map(ToString::to_string).collect::<Vec<_>>();
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    let found = told(false);
    assert!(found.len() == 1 && found[0].starts_with("notes.txt: does not belong"), "{found:?}");
    fs::remove_file(dir.join("notes.txt")).unwrap();

    let whole = fs::read(dir.join("experts-002.fbw")).unwrap();
    put(dir, "experts-002.fbw", whole.len() as u64 - 5000, !whole[whole.len() - 5000]);
    assert!(told(false).is_empty(), "bytes of weights are not looked at");
    let findings = verify_native(dir, true);
    assert!(
        matches!(findings[..], [ref one] if matches!(one.problem, Problem::Checksum { .. })),
        "{findings:?}"
    );
    assert!(findings[0].what.ends_with("of layer 2"), "{findings:?}");
    fs::write(dir.join("experts-002.fbw"), &whole[..whole.len() - 1]).unwrap();
    assert!(told(false)[0].contains("experts-002.fbw"));
    fs::remove_file(dir.join("experts-002.fbw")).unwrap();
    assert!(told(true)[0].contains("missing"));
}

#[test]
fn a_wrong_byte_is_an_error_or_makes_no_difference() {
    let (_source, dir) = packed();
    is_an_error_or_makes_no_difference(dir.path(), streaming(dir.path()));
}

#[test]
fn a_wrong_byte_of_a_coded_expert_is_an_error_or_makes_no_difference() {
    let (_source, dir) = coded();
    let base = EngineOptions { embedding: Some(EmbeddingPlace::Disk), ..Default::default() };
    for slots in SlotCodes::ALL {
        let expert_slots = Some(slots);
        let base = EngineOptions { context: Some(64), threads: Some(1), expert_slots, ..base };
        let minimum = inspect(dir.path(), &base).unwrap().plan.unwrap().minimum;
        let options = EngineOptions { memory: Some(ByteSize(minimum)), ..base };
        is_an_error_or_makes_no_difference(dir.path(), options);
    }
}

/// A writer of hostile files writes the checksums of hostile bytes too: these fail the request that meets them.
#[test]
fn hostile_codes_with_the_right_checksum_fail_their_request() {
    let (_source, dir) = coded();
    let dir = dir.path();
    let header = fs::read(dir.join(HEADER_NAME)).unwrap();
    let whole = fs::read(dir.join("experts-001.fbw")).unwrap();
    let base = EngineOptions { context: Some(64), threads: Some(1), ..Default::default() };
    let want = logits(&mut open(dir, base).unwrap()).unwrap();
    // What a coded matrix says first: frequencies, its length; then somewhere in its scales and streams.
    for (place, must_fail) in
        [(0usize, true), (16, true), (19, true), (100, false), (3000, false), (20_000, false)]
    {
        let mut bytes = whole.clone();
        let mut changed = Native::read_header(dir).unwrap();
        let layer = changed.layers.iter_mut().find(|layer| layer.layer == 1).unwrap();
        for record in &mut layer.records {
            let record_bytes = &mut bytes[record.offset as usize..(record.offset + record.len) as usize];
            record_bytes[place] ^= 0x41;
            record.crc = crc32c::crc32c(record_bytes);
        }
        fs::write(dir.join("experts-001.fbw"), &bytes).unwrap();
        fs::write(dir.join(HEADER_NAME), changed.to_bytes()).unwrap();
        for slots in SlotCodes::ALL {
            let mut engine = open(dir, EngineOptions { expert_slots: Some(slots), ..base }).unwrap();
            match logits(&mut engine) {
                Err(error) => assert!(error.contains("layer 1") && error.contains("coded matrix"), "{error}"),
                Ok(_) => assert!(!must_fail, "byte {place}, {slots}"),
            }
            // The reading goes on: the same file, whole again, and another engine.
        }
        let error = unpack(dir, TempDir::new().unwrap().path()).err().map(|error| error.to_string());
        assert!(!must_fail || error.is_some_and(|error| error.contains("of layer 1")), "byte {place}");
    }
    fs::write(dir.join("experts-001.fbw"), &whole).unwrap();
    fs::write(dir.join(HEADER_NAME), &header).unwrap();
    for slots in SlotCodes::ALL {
        let mut engine = open(dir, EngineOptions { expert_slots: Some(slots), ..base }).unwrap();
        assert!(logits(&mut engine).unwrap() == want, "{slots}");
    }
}

fn is_an_error_or_makes_no_difference(dir: &Path, options: EngineOptions) {
    let want = logits(&mut open(dir, options).unwrap()).unwrap();
    let (mut at_open, mut at_run) = (0, 0);
    for (name, bytes) in files(dir) {
        for part in 0..12usize {
            let at = (bytes.len() / 12 * part + 37 * part).min(bytes.len() - 1);
            put(dir, &name, at as u64, bytes[at] ^ 1 << (part % 8));
            match open(dir, options) {
                Err(error) => {
                    at_open += 1;
                    assert!(error.contains(&name), "{name} byte {at}: {error}");
                }
                Ok(mut engine) => match logits(&mut engine) {
                    Err(error) => {
                        at_run += 1;
                        assert!(
                            error.contains(&name) && error.contains("expected 0x"),
                            "{name} byte {at}: {error}"
                        );
                        assert!(!name.starts_with("experts") || error.contains("expert "), "{error}");
                    }
                    // Nobody asked for these bytes: an expert of another token, or of the layer that drafts.
                    Ok(found) => assert!(found == want, "{name} byte {at}"),
                },
            }
            put(dir, &name, at as u64, bytes[at]);
        }
    }
    assert!(at_open > 10 && at_run > 10, "{at_open} {at_run}");
}

#[test]
fn a_bad_record_fails_its_request_and_no_other() {
    let (_source, dir) = packed();
    let dir = dir.path();
    let mut engine = open(dir, streaming(dir)).unwrap();
    let want = logits(&mut engine).unwrap();
    let whole = fs::read(dir.join("experts-001.fbw")).unwrap();
    // A byte in every record of the layer.
    for at in (4096 + 100..whole.len()).step_by(8192) {
        put(dir, "experts-001.fbw", at as u64, !whole[at]);
    }
    let error = logits(&mut engine).unwrap_err();
    for words in ["of layer 1", "experts-001.fbw", "from offset", "have checksum", "expected 0x"] {
        assert!(error.contains(words), "{error}");
    }
    fs::write(dir.join("experts-001.fbw"), &whole).unwrap();
    assert!(logits(&mut engine).unwrap() == want, "the engine goes on");
}

#[test]
fn a_bad_record_comes_from_the_next_disk() {
    let (_source, dir) = packed();
    let mirror = TempDir::new().unwrap();
    for (name, bytes) in files(dir.path()) {
        fs::write(mirror.path().join(name), bytes).unwrap();
    }
    let options = streaming(dir.path());
    let want = logits(&mut open(dir.path(), options).unwrap()).unwrap();
    let mirrors = [mirror.path().to_owned()];
    let mut engine = Engine::open_mirrored(dir.path(), &mirrors, options, &mut |_, _| {}).unwrap();
    for bad in [dir.path(), mirror.path()] {
        let whole = fs::read(bad.join("experts-002.fbw")).unwrap();
        for at in (4096 + 100..whole.len()).step_by(8192) {
            put(bad, "experts-002.fbw", at as u64, !whole[at]);
        }
        assert!(logits(&mut engine).unwrap() == want);
        fs::write(bad.join("experts-002.fbw"), &whole).unwrap();
    }
    assert!(engine.store().reader().roots().iter().map(|root| root.errors).sum::<u64>() > 0);
    assert_eq!(engine.counters().failures, 0);
}

/// Ten thousand damaged headers in a folder: verify and opening never panic, and never accept one.
#[test]
fn ten_thousand_corruptions_and_no_panic() {
    let (_source, dir) = packed();
    no_panic(&dir);
}

#[test]
fn ten_thousand_corruptions_of_a_coded_container_and_no_panic() {
    let (_source, dir) = coded();
    no_panic(&dir);
}

fn no_panic(dir: &TempDir) {
    let whole = fs::read(dir.path().join(HEADER_NAME)).unwrap();
    let mut state = 0x9E37_79B9_7F4A_7C15u64;
    let mut roll = |n: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % n.max(1)
    };
    for round in 0..10_000 {
        let mut bytes = whole.clone();
        match roll(4) {
            0 => bytes.truncate(roll(whole.len())),
            1 => bytes.extend((0..1 + roll(40)).map(|i| i as u8)),
            2 => {
                let (at, len) = (roll(bytes.len()), 1 + roll(16));
                let end = bytes.len().min(at + len);
                bytes[at..end].iter_mut().for_each(|byte| *byte = !*byte);
            }
            _ => {
                let at = roll(bytes.len());
                bytes[at] ^= 1 << roll(8);
            }
        }
        let path = dir.path().join(HEADER_NAME);
        assert!(forebay_store::native::Header::parse(&bytes, &path).is_err(), "round {round}");
        if round % 100 == 0 {
            fs::write(&path, &bytes).unwrap();
            assert!(!verify_native(dir.path(), false).is_empty());
            assert!(open(dir.path(), EngineOptions::default()).is_err());
        }
    }
}
