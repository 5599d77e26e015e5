//! Where models come from.
//!
//! - [`get`]: from a hub, byte for byte as it promised.
//! - [`synth`]: random weights with the true shape of GLM-5.2, for measuring without 360 GB of download.

mod disk;
pub mod get;
pub mod synth;
