//! GGUF files (versions 2 and 3): what a file says of itself, checked, and how its blocks of weights are read.
//!
//! - [`header`]: metadata and the list of tensors, from bytes that nobody vouches for.
//! - [`kind`]: the types of weights that are read, and the names of those that are not.
//! - [`blocks`]: the weights as f32.
//!
//! Nothing here knows a model; `convert` gives the tensors their meaning.

pub mod blocks;
mod error;
pub mod header;
pub mod kind;

pub use error::GgufError;
pub use header::{Header, Info, Value};
pub use kind::Kind;
