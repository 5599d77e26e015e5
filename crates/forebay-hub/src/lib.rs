//! Where models come from: [`synth`], models of random weights with the true shape of GLM-5.2, for measuring without
//! 360 GB of download, and [`pack`], which turns a model into Forebay's own container and back.

mod files;
mod ordered;
pub mod pack;
mod safetensors;
pub mod synth;
