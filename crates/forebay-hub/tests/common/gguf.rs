//! A model of random geometry, as a checkpoint in F32 and as GGUF files in any type, with the same weights.

use std::fs;
use std::path::{Path, PathBuf};

use forebay_testkit::container::{self, Tensor};
use forebay_testkit::gguf::{Gguf, GgufTensor};
use serde_json::{Value, json};

/// The numbers of the types that can hold the weights of a [`World`] exactly.
pub const F32: u32 = 0;
pub const F16: u32 = 1;
pub const Q8_0: u32 = 8;
pub const BF16: u32 = 30;

/// Every weight is a whole number up to 127 of these: exact in every type above.
const STEP: f32 = 1.0 / 1024.0;
/// The same in half precision.
const STEP_BITS: u16 = 0x1400;

pub struct World {
    pub config: Value,
    /// Name of the checkpoint, name of the GGUF file, shape, weights.
    pub tensors: Vec<(String, String, Vec<usize>, Vec<f32>)>,
    pub tokens: Vec<String>,
    state: u64,
}

/// How a world is written.
#[derive(Clone, Copy)]
pub struct Style {
    pub architecture: &'static str,
    /// The type of matrices.
    pub kind: u32,
    /// Whether `kv_b` is in two parts.
    pub split_kv: bool,
    pub files: usize,
}

pub const PLAIN: Style = Style { architecture: "glm-dsa", kind: F32, split_kv: false, files: 1 };

impl World {
    /// Widths are multiples of 32, as blocks are.
    pub fn new(seed: u64) -> Self {
        let mut world = Self {
            config: Value::Null,
            tensors: Vec::new(),
            tokens: (0..70).map(|n| format!("t{n}")).collect(),
            state: seed.wrapping_mul(2).wrapping_add(1),
        };
        let mut pick = |few: usize| 32 * (1 + world.next() as usize % few);
        let (d, f, m, rq, rkv, nope, v) = (pick(3), pick(3), pick(2), pick(2), pick(2), pick(2), pick(2));
        let (heads, experts, layers, rope, vocab) = (1 + pick(3) / 32, 2 + pick(3) / 32, 3, 16, 70);
        let (ih, idim) = (2, 32);
        world.config = json!({
            "model_type": "glm_moe_dsa", "num_hidden_layers": layers, "first_k_dense_replace": 1,
            "num_attention_heads": heads, "n_routed_experts": experts, "num_experts_per_tok": 2,
            "n_shared_experts": 1, "vocab_size": vocab, "n_group": 1, "topk_group": 1, "norm_topk_prob": true,
            "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}, "eos_token_id": [60],
            "index_topk": 4, "index_n_heads": ih, "index_head_dim": idim,
            "indexer_types": ["full", "shared", "full"], "num_nextn_predict_layers": 1,
            "max_position_embeddings": 512, "hidden_size": d, "intermediate_size": f,
            "moe_intermediate_size": m, "q_lora_rank": rq, "kv_lora_rank": rkv, "qk_nope_head_dim": nope,
            "qk_rope_head_dim": rope, "v_head_dim": v,
        });
        world.add("model.embed_tokens.weight", "token_embd.weight", &[vocab, d]);
        world.add("lm_head.weight", "output.weight", &[vocab, d]);
        world.add("model.norm.weight", "output_norm.weight", &[d]);
        for layer in 0..=layers {
            let (ours, theirs) = (format!("model.layers.{layer}."), format!("blk.{layer}."));
            let mut add = |a: &str, b: &str, shape: &[usize]| {
                world.add(&format!("{ours}{a}"), &format!("{theirs}{b}"), shape);
            };
            add("input_layernorm.weight", "attn_norm.weight", &[d]);
            add("post_attention_layernorm.weight", "ffn_norm.weight", &[d]);
            add("self_attn.q_a_proj.weight", "attn_q_a.weight", &[rq, d]);
            add("self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight", &[rq]);
            add("self_attn.q_b_proj.weight", "attn_q_b.weight", &[heads * (nope + rope), rq]);
            add("self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", &[rkv + rope, d]);
            add("self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight", &[rkv]);
            add("self_attn.kv_b_proj.weight", "attn_kv_b.weight", &[heads * (nope + v), rkv]);
            add("self_attn.o_proj.weight", "attn_output.weight", &[d, heads * v]);
            let mut mlp = |a: &str, b: &str, width: usize| {
                add(&format!("mlp.{a}gate_proj.weight"), &format!("ffn_gate{b}.weight"), &[width, d]);
                add(&format!("mlp.{a}up_proj.weight"), &format!("ffn_up{b}.weight"), &[width, d]);
                add(&format!("mlp.{a}down_proj.weight"), &format!("ffn_down{b}.weight"), &[d, width]);
            };
            if layer == 0 {
                mlp("", "", f);
            } else {
                mlp("shared_experts.", "_shexp", m);
                (0..experts).for_each(|e| mlp(&format!("experts.{e}."), "_exps", m));
                add("mlp.gate.weight", "ffn_gate_inp.weight", &[experts, d]);
                add("mlp.gate.e_score_correction_bias", "exp_probs_b.bias", &[experts]);
            }
            if layer == 0 || layer == 2 {
                add("self_attn.indexer.wq_b.weight", "indexer.attn_q_b.weight", &[ih * idim, rq]);
                add("self_attn.indexer.wk.weight", "indexer.attn_k.weight", &[idim, d]);
                add("self_attn.indexer.weights_proj.weight", "indexer.proj.weight", &[ih, d]);
                add("self_attn.indexer.k_norm.weight", "indexer.k_norm.weight", &[idim]);
                add("self_attn.indexer.k_norm.bias", "indexer.k_norm.bias", &[idim]);
            }
            if layer == layers {
                add("eh_proj.weight", "nextn.eh_proj.weight", &[d, 2 * d]);
                add("enorm.weight", "nextn.enorm.weight", &[d]);
                add("hnorm.weight", "nextn.hnorm.weight", &[d]);
                add("shared_head.norm.weight", "nextn.shared_head_norm.weight", &[d]);
            }
        }
        world
    }

    fn next(&mut self) -> u64 {
        self.state =
            self.state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.state >> 33
    }

    fn add(&mut self, ours: &str, theirs: &str, shape: &[usize]) {
        let count = shape.iter().product();
        let one = if ours.ends_with("norm.weight") { 1.0 } else { 0.0 };
        let values = (0..count).map(|_| one + STEP * (self.next() as i64 % 255 - 127) as f32).collect();
        self.tensors.push((ours.to_owned(), theirs.to_owned(), shape.to_vec(), values));
    }

    fn size(&self, key: &str) -> usize {
        self.config[key].as_u64().unwrap() as usize
    }

    /// `tokenizer.json` and nothing else.
    pub fn write_tokenizer(&self, dir: &Path) {
        let vocabulary: serde_json::Map<_, _> =
            self.tokens.iter().zip(0..).map(|(token, id)| (token.clone(), json!(id))).collect();
        let text = json!({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}, "added_tokens": []});
        fs::write(dir.join("tokenizer.json"), text.to_string()).unwrap();
    }

    /// The checkpoint in F32.
    pub fn write_checkpoint(&self, dir: &Path) {
        fs::write(dir.join("config.json"), self.config.to_string()).unwrap();
        let tensors = self.tensors.iter().map(|(name, _, shape, values)| Tensor::f32(name, shape, values));
        container::write(&dir.join("model.safetensors"), &tensors.collect::<Vec<_>>()).unwrap();
    }

    /// The GGUF file, or files; the path of the first.
    pub fn write_gguf(&self, dir: &Path, style: Style) -> PathBuf {
        let whole = self.gguf(style);
        if style.files == 1 {
            fs::write(dir.join("model.gguf"), whole.bytes()).unwrap();
            return dir.join("model.gguf");
        }
        let share = whole.tensors.len().div_ceil(style.files);
        let path = |n: usize| dir.join(format!("model-{:05}-of-{:05}.gguf", n + 1, style.files));
        for (n, tensors) in whole.tensors.chunks(share).enumerate() {
            let metadata = if n == 0 { whole.metadata.clone() } else { Vec::new() };
            let mut part = Gguf { metadata, tensors: tensors.to_vec(), ..Gguf::default() };
            part.u16("split.no", n as u16);
            part.u16("split.count", style.files as u16);
            part.value("split.tensors.count", 5, &(whole.tensors.len() as i32).to_le_bytes());
            fs::write(path(n), part.bytes()).unwrap();
        }
        path(0)
    }

    pub fn gguf(&self, style: Style) -> Gguf {
        let mut out = self.metadata(style.architecture);
        let mut experts: Vec<GgufTensor> = Vec::new();
        for (ours, theirs, shape, values) in &self.tensors {
            let matrix = shape.len() > 1 && !ours.ends_with("mlp.gate.weight");
            let kind = if matrix { style.kind } else { F32 };
            if style.split_kv && theirs.ends_with("attn_kv_b.weight") {
                out.tensors.extend(self.halves(theirs, values, kind));
                continue;
            }
            let tensor = tensor(theirs, shape, kind, values);
            match experts.iter_mut().find(|other| other.name == *theirs) {
                Some(other) => {
                    other.shape[0] += 1;
                    other.bytes.extend(tensor.bytes);
                }
                None if theirs.contains("_exps") => {
                    experts.push(GgufTensor { shape: [&[1], &tensor.shape[..]].concat(), ..tensor });
                }
                None => out.tensors.push(tensor),
            }
        }
        out.tensors.extend(experts);
        out
    }

    /// Keys of every head, rows and columns exchanged, and values of every head.
    fn halves(&self, name: &str, values: &[f32], kind: u32) -> [GgufTensor; 2] {
        let (heads, rank) = (self.size("num_attention_heads"), self.size("kv_lora_rank"));
        let (nope, value) = (self.size("qk_nope_head_dim"), self.size("v_head_dim"));
        let at = |head: usize, row: usize, col: usize| values[(head * (nope + value) + row) * rank + col];
        let (mut keys, mut rest) = (Vec::new(), Vec::new());
        for head in 0..heads {
            (0..rank).for_each(|col| keys.extend((0..nope).map(|row| at(head, row, col))));
            (nope..nope + value).for_each(|row| rest.extend((0..rank).map(|col| at(head, row, col))));
        }
        [
            tensor(&name.replace("kv_b", "k_b"), &[heads, rank, nope], kind, &keys),
            tensor(&name.replace("kv_b", "v_b"), &[heads, value, rank], kind, &rest),
        ]
    }

    fn metadata(&self, architecture: &str) -> Gguf {
        let mut out = Gguf::default();
        out.text("general.architecture", architecture);
        let key = |name: &str| format!("{architecture}.{name}");
        let (nope, rope) = (self.size("qk_nope_head_dim"), self.size("qk_rope_head_dim"));
        for (name, value) in [
            ("block_count", self.size("num_hidden_layers") + 1),
            ("nextn_predict_layers", 1),
            ("embedding_length", self.size("hidden_size")),
            ("leading_dense_block_count", 1),
            ("feed_forward_length", self.size("intermediate_size")),
            ("expert_feed_forward_length", self.size("moe_intermediate_size")),
            ("expert_count", self.size("n_routed_experts")),
            ("expert_used_count", 2),
            ("expert_shared_count", 1),
            ("expert_gating_func", 2),
            ("attention.head_count", self.size("num_attention_heads")),
            ("attention.head_count_kv", 1),
            ("attention.q_lora_rank", self.size("q_lora_rank")),
            ("attention.kv_lora_rank", self.size("kv_lora_rank")),
            ("attention.key_length", self.size("kv_lora_rank") + rope),
            ("attention.value_length", self.size("kv_lora_rank")),
            ("attention.key_length_mla", nope + rope),
            ("attention.value_length_mla", self.size("v_head_dim")),
            ("attention.indexer.head_count", 2),
            ("attention.indexer.key_length", 32),
            ("attention.indexer.top_k", 4),
            ("rope.dimension_count", rope),
            ("context_length", 512),
        ] {
            out.u32(&key(name), value as u32);
        }
        out.f32(&key("expert_weights_scale"), 2.5);
        out.f32(&key("attention.layer_norm_rms_epsilon"), 1e-5);
        out.f32(&key("rope.freq_base"), 10000.0);
        out.bool(&key("expert_weights_norm"), true);
        out.u32("tokenizer.ggml.eos_token_id", 60);
        out.texts("tokenizer.ggml.tokens", &self.tokens);
        out
    }
}

fn tensor(name: &str, shape: &[usize], kind: u32, values: &[f32]) -> GgufTensor {
    let bytes = match kind {
        F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        F16 => values.iter().flat_map(|v| forebay_core::float::f32_to_f16(*v).to_le_bytes()).collect(),
        BF16 => values.iter().flat_map(|v| (v.to_bits() >> 16).to_le_bytes()[..2].to_vec()).collect(),
        Q8_0 => values.chunks(32).flat_map(block).collect(),
        other => panic!("type {other} is not written"),
    };
    let shape = shape.iter().map(|size| *size as u64).collect();
    GgufTensor { name: name.to_owned(), shape, kind, bytes }
}

fn block(values: &[f32]) -> Vec<u8> {
    let mut out = STEP_BITS.to_le_bytes().to_vec();
    out.extend(values.iter().map(|v| (v / STEP) as i8 as u8));
    out
}
