//! Writing a container.

use std::io::{BufWriter, Write};
use std::path::Path;

use forebay_core::CancelToken;
use forebay_io::file::read_regular;
use forebay_io::{Access, ReadError, Shard, open_files};
use forebay_model::{Snapshot, SnapshotOptions};
use forebay_store::layout::Extent;
use forebay_store::native::header::{Coded, Header, PAGE, Record, RecordKind, RowChecks, Tensor};
use forebay_store::native::{HEADER_NAME, Native, preamble};
use serde_json::Value;

use super::error::PackError;
use super::expert;
use super::folder::Folder;
use super::plan::Plan;
use super::{Codes, ExpertBytes, PackOptions, Packed, coded};
use crate::output::behind::Behind;
use crate::output::file::begin;
use crate::output::ordered::in_order;

/// Bytes of a resident tensor that are copied at a time.
const PIECE: u64 = 4 << 20;

/// Packs the model in `source` into `dir`, or what is missing of it.
///
/// The bytes do not depend on the number of threads, nor on how often the work was interrupted. `progress` gets the
/// bytes that are there and those there will be, both as they would be if nothing were coded. The header comes last:
/// until then the folder is no model. A run holds two experts per thread at most, one as it was and one as it will
/// be, a third one for a moment where it is coded, and one that is being written.
///
/// # Errors
/// Nothing is written if `source` is no complete model, if `dir` holds anything else, or if its disk has too little
/// room. After any other error finished files stay, and the next call goes on behind them.
pub fn pack(
    source: &Path,
    dir: &Path,
    options: PackOptions<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed, PackError> {
    if Native::is_at(source) {
        return Err(PackError::Packed { dir: source.to_owned() });
    }
    let snapshot = Snapshot::open(source, SnapshotOptions::default())?;
    let mut plan = Plan::new(&snapshot, source)?;
    if options.codes == Codes::Coded && plan.header.kinds.iter().all(|kind| kind.codable().is_none()) {
        let formats: Vec<_> = snapshot.experts.formats.keys().map(String::as_str).collect();
        return Err(PackError::NotCodable { formats: formats.join(", ") });
    }
    let source_bytes = snapshot.catalog.shards().iter().map(|shard| shard.size).sum();
    let mut done = Packed { source: source_bytes, ..Packed::default() };
    if let Some(found) = complete(dir, &plan, options.codes)? {
        let total = found.files.iter().map(|file| file.size).sum();
        return Ok(Packed { total, kept: found.files.len(), experts: ExpertBytes::of(&found), ..done });
    }
    let total = plan.bytes();
    let mut folder = Folder::take(dir, "forebay pack", &plan.header.identity, options.codes)?;
    let paths: Vec<_> = snapshot.catalog.shards().iter().map(|shard| &shard.path).collect();
    let shards = open_files(&paths, Access::Buffered)?.shards;

    let mut missing = Vec::new();
    let mut there = 0;
    for number in 0..plan.header.files.len() {
        if options.cancel.is_cancelled() {
            return Err(PackError::Cancelled);
        }
        let raw_size = plan.header.files[number].size;
        match finished(&folder, &mut plan, number)? {
            true => {
                there += raw_size;
                done.kept += 1;
            }
            false => missing.push(number),
        }
        progress(there, total);
    }
    let share = match options.codes {
        Codes::Raw => 1.0,
        _ => expected_share(&plan, &missing, &shards)?,
    };
    folder.check_room(((total - there) as f64 * share) as u64, options.margin)?;
    for number in missing {
        let name = plan.header.files[number].name.clone();
        let mut written = |bytes: u64| {
            there += bytes;
            progress(there, total);
        };
        let path = folder.partial(&name);
        let mut out = Output::create(&path, options.cancel, &mut written)?;
        out.put(&preamble(&plan.header, number))?;
        let mut remembered = Value::Null;
        match plan.header.layer_in(number) {
            Some(layer) => {
                let found = records(&plan, layer, &shards, options, &mut out)?;
                plan.header.files[number].size = found.last().map_or(PAGE, |last| last.offset + last.len);
                plan.header.layers[layer].records = found;
                if options.codes != Codes::Raw {
                    remembered = coded::remember(&plan.header.layers[layer]);
                }
            }
            None => {
                let crcs = residents(&plan, &shards, &mut out)?;
                plan.header.set_checks(number, &crcs);
            }
        }
        let size = plan.header.files[number].size;
        out.finish(size)?;
        let crcs: Vec<u32> = plan.header.checked(number).iter().map(|part| part.crc).collect();
        folder.finish(&name, size, &crcs, remembered)?;
        done.bytes += size;
        done.files += 1;
    }
    for file in &plan.header.side_files {
        let path = source.join(&file.name);
        let bytes = read_regular(&path, file.size).map_err(|cause| PackError::at("read", &path, cause))?;
        folder.write_whole(&file.name, &bytes)?;
    }
    folder.write_whole(HEADER_NAME, &plan.header.to_bytes())?;
    // Everything is read back and checked but the weights.
    Native::open(folder.dir())?;
    folder.complete()?;
    done.total = plan.bytes();
    done.experts = ExpertBytes::of(&plan.header);
    Ok(done)
}

/// The header of `dir`, if it holds just this model, packed to the end.
fn complete(dir: &Path, plan: &Plan, codes: Codes) -> Result<Option<Header>, PackError> {
    if !Native::is_at(dir) || dir.join(forebay_store::folder::UNFINISHED_PACK).exists() {
        return Ok(None);
    }
    let header = Native::open(dir)?.header().clone();
    let occupied = |found: &str| Err(PackError::Occupied { dir: dir.to_owned(), found: found.to_owned() });
    let (coded, codable) =
        (ExpertBytes::of(&header).coded > 0, header.kinds.iter().any(|kind| kind.codable().is_some()));
    match codes {
        _ if header.identity != plan.header.identity => occupied("another model"),
        Codes::Raw if coded => occupied("the same model with coded experts"),
        Codes::Auto | Codes::Coded if codable && !coded => occupied("the same model with raw experts"),
        _ => Ok(Some(header)),
    }
}

/// Whether weight file `number` is there; the plan has its checksums and lengths then.
fn finished(folder: &Folder, plan: &mut Plan, number: usize) -> Result<bool, PackError> {
    let Header { files, layers, kinds, .. } = &mut plan.header;
    let (file, mut raw) = (&mut files[number], None);
    if let Some(layer) = layers.iter_mut().find(|layer| layer.file as usize == number)
        && let Some(remembered) = folder.records(&file.name).filter(|found| !found.is_null())
    {
        raw = Some((file.size, layer.clone()));
        file.size = coded::recall(layer, kinds, remembered).unwrap_or(0);
    }
    let (file, start) = (&plan.header.files[number], preamble(&plan.header, number));
    let crcs = match file.size {
        0 => None,
        size => folder.finished(&file.name, size, &start, &plan.header.checked(number))?,
    };
    match (&crcs, raw) {
        (Some(crcs), _) => plan.header.set_checks(number, crcs),
        (None, Some((size, layer))) => {
            let at = plan.header.layer_in(number).unwrap_or(0);
            (plan.header.files[number].size, plan.header.layers[at]) = (size, layer);
        }
        (None, None) => {}
    }
    Ok(crcs.is_some())
}

/// The share of raw bytes that coded files take, a little more than one expert does.
fn expected_share(plan: &Plan, missing: &[usize], shards: &[Shard]) -> Result<f64, PackError> {
    let Some(layer) = missing.iter().find_map(|number| plan.header.layer_in(*number)) else { return Ok(1.0) };
    let Record { kind, .. } = plan.header.layers[layer].records[0];
    let kind = &plan.header.kinds[usize::from(kind)];
    let raw = expert::record(shards, kind, &plan.experts[layer][0])
        .map_err(|cause| PackError::source("the first expert", cause))?;
    let coded = coded::record(kind, &raw);
    Ok(coded.map_or(1.0, |(_, bytes)| (1.02 * bytes.len() as f64 / raw.len() as f64).min(1.0)))
}

/// A file that is being written, front to back.
struct Output<'a> {
    path: &'a Path,
    file: BufWriter<Behind>,
    at: u64,
    cancel: &'a CancelToken,
    written: &'a mut dyn FnMut(u64),
}

impl<'a> Output<'a> {
    fn create(
        path: &'a Path,
        cancel: &'a CancelToken,
        written: &'a mut dyn FnMut(u64),
    ) -> Result<Self, PackError> {
        let file = begin(path).map_err(|cause| PackError::at("create", path, cause))?;
        Ok(Self { path, file: BufWriter::new(Behind::new(file)), at: 0, cancel, written })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), PackError> {
        self.put_instead(bytes, bytes.len() as u64)
    }

    /// The same for what takes the place of `counted` bytes.
    fn put_instead(&mut self, bytes: &[u8], counted: u64) -> Result<(), PackError> {
        if self.cancel.is_cancelled() {
            return Err(PackError::Cancelled);
        }
        self.file.write_all(bytes).map_err(|cause| PackError::at("write", self.path, cause))?;
        self.at += bytes.len() as u64;
        (self.written)(counted);
        Ok(())
    }

    /// Zeros up to byte `offset`, which is never far.
    fn pad_to(&mut self, offset: u64) -> Result<(), PackError> {
        self.put(&vec![0; offset.saturating_sub(self.at) as usize])
    }

    fn finish(mut self, size: u64) -> Result<(), PackError> {
        self.pad_to(size)?;
        let failed = |cause| PackError::at("write", self.path, cause);
        let mut file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        file.sync().map_err(failed)
    }
}

/// An expert as it is written.
struct Made {
    bytes: Vec<u8>,
    crc: u32,
    coded: Option<Coded>,
}

impl Made {
    fn new(kind: &RecordKind, raw: Vec<u8>, codes: Codes) -> Self {
        let found = if codes == Codes::Raw { None } else { coded::record(kind, &raw) };
        let (coded, bytes) = found.map_or((None, raw), |(coded, bytes)| (Some(coded), bytes));
        Self { crc: crc32c::crc32c(&bytes), bytes, coded }
    }
}

/// Writes the records of a layer; what the header says of them.
fn records(
    plan: &Plan,
    layer: usize,
    shards: &[Shard],
    options: PackOptions<'_>,
    out: &mut Output<'_>,
) -> Result<Vec<Record>, PackError> {
    let (of, sources) = (&plan.header.layers[layer], &plan.experts[layer]);
    let kind = |expert: usize| &plan.header.kinds[usize::from(of.records[expert].kind)];
    let mut written: Vec<Record> = Vec::with_capacity(sources.len());
    let make = |&expert: &usize| {
        let raw = expert::record(shards, kind(expert), &sources[expert])?;
        Ok(Made::new(kind(expert), raw, options.codes))
    };
    let experts: Vec<usize> = (0..sources.len()).collect();
    in_order(&experts, options.threads, 0, make, |&expert, made: Result<_, ReadError>| {
        let Made { bytes, crc, coded } =
            made.map_err(|cause| PackError::source(format!("expert {expert} of layer {}", of.layer), cause))?;
        let offset = out.at;
        written.push(Record { offset, len: bytes.len() as u64, crc, coded, ..of.records[expert] });
        out.put_instead(&bytes, kind(expert).len)
    })?;
    Ok(written)
}

/// Writes the resident tensors, with their row checksums; the checksums of both.
fn residents(plan: &Plan, shards: &[Shard], out: &mut Output<'_>) -> Result<Vec<u32>, PackError> {
    let mut crcs = Vec::new();
    for (tensor, &from) in plan.header.tensors.iter().zip(&plan.tensors) {
        out.pad_to(tensor.offset)?;
        let failed = |cause| PackError::source(&tensor.name, cause);
        let mut rows = RowSums::of(plan, tensor, shards).map_err(failed)?;
        let (mut bytes, mut crc) = (Vec::new(), 0);
        for first in (0..from.len).step_by(PIECE as usize) {
            let piece = Extent { offset: from.offset + first, len: PIECE.min(from.len - first), ..from };
            expert::read(shards, piece, &mut bytes).map_err(failed)?;
            crc = crc32c::crc32c_append(crc, &bytes);
            if let Some(rows) = &mut rows {
                rows.add(&bytes);
            }
            out.put(&bytes)?;
        }
        crcs.push(crc);
        if let (Some(rows), Some(RowChecks { offset, .. })) = (rows, tensor.row_checks) {
            out.pad_to(offset)?;
            crcs.push(crc32c::crc32c(&rows.table));
            out.put(&rows.table)?;
        }
    }
    Ok(crcs)
}

/// The table of row checksums of a tensor of `plan`, read from where it says that the tensors are; `None` if the tensor
/// has none.
pub(crate) fn row_table(plan: &Plan, tensor: usize, shards: &[Shard]) -> Result<Option<Vec<u8>>, ReadError> {
    let Some(mut rows) = RowSums::of(plan, &plan.header.tensors[tensor], shards)? else { return Ok(None) };
    let (from, mut bytes) = (plan.tensors[tensor], Vec::new());
    for first in (0..from.len).step_by(PIECE as usize) {
        let piece = Extent { offset: from.offset + first, len: PIECE.min(from.len - first), ..from };
        expert::read(shards, piece, &mut bytes)?;
        rows.add(&bytes);
    }
    Ok(Some(rows.table))
}

/// Checksums of rows whose codes pass by.
struct RowSums {
    row_bytes: usize,
    /// The scales of the whole matrix, and their bytes per row.
    scales: Vec<u8>,
    scale_bytes: usize,
    /// Rows that share a line of scales.
    rows_per_line: usize,
    /// The sum of the codes of the row that is passing by, and how many there were.
    crc: u32,
    seen: usize,
    row: usize,
    table: Vec<u8>,
}

impl RowSums {
    /// For a tensor that has them.
    fn of(plan: &Plan, tensor: &Tensor, shards: &[Shard]) -> Result<Option<Self>, ReadError> {
        let (Some(weight), Some(_)) = (tensor.weight, tensor.row_checks) else { return Ok(None) };
        let mut scales = Vec::new();
        let name = weight.scales_name(&tensor.name);
        let at = plan.header.tensors.iter().position(|other| Some(&other.name) == name.as_ref());
        if let Some(at) = at {
            expert::read(shards, plan.tensors[at], &mut scales)?;
        }
        let rows = (weight.rows as usize).max(1);
        let blocks = weight.format == forebay_core::Format::Fp8Block;
        let rows_per_line = if blocks { forebay_core::format::FP8_BLOCK } else { 1 };
        Ok(Some(Self {
            row_bytes: tensor.len as usize / rows,
            scale_bytes: scales.len() / rows.div_ceil(rows_per_line),
            scales,
            rows_per_line,
            crc: 0,
            seen: 0,
            row: 0,
            table: Vec::with_capacity(4 * rows),
        }))
    }

    fn add(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let (here, rest) = bytes.split_at(bytes.len().min(self.row_bytes - self.seen));
            self.crc = crc32c::crc32c_append(self.crc, here);
            self.seen += here.len();
            bytes = rest;
            if self.seen == self.row_bytes {
                let line = self.row / self.rows_per_line * self.scale_bytes;
                let crc = crc32c::crc32c_append(self.crc, &self.scales[line..line + self.scale_bytes]);
                self.table.extend(crc.to_le_bytes());
                (self.crc, self.seen, self.row) = (0, 0, self.row + 1);
            }
        }
    }
}
