//! The routes of a run, kept in memory so that it can be said afterwards what another cache would
//! have read.

use super::ExpertStore;
use crate::routes::{Routes, Union};

/// Bytes that a recording takes at most, whatever the model.
const LIMIT: usize = 32 << 20;

/// Tokens, run one by one, that a recording has room for where that takes less: 17 MB with GLM-5.2. A prompt
/// takes much less.
const TOKENS: usize = 1000;

/// Bytes of a step beside eight for each expert: two lists and what the allocator adds.
const STEP_BYTES: usize = 160;

/// Bytes that the recording of a model with `layers` sparse layers takes at most: a part of every plan.
pub fn recording_bytes(layers: usize, top_k: usize) -> u64 {
    let step = top_k.saturating_mul(8).saturating_add(STEP_BYTES);
    layers.saturating_mul(step).saturating_mul(TOKENS).min(LIMIT) as u64
}

/// Steps since recording began.
pub(super) struct Recording {
    routes: Routes,
    bytes: usize,
    limit: usize,
}

impl Recording {
    /// Keeps a step of the layer with this index, while there is room.
    pub(super) fn add(&mut self, at: usize, union: &Union) {
        self.bytes += STEP_BYTES + 8 * union.experts.len();
        if self.bytes <= self.limit {
            self.routes.layers[at].push(union.clone());
        }
    }
}

impl ExpertStore {
    /// Begins to record which experts steps want, forgetting what was recorded.
    pub fn start_recording(&mut self, top_k: usize) {
        let experts = self.layers.iter().map(|layer| layer.experts.len()).max().unwrap_or(0);
        let layers = vec![Vec::new(); self.layers.len()];
        let limit = recording_bytes(layers.len(), top_k) as usize;
        self.recording = Some(Recording { routes: Routes { experts, top_k, layers }, bytes: 0, limit });
    }

    /// The first steps since recording began: all of them, or as many as there was room for.
    pub fn recorded(&self) -> Option<&Routes> {
        Some(&self.recording.as_ref()?.routes)
    }

    /// Whether every step since recording began was kept.
    pub fn recorded_all(&self) -> bool {
        self.recording.as_ref().is_some_and(|recording| recording.bytes <= recording.limit)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recording_takes_what_was_planned_and_no_more() {
        let limit = recording_bytes(2, 4);
        assert_eq!(limit, 2 * (160 + 8 * 4) * 1000);
        assert_eq!((recording_bytes(75, 8), recording_bytes(usize::MAX, usize::MAX)), (16_800_000, 32 << 20));
        let routes = Routes { experts: 8, top_k: 4, layers: vec![Vec::new(); 2] };
        let mut recording = Recording { routes, bytes: 0, limit: limit as usize };
        let rows: [&[u32]; 1] = [&[3, 1, 4, 5]];
        let union = Union::of(rows);
        for step in 0..3000 {
            recording.add(step % 2, &union);
        }
        let kept: Vec<usize> = recording.routes.layers.iter().map(Vec::len).collect();
        assert_eq!(kept, [1000, 1000]);
        // What the lists really hold, spare room included, and 16 bytes that an allocator adds to each.
        let list = |capacity: usize| 4 * capacity + 16;
        let steps = recording.routes.layers.iter().flatten();
        let inner: usize = steps.map(|s| list(s.experts.capacity()) + list(s.uses.capacity())).sum();
        let outer: usize =
            recording.routes.layers.iter().map(|l| l.capacity() * std::mem::size_of::<Union>()).sum();
        assert!((inner + outer) as u64 <= limit, "{inner} + {outer} of {limit}");
    }
}
