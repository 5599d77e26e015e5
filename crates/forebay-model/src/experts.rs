//! The routed experts of a model: where their bytes are, how they are read into a
//! slab, and what the slab then holds.

use std::collections::BTreeMap;
use std::sync::Arc;

use forebay_core::{Format, MatrixView, PanelShape, PanelView, ReadSegment};
use forebay_io::Transform;
use forebay_kernels::Weights;
use forebay_store::catalog::Catalog;
use forebay_store::layout::{self, LayoutError, WeightLayout};
use forebay_store::native::Native;
use forebay_store::record::{Codes, ExpertRecord, Part, RecordError};

use crate::families::glm;
use crate::families::roles::Role;
use crate::spec::ModelSpec;
use crate::weights::encode_into;

/// Scales of a raw buffer start at a multiple of this many bytes.
const SCALES_ALIGN: usize = 64;

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

/// The experts of one layer.
#[derive(Clone)]
pub struct ExpertLayer {
    /// How each expert is read: segments with destinations in the slab or, when
    /// quantised at load, in the raw buffer.
    pub segments: Vec<Arc<[ReadSegment]>>,
    /// CRC32C of what each expert's one read brings; empty if the container has none.
    pub checks: Vec<u32>,
    /// Bytes of slab an expert takes, at most.
    pub slab_len: usize,
    /// Quantises an expert as it arrives.
    pub transform: Option<Arc<QuantiseExpert>>,
    /// Whether every matrix has an integer format once it is in its slab.
    pub all_integer: bool,
    parts: Vec<[Part; 3]>,
}

impl ExpertLayer {
    /// Gate, up and down of expert `expert`, whose slab holds `bytes`.
    ///
    /// # Panics
    /// If `bytes` is not the slab that the layer's segments (and transform) filled.
    pub fn views<'a>(&self, expert: usize, bytes: &'a [u8]) -> [Weights<'a>; 3] {
        let parts = match &self.transform {
            Some(transform) => &transform.quantised,
            None => &self.parts[expert],
        };
        parts.each_ref().map(|part| part_view(part, bytes))
    }
}

fn part_view<'a>(part: &Part, bytes: &'a [u8]) -> Weights<'a> {
    let codes = &bytes[part.codes.clone()];
    if part.layout == Codes::Panels {
        let shape = PanelShape::new(part.format, part.rows, part.cols);
        let view = shape.and_then(|shape| PanelView::new(shape, codes).ok());
        return view.expect("the header of the container was checked").into();
    }
    let scales = bytemuck::try_cast_slice(&bytes[part.scales.clone()])
        .expect("records place scales at multiples of 4 of an aligned slab");
    MatrixView::new(part.format, part.rows, part.cols, codes, scales)
        .expect("records are built from checked layouts")
        .into()
}

/// Every routed expert of the decoder layers.
#[derive(Clone, Default)]
pub struct ExpertTable {
    layers: BTreeMap<usize, ExpertLayer>,
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
            let mut slab_len = 0;
            let native = catalog.native().filter(|native| native.experts(layer).is_some());
            for expert in 0..spec.moe.experts {
                let record = match native {
                    Some(native) => native_record(spec, native, layer, expert)?,
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
            let entry = match (quantise.filter(|_| !all_integer), native) {
                (None, _) => ExpertLayer { segments, checks, slab_len, transform: None, all_integer, parts },
                (Some(format), None) => quantised_layer(layer, format, &layouts)?,
                (Some(format), Some(_)) => {
                    let records =
                        ExpertLayer { segments, checks, slab_len, transform: None, all_integer, parts };
                    quantised_records(layer, format, records)?
                }
            };
            table.layers.insert(layer, entry);
        }
        Ok(table)
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

/// The record of an expert in a Forebay container.
fn native_record(
    spec: &ModelSpec,
    native: &Native,
    layer: usize,
    expert: usize,
) -> Result<ExpertRecord, ExpertTableError> {
    let missing = || {
        let [gate, ..] = glm::expert_needs(spec, layer, expert);
        LayoutError::Missing { tensor: gate.name }
    };
    let (shard, record, kind) = native.record(layer, expert).ok_or_else(missing)?;
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

/// A layer whose experts are quantised as they arrive: every expert is read into the same raw
/// layout (down, gate, up, the order of the usual files, then scales), whatever its place on disk.
fn quantised_layer(
    layer: usize,
    format: Format,
    layouts: &[[WeightLayout; 3]],
) -> Result<ExpertLayer, ExpertTableError> {
    let first = &layouts[0];
    for three in layouts {
        for (a, b) in first.iter().zip(three) {
            if a.format != b.format {
                return Err(ExpertTableError::MixedFormats { layer, first: a.format, other: b.format });
            }
        }
    }
    let raw = lay_out(first.each_ref().map(|l| (l.format, l.rows, l.cols, Codes::Rows)));
    let quantised = lay_out(raw.0.each_ref().map(|part| becomes(part, format)));
    let segments = layouts.iter().map(|three| raw_segments(three, &raw.0)).collect();
    let all_integer = quantised.0.iter().all(|part| part.format.is_integer());
    let transform = QuantiseExpert { raw: raw.0.clone(), raw_len: raw.1, quantised: quantised.0 };
    Ok(ExpertLayer {
        segments,
        checks: Vec::new(),
        slab_len: quantised.1,
        all_integer,
        transform: Some(Arc::new(transform)),
        parts: Vec::new(),
    })
}

/// A layer of records whose experts are quantised as they arrive: the raw buffer holds the record.
fn quantised_records(
    layer: usize,
    format: Format,
    records: ExpertLayer,
) -> Result<ExpertLayer, ExpertTableError> {
    let first = &records.parts[0];
    for (a, b) in records.parts.iter().flat_map(|parts| first.iter().zip(parts)) {
        if a != b {
            return Err(ExpertTableError::MixedFormats { layer, first: a.format, other: b.format });
        }
    }
    let (quantised, slab_len) = lay_out(first.each_ref().map(|part| becomes(part, format)));
    let all_integer = quantised.iter().all(|part| part.format.is_integer());
    let transform = QuantiseExpert { raw: first.clone(), raw_len: records.slab_len, quantised };
    let transform = Some(Arc::new(transform));
    Ok(ExpertLayer { slab_len, all_integer, transform, parts: Vec::new(), ..records })
}

/// What a matrix is after quantising: as it was, or new rows.
fn becomes(part: &Part, wanted: Format) -> (Format, usize, usize, Codes) {
    let format = Role::RoutedExpert.quantised(part.format, wanted);
    let layout = if format == part.format { part.layout } else { Codes::Rows };
    (format, part.rows, part.cols, layout)
}

/// Places three matrices (gate, up, down) in a buffer: codes in the order down, gate, up,
/// then their scales; also the buffer's length. The sizes were checked with the files.
fn lay_out(matrices: [(Format, usize, usize, Codes); 3]) -> ([Part; 3], usize) {
    let mut at = 0usize;
    let mut parts = matrices.map(|(format, rows, cols, layout)| Part {
        format,
        rows,
        cols,
        layout,
        codes: 0..0,
        scales: 0..0,
    });
    for role in [2, 0, 1] {
        let part = &mut parts[role];
        let len = match part.layout {
            Codes::Rows => part.format.payload_bytes(part.rows, part.cols).unwrap_or(0),
            Codes::Panels | Codes::Coded => {
                PanelShape::new(part.format, part.rows, part.cols).map_or(0, |shape| shape.bytes())
            }
        };
        part.codes = at..at + len;
        at += len;
    }
    at = at.next_multiple_of(SCALES_ALIGN);
    for role in [2, 0, 1] {
        let part = &mut parts[role];
        let len = match part.layout {
            Codes::Rows => 4 * part.format.scale_count(part.rows, part.cols).unwrap_or(0),
            Codes::Panels | Codes::Coded => 0,
        };
        part.scales = at..at + len;
        at += len;
    }
    (parts, at)
}

/// The reads that fill `raw` for one expert, joined where both file and buffer are contiguous.
fn raw_segments(layouts: &[WeightLayout; 3], raw: &[Part; 3]) -> Arc<[ReadSegment]> {
    let mut reads: Vec<ReadSegment> = Vec::with_capacity(6);
    for (layout, part) in layouts.iter().zip(raw) {
        let pieces = [(Some(layout.codes), &part.codes), (layout.scales, &part.scales)];
        for (extent, range) in pieces {
            if let Some(extent) = extent {
                let (shard, offset) = (extent.shard, extent.offset);
                reads.push(ReadSegment { shard, offset, len: range.len(), dst: range.start });
            }
        }
    }
    reads.sort_by_key(|read| (read.shard, read.offset));
    let mut joined: Vec<ReadSegment> = Vec::with_capacity(reads.len());
    for read in reads {
        match joined.last_mut() {
            Some(last)
                if last.shard == read.shard
                    && last.offset + last.len as u64 == read.offset
                    && last.dst + last.len == read.dst =>
            {
                last.len += read.len;
            }
            _ => joined.push(read),
        }
    }
    joined.into()
}

/// Re-encodes an expert's three matrices on the reading thread.
#[derive(Clone, Debug)]
pub struct QuantiseExpert {
    raw: [Part; 3],
    raw_len: usize,
    quantised: [Part; 3],
}

impl Transform for QuantiseExpert {
    fn raw_len(&self) -> usize {
        self.raw_len
    }

    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        for (from, to) in self.raw.iter().zip(&self.quantised) {
            if from.format == to.format {
                slab[to.codes.clone()].copy_from_slice(&raw[from.codes.clone()]);
                slab[to.scales.clone()].copy_from_slice(&raw[from.scales.clone()]);
                continue;
            }
            // The raw buffer has no promised alignment, so scales (FP8 has few) are copied out.
            let (words, _) = raw[from.scales.clone()].as_chunks::<4>();
            let scales: Vec<f32> = words.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let view = MatrixView::new(from.format, from.rows, from.cols, &raw[from.codes.clone()], &scales)?;
            let [codes, scales] = slab.get_disjoint_mut([to.codes.clone(), to.scales.clone()])?;
            let scales = bytemuck::try_cast_slice_mut(scales).map_err(|e| e.to_string())?;
            encode_into(&view, to.format, codes, scales)?;
        }
        Ok(())
    }
}
