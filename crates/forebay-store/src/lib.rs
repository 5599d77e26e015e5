//! What a model folder contains, checked before anything is allocated: config, tensor catalogue, layouts.
//!
//! Only JSON and shard headers are read here; the bytes of the weights are
//! `forebay-io`'s business, and which tensors a model needs is `forebay-model`'s.
//!
//! - [`json`], [`config`]: strict JSON and typed, named fields.
//! - [`shard`], [`catalog`]: safetensors headers, one and all.
//! - [`layout`]: the storage format of one weight, and where its bytes are.
//! - [`native`]: the Forebay container.
//! - [`prefix`]: the header of a stored block of a KV cache.
//! - [`record`]: how one routed expert is read.
//! - [`census`]: whether everything a model needs is there.

pub mod catalog;
pub mod census;
pub mod config;
pub mod folder;
pub mod json;
pub mod layout;
pub mod native;
pub mod prefix;
pub mod record;
pub mod shard;
