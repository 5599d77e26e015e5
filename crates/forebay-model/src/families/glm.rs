//! GLM-5.2 (`glm_moe_dsa`): its `config.json`, then its tensor names.
//!
//! Field names and their allowed values follow container spec section 2; names
//! and shapes follow section 4.

use forebay_store::config::{ConfigError, ConfigFile, POSITIVE, Section};

use super::roles::{Role, Shape, TensorNeed};
use crate::spec::{FfnKind, IndexerKind, IndexerSpec, LayerSpec, MlaSpec, ModelSpec, MoeSpec};

/// `model_type` of this family.
pub const MODEL_TYPE: &str = "glm_moe_dsa";

/// transformers' epsilon of `q_a_layernorm` and `kv_a_layernorm` (its class default).
pub const TRANSFORMERS_LOW_RANK_EPS: f32 = 1e-6;

/// Widest index key the indexer supports; wider ones leave sparse attention off.
const MAX_INDEX_DIM: usize = 256;

/// Reads a GLM `config.json`, refusing what this engine does not compute exactly.
pub fn spec(config: &ConfigFile) -> Result<ModelSpec, ConfigError> {
    let c = config.root();
    c.opt_choice("model_type", &[MODEL_TYPE])?;
    refuse_other_functions(&c)?;
    let layers = c.usize("num_hidden_layers", 1..=128)?;
    let experts = c.usize("n_routed_experts", 1..=4096)?;
    let expert_width = c.usize("moe_intermediate_size", 1..=1 << 20)?;
    let shared = c.opt_usize("n_shared_experts", 0..=64)?.unwrap_or(0);
    let attention = attention(&c)?;
    let indexer = indexer(&c, &attention)?;
    let norm_eps = match c.opt_f64("rms_norm_eps", POSITIVE)? {
        Some(eps) => single(&c, "rms_norm_eps", eps)?,
        None => 1e-5,
    };
    let spec = ModelSpec {
        family: MODEL_TYPE.to_owned(),
        hidden: c.usize("hidden_size", 1..=1 << 20)?,
        vocab: c.usize("vocab_size", 1..=1 << 24)?,
        layers: layer_kinds(&c, layers)?,
        attention,
        indexer,
        dense_width: c.usize("intermediate_size", 1..=1 << 24)?,
        moe: MoeSpec {
            experts,
            top_k: c.usize("num_experts_per_tok", 1..=experts.min(64))?,
            expert_width,
            shared_width: expert_width * shared,
            normalise: c.bool("norm_topk_prob")?,
            scaling: single(&c, "routed_scaling_factor", c.f64("routed_scaling_factor", ..)?)?,
        },
        norm_eps,
        low_rank_norm_eps: norm_eps,
        max_context: c.opt_usize("max_position_embeddings", 1..=1 << 30)?,
        mtp_layers: c.opt_usize("num_nextn_predict_layers", 0..=16)?.unwrap_or(0),
    };
    if indexer.is_some() && spec.layers[0].indexer == IndexerKind::Shared {
        let given = |field: &&str| c.raw(field).is_some_and(|value| !value.is_null());
        let named = ["indexer_types", "index_topk_pattern"].into_iter().find(given);
        return Err(c.refuse(
            named.unwrap_or("index_skip_topk_offset"),
            "a schedule whose layer 0 is \"full\"",
            "layer 0 has no earlier selection to share",
        ));
    }
    Ok(spec)
}

/// Fields whose other values would change the function computed.
fn refuse_other_functions(c: &Section<'_>) -> Result<(), ConfigError> {
    c.usize("n_group", 1..=1)?;
    c.opt_usize("topk_group", 1..=1)?;
    c.opt_usize("moe_layer_freq", 1..=1)?;
    c.opt_choice("hidden_act", &["silu"])?;
    c.opt_choice("scoring_func", &["sigmoid"])?;
    c.opt_choice("topk_method", &["noaux_tc"])?;
    for (field, wanted, why) in [
        ("attention_bias", false, "attention biases are not part of this family's checkpoints"),
        ("rope_interleave", true, "only interleaved rotary pairs are computed"),
        ("indexer_rope_interleave", true, "only interleaved rotary pairs are computed"),
    ] {
        if c.opt_bool(field)?.is_some_and(|found| found != wanted) {
            return Err(c.refuse(field, wanted.to_string(), why));
        }
    }
    if let Some(quantisation) = c.opt_section("quantization_config")? {
        quantisation.opt_choice("quant_method", &["fp8"])?;
        let blocks = quantisation.raw("weight_block_size");
        let sides = blocks.and_then(|v| v.as_array());
        let square = sides.is_some_and(|s| s.len() == 2 && s.iter().all(|n| n.as_u64() == Some(128)));
        if blocks.is_some_and(|v| !v.is_null()) && !square {
            return Err(quantisation.refuse(
                "weight_block_size",
                "[128, 128]",
                "other FP8 blocks cannot be read",
            ));
        }
    }
    Ok(())
}

fn attention(c: &Section<'_>) -> Result<MlaSpec, ConfigError> {
    let heads = c.usize("num_attention_heads", 1..=1024)?;
    let nope = c.usize("qk_nope_head_dim", 1..=65_536)?;
    let rope = c.usize("qk_rope_head_dim", 1..=256)?;
    if rope % 2 != 0 {
        return Err(c.refuse("qk_rope_head_dim", "an even number up to 256", "rotary positions turn pairs"));
    }
    if let Some(found) = c.opt_usize("qk_head_dim", 0..=usize::MAX)?
        && found != nope + rope
    {
        let allowed = format!("{} (qk_nope_head_dim + qk_rope_head_dim)", nope + rope);
        return Err(c.refuse("qk_head_dim", allowed, "the query width is the sum of its two parts"));
    }
    c.opt_usize("num_key_value_heads", heads..=heads)?;
    Ok(MlaSpec {
        heads,
        nope,
        rope,
        value: c.usize("v_head_dim", 1..=65_536)?,
        q_rank: c.usize("q_lora_rank", 1..=1 << 20)?,
        kv_rank: c.usize("kv_lora_rank", 1..=1 << 20)?,
        rope_theta: rope_theta(c)?,
    })
}

/// The rotary base, from `rope_parameters` or, in older configs, from the top level.
fn rope_theta(c: &Section<'_>) -> Result<f32, ConfigError> {
    if c.raw("rope_scaling").is_some_and(|v| !v.is_null()) {
        return Err(c.refuse("rope_scaling", "null", "scaled rotary positions are not supported"));
    }
    let outer = c.opt_f64("rope_theta", POSITIVE)?;
    let Some(rope) = c.opt_section("rope_parameters")? else {
        return single(c, "rope_theta", c.f64("rope_theta", POSITIVE)?);
    };
    rope.opt_choice("rope_type", &["default"])?;
    let theta = rope.f64("rope_theta", POSITIVE)?;
    if outer.is_some_and(|outer| outer != theta) {
        let allowed = format!("{theta} (rope_parameters.rope_theta)");
        return Err(c.refuse("rope_theta", allowed, "the two places disagree"));
    }
    single(&rope, "rope_theta", theta)
}

/// `value` in single precision, in which it must be neither infinite nor, unless it is 0, 0.
fn single(c: &Section<'_>, field: &str, value: f64) -> Result<f32, ConfigError> {
    let narrow = value as f32;
    if !narrow.is_finite() || (narrow == 0.0 && value != 0.0) {
        let allowed = format!("a number of magnitude {:e} to {:e}", f32::MIN_POSITIVE, f32::MAX);
        return Err(c.refuse(field, allowed, "it is computed with in single precision"));
    }
    Ok(narrow)
}

/// The indexer that the config declares; `None` when any of its sizes is 0 or the key is too wide.
fn indexer(c: &Section<'_>, attention: &MlaSpec) -> Result<Option<IndexerSpec>, ConfigError> {
    let top_k = c.opt_usize("index_topk", 0..=1 << 20)?.unwrap_or(0);
    let heads = c.opt_usize("index_n_heads", 0..=1024)?.unwrap_or(0);
    let dim = c.opt_usize("index_head_dim", 0..=65_536)?.unwrap_or(0);
    if top_k == 0 || heads == 0 || dim == 0 || dim > MAX_INDEX_DIM {
        return Ok(None);
    }
    if attention.rope > dim {
        let allowed = format!("at least qk_rope_head_dim, {}", attention.rope);
        return Err(c.refuse("index_head_dim", allowed, "the rotated part must fit into the index key"));
    }
    Ok(Some(IndexerSpec { heads, dim, top_k }))
}

fn layer_kinds(c: &Section<'_>, layers: usize) -> Result<Vec<LayerSpec>, ConfigError> {
    let dense = c.opt_usize("first_k_dense_replace", 0..=layers)?.unwrap_or(0);
    let ffn = |i: usize| if i < dense { FfnKind::Dense } else { FfnKind::Sparse };
    if let Some(types) = c.opt_str_list("mlp_layer_types")? {
        let agrees = |(i, name): (usize, &&str)| match ffn(i) {
            FfnKind::Dense => *name == "dense",
            FfnKind::Sparse => *name == "sparse",
        };
        if types.len() != layers || !types.iter().enumerate().all(agrees) {
            let allowed = format!("{dense} times \"dense\", then {} times \"sparse\"", layers - dense);
            return Err(c.refuse("mlp_layer_types", allowed, "it must agree with first_k_dense_replace"));
        }
    }
    let schedule = indexer_schedule(c, layers)?;
    Ok(schedule.into_iter().enumerate().map(|(i, indexer)| LayerSpec { indexer, ffn: ffn(i) }).collect())
}

/// Which layers select: `indexer_types`, else `index_topk_pattern`, else every `freq`-th
/// layer after `offset` (container spec section 9).
fn indexer_schedule(c: &Section<'_>, layers: usize) -> Result<Vec<IndexerKind>, ConfigError> {
    let frequency = c.opt_usize("index_topk_freq", 0..=usize::MAX)?.unwrap_or(1).max(1);
    let offset = c.opt_usize("index_skip_topk_offset", 0..=usize::MAX)?.unwrap_or(2);
    let mut schedule: Vec<IndexerKind> = (0..layers)
        .map(|i| match (i + 1).saturating_sub(offset) % frequency {
            0 => IndexerKind::Full,
            _ => IndexerKind::Shared,
        })
        .collect();
    let named = |name: &str| match name {
        "full" | "F" => Some(IndexerKind::Full),
        "shared" | "S" => Some(IndexerKind::Shared),
        _ => None,
    };
    let (field, names): (_, Vec<String>) = if let Some(types) = c.opt_str_list("indexer_types")? {
        ("indexer_types", types.into_iter().map(str::to_owned).collect())
    } else if c.raw("index_topk_pattern").is_some_and(|v| v.is_string()) {
        let pattern = c.str("index_topk_pattern")?;
        ("index_topk_pattern", pattern.chars().map(String::from).collect())
    } else if let Some(pattern) = c.opt_str_list("index_topk_pattern")? {
        ("index_topk_pattern", pattern.into_iter().map(str::to_owned).collect())
    } else {
        return Ok(schedule);
    };
    if names.len() > layers {
        let allowed = format!("at most {layers} entries, one per layer");
        return Err(c.refuse(field, allowed, "there are more entries than layers"));
    }
    for (slot, name) in schedule.iter_mut().zip(&names) {
        *slot = named(name).ok_or_else(|| {
            c.refuse(field, "\"full\" or \"shared\" (F or S) for every layer", format!("{name:?} is neither"))
        })?;
    }
    Ok(schedule)
}

/// Whether the config says that the head re-uses the embedding matrix.
pub fn ties_embeddings(config: &ConfigFile) -> Result<bool, ConfigError> {
    Ok(config.root().opt_bool("tie_word_embeddings")?.unwrap_or(false))
}

/// `model.embed_tokens.weight`
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// `lm_head.weight`
pub const HEAD: &str = "lm_head.weight";
/// `model.norm.weight`
pub const FINAL_NORM: &str = "model.norm.weight";

/// The prefix of layer `layer`'s tensors.
pub fn layer_prefix(layer: usize) -> String {
    format!("model.layers.{layer}.")
}

/// Tensors outside the layers.
pub fn global_needs(spec: &ModelSpec) -> Vec<TensorNeed> {
    vec![
        TensorNeed::matrix(Role::Embedding, EMBEDDING.into(), spec.vocab, spec.hidden),
        TensorNeed::matrix(Role::Head, HEAD.into(), spec.vocab, spec.hidden),
        TensorNeed::vector(Role::Norm, FINAL_NORM.into(), spec.hidden),
    ]
}

/// The resident tensors of decoder layer `layer`, indexer and routed experts apart.
pub fn layer_needs(spec: &ModelSpec, layer: usize) -> Vec<TensorNeed> {
    block_needs(spec, layer, spec.layers[layer].ffn)
}

/// A block's norms, attention and feed-forward part.
fn block_needs(spec: &ModelSpec, layer: usize, ffn: FfnKind) -> Vec<TensorNeed> {
    let (a, d) = (&spec.attention, spec.hidden);
    let prefix = layer_prefix(layer);
    let matrix =
        |role, suffix: &str, rows, cols| TensorNeed::matrix(role, format!("{prefix}{suffix}"), rows, cols);
    let norm = |suffix: &str, len| TensorNeed::vector(Role::Norm, format!("{prefix}{suffix}"), len);
    let mut needs = vec![
        norm("input_layernorm.weight", d),
        norm("post_attention_layernorm.weight", d),
        matrix(Role::QueryDown, "self_attn.q_a_proj.weight", a.q_rank, d),
        norm("self_attn.q_a_layernorm.weight", a.q_rank),
        matrix(Role::QueryUp, "self_attn.q_b_proj.weight", a.heads * a.qk(), a.q_rank),
        matrix(Role::KvDown, "self_attn.kv_a_proj_with_mqa.weight", a.kv_rank + a.rope, d),
        norm("self_attn.kv_a_layernorm.weight", a.kv_rank),
        matrix(Role::KvUp, "self_attn.kv_b_proj.weight", a.heads * a.kv_b_rows(), a.kv_rank),
        matrix(Role::AttentionOut, "self_attn.o_proj.weight", d, a.heads * a.value),
    ];
    match ffn {
        FfnKind::Dense => {
            needs.extend(mlp_needs(Role::DenseMlp, &format!("{prefix}mlp."), spec.dense_width, d))
        }
        FfnKind::Sparse => {
            needs.push(TensorNeed {
                role: Role::Router,
                name: format!("{prefix}mlp.gate.weight"),
                shape: Shape::FloatMatrix { rows: spec.moe.experts, cols: d },
            });
            let bias = format!("{prefix}mlp.gate.e_score_correction_bias");
            needs.push(TensorNeed::vector(Role::RouterBias, bias, spec.moe.experts));
            if spec.moe.shared_width > 0 {
                let shared = format!("{prefix}mlp.shared_experts.");
                needs.extend(mlp_needs(Role::SharedExpert, &shared, spec.moe.shared_width, d));
            }
        }
    }
    needs
}

fn mlp_needs(role: Role, prefix: &str, width: usize, hidden: usize) -> [TensorNeed; 3] {
    let named = |part: &str| format!("{prefix}{part}_proj.weight");
    [
        TensorNeed::matrix(role, named("gate"), width, hidden),
        TensorNeed::matrix(role, named("up"), width, hidden),
        TensorNeed::matrix(role, named("down"), hidden, width),
    ]
}

/// The three matrices of one routed expert: gate, up, down.
pub fn expert_needs(spec: &ModelSpec, layer: usize, expert: usize) -> [TensorNeed; 3] {
    let prefix = format!("{}mlp.experts.{expert}.", layer_prefix(layer));
    mlp_needs(Role::RoutedExpert, &prefix, spec.moe.expert_width, spec.hidden)
}

/// Names of the fused expert tensors of a layer: gate and up `[E, 2M, D]`, down `[E, D, M]`.
pub fn fused_expert_names(layer: usize) -> [String; 2] {
    let prefix = layer_prefix(layer);
    [format!("{prefix}mlp.experts.gate_up_proj"), format!("{prefix}mlp.experts.down_proj")]
}

/// The indexer tensors of layer `layer`.
pub fn indexer_needs(spec: &ModelSpec, indexer: &IndexerSpec, layer: usize) -> Vec<TensorNeed> {
    let prefix = format!("{}self_attn.indexer.", layer_prefix(layer));
    let named = |suffix: &str| format!("{prefix}{suffix}");
    vec![
        TensorNeed::matrix(
            Role::IndexQuery,
            named("wq_b.weight"),
            indexer.heads * indexer.dim,
            spec.attention.q_rank,
        ),
        TensorNeed::matrix(Role::IndexKey, named("wk.weight"), indexer.dim, spec.hidden),
        TensorNeed::matrix(Role::IndexWeight, named("weights_proj.weight"), indexer.heads, spec.hidden),
        TensorNeed::vector(Role::Norm, named("k_norm.weight"), indexer.dim),
        TensorNeed::vector(Role::Norm, named("k_norm.bias"), indexer.dim),
    ]
}

/// Name of the projection that joins embedding and hidden state in the MTP layer.
pub fn mtp_join_name(spec: &ModelSpec) -> String {
    format!("{}eh_proj.weight", layer_prefix(spec.layers.len()))
}

/// The resident tensors of the MTP layer, with the roles they have in any block.
pub fn mtp_resident_needs(spec: &ModelSpec) -> Vec<TensorNeed> {
    let (layer, d) = (spec.layers.len(), spec.hidden);
    let prefix = layer_prefix(layer);
    let mut needs = vec![TensorNeed::matrix(Role::Mtp, mtp_join_name(spec), d, 2 * d)];
    for norm in ["enorm.weight", "hnorm.weight", "shared_head.norm.weight"] {
        needs.push(TensorNeed::vector(Role::Norm, format!("{prefix}{norm}"), d));
    }
    needs.extend(block_needs(spec, layer, FfnKind::Sparse));
    needs
}

/// Every tensor of the MTP layer, its routed experts included.
pub fn mtp_needs(spec: &ModelSpec) -> Vec<TensorNeed> {
    let mut needs = mtp_resident_needs(spec);
    for expert in 0..spec.moe.experts {
        needs.extend(expert_needs(spec, spec.layers.len(), expert));
    }
    for need in &mut needs {
        if matches!(need.shape, Shape::Matrix { .. }) {
            need.role = Role::Mtp;
        }
    }
    needs
}
