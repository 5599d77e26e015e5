//! Which optional parts a snapshot has, what is said about what it lacks, and which stored types are taken
//! (container spec sections 3 to 9 and 12), on the toy cut down to eight experts.

use std::path::Path;
use std::sync::LazyLock;

use forebay_core::quant::decode_row;
use forebay_core::{Format, MatrixView};
use forebay_model::weights::Ffn;
use forebay_model::{
    Capability, Embedding, EmbeddingPlace, LoadedParts, Model, Snapshot, SnapshotError, SnapshotOptions,
};
use forebay_testkit::container::{self, Tensor};
use forebay_testkit::toy;
use serde_json::{Value, json};

const EXPERTS: usize = 8;

/// The toy's tensors with the first eight experts of every layer.
static SMALL: LazyLock<Vec<Tensor>> = LazyLock::new(|| {
    let kept = |tensor: &Tensor| {
        let expert = tensor.name.split_once("mlp.experts.").and_then(|(_, rest)| rest.split('.').next());
        expert.is_none_or(|number| number.parse::<usize>().unwrap() < EXPERTS)
    };
    let mut tensors: Vec<Tensor> = toy::tensors().into_iter().filter(kept).collect();
    for tensor in tensors.iter_mut().filter(|t| t.name.contains("mlp.gate.")) {
        tensor.shape[0] = EXPERTS;
        tensor.bytes.truncate(4 * tensor.shape.iter().product::<usize>());
    }
    tensors
});

fn config() -> Value {
    let mut config = toy::config();
    config["n_routed_experts"] = json!(EXPERTS);
    config
}

fn write(dir: &Path, config: &Value, tensors: &[Tensor]) {
    std::fs::write(dir.join("config.json"), config.to_string()).unwrap();
    container::write(&dir.join("out-00000.safetensors"), tensors).unwrap();
}

fn open_with(
    config: &Value,
    tensors: &[Tensor],
    options: SnapshotOptions,
) -> Result<Snapshot, SnapshotError> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config, tensors);
    Snapshot::open(dir.path(), options)
}

fn open(tensors: &[Tensor]) -> Result<Snapshot, SnapshotError> {
    open_with(&config(), tensors, SnapshotOptions::default())
}

fn without(gone: impl Fn(&str) -> bool) -> Vec<Tensor> {
    SMALL.iter().filter(|tensor| !gone(&tensor.name)).cloned().collect()
}

/// The small toy with the tensor `name` (and its scales) replaced.
fn replaced(name: &str, by: impl IntoIterator<Item = Tensor>) -> Vec<Tensor> {
    let scales = format!("{name}.qs");
    let mut tensors = without(|n| n == name || n == scales);
    assert!(tensors.len() < SMALL.len(), "{name} is not in the toy");
    tensors.extend(by);
    tensors
}

#[track_caller]
fn refused(tensors: &[Tensor], words: &[&str]) {
    let error = open(tensors).err().expect("refused").to_string();
    assert!(!error.contains('\n'), "{error}");
    for word in words {
        assert!(error.contains(word), "{word:?} is missing: {error}");
    }
}

#[test]
fn mtp_is_active_only_if_all_of_it_is_there() {
    assert_eq!(open(&SMALL).unwrap().mtp, Capability::Active);
    let absent = open(&without(|name| name.starts_with("model.layers.5."))).unwrap().mtp;
    assert!(
        matches!(&absent, Capability::Absent { reason } if reason.contains("none of its tensors")),
        "{absent}"
    );
    // Any tensor counts: the reference's list has none of the norms, the bias, or experts between the ends.
    for gone in [
        "mlp.experts.3.up_proj.weight",
        "mlp.experts.7.down_proj.weight.qs",
        "self_attn.q_a_layernorm.weight",
        "mlp.gate.e_score_correction_bias",
        "eh_proj.weight",
        "shared_head.norm.weight",
    ] {
        let gone = format!("model.layers.5.{gone}");
        let found = open(&without(|name| name == gone)).unwrap().mtp;
        assert_eq!(found, Capability::Incomplete { first_missing: gone, missing: 1 });
    }
    // A whole expert: three weights, the first of them is named.
    let found = open(&without(|name| name.contains("layers.5.mlp.experts.2."))).unwrap().mtp;
    let first_missing = "model.layers.5.mlp.experts.2.gate_proj.weight".to_owned();
    assert_eq!(found, Capability::Incomplete { first_missing, missing: 3 });
}

#[test]
fn mtp_with_one_scale_per_row_of_int4_is_unusable() {
    let name = "model.layers.5.eh_proj.weight";
    let values = toy::values(name, 64 * 128, 0.0, 0.1);
    let joined =
        |format| open(&replaced(name, Tensor::quantised(name, format, 64, 128, &values))).unwrap().mtp;
    let row = joined(Format::Int4Row);
    assert!(matches!(&row, Capability::Unusable { reason } if reason.contains("eh_proj")), "{row}");
    assert_eq!(joined(Format::Int8Row), Capability::Active);
    let group = "int4-g64".parse().unwrap();
    assert_eq!(joined(group), Capability::Active);
    // Malformed is not missing.
    let short = open(&replaced(name, [Tensor::f32(name, &[64, 127], &[0.0; 64 * 127])])).unwrap().mtp;
    assert!(matches!(&short, Capability::Unusable { reason } if reason.contains("127")), "{short}");
}

#[test]
fn sparse_attention_needs_every_indexer_tensor() {
    assert_eq!(open(&SMALL).unwrap().sparse_attention, Capability::Active);
    let indexer = |name: &str| name.contains(".indexer.");
    let absent = open(&without(indexer)).unwrap().sparse_attention;
    assert!(matches!(&absent, Capability::Absent { reason } if reason.contains("declares")), "{absent}");
    for gone in ["wq_b.weight", "wk.weight.qs", "weights_proj.weight", "k_norm.weight", "k_norm.bias"] {
        let gone = format!("model.layers.3.self_attn.indexer.{gone}");
        let found = open(&without(|name| name == gone)).unwrap().sparse_attention;
        assert_eq!(found, Capability::Incomplete { first_missing: gone, missing: 1 });
    }
    let dense = SnapshotOptions { dense_attention: true, ..SnapshotOptions::default() };
    let asked = open_with(&config(), &SMALL, dense).unwrap();
    assert!(matches!(&asked.sparse_attention, Capability::Absent { reason } if reason.contains("asked for")));
    // Not declared: the tensors are there and do not matter.
    let mut off = config();
    off["index_topk"] = json!(0);
    let found = open_with(&off, &SMALL, SnapshotOptions::default()).unwrap();
    assert!(matches!(found.sparse_attention, Capability::Absent { .. }));
    for snapshot in [asked, found] {
        assert!(snapshot.resident.iter().all(|tensor| !indexer(&tensor.name)), "nothing of it is loaded");
    }
}

#[test]
fn missing_shards_are_told_by_layers() {
    let layer = |n: usize| format!("model.layers.{n}.");
    refused(
        &without(|name| (2..5).any(|n| name.starts_with(&layer(n)))),
        &["incomplete download", "layers 2-4 are missing", "First: tensor model.layers.2."],
    );
    refused(&without(|name| name.starts_with(&layer(3))), &["layer 3 is missing"]);
    refused(
        &without(|name| (3..6).any(|e| name.starts_with(&format!("{}mlp.experts.{e}.", layer(2))))),
        &["layer 2 lacks experts 3-5"],
    );
    refused(&without(|name| name.starts_with("lm_head")), &["1 of 3 tensors outside the layers"]);
}

#[test]
fn a_tied_head_is_explained() {
    let mut tied = config();
    tied["tie_word_embeddings"] = json!(true);
    let headless = without(|name| name.starts_with("lm_head"));
    let error = open_with(&tied, &headless, SnapshotOptions::default()).err().unwrap().to_string();
    assert!(error.contains("tie_word_embeddings") && error.contains("lm_head.weight"), "{error}");
    // With a head of its own the flag says nothing that is used.
    assert!(open_with(&tied, &SMALL, SnapshotOptions::default()).is_ok());
}

#[test]
fn a_tensor_in_two_shards_is_refused_with_both_names() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config(), &SMALL);
    let twin = SMALL.iter().find(|tensor| tensor.name == "model.norm.weight").unwrap().clone();
    container::write(&dir.path().join("out-mtp-00000.safetensors"), &[twin]).unwrap();
    let error = Snapshot::open(dir.path(), SnapshotOptions::default()).err().unwrap().to_string();
    for word in ["model.norm.weight", "out-00000.safetensors", "out-mtp-00000.safetensors"] {
        assert!(error.contains(word), "{error}");
    }
}

/// Defect 3: bytes where floats are expected are never decoded as floats.
#[test]
fn bytes_are_no_floats() {
    for (name, len) in [
        ("model.norm.weight", 64),
        ("model.layers.1.self_attn.q_a_layernorm.weight", 32),
        ("model.layers.1.mlp.gate.weight", EXPERTS * 64),
        ("model.layers.1.mlp.gate.e_score_correction_bias", EXPERTS),
    ] {
        for bytes in [len, 2 * len, 4 * len] {
            refused(&replaced(name, [Tensor::u8(name, vec![0; bytes])]), &[name, "U8"]);
        }
    }
}

/// Defects 1, 2, 9 and 11 through the whole check: sizes that no format has name tensor and role's size.
#[test]
fn byte_counts_that_no_format_has_are_refused() {
    let name = "model.layers.2.mlp.experts.5.down_proj.weight";
    let scales = format!("{name}.qs");
    let with = |codes: usize, count: usize| {
        replaced(name, [Tensor::u8(name, vec![0; codes]), Tensor::f32(&scales, &[count], &vec![1.0; count])])
    };
    // 64 x 16: int8 1024, int4 512, int2 256 bytes of codes.
    for (codes, count) in [(1024, 64), (512, 64), (256, 64)] {
        open(&with(codes, count)).unwrap();
    }
    for codes in [1023, 1025, 511, 255, 0] {
        refused(&with(codes, 64), &[name, &format!("{codes} bytes"), "64 x 16"]);
    }
    for (codes, count) in [(1024, 63), (1024, 128), (256, 65), (512, 63), (512, 65), (512, 192)] {
        refused(&with(codes, count), &[&scales, &format!("{} bytes", 4 * count)]);
    }
    let half = Tensor { dtype: "F16", ..Tensor::f32(&scales, &[128], &[1.0; 64]) };
    refused(&replaced(name, [Tensor::u8(name, vec![0; 1024]), half]), &[&scales, "F16"]);
}

/// Defect 7: an unknown type is an error only where it is needed.
#[test]
fn unknown_types_matter_only_where_they_are_needed() {
    let wide = |name: &str| Tensor { name: name.into(), dtype: "I64", shape: vec![64], bytes: vec![0; 512] };
    let mut tensors = SMALL.clone();
    tensors.push(wide("model.something.else"));
    let notes = open(&tensors).unwrap().notes;
    assert!(notes.iter().any(|note| note.contains("I64")), "{notes:?}");
    refused(&replaced("model.norm.weight", [wide("model.norm.weight")]), &["model.norm.weight", "I64"]);
}

fn load(tensors: &[Tensor]) -> Model {
    load_with(tensors, SnapshotOptions::default(), EmbeddingPlace::Memory)
}

fn load_with(tensors: &[Tensor], options: SnapshotOptions, embedding: EmbeddingPlace) -> Model {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config(), tensors);
    let snapshot = Snapshot::open(dir.path(), options).unwrap();
    let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
    let shards = &forebay_io::open_files(&paths, forebay_io::Access::Buffered).unwrap().shards;
    let mut read = 0;
    let model =
        Model::load(&snapshot, shards, LoadedParts { embedding, mtp: false }, &mut |n| read = n).unwrap();
    assert_eq!(read, Model::bytes_to_read(&snapshot, LoadedParts { embedding, mtp: false }));
    model
}

fn row(matrix: &forebay_model::weights::Matrix, row: usize) -> Vec<f32> {
    let mut values = vec![f32::NAN; matrix.view().cols()];
    matrix.decode_row(row, &mut values);
    values
}

/// Norms and routers may be stored as BF16 or F16 and are the same numbers in memory.
#[test]
fn narrow_floats_are_widened_exactly() {
    // 1.5 and -0.375 are exact in both types; as patterns by hand.
    let (bf16, f16) = ([0x3FC0u16, 0xBEC0], [0x3E00u16, 0xB600]);
    let stored = |name: &str, dtype, shape: &[usize], two: [u16; 2]| Tensor {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        bytes: (0..shape.iter().product()).flat_map(|i: usize| two[i % 2].to_le_bytes()).collect(),
    };
    let alternating = |len: usize| -> Vec<f32> { (0..len).map(|i| [1.5, -0.375][i % 2]).collect() };
    let router = "model.layers.1.mlp.gate.weight";
    let norm = "model.layers.1.input_layernorm.weight";
    let bias = "model.layers.1.mlp.gate.e_score_correction_bias";
    for (dtype, two) in [("BF16", bf16), ("F16", f16)] {
        let mut tensors = without(|name| [router, norm, bias, "model.norm.weight"].contains(&name));
        tensors.push(stored(router, dtype, &[EXPERTS, 64], two));
        tensors.push(stored(norm, dtype, &[64], two));
        tensors.push(stored(bias, dtype, &[EXPERTS], two));
        tensors.push(stored("model.norm.weight", dtype, &[64], two));
        let model = load(&tensors);
        assert_eq!(model.final_norm, alternating(64), "{dtype}");
        assert_eq!(model.layers[1].input_norm, alternating(64), "{dtype}");
        let Ffn::Sparse { router, bias, .. } = &model.layers[1].ffn else { panic!("layer 1 is sparse") };
        assert_eq!(*bias, alternating(EXPERTS), "{dtype}");
        for expert in 0..EXPERTS {
            assert_eq!(row(router, expert), alternating(64), "{dtype}");
        }
    }
}

/// Defects 4 and 5: grouped int4 is the same everywhere, embeddings included.
#[test]
fn grouped_embeddings_are_decoded_by_groups() {
    let name = "model.embed_tokens.weight";
    let format: Format = "int4-g16".parse().unwrap();
    let values = toy::values(name, 300 * 64, 0.0, 1.5);
    let [codes, scales] = Tensor::quantised(name, format, 300, 64, &values);
    let floats: Vec<f32> =
        scales.bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
    assert_eq!(floats.len(), 300 * 4);
    // By hand, section 5.3: low nibble first, minus 8, times the scale of the column's group.
    let by_hand = |token: usize| -> Vec<f32> {
        let nibble = |i: usize| codes.bytes[token * 32 + i / 2] >> (4 * (i % 2)) & 15;
        (0..64).map(|i| (f32::from(nibble(i)) - 8.0) * floats[token * 4 + i / 16]).collect()
    };
    let model = load(&replaced(name, [codes.clone(), scales.clone()]));
    let Embedding::Memory(matrix) = &model.embedding else { panic!("it was to be in memory") };
    assert_eq!(matrix.view().format(), format);
    for token in [0, 1, 150, 299] {
        assert_eq!(row(matrix, token), by_hand(token), "token {token}");
    }
    let view = MatrixView::new(format, 300, 64, &codes.bytes, &floats).unwrap();
    let mut direct = vec![0.0; 64];
    decode_row(&view, 299, &mut direct);
    assert_eq!(direct, by_hand(299));
}

/// The matrix `name` of the toy, in each way it may be stored.
fn stored_embeddings(name: &str) -> Vec<Vec<Tensor>> {
    let values = toy::values(name, 300 * 64, 0.0, 1.5);
    let narrow = |dtype, bits: fn(f32) -> u16| Tensor {
        name: name.into(),
        dtype,
        shape: vec![300, 64],
        bytes: values.iter().flat_map(|v| bits(*v).to_le_bytes()).collect(),
    };
    let mut all: Vec<Vec<Tensor>> = ["int8", "int4-row", "int4-g16", "int2-row"]
        .map(|format| Tensor::quantised(name, format.parse().unwrap(), 300, 64, &values).into())
        .into();
    all.push(vec![Tensor::f32(name, &[300, 64], &values)]);
    all.push(vec![narrow("BF16", forebay_core::float::f32_to_bf16)]);
    all.push(vec![narrow("F16", forebay_core::float::f32_to_f16)]);
    // FP8: finite codes, and a scale for every 128 rows.
    let codes = (0..300 * 64).map(|i: usize| (i.wrapping_mul(37) % 0x7F) as u8).collect();
    all.push(vec![
        Tensor { name: name.into(), dtype: "F8_E4M3", shape: vec![300, 64], bytes: codes },
        Tensor::f32(&format!("{name}_scale_inv"), &[3, 1], &[0.5, 0.25, 2.0]),
    ]);
    all
}

#[test]
fn an_embedding_read_from_disk_is_the_same_numbers() {
    let name = "model.embed_tokens.weight";
    let tokens = [0, 1, 127, 128, 255, 256, 299, 1];
    for stored in stored_embeddings(name) {
        let mut tensors = without(|found| found.starts_with(name));
        tensors.extend(stored.iter().cloned());
        for quantise in [None, Some("int4-g64".parse().unwrap())] {
            let options = SnapshotOptions { quantise, ..SnapshotOptions::default() };
            let rows = |place| {
                let model = load_with(&tensors, options, place);
                let mut rows = vec![f32::NAN; tokens.len() * 64];
                model.embedding.rows(&tokens, &mut rows).unwrap();
                rows.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            let in_memory = rows(EmbeddingPlace::Memory);
            assert_eq!(in_memory, rows(EmbeddingPlace::Disk), "{} {quantise:?}", stored[0].dtype);
            assert_ne!(in_memory[..64], in_memory[64..128], "rows differ, so a wrong one would show");
        }
    }
}

#[test]
fn an_embedding_that_cannot_be_read_names_tensor_and_file() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &config(), &SMALL);
    let snapshot = Snapshot::open(dir.path(), SnapshotOptions::default()).unwrap();
    let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
    let shards = forebay_io::open_files(&paths, forebay_io::Access::Buffered).unwrap().shards;
    let model = Model::load(
        &snapshot,
        &shards,
        LoadedParts { embedding: EmbeddingPlace::Disk, mtp: false },
        &mut |_| {},
    )
    .unwrap();
    std::fs::OpenOptions::new().write(true).open(paths[0]).unwrap().set_len(9).unwrap();
    let error = model.embedding.rows(&[7], &mut [0.0; 64]).unwrap_err().to_string();
    for part in ["model.embed_tokens.weight", "out-00000.safetensors"] {
        assert!(error.contains(part), "{error}");
    }
}
