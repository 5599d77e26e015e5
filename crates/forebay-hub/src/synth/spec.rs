//! What is asked for, and the `config.json` that says it.

use forebay_core::Format;
use forebay_core::format::FP8_BLOCK;
use forebay_model::ModelSpec;
use forebay_model::families::glm;
use forebay_store::config::ConfigFile;
use serde_json::{Value, json};

use super::error::SynthError;

/// Sizes of a model, by their names in the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Width of a dense layer's feed-forward part.
    pub dense_width: usize,
    /// Width of one expert.
    pub expert_width: usize,
    /// Routed experts per layer.
    pub experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Attention heads.
    pub heads: usize,
    /// Rank of the query compression.
    pub q_rank: usize,
    /// Rank of the key/value compression.
    pub kv_rank: usize,
    /// Query and key components without position.
    pub nope: usize,
    /// Query and key components with position.
    pub rope: usize,
    /// Value components.
    pub value: usize,
    /// Indexer heads.
    pub index_heads: usize,
    /// Indexer components.
    pub index_dim: usize,
    /// Keys that the indexer keeps.
    pub index_top_k: usize,
    /// Token ids; at least those of the tokenizer.
    pub vocab: usize,
    /// Longest context.
    pub max_context: usize,
}

impl Dims {
    /// GLM-5.2.
    pub const GLM_5_2: Self = Self {
        hidden: 6144,
        dense_width: 12_288,
        expert_width: 2048,
        experts: 256,
        top_k: 8,
        heads: 64,
        q_rank: 2048,
        kv_rank: 512,
        nope: 192,
        rope: 64,
        value: 256,
        index_heads: 32,
        index_dim: 128,
        index_top_k: 2048,
        vocab: 154_880,
        max_context: 202_752,
    };

    /// The same structure at about a thousandth of the size, for trying things.
    pub const TINY: Self = Self {
        hidden: 256,
        dense_width: 384,
        expert_width: 128,
        experts: 256,
        top_k: 8,
        heads: 4,
        q_rank: 128,
        kv_rank: 64,
        nope: 48,
        rope: 16,
        value: 64,
        index_heads: 4,
        index_dim: 32,
        index_top_k: 64,
        vocab: 8192,
        max_context: 16_384,
    };
}

/// A model to be written. The same one is written to the same bytes on every machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SynthSpec {
    /// Its sizes.
    pub dims: Dims,
    /// Dense layers, which come first.
    pub dense: usize,
    /// Layers of experts.
    pub moe: usize,
    /// Format of the layers' matrices. Embedding, head, indexer and MTP never go below int8, as in the
    /// published container.
    pub format: Format,
    /// Whether to add the multi-token-prediction layer.
    pub mtp: bool,
    /// Whether to add the indexer of sparse attention.
    pub dsa: bool,
    /// Chooses the weights.
    pub seed: u64,
    /// Largest file in bytes; an expert that is larger still lies in one file.
    pub shard_bytes: u64,
}

/// Largest file unless asked otherwise: what the published checkpoints use.
pub const DEFAULT_SHARD_BYTES: u64 = 5_000_000_000;

/// Base of the rotary angles.
pub const ROPE_THETA: f64 = 8_000_000.0;

/// What comes from elsewhere: the tokenizer's files, and what the config says about its ids.
#[derive(Clone, Debug, Default)]
pub struct TextFiles {
    /// Name and contents of each file.
    pub files: Vec<(String, Vec<u8>)>,
    /// Ids that stand for something: one more than the largest.
    pub tokens: usize,
    /// Ids that end an answer.
    pub stop_ids: Vec<u32>,
}

impl SynthSpec {
    /// The text of `config.json`.
    pub fn config(&self, text: &TextFiles) -> Value {
        let Self { dims: d, dense, moe, .. } = self;
        let mut config = json!({
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": glm::MODEL_TYPE,
            "attention_bias": false,
            "eos_token_id": text.stop_ids,
            "first_k_dense_replace": dense,
            "head_dim": d.rope,
            "hidden_act": "silu",
            "hidden_size": d.hidden,
            "index_head_dim": d.index_dim,
            "index_n_heads": d.index_heads,
            "index_skip_topk_offset": 3,
            "index_topk": d.index_top_k,
            "index_topk_freq": 4,
            "indexer_rope_interleave": true,
            "intermediate_size": d.dense_width,
            "kv_lora_rank": d.kv_rank,
            "max_position_embeddings": d.max_context,
            "moe_intermediate_size": d.expert_width,
            "n_group": 1,
            "n_routed_experts": d.experts,
            "n_shared_experts": 1,
            "norm_topk_prob": true,
            "num_attention_heads": d.heads,
            "num_experts_per_tok": d.top_k,
            "num_hidden_layers": dense + moe,
            "num_key_value_heads": d.heads,
            "num_nextn_predict_layers": u8::from(self.mtp),
            "q_lora_rank": d.q_rank,
            "qk_head_dim": d.nope + d.rope,
            "qk_nope_head_dim": d.nope,
            "qk_rope_head_dim": d.rope,
            "rms_norm_eps": 1e-5,
            "rope_interleave": true,
            "rope_parameters": {"rope_theta": ROPE_THETA, "rope_type": "default"},
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "tie_word_embeddings": false,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            "v_head_dim": d.value,
            "vocab_size": d.vocab,
        });
        if self.format == Format::Fp8Block {
            config["quantization_config"] = json!({
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            });
        }
        config
    }

    /// The model that the config describes, checked as every config is.
    pub fn model(&self, text: &TextFiles) -> Result<ModelSpec, SynthError> {
        if self.dims.vocab < text.tokens {
            return Err(SynthError::Vocabulary { vocab: self.dims.vocab, tokens: text.tokens });
        }
        let config = self.config(text).to_string();
        let config = ConfigFile::parse("config.json", config.as_bytes()).map_err(SynthError::Json)?;
        glm::spec(&config).map_err(SynthError::Config)
    }

    /// What is kept in `synth.json`, so that a second run knows whether it continues the same model.
    pub fn stamp(&self, text: &TextFiles) -> Value {
        json!({
            "made_by": "forebay synth",
            "version": super::VERSION,
            "format": self.format.to_string(),
            "dsa": self.dsa,
            "seed": self.seed,
            "shard_bytes": self.shard_bytes,
            "tokens": text.tokens,
            "config": self.config(text),
        })
    }
}
