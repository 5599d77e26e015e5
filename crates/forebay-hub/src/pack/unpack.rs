//! Back to safetensors: the tensors of the source, byte for byte, in one file for the resident ones and one per layer
//! of experts.

use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use forebay_io::file::read_regular;
use forebay_io::{Access, ReadError, Shard, open_files, read_exact_at};
use forebay_store::native::Native;
use forebay_store::native::header::{Checked, Header, Layer, Matrix, Record};
use serde_json::Value;

use super::error::PackError;
use super::folder::Folder;
use super::{Codes, ExpertBytes, PackOptions, Packed, coded, expert};
use crate::output::behind::Behind;
use crate::output::file::begin;
use crate::output::ordered::in_order;
use crate::safetensors::{self, Describe};

/// Bytes of a resident tensor that are copied at a time.
const PIECE: usize = 4 << 20;

/// Writes the tensors of the container `source` into safetensors files in `dir`, or what is missing of them.
///
/// Names, types, shapes and bytes of the tensors are those of the model that was packed; which file they are in may
/// differ. `progress` is told as by [`pack`](super::pack), and resuming works the same way. `config.json` comes last.
///
/// # Errors
/// Nothing is written if `source` is no sound container, if `dir` holds anything else, or if its disk has too little
/// room. Bytes that are not those that were packed are an error that names record or tensor.
pub fn unpack(
    source: &Path,
    dir: &Path,
    options: PackOptions<'_>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Packed, PackError> {
    if !Native::is_at(source) {
        return Err(PackError::NotPacked { dir: source.to_owned() });
    }
    let native = Native::open(source)?;
    let header = native.header();
    let outputs = (0..header.files.len()).map(|number| Output::plan(header, number));
    let outputs: Vec<Output> = outputs.collect::<Result<_, _>>()?;
    let mut done = Packed {
        total: outputs.iter().map(|out| out.size).sum(),
        source: header.files.iter().map(|file| file.size).sum(),
        experts: ExpertBytes::of(header),
        ..Packed::default()
    };
    let mut folder = Folder::take(dir, "forebay pack --to-reference", &header.identity, Codes::Raw)?;
    let paths: Vec<_> = header.files.iter().map(|file| source.join(&file.name)).collect();
    let shards = open_files(&paths, Access::Buffered)?.shards;
    let (mut there, mut missing) = (0, Vec::new());
    for out in &outputs {
        if options.cancel.is_cancelled() {
            return Err(PackError::Cancelled);
        }
        match folder.finished(&out.name, out.size, &out.header, &out.checked())? {
            Some(_) => {
                there += out.size;
                done.kept += 1;
            }
            None => missing.push(out),
        }
        progress(there, done.total);
    }
    folder.check_room(done.total - there, options.margin)?;
    for out in missing {
        let mut written = |bytes: u64| {
            there += bytes;
            progress(there, done.total);
        };
        let path = folder.partial(&out.name);
        let create = || begin(&path).and_then(|file| file.set_len(out.size).map(|()| Behind::new(file)));
        let file = create().map_err(|cause| PackError::at("create", &path, cause))?;
        let (crcs, cancel) = (vec![0; out.tensors.len()], options.cancel);
        let mut writer = Writer { out, path: &path, file, at: 0, crcs, cancel, written: &mut written };
        writer.write(header, &shards, options.threads)?;
        let crcs = writer.crcs;
        folder.finish(&out.name, out.size, &crcs, Value::Null)?;
        done.bytes += out.size;
        done.files += 1;
    }
    // The one that makes it a model comes last.
    let (last, others): (Vec<_>, Vec<_>) =
        header.side_files.iter().partition(|file| file.name == "config.json");
    for file in others.into_iter().chain(last) {
        let path = source.join(&file.name);
        let bytes = read_regular(&path, file.size).map_err(|cause| PackError::at("read", &path, cause))?;
        folder.write_whole(&file.name, &bytes)?;
    }
    folder.complete()?;
    Ok(done)
}

/// One file to be written.
struct Output {
    name: String,
    /// Index of the container's file.
    number: usize,
    /// In file order.
    tensors: Vec<OutTensor>,
    header: Vec<u8>,
    /// Where each tensor begins.
    places: Vec<u64>,
    size: u64,
}

/// A tensor to be written.
struct OutTensor {
    name: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    from: From,
}

/// Where the bytes of a tensor are.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum From {
    /// A tensor of the resident file, by its number.
    Resident(usize),
    /// Codes (or scales) of a matrix of an expert.
    Expert { expert: usize, part: usize, scales: bool },
    /// A fused tensor: gates and ups (0), or downs (2).
    Fused(usize),
}

impl Describe for OutTensor {
    fn name(&self) -> &str {
        &self.name
    }

    fn dtype(&self) -> &str {
        &self.dtype
    }

    fn shape(&self) -> Vec<u64> {
        self.shape.clone()
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Output {
    /// The file that holds what the container's file `number` does.
    fn plan(header: &Header, number: usize) -> Result<Self, PackError> {
        let name = format!("out-{number:05}.safetensors");
        let too_large = |what: &str| PackError::TooLarge { what: what.to_owned() };
        let mut tensors = match header.layer_in(number) {
            Some(layer) => layer_tensors(header, &header.layers[layer]).ok_or_else(|| too_large(&name))?,
            None => {
                let out = |(at, tensor): (usize, &forebay_store::native::header::Tensor)| OutTensor {
                    name: tensor.name.clone(),
                    dtype: tensor.dtype.to_string(),
                    shape: tensor.shape.clone(),
                    bytes: tensor.len,
                    from: From::Resident(at),
                };
                header.tensors.iter().enumerate().map(out).collect()
            }
        };
        safetensors::sort(&mut tensors);
        let start = safetensors::header(&tensors).map_err(|tensor| too_large(&tensor.name))?;
        let mut size = start.len() as u64;
        let mut places = Vec::with_capacity(tensors.len());
        for tensor in &tensors {
            places.push(size);
            size = size.checked_add(tensor.bytes).ok_or_else(|| too_large(&name))?;
        }
        Ok(Self { name, number, tensors, header: start, places, size })
    }

    /// The tensors, for finding out whether the file is finished.
    fn checked(&self) -> Vec<Checked> {
        let parts = self.tensors.iter().zip(&self.places);
        parts.map(|(tensor, &offset)| Checked { offset, len: tensor.bytes, crc: 0 }).collect()
    }
}

fn layer_tensors(header: &Header, layer: &Layer) -> Option<Vec<OutTensor>> {
    let matrices = |record: &Record| &header.kinds[usize::from(record.kind)].matrices;
    let mut tensors = Vec::new();
    if layer.fused {
        let [gate, _, down] = matrices(&layer.records[0]);
        for (part, matrix, times) in [(0, gate, 2), (2, down, 1)] {
            let experts = layer.records.len() as u64;
            tensors.push(OutTensor {
                name: layer.name(part, 0),
                dtype: matrix.dtype.to_string(),
                shape: vec![experts, matrix.weight.rows.checked_mul(times)?, matrix.weight.cols],
                bytes: matrix.weight.payload()?.checked_mul(times)?.checked_mul(experts)?,
                from: From::Fused(part),
            });
        }
        return Some(tensors);
    }
    for (expert, record) in layer.records.iter().enumerate() {
        for (part, matrix) in matrices(record).iter().enumerate() {
            let Matrix { weight, dtype, shape, scales_shape, .. } = matrix;
            let name = layer.name(part, expert);
            let scales_name = weight.scales_name(&name);
            let (bytes, from) = (weight.payload()?, From::Expert { expert, part, scales: false });
            tensors.push(OutTensor { name, dtype: dtype.to_string(), shape: shape.clone(), bytes, from });
            if let Some(name) = scales_name {
                let (dtype, shape, bytes) = ("F32".to_owned(), scales_shape.clone(), weight.scales()?);
                let from = From::Expert { expert, part, scales: true };
                tensors.push(OutTensor { name, dtype, shape, bytes, from });
            }
        }
    }
    Some(tensors)
}

struct Writer<'a> {
    out: &'a Output,
    path: &'a Path,
    file: Behind,
    /// Where the file is written next.
    at: u64,
    /// The checksum of what was written of each tensor.
    crcs: Vec<u32>,
    cancel: &'a forebay_core::CancelToken,
    written: &'a mut dyn FnMut(u64),
}

impl Writer<'_> {
    fn write(&mut self, header: &Header, shards: &[Shard], threads: usize) -> Result<(), PackError> {
        self.put(0, &self.out.header)?;
        match header.layer_in(self.out.number) {
            Some(layer) => self.experts(header, &header.layers[layer], shards, threads)?,
            None => self.residents(header, shards)?,
        }
        self.file.sync().map_err(|cause| PackError::at("write", self.path, cause))
    }

    fn put(&mut self, offset: u64, bytes: &[u8]) -> Result<(), PackError> {
        if self.cancel.is_cancelled() {
            return Err(PackError::Cancelled);
        }
        let failed = |cause| PackError::at("write", self.path, cause);
        if offset != self.at {
            self.file.seek(SeekFrom::Start(offset)).map_err(failed)?;
        }
        self.file.write_all(bytes).map_err(failed)?;
        self.at = offset + bytes.len() as u64;
        (self.written)(bytes.len() as u64);
        Ok(())
    }

    /// Adds `bytes`, which begin at byte `within` of a tensor and follow those that were added before.
    fn add(&mut self, tensor: usize, within: u64, bytes: &[u8]) -> Result<(), PackError> {
        self.put(self.out.places[tensor] + within, bytes)?;
        self.crcs[tensor] = crc32c::crc32c_append(self.crcs[tensor], bytes);
        Ok(())
    }

    fn residents(&mut self, header: &Header, shards: &[Shard]) -> Result<(), PackError> {
        let shard = &shards[0];
        let mut bytes = vec![0; PIECE];
        let out = self.out;
        for (number, wanted) in out.tensors.iter().enumerate() {
            let From::Resident(at) = wanted.from else { continue };
            let tensor = &header.tensors[at];
            for first in (0..tensor.len).step_by(PIECE) {
                let piece = &mut bytes[..(tensor.len - first).min(PIECE as u64) as usize];
                read_exact_at(&*shard.file, &shard.path, piece, tensor.offset + first)
                    .map_err(|cause| PackError::source(&tensor.name, cause))?;
                self.add(number, first, piece)?;
            }
            let part = Checked { offset: tensor.offset, len: tensor.len, crc: tensor.crc };
            compare(shard, part, self.crcs[number])
                .map_err(|cause| PackError::source(&tensor.name, cause))?;
        }
        Ok(())
    }

    fn experts(
        &mut self,
        header: &Header,
        layer: &Layer,
        shards: &[Shard],
        threads: usize,
    ) -> Result<(), PackError> {
        let shard = &shards[layer.file as usize];
        let tensors = self.out.tensors.iter().enumerate();
        let numbers: std::collections::HashMap<From, usize> = tensors.map(|(at, t)| (t.from, at)).collect();
        let take_apart = |&expert: &usize| {
            let Record { offset, len, crc, kind, coded: how } = layer.records[expert];
            let mut record = vec![0; len as usize];
            read_exact_at(&*shard.file, &shard.path, &mut record, offset)?;
            compare(shard, Checked { offset, len, crc }, crc32c::crc32c(&record))?;
            let kind = &header.kinds[usize::from(kind)];
            if let Some(how) = how {
                record = coded::decode(kind, &how, &record).map_err(|error| {
                    let (path, reason) = (shard.path.clone(), error.to_string());
                    ReadError::Transform { path, offset, reason }
                })?;
            }
            Ok(kind.matrices.each_ref().map(|matrix| expert::matrix(&record, matrix)))
        };
        let experts: Vec<usize> = (0..layer.records.len()).collect();
        in_order(&experts, threads, 0, take_apart, |&expert, parts: Result<_, ReadError>| {
            let what = || format!("expert {expert} of layer {}", layer.layer);
            let parts = parts.map_err(|cause| PackError::source(what(), cause))?;
            for (part, (codes, scales)) in parts.into_iter().enumerate() {
                if layer.fused {
                    // Gates and ups take turns in one tensor.
                    let (tensor, turn) = if part == 2 { (2, expert) } else { (0, 2 * expert + part) };
                    self.add(numbers[&From::Fused(tensor)], turn as u64 * codes.len() as u64, &codes)?;
                    continue;
                }
                self.add(numbers[&From::Expert { expert, part, scales: false }], 0, &codes)?;
                if !scales.is_empty() {
                    self.add(numbers[&From::Expert { expert, part, scales: true }], 0, &scales)?;
                }
            }
            Ok(())
        })
    }
}

/// An error if what was read of the container is not what was written.
fn compare(shard: &Shard, part: Checked, found: u32) -> Result<(), ReadError> {
    let Checked { offset, len, crc: expected } = part;
    match found == expected {
        true => Ok(()),
        false => {
            Err(ReadError::Checksum { path: shard.path.clone(), offset, len: len as usize, expected, found })
        }
    }
}
