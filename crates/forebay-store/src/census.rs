//! Whether everything that a model needs is there: all of it is checked, and
//! what is wrong is told in one sentence instead of one tensor at a time.
//!
//! Absent and malformed are different things: the first usually means a
//! download that stopped, the second a damaged file or another model's config.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use forebay_core::ids::ExpertKey;

use crate::catalog::Catalog;
use crate::folder::MissingShards;
use crate::layout::{self, LayoutError, WeightLayout};

/// Where in the model a tensor belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Group {
    /// No layer: embeddings, final norm, output head.
    Global,
    /// A layer, apart from its per-expert tensors.
    Layer(u32),
    /// One routed expert.
    Expert(ExpertKey),
}

/// What a tensor has to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A linear weight in any format; see [`layout::weight`].
    Weight {
        /// Rows (outputs).
        rows: usize,
        /// Columns (inputs).
        cols: usize,
    },
    /// A vector of floats; see [`layout::vector`].
    Vector {
        /// Elements.
        len: usize,
    },
    /// A matrix of floats; see [`layout::float_matrix`].
    FloatMatrix {
        /// Rows (outputs).
        rows: usize,
        /// Columns (inputs).
        cols: usize,
    },
    /// A matrix of an expert in a record of a Forebay container; see [`layout::recorded`].
    Recorded {
        /// The expert.
        key: ExpertKey,
        /// 0 gate, 1 up, 2 down.
        part: usize,
        /// Rows (outputs).
        rows: usize,
        /// Columns (inputs).
        cols: usize,
    },
    /// The float matrices of all experts of a layer in one tensor; see [`layout::fused_slice`].
    Fused {
        /// Experts.
        experts: usize,
        /// Rows of one expert.
        rows: usize,
        /// Columns.
        cols: usize,
    },
}

/// One tensor that the model needs. Its scales, if it has any, are implied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// Name of the tensor.
    pub name: String,
    /// What it has to be.
    pub kind: Kind,
    /// Where it belongs.
    pub group: Group,
}

/// At most this many malformed tensors are kept in [`Census::malformed`].
pub const KEPT: usize = 8;

/// The result of checking a list of requirements. `Display` is the summary for people.
#[derive(Clone, Debug, Default)]
pub struct Census {
    /// Requirements checked.
    pub checked: usize,
    /// Requirements of which something is absent.
    pub missing: usize,
    /// The first of them.
    pub first_missing: Option<LayoutError>,
    /// Requirements that are there and wrong.
    pub malformed_count: usize,
    /// The first [`KEPT`] of them.
    pub malformed: Vec<LayoutError>,
    /// Tensors in the files that the sound requirements use, scales included.
    pub tensors: usize,
    /// Bytes of the sound requirements outside [`Group::Expert`] and [`Kind::Fused`].
    pub resident_bytes: u64,
    /// Bytes of the sound requirements of routed experts.
    pub expert_bytes: u64,
    /// Sound weights whose group size is a guess among several that fit.
    pub ambiguous_groups: usize,
    /// Shards that are known to be absent; looked for only if something is missing.
    pub missing_shards: Option<MissingShards>,
    dir: PathBuf,
    groups: BTreeMap<Group, Count>,
}

/// A model folder that lacks something, or holds something malformed.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Incomplete(pub Box<Census>);

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    missing: usize,
    checked: usize,
}

/// Checks every requirement, whatever becomes of the ones before it.
pub fn check(catalog: &Catalog, requirements: impl IntoIterator<Item = Requirement>) -> Census {
    let mut census = Census { dir: catalog.dir().to_owned(), ..Census::default() };
    for requirement in requirements {
        let found = look(catalog, &requirement);
        census.add(&requirement, found);
    }
    if census.missing > 0 {
        census.missing_shards = catalog.missing_shards();
    }
    census
}

/// The layout of what one requirement asks for.
pub fn look(catalog: &Catalog, requirement: &Requirement) -> Result<WeightLayout, LayoutError> {
    let name = &requirement.name;
    match requirement.kind {
        Kind::Weight { rows, cols } => layout::weight(catalog, name, rows, cols),
        Kind::Vector { len } => layout::vector(catalog, name, len),
        Kind::Recorded { key, part, rows, cols } => layout::recorded(catalog, key, part, name, [rows, cols]),
        Kind::FloatMatrix { rows, cols } => layout::float_matrix(catalog, name, rows, cols),
        Kind::Fused { experts, rows, cols } => layout::fused(catalog, name, [experts, rows, cols]),
    }
}

impl Census {
    /// Everything is there and sound.
    pub fn is_complete(&self) -> bool {
        self.missing == 0 && self.malformed_count == 0
    }

    /// Nothing at all is there: for optional parts of a model the same as "this model has none".
    pub fn is_absent(&self) -> bool {
        self.missing == self.checked
    }

    /// The census if it is complete, else the error that tells what is not.
    pub fn require_complete(self) -> Result<Self, Incomplete> {
        if self.is_complete() { Ok(self) } else { Err(Incomplete(Box::new(self))) }
    }

    fn add(&mut self, requirement: &Requirement, found: Result<WeightLayout, LayoutError>) {
        let count = self.groups.entry(requirement.group).or_default();
        self.checked += 1;
        count.checked += 1;
        match found {
            Ok(layout) => {
                self.tensors += layout.tensors();
                self.ambiguous_groups += usize::from(layout.ambiguous_groups);
                let streamed = matches!(requirement.group, Group::Expert(_))
                    || matches!(requirement.kind, Kind::Fused { .. });
                let sum = if streamed { &mut self.expert_bytes } else { &mut self.resident_bytes };
                *sum = sum.saturating_add(layout.total_bytes());
            }
            Err(error) if error.is_missing() => {
                self.missing += 1;
                count.missing += 1;
                self.first_missing.get_or_insert(error);
            }
            Err(error) => {
                self.malformed_count += 1;
                if self.malformed.len() < KEPT {
                    self.malformed.push(error);
                }
            }
        }
    }

    /// What is missing, by layer and expert, each clause a sentence part.
    fn gaps(&self) -> Vec<String> {
        let mut clauses = Vec::new();
        if let Some(global) = self.groups.get(&Group::Global).filter(|count| count.missing > 0) {
            clauses.push(format!(
                "{} of {} tensors outside the layers are missing",
                global.missing, global.checked
            ));
        }
        let layers = self.layers();
        let gone = layers.iter().filter(|(_, l)| l.all.missing == l.all.checked).map(|(&layer, _)| layer);
        let gone: Vec<u32> = gone.collect();
        if let [only] = gone.as_slice() {
            clauses.push(format!("layer {only} is missing"));
        } else if !gone.is_empty() {
            clauses.push(format!("layers {} are missing", Ranges(&gone)));
        }
        for (layer, gaps) in layers.iter().filter(|(_, l)| (1..l.all.checked).contains(&l.all.missing)) {
            if gaps.own.missing > 0 {
                let Count { missing, checked } = gaps.own;
                clauses.push(format!("layer {layer} lacks {missing} of its {checked} own tensors"));
            }
            if !gaps.experts.is_empty() {
                let plural = if gaps.experts.len() == 1 { "" } else { "s" };
                clauses.push(format!("layer {layer} lacks expert{plural} {}", Ranges(&gaps.experts)));
            }
        }
        clauses
    }

    fn layers(&self) -> BTreeMap<u32, LayerGaps> {
        let mut layers: BTreeMap<u32, LayerGaps> = BTreeMap::new();
        for (&group, &count) in &self.groups {
            let layer = match group {
                Group::Global => continue,
                Group::Layer(layer) | Group::Expert(ExpertKey { layer, .. }) => layer,
            };
            let gaps = layers.entry(layer).or_default();
            gaps.all.missing += count.missing;
            gaps.all.checked += count.checked;
            match group {
                Group::Expert(key) if count.missing > 0 => gaps.experts.push(key.expert),
                Group::Layer(_) => gaps.own = count,
                _ => {}
            }
        }
        layers
    }
}

/// What one layer lacks.
#[derive(Default)]
struct LayerGaps {
    all: Count,
    own: Count,
    experts: Vec<u32>,
}

impl fmt::Display for Census {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 6;
        let dir = self.dir.display();
        if self.is_complete() {
            return write!(f, "{dir}: all {} weights are there", self.checked);
        }
        let Some(first) = self.first_missing.as_ref() else {
            return write!(f, "{dir}: {}", self.malformed_clause());
        };
        if self.is_absent() {
            write!(f, "{dir} holds none of the {} weights looked for", self.checked)?;
        } else {
            let gaps = self.gaps();
            let shown = gaps[..gaps.len().min(SHOWN)].join("; ");
            write!(f, "{dir} looks like an incomplete download: {shown}")?;
            if gaps.len() > SHOWN {
                write!(f, "; and {} more gaps", gaps.len() - SHOWN)?;
            }
        }
        if let Some(shards) = &self.missing_shards {
            write!(f, " ({shards})")?;
        }
        write!(f, ". First: {first}")?;
        if self.malformed_count > 0 {
            write!(f, ". Besides, {}", self.malformed_clause())?;
        }
        Ok(())
    }
}

impl Census {
    fn malformed_clause(&self) -> String {
        let first = self.malformed.first().map(LayoutError::to_string).unwrap_or_default();
        match self.malformed_count {
            1 => first,
            n => format!("{n} of {} weights are malformed; the first: {first}", self.checked),
        }
    }
}

/// Ascending numbers as `0-3, 17`.
struct Ranges<'a>(&'a [u32]);

impl fmt::Display for Ranges<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 8;
        let runs: Vec<_> = self.0.chunk_by(|a, b| a.checked_add(1) == Some(*b)).collect();
        for (i, run) in runs.iter().take(SHOWN).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            match run {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                _ => write!(f, "{comma}{}", run[0])?,
            }
        }
        if runs.len() > SHOWN {
            let rest: usize = runs[SHOWN..].iter().map(|run| run.len()).sum();
            write!(f, " and {rest} more")?;
        }
        Ok(())
    }
}
