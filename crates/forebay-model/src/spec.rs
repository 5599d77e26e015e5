//! What a model is, as data: sizes and the kind of every layer.
//!
//! `config.json` becomes a [`ModelSpec`] in the family's own module
//! ([`crate::families`]); the forward pass and the planner read only this.

/// Everything the forward pass needs to know about a model's shape.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// The family's name as `config.json` spells it.
    pub family: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of token ids that have an embedding and a logit.
    pub vocab: usize,
    /// The decoder layers, from the bottom.
    pub layers: Vec<LayerSpec>,
    /// Attention sizes, the same in every layer.
    pub attention: MlaSpec,
    /// The sparse-attention indexer that the config declares, if any.
    pub indexer: Option<IndexerSpec>,
    /// Width of a dense layer's MLP.
    pub dense_width: usize,
    /// Routed experts and their router.
    pub moe: MoeSpec,
    /// Epsilon of the hidden-width RMS norms.
    pub norm_eps: f32,
    /// Epsilon of the two low-rank norms inside attention.
    pub low_rank_norm_eps: f32,
    /// Longest sequence the model was made for, when the config says.
    pub max_context: Option<usize>,
    /// Number of multi-token-prediction layers after the decoder layers.
    pub mtp_layers: usize,
}

/// One decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSpec {
    /// Whether the layer selects keys itself, when sparse attention is on.
    pub indexer: IndexerKind,
    /// What follows attention.
    pub ffn: FfnKind,
}

/// A layer's part in sparse attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexerKind {
    /// Scores the keys and selects.
    Full,
    /// Re-uses the selection of the last full layer below.
    Shared,
}

/// A layer's feed-forward part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FfnKind {
    /// One MLP for every token.
    Dense,
    /// A router, routed experts and a shared expert.
    Sparse,
}

/// Multi-head latent attention (DeepSeek-V2, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaSpec {
    /// Query heads.
    pub heads: usize,
    /// Query and key width per head without position.
    pub nope: usize,
    /// Query and key width per head with rotary position; even.
    pub rope: usize,
    /// Value width per head.
    pub value: usize,
    /// Rank of the query compression.
    pub q_rank: usize,
    /// Rank of the key/value compression: the cached latent.
    pub kv_rank: usize,
    /// Base of the rotary frequencies.
    pub rope_theta: f32,
}

impl MlaSpec {
    /// Query width per head.
    pub fn qk(&self) -> usize {
        self.nope + self.rope
    }

    /// Rows of `kv_b` per head: keys, then values.
    pub fn kv_b_rows(&self) -> usize {
        self.nope + self.value
    }

    /// The factor on attention scores: one over the root of the query width.
    pub fn scale(&self) -> f32 {
        1.0 / (self.qk() as f32).sqrt()
    }
}

/// The lightning indexer of DeepSeek sparse attention (DSA).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexerSpec {
    /// Indexer heads.
    pub heads: usize,
    /// Width of an index key; the first `rope` of them are rotated.
    pub dim: usize,
    /// Keys kept per query.
    pub top_k: usize,
}

/// Routed experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeSpec {
    /// Routed experts per sparse layer.
    pub experts: usize,
    /// Routed experts used per token.
    pub top_k: usize,
    /// Width of a routed expert.
    pub expert_width: usize,
    /// Width of the shared expert; 0 when there is none.
    pub shared_width: usize,
    /// Whether the chosen weights are divided by their sum.
    pub normalise: bool,
    /// Factor on the routed weights.
    pub scaling: f32,
}

impl ModelSpec {
    /// The sparse layers, in order.
    pub fn sparse_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|&i| self.layers[i].ffn == FfnKind::Sparse)
    }

    /// The layers that own an indexer when sparse attention is on, in order.
    pub fn full_indexer_layers(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.layers.len()).filter(|&i| self.layers[i].indexer == IndexerKind::Full)
    }

    /// Values cached per token and layer, index keys apart.
    pub fn kv_width(&self) -> usize {
        self.attention.kv_rank + self.attention.rope
    }
}

/// Whether an optional part of a model can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Capability {
    /// The config does not ask for it, or the snapshot has none of its tensors.
    Absent {
        /// Why, in words.
        reason: String,
    },
    /// Some of its tensors are missing, so it stays off.
    Incomplete {
        /// The first tensor that is missing.
        first_missing: String,
        /// How many are missing.
        missing: usize,
    },
    /// Complete, but its weights are stored in a form that makes it useless.
    Unusable {
        /// Why, in words.
        reason: String,
    },
    /// Complete and usable.
    Active,
}

impl Capability {
    /// Whether the part is complete and usable.
    pub fn is_active(&self) -> bool {
        *self == Capability::Active
    }
}

impl std::fmt::Display for Capability {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Capability::Absent { reason } => write!(f, "absent ({reason})"),
            Capability::Incomplete { first_missing, missing } => {
                write!(f, "incomplete ({missing} tensors missing, the first is {first_missing})")
            }
            Capability::Unusable { reason } => write!(f, "unusable ({reason})"),
            Capability::Active => f.write_str("active"),
        }
    }
}
