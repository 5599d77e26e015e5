//! Which tensor goes into which file, byte for byte, before anything is written.
//!
//! Every file of the source becomes one file of the result, with the source's number, as far as it completes
//! anything: a matrix belongs to the file in which the last of its bytes are, and the three matrices of an expert
//! stay together. Fillers keep experts at multiples of 4096 bytes and leave no hole.

use std::collections::BTreeSet;
use std::ops::Range;

use forebay_core::format::Format;
use forebay_core::quant;
use forebay_model::ModelSpec;
use forebay_model::experts::is_fused;
use forebay_model::families::glm;
use forebay_model::families::roles::{Role, Shape, TensorNeed};
use forebay_store::catalog::Catalog;
use forebay_store::layout::{self, Extent, LayoutError};

use super::Options;
use super::error::ConvertError;
use super::layout::output;
use super::loss::Loss;
use super::weight::{self, Weight, stored};
use crate::output::ordered::AHEAD;

/// Weight files that the reference engine takes (container spec section 3).
const REFERENCE_FILES: usize = 512;
/// Memory of the program itself, and of the plan by tensor of the source.
const MEMORY_BASE: u64 = 48 << 20;
const MEMORY_PER_TENSOR: u64 = 2 << 10;

/// One matrix or vector of the result.
#[derive(Clone, Debug)]
pub struct Item {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub role: Role,
    /// Its format in the result.
    pub format: Format,
    /// Rows; 1 for a vector.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// Whether its shape has one dimension.
    pub is_vector: bool,
    /// Where it comes from.
    pub from: Weight,
}

/// What is written one after another.
#[derive(Clone, Debug)]
pub enum Piece {
    /// Rows of an item: their codes. Their scales come with the next [`Piece::Scales`].
    Rows {
        /// Index into [`Output::items`].
        item: usize,
        /// Which.
        rows: Range<usize>,
    },
    /// The scales of all rows since the last ones.
    Scales,
    /// Zeros.
    Zeros(u64),
}

/// One file of the result.
#[derive(Clone, Debug)]
pub struct Output {
    /// The file of the source that completes it.
    pub source: usize,
    /// Its name.
    pub name: String,
    /// Its items, in the order of the file.
    pub items: Vec<Item>,
    /// What is written behind the header.
    pub pieces: Vec<Piece>,
    /// Its first bytes: the length of the header, and the header.
    pub header: Vec<u8>,
    /// Its size.
    pub bytes: u64,
}

/// The whole conversion.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The files of the result, in order.
    pub outputs: Vec<Output>,
    /// By file of the source: what later outputs need of it, sorted and without overlap.
    pub later: Vec<Vec<Extent>>,
    /// Bytes of the source that are read.
    pub read_bytes: u64,
    /// Tensors of the source.
    pub tensors: usize,
    /// What a user should know, one sentence each.
    pub notes: Vec<String>,
}

impl Plan {
    /// Plans the conversion of `catalog`, whose files are `files` in number.
    pub fn new(spec: &ModelSpec, catalog: &Catalog, options: &Options) -> Result<Self, ConvertError> {
        let mut finder = Finder { spec, catalog, options, failed: None, count: 0 };
        let mut units: Vec<Vec<Item>> = Vec::new();
        finder.each(glm::global_needs(spec), &mut units)?;
        for layer in 0..spec.layers.len() {
            finder.each(glm::layer_needs(spec, layer), &mut units)?;
        }
        for layer in spec.sparse_layers() {
            finder.experts(layer, Role::RoutedExpert, &mut units)?;
        }
        let mut notes = finder.optional_parts(&mut units)?;
        finder.finish()?;
        let mut by_source: Vec<Vec<Vec<Item>>> = vec![Vec::new(); catalog.shards().len()];
        let mut later: Vec<BTreeSet<Extent>> = vec![BTreeSet::new(); by_source.len()];
        let mut read_bytes = 0;
        for unit in units {
            let extents: Vec<Extent> = unit.iter().flat_map(|item| item.from.extents()).collect();
            read_bytes += extents.iter().map(|extent| extent.len).sum::<u64>();
            let Some(last) = extents.iter().map(|extent| extent.shard as usize).max() else { continue };
            for extent in extents.into_iter().filter(|extent| (extent.shard as usize) < last) {
                later[extent.shard as usize].insert(extent);
            }
            by_source[last].push(unit);
        }
        let filled = by_source.into_iter().enumerate().filter(|(_, units)| !units.is_empty());
        let outputs = filled.map(|(source, units)| output(source, units)).collect::<Result<Vec<_>, _>>()?;
        if outputs.len() > REFERENCE_FILES {
            let files = outputs.len();
            notes.push(format!(
                "the result has {files} weight files, as the source has; the reference engine takes {REFERENCE_FILES}"
            ));
        }
        let later = later.into_iter().map(|extents| extents.into_iter().collect()).collect();
        Ok(Self { outputs, later, read_bytes, tensors: catalog.len(), notes })
    }

    /// Bytes of all weight files.
    pub fn bytes(&self) -> u64 {
        self.outputs.iter().map(|output| output.bytes).sum()
    }

    /// The most memory that the conversion takes with so many threads, in bytes.
    pub fn memory_bound(&self, threads: usize) -> u64 {
        let each = self.outputs.iter().map(|output| output.memory(threads as u64)).max().unwrap_or(0);
        MEMORY_BASE + MEMORY_PER_TENSOR * self.tensors as u64 + each
    }
}

impl Output {
    fn memory(&self, threads: u64) -> u64 {
        let (mut piece, mut stash, mut held) = (0, 0u64, 0u64);
        for step in &self.pieces {
            match step {
                Piece::Rows { item, rows } => {
                    let item = &self.items[*item];
                    let rows = rows.len() as u64;
                    let scales = 4 * item.format.scale_count(1, item.cols).unwrap_or(0) as u64 * rows;
                    let codes = item.format.row_bytes(item.cols).unwrap_or(0) as u64 * rows;
                    // Read, two rows of f32 and one of codes not yet packed, and what waits to be written.
                    let read = item.from.read_bytes(rows) + 10 * item.cols as u64;
                    piece = piece.max(read + (AHEAD as u64 + 2) * (codes + scales));
                    held += scales;
                    stash = stash.max(2 * held);
                }
                Piece::Scales => held = 0,
                Piece::Zeros(_) => {}
            }
        }
        threads * (piece + (1 << 20)) + stash + 2 * self.header.len() as u64
    }
}

/// Looks for weights, and counts those that are not there instead of stopping at the first.
struct Finder<'a> {
    spec: &'a ModelSpec,
    catalog: &'a Catalog,
    options: &'a Options,
    failed: Option<LayoutError>,
    count: usize,
}

impl Finder<'_> {
    /// Adds weights that need not stay together.
    fn each(&mut self, needs: Vec<TensorNeed>, units: &mut Vec<Vec<Item>>) -> Result<(), ConvertError> {
        for need in needs {
            let from = match need.shape {
                Shape::Matrix { rows, cols } => weight::matrix(self.catalog, &need.name, rows, cols),
                Shape::FloatMatrix { rows, cols } => weight::floats(self.catalog, &need.name, &[rows, cols]),
                Shape::Vector { len } => weight::floats(self.catalog, &need.name, &[len]),
            };
            if let Some(from) = self.note(from)? {
                units.push(vec![self.item(need, from)?]);
            }
        }
        Ok(())
    }

    /// Adds the experts of a layer, each with its matrices in the order of their names.
    fn experts(&mut self, layer: usize, role: Role, units: &mut Vec<Vec<Item>>) -> Result<(), ConvertError> {
        let moe = &self.spec.moe;
        let (width, hidden) = (moe.expert_width, self.spec.hidden);
        let fused = is_fused(self.catalog, layer);
        let [gate_up_name, down_name] = glm::fused_expert_names(layer);
        for expert in 0..moe.experts {
            let [gate, up, down] = glm::expert_needs(self.spec, layer, expert);
            let slice = |name: &str, rows, cols, range| {
                stored(layout::fused_slice(self.catalog, name, [moe.experts, rows, cols], expert, range))
            };
            let parts = [
                (down, fused.then(|| slice(&down_name, hidden, width, 0..hidden))),
                (gate, fused.then(|| slice(&gate_up_name, 2 * width, hidden, 0..width))),
                (up, fused.then(|| slice(&gate_up_name, 2 * width, hidden, width..2 * width))),
            ];
            let mut unit = Vec::with_capacity(3);
            for (mut need, found) in parts {
                need.role = role;
                let separate = || match need.shape {
                    Shape::Matrix { rows, cols } => weight::matrix(self.catalog, &need.name, rows, cols),
                    _ => weight::floats(self.catalog, &need.name, &[]),
                };
                let from = found.unwrap_or_else(separate);
                if let Some(from) = self.note(from)? {
                    unit.push(self.item(need, from)?);
                }
            }
            units.push(unit);
        }
        Ok(())
    }

    /// Adds what the source may lack: the MTP layer and the indexer. Half of one is an error.
    fn optional_parts(&mut self, units: &mut Vec<Vec<Item>>) -> Result<Vec<String>, ConvertError> {
        let spec = self.spec;
        let mut notes = Vec::new();
        let there = |needs: &[TensorNeed]| needs.iter().any(|need| self.catalog.get(&need.name).is_some());
        let resident = glm::mtp_resident_needs(spec);
        let has_mtp = there(&resident) || is_fused(self.catalog, spec.layers.len());
        let indexer: Vec<TensorNeed> = spec
            .indexer
            .iter()
            .flat_map(|indexer| {
                spec.full_indexer_layers().flat_map(move |layer| glm::indexer_needs(spec, indexer, layer))
            })
            .collect();
        let has_indexer = there(&indexer);
        match (self.options.mtp, has_mtp) {
            (true, true) => {
                let mtp = |need: TensorNeed| match need.shape {
                    Shape::Matrix { .. } => TensorNeed { role: Role::Mtp, ..need },
                    _ => need,
                };
                self.each(resident.into_iter().map(mtp).collect(), units)?;
                self.experts(spec.layers.len(), Role::Mtp, units)?;
            }
            (true, false) => {
                notes.push("the source has no MTP layer: the result cannot draft tokens".to_owned())
            }
            (false, true) => notes.push("the MTP layer is left out, as asked".to_owned()),
            (false, false) => {}
        }
        match (self.options.indexer, has_indexer) {
            (true, true) => self.each(indexer, units)?,
            (true, false) if spec.indexer.is_some() => notes.push(
                "the source has no tensors of the indexer that its config declares: attention will be dense"
                    .to_owned(),
            ),
            (false, true) => {
                notes.push("the indexer is left out, as asked: attention will be dense".to_owned())
            }
            _ => {}
        }
        Ok(notes)
    }

    /// Counts a weight that is missing or malformed, and goes on.
    fn note(&mut self, found: Result<Weight, ConvertError>) -> Result<Option<Weight>, ConvertError> {
        match found {
            Ok(weight) => Ok(Some(weight)),
            Err(ConvertError::Layout { first, .. }) => {
                self.failed.get_or_insert(first);
                self.count += 1;
                Ok(None)
            }
            Err(other) => Err(other),
        }
    }

    fn item(&self, need: TensorNeed, from: Weight) -> Result<Item, ConvertError> {
        let (rows, cols, is_vector) = match need.shape {
            Shape::Matrix { rows, cols } | Shape::FloatMatrix { rows, cols } => (rows, cols, false),
            Shape::Vector { len } => (1, len, true),
        };
        let asked = self.options.targets.format(&need);
        let name = need.name;
        let read = asked.as_inferred(cols);
        // One group is a row, and is written as what it is.
        if read != asked && read != Format::Int4Row {
            return Err(ConvertError::Ambiguous { tensor: name, asked, read, cols });
        }
        Ok(Item { name, role: need.role, format: read, rows, cols, is_vector, from })
    }

    fn finish(self) -> Result<(), ConvertError> {
        match self.failed {
            None => Ok(()),
            Some(first) => Err(ConvertError::Layout { first, count: self.count }),
        }
    }
}

/// Some rows of an item, converted.
#[derive(Debug, Default)]
pub struct Made {
    /// Their codes and scales.
    pub encoded: quant::Encoded,
    /// What that changed, if it was measured.
    pub loss: Option<Loss>,
}

/// Codes and scales of some rows of an item, and what they lost if that is to be measured.
pub fn encode(
    item: &Item,
    rows: Range<usize>,
    inputs: &super::input::Inputs,
    measure: bool,
) -> Result<Made, ConvertError> {
    let mut out = quant::Encoded::default();
    let mut loss = measure.then(Loss::default);
    let mut scratch = Vec::new();
    out.codes.reserve_exact(item.format.row_bytes(item.cols).unwrap_or(0) * rows.len());
    out.scales.reserve_exact(item.format.scale_count(1, item.cols).unwrap_or(0) * rows.len());
    item.from.decode(inputs, rows, &mut |row, values| {
        if let Some(column) = quant::first_not_finite(values) {
            let (tensor, value) = (item.name.clone(), values[column]);
            return Err(ConvertError::NotFinite { tensor, value, row, column });
        }
        quant::encode_row(item.format, values, &mut out)?;
        if let Some(loss) = &mut loss {
            loss.add_row(item.format, values, &out, &mut scratch);
        }
        Ok(())
    })?;
    Ok(Made { encoded: out, loss })
}
