//! A folder that holds a Forebay container, checked against its header as far as that goes without reading weights.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use super::header::{Header, PAGE, Record, RecordKind, SideFile, Tensor};
use super::{FIXED_BYTES, HEADER_NAME, MAX_BODY_BYTES, NO_LAYER, NativeError, VERSION};
use crate::config::read_limited;
use crate::layout::Extent;

/// A container that was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Native {
    dir: PathBuf,
    header: Header,
}

impl Native {
    /// Whether `dir` holds a header of a container, sound or not.
    pub fn is_at(dir: &Path) -> bool {
        fs::symlink_metadata(dir.join(HEADER_NAME)).is_ok()
    }

    /// Reads and checks the header alone.
    pub fn read_header(dir: &Path) -> Result<Header, NativeError> {
        let path = dir.join(HEADER_NAME);
        let bytes = read_limited(&path, MAX_BODY_BYTES + FIXED_BYTES as u64);
        match bytes {
            Ok(bytes) => Header::parse(&bytes, &path),
            Err(error) => Err(NativeError::Read { path, error }),
        }
    }

    /// Opens the container in `dir`: its header is sound, every file it names is there and has the right size, weight
    /// files begin as files of this model do, and configuration files are those that were packed.
    pub fn open(dir: &Path) -> Result<Self, NativeError> {
        let header = Self::read_header(dir)?;
        for file in &header.side_files {
            check_side_file(dir, file)?;
        }
        for (number, file) in header.files.iter().enumerate() {
            expect_size(dir, &file.name, file.size)?;
            read_preamble(dir, &header, number)?;
        }
        Ok(Self { dir: dir.to_owned(), header })
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What the header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// How many experts layer `layer` has in records; `None` if its experts, should it have any, are not in records.
    pub fn experts(&self, layer: usize) -> Option<usize> {
        let found = self.header.layers.iter().find(|found| found.layer as usize == layer);
        found.map(|layer| layer.records.len())
    }

    /// The record of an expert, and the index of its file.
    pub fn record(&self, layer: usize, expert: usize) -> Option<(u32, &Record, &RecordKind)> {
        let found = self.header.layers.iter().find(|found| found.layer as usize == layer)?;
        let record = found.records.get(expert)?;
        // Checked with the header.
        Some((found.file, record, &self.header.kinds[usize::from(record.kind)]))
    }

    /// The tensor of the resident file that takes exactly these bytes.
    pub fn tensor_at(&self, extent: Extent) -> Option<&Tensor> {
        let tensors = &self.header.tensors;
        let first = tensors.partition_point(|tensor| tensor.offset < extent.offset);
        let here = tensors[first..].iter().take_while(|tensor| tensor.offset == extent.offset);
        here.into_iter().find(|tensor| tensor.len == extent.len && extent.shard == 0)
    }

    /// Tensors of the source that are in records.
    pub fn record_tensors(&self) -> usize {
        let of = |record: &Record| {
            let matrices = &self.header.kinds[usize::from(record.kind)].matrices;
            matrices.iter().map(|m| 1 + usize::from(m.weight.scales() > Some(0))).sum::<usize>()
        };
        let layers = self.header.layers.iter();
        layers.map(|layer| if layer.fused { 2 } else { layer.records.iter().map(of).sum() }).sum()
    }
}

/// The first page of weight file `number`: what tells it from every other file.
pub fn preamble(header: &Header, number: usize) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    let layer = header.files[number].layer.unwrap_or(NO_LAYER);
    // What compares copies of safetensors files reads the length of a header here.
    page[..8].copy_from_slice(&(PAGE - 8).to_le_bytes());
    page[8..16].copy_from_slice(b"FOREBAYW");
    page[16..20].copy_from_slice(&VERSION.to_le_bytes());
    page[20..24].copy_from_slice(&(number as u32).to_le_bytes());
    page[24..28].copy_from_slice(&layer.to_le_bytes());
    page[32..64].copy_from_slice(&header.identity);
    page
}

/// Checks the first page of weight file `number`.
pub fn read_preamble(dir: &Path, header: &Header, number: usize) -> Result<(), NativeError> {
    let path = dir.join(&header.files[number].name);
    let mut found = vec![0; PAGE as usize];
    let read = File::open(&path).and_then(|mut file| file.read_exact(&mut found));
    if let Err(error) = read {
        return Err(NativeError::Read { path, error });
    }
    let expected = preamble(header, number);
    match (0..found.len()).find(|&at| found[at] != expected[at]) {
        None => Ok(()),
        Some(at) => Err(NativeError::Preamble { path, at, expected: expected[at], found: found[at] }),
    }
}

/// Checks that a file of the container is there, is a file, and has this size.
pub fn expect_size(dir: &Path, name: &str, expected: u64) -> Result<(), NativeError> {
    let path = dir.join(name);
    match fs::metadata(&path) {
        Ok(found) if !found.is_file() => {
            let error = std::io::Error::new(std::io::ErrorKind::InvalidInput, "it is not a regular file");
            Err(NativeError::Read { path, error })
        }
        Ok(found) if found.len() != expected => Err(NativeError::Size { path, expected, found: found.len() }),
        Ok(_) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Err(NativeError::Missing { dir: dir.to_owned(), name: name.to_owned() })
        }
        Err(error) => Err(NativeError::Read { path, error }),
    }
}

/// Checks that a configuration file is the one that was packed.
pub fn check_side_file(dir: &Path, file: &SideFile) -> Result<(), NativeError> {
    expect_size(dir, &file.name, file.size)?;
    let path = dir.join(&file.name);
    let read = || {
        let mut open = File::open(&path)?;
        let (mut crc, mut piece) = (0, vec![0; 1 << 16]);
        loop {
            match open.read(&mut piece)? {
                0 => return Ok(crc),
                n => crc = crc32c::crc32c_append(crc, &piece[..n]),
            }
        }
    };
    match read() {
        Ok(found) if found == file.crc => Ok(()),
        Ok(found) => Err(NativeError::SideFile { path, expected: file.crc, found }),
        Err(error) => Err(NativeError::Read { path, error }),
    }
}
