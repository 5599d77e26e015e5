//! Where models come from, and how they prove what they are.
//!
//! - [`get`]: from a hub, byte for byte as it promised.
//! - [`gguf`]: what GGUF files hold.
//! - [`convert`]: a checkpoint becomes a model of small integers, one file after another.
//! - [`synth`]: models of random weights with the true shape of GLM-5.2, for measuring without 360 GB of download.
//! - [`verify`]: whether a folder holds a whole model, by its headers or by every byte; [`digests`]: what the bytes
//!   should be; [`known`]: who vouches for them; [`digest`]: what proves a file.
//! - [`pack`]: Forebay's own container, and the way back.
//! - [`output`]: what writing a model takes.

pub mod convert;
pub mod digest;
pub mod digests;
pub mod get;
pub mod gguf;
pub mod known;
pub mod output;
pub mod pack;
mod safetensors;
pub mod synth;
pub mod verify;
