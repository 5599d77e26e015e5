//! What can go wrong while a model is converted, and what to do about it.

use std::io;
use std::path::{Path, PathBuf};

use forebay_core::quant::EncodeError;
use forebay_core::{ByteSize, Format};
use forebay_io::ReadError;
use forebay_store::catalog::CatalogError;
use forebay_store::config::ConfigError;
use forebay_store::json::JsonError;
use forebay_store::layout::LayoutError;
use forebay_store::shard::ShardError;

use super::gguf::GgufSourceError;
use crate::get::GetError;
use crate::known::KnownError;
use crate::output::FileError;
use crate::pack::PackError;

/// Why a model was not converted. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    /// The source's config is not that of a model that can be converted.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The source's config is not valid JSON.
    #[error("config.json of the source: {0}")]
    Json(#[from] JsonError),
    /// The source's files cannot be listed or contradict one another.
    #[error(transparent)]
    Catalog(#[from] CatalogError),
    /// A file of the source cannot be used.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// What is known of the source's bytes cannot be used.
    #[error(transparent)]
    Known(#[from] KnownError),
    /// Weights that the config asks for are missing or malformed.
    #[error("{first}{}", others(*.count))]
    Layout {
        /// The first of them.
        first: LayoutError,
        /// How many there are.
        count: usize,
    },
    /// A weight is quantised already.
    #[error(
        "{file}: tensor {tensor} is quantised already (it has a .qs companion), and quantising it again would lose \
         more; convert the original BF16, F16, F32, FP8 or NVFP4 checkpoint"
    )]
    Quantised {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
    },
    /// An NVFP4 matrix or one of its scales has another shape or type.
    #[error("{file}: tensor {tensor} is {found}, expected {expected}; {advice}")]
    Nvfp4 {
        /// File name of the shard.
        file: String,
        /// The tensor.
        tensor: String,
        /// Its type and shape.
        found: String,
        /// What it should be.
        expected: String,
        /// What that means.
        advice: &'static str,
    },
    /// The scale of an NVFP4 matrix is not a multiplier.
    #[error(
        "tensor {tensor} is {value}, expected a number above 0 and below 1: it looks like the reciprocal that other \
         tools store; convert a checkpoint written by ModelOpt, or the FP8 one"
    )]
    Nvfp4Scale {
        /// The tensor.
        tensor: String,
        /// Its value.
        value: f32,
    },
    /// A weight is no number.
    #[error(
        "tensor {tensor} has {value} at row {row}, column {column}; the source is damaged: get it again \
         (`forebay verify --hash` finds a damaged file)"
    )]
    NotFinite {
        /// The tensor as the result calls it.
        tensor: String,
        /// The value.
        value: f32,
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
    },
    /// A reader would take the groups for others.
    #[error(
        "tensor {tensor}: {asked} with {cols} columns would be read as {read} by the reference engine; \
         choose {read} or another format"
    )]
    Ambiguous {
        /// The tensor.
        tensor: String,
        /// The format asked for.
        asked: Format,
        /// What a reader takes it for.
        read: Format,
        /// Columns of the matrix.
        cols: usize,
    },
    /// The format can be read but not written.
    #[error(
        "--{part} {format}: weights cannot be written so; choose int8, int4-gN, int4-row, int2-row, bf16, f16 or f32"
    )]
    Format {
        /// The part of the model.
        part: &'static str,
        /// The format asked for.
        format: Format,
    },
    /// The MTP layer would be of no use.
    #[error(
        "--mtp {format}: one scale a row rounds the half of eh_proj that sees the token to zero, and no draft would \
         be accepted; choose int8 or int4-gN, or leave the layer out with --skip-mtp"
    )]
    MtpFormat {
        /// The format asked for.
        format: Format,
    },
    /// A format cannot be encoded.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// A byte count does not fit into 64 bits.
    #[error("{tensor} would be too large to address; check config.json of the source")]
    TooLarge {
        /// The tensor.
        tensor: String,
    },
    /// Source and result would be one folder.
    #[error("{} is the source itself, which is never changed; name a new folder", dir.display())]
    SameFolder {
        /// The folder.
        dir: PathBuf,
    },
    /// The folder has something else in it.
    #[error("{} already holds {found}; nothing was changed: name a new folder", dir.display())]
    Occupied {
        /// The folder.
        dir: PathBuf,
        /// What was found.
        found: String,
    },
    /// The folder was begun with other options or from another source.
    #[error(
        "{} was begun with other options or from another source ({changed}); nothing was changed: \
         name a new folder, or give the command it was begun with", dir.display()
    )]
    OtherOptions {
        /// The folder.
        dir: PathBuf,
        /// Which, with both values.
        changed: String,
    },
    /// The record of what was done cannot be understood.
    #[error("{}: {what}; delete the folder {} and convert again", path.display(), path.parent().unwrap_or(path).display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// A file of the source is not what it was when the work was planned.
    #[error("{} changed while it was converted; wait until it is complete, then convert into a new folder", path.display())]
    SourceChanged {
        /// The file.
        path: PathBuf,
    },
    /// A file of the source is not what was recorded of it.
    #[error(
        "{} {difference}: these are not the bytes that were recorded; get it again, or, if you changed it yourself, \
         remove what was recorded (forebay-digests.json, or .forebay/get.json)", path.display()
    )]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found and what was expected.
        difference: String,
    },
    /// A file of the source could not be fetched.
    #[error(transparent)]
    Get(GetError),
    /// A source that hands out one file at a time could not give one.
    #[error("{name}: {what}")]
    Source {
        /// The file.
        name: String,
        /// What went wrong, and what to do.
        what: String,
    },
    /// Another process writes there.
    #[error("another forebay is writing to {}; wait for it, or name another folder", dir.display())]
    Busy {
        /// The folder.
        dir: PathBuf,
    },
    /// The disk has too little room for what comes next.
    #[error(
        "{} needs room for {} ({} and the margin of {}) and its disk has {} free; what is complete is kept: free {}, \
         or lower --margin, and give the same command again",
        dir.display(), ByteSize(bytes.saturating_add(*margin)), ByteSize(*bytes), ByteSize(*margin), ByteSize(*free),
        ByteSize(bytes.saturating_add(*margin).saturating_sub(*free))
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes to be written.
        bytes: u64,
        /// Bytes to be left.
        margin: u64,
        /// Bytes that may be written.
        free: u64,
    },
    /// The disk became full on the way.
    #[error(
        "the disk became full at {}: {cause}; complete files are kept: free some space and give the same command again",
        path.display()
    )]
    Full {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file could not be written.
    #[error(
        "cannot {action} {}: {cause}; complete files are kept: when that is mended, give the same command again",
        path.display()
    )]
    Io {
        /// What was tried, such as "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A GGUF file cannot be converted.
    #[error("{}: {error}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: Box<GgufSourceError>,
    },
    /// The container cannot be planned or completed.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// A weight could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The user stopped it.
    #[error("stopped; complete files are kept, and the same command continues")]
    Cancelled,
}

fn others(count: usize) -> String {
    match count {
        0 | 1 => String::new(),
        n => format!(" ({n} weights cannot be converted; this is the first)"),
    }
}

impl From<FileError> for ConvertError {
    fn from(error: FileError) -> Self {
        let full = error.is_full();
        let FileError { action, path, cause } = error;
        if full { Self::Full { path, cause } } else { Self::Io { action, path, cause } }
    }
}

impl From<GetError> for ConvertError {
    fn from(error: GetError) -> Self {
        match error {
            GetError::Cancelled => Self::Cancelled,
            other => Self::Get(other),
        }
    }
}

impl ConvertError {
    pub(super) fn at(action: &'static str, path: &Path, cause: io::Error) -> Self {
        FileError::new(action, path, cause).into()
    }
}
