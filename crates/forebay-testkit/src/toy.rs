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

const HIDDEN: usize = 64;
const HEADS: usize = 4;
const EXPERTS: usize = 256;

/// Collects the tensors of the toy.
#[derive(Default)]
struct Toy(Vec<Tensor>);

impl Toy {
    fn linear(&mut self, name: String, rows: usize, cols: usize, format: Format, amplitude: Option<f64>) {
        let amplitude = amplitude.unwrap_or_else(|| (3.0 / cols as f64).sqrt());
        let w = values(&name, rows * cols, 0.0, amplitude);
        self.0.extend(Tensor::quantised(&name, format, rows, cols, &w));
    }

    fn vector(&mut self, name: String, len: usize, base: f64, amplitude: f64) {
        let v = values(&name, len, base, amplitude);
        self.0.push(Tensor::f32(&name, &[len], &v));
    }

    fn mlp(&mut self, prefix: &str, width: usize, format: Format) {
        self.linear(format!("{prefix}gate_proj.weight"), width, HIDDEN, format, None);
        self.linear(format!("{prefix}up_proj.weight"), width, HIDDEN, format, None);
        self.linear(format!("{prefix}down_proj.weight"), HIDDEN, width, format, None);
    }

    fn layer(&mut self, layer: usize, format: Format, sparse: bool, indexed: bool) {
        let p = format!("model.layers.{layer}.");
        self.vector(format!("{p}input_layernorm.weight"), HIDDEN, 1.0, 0.2);
        self.vector(format!("{p}post_attention_layernorm.weight"), HIDDEN, 1.0, 0.2);
        self.linear(format!("{p}self_attn.q_a_proj.weight"), 32, HIDDEN, format, None);
        self.vector(format!("{p}self_attn.q_a_layernorm.weight"), 32, 1.0, 0.2);
        self.linear(format!("{p}self_attn.q_b_proj.weight"), HEADS * 24, 32, format, None);
        self.linear(format!("{p}self_attn.kv_a_proj_with_mqa.weight"), 40, HIDDEN, format, None);
        self.vector(format!("{p}self_attn.kv_a_layernorm.weight"), 32, 1.0, 0.2);
        self.linear(format!("{p}self_attn.kv_b_proj.weight"), HEADS * 32, 32, format, None);
        self.linear(format!("{p}self_attn.o_proj.weight"), HIDDEN, HEADS * 16, format, None);
        if sparse {
            let router = format!("{p}mlp.gate.weight");
            let w = values(&router, EXPERTS * HIDDEN, 0.0, 0.5);
            self.0.push(Tensor::f32(&router, &[EXPERTS, HIDDEN], &w));
            self.vector(format!("{p}mlp.gate.e_score_correction_bias"), EXPERTS, 0.0, 0.1);
            self.mlp(&format!("{p}mlp.shared_experts."), 16, format);
            for e in 0..EXPERTS {
                self.mlp(&format!("{p}mlp.experts.{e}."), 16, format);
            }
        } else {
            self.mlp(&format!("{p}mlp."), 96, format);
        }
        if indexed {
            let p = format!("{p}self_attn.indexer.");
            self.linear(format!("{p}wq_b.weight"), 32, 32, Format::Int8Row, None);
            self.linear(format!("{p}wk.weight"), 16, HIDDEN, Format::Int8Row, None);
            self.linear(format!("{p}weights_proj.weight"), 2, HIDDEN, Format::Int8Row, None);
            self.vector(format!("{p}k_norm.weight"), 16, 1.0, 0.2);
            self.vector(format!("{p}k_norm.bias"), 16, 0.0, 0.2);
        }
    }
}

/// Every tensor of the toy, MTP layer included.
pub fn tensors() -> Vec<Tensor> {
    let mut toy = Toy::default();
    toy.linear("model.embed_tokens.weight".into(), 300, HIDDEN, Format::Int8Row, Some(1.5));
    toy.linear("lm_head.weight".into(), 300, HIDDEN, Format::Int8Row, Some(1.0));
    toy.vector("model.norm.weight".into(), HIDDEN, 1.0, 0.2);
    for layer in 0..5 {
        toy.layer(layer, Format::Int4Row, layer >= 1, matches!(layer, 0 | 1 | 3));
    }
    toy.layer(5, Format::Int8Row, true, false);
    let p = "model.layers.5.";
    toy.linear(format!("{p}eh_proj.weight"), HIDDEN, 2 * HIDDEN, Format::Int8Row, None);
    for norm in ["enorm", "hnorm", "shared_head.norm"] {
        toy.vector(format!("{p}{norm}.weight"), HIDDEN, 1.0, 0.2);
    }
    toy.0
}

/// The toy's `config.json`.
pub fn config() -> serde_json::Value {
    json!({
        "model_type": "glm_moe_dsa", "hidden_size": HIDDEN, "num_hidden_layers": 5,
        "num_attention_heads": HEADS, "n_routed_experts": EXPERTS, "num_experts_per_tok": 8,
        "moe_intermediate_size": 16, "intermediate_size": 96, "first_k_dense_replace": 1,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_shared_experts": 1, "vocab_size": 300, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": true, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "eos_token_id": [290, 291], "index_topk": 6, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk_freq": 2
    })
}

/// Writes the toy snapshot into `dir`, which must exist.
pub fn write(dir: &Path) -> io::Result<()> {
    std::fs::write(dir.join("config.json"), config().to_string())?;
    container::write(&dir.join("out-00000.safetensors"), &tensors())
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
