//! The real GLM-5.2 artifact, from its names and shapes alone.

use forebay_core::format::Format;
use forebay_core::ids::ExpertKey;
use forebay_store::catalog::Catalog;
use forebay_store::census::{self, Group, Kind, Requirement};
use forebay_store::layout;
use forebay_store::record::ExpertRecord;

const D: usize = 6144;
const VOCAB: usize = 154_880;
const LAYERS: u32 = 78;
const DENSE: u32 = 3;
const EXPERTS: u32 = 256;

fn linear(name: String, rows: usize, cols: usize, group: Group) -> Requirement {
    Requirement { name, kind: Kind::Weight { rows, cols }, group }
}

fn vector(name: String, len: usize, group: Group) -> Requirement {
    Requirement { name, kind: Kind::Vector { len }, group }
}

fn global() -> Vec<Requirement> {
    vec![
        linear("model.embed_tokens.weight".to_owned(), VOCAB, D, Group::Global),
        linear("lm_head.weight".to_owned(), VOCAB, D, Group::Global),
        vector("model.norm.weight".to_owned(), D, Group::Global),
    ]
}

/// All weights of layer `layer`; the one behind the last is the MTP layer.
fn layer(layer: u32) -> Vec<Requirement> {
    let group = Group::Layer(layer);
    let name = |suffix: &str| format!("model.layers.{layer}.{suffix}");
    let mut all = Vec::new();
    for (suffix, len) in [
        ("input_layernorm", D),
        ("post_attention_layernorm", D),
        ("self_attn.q_a_layernorm", 2048),
        ("self_attn.kv_a_layernorm", 512),
    ] {
        all.push(vector(name(&format!("{suffix}.weight")), len, group));
    }
    for (suffix, rows, cols) in [
        ("q_a_proj", 2048, D),
        ("q_b_proj", 16_384, 2048),
        ("kv_a_proj_with_mqa", 576, D),
        ("kv_b_proj", 28_672, 512),
        ("o_proj", D, 16_384),
    ] {
        all.push(linear(name(&format!("self_attn.{suffix}.weight")), rows, cols, group));
    }
    let mut mlp = |prefix: &str, width: usize, group: Group| {
        for (proj, rows, cols) in [("gate", width, D), ("up", width, D), ("down", D, width)] {
            all.push(linear(name(&format!("{prefix}.{proj}_proj.weight")), rows, cols, group));
        }
    };
    if layer < DENSE {
        mlp("mlp", 12_288, group);
        return all;
    }
    mlp("mlp.shared_experts", 2048, group);
    for expert in 0..EXPERTS {
        mlp(&format!("mlp.experts.{expert}"), 2048, Group::Expert(ExpertKey { layer, expert }));
    }
    let kind = Kind::FloatMatrix { rows: EXPERTS as usize, cols: D };
    all.push(Requirement { name: name("mlp.gate.weight"), kind, group });
    all.push(vector(name("mlp.gate.e_score_correction_bias"), EXPERTS as usize, group));
    if layer == LAYERS {
        all.push(linear(name("eh_proj.weight"), D, 2 * D, group));
        for suffix in ["enorm", "hnorm", "shared_head.norm"] {
            all.push(vector(name(&format!("{suffix}.weight")), D, group));
        }
    }
    all
}

fn artifact() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    forebay_testkit::glm52::write(dir.path()).unwrap();
    dir
}

fn everything() -> impl Iterator<Item = Requirement> {
    let layers = (0..=LAYERS).flat_map(layer);
    global().into_iter().chain(layers)
}

#[test]
fn the_published_totals_come_out() {
    let dir = artifact();
    let catalog = Catalog::open(dir.path()).unwrap();
    assert_eq!(catalog.len(), 118_478);
    let census = census::check(&catalog, everything());
    assert!(census.is_complete(), "{census}");
    assert_eq!(census.resident_bytes, 10_877_286_144);
    assert_eq!(census.expert_bytes, 372_848_459_776);
    assert_eq!((census.tensors, census.ambiguous_groups), (118_478, 0));

    let mtp = census::check(&catalog, layer(LAYERS));
    assert_eq!(mtp.resident_bytes + mtp.expert_bytes, 9_959_134_464);
    assert_eq!(mtp.tensors, 777 + 786);

    let mut experts = 0;
    for layer in DENSE..=LAYERS {
        let (format, bytes) =
            if layer == LAYERS { (Format::Int8Row, 37_789_696) } else { (Format::Int4Row, 18_915_328) };
        for expert in 0..EXPERTS {
            let find = |proj: &str, rows, cols| {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{proj}_proj.weight");
                layout::weight(&catalog, &name, rows, cols).unwrap()
            };
            let (gate, up, down) = (find("gate", 2048, D), find("up", 2048, D), find("down", D, 2048));
            let record = ExpertRecord::new(&gate, &up, &down).unwrap();
            assert_eq!((record.read_bytes(), record.segments.len(), record.coalesced), (bytes, 2, true));
            assert!(record.parts.iter().all(|part| part.format == format));
            experts += 1;
        }
    }
    assert_eq!(experts, 19_456);
}

#[test]
fn published_weights_have_the_published_bytes() {
    let dir = artifact();
    let catalog = Catalog::open(dir.path()).unwrap();
    let cases = [
        ("model.embed_tokens.weight", VOCAB, D, Format::Int8Row, 951_582_720, 619_520),
        ("model.layers.0.self_attn.q_a_proj.weight", 2048, D, Format::Int4Row, 6_291_456, 8_192),
        ("model.layers.0.self_attn.q_b_proj.weight", 16_384, 2048, Format::Int4Row, 16_777_216, 65_536),
        ("model.layers.0.self_attn.kv_a_proj_with_mqa.weight", 576, D, Format::Int4Row, 1_769_472, 2_304),
        ("model.layers.0.self_attn.kv_b_proj.weight", 28_672, 512, Format::Int4Row, 7_340_032, 114_688),
        ("model.layers.0.self_attn.o_proj.weight", D, 16_384, Format::Int4Row, 50_331_648, 24_576),
        ("model.layers.0.mlp.gate_proj.weight", 12_288, D, Format::Int4Row, 37_748_736, 49_152),
        ("model.layers.0.mlp.down_proj.weight", D, 12_288, Format::Int4Row, 37_748_736, 24_576),
        ("model.layers.78.eh_proj.weight", D, 2 * D, Format::Int8Row, 75_497_472, 24_576),
        ("model.layers.78.mlp.experts.255.down_proj.weight", D, 2048, Format::Int8Row, 12_582_912, 24_576),
    ];
    for (name, rows, cols, format, codes, scales) in cases {
        let found = layout::weight(&catalog, name, rows, cols).unwrap();
        assert_eq!((found.format, found.codes.len), (format, codes), "{name}");
        assert_eq!(found.scales.map(|extent| extent.len), Some(scales), "{name}");
    }
    let router = layout::float_matrix(&catalog, "model.layers.78.mlp.gate.weight", 256, D).unwrap();
    let bias = layout::vector(&catalog, "model.layers.78.mlp.gate.e_score_correction_bias", 256).unwrap();
    assert_eq!(router.codes.len + bias.codes.len, 6_292_480);
}

#[test]
fn a_download_that_stopped_is_told_in_one_sentence() {
    let dir = artifact();
    let shard = |i: u32| format!("out-{i:05}.safetensors");
    let map: serde_json::Map<_, _> = (0..=LAYERS)
        .map(|i| (format!("tensor of {i}"), shard(i).into()))
        .chain([("mtp".to_owned(), "out-mtp-00000.safetensors".into())])
        .collect();
    let index = serde_json::json!({"metadata": {"total_size": 1}, "weight_map": map});
    std::fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    for i in 40..LAYERS {
        std::fs::remove_file(dir.path().join(shard(i + 1))).unwrap();
    }
    let catalog = Catalog::open(dir.path()).unwrap();
    let census = census::check(&catalog, everything());
    let text = census.to_string();
    for part in [
        "looks like an incomplete download: layers 40-77 are missing (",
        "38 of 80 shards named by model.safetensors.index.json are absent: out-00041.safetensors, ",
        "and 33 more)",
        "First: tensor model.layers.40.input_layernorm.weight is missing",
    ] {
        assert!(text.contains(part), "{text}");
    }
    // 38 sparse layers of 14 weights and vectors and 256 x 3 expert weights each.
    assert_eq!((census.missing, census.malformed_count), (38 * (14 + 768), 0));
    assert!(census.require_complete().is_err());
}
