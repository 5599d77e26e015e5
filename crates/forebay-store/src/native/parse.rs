//! A header from bytes that anybody may have written.
//!
//! Fields are read one by one and checked against what was read before. What is accepted is sound: every tensor and
//! record lies at its one possible place, files have exactly the sizes that follow, names are plain and unique.

use std::collections::HashSet;

use forebay_core::Format;

use super::bytes::Cursor;
use super::error::FormatError;
use super::header::{
    Coded, DataFile, EXPERT_PLACE, Header, Layer, Layout, Matrix, PAGE, Placer, Record, RecordKind,
    RowChecks, SideFile, Source, SourceFile, TENSOR_ALIGN, Tensor, Weight,
};
use super::{CODEC_CODED, CODEC_RAW, FIXED_BYTES, HEADER_NAME, MAX_NAME, NO_LAYER, SCALES_F32, SCALES_INDEX};
use crate::shard::{Dtype, MAX_RANK, elements};

/// Reads the body of a header, which follows the fixed part.
pub(super) fn body(bytes: &[u8]) -> Result<Header, FormatError> {
    let mut at = Cursor::new(bytes, FIXED_BYTES);
    let identity = at.array("the identity")?;
    let source = source(&mut at)?;
    let mut names = HashSet::from([HEADER_NAME.to_owned()]);
    let mut side_files = Vec::new();
    for _ in 0..at.count(2 + 8 + 4 + 32, "the number of configuration files")? {
        side_files.push(SideFile {
            name: file_name(&mut at, &mut names)?,
            size: at.u64("the size of a configuration file")?,
            crc: at.u32("the checksum of a configuration file")?,
            sha256: at.array("the digest of a configuration file")?,
        });
    }
    let files = data_files(&mut at, &mut names)?;
    let mut header = Header { identity, source, side_files, files, ..Header::default() };
    tensors(&mut at, &mut header)?;
    for _ in 0..at.count(3 * 40 + 8, "the number of record kinds")? {
        header.kinds.push(kind(&mut at)?);
    }
    let mut used = HashSet::new();
    for _ in 0..at.count(4 + 4 + 1 + 3 * 2 + 4, "the number of layers")? {
        let layer = layer(&mut at, &header)?;
        if !used.insert(layer.file) {
            return Err(at.wrong("the file of a layer", "a file of its own", layer.file));
        }
        header.layers.push(layer);
    }
    if used.len() + 1 != header.files.len() {
        return Err(at.wrong("the number of layers", header.files.len() - 1, used.len()));
    }
    no_name_twice(&at, &header)?;
    match at.left() {
        0 => Ok(header),
        more => Err(at.wrong("what follows the last layer", "nothing", format!("{more} bytes"))),
    }
}

fn source(at: &mut Cursor<'_>) -> Result<Source, FormatError> {
    let repository = at.text(MAX_NAME, "the repository")?;
    let revision = at.text(MAX_NAME, "the revision")?;
    let mut files = Vec::new();
    for _ in 0..at.count(2 + 8 + 1 + 32, "the number of source files")? {
        let name = at.text(MAX_NAME, "the name of a source file")?;
        let size = at.u64("the size of a source file")?;
        let known = at.bool("whether a source digest is known")?;
        let digest: [u8; 32] = at.array("a source digest")?;
        if !known && digest != [0; 32] {
            return Err(at.wrong("a source digest that is not known", "zeros", "something else"));
        }
        files.push(SourceFile { name, size, sha256: known.then_some(digest) });
    }
    Ok(Source { repository, revision, files })
}

/// A name that means a file of the folder itself and nothing else, on any system.
fn file_name(at: &mut Cursor<'_>, names: &mut HashSet<String>) -> Result<String, FormatError> {
    let name = at.text(MAX_NAME, "a file name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if name.is_empty() || name.starts_with('.') || !name.chars().all(plain) {
        return Err(at.wrong(
            "a file name",
            "letters, digits, '.', '-' and '_', no '.' in front",
            quoted(&name),
        ));
    }
    // Case does not tell files apart everywhere.
    match names.insert(name.to_ascii_lowercase()) {
        true => Ok(name),
        false => Err(at.wrong("a file name", "one that was not used before", quoted(&name))),
    }
}

fn data_files(at: &mut Cursor<'_>, names: &mut HashSet<String>) -> Result<Vec<DataFile>, FormatError> {
    let mut files: Vec<DataFile> = Vec::new();
    for number in 0..at.count(2 + 8 + 4, "the number of weight files")? {
        let name = file_name(at, names)?;
        let size = at.u64("the size of a weight file")?;
        let layer = at.u32("the layer of a weight file")?;
        if (layer == NO_LAYER) != (number == 0) {
            return Err(at.wrong(
                "the layer of a weight file",
                "none for the first one and only for it",
                layer,
            ));
        }
        let layer = (layer != NO_LAYER).then_some(layer);
        if files.last().is_some_and(|last| last.layer >= layer) {
            return Err(at.wrong("the layer of a weight file", "one above that of the file before", number));
        }
        files.push(DataFile { name, size, layer });
    }
    match files.is_empty() {
        true => Err(at.wrong("the number of weight files", "at least 1", 0)),
        false => Ok(files),
    }
}

fn tensors(at: &mut Cursor<'_>, header: &mut Header) -> Result<(), FormatError> {
    let mut placer = Placer::default();
    for _ in 0..at.count(2 + 2 + 1 + 2 + 8 + 8 + 4 + 1, "the number of tensors")? {
        let name = at.text(MAX_NAME, "the name of a tensor")?;
        let dtype = dtype(at)?;
        let shape = shape(at)?;
        let weight = weight(at, true)?;
        let offset = at.u64("the offset of a tensor")?;
        let len = at.u64("the length of a tensor")?;
        let crc = at.u32("the checksum of a tensor")?;
        if let Some(size) = dtype.size()
            && elements(&shape).and_then(|n| n.checked_mul(size)) != Some(len)
        {
            return Err(at.wrong(quoted(&name), format!("the bytes of {dtype} {shape:?}"), len));
        }
        if let Some(weight) = weight
            && !holds(&dtype, &weight, len)
        {
            let expected = format!("a tensor for {} {} x {}", weight.format, weight.rows, weight.cols);
            return Err(at.wrong(quoted(&name), expected, format!("{len} bytes of {dtype}")));
        }
        placed(at, &mut placer, len, offset, &name)?;
        let row_checks = match at.bool("whether a tensor has row checksums")? {
            false => None,
            true => {
                let offset = at.u64("the offset of row checksums")?;
                let crc = at.u32("the checksum of row checksums")?;
                let table = weight.and_then(|weight| weight.rows.checked_mul(4));
                let table =
                    table.ok_or_else(|| at.wrong("a tensor with row checksums", "a weight", "another"))?;
                placed(at, &mut placer, table, offset, &name)?;
                Some(RowChecks { offset, crc })
            }
        };
        header.tensors.push(Tensor { name, dtype, shape, weight, offset, len, crc, row_checks });
    }
    match placer.end() {
        Some(end) if end == header.files[0].size => Ok(()),
        end => Err(at.wrong("the size of the resident file", end.unwrap_or(u64::MAX), header.files[0].size)),
    }
}

/// Whether the tensor can be the codes of the weight.
fn holds(dtype: &Dtype, weight: &Weight, len: u64) -> bool {
    of_format(dtype, weight.format) && weight.payload() == Some(len) && weight.scales().is_some()
}

/// Whether codes of the format are stored as elements of the type.
fn of_format(dtype: &Dtype, format: Format) -> bool {
    match format {
        Format::F32 => *dtype == Dtype::F32,
        Format::Bf16 => *dtype == Dtype::Bf16,
        Format::F16 => *dtype == Dtype::F16,
        Format::Fp8Block => *dtype == Dtype::F8E4m3,
        _ => matches!(dtype, Dtype::U8 | Dtype::I8),
    }
}

fn placed(at: &Cursor<'_>, placer: &mut Placer, len: u64, found: u64, name: &str) -> Result<(), FormatError> {
    match placer.place(len) {
        Some(place) if place == found => Ok(()),
        Some(place) => Err(at.wrong(format!("the place of {}", quoted(name)), place, found)),
        None => Err(at.wrong(format!("the length of {}", quoted(name)), "one that can be addressed", len)),
    }
}

fn dtype(at: &mut Cursor<'_>) -> Result<Dtype, FormatError> {
    let name = at.text(MAX_NAME, "an element type")?;
    match name.is_empty() {
        true => Err(at.wrong("an element type", "a name", "nothing")),
        false => Ok(Dtype::from_name(&name)),
    }
}

fn shape(at: &mut Cursor<'_>) -> Result<Vec<u64>, FormatError> {
    let rank = usize::from(at.u8("the number of dimensions")?);
    if rank > MAX_RANK {
        return Err(at.wrong("the number of dimensions", format!("at most {MAX_RANK}"), rank));
    }
    (0..rank).map(|_| at.u64("a dimension")).collect()
}

/// A named format with rows and columns; an empty name is none.
fn weight(at: &mut Cursor<'_>, may_lack: bool) -> Result<Option<Weight>, FormatError> {
    let name = at.text(MAX_NAME, "a weight format")?;
    if name.is_empty() && may_lack {
        return Ok(None);
    }
    let format = name
        .parse()
        .map_err(|_| at.wrong("a weight format", "a name that this program knows", quoted(&name)))?;
    Ok(Some(Weight { format, rows: at.u64("a number of rows")?, cols: at.u64("a number of columns")? }))
}

fn kind(at: &mut Cursor<'_>) -> Result<RecordKind, FormatError> {
    let found = RecordKind {
        matrices: [matrix(at)?, matrix(at)?, matrix(at)?],
        len: at.u64("the bytes of a record")?,
    };
    match RecordKind::place(found.matrices.clone()) {
        Some(placed) if placed == found => Ok(found),
        Some(placed) => {
            let places = |kind: &RecordKind| {
                let of = |m: &Matrix| format!("{}/{}", m.codes, m.scales);
                format!("{}; {} bytes", kind.matrices.each_ref().map(of).join(", "), kind.len)
            };
            Err(at.wrong("the places in a record", places(&placed), places(&found)))
        }
        None => Err(at.wrong("a record", "matrices that exist and can be addressed", "others")),
    }
}

fn matrix(at: &mut Cursor<'_>) -> Result<Matrix, FormatError> {
    let Some(weight) = weight(at, false)? else {
        return Err(at.wrong("a weight format", "a name", "nothing"));
    };
    let layout = match at.u8("a layout")? {
        0 => Layout::Rows,
        1 => Layout::Panels,
        other => return Err(at.wrong("a layout", "0 (rows) or 1 (panels)", other)),
    };
    let (codes, scales) = (at.u64("the place of codes")?, at.u64("the place of scales")?);
    let dtype = dtype(at)?;
    let (dims, scales_shape) = (shape(at)?, shape(at)?);
    let bytes =
        |dims: &[u64], size: Option<u64>| elements(dims).zip(size).and_then(|(n, size)| n.checked_mul(size));
    if !of_format(&dtype, weight.format)
        || weight.payload().is_none_or(|n| bytes(&dims, dtype.size()) != Some(n))
    {
        return Err(at.wrong(
            "a matrix in the source",
            format!("the codes of {}", weight.format),
            format!("{dtype} {dims:?}"),
        ));
    }
    let has_scales = weight.scales().is_some_and(|n| n > 0);
    if has_scales && bytes(&scales_shape, Some(4)) != weight.scales()
        || !has_scales && !scales_shape.is_empty()
    {
        return Err(at.wrong(
            "scales in the source",
            format!("those of {}", weight.format),
            format!("{scales_shape:?}"),
        ));
    }
    Ok(Matrix { weight, layout, codes, scales, dtype, shape: dims, scales_shape })
}

fn layer(at: &mut Cursor<'_>, header: &Header) -> Result<Layer, FormatError> {
    let number = at.u32("a layer")?;
    let file = at.u32("the file of a layer")?;
    let Some(data) = header.files.get(file as usize).filter(|data| data.layer == Some(number)) else {
        return Err(at.wrong(format!("the file of layer {number}"), "one that says so too", file));
    };
    let fused = at.bool("whether a layer was fused")?;
    let mut name = || at.text(MAX_NAME, "the name of a matrix");
    let names = [name()?, name()?, name()?];
    let places = names.each_ref().map(|name| name.matches(EXPERT_PLACE).count());
    let [gate, up, down] = &names;
    let distinct = if fused { gate == up && gate != down } else { gate != up && up != down && gate != down };
    if places != [usize::from(!fused); 3] || !distinct {
        return Err(at.wrong(
            format!("the names in layer {number}"),
            "names of their own, with {e} unless fused",
            quoted(&names.join(", ")),
        ));
    }
    let mut records: Vec<Record> = Vec::new();
    let mut next = PAGE;
    for _ in 0..at.count(32, "the number of experts")? {
        let record = record(at, header, next)?;
        next = next
            .checked_add(record.len)
            .ok_or_else(|| at.wrong("a record", "one that can be addressed", record.len))?;
        records.push(record);
    }
    if records.is_empty() || next != data.size {
        return Err(at.wrong(format!("the size of {}", data.name), next, data.size));
    }
    let kinds: HashSet<u16> = records.iter().map(|record| record.kind).collect();
    let plain = |kind: &u16| {
        let [gate, up, down] = &header.kinds[usize::from(*kind)].matrices;
        let scaled = [gate, up, down].iter().any(|m| m.weight.scales() != Some(0));
        !scaled && gate.weight == up.weight && gate.dtype == up.dtype
    };
    if fused && (kinds.len() != 1 || !kinds.iter().all(plain)) {
        return Err(at.wrong(format!("fused layer {number}"), "floats of one kind", "something else"));
    }
    Ok(Layer { layer: number, file, fused, names, records })
}

fn record(at: &mut Cursor<'_>, header: &Header, next: u64) -> Result<Record, FormatError> {
    let offset = at.u64("the offset of a record")?;
    let len = at.u64("the length of a record")?;
    let crc = at.u32("the checksum of a record")?;
    let kind = at.u16("the kind of a record")?;
    let codec = at.u8("the codec of a record")?;
    let Some(of_kind) = header.kinds.get(usize::from(kind)) else {
        return Err(at.wrong("the kind of a record", format!("less than {}", header.kinds.len()), kind));
    };
    let coded = match codec {
        CODEC_RAW => {
            let scales = at.u8("the scale encoding of a record")?;
            if scales != SCALES_F32 {
                return Err(at.wrong("the scale encoding of a raw record", "0 (f32)", scales));
            }
            at.exactly(0, "the last field of a raw record")?;
            None
        }
        CODEC_CODED if of_kind.codable().is_none() => {
            return Err(at.wrong("the codec of a record", "0 (raw): not all is int4 in panels", codec));
        }
        CODEC_CODED => Some(coded(at, of_kind, len)?),
        other => return Err(at.wrong("the codec of a record", "0 (raw) or 1 (coded)", other)),
    };
    if offset != next || coded.is_none() && len != of_kind.len {
        let expected = format!("{} bytes from {next}", of_kind.len);
        return Err(at.wrong("the place of a record", expected, format!("{len} from {offset}")));
    }
    Ok(Record { offset, len, crc, kind, coded })
}

/// What a coded record of `len` bytes says of itself.
fn coded(at: &mut Cursor<'_>, kind: &RecordKind, len: u64) -> Result<Coded, FormatError> {
    let index_scales = match at.u8("the scale encoding of a record")? {
        SCALES_F32 => false,
        SCALES_INDEX if kind.may_have_index_scales() => true,
        SCALES_INDEX => {
            let expected = "0 (f32): no groups that divide 128 columns";
            return Err(at.wrong("the scale encoding of a coded record", expected, SCALES_INDEX));
        }
        other => {
            return Err(at.wrong("the scale encoding of a coded record", "0 (f32) or 1 (index)", other));
        }
    };
    let up = at.u32("the place of up in a coded record")?;
    let down = at.u32("the place of down in a coded record")?;
    let coded = Coded { index_scales, up, down };
    // It is there because it is smaller, by a page at least.
    let most = kind.len.saturating_sub(PAGE);
    if !len.is_multiple_of(PAGE) || len > most {
        return Err(at.wrong(
            "the length of a coded record",
            format!("whole pages, {most} bytes at most"),
            len,
        ));
    }
    match coded.places(len) {
        Some(_) => Ok(coded),
        None => {
            let expected = format!("0 < up < down < {}", len / TENSOR_ALIGN);
            Err(at.wrong("the places in a coded record", expected, format!("up {up}, down {down}")))
        }
    }
}

/// No tensor of the source may be in two places.
fn no_name_twice(at: &Cursor<'_>, header: &Header) -> Result<(), FormatError> {
    let mut names = HashSet::new();
    let patterns: HashSet<&str> =
        header.layers.iter().flat_map(|layer| layer.names.iter().map(String::as_str)).collect();
    let each = header.layers.iter().map(|layer| if layer.fused { 2 } else { 3 }).sum::<usize>();
    if patterns.len() != each {
        return Err(at.wrong("the names of matrices", "others in every layer", "the same"));
    }
    for Tensor { name, .. } in &header.tensors {
        if !names.insert(name.as_str()) {
            return Err(at.wrong("the name of a tensor", "one that was not used before", quoted(name)));
        }
        // A tensor of an expert is in its record.
        let plain = name.strip_suffix(".qs").or_else(|| name.strip_suffix("_scale_inv")).unwrap_or(name);
        let parts: Vec<&str> = plain.split('.').collect();
        let numbers = (0..parts.len()).filter(|&i| parts[i].bytes().all(|b| b.is_ascii_digit()));
        let mut patterned =
            numbers.map(|i| [&parts[..i], &[EXPERT_PLACE], &parts[i + 1..]].concat().join("."));
        if patterns.contains(plain) || patterned.any(|pattern| patterns.contains(pattern.as_str())) {
            return Err(at.wrong("the name of a tensor", "none of an expert", quoted(name)));
        }
    }
    Ok(())
}

/// Text of somebody else's, for an error.
fn quoted(text: &str) -> String {
    format!("{:?}", crate::json::shorten(text, 200))
}
