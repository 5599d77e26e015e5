//! Writing one file: threads make its bytes in pieces, this one writes them in order.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;

use forebay_core::CancelToken;
use forebay_io::file::open_regular;

use super::error::SynthError;
use super::plan::{Shard, Source, Stored};
use super::pool::{Pool, PoolKey};
use super::random::Stream;
use crate::output::file::NewFile;
use crate::output::ordered::{AHEAD, in_order};

/// About how many bytes a thread makes at a time.
const PIECE_BYTES: usize = 4 << 20;

/// Everything that the bytes of a file depend on, and who makes them.
pub struct Maker<'a> {
    /// The pools that the file needs.
    pub pools: &'a BTreeMap<PoolKey, Pool>,
    /// The seed.
    pub seed: u64,
    /// Threads.
    pub threads: usize,
}

/// Part of one tensor.
struct Piece<'a> {
    tensor: &'a Stored,
    /// Bands of a matrix, or elements.
    part: Range<usize>,
}

impl Maker<'_> {
    /// Writes `shard` into `dir`, telling `written` of every piece.
    pub fn write(
        &self,
        dir: &Path,
        shard: &Shard,
        cancel: &CancelToken,
        written: &mut dyn FnMut(u64),
    ) -> Result<(), SynthError> {
        let mut file = NewFile::create(dir, &shard.name)?;
        file.write(&shard.header)?;
        written(shard.header.len() as u64);
        let pieces: Vec<Piece<'_>> = shard.tensors.iter().flat_map(pieces).collect();
        let take = |_: &Piece<'_>, bytes: Vec<u8>| {
            if cancel.is_cancelled() {
                return Err(SynthError::Cancelled);
            }
            file.write(&bytes)?;
            written(bytes.len() as u64);
            Ok(())
        };
        in_order(&pieces, self.threads, AHEAD, |piece| self.make(piece), take)?;
        Ok(file.publish()?)
    }

    fn make(&self, Piece { tensor, part }: &Piece<'_>) -> Vec<u8> {
        match &tensor.source {
            Source::Codes(matrix) => matrix.codes(self.pools, self.seed, part.clone()),
            Source::Scales(matrix) => matrix.scales(self.pools, self.seed, part.clone()),
            Source::Normal { mean, std } => {
                let mut values = vec![0.0; part.len()];
                let mut stream = Stream::new(self.seed, &tensor.name, part.start as u64);
                stream.fill_normal(&mut values, *mean as f32, *std as f32);
                values.iter().flat_map(|value| value.to_le_bytes()).collect()
            }
        }
    }
}

/// The pieces of a tensor. They are part of what the bytes are: a piece of normal numbers has its own stream.
fn pieces(tensor: &Stored) -> Vec<Piece<'_>> {
    let parts = match &tensor.source {
        Source::Codes(matrix) | Source::Scales(matrix) => {
            let row_bytes = tensor.bytes as usize / matrix.rows().max(1);
            matrix.pieces((PIECE_BYTES / row_bytes.max(1)).max(1))
        }
        Source::Normal { .. } => {
            let (values, step) = (tensor.bytes as usize / 4, PIECE_BYTES / 4);
            (0..values).step_by(step).map(|first| first..values.min(first + step)).collect()
        }
    };
    parts.into_iter().map(|part| Piece { tensor, part }).collect()
}

/// Whether `path` is this shard, complete: its size and its header say so.
pub fn is_complete(path: &Path, shard: &Shard) -> Result<bool, SynthError> {
    let failed = |cause| SynthError::at("read", path, cause);
    let mut file = match open_regular(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(cause) => return Err(failed(cause)),
    };
    if file.metadata().map_err(failed)?.len() != shard.bytes {
        return Ok(false);
    }
    let mut header = vec![0; shard.header.len()];
    file.read_exact(&mut header).map_err(failed)?;
    Ok(header == shard.header)
}
