//! Why a step did not deliver.

use forebay_core::ExpertKey;
use forebay_io::ReadError;

/// Fails the requests that needed the expert; the store serves the next ones.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertError {
    /// An expert's bytes could not be had.
    #[error("{key} could not be loaded: {cause}")]
    Load {
        /// The expert.
        key: ExpertKey,
        /// File, offset, the system's error and what to do.
        cause: ReadError,
    },
    /// The caller's token was raised.
    #[error("cancelled while loading experts of layer {layer}")]
    Cancelled {
        /// The layer.
        layer: u32,
    },
    /// More experts were asked of a step after it failed.
    #[error("the step in layer {layer} failed before; start it again")]
    Abandoned {
        /// The layer.
        layer: u32,
    },
    /// The store has no such layer.
    #[error("layer {layer} has no routed experts; please report this as a bug")]
    UnknownLayer {
        /// The layer asked for.
        layer: u32,
    },
    /// The layer has no such expert.
    #[error("{key} does not exist, the layer has {experts}; please report this as a bug")]
    UnknownExpert {
        /// The expert asked for.
        key: ExpertKey,
        /// Experts the layer has.
        experts: usize,
    },
    /// An expert was asked for twice in one step.
    #[error("{key} is in the union twice; please report this as a bug")]
    Repeated {
        /// The expert.
        key: ExpertKey,
    },
}
