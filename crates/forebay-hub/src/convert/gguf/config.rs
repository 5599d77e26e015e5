//! The `config.json` that a GGUF file's metadata stand for.

use std::collections::BTreeMap;

use serde_json::{Map, Value as Json, json};

use super::GgufSourceError;
use super::names::INDEX_KEY;
use crate::gguf::header::{MERGES, TOKEN_TYPES, TOKENS};
use crate::gguf::{Info, Value};

/// Architectures whose tensors [`names`](super::names) knows. The second is that of other models too; one without
/// latent attention lacks the sizes that are asked for here.
pub const ARCHITECTURES: [&str; 3] = ["glm-dsa", "glm4moe", "deepseek2"];
/// The router's function "sigmoid".
const SIGMOID: i128 = 2;
/// No model has more layers.
const MAX_LAYERS: u64 = 256;

/// The metadata of one file under the names of its architecture.
pub struct Metadata<'a> {
    values: &'a BTreeMap<String, Value>,
    architecture: &'a str,
}

impl<'a> Metadata<'a> {
    /// Refuses architectures that are not known.
    pub fn new(values: &'a BTreeMap<String, Value>) -> Result<Self, GgufSourceError> {
        let architecture = match values.get("general.architecture") {
            Some(Value::Text(text)) => text.as_str(),
            _ => "none",
        };
        match ARCHITECTURES.contains(&architecture) {
            true => Ok(Self { values, architecture }),
            false => Err(GgufSourceError::Architecture { found: architecture.chars().take(60).collect() }),
        }
    }

    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.architecture)
    }

    fn refuse(&self, key: String, expected: &str) -> GgufSourceError {
        let found = match self.values.get(&key) {
            None => "missing".to_owned(),
            Some(Value::Integer(n)) => n.to_string(),
            Some(Value::Text(text)) => format!("{:?}", text.chars().take(60).collect::<String>()),
            Some(Value::Texts(_) | Value::Integers(_) | Value::Array(_)) => "a list".to_owned(),
            Some(Value::Single(x)) => x.to_string(),
            Some(Value::Double(x)) => x.to_string(),
            Some(Value::Bool(b)) => b.to_string(),
        };
        GgufSourceError::Metadata { key, found, expected: expected.to_owned() }
    }

    fn opt_integer(&self, name: &str) -> Result<Option<u64>, GgufSourceError> {
        let key = self.key(name);
        match self.values.get(&key) {
            None => Ok(None),
            Some(Value::Integer(n)) if (0..=i128::from(u32::MAX)).contains(n) => Ok(Some(*n as u64)),
            Some(_) => Err(self.refuse(key, "a whole number below 2^32")),
        }
    }

    fn integer(&self, name: &str) -> Result<u64, GgufSourceError> {
        self.opt_integer(name)?.ok_or_else(|| self.refuse(self.key(name), "a whole number below 2^32"))
    }

    /// A number as the shortest decimal that means it in its own precision: what it was in the original config.
    fn number(&self, name: &str) -> Result<f64, GgufSourceError> {
        let key = self.key(name);
        let found = match self.values.get(&key) {
            Some(Value::Single(x)) => x.to_string().parse().ok(),
            Some(Value::Double(x)) => Some(*x),
            _ => None,
        };
        found.filter(|x: &f64| x.is_finite()).ok_or_else(|| self.refuse(key, "a number"))
    }

    /// Layers, those that draft tokens included.
    pub fn blocks(&self) -> Result<usize, GgufSourceError> {
        match self.integer("block_count")? {
            n if n <= MAX_LAYERS => Ok(n as usize),
            _ => Err(self.refuse(self.key("block_count"), "at most 256")),
        }
    }

    /// Width of the part of a key that is not rotated, and of a value. Files made for the absorbed form of attention
    /// have them under names of their own.
    pub fn head_widths(&self) -> Result<[u64; 2], GgufSourceError> {
        let key = match self.opt_integer("attention.key_length_mla")? {
            Some(width) => width,
            None => self.integer("attention.key_length")?,
        };
        let value = match self.opt_integer("attention.value_length_mla")? {
            Some(width) => width,
            None => self.integer("attention.value_length")?,
        };
        let rope = self.integer("rope.dimension_count")?;
        let nope = key.checked_sub(rope).filter(|nope| *nope > 0);
        let nope = nope
            .ok_or_else(|| self.refuse(self.key("attention.key_length"), "more than rope.dimension_count"))?;
        Ok([nope, value])
    }

    /// `config.json` of the model with these tensors.
    pub fn config(&self, tensors: &[&Info]) -> Result<Vec<u8>, GgufSourceError> {
        let drafting = self.opt_integer("nextn_predict_layers")?.unwrap_or(0);
        let blocks = self.blocks()?;
        let layers = (blocks as u64).checked_sub(drafting).filter(|layers| *layers > 0);
        let layers =
            layers.ok_or_else(|| self.refuse(self.key("nextn_predict_layers"), "fewer than block_count"))?;
        let gating = self.key("expert_gating_func");
        if self.values.get(&gating) != Some(&Value::Integer(SIGMOID)) {
            return Err(self.refuse(gating, "2 (sigmoid): no other router is computed"));
        }
        let [nope, value] = self.head_widths()?;
        let normalise = match self.values.get(&self.key("expert_weights_norm")) {
            Some(Value::Bool(normalise)) => *normalise,
            None => false,
            Some(_) => return Err(self.refuse(self.key("expert_weights_norm"), "true or false")),
        };
        let mut map = Map::new();
        let mut set = |key: &str, value: Json| drop(map.insert(key.to_owned(), value));
        set("model_type", json!(forebay_model::families::glm::MODEL_TYPE));
        set("num_hidden_layers", json!(layers));
        set("num_nextn_predict_layers", json!(drafting));
        for (ours, theirs) in [
            ("hidden_size", "embedding_length"),
            ("first_k_dense_replace", "leading_dense_block_count"),
            ("intermediate_size", "feed_forward_length"),
            ("moe_intermediate_size", "expert_feed_forward_length"),
            ("n_routed_experts", "expert_count"),
            ("num_experts_per_tok", "expert_used_count"),
            ("num_attention_heads", "attention.head_count"),
            ("q_lora_rank", "attention.q_lora_rank"),
            ("kv_lora_rank", "attention.kv_lora_rank"),
            ("qk_rope_head_dim", "rope.dimension_count"),
            ("max_position_embeddings", "context_length"),
        ] {
            set(ours, json!(self.integer(theirs)?));
        }
        set("qk_nope_head_dim", json!(nope));
        set("v_head_dim", json!(value));
        set("n_shared_experts", json!(self.opt_integer("expert_shared_count")?.unwrap_or(0)));
        set("n_group", json!(self.opt_integer("expert_group_count")?.unwrap_or(1).max(1)));
        set("topk_group", json!(self.opt_integer("expert_group_used_count")?.unwrap_or(1).max(1)));
        set("norm_topk_prob", json!(normalise));
        set("routed_scaling_factor", json!(self.number("expert_weights_scale")?));
        set("rms_norm_eps", json!(self.number("attention.layer_norm_rms_epsilon")?));
        let theta = json!(self.number("rope.freq_base")?);
        set("rope_parameters", json!({"rope_theta": theta, "rope_type": self.rope_type()?}));
        set("rope_interleave", json!(true));
        set("vocab_size", json!(self.vocabulary(tensors)?));
        if let Some(Value::Integer(id)) = self.values.get("tokenizer.ggml.eos_token_id")
            && let Ok(id) = u32::try_from(*id)
        {
            set("eos_token_id", json!([id]));
        }
        self.indexer(layers, tensors, &mut map)?;
        let text = serde_json::to_string_pretty(&Json::Object(map)).unwrap_or_default() + "\n";
        Ok(text.into_bytes())
    }

    /// How rotary positions are scaled, which the reader of the config refuses unless they are not.
    fn rope_type(&self) -> Result<String, GgufSourceError> {
        let key = self.key("rope.scaling.type");
        match self.values.get(&key) {
            None => Ok("default".to_owned()),
            Some(Value::Text(text)) if text == "none" => Ok("default".to_owned()),
            Some(_) => Err(self.refuse(key, "none: scaled rotary positions are not computed")),
        }
    }

    /// Rows of the embeddings, as the tensor has them.
    fn vocabulary(&self, tensors: &[&Info]) -> Result<u64, GgufSourceError> {
        const NAME: &str = "token_embd.weight";
        let found = tensors.iter().find(|info| info.name == NAME);
        let rows = found.and_then(|info| info.shape.first()).copied();
        rows.ok_or_else(|| GgufSourceError::Missing { tensor: NAME.to_owned() })
    }

    /// The indexer, if any layer has one: layers without use the selection of an earlier layer.
    fn indexer(
        &self,
        layers: u64,
        tensors: &[&Info],
        map: &mut Map<String, Json>,
    ) -> Result<(), GgufSourceError> {
        let own = |layer: &u64| tensors.iter().any(|info| info.name == format!("blk.{layer}.{INDEX_KEY}"));
        if !(0..layers).any(|layer| own(&layer)) {
            return Ok(());
        }
        let kinds: Vec<_> = (0..layers).map(|layer| if own(&layer) { "full" } else { "shared" }).collect();
        map.insert("indexer_types".to_owned(), json!(kinds));
        for (ours, theirs) in [
            ("index_n_heads", "attention.indexer.head_count"),
            ("index_head_dim", "attention.indexer.key_length"),
            ("index_topk", "attention.indexer.top_k"),
        ] {
            map.insert(ours.to_owned(), json!(self.integer(theirs)?));
        }
        Ok(())
    }

    /// A text that has no architecture in its key.
    pub fn text(&self, key: &str) -> Option<&'a str> {
        match self.values.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// What is joined with what, if the file says so.
    pub fn merges(&self) -> Option<&'a [String]> {
        match self.values.get(MERGES) {
            Some(Value::Texts(merges)) => Some(merges),
            _ => None,
        }
    }

    /// The kinds of the tokens, if the file has them.
    pub fn token_types(&self) -> Option<&'a [i32]> {
        match self.values.get(TOKEN_TYPES) {
            Some(Value::Integers(types)) => Some(types),
            _ => None,
        }
    }

    /// The vocabulary, if the file has one.
    pub fn tokens(&self) -> Option<&'a [String]> {
        match self.values.get(TOKENS) {
            Some(Value::Texts(tokens)) => Some(tokens),
            _ => None,
        }
    }
}
