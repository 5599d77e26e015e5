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
        self.files.values().fold(0, |sum, size| sum.saturating_add(*size))
    }

    /// Files and bytes by what the names of weight files begin with, such as `out` and `out-mtp`.
    pub fn families(&self) -> BTreeMap<String, (usize, u64)> {
        let mut families: BTreeMap<String, (usize, u64)> = BTreeMap::new();
        for (name, size) in &self.files {
            let name = name.strip_suffix(".safetensors").unwrap_or(name);
            let numbered =
                |text: &str| text.trim_end_matches(|c: char| c.is_ascii_digit()).trim_end_matches('-').len();
            // `model-00001-of-00005` has two numbers.
            let first = &name[..numbered(name)];
            let first = first.strip_suffix("-of").map_or(first, |rest| &rest[..numbered(rest)]);
            let (files, bytes) = families.entry(first.to_owned()).or_default();
            *files += 1;
            *bytes = bytes.saturating_add(*size);
        }
        families
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
            "families": self.families().iter().map(|(name, (files, bytes))| {
                (name.clone(), json!({"files": files, "bytes": bytes}))
            }).collect::<serde_json::Map<_, _>>(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_what_names_begin_with() {
        let names = ["out-00000", "out-00001", "out-mtp-00000", "model-00001-of-00005", "model", "7"];
        let files = names.map(|name| (format!("{name}.safetensors"), 10)).into_iter().collect();
        let report = Report {
            dir: PathBuf::new(),
            problems: Vec::new(),
            notes: Vec::new(),
            files,
            tensors: 0,
            resident_bytes: 0,
            expert_bytes: 0,
            formats: BTreeMap::new(),
            mtp: None,
            sparse_attention: None,
        };
        let want = [("", 1), ("model", 2), ("out", 2), ("out-mtp", 1)];
        let found = report.families();
        assert_eq!(found.len(), want.len());
        assert!(want.iter().all(|(name, files)| found[*name] == (*files, 10 * *files as u64)), "{found:?}");
    }
}
