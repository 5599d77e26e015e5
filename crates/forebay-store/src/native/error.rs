//! What can be wrong with a Forebay container.

use std::path::PathBuf;

/// Something in the body of a header that cannot be, with its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("byte {at} of the header: {what} is {found}, expected {expected}")]
pub struct FormatError {
    /// Where, counted from the start of the header file.
    pub at: usize,
    /// What was looked at.
    pub what: String,
    /// What may be there.
    pub expected: String,
    /// What is there.
    pub found: String,
}

/// Why a folder cannot be used as a Forebay container. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NativeError {
    /// A file cannot be opened or read.
    #[error("{}: cannot read it: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// A file that the header names is not there.
    #[error("{}: the container's file {name} is missing; copy it again, or pack the model again", dir.display())]
    Missing {
        /// The folder.
        dir: PathBuf,
        /// The file.
        name: String,
    },
    /// The header does not begin like one.
    #[error("{}: not the header of a Forebay container; copy the file again", path.display())]
    Magic {
        /// The file.
        path: PathBuf,
    },
    /// A later version of the format.
    #[error(
        "{}: version {found} of the Forebay container, this program reads version {known}; \
         use a newer Forebay or pack the model again", path.display()
    )]
    Version {
        /// The file.
        path: PathBuf,
        /// The version found.
        found: u32,
        /// The version that is read.
        known: u32,
    },
    /// The header asks for something that this program does not know.
    #[error("{}: unknown flags {found:#010x} in the header; use a newer Forebay", path.display())]
    Flags {
        /// The file.
        path: PathBuf,
        /// The flags that are not known.
        found: u32,
    },
    /// The header is shorter or longer than it says.
    #[error("{}: the header should have {expected} bytes and has {found}; copy the file again", path.display())]
    HeaderLength {
        /// The file.
        path: PathBuf,
        /// Bytes that it should have.
        expected: u64,
        /// Bytes that it has.
        found: u64,
    },
    /// The header is damaged.
    #[error(
        "{}: the checksum of the header's {part} is {found:#010x}, expected {expected:#010x}; \
         the file is damaged, copy it again", path.display()
    )]
    HeaderChecksum {
        /// The file.
        path: PathBuf,
        /// Which part.
        part: &'static str,
        /// The checksum it states.
        expected: u32,
        /// The checksum it has.
        found: u32,
    },
    /// The header contradicts itself.
    #[error("{}: {error}; the file was not written by Forebay or is of another version", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        error: FormatError,
    },
    /// A file is shorter or longer than the header says.
    #[error("{}: {found} bytes, expected {expected}; copy the file again, or pack the model again", path.display())]
    Size {
        /// The file.
        path: PathBuf,
        /// Bytes by the header.
        expected: u64,
        /// Bytes of the file.
        found: u64,
    },
    /// A weight file begins like another one.
    #[error(
        "{}: byte {at} of the first page is {found:#04x}, expected {expected:#04x}; it is damaged or belongs to \
         another model, copy it again", path.display()
    )]
    Preamble {
        /// The file.
        path: PathBuf,
        /// The first byte that differs.
        at: usize,
        /// What should be there.
        expected: u8,
        /// What is there.
        found: u8,
    },
    /// A configuration file is not the one that was packed.
    #[error(
        "{}: its checksum is {found:#010x}, expected {expected:#010x}; it was changed or damaged after packing: \
         restore it, or change the source and pack again", path.display()
    )]
    SideFile {
        /// The file.
        path: PathBuf,
        /// The checksum by the header.
        expected: u32,
        /// The checksum of the file.
        found: u32,
    },
}
