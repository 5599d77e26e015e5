//! Model families as readable forward passes.
//!
//! - [`spec`]: what a model is, as data. [`families`]: how a family's `config.json`
//!   becomes that data, and what it calls its tensors.
//! - [`snapshot`]: one model folder, checked as a whole before anything is allocated.
//! - [`weights`]: the resident tensors, [`embedding`] apart. [`experts`]: the routed ones, as they are read.
//! - [`kv`]: the cache of one sequence. [`forward`](mod@forward): the pass itself, with
//!   [`attention`] and [`moe`] as its two halves and [`workspace`] as its buffers; [`pass`]: the sequences whose
//!   rows go through it; [`mtp`]: the layer that drafts tokens.
//!
//! This crate decides nothing about memory or time: the engine gives it a budgeted
//! expert store and a thread team.

pub mod arith;
pub mod attention;
pub mod embedding;
pub mod experts;
pub mod families;
pub mod forward;
pub mod kv;
mod mlp;
pub mod moe;
pub mod mtp;
pub mod pass;
pub mod profile;
pub mod snapshot;
pub mod spec;
pub mod trace;
pub mod uses;
pub mod weights;
pub mod workspace;

pub use arith::Arith;
pub use embedding::{Embedding, EmbeddingPlace};
pub use experts::{ExpertTable, SlotCodes};
pub use forward::{Context, ForwardError, Watch, forward, logits};
pub use kv::{KvBlock, KvCache, KvDtype, KvLayout, KvParts, KvPool, NoBlock};
pub use pass::Part;
pub use profile::{Phase, Profile, Work};
pub use snapshot::{MtpPart, Snapshot, SnapshotError, SnapshotOptions};
pub use spec::{Capability, ModelSpec};
pub use trace::Trace;
pub use weights::{LoadedParts, Model, WeightError};
pub use workspace::{PassSize, Workspace};
