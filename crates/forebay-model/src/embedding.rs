//! The token embeddings: in memory, or read from disk row by row.
//!
//! A token needs one row of the matrix, so keeping it on disk costs one small read per
//! token and frees the whole matrix for experts. Either way a row is the same numbers.

use std::sync::atomic::{AtomicU64, Ordering};

use forebay_core::format::FP8_BLOCK;
use forebay_core::{Format, MatrixView, quant};
use forebay_io::{ReadError, Shard, read_exact_at};
use forebay_store::layout::{Extent, WeightLayout};

use crate::snapshot::ResidentTensor;
use crate::weights::{Files, Matrix, WeightError, compare, read_extent};

/// Where the embeddings are while the model runs. Never changes a bit.
///
/// A head that shares its matrix with the embeddings would have to keep it in memory; in
/// this family the head always has a matrix of its own
/// ([`crate::SnapshotError::TiedHead`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EmbeddingPlace {
    /// Loaded with the other weights.
    #[default]
    Memory,
    /// Left in its file.
    Disk,
}

impl std::fmt::Display for EmbeddingPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            EmbeddingPlace::Memory => "memory",
            EmbeddingPlace::Disk => "disk",
        })
    }
}

/// The token embeddings, `[vocab, hidden]`.
#[derive(Debug)]
pub enum Embedding {
    /// All of them.
    Memory(Matrix),
    /// A file to read them from.
    Disk(DiskRows),
}

impl Embedding {
    /// Writes the embedding of every token, `[tokens, hidden]`.
    ///
    /// # Panics
    /// If a token is outside the vocabulary or `out` has another length.
    pub fn rows(&self, tokens: &[u32], out: &mut [f32]) -> Result<(), WeightError> {
        let width = out.len() / tokens.len().max(1);
        let rows = tokens.iter().map(|token| *token as usize).zip(out.chunks_exact_mut(width.max(1)));
        match self {
            Embedding::Memory(matrix) => rows.for_each(|(token, out)| matrix.decode_row(token, out)),
            Embedding::Disk(disk) => {
                let mut buffer = RowBuffer::default();
                for (token, out) in rows {
                    disk.read_row(token, &mut buffer, out)?;
                }
            }
        }
        Ok(())
    }

    /// Bytes read from the file so far; 0 if all are in memory.
    pub fn bytes_read(&self) -> u64 {
        match self {
            Embedding::Memory(_) => 0,
            Embedding::Disk(disk) => disk.bytes_read.load(Ordering::Relaxed),
        }
    }
}

/// A matrix whose rows stay in the file.
pub struct DiskRows {
    tensor: ResidentTensor,
    codes: Shard,
    /// The file of the scales; that of the codes if there are none.
    scales: Shard,
    bytes_read: AtomicU64,
    /// CRC32C of each row's codes and scales; empty if the container has none.
    checks: Vec<u32>,
}

/// Bytes that are checked at a time.
const PIECE: u64 = 1 << 20;

/// One row as it was read.
#[derive(Default)]
struct RowBuffer {
    codes: Vec<u8>,
    scale_bytes: Vec<u8>,
    scales: Vec<f32>,
}

impl DiskRows {
    /// The rows of `tensor`, whose layout names its files by their place in `shards`.
    ///
    /// # Errors
    /// If the container has checksums and they cannot be read, or the bytes are others.
    pub(crate) fn new(tensor: &ResidentTensor, files: Files<'_>) -> Result<Self, WeightError> {
        let codes = tensor.layout.codes;
        let scales = tensor.layout.scales.unwrap_or(codes);
        let file = |extent: Extent| files.shards[extent.shard as usize].clone();
        let checks = row_checks(tensor, files)?;
        let bytes_read = AtomicU64::new(0);
        Ok(Self { tensor: tensor.clone(), codes: file(codes), scales: file(scales), bytes_read, checks })
    }

    fn read_row(&self, row: usize, buffer: &mut RowBuffer, out: &mut [f32]) -> Result<(), WeightError> {
        let &WeightLayout { format, rows, cols, codes, scales, .. } = &self.tensor.layout;
        assert!(row < rows, "row {row} of {rows}");
        // Checked with the file: the whole matrix can be addressed, so a row can.
        let row_scales = format.scale_count(1, cols).unwrap_or(0);
        self.read(&self.codes, codes, row, format.row_bytes(cols).unwrap_or(0), &mut buffer.codes)?;
        buffer.scales.clear();
        buffer.scale_bytes.clear();
        if let Some(scales) = scales {
            let scale_row = if format == Format::Fp8Block { row / FP8_BLOCK } else { row };
            self.read(&self.scales, scales, scale_row, 4 * row_scales, &mut buffer.scale_bytes)?;
            let (words, _) = buffer.scale_bytes.as_chunks::<4>();
            buffer.scales.extend(words.iter().map(|word| f32::from_le_bytes(*word)));
        }
        if let Some(expected) = self.checks.get(row) {
            let found = crc32c::crc32c_append(crc32c::crc32c(&buffer.codes), &buffer.scale_bytes);
            let len = buffer.codes.len() as u64;
            let row = Extent { offset: codes.offset + row as u64 * len, len, ..codes };
            compare(&self.tensor, &self.codes, row, *expected, found)?;
        }
        let view = MatrixView::new(format, 1, cols, &buffer.codes, &buffer.scales)
            .expect("one row of a checked layout");
        quant::decode_row(&view, 0, out);
        let loaded = self.tensor.loaded_format;
        if loaded != format {
            let fail = |cause| WeightError::Encode { tensor: self.tensor.name.clone(), cause };
            let encoded = quant::encode(loaded, 1, cols, out).map_err(fail)?;
            let view = MatrixView::new(loaded, 1, cols, &encoded.codes, &encoded.scales)
                .expect("one row, as it was just encoded");
            quant::decode_row(&view, 0, out);
        }
        Ok(())
    }

    /// Row `row` of `extent`, whose rows have `len` bytes.
    fn read(
        &self,
        shard: &Shard,
        extent: Extent,
        row: usize,
        len: usize,
        bytes: &mut Vec<u8>,
    ) -> Result<(), WeightError> {
        bytes.resize(len, 0);
        let offset = extent.offset + row as u64 * len as u64;
        read_exact_at(&*shard.file, &shard.path, bytes, offset)
            .map_err(|cause: ReadError| WeightError::Read { tensor: self.tensor.name.clone(), cause })?;
        self.bytes_read.fetch_add(len as u64, Ordering::Relaxed);
        Ok(())
    }
}

/// The checksums of single rows. A container with checksums that has none of these is read through once, so that no
/// row is used unchecked.
fn row_checks(tensor: &ResidentTensor, files: Files<'_>) -> Result<Vec<u32>, WeightError> {
    let codes = tensor.layout.codes;
    let Some(stored) = files.catalog.native().and_then(|native| native.tensor_at(codes)) else {
        return Ok(Vec::new());
    };
    if let Some(checks) = stored.row_checks {
        let table = Extent { offset: checks.offset, len: 4 * tensor.layout.rows as u64, ..codes };
        let bytes = read_extent(tensor, files.shards, table)?;
        let shard = &files.shards[table.shard as usize];
        compare(tensor, shard, table, checks.crc, crc32c::crc32c(&bytes))?;
        return Ok(bytes.as_chunks::<4>().0.iter().map(|word| u32::from_le_bytes(*word)).collect());
    }
    for extent in [Some(codes), tensor.layout.scales].into_iter().flatten() {
        let mut crc = 0;
        for first in (0..extent.len).step_by(PIECE as usize) {
            let piece =
                Extent { offset: extent.offset + first, len: PIECE.min(extent.len - first), ..extent };
            crc = crc32c::crc32c_append(crc, &read_extent(tensor, files.shards, piece)?);
        }
        files.compare(tensor, extent, || crc)?;
    }
    Ok(Vec::new())
}

impl std::fmt::Debug for DiskRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DiskRows")
            .field("tensor", &self.tensor.name)
            .field("file", &self.codes.path)
            .finish_non_exhaustive()
    }
}
