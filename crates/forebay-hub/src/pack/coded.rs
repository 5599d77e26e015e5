//! Records in fewer bytes, and what is remembered of them while a layer is only partly packed.

use forebay_core::coded::{CodedError, CodedView, encode};
use forebay_store::native::header::{Coded, Layer, PAGE, RecordKind, TENSOR_ALIGN};
use serde_json::{Value, json};

/// The coded form of the raw record `raw`, if there is one and it is smaller by a page at least.
pub fn record(kind: &RecordKind, raw: &[u8]) -> Option<(Coded, Vec<u8>)> {
    let shapes = kind.codable()?;
    let (mut bytes, mut starts, mut index_scales) = (Vec::new(), [0; 3], false);
    for ((matrix, shape), start) in kind.matrices.iter().zip(shapes).zip(&mut starts) {
        // Nothing that is placed lies outside the raw record.
        let coded = encode(&shape, &raw[matrix.codes as usize..][..shape.bytes()])?;
        index_scales |= CodedView::new(shape, &coded).ok()?.has_index_scales();
        bytes.resize(bytes.len().next_multiple_of(TENSOR_ALIGN as usize), 0);
        *start = u32::try_from(bytes.len() as u64 / TENSOR_ALIGN).ok()?;
        bytes.extend(coded);
    }
    bytes.resize(bytes.len().next_multiple_of(PAGE as usize), 0);
    let [_, up, down] = starts;
    let coded = Coded { index_scales, up, down };
    (bytes.len() as u64 + PAGE <= kind.len).then_some((coded, bytes))
}

/// The raw record that the coded record `bytes` was made of.
pub fn decode(kind: &RecordKind, coded: &Coded, bytes: &[u8]) -> Result<Vec<u8>, CodedError> {
    let mut raw = vec![0; kind.len as usize];
    // The header was checked: there are no other coded records.
    let (Some(shapes), Some(places)) = (kind.codable(), coded.places(bytes.len() as u64)) else {
        return Ok(raw);
    };
    for ((matrix, shape), place) in kind.matrices.iter().zip(shapes).zip(places) {
        let view = CodedView::new(shape, &bytes[place.start as usize..place.end as usize])?;
        let panels = &mut raw[matrix.codes as usize..][..shape.bytes()];
        for (panel, out) in panels.chunks_exact_mut(shape.panel_bytes()).enumerate() {
            view.decode_panel(panel, out);
        }
    }
    Ok(raw)
}

/// What is written down of the records of a finished layer: places that follow from nothing else.
pub fn remember(layer: &Layer) -> Value {
    let one = |record: &forebay_store::native::header::Record| match record.coded {
        None => Value::Null,
        Some(Coded { index_scales, up, down }) => json!([record.len, index_scales, up, down]),
    };
    layer.records.iter().map(one).collect()
}

/// Gives the records of a layer the lengths that were [remembered](remember); the size of its file. `None` if these
/// are not lengths that the records can have; the layer is changed then.
pub fn recall(layer: &mut Layer, kinds: &[RecordKind], remembered: &Value) -> Option<u64> {
    let found = remembered.as_array().filter(|found| found.len() == layer.records.len())?;
    let mut at = PAGE;
    for (record, found) in layer.records.iter_mut().zip(found) {
        let kind = &kinds[usize::from(record.kind)];
        record.offset = at;
        (record.len, record.coded) = match found.as_array().map(Vec::as_slice) {
            None => (kind.len, None),
            Some([len, index_scales, up, down]) => {
                let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
                let index_scales = index_scales.as_bool()?;
                let coded = Coded { index_scales, up: number(up)?, down: number(down)? };
                let len = len.as_u64().filter(|len| *len < kind.len && len.is_multiple_of(PAGE))?;
                coded.places(len)?;
                (len, Some(coded))
            }
            Some(_) => return None,
        };
        at = at.checked_add(record.len)?;
    }
    Some(at)
}
