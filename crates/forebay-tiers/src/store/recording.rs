//! The routes of a run, kept in memory so that it can be said afterwards what another cache would
//! have read.

use super::ExpertStore;
use crate::routes::{Routes, Union};

/// Bytes that a recording takes at most; about two thousand tokens of GLM-5.2.
const LIMIT: usize = 32 << 20;

/// Bytes of a step beside eight for each expert: two lists and what the allocator adds.
const STEP_BYTES: usize = 160;

/// Steps since recording began.
pub(super) struct Recording {
    routes: Routes,
    bytes: usize,
}

impl Recording {
    /// Keeps a step of the layer with this index, while there is room.
    pub(super) fn add(&mut self, at: usize, union: &Union) {
        self.bytes += STEP_BYTES + 8 * union.experts.len();
        if self.bytes <= LIMIT {
            self.routes.layers[at].push(union.clone());
        }
    }
}

impl ExpertStore {
    /// Begins to record which experts steps want, forgetting what was recorded.
    pub fn start_recording(&mut self, top_k: usize) {
        let experts = self.layers.iter().map(|layer| layer.experts.len()).max().unwrap_or(0);
        let layers = vec![Vec::new(); self.layers.len()];
        self.recording = Some(Recording { routes: Routes { experts, top_k, layers }, bytes: 0 });
    }

    /// The first steps since recording began: all of them, or as many as there was room for.
    pub fn recorded(&self) -> Option<&Routes> {
        Some(&self.recording.as_ref()?.routes)
    }

    /// Whether every step since recording began was kept.
    pub fn recorded_all(&self) -> bool {
        self.recording.as_ref().is_some_and(|recording| recording.bytes <= LIMIT)
    }

    /// Tells the caches what earlier runs used: `counts(layer)` has a number for each expert, of
    /// which each token made `top_k`.
    pub fn seed(&mut self, top_k: usize, counts: &dyn Fn(u32) -> Vec<u64>) {
        for layer in &mut self.layers {
            layer.cache.seed(&counts(layer.layer), top_k);
        }
    }

    /// The decoder layers that the recorded routes belong to, in their order.
    pub fn layers(&self) -> impl Iterator<Item = u32> {
        self.layers.iter().map(|layer| layer.layer)
    }

    /// Mean bytes of an expert in the files, over all layers.
    pub fn expert_bytes(&self) -> u64 {
        let bytes = self.layers.iter().filter(|layer| !layer.experts.is_empty()).map(|l| l.read_bytes(0));
        let layers = self.layers.len().max(1) as u64;
        bytes.sum::<u64>() / layers
    }
}
