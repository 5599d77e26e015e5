//! A model in Forebay's own container, and back again. docs/format.md specifies the container.
//!
//! - [`pack`]: from safetensors files. [`unpack`]: to safetensors files, the same tensors byte for byte.
//! - [`verify_native`]: whether a container still is what was written.
//! - `plan`: every byte's place. `expert`: one record. `folder`: going on where a run ended. `scan`: whole files
//!   against their checksums.

mod error;
pub(crate) mod expert;
mod folder;
pub(crate) mod identity;
pub(crate) mod plan;
mod scan;
mod unpack;
mod verify;
mod write;

pub use error::PackError;
pub use unpack::unpack;
pub use verify::{Finding, Problem, verify_native};
pub use write::pack;
pub(crate) use write::row_table;

use forebay_core::CancelToken;

/// Grows when the same model gives other bytes.
const VERSION: u32 = 1;

/// How a model is packed or unpacked. Changes no byte.
#[derive(Clone, Copy, Debug)]
pub struct PackOptions<'a> {
    /// Threads; each holds one expert.
    pub threads: usize,
    /// Bytes that are to be left free on the disk.
    pub margin: u64,
    /// Raised to stop.
    pub cancel: &'a CancelToken,
}

/// What a run did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Bytes of all weight files.
    pub total: u64,
    /// Of these, bytes written by this run.
    pub bytes: u64,
    /// Weight files written by this run.
    pub files: usize,
    /// Weight files that were finished before.
    pub kept: usize,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
