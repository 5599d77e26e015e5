//! Experts that are quantised by the thread that reads them.

use std::sync::Arc;

use forebay_core::{Format, MatrixView, PanelShape, ReadSegment};
use forebay_io::Transform;
use forebay_store::layout::WeightLayout;
use forebay_store::record::{Codes, Part};

use super::{ExpertLayer, ExpertTableError};
use crate::families::roles::Role;
use crate::weights::encode_into;

/// Scales of a raw buffer start at a multiple of this many bytes.
const SCALES_ALIGN: usize = 64;

/// A layer whose experts are quantised as they arrive: every expert is read into the same raw
/// layout (down, gate, up, the order of the usual files, then scales), whatever its place on disk.
pub(super) fn quantised_layer(
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
        all_integer,
        slab_len: quantised.1,
        quantise: Some(Arc::new(transform)),
        parts: Vec::new(),
        decoded: None,
    })
}

/// A layer of records whose experts are quantised as they arrive: the raw buffer holds the record. None of them is
/// coded: such a record is all int4, and others that are not make a layer of several formats.
pub(super) fn quantised_records(
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
    let quantise = Some(Arc::new(transform));
    Ok(ExpertLayer { slab_len, all_integer, quantise, parts: Vec::new(), ..records })
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
    pub(super) raw_len: usize,
    pub(super) quantised: [Part; 3],
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
