//! What a forward pass may tell an observer while it runs.

/// Sees the choices of a forward pass: for route traces, tests and debugging.
///
/// Every method does nothing unless implemented.
pub trait Trace {
    /// A pass over `rows` tokens begins, the first of them at position `start`.
    fn began(&mut self, start: usize, rows: usize) {
        let _ = (start, rows);
    }

    /// Whether [`selected`](Self::selected) is to be told: it is worked out anew for that.
    fn wants_selected(&self) -> bool {
        true
    }

    /// Sparse attention selected `positions` for the row at `position`, in the order
    /// of the selection rule: above the threshold ascending, then ties ascending.
    fn selected(&mut self, layer: usize, position: usize, positions: &[u32]) {
        let _ = (layer, position, positions);
    }

    /// The routers of layer `layer` will choose for the rows of a pass; these experts of it, in ascending order,
    /// are in memory.
    fn resident(&mut self, layer: usize, experts: &[u32]) {
        let _ = (layer, experts);
    }

    /// The router chose `experts`, best first, with these final weights.
    fn routed(&mut self, layer: usize, position: usize, experts: &[u32], weights: &[f32]) {
        let _ = (layer, position, experts, weights);
    }
}
