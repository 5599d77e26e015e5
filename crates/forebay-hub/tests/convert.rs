//! What conversion makes, against an independent computation in numpy (tools/oracle/convert_goldens.py).

mod common;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::rc::Rc;

use common::{
    CASES, HandOut, bytes, convert, copy, format, golden, int4_g64, model_files, options, run, scores,
};
use forebay_core::{CancelToken, Format};
use forebay_hub::convert::layout::FILLER;
use forebay_hub::convert::{ConvertError, Job, LocalFolder, Options, Targets};
use forebay_hub::digest::{Algorithm, FileDigest};
use forebay_hub::digests::Digests;
use forebay_model::{Capability, Snapshot, SnapshotOptions};
use forebay_store::catalog::Catalog;
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

fn targets(parts: &Map<String, Value>) -> Targets {
    let part = |name: &str| parts.get(name).map_or(Format::Int8Row, |text| format(text.as_str().unwrap()));
    Targets {
        experts: part("experts"),
        dense: part("dense"),
        attention: part("attention"),
        embedding: part("embed"),
        head: part("head"),
        indexer: part("indexer"),
        mtp: part("mtp"),
    }
}

fn expected(case: &str) -> Value {
    serde_json::from_slice(&fs::read(golden(case).join("expected.json")).unwrap()).unwrap()
}

#[test]
fn results_equal_an_independent_computation_byte_for_byte() {
    for case in CASES {
        let expected = expected(case);
        for (target, parts) in expected["targets"].as_object().unwrap() {
            let dir = tempfile::tempdir().unwrap();
            convert(&golden(case), dir.path(), options(targets(parts.as_object().unwrap()))).unwrap();
            let catalog = Catalog::open(dir.path()).unwrap();
            let wanted = expected["results"][target].as_object().unwrap();
            let mut tensors = 0;
            for (name, wanted) in wanted {
                let entry = catalog.get(name).unwrap_or_else(|| panic!("{case} {target}: {name} is missing"));
                let found = match entry.declared {
                    Some(declared) => declared.format.to_string(),
                    None => entry.dtype.to_string().to_lowercase(),
                };
                let mut all = bytes(&catalog, name).unwrap();
                let scales = bytes(&catalog, &format!("{name}.qs"));
                tensors += 1 + usize::from(scales.is_some());
                all.extend(scales.unwrap_or_default());
                let hash = format!("{:x?}", Sha256::digest(&all)[..8].to_vec());
                let hash: String =
                    hash.split(", ").map(|b| format!("{:0>2}", b.trim_matches(['[', ']']))).collect();
                assert_eq!(format!("{found} {hash}"), wanted.as_str().unwrap(), "{case} {target}: {name}");
            }
            let fillers = catalog.iter().filter(|(name, _)| name.starts_with(FILLER)).count();
            assert_eq!(catalog.len(), tensors + fillers, "{case} {target}: nothing else is written");
        }
    }
}

#[test]
fn results_are_whole_models_that_the_engine_runs() {
    for (case, to) in [
        ("bf16", "int4-g64"),
        ("bf16", "int8"),
        ("fp8", "int4-g64"),
        ("fp8", "int4-row"),
        ("fp8", "int8"),
        ("fused", "int4-row"),
        ("nvfp4", "int4-g64"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        convert(&golden(case), dir.path(), options(Targets::of(format(to)))).unwrap();
        let found = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap();
        assert_eq!(
            (&found.sparse_attention, &found.mtp),
            (&Capability::Active, &Capability::Active),
            "{case}"
        );
        // The MTP layer's experts are read at once as well.
        let mtp = found.mtp_part.as_ref().unwrap();
        for experts in [&found.experts, &mtp.experts] {
            assert_eq!(experts.total, experts.coalesced, "{case} {to}");
        }
        assert!(
            found.notes.iter().all(|note| !note.contains("more than one group size")),
            "{:?}",
            found.notes
        );
        // NVFP4 is never run.
        if case != "nvfp4" {
            // 130 columns in groups of 64 would be taken for groups of 48.
            let to = format(if (case, to) == ("fp8", "int4-g64") { "int4-g32" } else { to });
            let dir = tempfile::tempdir().unwrap();
            convert(&golden(case), dir.path(), options(Targets { attention: to, ..Targets::of(to) }))
                .unwrap();
            // The engine quantises at load by the same rule, so not a bit may differ.
            let (before, after) = (scores(&golden(case), Some(to)), scores(dir.path(), None));
            assert!(after.iter().all(|score| score.log_probability.is_finite()));
            assert_eq!(before, after, "{case} {to}");
        }
    }
}

/// Container spec section 7 and conversion spec section 1: one read an expert, from a whole page on, codes first.
#[test]
fn experts_are_one_aligned_run_of_codes_and_scales() {
    for case in CASES {
        let dir = tempfile::tempdir().unwrap();
        convert(&golden(case), dir.path(), int4_g64()).unwrap();
        let catalog = Catalog::open(dir.path()).unwrap();
        let mut experts: BTreeMap<String, Vec<(u64, u64, u32, bool)>> = BTreeMap::new();
        for (name, entry) in catalog.iter().filter(|(name, _)| name.contains(".experts.")) {
            let (layer, rest) = name.split_once(".experts.").unwrap();
            let key = format!("{layer} {}", rest.split_once('.').unwrap().0);
            let is_scale = name.ends_with(".qs");
            experts.entry(key).or_default().push((entry.offset, entry.len, entry.shard, is_scale));
        }
        for (key, mut parts) in experts {
            parts.sort_unstable();
            assert_eq!(parts.len(), 6);
            assert!(parts[0].0.is_multiple_of(4096), "{case} {key}");
            assert!(parts.iter().all(|part| part.2 == parts[0].2), "{case} {key} is split");
            assert_eq!(
                parts.iter().map(|part| part.3).collect::<Vec<_>>(),
                [false, false, false, true, true, true]
            );
            for (n, pair) in parts.windows(2).enumerate() {
                let gap = pair[1].0 - pair[0].0 - pair[0].1;
                // Scales are words: up to three bytes may lie between them and the codes.
                assert!(gap == 0 || (n == 2 && gap < 4), "{case} {key}: a gap of {gap}");
                assert!(!pair[1].3 || pair[1].0.is_multiple_of(4));
            }
        }
        // Other readers of safetensors refuse holes.
        for shard in 0..catalog.shards().len() as u32 {
            let mut all: Vec<_> =
                catalog.iter().filter(|(_, e)| e.shard == shard).map(|(_, e)| (e.offset, e.len)).collect();
            all.sort_unstable();
            let ends = all.windows(2).all(|pair| pair[0].0 + pair[0].1 == pair[1].0);
            let (last, len) = all[all.len() - 1];
            assert!(
                ends && last + len == catalog.shards()[shard as usize].size && all[0].0.is_multiple_of(4096)
            );
        }
    }
}

#[test]
fn threads_change_no_byte_and_neither_does_a_source_that_gives_one_file_at_a_time() {
    for case in CASES {
        let (one, many, handed) =
            (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        convert(&golden(case), one.path(), Options { threads: 1, ..int4_g64() }).unwrap();
        convert(&golden(case), many.path(), Options { threads: 7, ..int4_g64() }).unwrap();
        let want = model_files(one.path());
        assert!(model_files(many.path()) == want, "{case}");
        let at = tempfile::tempdir().unwrap();
        let mut source = HandOut::new(&golden(case), at.path());
        let bound = Job::new(&mut source, int4_g64()).unwrap().streamed_disk_bytes();
        let (measured, most) = (handed.path().to_owned(), Rc::new(Cell::new(0)));
        let seen = most.clone();
        source.before_take = Box::new(move |_| {
            seen.set(seen.get().max(weights_in(&measured)));
            Ok(())
        });
        run(&mut source, handed.path(), int4_g64()).unwrap();
        assert_eq!(source.taken, [0, 1, 2], "{case}: every file is taken once");
        let largest = (0..3).map(|file| source.size(file)).max().unwrap();
        let end = weights_in(handed.path());
        assert!(most.get() > 0 && most.get().max(end) + largest <= bound, "{case}: {most:?} of {bound}");
        assert!(model_files(handed.path()) == want, "{case}");
        // Again: nothing to do, and nothing is taken.
        let again = run(&mut source, handed.path(), int4_g64()).unwrap();
        assert_eq!((again.written, source.taken.len()), (0, 3), "{case}");
    }
}

/// Bytes of weight files and pieces set aside, as they are on the disk.
fn weights_in(dir: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(dir) else { return 0 };
    let size = |entry: fs::DirEntry| match entry.path() {
        path if path.is_dir() => weights_in(&path),
        path if path.extension().is_some_and(|end| end == "json") => 0,
        path => fs::metadata(path).unwrap().len(),
    };
    entries.map(|entry| size(entry.unwrap())).sum()
}

/// Stopped before every file: whatever is there then is continued, and pieces that were set aside are found again.
#[test]
fn a_source_that_fails_anywhere_is_continued() {
    let whole = tempfile::tempdir().unwrap();
    convert(&golden("fp8"), whole.path(), int4_g64()).unwrap();
    let (dir, at) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for fails_at in 0..3 {
        let mut source = HandOut::new(&golden("fp8"), at.path());
        source.before_take = Box::new(move |file| match file == fails_at {
            true => Err(ConvertError::Source { name: file.to_string(), what: "the line was cut".into() }),
            false => Ok(()),
        });
        let error = run(&mut source, dir.path(), int4_g64()).unwrap_err();
        assert!(error.to_string().contains("the line was cut"), "{error}");
        // Only what this run is the first to reach was taken.
        assert_eq!(source.taken, if fails_at == 0 { vec![] } else { vec![fails_at - 1] });
        assert!(!dir.path().join("config.json").exists(), "half a model must not look like one");
    }
    run(&mut HandOut::new(&golden("fp8"), at.path()), dir.path(), int4_g64()).unwrap();
    assert!(model_files(dir.path()) == model_files(whole.path()));
    assert!(!dir.path().join("forebay-convert.parts").exists());
}

#[test]
fn only_what_the_manifest_says_is_trusted() {
    let (source, dir) = (copy("bf16"), tempfile::tempdir().unwrap());
    convert(source.path(), dir.path(), int4_g64()).unwrap();
    let want = model_files(dir.path());
    let again = |wanted: (usize, usize), what: &str| {
        let done = convert(source.path(), dir.path(), int4_g64()).unwrap();
        assert_eq!((done.written, done.kept), wanted, "{what}");
        assert!(model_files(dir.path()) == want, "{what}");
    };
    again((0, 3), "all is there");
    let path = dir.path().join("out-00001.safetensors");
    let good = fs::read(&path).unwrap();
    fs::write(&path, &good[..good.len() - 1]).unwrap();
    again((1, 2), "cut short");
    let mut bad = good.clone();
    bad[good.len() / 2] ^= 1;
    fs::write(&path, &bad).unwrap();
    again((1, 2), "another byte");
    fs::write(&path, &good).unwrap();
    again((0, 3), "the same bytes, written again");
    fs::remove_file(&path).unwrap();
    again((1, 2), "gone");
    // A file that is there but that no run finished is not taken for one.
    let manifest = dir.path().join("forebay-convert.json");
    let mut map: Value = serde_json::from_slice(&fs::read(&manifest).unwrap()).unwrap();
    map["done"].as_object_mut().unwrap().remove("out-00000.safetensors");
    fs::write(&manifest, map.to_string()).unwrap();
    again((1, 2), "not in the manifest");
    fs::write(&manifest, "{").unwrap();
    let error = convert(source.path(), dir.path(), int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::Manifest { .. }), "{error}");
}

#[test]
fn other_options_another_source_and_other_peoples_folders_are_refused() {
    let (source, dir) = (copy("bf16"), tempfile::tempdir().unwrap());
    convert(source.path(), dir.path(), int4_g64()).unwrap();
    let before = model_files(dir.path());
    let other = Options { mtp: false, ..options(Targets::of(Format::Int4Row)) };
    let error = convert(source.path(), dir.path(), other).unwrap_err().to_string();
    for words in
        ["mtp: true there, false asked for", "formats.experts: \"int4-g64\" there, \"int4-row\" asked for"]
    {
        assert!(error.contains(words), "{error}");
    }
    let first = source.path().join("model-00001-of-00003.safetensors");
    let bytes = fs::read(&first).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(&first, &bytes).unwrap();
    let error = convert(source.path(), dir.path(), int4_g64()).unwrap_err().to_string();
    assert!(error.contains("source.model-00001-of-00003.safetensors"), "{error}");
    assert!(model_files(dir.path()) == before);

    let error = convert(source.path(), source.path(), int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::SameFolder { .. }), "{error}");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.txt"), "mine").unwrap();
    let error = convert(source.path(), dir.path(), int4_g64()).unwrap_err();
    assert!(matches!(&error, ConvertError::Occupied { found, .. } if found == "thesis.txt"), "{error}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// Where digests of the source are known its bytes are compared with them; a difference is named, and nothing else
/// is refused.
#[test]
fn a_source_that_is_not_what_was_recorded_is_refused() {
    let (source, plain) = (copy("bf16"), tempfile::tempdir().unwrap());
    convert(source.path(), plain.path(), int4_g64()).unwrap();
    let record = |dir: &Path| -> Value {
        serde_json::from_slice(&fs::read(dir.join("forebay-convert.json")).unwrap()).unwrap()
    };
    assert_eq!(record(plain.path())["verified"], serde_json::json!({}), "nobody vouches for them");
    let all = fs::read_dir(source.path()).unwrap().map(|entry| entry.unwrap());
    let digest = |entry: fs::DirEntry| {
        let bytes = fs::read(entry.path()).unwrap();
        // As a hub proves small files.
        let small = bytes.len() < 10_000;
        let algorithm = if small { Algorithm::GitBlob } else { Algorithm::Sha256 };
        (entry.file_name().into_string().unwrap(), FileDigest::of(algorithm, &bytes))
    };
    let digests = Digests(all.map(digest).collect());
    digests.write(source.path()).unwrap();
    let out = tempfile::tempdir().unwrap();
    convert(source.path(), out.path(), int4_g64()).unwrap();
    assert!(model_files(out.path()) == model_files(plain.path()));
    for (name, known) in digests.0.iter().filter(|(name, _)| name.ends_with(".safetensors")) {
        assert_eq!(record(out.path())["verified"][name], known.digest.to_string());
    }
    for name in ["model-00002-of-00003.safetensors", "config.json"] {
        let (path, out) = (source.path().join(name), tempfile::tempdir().unwrap());
        let good = fs::read(&path).unwrap();
        let mut bad = good.clone();
        // A space in the config's last line, a bit of the last weight.
        *bad.last_mut().unwrap() ^= if name == "config.json" { b'\n' ^ b' ' } else { 1 };
        let longer = [&good[..], b" "].concat();
        for bytes in [bad, longer] {
            fs::write(&path, bytes).unwrap();
            let error = convert(source.path(), out.path(), int4_g64()).unwrap_err();
            let named = matches!(&error, ConvertError::Damaged { path: found, .. } if *found == path);
            assert!(named || name != "config.json" && matches!(error, ConvertError::Shard(_)), "{error}");
            assert!(
                !out.path().join("out-00001.safetensors").exists()
                    && !out.path().join("config.json").exists()
            );
        }
        fs::write(&path, good).unwrap();
        convert(source.path(), out.path(), int4_g64()).unwrap();
        assert!(model_files(out.path()) == model_files(plain.path()), "{name}");
    }
}

#[test]
fn parts_are_left_out_only_when_asked_and_never_half() {
    let dir = tempfile::tempdir().unwrap();
    let without = Options { mtp: false, indexer: false, ..int4_g64() };
    let mut source = LocalFolder::new(&golden("bf16"));
    let job = Job::new(&mut source, without).unwrap();
    assert_eq!(job.plan.notes.len(), 2, "{:?}", job.plan.notes);
    convert(&golden("bf16"), dir.path(), without).unwrap();
    let found = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap();
    assert!(matches!(found.mtp, Capability::Absent { .. }) && !found.sparse_attention.is_active());
    // A source with half of an MTP layer is an incomplete download.
    let half = copy("bf16");
    fs::remove_file(half.path().join("model-00003-of-00003.safetensors")).unwrap();
    let error = Job::new(&mut LocalFolder::new(half.path()), int4_g64()).unwrap_err();
    assert!(matches!(error, ConvertError::Layout { count: 2.., .. }), "{error}");
}

/// A checkpoint with the bundled model's config has the tensors and byte counts of the bundled model, which another
/// program converted to int8.
#[test]
fn the_bundled_models_geometry_becomes_its_container() {
    let bundled = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let (source, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    fs::copy(bundled.join("config.json"), source.path().join("config.json")).unwrap();
    let config = forebay_store::config::ConfigFile::read(&bundled).unwrap();
    let spec = forebay_model::families::glm::spec(&config).unwrap();
    let (mut header, mut data) = (Map::new(), Vec::new());
    let wanted = Catalog::open(&bundled).unwrap();
    let mut add = |name: String, shape: Vec<usize>| {
        let begin = data.len();
        // Normal-ish numbers whose sizes differ by row, in BF16: the low bits of a counter, mixed.
        let values = shape.iter().product::<usize>();
        data.extend((0..values as u32).flat_map(|n| {
            let mixed = n.wrapping_mul(0x9E37_79B9).rotate_left(11) ^ n;
            (0x3C00u16 | (mixed as u16 & 0x80FF)).to_le_bytes()
        }));
        header.insert(
            name,
            serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": [begin, data.len()]}),
        );
    };
    for need in needs(&spec) {
        use forebay_model::families::roles::Shape;
        let shape = match need.shape {
            Shape::Matrix { rows, cols } | Shape::FloatMatrix { rows, cols } => vec![rows, cols],
            Shape::Vector { len } => vec![len],
        };
        add(need.name, shape);
    }
    let text = Value::Object(header).to_string();
    let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    fs::write(source.path().join("model.safetensors"), file).unwrap();
    convert(source.path(), out.path(), options(Targets::of(Format::Int8Row))).unwrap();
    let found = Catalog::open(out.path()).unwrap();
    for (name, entry) in wanted.iter() {
        let made = found.get(name).unwrap_or_else(|| panic!("{name} is missing"));
        assert_eq!((&made.dtype, made.len), (&entry.dtype, entry.len), "{name}");
    }
    let made = found.iter().filter(|(name, _)| !name.starts_with(FILLER)).count();
    assert_eq!(made, wanted.len());
    assert_eq!(Snapshot::open(out.path(), SnapshotOptions::default()).unwrap().mtp, Capability::Active);
}

/// Every tensor of a model.
fn needs(spec: &forebay_model::ModelSpec) -> Vec<forebay_model::families::roles::TensorNeed> {
    use forebay_model::families::glm;
    let mut needs = glm::global_needs(spec);
    for layer in 0..spec.layers.len() {
        needs.extend(glm::layer_needs(spec, layer));
    }
    for layer in spec.sparse_layers() {
        needs.extend((0..spec.moe.experts).flat_map(|expert| glm::expert_needs(spec, layer, expert)));
    }
    if let Some(indexer) = &spec.indexer {
        needs.extend(spec.full_indexer_layers().flat_map(|layer| glm::indexer_needs(spec, indexer, layer)));
    }
    needs.extend(glm::mtp_needs(spec));
    needs
}

/// Three random geometries, in BF16 and in FP8: what the engine makes of the result is bit for bit what it makes of
/// the source when it quantises at load, by a way of its own.
#[test]
fn random_geometries_convert_and_reload() {
    use forebay_hub::synth::random::Stream;
    use forebay_hub::synth::{self, Dims, SynthSpec, TextFiles};
    // Widths in which groups of 64 are not mistaken for others.
    const WIDTHS: [usize; 7] = [32, 64, 112, 128, 160, 192, 200];
    for seed in 0..3 {
        let mut stream = Stream::new(seed, "geometry", 0);
        let mut pick = |from: &[usize]| from[stream.bits() as usize % from.len()];
        let dims = Dims {
            hidden: pick(&WIDTHS[2..]),
            dense_width: pick(&WIDTHS),
            expert_width: pick(&WIDTHS),
            experts: pick(&[2, 5, 8]),
            top_k: 2,
            heads: 4,
            q_rank: pick(&WIDTHS),
            kv_rank: pick(&WIDTHS),
            value: pick(&[16, 32, 40]),
            vocab: 320,
            max_context: 512,
            ..Dims::TINY
        };
        let spec = SynthSpec {
            dims,
            dense: 1,
            moe: 1,
            format: Format::Bf16,
            mtp: true,
            dsa: true,
            seed,
            shard_bytes: 200_000,
        };
        let text = TextFiles { files: vec![], tokens: 300, stop_ids: vec![290] };
        let source = tempfile::tempdir().unwrap();
        synth::write(source.path(), &spec, &text, 2, &CancelToken::new(), &mut |_, _| {}).unwrap();
        for fp8 in [false, true] {
            if fp8 {
                to_fp8(source.path());
            }
            for to in ["int4-g64", "int4-row", "int8"] {
                let (to, out) = (format(to), tempfile::tempdir().unwrap());
                let targets = Targets { attention: to, ..Targets::of(to) };
                convert(source.path(), out.path(), options(targets))
                    .unwrap_or_else(|error| panic!("{dims:?}: {error}"));
                let found = Snapshot::open(out.path(), SnapshotOptions::default()).unwrap();
                assert_eq!((&found.sparse_attention, &found.mtp), (&Capability::Active, &Capability::Active));
                assert_eq!(scores(source.path(), Some(to)), scores(out.path(), None), "{dims:?} {to} {fp8}");
            }
        }
    }
}

/// Stores the matrices of layers, the router apart, as FP8 with a multiplier per block.
fn to_fp8(dir: &Path) {
    use forebay_core::float::{bf16_to_f32, f32_to_fp8_e4m3};
    let mut scales: Vec<(String, [usize; 2], Vec<u8>)> = Vec::new();
    common::rewrite(dir, &mut |name, dtype, shape, bytes| {
        if dtype != "BF16" || shape.len() != 2 || !name.contains(".layers.") {
            return true;
        }
        let (rows, cols) = (shape[0] as usize, shape[1] as usize);
        let words = bytes.as_chunks().0.iter();
        let values: Vec<f32> = words.map(|word| bf16_to_f32(u16::from_le_bytes(*word))).collect();
        let across = cols.div_ceil(128);
        let block = |i: usize| i / cols / 128 * across + i % cols / 128;
        let mut largest = vec![0f32; rows.div_ceil(128) * across];
        values.iter().enumerate().for_each(|(i, v)| largest[block(i)] = largest[block(i)].max(v.abs()));
        let factors: Vec<f32> = largest.iter().map(|most| (most / 448.0).max(1e-12)).collect();
        *bytes = values.iter().enumerate().map(|(i, v)| f32_to_fp8_e4m3(v / factors[block(i)])).collect();
        *dtype = "F8_E4M3".to_owned();
        let factors = factors.iter().flat_map(|factor| factor.to_le_bytes()).collect();
        scales.push((format!("{name}_scale_inv"), [rows.div_ceil(128), across], factors));
        true
    });
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, shape, bytes) in scales {
        let offsets = [data.len(), data.len() + bytes.len()];
        header.insert(name, serde_json::json!({"dtype": "F32", "shape": shape, "data_offsets": offsets}));
        data.extend(bytes);
    }
    let text = Value::Object(header).to_string();
    let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), &data].concat();
    fs::write(dir.join("scales.safetensors"), file).unwrap();
}
