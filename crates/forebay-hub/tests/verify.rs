//! What `verify` finds in folders, whole and damaged.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use common::{convert, golden, int4_g64, options};
use forebay_core::CancelToken;
use forebay_hub::convert::{Options, Targets};
use forebay_hub::digest::{Digest, FileDigest};
use forebay_hub::digests::{DIGESTS, Digests};
use forebay_hub::known::{Known, MTP_SHARDS, Origin};
use forebay_hub::verify::hash::{HashError, compare, hash_all};
use forebay_hub::verify::{Kind, Report, census};

fn converted() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    convert(&golden("bf16"), dir.path(), int4_g64()).unwrap();
    dir
}

fn kinds(report: &Report) -> Vec<Kind> {
    let all: BTreeSet<Kind> = report.problems.iter().map(|problem| problem.kind).collect();
    all.into_iter().collect()
}

fn bundled() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

#[test]
fn whole_models_are_sound_whatever_their_format() {
    for case in ["bf16", "fp8", "fused"] {
        let report = census(&golden(case));
        assert!(report.is_sound(), "{case}: {:?}", report.problems);
        assert_eq!(report.mtp.as_ref().unwrap().word(), "complete", "{case}");
    }
    let dir = converted();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let report = census(dir.path());
    assert!(report.is_sound() && report.notes.is_empty(), "{:?} {:?}", report.problems, report.notes);
    fs::remove_file(dir.path().join("tokenizer.json")).unwrap();
    let notes = census(dir.path()).notes;
    assert!(notes.len() == 1 && notes[0].contains("tokenizer.json"), "{notes:?}");
    let mtp = report.mtp.unwrap();
    assert_eq!((mtp.word(), mtp.dense["int8"], mtp.experts["int8"]), ("complete", 9, 9));
    assert!(report.sparse_attention.unwrap().is_active());
    let report = census(&bundled());
    assert!(report.is_sound(), "{:?}", report.problems);
    // Weights and nothing else: the file without its header.
    let file = fs::read(bundled().join("model.safetensors")).unwrap();
    let header = u64::from_le_bytes(file[..8].try_into().unwrap());
    assert_eq!(report.resident_bytes + report.expert_bytes, file.len() as u64 - 8 - header);
}

#[test]
fn optional_parts_are_absent_partial_refused_or_complete() {
    let dir = tempfile::tempdir().unwrap();
    let without = Options { mtp: false, indexer: false, ..int4_g64() };
    convert(&golden("bf16"), dir.path(), without).unwrap();
    let report = census(dir.path());
    assert!(report.is_sound(), "{:?}", report.problems);
    assert_eq!(report.mtp.unwrap().word(), "absent");
    let declared = report.notes.iter().filter(|note| note.contains("declared")).count();
    assert_eq!(declared, 2, "{:?}", report.notes);

    // Experts of the MTP layer in another width than the rest of it are reported as both.
    let dir = tempfile::tempdir().unwrap();
    let targets = Targets { mtp: "int4-g16".parse().unwrap(), ..int4_g64().targets };
    convert(&golden("fused"), dir.path(), options(targets)).unwrap();
    let mtp = census(dir.path()).mtp.unwrap();
    assert_eq!((mtp.word(), mtp.experts.get("int4-g16")), ("complete", Some(&9)));

    // One file less: every missing tensor is listed, by name.
    let dir = converted();
    let whole = census(dir.path());
    fs::remove_file(dir.path().join("out-00002.safetensors")).unwrap();
    let report = census(dir.path());
    assert_eq!(report.mtp.as_ref().unwrap().word(), "partial");
    assert_eq!(kinds(&report), [Kind::Missing]);
    let weights: usize = whole.formats.values().flat_map(|formats| formats.values()).sum();
    let left: usize = report.formats.values().flat_map(|formats| formats.values()).sum();
    assert_eq!(report.problems.len(), weights - left);
}

#[test]
fn damage_is_named() {
    let damaged = |damage: &dyn Fn(&Path)| {
        let dir = converted();
        damage(dir.path());
        let report = census(dir.path());
        (kinds(&report), report)
    };
    let first = "out-00000.safetensors";
    let change = |dir: &Path, f: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = fs::read(dir.join(first)).unwrap();
        f(&mut bytes);
        fs::write(dir.join(first), bytes).unwrap();
    };
    let (kinds_found, report) = damaged(&|dir| change(dir, &|bytes| bytes.truncate(bytes.len() - 1)));
    assert_eq!(kinds_found[..2], [Kind::File, Kind::Missing]);
    assert!(report.problems[0].message.contains("cut short"), "{:?}", report.problems[0]);
    let (found, _) = damaged(&|dir| change(dir, &|bytes| bytes.push(0)));
    assert_eq!(found, [Kind::ExtraBytes]);
    let (found, report) = damaged(&|dir| {
        fs::copy(dir.join(first), dir.join("other.safetensors")).unwrap();
    });
    assert_eq!(found, [Kind::Duplicate, Kind::Stray]);
    assert!(
        report.problems.iter().any(|p| p.message.contains("both other.safetensors and out-00000")
            || p.message.contains("both out-00000.safetensors and other")),
        "{:?}",
        report.problems[0]
    );
    let (found, _) = damaged(&|dir| {
        let header = br#"{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
        let file = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 4]].concat();
        fs::write(dir.join("mine.safetensors"), file).unwrap();
    });
    assert_eq!(found, [Kind::Stray]);
    // A declared format that does not fit is malformed, never taken for something else.
    let (found, report) = damaged(&|dir| {
        change(dir, &|bytes| {
            let at = bytes.windows(8).position(|w| w == b"\"int8 70").unwrap();
            bytes[at + 6..at + 8].copy_from_slice(b"71");
        });
    });
    assert_eq!(found, [Kind::Malformed]);
    assert!(report.problems[0].message.contains("int8 71x104"), "{:?}", report.problems[0]);
    let (found, _) = damaged(&|dir| fs::write(dir.join("config.json"), "{}").unwrap());
    assert_eq!(found, [Kind::Folder]);
    let (found, report) = damaged(&|dir| fs::write(dir.join("x.safetensors.incomplete"), "").unwrap());
    assert!(found.is_empty());
    assert!(report.notes.iter().any(|note| note.contains("x.safetensors.incomplete")));
    assert_eq!(kinds(&census(Path::new("no such folder"))), [Kind::Folder]);
}

/// Who vouches for the folder, what was found, and the bytes that were hashed.
fn hash(dir: &Path, state: &Path) -> Result<(Vec<Origin>, Report, u64), HashError> {
    let Known { digests: wanted, origins } = Known::of_folder(dir)?;
    let mut most = 0;
    let found = hash_all(dir, Some(&wanted), state, 2, &CancelToken::new(), &mut |done, _| most = done)?;
    let mut report = census(dir);
    compare(&wanted, &found, &mut report);
    Ok((origins.into_iter().collect(), report, most))
}

#[test]
fn every_changed_byte_is_found_by_its_hash() {
    let (dir, state) = (converted(), tempfile::tempdir().unwrap());
    let state = state.path().join("state/s.json");
    let (origin, report, bytes) = hash(dir.path(), &state).unwrap();
    assert!(origin == [Origin::Recorded] && report.is_sound(), "{:?}", report.problems);
    assert!(bytes > report.bytes() && !state.exists());
    let path = dir.path().join("out-00001.safetensors");
    let good = fs::read(&path).unwrap();
    for at in [good.len() - 1, good.len() / 2, good.len() * 3 / 4] {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(&path, &bad).unwrap();
        let (_, report, _) = hash(dir.path(), &state).unwrap();
        assert_eq!(
            (kinds(&report), &*report.problems[0].name),
            (vec![Kind::Digest], "out-00001.safetensors")
        );
    }
    fs::write(&path, &good).unwrap();
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let (_, report, _) = hash(dir.path(), &state).unwrap();
    assert_eq!(kinds(&report), [Kind::Folder, Kind::Absent]);
    let mut digests = Digests::read(dir.path()).unwrap().unwrap();
    digests.0.remove("out-00001.safetensors");
    digests.write(dir.path()).unwrap();
    assert!(kinds(&hash(dir.path(), &state).unwrap().1).contains(&Kind::NotRecorded));
}

/// Stopped after every block: each run goes on behind the files that were done, and none is taken on trust when it
/// changed in between.
#[test]
fn hashing_goes_on_where_it_was_stopped() {
    let (dir, state) = (converted(), tempfile::tempdir().unwrap());
    let state = state.path().join("s.json");
    let token = CancelToken::new();
    token.cancel();
    let stopped = hash_all(dir.path(), None, &state, 2, &token, &mut |_, _| {});
    assert!(matches!(stopped, Err(HashError::Cancelled)));
    // As a run leaves it that was stopped behind one file.
    let whole = hash_all(dir.path(), None, &state, 1, &CancelToken::new(), &mut |_, _| {}).unwrap();
    let name = "out-00000.safetensors";
    let time = fs::metadata(dir.path().join(name)).unwrap().modified().unwrap();
    let time = time.duration_since(std::time::UNIX_EPOCH).unwrap().as_nanos();
    let size = whole.0[name].size;
    let fake = "0".repeat(64);
    let entry = |time: u128| {
        serde_json::json!({name: {"size": size, "sha256": fake, "modified": time.to_string()}}).to_string()
    };
    fs::write(&state, entry(time)).unwrap();
    let resumed = hash_all(dir.path(), None, &state, 2, &CancelToken::new(), &mut |_, _| {}).unwrap();
    assert_eq!(resumed.0[name].digest.hex(), fake, "what was done is not done again");
    fs::write(&state, entry(time - 1)).unwrap();
    let changed = hash_all(dir.path(), None, &state, 2, &CancelToken::new(), &mut |_, _| {}).unwrap();
    assert_eq!(changed, whole, "what changed is");
}

#[cfg(unix)]
#[test]
fn a_hugging_face_cache_says_what_its_blobs_should_be() {
    let (model, cache, state) = (converted(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (blobs, snapshot) = (cache.path().join("blobs"), cache.path().join("snapshots/c0ffee"));
    fs::create_dir_all(&blobs).unwrap();
    fs::create_dir_all(&snapshot).unwrap();
    for (name, known) in Digests::read(model.path()).unwrap().unwrap().0 {
        // Small files are named by their git hash there.
        let git = || forebay_testkit::hub::git_blob(&fs::read(model.path().join(&name)).unwrap());
        let blob = if name == "config.json" { git() } else { known.digest.hex().to_owned() };
        fs::copy(model.path().join(&name), blobs.join(&blob)).unwrap();
        std::os::unix::fs::symlink(format!("../../blobs/{blob}"), snapshot.join(&name)).unwrap();
    }
    let state = state.path().join("s.json");
    let (origin, report, _) = hash(&snapshot, &state).unwrap();
    assert!(origin == [Origin::Cache] && report.is_sound(), "{:?}", report.problems);
    let blob = fs::canonicalize(snapshot.join("out-00000.safetensors")).unwrap();
    let mut bytes = fs::read(&blob).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&blob, bytes).unwrap();
    assert_eq!(kinds(&hash(&snapshot, &state).unwrap().1), [Kind::Digest]);
    // A small file is checked as well, by its git id.
    let config = fs::canonicalize(snapshot.join("config.json")).unwrap();
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, format!("{text} ")).unwrap();
    let (_, report, _) = hash(&snapshot, &state).unwrap();
    let named: Vec<&str> = report.problems.iter().map(|problem| &*problem.name).collect();
    assert_eq!(named, ["config.json", "out-00000.safetensors"]);
    assert!(!snapshot.join(DIGESTS).exists(), "nothing is written into a snapshot");
    fs::remove_dir_all(&snapshot).unwrap();
    fs::create_dir(&snapshot).unwrap();
    assert_eq!(Known::of_folder(&snapshot).unwrap(), Known::default());
}

/// Conversion spec section 6: the public artifact, from its names and shapes.
#[test]
fn the_public_artifact_is_counted_from_its_headers() {
    let dir = tempfile::tempdir().unwrap();
    forebay_testkit::glm52::write(dir.path()).unwrap();
    let report = census(dir.path());
    assert!(report.is_sound(), "{:?}", report.problems.first());
    assert_eq!(report.tensors, 118_478);
    assert_eq!((report.resident_bytes, report.expert_bytes), (10_877_286_144, 372_848_459_776));
    let mtp = report.mtp.as_ref().unwrap();
    assert_eq!((mtp.word(), mtp.experts["int8"], mtp.dense["int8"]), ("complete", 768, 9));
    assert!(report.notes.iter().any(|note| note.contains("no indexer tensors")), "{:?}", report.notes);
    let families: Vec<String> = report.families().into_keys().collect();
    assert!(families.contains(&"out".to_owned()), "{families:?}");
}

/// Conversion spec section 6: the three published MTP shards together are known by their sizes, and by nothing less.
#[test]
fn the_published_mtp_shards_are_known() {
    let dir = tempfile::tempdir().unwrap();
    let hole =
        |name: &str, size: u64| fs::File::create(dir.path().join(name)).unwrap().set_len(size).unwrap();
    let known = || Known::of_folder(dir.path()).unwrap();
    assert_eq!(MTP_SHARDS.iter().map(|(size, _)| size).sum::<u64>(), 9_959_320_752);
    hole("out-00000.safetensors", MTP_SHARDS[0].0);
    hole("out-mtp-00001.safetensors", MTP_SHARDS[1].0);
    hole("out-mtp-00139.safetensors", MTP_SHARDS[0].0);
    assert_eq!(known(), Known::default());
    hole("out-mtp-00140.safetensors", MTP_SHARDS[2].0);
    let found = known();
    assert_eq!(found.origins.into_iter().collect::<Vec<_>>(), [Origin::Published]);
    let sizes: Vec<u64> = found.digests.0.values().map(|known| known.size).collect();
    assert_eq!(sizes, [MTP_SHARDS[1].0, MTP_SHARDS[0].0, MTP_SHARDS[2].0]);
    // What somebody recorded comes first, and zeros are not what was published.
    let mine = FileDigest { size: 1, digest: Digest::sha256(&"a".repeat(64)).unwrap() };
    Digests([("out-mtp-00001.safetensors".to_owned(), mine.clone())].into()).write(dir.path()).unwrap();
    let found = known();
    assert_eq!(found.digests.0["out-mtp-00001.safetensors"], mine);
    assert_eq!(found.origins.len(), 2);
}
