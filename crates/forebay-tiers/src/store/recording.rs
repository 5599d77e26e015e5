//! The routes of a run, kept in memory so that it can be said afterwards what another cache would
//! have read.

use super::ExpertStore;
use crate::routes::{Routes, Union};

/// Selections that are kept at most: 64 MB with their counts.
const LIMIT: usize = 8 << 20;

/// Steps since recording began.
pub(super) struct Recording {
    routes: Routes,
    kept: usize,
}

impl Recording {
    /// Keeps a step of the layer with this index, while there is room.
    pub(super) fn add(&mut self, at: usize, union: &Union) {
        self.kept += union.experts.len();
        if self.kept <= LIMIT {
            self.routes.layers[at].push(union.clone());
        }
    }
}

impl ExpertStore {
    /// Begins to record which experts steps want, forgetting what was recorded.
    pub fn start_recording(&mut self, top_k: usize) {
        let experts = self.layers.iter().map(|layer| layer.experts.len()).max().unwrap_or(0);
        let layers = vec![Vec::new(); self.layers.len()];
        self.recording = Some(Recording { routes: Routes { experts, top_k, layers }, kept: 0 });
    }

    /// What was recorded; `None` if nothing is, or it became too much.
    pub fn recorded(&self) -> Option<&Routes> {
        let recording = self.recording.as_ref()?;
        (recording.kept <= LIMIT).then_some(&recording.routes)
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
