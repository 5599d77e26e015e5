//! What a tensor is for, whatever a family calls it.

use crate::arith::Arith;
use forebay_core::Format;

/// The purpose of a weight matrix or vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Token embeddings, `[vocab, hidden]`.
    Embedding,
    /// Output projection, `[vocab, hidden]`.
    Head,
    /// Any normalisation weight or bias.
    Norm,
    /// Query compression, `[q_rank, hidden]`.
    QueryDown,
    /// Query expansion, `[heads * (nope + rope), q_rank]`.
    QueryUp,
    /// Key/value compression and shared rope key, `[kv_rank + rope, hidden]`.
    KvDown,
    /// Key/value expansion, `[heads * (nope + value), kv_rank]`.
    KvUp,
    /// Attention output, `[hidden, heads * value]`.
    AttentionOut,
    /// Indexer queries, `[index heads * index dim, q_rank]`.
    IndexQuery,
    /// Indexer keys, `[index dim, hidden]`.
    IndexKey,
    /// Indexer head weights, `[index heads, hidden]`.
    IndexWeight,
    /// Dense MLP, gate and up `[width, hidden]`, down `[hidden, width]`.
    DenseMlp,
    /// Shared expert, same shapes.
    SharedExpert,
    /// Router, `[experts, hidden]`.
    Router,
    /// The router's selection bias, `[experts]`.
    RouterBias,
    /// Routed experts, same shapes as the shared one.
    RoutedExpert,
    /// Everything of a multi-token-prediction layer.
    Mtp,
}

impl Role {
    /// The arithmetic of this role when the engine runs in `mode`.
    ///
    /// A fixed table, never a function of the number of rows (docs/numerics.md section 10).
    /// The router and the indexer stay exact: they decide *which* experts and keys count.
    /// `kv_b` does because absorbed attention combines its rows.
    pub fn arith(self, mode: Arith) -> Arith {
        match self {
            Role::Head
            | Role::QueryDown
            | Role::QueryUp
            | Role::KvDown
            | Role::AttentionOut
            | Role::DenseMlp
            | Role::SharedExpert
            | Role::RoutedExpert
            | Role::Mtp => mode,
            Role::Embedding
            | Role::Norm
            | Role::KvUp
            | Role::IndexQuery
            | Role::IndexKey
            | Role::IndexWeight
            | Role::Router
            | Role::RouterBias => Arith::Exact,
        }
    }

    /// The format this role takes when weights are quantised at load to `wanted`.
    ///
    /// Norms, the router and its bias always stay as stored; embeddings, head,
    /// indexer and MTP never go below int8.
    pub fn quantised(self, stored: Format, wanted: Format) -> Format {
        match self {
            _ if stored.is_integer() => stored,
            Role::Norm | Role::Router | Role::RouterBias => stored,
            Role::Embedding
            | Role::Head
            | Role::IndexQuery
            | Role::IndexKey
            | Role::IndexWeight
            | Role::Mtp => Format::Int8Row,
            _ => wanted,
        }
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Role::Embedding => "embedding",
            Role::Head => "head",
            Role::Norm => "norms",
            Role::QueryDown => "attention q_a",
            Role::QueryUp => "attention q_b",
            Role::KvDown => "attention kv_a",
            Role::KvUp => "attention kv_b",
            Role::AttentionOut => "attention output",
            Role::IndexQuery => "indexer queries",
            Role::IndexKey => "indexer keys",
            Role::IndexWeight => "indexer weights",
            Role::DenseMlp => "dense MLP",
            Role::SharedExpert => "shared expert",
            Role::Router => "router",
            Role::RouterBias => "router bias",
            Role::RoutedExpert => "routed experts",
            Role::Mtp => "MTP layer",
        })
    }
}

/// The shape a tensor must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// A linear layer, in any weight format.
    Matrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// A linear layer that is never quantised (the router).
    FloatMatrix {
        /// Outputs.
        rows: usize,
        /// Inputs.
        cols: usize,
    },
    /// A vector, in a float format.
    Vector {
        /// Elements.
        len: usize,
    },
}

/// One tensor that a model consists of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorNeed {
    /// What it is for.
    pub role: Role,
    /// Its name in the snapshot.
    pub name: String,
    /// Its shape by the config.
    pub shape: Shape,
}

impl TensorNeed {
    /// A linear layer.
    pub fn matrix(role: Role, name: String, rows: usize, cols: usize) -> Self {
        Self { role, name, shape: Shape::Matrix { rows, cols } }
    }

    /// A vector.
    pub fn vector(role: Role, name: String, len: usize) -> Self {
        Self { role, name, shape: Shape::Vector { len } }
    }
}
