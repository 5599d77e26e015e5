//! What can be wrong with a tokenizer.json or a prompt given to the encoder.

use std::path::PathBuf;

/// Why a `tokenizer.json` was refused. `origin` is the file's path, or the name given by the caller.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file could not be read.
    #[error("cannot read {}: {source}; the tokenizer.json of the model must lie beside its weights", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is larger than any real tokenizer.
    #[error(
        "{origin} is larger than {limit} bytes, which no tokenizer needs; check that it is the right file"
    )]
    TooLarge {
        /// Which file.
        origin: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// Not a regular file, so it was not opened.
    #[error("{} is not a regular file; put the model's own file there", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file begins with a UTF-8 byte order mark.
    #[error("{origin} starts with a byte order mark; save it as UTF-8 without one")]
    ByteOrderMark {
        /// Which file.
        origin: String,
    },
    /// Not JSON, or not the shape of a tokenizer.json.
    #[error("{origin} is not a readable tokenizer.json: {source}; fetch it again")]
    Json {
        /// Which file.
        origin: String,
        /// Position and reason.
        source: serde_json::Error,
    },
    /// A field describes an encoder that this one is not; every such difference would change ids.
    #[error("{origin}: field {field} is {found}, expected {expected}; this tokenizer is not supported")]
    Unsupported {
        /// Which file.
        origin: String,
        /// Path of the field, e.g. `model.ignore_merges`.
        field: String,
        /// Its value, shortened.
        found: String,
        /// The value that is supported.
        expected: &'static str,
    },
    /// An id is too large for a table.
    #[error("{origin}: token {token:?} has id {id}, ids up to {limit} are supported; fetch the file again")]
    IdTooLarge {
        /// Which file.
        origin: String,
        /// The token as written.
        token: String,
        /// Its id.
        id: u64,
        /// The largest supported id.
        limit: u32,
    },
    /// Two tokens that must differ share an id or a text.
    #[error("{origin}: {what} {value:?} is used by two {table}; fetch the file again")]
    Duplicate {
        /// Which file.
        origin: String,
        /// "id" or "text".
        what: &'static str,
        /// The shared value.
        value: String,
        /// Where: "vocabulary entries" or "added tokens".
        table: &'static str,
    },
    /// The vocabulary lacks a single-byte symbol, so some text could not be encoded.
    #[error("{origin}: the vocabulary has no symbol for byte 0x{byte:02X}; all 256 are needed")]
    MissingByte {
        /// Which file.
        origin: String,
        /// The byte.
        byte: u8,
    },
    /// A merge that cannot be applied.
    #[error("{origin}: merge number {rank} ({merge:?}) is unusable: {reason}; fetch the file again")]
    BadMerge {
        /// Which file.
        origin: String,
        /// Position in the list, from 0.
        rank: usize,
        /// The merge, parts separated by a space.
        merge: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// More added-token text than any real tokenizer has.
    #[error("{origin}: the added tokens hold {bytes} bytes of text, at most {limit} are supported")]
    TooManyAddedTokens {
        /// Which file.
        origin: String,
        /// Bytes found.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The search automaton for added tokens could not be built.
    #[error("{origin}: cannot search for the added tokens: {source}")]
    AddedTokenSearch {
        /// Which file.
        origin: String,
        /// The reason.
        source: aho_corasick::BuildError,
    },
}

/// Why a rendered prompt could not be encoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The template emitted a control token that this tokenizer does not have.
    #[error(
        "the chat template uses {content:?}, which the tokenizer lacks; template and tokenizer do not belong together"
    )]
    UnknownControl {
        /// The token's text.
        content: String,
    },
}
