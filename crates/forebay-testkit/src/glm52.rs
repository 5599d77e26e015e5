//! GLM-5.2 from its names and shapes alone: the headers are
//! real, the 384 GB behind them are holes in sparse files.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use serde_json::{Map, Value, json};

const HIDDEN: usize = 6144;
const VOCAB: usize = 154_880;
const WIDTH: usize = 2048;
const EXPERTS: usize = 256;
/// Decoder layers; the MTP layer has this number.
const LAYERS: usize = 78;
/// Layers with one MLP, at the bottom.
const DENSE: usize = 3;

/// A tensor's name, element type, shape and bytes.
struct Header {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
}

/// The tensors of one shard as they are collected.
#[derive(Default)]
struct Shard(Vec<Header>);

impl Shard {
    fn f32(&mut self, name: String, shape: &[usize]) {
        let bytes = 4 * shape.iter().product::<usize>();
        self.0.push(Header { name, dtype: "F32", shape: shape.to_vec(), bytes });
    }

    /// Codes of `bits` bits and a scale per row, as the converter stores them.
    fn quantised(&mut self, name: String, rows: usize, cols: usize, bits: usize) {
        let bytes = rows * cols * bits / 8;
        self.f32(format!("{name}.qs"), &[rows]);
        self.0.push(Header { name, dtype: "U8", shape: vec![bytes], bytes });
    }

    fn mlp(&mut self, prefix: &str, width: usize, bits: usize) {
        for (part, rows, cols) in [("gate", width, HIDDEN), ("up", width, HIDDEN), ("down", HIDDEN, width)] {
            self.quantised(format!("{prefix}.{part}_proj.weight"), rows, cols, bits);
        }
    }

    /// Writes header and hole in the converter's order: F32 first, then by name.
    fn write(mut self, path: &Path) -> io::Result<()> {
        self.0.sort_by(|a, b| (a.dtype != "F32", &a.name).cmp(&(b.dtype != "F32", &b.name)));
        let mut header = Map::new();
        let mut at = 0;
        for Header { name, dtype, shape, bytes } in self.0 {
            let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
            header.insert(name, entry);
            at += bytes;
        }
        let mut text = Value::Object(header).to_string();
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        let mut file = File::create(path)?;
        file.write_all(&(text.len() as u64).to_le_bytes())?;
        file.write_all(text.as_bytes())?;
        file.set_len((8 + text.len() + at) as u64)
    }
}

fn layer(layer: usize) -> Shard {
    let named = |suffix: &str| format!("model.layers.{layer}.{suffix}");
    let bits = if layer == LAYERS { 8 } else { 4 };
    let mut shard = Shard::default();
    for (suffix, len) in [
        ("input_layernorm", HIDDEN),
        ("post_attention_layernorm", HIDDEN),
        ("self_attn.q_a_layernorm", 2048),
        ("self_attn.kv_a_layernorm", 512),
    ] {
        shard.f32(named(&format!("{suffix}.weight")), &[len]);
    }
    for (suffix, rows, cols) in [
        ("q_a_proj", 2048, HIDDEN),
        ("q_b_proj", 64 * 256, 2048),
        ("kv_a_proj_with_mqa", 512 + 64, HIDDEN),
        ("kv_b_proj", 64 * (192 + 256), 512),
        ("o_proj", HIDDEN, 64 * 256),
    ] {
        shard.quantised(named(&format!("self_attn.{suffix}.weight")), rows, cols, bits);
    }
    if layer < DENSE {
        shard.mlp(&named("mlp"), 12_288, bits);
        return shard;
    }
    shard.mlp(&named("mlp.shared_experts"), WIDTH, bits);
    for expert in 0..EXPERTS {
        shard.mlp(&named(&format!("mlp.experts.{expert}")), WIDTH, bits);
    }
    shard.f32(named("mlp.gate.weight"), &[EXPERTS, HIDDEN]);
    shard.f32(named("mlp.gate.e_score_correction_bias"), &[EXPERTS]);
    if layer == LAYERS {
        shard.quantised(named("eh_proj.weight"), HIDDEN, 2 * HIDDEN, 8);
        for suffix in ["enorm", "hnorm", "shared_head.norm"] {
            shard.f32(named(&format!("{suffix}.weight")), &[HIDDEN]);
        }
    }
    shard
}

/// `config.json`: the published sizes.
pub fn config() -> Value {
    json!({
        "model_type": "glm_moe_dsa",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": WIDTH,
        "intermediate_size": 12_288,
        "first_k_dense_replace": DENSE,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_shared_experts": 1,
        "vocab_size": VOCAB,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": true,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_theta": 1_000_000.0},
        "index_topk": 2048,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "max_position_embeddings": 131_072,
        "num_nextn_predict_layers": 1,
        "eos_token_id": 151_329,
    })
}

/// Writes the artifact without an indexer, as it was first published, in row-scaled int4 with the
/// MTP layer in int8: one shard per layer and one for the rest, and `config.json`.
pub fn write(dir: &Path) -> io::Result<()> {
    std::fs::write(dir.join("config.json"), config().to_string())?;
    let mut rest = Shard::default();
    rest.quantised("model.embed_tokens.weight".to_owned(), VOCAB, HIDDEN, 8);
    rest.quantised("lm_head.weight".to_owned(), VOCAB, HIDDEN, 8);
    rest.f32("model.norm.weight".to_owned(), &[HIDDEN]);
    rest.write(&dir.join("out-00000.safetensors"))?;
    for number in 0..LAYERS {
        layer(number).write(&dir.join(format!("out-{:05}.safetensors", number + 1)))?;
    }
    layer(LAYERS).write(&dir.join("out-mtp-00000.safetensors"))
}
