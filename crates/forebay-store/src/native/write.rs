//! A header as bytes.

use super::bytes::Fields;
use super::header::{
    Coded, DataFile, Header, Layer, Layout, Matrix, Record, RecordKind, SideFile, Source, Tensor, Weight,
};
use super::{CODEC_CODED, CODEC_RAW, FIXED_BYTES, MAGIC, NO_LAYER, SCALES_F32, SCALES_INDEX, VERSION};

impl Header {
    /// The bytes of the header file. What [`parse`](Self::parse) refuses is written all the same.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Fields::default();
        out.0.extend(self.identity);
        source(&mut out, &self.source);
        out.count(self.side_files.len());
        self.side_files.iter().for_each(|file| side_file(&mut out, file));
        out.count(self.files.len());
        self.files.iter().for_each(|file| data_file(&mut out, file));
        out.count(self.tensors.len());
        self.tensors.iter().for_each(|one| tensor(&mut out, one));
        out.count(self.kinds.len());
        self.kinds.iter().for_each(|one| kind(&mut out, one));
        out.count(self.layers.len());
        self.layers.iter().for_each(|one| layer(&mut out, one));
        seal(&out.0)
    }
}

/// Puts the fixed part, with its checksums, before a body.
pub(super) fn seal(body: &[u8]) -> Vec<u8> {
    let mut out = Fields(Vec::with_capacity(FIXED_BYTES + body.len()));
    out.0.extend(MAGIC);
    out.u32(VERSION);
    out.u32(0);
    out.u64(body.len() as u64);
    out.u32(crc32c::crc32c(body));
    out.u32(crc32c::crc32c(&out.0));
    out.0.extend(body);
    out.0
}

fn source(out: &mut Fields, source: &Source) {
    out.text(&source.repository);
    out.text(&source.revision);
    out.count(source.files.len());
    for file in &source.files {
        out.text(&file.name);
        out.u64(file.size);
        out.u8(u8::from(file.sha256.is_some()));
        out.0.extend(file.sha256.unwrap_or_default());
    }
}

fn side_file(out: &mut Fields, file: &SideFile) {
    out.text(&file.name);
    out.u64(file.size);
    out.u32(file.crc);
    out.0.extend(file.sha256);
}

fn data_file(out: &mut Fields, file: &DataFile) {
    out.text(&file.name);
    out.u64(file.size);
    out.u32(file.layer.unwrap_or(NO_LAYER));
}

fn tensor(out: &mut Fields, tensor: &Tensor) {
    out.text(&tensor.name);
    out.text(&tensor.dtype.to_string());
    shape(out, &tensor.shape);
    match &tensor.weight {
        None => out.text(""),
        Some(found) => weight(out, found),
    }
    out.u64(tensor.offset);
    out.u64(tensor.len);
    out.u32(tensor.crc);
    out.u8(u8::from(tensor.row_checks.is_some()));
    if let Some(checks) = &tensor.row_checks {
        out.u64(checks.offset);
        out.u32(checks.crc);
    }
}

fn shape(out: &mut Fields, shape: &[u64]) {
    out.u8(shape.len().min(255) as u8);
    shape.iter().for_each(|size| out.u64(*size));
}

fn weight(out: &mut Fields, weight: &Weight) {
    out.text(&weight.format.to_string());
    out.u64(weight.rows);
    out.u64(weight.cols);
}

fn kind(out: &mut Fields, kind: &RecordKind) {
    for Matrix { weight: of, layout, codes, scales, dtype, shape: dims, scales_shape } in &kind.matrices {
        weight(out, of);
        out.u8(match layout {
            Layout::Rows => 0,
            Layout::Panels => 1,
        });
        out.u64(*codes);
        out.u64(*scales);
        out.text(&dtype.to_string());
        shape(out, dims);
        shape(out, scales_shape);
    }
    out.u64(kind.len);
}

fn layer(out: &mut Fields, layer: &Layer) {
    out.u32(layer.layer);
    out.u32(layer.file);
    out.u8(u8::from(layer.fused));
    layer.names.iter().for_each(|name| out.text(name));
    out.count(layer.records.len());
    for Record { offset, len, crc, kind, coded } in &layer.records {
        out.u64(*offset);
        out.u64(*len);
        out.u32(*crc);
        out.u16(*kind);
        match coded {
            None => {
                out.u8(CODEC_RAW);
                out.u8(SCALES_F32);
                out.u64(0);
            }
            Some(Coded { index_scales, up, down }) => {
                out.u8(CODEC_CODED);
                out.u8(if *index_scales { SCALES_INDEX } else { SCALES_F32 });
                out.u32(*up);
                out.u32(*down);
            }
        }
    }
}
