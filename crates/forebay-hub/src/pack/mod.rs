//! A model in Forebay's own container, and back again. docs/format.md specifies the container.
//!
//! - [`pack`]: from safetensors files. [`unpack`]: to safetensors files, the same tensors byte for byte.
//! - [`verify_native`]: whether a container still is what was written.
//! - `plan`: every byte's place. `expert`: one record. `coded`: one in fewer bytes. `folder`: going on where a run ended. `scan`: whole files
//!   against their checksums.

mod coded;
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
use forebay_store::native::header::Header;

/// Grows when the same model gives other bytes.
const VERSION: u32 = 1;

/// Which experts have their int4 codes coded. None of these loses anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Codes {
    /// None: a container that is quick on every machine.
    #[default]
    Raw,
    /// Those that take fewer bytes then.
    Auto,
    /// The same, in a model that has some that can be coded; another is refused.
    Coded,
}

impl std::fmt::Display for Codes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Codes::Raw => "raw",
            Codes::Auto => "auto",
            Codes::Coded => "coded",
        })
    }
}

/// How a model is packed or unpacked. Only [`codes`](Self::codes) changes what is written.
#[derive(Clone, Copy, Debug)]
pub struct PackOptions<'a> {
    /// Threads; each holds one expert.
    pub threads: usize,
    /// Which experts are coded; turning back takes them as they are.
    pub codes: Codes,
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
    /// Bytes of the weight files that were read or, if all was there already, would have been.
    pub source: u64,
    /// What is in the container.
    pub experts: ExpertBytes,
}

/// The experts of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertBytes {
    /// All of them.
    pub all: usize,
    /// Of these, coded ones.
    pub coded: usize,
    /// Bytes of their records.
    pub bytes: u64,
    /// What these would be if none were coded.
    pub raw_bytes: u64,
}

impl ExpertBytes {
    /// Counts the experts of a container.
    pub fn of(header: &Header) -> Self {
        let mut sum = Self::default();
        for record in header.layers.iter().flat_map(|layer| &layer.records) {
            sum.all += 1;
            sum.coded += usize::from(record.coded.is_some());
            sum.bytes += record.len;
            sum.raw_bytes += header.kinds[usize::from(record.kind)].len;
        }
        sum
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
