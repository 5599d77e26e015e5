//! Which tensor of a model goes where in a container, byte for byte, before anything is written.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use forebay_model::Snapshot;
use forebay_model::experts::{expert_layouts, is_fused};
use forebay_model::families::glm;
use forebay_model::families::roles::{Shape, TensorNeed};
use forebay_store::catalog::{Catalog, TensorEntry};
use forebay_store::layout::{self, Extent, WeightLayout};
use forebay_store::native::header::{
    DataFile, EXPERT_PLACE, Header, Layer, Layout, Matrix, PAGE, Placer, Record, RecordKind, RowChecks,
    Tensor, Weight,
};
use forebay_store::shard::Dtype;

use super::error::PackError;
use super::identity;

/// Name of the file of resident tensors.
const RESIDENT: &str = "resident.fbw";

/// A container to be written.
#[derive(Debug)]
pub struct Plan {
    /// Its header; checksums are still to come.
    pub header: Header,
    /// Where each tensor of the header comes from.
    pub tensors: Vec<Extent>,
    /// Where each expert comes from, by layer of the header.
    pub experts: Vec<Vec<[WeightLayout; 3]>>,
}

impl Plan {
    /// Plans the container of a checked model in another container.
    pub fn new(snapshot: &Snapshot, dir: &Path) -> Result<Self, PackError> {
        let side_files = identity::side_files(dir)?;
        let identity = identity::identity(&snapshot.catalog, &side_files)?;
        let source = identity::source(&snapshot.catalog, dir);
        Self::of(snapshot, Header { identity, source, side_files, ..Header::default() })
    }

    /// Plans the container of a model, which may be known by its headers only. `header` has what does not depend on its
    /// tensors.
    pub fn of(snapshot: &Snapshot, header: Header) -> Result<Self, PackError> {
        let mut plan = Self { header, tensors: Vec::new(), experts: Vec::new() };
        plan.header.files.push(DataFile { name: RESIDENT.to_owned(), size: 0, layer: None });
        let mtp = snapshot.mtp_part.as_ref().map(|_| snapshot.spec.layers.len());
        let mut recorded = HashSet::new();
        for layer in snapshot.spec.sparse_layers().chain(mtp) {
            plan.add_layer(snapshot, layer, &mut recorded)?;
        }
        plan.add_residents(snapshot, &recorded)?;
        Ok(plan)
    }

    /// Bytes of all weight files.
    pub fn bytes(&self) -> u64 {
        self.header.files.iter().map(|file| file.size).sum()
    }

    fn add_layer(
        &mut self,
        snapshot: &Snapshot,
        layer: usize,
        recorded: &mut HashSet<String>,
    ) -> Result<(), PackError> {
        let (spec, catalog) = (&snapshot.spec, &snapshot.catalog);
        let fused = is_fused(catalog, layer);
        let too_large = || PackError::TooLarge { what: format!("layer {layer}") };
        let (mut records, mut sources) = (Vec::new(), Vec::new());
        let mut offset = PAGE;
        for expert in 0..spec.moe.experts {
            let layouts = expert_layouts(spec, catalog, layer, expert)?;
            let names = glm::expert_needs(spec, layer, expert).map(|need| need.name);
            let parts = [0, 1, 2].map(|part| (&names[part], &layouts[part]));
            let matrices = parts.map(|(name, layout)| matrix(catalog, name, layout, fused));
            if !fused {
                recorded.extend(parts.iter().flat_map(|(name, layout)| tensor_names(name, &weight(layout))));
            }
            let kind = RecordKind::place(matrices).ok_or_else(too_large)?;
            let known = self.header.kinds.iter().position(|other| *other == kind);
            let number = known.unwrap_or(self.header.kinds.len());
            records.push(Record {
                offset,
                len: kind.len,
                crc: 0,
                kind: u16::try_from(number).map_err(|_| too_large())?,
                coded: None,
            });
            offset = offset.checked_add(kind.len).ok_or_else(too_large)?;
            if known.is_none() {
                self.header.kinds.push(kind);
            }
            sources.push(layouts);
        }
        let names = match fused {
            true => {
                let [gate_up, down] = glm::fused_expert_names(layer);
                recorded.extend([gate_up.clone(), down.clone()]);
                [gate_up.clone(), gate_up, down]
            }
            false => patterns(glm::expert_needs(spec, layer, 0).map(|need| need.name)),
        };
        let (number, file) = (layer as u32, self.header.files.len() as u32);
        let name = format!("experts-{layer:03}.fbw");
        self.header.files.push(DataFile { name, size: offset, layer: Some(number) });
        self.header.layers.push(Layer { layer: number, file, fused, names, records });
        self.experts.push(sources);
        Ok(())
    }

    /// Everything else, in the order in which a model is loaded, then what it does not use.
    fn add_residents(&mut self, snapshot: &Snapshot, recorded: &HashSet<String>) -> Result<(), PackError> {
        let catalog = &snapshot.catalog;
        let weights = named_weights(snapshot);
        let used = snapshot.resident.iter().chain(snapshot.mtp_part.iter().flat_map(|part| &part.resident));
        let used = used.flat_map(|tensor| tensor_names(&tensor.name, &weight(&tensor.layout)));
        let mut seen = HashSet::new();
        let mut order: Vec<String> = used.collect();
        order.extend(catalog.iter().map(|(name, _)| name.to_owned()));
        order.retain(|name| !recorded.contains(name) && seen.insert(name.clone()));
        let mut placer = Placer::default();
        for name in order {
            let Some(entry) = catalog.get(&name) else { continue };
            let too_large = || PackError::TooLarge { what: name.clone() };
            let &TensorEntry { shard, offset: from, len, .. } = entry;
            let offset = placer.place(len).ok_or_else(too_large)?;
            let weight = weights.get(&name).copied();
            // Tokens are looked up one by one.
            let row_checks = match weight.filter(|_| name == glm::EMBEDDING) {
                Some(weight) => {
                    let bytes = weight.rows.checked_mul(4).ok_or_else(too_large)?;
                    Some(RowChecks { offset: placer.place(bytes).ok_or_else(too_large)?, crc: 0 })
                }
                None => None,
            };
            let (dtype, shape) = (entry.dtype.clone(), entry.shape.to_vec());
            self.header.tensors.push(Tensor { name, dtype, shape, weight, offset, len, crc: 0, row_checks });
            self.tensors.push(Extent { shard, offset: from, len });
        }
        let end = placer.end();
        self.header.files[0].size = end.ok_or_else(|| PackError::TooLarge { what: RESIDENT.to_owned() })?;
        Ok(())
    }
}

fn weight(layout: &WeightLayout) -> Weight {
    Weight { format: layout.format, rows: layout.rows as u64, cols: layout.cols as u64 }
}

/// The one or two tensors of a weight.
fn tensor_names(name: &str, weight: &Weight) -> impl Iterator<Item = String> + use<> {
    [Some(name.to_owned()), weight.scales_name(name)].into_iter().flatten()
}

fn matrix(catalog: &Catalog, name: &str, found: &WeightLayout, fused: bool) -> Matrix {
    let weight = weight(found);
    let layout = if weight.panels().is_some() { Layout::Panels } else { Layout::Rows };
    let shape = |name: &str| catalog.get(name).map_or(Vec::new(), |entry| entry.shape.to_vec());
    let (dtype, dims) = match catalog.get(name).filter(|_| !fused) {
        Some(entry) => (entry.dtype.clone(), entry.shape.to_vec()),
        None => (float_dtype(&weight), vec![weight.rows, weight.cols]),
    };
    let scales_shape = weight.scales_name(name).map_or(Vec::new(), |scales| shape(&scales));
    Matrix { weight, layout, codes: 0, scales: 0, dtype, shape: dims, scales_shape }
}

/// Fused experts are floats.
fn float_dtype(weight: &Weight) -> Dtype {
    match weight.format {
        forebay_core::Format::Bf16 => Dtype::Bf16,
        forebay_core::Format::F16 => Dtype::F16,
        _ => Dtype::F32,
    }
}

/// The names of expert 0, with a place for the number of any expert.
fn patterns(names: [String; 3]) -> [String; 3] {
    names.map(|name| name.replacen(".experts.0.", &format!(".experts.{EXPERT_PLACE}."), 1))
}

/// What every weight is stored as whose format can be told, those of incomplete optional parts included.
fn named_weights(snapshot: &Snapshot) -> HashMap<String, Weight> {
    let spec = &snapshot.spec;
    let mut needs = glm::global_needs(spec);
    needs.extend((0..spec.layers.len()).flat_map(|layer| glm::layer_needs(spec, layer)));
    if let Some(indexer) = &spec.indexer {
        needs.extend(spec.full_indexer_layers().flat_map(|layer| glm::indexer_needs(spec, indexer, layer)));
    }
    needs.extend(glm::mtp_needs(spec));
    let named = |need: TensorNeed| {
        let found = match need.shape {
            Shape::Matrix { rows, cols } => layout::weight(&snapshot.catalog, &need.name, rows, cols),
            Shape::FloatMatrix { rows, cols } => {
                layout::float_matrix(&snapshot.catalog, &need.name, rows, cols)
            }
            Shape::Vector { len } => layout::vector(&snapshot.catalog, &need.name, len),
        };
        Some((need.name, weight(&found.ok()?)))
    };
    needs.into_iter().filter_map(named).collect()
}
