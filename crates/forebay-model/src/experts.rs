//! The routed experts of a model: where their bytes are, how they are read into a
//! slab, and what the slab then holds.
//!
//! Coded experts have two ways to be held: as they are, to be decoded whenever they are multiplied, or as the panels
//! that were coded, which the reading thread decodes. Whoever plans memory chooses ([`ExpertTable::slots`]).

mod decode;
mod quantise;

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_core::coded::{CodedError, CodedView};
use forebay_core::{DIRECT_ALIGN, Format, MatrixView, PanelShape, PanelView, ReadSegment};
use forebay_io::Transform;
use forebay_kernels::{Kernels, Weights, decoded_at_once};
use forebay_store::catalog::Catalog;
use forebay_store::layout::{self, LayoutError, WeightLayout};
use forebay_store::native::Native;
use forebay_store::record::{Codes, ExpertRecord, Part, RecordError};

use crate::families::glm;
use crate::spec::ModelSpec;
use decode::{DecodeExpert, room_len};
use quantise::{QuantiseExpert, quantised_layer, quantised_records};

pub use decode::Rooms;

/// Why the experts of a snapshot cannot be streamed.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertTableError {
    /// A tensor is missing or malformed.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An expert is too large.
    #[error(transparent)]
    Record(#[from] RecordError),
    /// Experts of one layer come in several formats, which quantising at load cannot handle.
    #[error(
        "layer {layer} stores its experts in several formats ({first} and {other}); \
         leave out --quantize to use them as they are"
    )]
    MixedFormats {
        /// The layer.
        layer: usize,
        /// Format of expert 0's gate matrix.
        first: Format,
        /// A different one.
        other: Format,
    },
}

/// What the slots of coded experts hold. Never changes a bit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SlotCodes {
    /// The record as it is in the file: more of them fit, and each is decoded whenever it is multiplied.
    #[default]
    Coded,
    /// What was coded: each is decoded once, by the thread that reads it.
    Decoded,
}

impl SlotCodes {
    /// Both.
    pub const ALL: [Self; 2] = [SlotCodes::Coded, SlotCodes::Decoded];
}

impl std::fmt::Display for SlotCodes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            SlotCodes::Coded => "coded",
            SlotCodes::Decoded => "decoded",
        })
    }
}

/// The experts of one layer.
#[derive(Clone)]
pub struct ExpertLayer {
    /// How each expert is read: segments with destinations in the slab or, when
    /// it is transformed on the way, in its raw bytes.
    pub segments: Vec<Arc<[ReadSegment]>>,
    /// CRC32C of what each expert's one read brings; empty if the container has none.
    pub checks: Vec<u32>,
    /// Whether every matrix has an integer format once it is in its slab.
    pub all_integer: bool,
    /// Bytes of slab an expert takes as it is, or as it is quantised, at most.
    slab_len: usize,
    /// Quantises an expert as it arrives.
    quantise: Option<Arc<QuantiseExpert>>,
    parts: Vec<[Part; 3]>,
    /// What the experts are when they are decoded; `None` if none is coded.
    decoded: Option<Decoded>,
}

/// The experts of a layer of which some are coded, decoded.
#[derive(Clone)]
struct Decoded {
    /// By expert.
    parts: Vec<Arc<[Part; 3]>>,
    slab_len: usize,
}

impl ExpertLayer {
    /// Gate, up and down of expert `expert`, whose slab holds `bytes`.
    ///
    /// # Errors
    /// If a coded matrix is none, although its checksum is that of the container.
    ///
    /// # Panics
    /// If `bytes` is not the slab that the layer's segments (and transforms) filled.
    pub fn views<'a>(
        &self,
        expert: usize,
        bytes: &'a [u8],
        slots: SlotCodes,
    ) -> Result<[Weights<'a>; 3], CodedError> {
        let parts = match (&self.quantise, &self.decoded, slots) {
            (Some(quantise), ..) => &quantise.quantised,
            (None, Some(decoded), SlotCodes::Decoded) => &*decoded.parts[expert],
            _ => &self.parts[expert],
        };
        let [gate, up, down] = parts.each_ref().map(|part| part_view(part, bytes));
        Ok([gate?, up?, down?])
    }

    /// Bytes of slab an expert takes, at most.
    pub fn slab_len(&self, slots: SlotCodes) -> usize {
        match (&self.decoded, slots) {
            (Some(decoded), SlotCodes::Decoded) => decoded.slab_len,
            _ => self.slab_len,
        }
    }

    /// Bytes that a thread needs beside the slab while it reads an expert, at most.
    pub fn raw_len(&self) -> usize {
        self.quantise.as_ref().map_or(0, |quantise| quantise.raw_len)
    }

    /// Bytes of one of the [`Rooms`] that experts are decoded with on their way into their slots, at most.
    pub fn room_len(&self, slots: SlotCodes) -> usize {
        let Some(decoded) = self.decoded.as_ref().filter(|_| slots == SlotCodes::Decoded) else { return 0 };
        let of = |(expert, parts): (usize, &[Part; 3])| {
            let from = parts.each_ref().map(|part| part.codes.clone());
            room_len(&from, self.read_len(expert), &decoded.parts[expert])
        };
        let coded = self.parts.iter().enumerate().filter(|(_, parts)| parts.iter().any(is_coded));
        coded.map(of).max().unwrap_or(0)
    }

    /// Bytes of the panels that a thread decodes at a time, where slots hold experts coded.
    pub fn decoded_panels(&self, slots: SlotCodes) -> usize {
        let coded = self.parts.iter().flatten().filter(|part| slots == SlotCodes::Coded && is_coded(part));
        let shapes = coded.filter_map(|part| PanelShape::new(part.format, part.rows, part.cols));
        shapes.map(|shape| decoded_at_once(&shape)).max().unwrap_or(0)
    }

    /// Bytes of the record of expert `expert`.
    fn read_len(&self, expert: usize) -> usize {
        self.segments[expert].iter().map(|read| read.dst + read.len).max().unwrap_or(0)
    }

    /// By expert, what is done to it on its way into its slab; nothing is done to those behind the last one. What is
    /// decoded is decoded with `rooms`.
    pub fn transforms(
        &self,
        slots: SlotCodes,
        kernels: Kernels,
        rooms: &Arc<Rooms>,
    ) -> Vec<Option<Arc<dyn Transform>>> {
        if let Some(quantise) = &self.quantise {
            return vec![Some(quantise.clone() as Arc<dyn Transform>); self.segments.len()];
        }
        let Some(decoded) = self.decoded.as_ref().filter(|_| slots == SlotCodes::Decoded) else {
            return Vec::new();
        };
        let decode = |(expert, parts): (usize, &[Part; 3])| {
            let to = Arc::clone(&decoded.parts[expert]);
            let from = parts.each_ref().map(|part| part.codes.clone());
            let decode = || DecodeExpert::new(from, self.read_len(expert), to, kernels, Arc::clone(rooms));
            parts.iter().any(is_coded).then(|| Arc::new(decode()) as Arc<dyn Transform>)
        };
        self.parts.iter().enumerate().map(decode).collect()
    }

    /// How many experts are coded.
    pub fn coded(&self) -> usize {
        self.parts.iter().filter(|parts| parts.iter().any(is_coded)).count()
    }

    /// Bytes of an expert's record once it is decoded, on average; the bytes that are read if none is coded.
    pub fn mean_decoded(&self) -> f64 {
        let read = |reads: &Arc<[ReadSegment]>| reads.iter().map(|read| read.len).sum::<usize>();
        let all: usize = match &self.decoded {
            Some(decoded) => decoded.parts.iter().map(|parts| end_of(parts)).sum(),
            None => self.segments.iter().map(read).sum(),
        };
        all as f64 / self.segments.len().max(1) as f64
    }
}

fn is_coded(part: &Part) -> bool {
    part.layout == Codes::Coded
}

/// Bytes of a record with these parts, in whole pages.
fn end_of(parts: &[Part; 3]) -> usize {
    let end = parts.iter().map(|part| part.codes.end.max(part.scales.end)).max().unwrap_or(0);
    end.next_multiple_of(DIRECT_ALIGN)
}

fn part_view<'a>(part: &Part, bytes: &'a [u8]) -> Result<Weights<'a>, CodedError> {
    let codes = &bytes[part.codes.clone()];
    let shape = PanelShape::new(part.format, part.rows, part.cols);
    match part.layout {
        Codes::Coded => {
            let shape = shape.ok_or(CodedError::Format { format: part.format })?;
            Ok(CodedView::new(shape, codes)?.into())
        }
        Codes::Panels => {
            let view = shape.and_then(|shape| PanelView::new(shape, codes).ok());
            Ok(view.expect("the header of the container was checked").into())
        }
        Codes::Rows => {
            let scales = bytemuck::try_cast_slice(&bytes[part.scales.clone()])
                .expect("records place scales at multiples of 4 of an aligned slab");
            let view = MatrixView::new(part.format, part.rows, part.cols, codes, scales);
            Ok(view.expect("records are built from checked layouts").into())
        }
    }
}

/// Every routed expert of the decoder layers.
#[derive(Clone, Default)]
pub struct ExpertTable {
    layers: BTreeMap<usize, ExpertLayer>,
    /// What the slots of coded experts hold.
    pub slots: SlotCodes,
    /// Experts that are coded.
    pub coded: usize,
    /// Experts whose codes, and whose scales, come with one read each.
    pub coalesced: usize,
    /// Experts of which a part cannot be read past the page cache; see [`ExpertRecord::displaced`].
    pub displaced: usize,
    /// All experts.
    pub total: usize,
    /// Bytes of all experts in the files.
    pub file_bytes: u64,
    /// Formats in use, with the number of matrices in each.
    pub formats: BTreeMap<String, usize>,
}

impl ExpertTable {
    /// Finds every expert of the sparse layers, per-expert or fused.
    pub fn build(
        spec: &ModelSpec,
        catalog: &Catalog,
        quantise: Option<Format>,
    ) -> Result<Self, ExpertTableError> {
        Self::of_layers(spec, catalog, spec.sparse_layers(), quantise)
    }

    /// Finds every expert of `layers`, which must be sparse; the one behind the last is the MTP layer.
    pub(crate) fn of_layers(
        spec: &ModelSpec,
        catalog: &Catalog,
        layers: impl IntoIterator<Item = usize>,
        quantise: Option<Format>,
    ) -> Result<Self, ExpertTableError> {
        let mut table = Self::default();
        for layer in layers {
            let mut parts = Vec::with_capacity(spec.moe.experts);
            let mut segments: Vec<Arc<[ReadSegment]>> = Vec::with_capacity(spec.moe.experts);
            let (mut layouts, mut checks) = (Vec::new(), Vec::new());
            let (mut slab_len, mut decoded) = (0, Decoded { parts: Vec::new(), slab_len: 0 });
            let native = catalog.native().filter(|native| native.experts(layer).is_some());
            for expert in 0..spec.moe.experts {
                let record = match native {
                    Some(native) => native_record(spec, native, layer, expert, &mut decoded)?,
                    None => {
                        let three = expert_layouts(spec, catalog, layer, expert)?;
                        let record = ExpertRecord::new(&three[0], &three[1], &three[2])?;
                        layouts.push(three);
                        record
                    }
                };
                table.coalesced += usize::from(record.coalesced);
                table.displaced += usize::from(record.displaced > 0);
                table.total += 1;
                table.file_bytes += record.read_bytes() as u64;
                for part in &record.parts {
                    *table.formats.entry(part.format.to_string()).or_default() += 1;
                }
                checks.extend(record.check);
                slab_len = slab_len.max(record.len);
                parts.push(record.parts);
                segments.push(record.segments);
            }
            let all_integer = parts.iter().flatten().all(|part| part.format.is_integer());
            let mut as_stored = ExpertLayer {
                segments,
                checks,
                all_integer,
                slab_len,
                quantise: None,
                parts,
                decoded: Some(decoded),
            };
            table.coded += as_stored.coded();
            if as_stored.coded() == 0 {
                as_stored.decoded = None;
            }
            let entry = match (quantise.filter(|_| !all_integer), native) {
                (None, _) => as_stored,
                (Some(format), None) => quantised_layer(layer, format, &layouts)?,
                (Some(format), Some(_)) => quantised_records(layer, format, as_stored)?,
            };
            table.layers.insert(layer, entry);
        }
        Ok(table)
    }

    /// Adds the experts of other layers.
    pub fn join(&mut self, other: Self) {
        self.coalesced += other.coalesced;
        self.displaced += other.displaced;
        self.total += other.total;
        self.file_bytes += other.file_bytes;
        self.coded += other.coded;
        for (format, matrices) in other.formats {
            *self.formats.entry(format).or_default() += matrices;
        }
        self.layers.extend(other.layers);
    }

    /// The experts of layer `layer`, if it is sparse.
    pub fn layer(&self, layer: usize) -> Option<&ExpertLayer> {
        self.layers.get(&layer)
    }

    /// The sparse layers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (usize, &ExpertLayer)> {
        self.layers.iter().map(|(&layer, experts)| (layer, experts))
    }
}

/// Whether layer `layer` stores its experts in the fused 3-D tensors of transformers.
pub fn is_fused(catalog: &Catalog, layer: usize) -> bool {
    glm::fused_expert_names(layer).iter().any(|name| catalog.get(name).is_some())
}

/// The record of an expert in a Forebay container; `decoded` learns what it is when it is decoded.
fn native_record(
    spec: &ModelSpec,
    native: &Native,
    layer: usize,
    expert: usize,
    decoded: &mut Decoded,
) -> Result<ExpertRecord, ExpertTableError> {
    let missing = || {
        let [gate, ..] = glm::expert_needs(spec, layer, expert);
        LayoutError::Missing { tensor: gate.name }
    };
    let (shard, record, kind) = native.record(layer, expert).ok_or_else(missing)?;
    let parts = ExpertRecord::raw_parts(kind);
    // A layer has one kind, or very few.
    let known = decoded.parts.last().filter(|last| ***last == parts);
    let parts = known.map_or_else(|| Arc::new(parts), Arc::clone);
    decoded.parts.push(parts);
    // The header was checked: its records can be addressed.
    decoded.slab_len = decoded.slab_len.max(kind.len as usize);
    Ok(ExpertRecord::native(shard, record, kind)?)
}

/// Gate, up and down of an expert whose tensors have names of their own or lie in fused tensors.
pub fn expert_layouts(
    spec: &ModelSpec,
    catalog: &Catalog,
    layer: usize,
    expert: usize,
) -> Result<[WeightLayout; 3], LayoutError> {
    let (experts, width, hidden) = (spec.moe.experts, spec.moe.expert_width, spec.hidden);
    if is_fused(catalog, layer) {
        let [gate_up, down] = glm::fused_expert_names(layer);
        let half = |rows| layout::fused_slice(catalog, &gate_up, [experts, 2 * width, hidden], expert, rows);
        let down = layout::fused_slice(catalog, &down, [experts, hidden, width], expert, 0..hidden)?;
        return Ok([half(0..width)?, half(width..2 * width)?, down]);
    }
    let [gate, up, down] = glm::expert_needs(spec, layer, expert);
    Ok([
        layout::weight(catalog, &gate.name, width, hidden)?,
        layout::weight(catalog, &up.name, width, hidden)?,
        layout::weight(catalog, &down.name, hidden, width)?,
    ])
}
