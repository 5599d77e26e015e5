//! Reading a whole file against the checksums of its parts.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use forebay_io::file::open_regular;
use forebay_store::native::header::Checked;

/// Bytes that are read at a time.
const PIECE: usize = 1 << 20;

/// What was found in a file.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// The checksum of each part.
    pub crcs: Vec<u32>,
    /// The first byte outside the parts that is not as it must be.
    pub stray: Option<u64>,
}

/// Reads the file `path`: `start`, then the parts in file order with zeros between and behind them, `size` bytes in
/// all. The parts' own checksums are not looked at. `each` gets the bytes of every piece that was read, and may end it.
pub fn scan(
    path: &Path,
    start: &[u8],
    parts: &[Checked],
    size: u64,
    each: &mut dyn FnMut(u64) -> io::Result<()>,
) -> io::Result<Scanned> {
    let mut reader = Pieces { file: open_regular(path)?, piece: Vec::new(), at: 0, told: each };
    let mut found = Scanned::default();
    let mut at = 0;
    let mut outside = start;
    for part in parts.iter().chain([&Checked { offset: size, len: 0, crc: 0 }]) {
        let gap = part.offset.saturating_sub(at);
        reader.take(gap, &mut |at, bytes| {
            for (at, byte) in (at..).zip(bytes) {
                let (expected, rest) = outside.split_first().unwrap_or((&0, &[]));
                outside = rest;
                if byte != expected {
                    found.stray.get_or_insert(at);
                }
            }
        })?;
        if part.offset == size {
            break;
        }
        let mut crc = 0;
        reader.take(part.len, &mut |_, bytes| crc = crc32c::crc32c_append(crc, bytes))?;
        found.crcs.push(crc);
        at = part.offset + part.len;
    }
    Ok(found)
}

struct Pieces<'a> {
    file: File,
    piece: Vec<u8>,
    at: u64,
    told: &'a mut dyn FnMut(u64) -> io::Result<()>,
}

impl Pieces<'_> {
    /// The next `len` bytes, with the place of each run of them.
    fn take(&mut self, mut len: u64, each: &mut dyn FnMut(u64, &[u8])) -> io::Result<()> {
        while len > 0 {
            let here = len.min(PIECE as u64) as usize;
            self.piece.resize(here, 0);
            self.file.read_exact(&mut self.piece)?;
            each(self.at, &self.piece);
            self.at += here as u64;
            (self.told)(here as u64)?;
            len -= here as u64;
        }
        Ok(())
    }
}
