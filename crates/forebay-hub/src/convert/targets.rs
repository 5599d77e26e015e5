//! Which format every part of the result gets.

use forebay_core::Format;
use forebay_model::families::roles::{Role, Shape, TensorNeed};
use serde_json::{Value, json};

use super::error::ConvertError;

/// A format for every kind of matrix. Norms, biases and the router are always F32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Targets {
    /// Routed experts.
    pub experts: Format,
    /// Dense layers and shared experts.
    pub dense: Format,
    /// Attention's projections.
    pub attention: Format,
    /// Token embeddings.
    pub embedding: Format,
    /// Output head.
    pub head: Format,
    /// The indexer of sparse attention.
    pub indexer: Format,
    /// Every matrix of the layer that drafts tokens (MTP).
    pub mtp: Format,
}

impl Targets {
    /// Experts and dense layers in `format`, all else int8. Attention is a small part of the bytes (int8 instead of
    /// int4 adds 6.5 GB to GLM-5.2), and the MTP layer is of little use below it (conversion spec section 3).
    pub fn of(format: Format) -> Self {
        let int8 = Format::Int8Row;
        let (attention, embedding, head, indexer, mtp) = (int8, int8, int8, int8, int8);
        Self { experts: format, dense: format, attention, embedding, head, indexer, mtp }
    }

    /// Refuses what cannot be written, and what could not be used.
    pub fn check(&self) -> Result<(), ConvertError> {
        let all = [
            ("experts", self.experts),
            ("dense", self.dense),
            ("attention", self.attention),
            ("embed", self.embedding),
            ("head", self.head),
            ("indexer", self.indexer),
            ("mtp", self.mtp),
        ];
        if let Some(&(part, format)) = all.iter().find(|(_, format)| *format == Format::Fp8Block) {
            return Err(ConvertError::Format { part, format });
        }
        if matches!(self.mtp, Format::Int4Row | Format::Int2Row) {
            return Err(ConvertError::MtpFormat { format: self.mtp });
        }
        Ok(())
    }

    /// The format that `need` gets.
    pub(super) fn format(&self, need: &TensorNeed) -> Format {
        match (need.role, need.shape) {
            (_, Shape::Vector { .. } | Shape::FloatMatrix { .. }) => Format::F32,
            (Role::Embedding, _) => self.embedding,
            (Role::Head, _) => self.head,
            (Role::QueryDown | Role::QueryUp | Role::KvDown | Role::KvUp | Role::AttentionOut, _) => {
                self.attention
            }
            (Role::IndexQuery | Role::IndexKey | Role::IndexWeight, _) => self.indexer,
            (Role::DenseMlp | Role::SharedExpert, _) => self.dense,
            (Role::RoutedExpert, _) => self.experts,
            (Role::Mtp, _) => self.mtp,
            (Role::Norm | Role::Router | Role::RouterBias, _) => Format::F32,
        }
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "experts": self.experts.to_string(),
            "dense": self.dense.to_string(),
            "attention": self.attention.to_string(),
            "embed": self.embedding.to_string(),
            "head": self.head.to_string(),
            "indexer": self.indexer.to_string(),
            "mtp": self.mtp.to_string(),
        })
    }
}
