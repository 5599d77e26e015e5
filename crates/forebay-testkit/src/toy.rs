//! The synthetic GLM snapshot of the goldens: hash-generated weights, so
//! that anybody can rebuild it bit for bit without a model file.

use std::io;
use std::path::Path;

use forebay_core::Format;
use serde_json::json;

use crate::container::{self, Tensor};

/// Tokens of the section's prompt: `(37 i + 11) mod 290` for i = 0..20.
pub fn prompt() -> Vec<u32> {
    (0..20).map(|i| (37 * i + 11) % 290).collect()
}

/// FNV-1a, 64 bits.
pub fn fnv1a(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// Element `i` of the tensor called `name`, in [-1, 1).
fn unit(name: u64, i: u64) -> f64 {
    let mut z = name.wrapping_add((i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 40) as f64 / f64::from(1 << 24) * 2.0 - 1.0
}

/// `base + amplitude * r` for every element.
pub fn values(name: &str, len: usize, base: f64, amplitude: f64) -> Vec<f32> {
    let hash = fnv1a(name);
    (0..len as u64).map(|i| (base + unit(hash, i) * amplitude) as f32).collect()
}

/// The sizes of a model of the architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Ranks of the queries and of the keys and values.
    pub ranks: [usize; 2],
    /// Widths of a head: without and with position, and of its values.
    pub head: [usize; 3],
    /// Routed experts of a sparse layer, and how many a token uses.
    pub experts: [usize; 2],
    /// Shared experts.
    pub shared: usize,
    /// Widths of an expert and of a dense MLP.
    pub widths: [usize; 2],
    /// Decoder layers, and how many of them are dense.
    pub layers: [usize; 2],
    /// Tokens.
    pub vocab: usize,
    /// Of the indexer: keys chosen, heads, width, and every how many layers it chooses anew.
    pub index: [usize; 4],
    /// Format of the decoder's matrices.
    pub format: Format,
    /// Whether there is an MTP layer.
    pub mtp: bool,
    /// Of another seed, other weights; 0 has those of the specification.
    pub seed: u64,
}

/// The toy of the specification.
pub const TOY: Geometry = Geometry {
    hidden: 64,
    heads: 4,
    ranks: [32, 32],
    head: [16, 8, 16],
    experts: [256, 8],
    shared: 1,
    widths: [16, 96],
    layers: [5, 1],
    vocab: 300,
    index: [6, 2, 16, 2],
    format: Format::Int4Row,
    mtp: true,
    seed: 0,
};

impl Geometry {
    /// A small model of sizes that depend on `seed`.
    pub fn random(seed: u64) -> Self {
        let hash = fnv1a(&format!("geometry {seed}"));
        let mut draws = 0;
        let mut one_of = |choices: &[usize]| {
            draws += 1;
            let at = (unit(hash, draws) + 1.0) / 2.0 * choices.len() as f64;
            choices[at as usize]
        };
        let layers = one_of(&[2, 3, 4, 6]);
        let grouped = "int4-g64".parse().expect("a format");
        let formats = [Format::Int4Row, Format::Int8Row, grouped];
        let rope = one_of(&[4, 8, 16]);
        Self {
            hidden: one_of(&[64, 128, 192]),
            heads: one_of(&[1, 2, 3, 4, 8]),
            ranks: [one_of(&[32, 64]), one_of(&[32, 48, 64])],
            head: [one_of(&[8, 16, 24]), rope, one_of(&[8, 16, 32])],
            experts: [one_of(&[4, 8, 24, 64]), one_of(&[1, 2, 4])],
            shared: one_of(&[1, 2]),
            widths: [one_of(&[16, 64, 80]), one_of(&[64, 96])],
            layers: [layers, one_of(&[0, 1, layers - 1])],
            vocab: one_of(&[97, 300, 513]),
            index: [one_of(&[4, 9, 40]), one_of(&[1, 2, 4]), rope * one_of(&[1, 2]), one_of(&[1, 2, 4])],
            format: formats[one_of(&[0, 1, 2])],
            mtp: true,
            seed: 1 + seed,
        }
    }

    /// Every tensor, MTP layer included.
    pub fn tensors(&self) -> Vec<Tensor> {
        let mut toy = Maker { geometry: self, tensors: Vec::new() };
        let (hidden, vocab, [layers, dense]) = (self.hidden, self.vocab, self.layers);
        toy.linear("model.embed_tokens.weight".into(), vocab, hidden, Format::Int8Row, Some(1.5));
        toy.linear("lm_head.weight".into(), vocab, hidden, Format::Int8Row, Some(1.0));
        toy.vector("model.norm.weight".into(), hidden, 1.0, 0.2);
        for layer in 0..layers {
            let indexed = (layer + 1).saturating_sub(2) % self.index[3] == 0;
            toy.layer(layer, self.format, layer >= dense, indexed);
        }
        if !self.mtp {
            return toy.tensors;
        }
        toy.layer(layers, Format::Int8Row, true, false);
        let p = format!("model.layers.{layers}.");
        toy.linear(format!("{p}eh_proj.weight"), hidden, 2 * hidden, Format::Int8Row, None);
        for norm in ["enorm", "hnorm", "shared_head.norm"] {
            toy.vector(format!("{p}{norm}.weight"), hidden, 1.0, 0.2);
        }
        toy.tensors
    }

    /// The `config.json`.
    pub fn config(&self) -> serde_json::Value {
        json!({
            "model_type": "glm_moe_dsa", "hidden_size": self.hidden, "num_hidden_layers": self.layers[0],
            "num_attention_heads": self.heads, "n_routed_experts": self.experts[0],
            "num_experts_per_tok": self.experts[1],
            "moe_intermediate_size": self.widths[0], "intermediate_size": self.widths[1],
            "first_k_dense_replace": self.layers[1],
            "q_lora_rank": self.ranks[0], "kv_lora_rank": self.ranks[1], "qk_nope_head_dim": self.head[0],
            "qk_rope_head_dim": self.head[1], "v_head_dim": self.head[2],
            "n_shared_experts": self.shared, "vocab_size": self.vocab, "n_group": 1, "topk_group": 1,
            "norm_topk_prob": true, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "eos_token_id": [self.vocab - 10, self.vocab - 9], "index_topk": self.index[0],
            "index_n_heads": self.index[1], "index_head_dim": self.index[2], "index_topk_freq": self.index[3]
        })
    }

    /// Writes the snapshot into `dir`, which must exist.
    pub fn write(&self, dir: &Path) -> io::Result<()> {
        std::fs::write(dir.join("config.json"), self.config().to_string())?;
        container::write(&dir.join("out-00000.safetensors"), &self.tensors())
    }
}

/// Collects the tensors of a model.
struct Maker<'g> {
    geometry: &'g Geometry,
    tensors: Vec<Tensor>,
}

impl Maker<'_> {
    fn values(&self, name: &str, len: usize, base: f64, amplitude: f64) -> Vec<f32> {
        match self.geometry.seed {
            0 => values(name, len, base, amplitude),
            seed => values(&format!("{seed} {name}"), len, base, amplitude),
        }
    }

    fn linear(&mut self, name: String, rows: usize, cols: usize, format: Format, amplitude: Option<f64>) {
        let amplitude = amplitude.unwrap_or_else(|| (3.0 / cols as f64).sqrt());
        let w = self.values(&name, rows * cols, 0.0, amplitude);
        self.tensors.extend(Tensor::quantised(&name, format, rows, cols, &w));
    }

    fn vector(&mut self, name: String, len: usize, base: f64, amplitude: f64) {
        let v = self.values(&name, len, base, amplitude);
        self.tensors.push(Tensor::f32(&name, &[len], &v));
    }

    fn mlp(&mut self, prefix: &str, width: usize, format: Format) {
        let hidden = self.geometry.hidden;
        self.linear(format!("{prefix}gate_proj.weight"), width, hidden, format, None);
        self.linear(format!("{prefix}up_proj.weight"), width, hidden, format, None);
        self.linear(format!("{prefix}down_proj.weight"), hidden, width, format, None);
    }

    fn layer(&mut self, layer: usize, format: Format, sparse: bool, indexed: bool) {
        let g = self.geometry;
        let ([q_rank, kv_rank], [nope, rope, value], [experts, _]) = (g.ranks, g.head, g.experts);
        let p = format!("model.layers.{layer}.");
        self.vector(format!("{p}input_layernorm.weight"), g.hidden, 1.0, 0.2);
        self.vector(format!("{p}post_attention_layernorm.weight"), g.hidden, 1.0, 0.2);
        self.linear(format!("{p}self_attn.q_a_proj.weight"), q_rank, g.hidden, format, None);
        self.vector(format!("{p}self_attn.q_a_layernorm.weight"), q_rank, 1.0, 0.2);
        self.linear(format!("{p}self_attn.q_b_proj.weight"), g.heads * (nope + rope), q_rank, format, None);
        self.linear(
            format!("{p}self_attn.kv_a_proj_with_mqa.weight"),
            kv_rank + rope,
            g.hidden,
            format,
            None,
        );
        self.vector(format!("{p}self_attn.kv_a_layernorm.weight"), kv_rank, 1.0, 0.2);
        self.linear(
            format!("{p}self_attn.kv_b_proj.weight"),
            g.heads * (nope + value),
            kv_rank,
            format,
            None,
        );
        self.linear(format!("{p}self_attn.o_proj.weight"), g.hidden, g.heads * value, format, None);
        if sparse {
            let router = format!("{p}mlp.gate.weight");
            let w = self.values(&router, experts * g.hidden, 0.0, 0.5);
            self.tensors.push(Tensor::f32(&router, &[experts, g.hidden], &w));
            self.vector(format!("{p}mlp.gate.e_score_correction_bias"), experts, 0.0, 0.1);
            self.mlp(&format!("{p}mlp.shared_experts."), g.shared * g.widths[0], format);
            for e in 0..experts {
                self.mlp(&format!("{p}mlp.experts.{e}."), g.widths[0], format);
            }
        } else {
            self.mlp(&format!("{p}mlp."), g.widths[1], format);
        }
        if indexed {
            let [_, heads, width, _] = g.index;
            let p = format!("{p}self_attn.indexer.");
            self.linear(format!("{p}wq_b.weight"), heads * width, q_rank, Format::Int8Row, None);
            self.linear(format!("{p}wk.weight"), width, g.hidden, Format::Int8Row, None);
            self.linear(format!("{p}weights_proj.weight"), heads, g.hidden, Format::Int8Row, None);
            self.vector(format!("{p}k_norm.weight"), width, 1.0, 0.2);
            self.vector(format!("{p}k_norm.bias"), width, 0.0, 0.2);
        }
    }
}

/// Every tensor of the toy, MTP layer included.
pub fn tensors() -> Vec<Tensor> {
    TOY.tensors()
}

/// The toy's `config.json`.
pub fn config() -> serde_json::Value {
    TOY.config()
}

/// Writes the toy snapshot into `dir`, which must exist.
pub fn write(dir: &Path) -> io::Result<()> {
    TOY.write(dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the generator that were computed elsewhere.
    #[test]
    fn generator_checks() {
        assert_eq!(fnv1a("model.norm.weight"), 0xD6D6_E5AF_D116_04E4);
        let all = tensors();
        assert_eq!(all.len(), 7844);
        let find = |name: &str| all.iter().find(|t| t.name == name).unwrap();
        let f32_at = |t: &Tensor, i: usize| f32::from_le_bytes(t.bytes[4 * i..4 * i + 4].try_into().unwrap());
        let norm = find("model.norm.weight");
        assert_eq!([0, 1, 2].map(|i| f32_at(norm, i)), [0.8194751, 0.85512805, 0.96082276]);
        assert_eq!(
            find("model.embed_tokens.weight").bytes[..8],
            [0xDF, 0xD2, 0x03, 0xBF, 0x23, 0x70, 0x30, 0x0E]
        );
        assert_eq!(f32_at(find("model.embed_tokens.weight.qs"), 0), 0.011665385);
        let q_a = "model.layers.0.self_attn.q_a_proj.weight";
        assert_eq!(find(q_a).bytes[..4], [0xAD, 0x9A, 0x6F, 0x38]);
        assert_eq!(f32_at(find(&format!("{q_a}.qs")), 0), 0.0308911);
        let bytes = all.iter().filter(|t| t.dtype == "U8").flat_map(|t| &t.bytes);
        assert_eq!(bytes.map(|b| u64::from(*b)).sum::<u64>(), 330_958_318);
    }
}
