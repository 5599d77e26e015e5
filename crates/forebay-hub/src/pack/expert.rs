//! One expert: its record from its tensors, and the tensors from the record.

use forebay_core::MatrixView;
use forebay_io::{ReadError, Shard, read_exact_at};
use forebay_store::layout::{Extent, WeightLayout};
use forebay_store::native::header::{Layout, Matrix, RecordKind, Weight};

/// Reads bytes of a model's file.
pub fn read(shards: &[Shard], extent: Extent, bytes: &mut Vec<u8>) -> Result<(), ReadError> {
    let shard = &shards[extent.shard as usize];
    // It was checked that what is read can be addressed.
    bytes.resize(extent.len as usize, 0);
    read_exact_at(&*shard.file, &shard.path, bytes, extent.offset)
}

/// The record of the expert whose matrices are `sources`.
pub fn record(
    shards: &[Shard],
    kind: &RecordKind,
    sources: &[WeightLayout; 3],
) -> Result<Vec<u8>, ReadError> {
    let mut record = vec![0; kind.len as usize];
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for (matrix, source) in kind.matrices.iter().zip(sources) {
        read(shards, source.codes, &mut codes)?;
        scales.clear();
        if let Some(extent) = source.scales {
            read(shards, extent, &mut scales)?;
        }
        put(&mut record, matrix, &codes, &scales);
    }
    Ok(record)
}

/// Puts a matrix at its place in a record: its codes and scales as they are in the source.
pub fn put(record: &mut [u8], matrix: &Matrix, codes: &[u8], scales: &[u8]) {
    let place = &mut record[matrix.codes as usize..];
    match matrix.weight.panels().filter(|_| matrix.layout == Layout::Panels) {
        Some(panels) => {
            let numbers: Vec<f32> =
                scales.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
            let Weight { format, rows, cols } = matrix.weight;
            let view = MatrixView::new(format, rows as usize, cols as usize, codes, &numbers)
                .expect("layouts are checked");
            panels.pack(&view, &mut place[..panels.bytes()]);
        }
        None => {
            place[..codes.len()].copy_from_slice(codes);
            record[matrix.scales as usize..][..scales.len()].copy_from_slice(scales);
        }
    }
}

/// Codes and scales of a matrix of a record, as they were in the source.
pub fn matrix(record: &[u8], matrix: &Matrix) -> (Vec<u8>, Vec<u8>) {
    // Checked with the header: everything lies within the record.
    let len = |bytes: Option<u64>| bytes.unwrap_or(0) as usize;
    let place = &record[matrix.codes as usize..];
    match matrix.weight.panels().filter(|_| matrix.layout == Layout::Panels) {
        Some(panels) => {
            let mut codes = vec![0; len(matrix.weight.payload())];
            let mut scales = vec![0; len(matrix.weight.scales())];
            panels.unpack(&place[..panels.bytes()], &mut codes, &mut scales);
            (codes, scales)
        }
        None => {
            let scales = &record[matrix.scales as usize..][..len(matrix.scales_len())];
            (place[..len(matrix.codes_len())].to_vec(), scales.to_vec())
        }
    }
}
