//! What llama.cpp calls the tensors of a model with latent attention, and what they are called here.

/// What a tensor is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Named {
    /// One tensor of the model, by its name.
    Whole(String),
    /// A matrix of every routed expert of a layer: what stands before the expert's number and behind it.
    Experts {
        /// Up to the number.
        before: String,
        /// Behind it.
        after: &'static str,
    },
}

/// The matrices that attention's `kv_b_proj` may be split into, as they are called between source and plan: keys
/// transposed, `[heads, kv_rank, nope]`, and values, `[heads, value, kv_rank]`.
pub const SPLIT: [&str; 2] = ["k_b_proj.weight", "v_b_proj.weight"];

/// Tensors outside the layers.
const GLOBAL: [(&str, &str); 3] = [
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output.weight", "lm_head.weight"),
    ("output_norm.weight", "model.norm.weight"),
];

/// Tensors of a layer.
const LAYER: [(&str, &str); 33] = [
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("attn_kv_b.weight", "self_attn.kv_b_proj.weight"),
    ("attn_k_b.weight", "self_attn.k_b_proj.weight"),
    ("attn_v_b.weight", "self_attn.v_b_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
    ("ffn_gate_exps.weight", "mlp.experts.*.gate_proj.weight"),
    ("ffn_up_exps.weight", "mlp.experts.*.up_proj.weight"),
    ("ffn_down_exps.weight", "mlp.experts.*.down_proj.weight"),
    ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    (INDEX_KEY, "self_attn.indexer.wk.weight"),
    ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    ("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    ("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
    ("nextn.eh_proj.weight", "eh_proj.weight"),
    ("nextn.enorm.weight", "enorm.weight"),
    ("nextn.hnorm.weight", "hnorm.weight"),
    ("nextn.shared_head_norm.weight", "shared_head.norm.weight"),
    ("nextn.shared_head_head.weight", "shared_head.head.weight"),
    ("nextn.embed_tokens.weight", "embed_tokens.weight"),
];

/// The tensor that every layer with an indexer of its own has.
pub const INDEX_KEY: &str = "indexer.attn_k.weight";

/// The layer that a tensor lies in; `None` outside of layers.
pub fn layer(name: &str) -> Option<usize> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

/// The meaning of the tensor `name` in a model of `layers` layers, the drafting ones included; `None` if it has none.
pub fn meaning(name: &str, layers: usize) -> Option<Named> {
    if let Some((_, ours)) = GLOBAL.iter().find(|(theirs, _)| *theirs == name) {
        return Some(Named::Whole((*ours).to_owned()));
    }
    let (number, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let layer = layer(name).filter(|layer| *layer < layers && layer.to_string() == number)?;
    let (_, ours) = LAYER.iter().find(|(theirs, _)| *theirs == rest)?;
    let prefix = forebay_model::families::glm::layer_prefix(layer);
    Some(match ours.split_once('*') {
        Some((before, after)) => Named::Experts { before: format!("{prefix}{before}"), after },
        None => Named::Whole(format!("{prefix}{ours}")),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_one_meaning_each_or_none() {
        let whole = |name: &str| Some(Named::Whole(name.to_owned()));
        assert_eq!(meaning("output.weight", 4), whole("lm_head.weight"));
        assert_eq!(meaning("blk.3.attn_norm.weight", 4), whole("model.layers.3.input_layernorm.weight"));
        let before = "model.layers.0.mlp.experts.".to_owned();
        let experts = Named::Experts { before, after: ".up_proj.weight" };
        assert_eq!(meaning("blk.0.ffn_up_exps.weight", 4), Some(experts));
        for none in [
            "blk.4.attn_norm.weight",
            "blk.03.attn_norm.weight",
            "blk.+3.attn_norm.weight",
            "blk.3.attn_q.weight",
            "rope_freqs.weight",
            "blk.3",
            "",
        ] {
            assert_eq!(meaning(none, 4), None, "{none}");
        }
    }
}
