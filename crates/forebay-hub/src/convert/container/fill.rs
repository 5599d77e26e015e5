//! The bytes of one file that would be packed, on their way into the container.
//!
//! What they left behind is remembered in a small file: the checksum of everything that was filled, and the pages that
//! the container's identity is made of. It is written once they are on the disk, and counts only if what is there still
//! has these checksums.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_io::file::{check_irregular, open_regular, read_regular};

use super::super::error::ConvertError;
use super::super::write::HashedFile;
use super::route::{Place, Route, What};
use super::{ASIDE, Container, inner, path, read_exact_at};
use crate::digest::FileDigest;
use crate::output::behind::Behind;
use crate::output::folder::MAX_STATE_BYTES;
use crate::pack::expert;
use crate::pack::identity::{SAMPLES, sample_of};

/// Bytes that are read at a time.
const PIECE: u64 = 1 << 20;

/// The name of the small file of output `number`, within the folder of the result.
pub fn made_name(number: usize) -> String {
    format!("{ASIDE}/{}", made_file(number))
}

fn made_file(number: usize) -> String {
    format!("{number:05}.made")
}

/// The size of that file.
pub fn made_bytes(route: &Route, output_bytes: u64) -> u64 {
    let pages = (0..SAMPLES).map(|sample| sample_of(output_bytes, sample)).map(|page| page.end - page.start);
    4 * route.places.len() as u64 + pages.sum::<u64>()
}

/// What is in it.
pub struct Made {
    /// By [place](Route::places).
    pub crcs: Vec<u32>,
    /// The pages, one behind another.
    pub pages: Vec<u8>,
}

/// Reads it.
pub fn made(dir: &Path, number: usize, route: &Route) -> Result<Made, ConvertError> {
    let path = dir.join(made_name(number));
    let bytes =
        read_regular(&path, MAX_STATE_BYTES).map_err(|cause| ConvertError::at("read", &path, cause))?;
    let (words, pages) =
        bytes.split_at_checked(4 * route.places.len()).ok_or_else(|| inner("it is cut short"))?;
    let crcs = words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
    Ok(Made { crcs, pages: pages.to_vec() })
}

/// Whether everything that output `number` fills is in the container and has its checksum.
pub fn is_filled(
    container: &Container,
    dir: &Path,
    number: usize,
    cancel: &CancelToken,
) -> Result<bool, ConvertError> {
    let route = &container.routes[number];
    let made = made(dir, number, route)?;
    let mut piece = Vec::new();
    let mut open: Option<(usize, File, PathBuf)> = None;
    for (place, expected) in route.places.iter().zip(made.crcs) {
        if cancel.is_cancelled() {
            return Err(ConvertError::Cancelled);
        }
        let planned = &container.plan.header.files[place.file];
        if open.as_ref().is_none_or(|(file, ..)| *file != place.file) {
            let path = path(dir, &planned.name);
            let Ok(file) = open_regular(&path) else { return Ok(false) };
            if file.metadata().map_or(0, |meta| meta.len()) != planned.size {
                return Ok(false);
            }
            open = Some((place.file, file, path));
        }
        let Some((_, file, path)) = &open else { return Ok(false) };
        let mut crc = 0;
        for first in (0..place.len).step_by(PIECE as usize) {
            piece.resize(PIECE.min(place.len - first) as usize, 0);
            read_exact_at(file, path, &mut piece, place.offset + first)?;
            crc = crc32c::crc32c_append(crc, &piece);
        }
        if crc != expected {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A file going by.
pub struct Fill<'a> {
    container: &'a Container,
    route: &'a Route,
    number: usize,
    /// Its size.
    bytes: u64,
    files: Files<'a>,
    at: u64,
    /// The part that is going by.
    part: usize,
    /// Checksum of what went by of it.
    crc: u32,
    /// Codes and scales of gate, up and down of the expert that is going by.
    held: [[Vec<u8>; 2]; 3],
    /// Its record.
    record: Vec<u8>,
    crcs: Vec<u32>,
    pages: Vec<Vec<u8>>,
}

impl<'a> Fill<'a> {
    /// Output `number`, of `bytes` bytes, on its way into the container in `dir`.
    pub fn new(container: &'a Container, dir: &'a Path, number: usize, bytes: u64) -> Self {
        let route = &container.routes[number];
        let files = Files { dir, container, open: BTreeMap::new() };
        let pages = vec![Vec::new(); SAMPLES as usize];
        let (held, record, crcs) = (Default::default(), Vec::new(), Vec::with_capacity(route.places.len()));
        Self { container, route, number, bytes, files, at: 0, part: 0, crc: 0, held, record, crcs, pages }
    }

    /// Takes the next bytes of the file.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), ConvertError> {
        self.sample(bytes);
        while !bytes.is_empty() {
            let part =
                self.route.parts.get(self.part).ok_or_else(|| inner("a file is longer than planned"))?;
            // The header stays behind.
            let end = if self.at < part.at { part.at } else { part.at + part.len };
            let here = bytes.len().min((end - self.at) as usize);
            let (now, rest) = bytes.split_at(here);
            if self.at >= part.at {
                match part.what {
                    What::Tensor(tensor) => {
                        let to = self.container.plan.header.tensors[tensor].offset + (self.at - part.at);
                        self.files.write(0, to, now)?;
                        self.crc = crc32c::crc32c_append(self.crc, now);
                    }
                    What::Matrix { part, scales, .. } => {
                        self.held[part][usize::from(scales)].extend_from_slice(now);
                    }
                }
            }
            self.at += here as u64;
            bytes = rest;
            if self.at == part.at + part.len {
                if let Some(place) = part.ends {
                    self.end(self.route.places[place])?;
                }
                self.part += 1;
            }
        }
        Ok(())
    }

    /// A tensor or an expert went by as a whole.
    fn end(&mut self, place: Place) -> Result<(), ConvertError> {
        if let What::Matrix { layer, expert, .. } = place.what {
            let header = &self.container.plan.header;
            let kind = &header.kinds[usize::from(header.layers[layer].records[expert].kind)];
            let record = &mut self.record;
            record.clear();
            record.resize(kind.len as usize, 0);
            for (matrix, [codes, scales]) in kind.matrices.iter().zip(&mut self.held) {
                expert::put(record, matrix, codes, scales);
                codes.clear();
                scales.clear();
            }
            self.files.write(place.file, place.offset, record)?;
            self.crc = crc32c::crc32c(record);
        }
        self.crcs.push(std::mem::take(&mut self.crc));
        Ok(())
    }

    /// Keeps what belongs to a page that the identity is made of.
    fn sample(&mut self, bytes: &[u8]) {
        let (first, end) = (self.at, self.at + bytes.len() as u64);
        for (sample, page) in (0..).zip(&mut self.pages) {
            let wanted = sample_of(self.bytes, sample);
            let (from, to) = (wanted.start.max(first), wanted.end.min(end));
            if from < to {
                page.extend_from_slice(&bytes[(from - first) as usize..(to - first) as usize]);
            }
        }
    }

    /// Everything went by: makes sure that it is on the disk, and writes the small file that says so.
    pub fn publish(mut self) -> Result<FileDigest, ConvertError> {
        if self.at != self.bytes {
            return Err(inner("a file is shorter than planned"));
        }
        self.files.sync()?;
        let folder = self.files.dir.join(ASIDE);
        fs::create_dir_all(&folder).map_err(|cause| ConvertError::at("create", &folder, cause))?;
        let mut file = HashedFile::create(&folder, &made_file(self.number))?;
        file.write(&self.crcs.iter().flat_map(|crc| crc.to_le_bytes()).collect::<Vec<_>>())?;
        self.pages.iter().try_for_each(|page| file.write(page))?;
        Ok(file.publish()?)
    }
}

/// Weight files of the container that are being filled.
pub struct Files<'a> {
    pub dir: &'a Path,
    pub container: &'a Container,
    pub open: BTreeMap<usize, (Behind, PathBuf)>,
}

impl Files<'_> {
    /// Writes bytes of file `number`.
    pub fn write(&mut self, number: usize, offset: u64, bytes: &[u8]) -> Result<(), ConvertError> {
        let (file, path) = self.file(number)?;
        let written = file.seek(SeekFrom::Start(offset)).and_then(|_| file.write_all(bytes));
        written.map_err(|cause| ConvertError::at("write", path, cause))
    }

    /// File `number`. One that is not there begins as nothing but a hole.
    fn file(&mut self, number: usize) -> Result<&mut (Behind, PathBuf), ConvertError> {
        if !self.open.contains_key(&number) {
            let planned = &self.container.plan.header.files[number];
            let path = path(self.dir, &planned.name);
            let open = || {
                check_irregular(&path)?;
                let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path)?;
                if file.metadata()?.len() != planned.size {
                    file.set_len(planned.size)?;
                }
                Ok(file)
            };
            let file = open().map_err(|cause| ConvertError::at("create", &path, cause))?;
            self.open.insert(number, (Behind::new(file), path));
        }
        self.open.get_mut(&number).ok_or_else(|| inner("a file is not open"))
    }

    /// Makes sure that what was written is on the disk.
    pub fn sync(&mut self) -> Result<(), ConvertError> {
        let sync = |(file, path): &mut (Behind, PathBuf)| {
            file.sync().map_err(|cause| ConvertError::at("write", path, cause))
        };
        self.open.values_mut().try_for_each(sync)
    }
}
