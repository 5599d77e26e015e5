//! What was found in a folder.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use forebay_model::Capability;
use forebay_model::families::roles::Role;
use serde_json::{Value, json};

/// What is wrong with a file or a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// The config, or the folder itself.
    Folder,
    /// A file cannot be read as what it should be: cut short, overlapping tensors, nonsense.
    File,
    /// A file has bytes that belong to no tensor.
    ExtraBytes,
    /// Two files have a tensor of the same name.
    Duplicate,
    /// A tensor that the config asks for is missing.
    Missing,
    /// A tensor is there and is not what the config asks for.
    Malformed,
    /// A weight file has nothing that the model needs.
    Stray,
    /// The digests say that there is a file, and there is none.
    Absent,
    /// The digests do not have a weight file.
    NotRecorded,
    /// The bytes are not those that the digests were made of.
    Digest,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Folder => "folder",
            Kind::File => "file",
            Kind::ExtraBytes => "extra-bytes",
            Kind::Duplicate => "duplicate",
            Kind::Missing => "missing",
            Kind::Malformed => "malformed",
            Kind::Stray => "stray",
            Kind::Absent => "absent",
            Kind::NotRecorded => "not-recorded",
            Kind::Digest => "digest",
        })
    }
}

/// One thing that is wrong. The message is complete on its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// What kind of thing.
    pub kind: Kind,
    /// File or tensor.
    pub name: String,
    /// What is wrong, and what to do.
    pub message: String,
}

/// The multi-token-prediction layer, in detail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mtp {
    /// Whether it could draft.
    pub state: Capability,
    /// Formats of its own matrices, with their number.
    pub dense: BTreeMap<String, usize>,
    /// Formats of its routed experts' matrices.
    pub experts: BTreeMap<String, usize>,
}

impl Mtp {
    /// One word: `absent`, `partial`, `refused` or `complete`.
    pub fn word(&self) -> &'static str {
        match self.state {
            Capability::Absent { .. } => "absent",
            Capability::Incomplete { .. } => "partial",
            Capability::Unusable { .. } => "refused",
            Capability::Active => "complete",
        }
    }
}

/// The census of a folder.
#[derive(Clone, Debug)]
pub struct Report {
    /// The folder.
    pub dir: PathBuf,
    /// All that is wrong; nothing if the model is whole.
    pub problems: Vec<Problem>,
    /// What is worth knowing, one sentence each.
    pub notes: Vec<String>,
    /// Weight files, with their sizes.
    pub files: BTreeMap<String, u64>,
    /// Tensors in them.
    pub tensors: usize,
    /// Bytes of sound weights that stay in memory, MTP layer and indexer included.
    pub resident_bytes: u64,
    /// Bytes of sound weights of routed experts, those of the MTP layer included.
    pub expert_bytes: u64,
    /// Sound matrices by role and format.
    pub formats: BTreeMap<Role, BTreeMap<String, usize>>,
    /// The multi-token-prediction layer; `None` if the config could not be read.
    pub mtp: Option<Mtp>,
    /// The indexer of sparse attention.
    pub sparse_attention: Option<Capability>,
}

impl Report {
    /// Whether nothing is wrong.
    pub fn is_sound(&self) -> bool {
        self.problems.is_empty()
    }

    /// Bytes of all weight files.
    pub fn bytes(&self) -> u64 {
        self.files.values().sum()
    }

    /// Adds a problem.
    pub(super) fn add(&mut self, kind: Kind, name: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem { kind, name: name.into(), message: message.into() });
    }

    /// All of it, for programs.
    pub fn json(&self) -> Value {
        let problem = |p: &Problem| json!({"kind": p.kind.to_string(), "name": p.name, "message": p.message});
        let roles = |(role, formats): (&Role, &BTreeMap<String, usize>)| (role.to_string(), json!(formats));
        json!({
            "folder": self.dir.display().to_string(),
            "sound": self.is_sound(),
            "problems": self.problems.iter().map(problem).collect::<Vec<_>>(),
            "notes": self.notes,
            "files": self.files.len(),
            "file_bytes": self.bytes(),
            "tensors": self.tensors,
            "resident_bytes": self.resident_bytes,
            "expert_bytes": self.expert_bytes,
            "formats": self.formats.iter().map(roles).collect::<serde_json::Map<_, _>>(),
            "mtp": self.mtp.as_ref().map(|mtp| json!({
                "state": mtp.word(),
                "detail": mtp.state.to_string(),
                "dense_formats": mtp.dense,
                "expert_formats": mtp.experts,
            })),
            "sparse_attention": self.sparse_attention.as_ref().map(|state| json!({
                "active": state.is_active(),
                "detail": state.to_string(),
            })),
        })
    }
}
