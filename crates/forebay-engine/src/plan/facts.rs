//! What a model's files hold, in bytes.

use forebay_model::Snapshot;
use forebay_model::snapshot::ResidentTensor;

/// Bytes of a model as they are stored, the MTP layer apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelFacts {
    /// Shards.
    pub files: usize,
    /// Bytes of the shards, headers included.
    pub file_bytes: u64,
    /// Tensors, the ones that are not needed included.
    pub tensors: usize,
    /// Everything but routed experts.
    pub dense_bytes: u64,
    /// The same of the MTP layer; 0 if it cannot be used.
    pub mtp_dense_bytes: u64,
    /// Routed experts of the decoder layers.
    pub expert_bytes: u64,
    /// Routed experts of the MTP layer.
    pub mtp_expert_bytes: u64,
    /// Number of routed experts of the decoder layers.
    pub experts: usize,
    /// The same of the MTP layer.
    pub mtp_experts: usize,
    /// The largest expert of the decoder layers.
    pub largest_expert: u64,
    /// One expert of every decoder layer.
    pub row_bytes: u64,
    /// One expert of the MTP layer.
    pub mtp_row_bytes: u64,
}

impl ModelFacts {
    /// The facts of a checked folder.
    pub fn of(snapshot: &Snapshot) -> Self {
        let stored = |tensors: &[ResidentTensor]| tensors.iter().map(|t| t.layout.total_bytes()).sum();
        let shards = snapshot.catalog.shards();
        let mtp = snapshot.mtp_part.as_ref();
        Self {
            files: shards.len(),
            file_bytes: shards.iter().map(|shard| shard.size).sum(),
            tensors: snapshot.catalog.stored_tensors(),
            dense_bytes: stored(&snapshot.resident),
            mtp_dense_bytes: mtp.map_or(0, |part| stored(&part.resident)),
            expert_bytes: snapshot.experts.file_bytes,
            mtp_expert_bytes: mtp.map_or(0, |part| part.experts.file_bytes),
            experts: snapshot.experts.total,
            mtp_experts: mtp.map_or(0, |part| part.experts.total),
            largest_expert: row(snapshot.experts.iter()).into_iter().max().unwrap_or(0),
            row_bytes: row(snapshot.experts.iter()).into_iter().sum(),
            mtp_row_bytes: mtp.map_or(0, |part| row(part.experts.iter()).into_iter().sum()),
        }
    }
}

/// The largest expert of each layer, in bytes read.
fn row<'a>(layers: impl Iterator<Item = (usize, &'a forebay_model::experts::ExpertLayer)>) -> Vec<u64> {
    let largest = |layer: &forebay_model::experts::ExpertLayer| {
        layer.segments.iter().map(|reads| reads.iter().map(|read| read.len as u64).sum()).max().unwrap_or(0)
    };
    layers.map(|(_, layer)| largest(layer)).collect()
}
