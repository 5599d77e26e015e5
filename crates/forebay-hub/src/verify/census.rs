//! The census: every header against the config, without reading a weight.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::Arc;

use forebay_core::{ByteSize, ExpertKey};
use forebay_model::families::glm;
use forebay_model::families::roles::Role;
use forebay_model::snapshot::{
    SnapshotOptions, indexer_requirements, mtp, mtp_requirements, requirements, sparse_attention,
};
use forebay_model::{Capability, ModelSpec};
use forebay_store::catalog::{self, Catalog, Options, Shard};
use forebay_store::census::{self as store, Group, Requirement};
use forebay_store::config::{ConfigFile, stop_ids};
use forebay_store::folder;
use forebay_store::shard::{HeaderTensor, read_header};

use super::report::{Kind, Mtp, Report};
use crate::convert::layout::FILLER;
use crate::output::file::PARTIAL;
use crate::output::folder::names;

/// How the names of unfinished or superseded files end.
const LEFTOVERS: [&str; 8] =
    [PARTIAL, ".incomplete", ".part", ".aria2", ".crdownload", ".bak", ".bak-int4", ".tmp"];
/// What text is turned into tokens with.
const TOKENIZER: &str = "tokenizer.json";
/// Names of tensors that checkpoints bring along and no reader needs.
const UNUSED: [&str; 3] = [".shared_head.head.weight", ".embed_tokens.weight", ".rotary_emb.inv_freq"];

/// Looks at every header of the folder `dir`. Whatever is wrong becomes part of the report.
pub fn census(dir: &Path) -> Report {
    let mut report = Report {
        dir: dir.to_owned(),
        problems: Vec::new(),
        notes: Vec::new(),
        files: BTreeMap::new(),
        tensors: 0,
        resident_bytes: 0,
        expert_bytes: 0,
        formats: BTreeMap::new(),
        mtp: None,
        sparse_attention: None,
    };
    let spec = spec(dir, &mut report);
    let Some(catalog) = headers(dir, &mut report) else { return report };
    report.tensors = catalog.len();
    if let Some(spec) = spec {
        let layers = spec.layers.len() as u32;
        let mut counts = Counts { report: &mut report, catalog: &catalog, layers, needed: BTreeSet::new() };
        counts.all(&spec);
        let needed = counts.needed;
        strays(&catalog, &needed, &mut report);
    }
    if !dir.join(TOKENIZER).is_file() {
        report.notes.push(format!("there is no {TOKENIZER}, which answering needs; get it with the model"));
    }
    leftovers(dir, &mut report);
    report
}

fn spec(dir: &Path, report: &mut Report) -> Option<ModelSpec> {
    let read = || {
        let config = ConfigFile::read(dir)?;
        let generation = ConfigFile::read_optional(dir, "generation_config.json")?;
        let stops = stop_ids(&config, generation.as_ref())?;
        Ok::<_, forebay_store::config::ConfigError>((glm::spec(&config)?, stops))
    };
    match read() {
        Ok((spec, stops)) => {
            if stops.is_empty() {
                report
                    .notes
                    .push("neither config names a stop token: answers end at their longest".to_owned());
            }
            Some(spec)
        }
        Err(error) => {
            report.add(Kind::Folder, "config.json", error.to_string());
            None
        }
    }
}

/// Reads every header; files that cannot be used are reported and left out.
fn headers(dir: &Path, report: &mut Report) -> Option<Catalog> {
    let paths = match catalog::list(dir) {
        Ok(paths) => paths,
        Err(error) => {
            report.add(Kind::Folder, dir.display().to_string(), error.to_string());
            return None;
        }
    };
    if paths.is_empty() {
        report.add(
            Kind::Folder,
            dir.display().to_string(),
            format!("no .safetensors file: {}", folder::advice(dir)),
        );
        return None;
    }
    let mut files = Vec::new();
    let mut seen: HashMap<Arc<str>, String> = HashMap::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (size, tensors) = match read_header(&path) {
            Ok(found) => found,
            Err(error) => {
                report.add(Kind::File, name, error.to_string());
                continue;
            }
        };
        check_ends(&name, size, &tensors, report);
        for tensor in &tensors {
            if let Some(first) = seen.insert(tensor.name.clone(), name.clone()) {
                let message = format!(
                    "tensor {} is in both {first} and {name}; remove the file that does not belong",
                    tensor.name
                );
                report.add(Kind::Duplicate, &*tensor.name, message);
            }
        }
        report.files.insert(name, size);
        files.push((Shard { path, size }, tensors));
    }
    Catalog::from_headers(dir, files, Options { first_wins: true })
        .map_err(|error| report.add(Kind::Folder, dir.display().to_string(), error.to_string()))
        .ok()
}

/// Bytes behind the last tensor make a file another one than its header says; holes only waste room.
fn check_ends(name: &str, size: u64, tensors: &[HeaderTensor], report: &mut Report) {
    let end = tensors.iter().map(|tensor| tensor.offset + tensor.len).max();
    let Some(end) = end.filter(|end| *end < size) else { return };
    let extra = ByteSize(size - end);
    let message = format!("{name} has {extra} behind its last tensor; it is damaged, get it again");
    report.add(Kind::ExtraBytes, name, message);
}

struct Counts<'a> {
    report: &'a mut Report,
    catalog: &'a Catalog,
    /// Layers, the MTP layer apart.
    layers: u32,
    /// Tensors that something asks for.
    needed: BTreeSet<String>,
}

impl Counts<'_> {
    fn all(&mut self, spec: &ModelSpec) {
        let roles = roles(spec);
        for requirement in requirements(spec, self.catalog) {
            self.required(&requirement, &roles);
        }
        let sparse = sparse_attention(spec, self.catalog, SnapshotOptions::default());
        let part = matches!(sparse, Capability::Incomplete { .. } | Capability::Unusable { .. });
        for requirement in indexer_requirements(spec) {
            self.optional(&requirement, part, &roles);
        }
        let state = mtp(spec, self.catalog);
        let part = matches!(state, Capability::Incomplete { .. })
            || matches!(&state, Capability::Unusable { reason } if !reason.starts_with("eh_proj"));
        let (mut dense, mut experts) = (BTreeMap::new(), BTreeMap::new());
        for requirement in mtp_requirements(spec, self.catalog) {
            self.optional(&requirement, part, &roles);
            let is_matrix =
                matches!(requirement.kind, store::Kind::Weight { .. } | store::Kind::Fused { .. });
            if let (true, Ok(layout)) = (is_matrix, store::look(self.catalog, &requirement)) {
                let formats = if is_expert(&requirement) { &mut experts } else { &mut dense };
                *formats.entry(layout.format.to_string()).or_default() += 1;
            }
        }
        if spec.indexer.is_some() && matches!(sparse, Capability::Absent { .. }) {
            self.report.notes.push(
                "sparse attention (DSA) is declared and there are no indexer tensors: attention is dense"
                    .to_owned(),
            );
        }
        if spec.mtp_layers > 0 && matches!(state, Capability::Absent { .. }) {
            self.report.notes.push("an MTP layer is declared and there is none: no drafts".to_owned());
        }
        if matches!(state, Capability::Unusable { .. }) {
            self.report.notes.push(format!("the MTP layer is {state}"));
        }
        self.report.mtp = Some(Mtp { state, dense, experts });
        self.report.sparse_attention = Some(sparse);
    }

    /// A part that may be absent as a whole: what it lacks is a problem only if some of it is there.
    fn optional(&mut self, requirement: &Requirement, part: bool, roles: &HashMap<String, Role>) {
        let there = self.catalog.get(&requirement.name).is_some();
        if there || part {
            self.required(requirement, roles);
        }
    }

    fn required(&mut self, requirement: &Requirement, roles: &HashMap<String, Role>) {
        let name = &requirement.name;
        for suffix in ["", ".qs", "_scale_inv"] {
            self.needed.insert(format!("{name}{suffix}"));
        }
        match store::look(self.catalog, requirement) {
            Ok(layout) => {
                let expert = is_expert(requirement);
                let sum =
                    if expert { &mut self.report.expert_bytes } else { &mut self.report.resident_bytes };
                *sum = sum.saturating_add(layout.total_bytes());
                // Every other tensor has a role of its own.
                let of_mtp = match requirement.group {
                    Group::Layer(layer) | Group::Expert(ExpertKey { layer, .. }) => layer >= self.layers,
                    Group::Global => false,
                };
                let other = if of_mtp { Role::Mtp } else { Role::RoutedExpert };
                let role = roles.get(name).copied().unwrap_or(other);
                let formats = self.report.formats.entry(role).or_default();
                *formats.entry(layout.format.to_string()).or_default() += 1;
            }
            Err(error) => {
                let kind = if error.is_missing() { Kind::Missing } else { Kind::Malformed };
                self.report.add(kind, name, error.to_string());
            }
        }
    }
}

fn is_expert(requirement: &Requirement) -> bool {
    let fused = matches!(requirement.kind, store::Kind::Fused { .. });
    fused || matches!(requirement.group, Group::Expert(_)) || requirement.name.contains(".mlp.experts.")
}

/// The roles of all tensors but experts.
fn roles(spec: &ModelSpec) -> HashMap<String, Role> {
    let mut needs = glm::global_needs(spec);
    needs.extend((0..spec.layers.len()).flat_map(|layer| glm::layer_needs(spec, layer)));
    if let Some(indexer) = &spec.indexer {
        needs.extend(spec.full_indexer_layers().flat_map(|layer| glm::indexer_needs(spec, indexer, layer)));
    }
    let mut roles: HashMap<String, Role> = needs.into_iter().map(|need| (need.name, need.role)).collect();
    roles.extend(glm::mtp_resident_needs(spec).into_iter().map(|need| (need.name, Role::Mtp)));
    roles
}

/// Weight files and tensors that nothing asks for.
fn strays(catalog: &Catalog, needed: &BTreeSet<String>, report: &mut Report) {
    let mut used = vec![false; catalog.shards().len()];
    let mut extra = Vec::new();
    for (name, entry) in catalog.iter() {
        if needed.contains(name) {
            used[entry.shard as usize] = true;
        } else if !name.starts_with(FILLER) && !UNUSED.iter().any(|unused| name.ends_with(unused)) {
            extra.push(name);
        }
    }
    for (shard, _) in catalog.shards().iter().zip(&used).filter(|(_, used)| !**used) {
        let name = shard.name();
        let message = format!("{name} has nothing that config.json asks for; move it out of the folder");
        report.add(Kind::Stray, name, message);
    }
    if let Some(first) = extra.first() {
        let count = extra.len();
        report.notes.push(format!("{count} tensors are not needed and were ignored, the first is {first}"));
    }
    for (dtype, count) in catalog.unknown_dtypes() {
        report.notes.push(format!("{count} tensors are of type {dtype}, which Forebay does not read"));
    }
}

/// What downloads and conversions leave behind.
fn leftovers(dir: &Path, report: &mut Report) {
    // The folder could be listed a moment ago.
    let names = names(dir).unwrap_or_default();
    for name in names.iter().filter(|name| LEFTOVERS.iter().any(|end| name.ends_with(end))) {
        report
            .notes
            .push(format!("{name} is left over from something unfinished; delete it if nothing writes it"));
    }
}
