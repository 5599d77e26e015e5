//! What is written, and that it is the same however it is written.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use forebay_core::{CancelToken, Format, GroupSize};
use forebay_hub::synth::{self, Dims, Plan, STAMP, SynthError, SynthSpec, TextFiles, Written};
use forebay_model::{Capability, Snapshot, SnapshotOptions};
use forebay_store::catalog::Catalog;
use sha2::{Digest, Sha256};

fn text() -> TextFiles {
    let files = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
    TextFiles { files, tokens: 300, stop_ids: vec![290] }
}

/// A few megabytes with everything in it, in many files.
fn small() -> SynthSpec {
    let dims = Dims {
        hidden: 160,
        dense_width: 128,
        expert_width: 256,
        experts: 12,
        top_k: 4,
        vocab: 320,
        max_context: 512,
        ..Dims::TINY
    };
    let group = GroupSize::new(64).unwrap();
    SynthSpec {
        dims,
        dense: 1,
        moe: 2,
        format: Format::Int4Group(group),
        mtp: true,
        dsa: true,
        seed: 7,
        shard_bytes: 300_000,
    }
}

fn write(dir: &Path, spec: &SynthSpec, threads: usize) -> Result<Written, SynthError> {
    synth::write(dir, spec, &text(), threads, &CancelToken::new(), &mut |_, _| {})
}

/// The hash of every file.
fn hashes(dir: &Path) -> BTreeMap<String, String> {
    let hash = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.unwrap();
        let digest = Sha256::digest(fs::read(entry.path()).unwrap());
        (entry.file_name().into_string().unwrap(), format!("{digest:x?}"))
    };
    fs::read_dir(dir).unwrap().map(hash).collect()
}

#[test]
fn the_full_model_has_the_published_totals() {
    // The audited artifact, which has no indexer.
    let spec = SynthSpec {
        dims: Dims::GLM_5_2,
        dense: 3,
        moe: 75,
        format: Format::Int4Row,
        mtp: true,
        dsa: false,
        seed: 0,
        shard_bytes: 5_000_000_000,
    };
    let plan = Plan::new(&spec, &TextFiles { files: vec![], tokens: 154_856, stop_ids: vec![1] }).unwrap();
    assert_eq!(plan.tensors(), 118_478);
    let headers: u64 = plan.shards.iter().map(|shard| shard.header.len() as u64).sum();
    assert_eq!(plan.bytes() - headers, 10_877_286_144 + 372_848_459_776);
    let experts =
        plan.shards.iter().flat_map(|shard| &shard.tensors).filter(|t| t.name.contains(".experts."));
    assert_eq!(experts.map(|tensor| tensor.bytes).sum::<u64>(), 372_848_459_776);
    for shard in &plan.shards {
        assert!(shard.bytes <= 5_010_000_000, "{}: {}", shard.name, shard.bytes);
        assert!(shard.header.len().is_multiple_of(8), "{}", shard.name);
    }
    assert!(plan.shards.len() <= 512);
}

#[test]
fn every_format_makes_a_complete_model_whose_experts_are_read_at_once() {
    let formats = ["int4-row", "int4-g64", "int4-g32", "int8", "int2-row", "bf16", "f16", "f32", "fp8-e4m3"];
    for format in formats {
        let dir = tempfile::tempdir().unwrap();
        let spec = SynthSpec { format: format.parse().unwrap(), ..small() };
        write(dir.path(), &spec, 2).unwrap();
        let found = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap();
        assert!(matches!(found.sparse_attention, Capability::Active), "{format}: {}", found.sparse_attention);
        assert!(matches!(found.mtp, Capability::Active), "{format}: {}", found.mtp);
        assert_eq!((found.experts.total, found.experts.coalesced), (24, 24), "{format}");
        assert_eq!(found.experts.formats, BTreeMap::from([(format.to_owned(), 72)]), "{format}");
        assert_eq!(found.stop_ids, [290]);
    }
}

/// Blocks of 128 x 128 whose largest weight has the largest code, 448 (0x7E, or 0xFE if it is negative): as published.
#[test]
fn fp8_has_a_multiplier_for_every_block_that_uses_all_of_its_range() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &SynthSpec { format: Format::Fp8Block, ..small() }, 2).unwrap();
    let catalog = Catalog::open(dir.path()).unwrap();
    let read = |name: &str| {
        let entry = catalog.get(name).unwrap();
        let file = fs::read(&catalog.shards()[entry.shard as usize].path).unwrap();
        (entry.clone(), file[entry.offset as usize..][..entry.len as usize].to_vec())
    };
    let mut blocks = 0;
    for (name, _) in catalog.iter().filter(|(name, _)| name.ends_with("experts.3.up_proj.weight")) {
        let ((codes, bytes), (scales, multipliers)) = (read(name), read(&format!("{name}_scale_inv")));
        assert_eq!((&*codes.shape, &*scales.shape), (&[256, 160][..], &[2, 2][..]), "{name}");
        for (line, rows) in bytes.chunks_exact(128 * 160).enumerate() {
            for columns in [0..128, 128..160] {
                let block = rows.chunks_exact(160).flat_map(|row| &row[columns.clone()]);
                assert_eq!(block.map(|code| code & 0x7F).max(), Some(0x7E), "{name} {line} {columns:?}");
                blocks += 1;
            }
        }
        let numbers = multipliers.as_chunks().0.iter().map(|word| f32::from_le_bytes(*word));
        assert!(numbers.into_iter().all(|multiplier| multiplier > 0.0 && multiplier < 0.01), "{name}");
    }
    // Two layers, and the one that drafts tokens.
    assert_eq!(blocks, 3 * 4);
    // Three groups of 64 in 144 columns are three groups of 48 to a reader, which tries those first.
    let mut spec = small();
    spec.dims.expert_width = 144;
    let error = write(&dir.path().join("new"), &spec, 1).unwrap_err().to_string();
    assert!(error.contains("144 columns") && error.contains("int4-g48"), "{error}");
}

#[test]
fn threads_and_interruptions_change_no_byte() {
    let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let first = write(one.path(), &small(), 1).unwrap();
    assert!(first.shards > 8, "{first:?}");
    let want = hashes(one.path());
    write(two.path(), &small(), 3).unwrap();
    assert_eq!(hashes(two.path()), want);

    // As a killed run leaves it: one file whole, one half, one under its other name, the rest missing.
    let dir = two.path();
    let names: Vec<_> = want.keys().filter(|name| name.ends_with(".safetensors")).collect();
    let half = fs::read(dir.join(names[1])).unwrap();
    fs::write(dir.join(names[1]), &half[..half.len() / 2]).unwrap();
    fs::rename(dir.join(names[2]), dir.join(format!("{}.partial", names[2]))).unwrap();
    for name in &names[3..] {
        fs::remove_file(dir.join(name)).unwrap();
    }
    fs::remove_file(dir.join("config.json")).unwrap();
    fs::remove_file(dir.join("tokenizer.json")).unwrap();
    let written = write(dir, &small(), 2).unwrap();
    assert_eq!((written.kept, written.shards), (1, names.len() - 1));
    assert_eq!(hashes(dir), want);
    let again = write(dir, &small(), 2).unwrap();
    assert_eq!((again.kept, again.shards, again.bytes), (names.len(), 0, 0));

    let other = tempfile::tempdir().unwrap();
    write(other.path(), &SynthSpec { seed: 8, ..small() }, 1).unwrap();
    assert!(names.iter().all(|name| hashes(other.path())[*name] != want[*name]));
}

/// The token is raised after every possible number of pieces: whatever is there then is continued.
#[test]
fn a_run_stopped_anywhere_is_continued() {
    let whole = tempfile::tempdir().unwrap();
    write(whole.path(), &small(), 2).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let mut stops = 0;
    loop {
        let cancel = CancelToken::new();
        let mut seen = 0;
        let result = synth::write(dir.path(), &small(), &text(), 2, &cancel, &mut |_, _| {
            seen += 1;
            if seen > 60 {
                cancel.cancel();
            }
        });
        match result {
            Ok(_) => break,
            Err(SynthError::Cancelled) => stops += 1,
            Err(error) => panic!("{error}"),
        }
        assert!(!dir.path().join("config.json").exists(), "half a model must not look like one");
        assert!(stops < 100);
    }
    assert!(stops > 3, "{stops}");
    assert_eq!(hashes(dir.path()), hashes(whole.path()));
}

#[test]
fn what_is_there_already_is_never_touched() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let error = write(dir.path(), &small(), 1).unwrap_err();
    assert!(matches!(&error, SynthError::Occupied { found, .. } if found == "thesis.txt"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &small(), 1).unwrap();
    let before = hashes(dir.path());
    let mut other = SynthSpec { seed: 8, ..small() };
    other.dims.hidden = 256;
    let error = write(dir.path(), &other, 1).unwrap_err().to_string();
    for words in ["seed: 7 there, 8 asked for", "hidden_size: 160 there, 256 asked for", STAMP] {
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(hashes(dir.path()), before);

    // A shard of somebody else's would be read as part of the model; another config would be lost.
    for name in ["model-00001.safetensors", "config.json"] {
        fs::write(dir.path().join(name), "not ours").unwrap();
        let error = write(dir.path(), &small(), 1).unwrap_err();
        assert!(matches!(&error, SynthError::Occupied { found, .. } if found == name), "{error}");
        assert_eq!(fs::read(dir.path().join(name)).unwrap(), b"not ours");
        fs::remove_file(dir.path().join(name)).unwrap();
    }
}

#[test]
fn sizes_that_make_no_model_are_refused_before_the_folder_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let new = dir.path().join("new");
    let with = |change: fn(&mut Dims)| {
        let mut spec = small();
        change(&mut spec.dims);
        write(&new, &spec, 1).unwrap_err().to_string()
    };
    assert!(with(|d| d.top_k = 13).contains("num_experts_per_tok"));
    assert!(with(|d| d.vocab = 299).contains("300 tokens"));
    assert!(with(|d| d.hidden = 0).contains("hidden_size"));
    assert!(!new.exists());
}
