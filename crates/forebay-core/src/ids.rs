//! Identifiers.

/// One routed expert: the layer it lives in and its number within the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertKey {
    /// Decoder layer, from 0.
    pub layer: u32,
    /// Expert within the layer, from 0.
    pub expert: u32,
}

impl std::fmt::Display for ExpertKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "expert {} of layer {}", self.expert, self.layer)
    }
}
