//! The Forebay container: a header that describes everything, a file of resident tensors, a file of expert records
//! per layer. docs/format.md specifies it byte by byte.
//!
//! - [`header`]: what a header says, and the rules by which things have their places.
//! - `parse`, `write`: to and from bytes. `open`: a folder, checked against its header.

mod bytes;
mod error;
pub mod header;
mod open;
mod parse;
#[cfg(test)]
mod tests;
mod write;

pub use error::{FormatError, NativeError};
pub use header::Header;
pub use open::{Native, check_side_file, expect_size, preamble, read_preamble};

use std::path::Path;

/// Name of the header file; a folder that has one is a Forebay container.
pub const HEADER_NAME: &str = "model.forebay";
/// The version of the format.
pub const VERSION: u32 = 1;
/// The longest body that is read.
pub const MAX_BODY_BYTES: u64 = 256 << 20;
/// Bytes before the body.
pub const FIXED_BYTES: usize = 32;
/// The longest name.
pub const MAX_NAME: usize = 1024;

const MAGIC: [u8; 8] = *b"FOREBAY\0";
/// The layer of a file without experts.
const NO_LAYER: u32 = u32::MAX;
/// Records are stored as they are.
const CODEC_RAW: u8 = 0;
/// Records hold coded matrices.
const CODEC_CODED: u8 = 1;
/// Scales are stored as f32.
const SCALES_F32: u8 = 0;
/// Some scales are stored as indices.
const SCALES_INDEX: u8 = 1;

impl Header {
    /// Reads the bytes of a header file; `path` is for errors.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, NativeError> {
        let own = || path.to_owned();
        let Some((fixed, body)) = bytes.split_at_checked(FIXED_BYTES).filter(|(f, _)| f.starts_with(&MAGIC))
        else {
            return Err(NativeError::Magic { path: own() });
        };
        let word = |at: usize| u32::from_le_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
        // The version comes first: everything behind it may mean something else in another one.
        let (version, flags) = (word(8), word(12));
        if version != VERSION {
            return Err(NativeError::Version { path: own(), found: version, known: VERSION });
        }
        let checked = |part, bytes: &[u8], expected| match crc32c::crc32c(bytes) {
            found if found == expected => Ok(()),
            found => Err(NativeError::HeaderChecksum { path: own(), part, expected, found }),
        };
        checked("first part", &fixed[..28], word(28))?;
        if flags != 0 {
            return Err(NativeError::Flags { path: own(), found: flags });
        }
        let stated = u64::from(word(16)) | u64::from(word(20)) << 32;
        if stated != body.len() as u64 {
            let (expected, found) = (stated.saturating_add(FIXED_BYTES as u64), bytes.len() as u64);
            return Err(NativeError::HeaderLength { path: own(), expected, found });
        }
        checked("body", body, word(24))?;
        parse::body(body).map_err(|error| NativeError::Format { path: own(), error })
    }
}
