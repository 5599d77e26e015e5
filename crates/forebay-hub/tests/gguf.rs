//! GGUF files as sources: the same weights give the same model, whatever they were stored in.

mod common;
#[path = "common/gguf.rs"]
mod world;

use std::fs;
use std::path::Path;

use common::{convert, format, golden, model_files, options, run, scores};
use forebay_hub::convert::{ConvertError, Converted, GgufModel, Options, Source, Targets};
use forebay_hub::gguf::{Header, Kind, blocks};
use forebay_model::families::glm;
use forebay_store::catalog::Catalog;
use forebay_store::config::ConfigFile;
use forebay_testkit::gguf::Gguf;
use proptest::prelude::*;
use world::{BF16, F16, F32, PLAIN, Q8_0, Style, World};

fn import(from: &Path, tokenizer: &Path, to: &Path, options: Options) -> Result<Converted, ConvertError> {
    run(&mut GgufModel::open(from, Some(tokenizer))?, to, options)
}

/// Every tensor of a folder that is no filler: name, description, bytes.
fn tensors(dir: &Path) -> Vec<(String, String, Vec<u8>)> {
    let catalog = Catalog::open(dir).unwrap();
    let named = catalog.iter().filter(|(name, _)| !name.starts_with("forebay.filler."));
    let mut all: Vec<_> = named
        .map(|(name, entry)| {
            let what = format!("{} {:?} {:?}", entry.dtype, entry.shape, entry.declared);
            (name.to_owned(), what, common::bytes(&catalog, name).unwrap())
        })
        .collect();
    all.sort();
    all
}

#[test]
fn blocks_decode_as_an_independent_computation_says() {
    for kind in Kind::ALL.into_iter().filter(|kind| *kind != Kind::F32) {
        let read = |end: &str| fs::read(golden("gguf").join(format!("{kind}.{end}"))).unwrap();
        let wanted: Vec<f32> =
            read("f32").as_chunks().0.iter().map(|word| f32::from_le_bytes(*word)).collect();
        let mut found = vec![f32::NAN; wanted.len()];
        blocks::decode_row(kind, &read("blocks"), &mut found);
        assert!(wanted.len() > 60);
        for (n, (found, wanted)) in found.iter().zip(&wanted).enumerate() {
            assert!(found == wanted, "{kind}: weight {n} is {found}, expected {wanted}");
        }
    }
}

#[test]
fn the_same_weights_give_the_same_model_from_any_type() {
    let styles = [
        Style { kind: F32, files: 1, ..PLAIN },
        Style { kind: BF16, split_kv: true, files: 2, ..PLAIN },
        Style { kind: F16, files: 3, architecture: "deepseek2", ..PLAIN },
        Style { kind: Q8_0, split_kv: true, files: 1, architecture: "glm4moe" },
        Style { kind: Q8_0, files: 2, ..PLAIN },
    ];
    for (seed, style) in (1..).zip(styles) {
        let world = World::new(seed);
        let dir = tempfile::tempdir().unwrap();
        world.write_checkpoint(dir.path());
        world.write_tokenizer(dir.path());
        let file = world.write_gguf(dir.path(), style);
        for to in ["int4-g32", "int8", "f32"] {
            // Float targets keep every weight, so the whole model is.
            let targets = Targets::of(format(to));
            let targets = Targets { attention: targets.experts, head: targets.experts, ..targets };
            let [a, b] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
            convert(dir.path(), a.path(), options(targets)).unwrap();
            let done = import(&file, dir.path(), b.path(), options(targets)).unwrap();
            let (wanted, found) = (tensors(a.path()), tensors(b.path()));
            assert_eq!(wanted.len(), found.len());
            for (wanted, found) in wanted.iter().zip(&found) {
                assert!(wanted == found, "seed {seed}, {to}: {} is not {}", found.0, wanted.0);
            }
            let spec = |dir: &Path| glm::spec(&ConfigFile::read(dir).unwrap()).unwrap();
            assert_eq!(spec(a.path()), spec(b.path()), "seed {seed}");
            assert_eq!(scores(a.path(), None), scores(b.path(), None), "seed {seed}, {to}");
            check_losses(&done, to);
        }
    }
}

fn check_losses(done: &Converted, to: &str) {
    let experts = done.losses.iter().find(|(role, _)| role.to_string() == "routed experts").unwrap().1;
    let norms = done.losses.iter().find(|(role, _)| role.to_string() == "norms").unwrap().1;
    assert_eq!((norms.max, norms.rms()), (0.0, 0.0));
    // Half a step is the most, and the root of a twelfth of a step the mean of what is spread evenly.
    let step = match to {
        "f32" => return assert_eq!((experts.max, experts.rms()), (0.0, 0.0)),
        "int8" => 1.0 / 127.0,
        _ => 1.0 / 7.0,
    };
    assert!(experts.weights > 1000);
    assert!(experts.max > 0.3 * step && experts.max <= 0.5001 * step, "{to}: {experts:?}");
    // Weights are spread evenly up to the largest, whose root mean square is 1 / sqrt(3) of it.
    // Rows whose largest weight is 127 steps of the source are int8 already, and lose nothing.
    let wanted = step / 12f64.sqrt() * 3f64.sqrt();
    assert!(experts.rms() > 0.4 * wanted && experts.rms() < 1.1 * wanted, "{to}: {}", experts.rms());
}

/// A conversion that was stopped goes on behind the last complete layer, also of a single file.
#[test]
fn every_layer_is_a_file_and_a_stopped_conversion_goes_on() {
    let (world, dir, out) = (World::new(9), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    world.write_tokenizer(dir.path());
    let file = world.write_gguf(dir.path(), Style { kind: Q8_0, ..PLAIN });
    let first = import(&file, dir.path(), out.path(), options(Targets::of(format("int8")))).unwrap();
    // Three layers, the one that drafts tokens, and what lies outside.
    assert_eq!((first.written, first.kept), (5, 0));
    let whole = model_files(out.path());
    fs::remove_file(out.path().join("out-00002.safetensors")).unwrap();
    let again = import(&file, dir.path(), out.path(), options(Targets::of(format("int8")))).unwrap();
    assert_eq!((again.written, again.kept), (1, 4));
    assert!(whole == model_files(out.path()));
}

fn refused(change: impl FnOnce(&mut Gguf)) -> String {
    let (world, dir, out) = (World::new(4), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    world.write_tokenizer(dir.path());
    let mut file = world.gguf(Style { split_kv: true, ..PLAIN });
    change(&mut file);
    let path = dir.path().join("model.gguf");
    fs::write(&path, file.bytes()).unwrap();
    let result = import(&path, dir.path(), out.path(), options(Targets::of(format("int8"))));
    let said = result.unwrap_err().to_string();
    assert!(!out.path().join("config.json").exists());
    said
}

fn set(file: &mut Gguf, key: &str, value: u32) {
    file.metadata.retain(|(other, _)| other != key);
    file.u32(key, value);
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let one = |file: &mut Gguf, name: &str, change: &dyn Fn(&mut forebay_testkit::gguf::GgufTensor)| {
        change(file.tensors.iter_mut().find(|tensor| tensor.name == name).unwrap());
    };
    type Case<'a> = (&'a dyn Fn(&mut Gguf), &'a [&'a str]);
    let cases: [Case<'_>; 16] = [
        (
            &|f| one(f, "blk.1.ffn_up_exps.weight", &|t| t.kind = 13),
            &["blk.1.ffn_up_exps.weight", "Q5_K", "Q8_0"],
        ),
        (&|f| one(f, "output.weight", &|t| t.kind = 23), &["output.weight", "IQ4_XS"]),
        (&|f| one(f, "output.weight", &|t| t.kind = 4), &["output.weight", "number 4"]),
        (&|f| f.metadata[0].1.splice(12.., *b"glm-dsx").for_each(drop), &["glm-dsx", "deepseek2"]),
        (
            &|f| one(f, "blk.0.attn_q_a.weight", &|t| t.name = "blk.0.attn_q.weight".into()),
            &["blk.0.attn_q.weight"],
        ),
        (
            &|f| one(f, "blk.0.attn_q_a.weight", &|t| t.name = "rope_freqs.weight".into()),
            &["rope_freqs.weight"],
        ),
        (&|f| one(f, "blk.2.attn_v_b.weight", &|t| t.shape.swap(0, 1)), &["blk.2.attn_v_b.weight", "shape"]),
        (
            &|f| f.tensors.retain(|t| t.name != "blk.1.attn_k_b.weight"),
            &["layers.1.self_attn.kv_b_proj", "missing"],
        ),
        (&|f| f.tensors.retain(|t| t.name != "token_embd.weight"), &["token_embd.weight", "missing"]),
        (&|f| set(f, "glm-dsa.expert_gating_func", 1), &["expert_gating_func is 1", "sigmoid"]),
        (&|f| set(f, "glm-dsa.expert_group_count", 8), &["n_group", "8"]),
        (&|f| f.text("glm-dsa.rope.scaling.type", "yarn"), &["rope.scaling.type", "yarn"]),
        (&|f| set(f, "split.count", 2), &["first of 2 files"]),
        (&|f| f.version = 1, &["version 1"]),
        (&|f| set(f, "general.alignment", 33), &["alignment", "33"]),
        (&|f| f.value("x", 9, &[9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]), &["\"x\"", "arrays of arrays"]),
    ];
    for (change, wanted) in cases {
        let said = refused(change);
        assert!(wanted.iter().all(|part| said.contains(part)), "{said}: {wanted:?}");
    }
}

#[test]
fn the_tokenizer_must_be_there_and_be_the_models() {
    let (mut world, dir) = (World::new(5), tempfile::tempdir().unwrap());
    let file = world.write_gguf(dir.path(), PLAIN);
    let said = |tokenizer: Option<&Path>| GgufModel::open(&file, tokenizer).unwrap_err().to_string();
    for words in ["--tokenizer DIR", "tokenizer.ggml.model is missing"] {
        assert!(said(None).contains(words), "{}", said(None));
    }
    assert!(said(Some(dir.path())).contains("no tokenizer.json"), "{}", said(Some(dir.path())));
    world.tokens.swap(3, 4);
    world.write_tokenizer(dir.path());
    assert!(said(Some(dir.path())).contains("\"t4\" with number 3"), "{}", said(Some(dir.path())));
}

#[test]
fn files_of_a_split_model_must_all_be_there_and_say_their_numbers() {
    let (world, dir) = (World::new(6), tempfile::tempdir().unwrap());
    world.write_tokenizer(dir.path());
    let first = world.write_gguf(dir.path(), Style { files: 3, ..PLAIN });
    let [second, third] = [2, 3].map(|n| dir.path().join(format!("model-0000{n}-of-00003.gguf")));
    let said = |path: &Path| GgufModel::open(path, Some(dir.path())).unwrap_err().to_string();
    assert!(GgufModel::open(&first, Some(dir.path())).is_ok());
    assert!(said(&second).contains("file 2 of 3"), "{}", said(&second));
    fs::copy(&second, &third).unwrap();
    assert!(said(&first).contains("file 3 of 3"), "{}", said(&first));
    fs::remove_file(&third).unwrap();
    assert!(said(&first).contains("model-00003-of-00003.gguf"), "{}", said(&first));
}

/// The tokenizer of the bundled model as metadata, and made of them again: what cuts, joins and marks is the same.
#[test]
fn a_tokenizer_is_made_of_metadata_that_name_glms_way_to_cut_a_text() {
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
    let original: serde_json::Value = serde_json::from_slice(&fs::read(demo).unwrap()).unwrap();
    let (model, added) = (&original["model"], original["added_tokens"].as_array().unwrap());
    let vocabulary = model["vocab"].as_object().unwrap();
    let (mut tokens, mut kinds) = (vec![String::new(); vocabulary.len() + added.len()], Vec::new());
    vocabulary.iter().for_each(|(token, id)| tokens[id.as_u64().unwrap() as usize] = token.clone());
    kinds.resize(tokens.len(), 1i32);
    for token in added {
        let id = token["id"].as_u64().unwrap() as usize;
        tokens[id] = token["content"].as_str().unwrap().to_owned();
        kinds[id] = if token["special"] == true { 3 } else { 4 };
    }
    let merges = model["merges"].as_array().unwrap().iter();
    let merges: Vec<String> =
        merges.map(|pair| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap())).collect();
    let mut world = World::new(8);
    world.tokens = tokens;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let open = |change: &dyn Fn(&mut Vec<i32>, &mut Vec<String>), kind: &str, cut: &str| {
        let (mut kinds, mut merges) = (kinds.clone(), merges.clone());
        change(&mut kinds, &mut merges);
        let mut file = world.gguf(PLAIN);
        file.text("tokenizer.ggml.model", kind);
        file.text("tokenizer.ggml.pre", cut);
        file.texts("tokenizer.ggml.merges", &merges);
        file.text("tokenizer.chat_template", "{{ messages }}");
        let numbers: Vec<u8> = kinds.iter().flat_map(|kind| kind.to_le_bytes()).collect();
        let head = [5u32.to_le_bytes().to_vec(), (kinds.len() as u64).to_le_bytes().to_vec()].concat();
        file.value("tokenizer.ggml.token_type", 9, &[head, numbers].concat());
        fs::write(&path, file.bytes()).unwrap();
        GgufModel::open(&path, None)
    };
    for cut in ["glm4", "chatglm-bpe"] {
        let mut found = open(&|_, _| {}, "gpt2", cut).unwrap();
        let made = found.text("tokenizer.json").unwrap().unwrap();
        let made: serde_json::Value = serde_json::from_slice(&made).unwrap();
        for part in ["model", "added_tokens", "pre_tokenizer", "post_processor", "decoder", "normalizer"] {
            assert!(made[part] == original[part], "{part} differs");
        }
        assert_eq!(found.text("chat_template.jinja").unwrap().unwrap(), b"{{ messages }}");
        assert_eq!(found.text("tokenizer_config.json").unwrap(), None);
    }
    let refused = |found: Result<GgufModel, ConvertError>, words: &str| {
        let said = found.unwrap_err().to_string();
        assert!(said.contains(words) && said.contains("--tokenizer DIR"), "{words}: {said}");
    };
    refused(open(&|_, _| {}, "gpt2", "llama-bpe"), "tokenizer.ggml.pre is \"llama-bpe\"");
    refused(open(&|_, _| {}, "llama", "glm4"), "tokenizer.ggml.model is \"llama\"");
    refused(open(&|_, merges| merges[7] = "abc".into(), "gpt2", "glm4"), "\"abc\" is no pair");
    refused(open(&|_, merges| merges[7] = "a b c".into(), "gpt2", "glm4"), "\"a b c\" is no pair");
    refused(open(&|kinds, _| kinds[3] = 6, "gpt2", "glm4"), "token 3 is of kind 6");
    refused(open(&|kinds, _| kinds.truncate(9), "gpt2", "glm4"), "9 kinds of tokens");
}

/// A file with every kind of value, small enough to be damaged ten thousand times.
fn small() -> Vec<u8> {
    let mut file = Gguf::default();
    file.text("general.architecture", "glm-dsa");
    file.u32("general.alignment", 32);
    file.bool("b", true);
    file.f32("f", 0.5);
    file.u16("h", 7);
    file.value("d", 12, &1.5f64.to_le_bytes());
    file.value("n", 11, &(-3i64).to_le_bytes());
    file.value("a", 9, &[4, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0]);
    file.texts("tokenizer.ggml.tokens", &["a".to_owned(), "bc".to_owned()]);
    file.texts("tokenizer.ggml.merges", &["a b".to_owned()]);
    file.value("tokenizer.ggml.token_type", 9, &[5, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0]);
    for (name, shape, kind, len) in [
        ("output.weight", &[2, 32][..], Q8_0, 68),
        ("output_norm.weight", &[8], F32, 32),
        ("blk.0.ffn_up_exps.weight", &[2, 1, 256], 12, 288),
    ] {
        let shape = shape.to_vec();
        file.tensors.push(forebay_testkit::gguf::GgufTensor {
            name: name.to_owned(),
            shape,
            kind,
            bytes: vec![1; len],
        });
    }
    file.bytes()
}

#[test]
fn the_small_file_is_read_whole() {
    let file = small();
    let header = Header::parse(&file[..], file.len() as u64).unwrap();
    let found: Vec<_> = header.tensors.iter().map(|t| (&*t.name, &t.shape[..], t.kind, t.len)).collect();
    let wanted = [
        ("output.weight", &[2, 32][..], Kind::Q8_0, 68),
        ("output_norm.weight", &[8], Kind::F32, 32),
        ("blk.0.ffn_up_exps.weight", &[2, 1, 256], Kind::Q4K, 288),
    ];
    assert_eq!(found, wanted);
    assert_eq!((header.metadata.len(), header.tensors[0].offset % 32), (11, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    /// Whatever is accepted is sound; everything else is an error that says something.
    #[test]
    fn damage_is_an_error_or_harmless(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3u8), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut file = small();
        for (at, byte, how) in changes {
            let at = at.index(file.len());
            match how {
                0 => file[at] = byte,
                1 => file[at] ^= 1 << (byte % 8),
                // Lengths and counts are what hurts.
                _ => file[at..].iter_mut().take(8).for_each(|b| *b = 0xFF),
            }
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        match Header::parse(&file[..], file.len() as u64) {
            Err(error) => prop_assert!((1..4096).contains(&error.to_string().len())),
            Ok(header) => for tensor in &header.tensors {
                prop_assert!(tensor.offset.checked_add(tensor.len).is_some_and(|end| end <= file.len() as u64));
                prop_assert!(!tensor.shape.contains(&0));
            },
        }
    }
}
