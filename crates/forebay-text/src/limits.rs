//! Size limits for files read whole into memory, so that a hostile file cannot exhaust it.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Largest accepted `tokenizer.json`, in bytes (GLM-5.2's is about 20 MB).
pub(crate) const TOKENIZER_JSON: u64 = 64 << 20;
/// Largest accepted `config.json`, `generation_config.json` or `tokenizer_config.json`, in bytes.
pub(crate) const CONFIG_JSON: u64 = 16 << 20;
/// Largest accepted chat template source, in bytes.
pub(crate) const TEMPLATE: u64 = 1 << 20;

/// What [`read_capped`] can answer besides the bytes.
pub(crate) enum ReadError {
    Io(io::Error),
    TooLarge,
}

/// Reads a whole file of at most `limit` bytes. The limit bounds what is read, not what the directory entry
/// says, so a pipe or a file that grows meanwhile is bounded too.
pub(crate) fn read_capped(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    let file = File::open(path).map_err(ReadError::Io)?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(ReadError::Io)?;
    if bytes.len() as u64 > limit { Err(ReadError::TooLarge) } else { Ok(bytes) }
}
