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
    /// A folder, pipe, device or socket: opening one can wait for ever.
    NotAFile,
}

/// Whether bytes begin with a UTF-8 byte order mark, which JSON parsers refuse with an unreadable message.
pub(crate) fn starts_with_byte_order_mark(bytes: &[u8]) -> bool {
    bytes.starts_with(b"\xEF\xBB\xBF")
}

/// Reads a whole file of at most `limit` bytes. The limit bounds what is read, not what the directory entry
/// says, so a file that grows meanwhile is bounded too. Only regular files are opened.
pub(crate) fn read_capped(path: &Path, limit: u64) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    if !std::fs::metadata(path).map_err(ReadError::Io)?.is_file() {
        return Err(ReadError::NotAFile);
    }
    let file = File::open(path).map_err(ReadError::Io)?;
    file.take(limit.saturating_add(1)).read_to_end(&mut bytes).map_err(ReadError::Io)?;
    if bytes.len() as u64 > limit { Err(ReadError::TooLarge) } else { Ok(bytes) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(unix)]
    #[test]
    fn folders_pipes_and_devices_are_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        let made = std::process::Command::new("mkfifo").arg(&pipe).status().unwrap();
        assert!(made.success());
        for path in [pipe.as_path(), dir.path(), Path::new("/dev/zero")] {
            assert!(matches!(read_capped(path, 10), Err(ReadError::NotAFile)), "{}", path.display());
        }
        let file = dir.path().join("file");
        std::fs::write(&file, "12345").unwrap();
        assert!(matches!(read_capped(&file, 5), Ok(bytes) if bytes == b"12345"));
        assert!(matches!(read_capped(&file, 4), Err(ReadError::TooLarge)));
    }
}
