//! What can be wrong with a GGUF file, and what to do about it.

/// Why a GGUF file cannot be read. [`ConvertError`](crate::convert::ConvertError) adds the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file does not begin as GGUF files do.
    #[error("it does not begin with the letters GGUF; it is another kind of file, or damaged")]
    Magic,
    /// Another version, or the other byte order.
    #[error(
        "it is GGUF version {found}; versions 2 and 3 in little-endian order are read: convert it with a newer tool"
    )]
    Version {
        /// The version.
        found: u32,
    },
    /// The file ends within its header, or a length in it is larger than what is left.
    #[error("{what} goes beyond the end of the file, or beyond {limit} bytes of header; get the file again")]
    PastEnd {
        /// What was being read.
        what: String,
        /// The longest header that is read.
        limit: u64,
    },
    /// A count or a length is far larger than in any model.
    #[error("{what} is {found}, at most {most} can be; the file is damaged")]
    TooMany {
        /// What is counted.
        what: String,
        /// The number.
        found: u64,
        /// The limit.
        most: u64,
    },
    /// A text is not UTF-8, or a name has bytes that names do not have.
    #[error("{what} is not plain text; the file is damaged")]
    Text {
        /// Which.
        what: String,
    },
    /// A metadata value has a type that GGUF does not have, or is an array of arrays.
    #[error("the metadata value {key:?} has type {found}; {why}")]
    ValueType {
        /// Its key.
        key: String,
        /// The number of the type.
        found: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A key or a tensor occurs twice.
    #[error("{what} {name:?} occurs twice; the file is damaged")]
    Duplicate {
        /// "the metadata key" or "tensor".
        what: &'static str,
        /// Which.
        name: String,
    },
    /// The alignment cannot be.
    #[error("general.alignment is {found}, expected a power of two up to {most}; the file is damaged")]
    Alignment {
        /// What it is.
        found: String,
        /// The largest.
        most: u64,
    },
    /// The type of a tensor's weights is not read.
    #[error(
        "tensor {tensor} has weights of type {found}, which is not read; convert a file in F32, F16, BF16, Q8_0, Q6_K, \
         Q4_K or Q4_0, or the original checkpoint"
    )]
    Kind {
        /// The tensor.
        tensor: String,
        /// The type's name, or its number.
        found: String,
    },
    /// The shape of a tensor cannot be.
    #[error("tensor {tensor} has the dimensions {found:?}, expected {expected}; the file is damaged")]
    Shape {
        /// The tensor.
        tensor: String,
        /// Its dimensions, innermost first.
        found: Vec<u64>,
        /// What they should be.
        expected: String,
    },
    /// A tensor does not begin where tensors may.
    #[error(
        "tensor {tensor} begins at byte {offset} of the data, expected a multiple of {alignment}; the file is damaged"
    )]
    Misaligned {
        /// The tensor.
        tensor: String,
        /// Where it begins.
        offset: u64,
        /// The file's alignment.
        alignment: u64,
    },
    /// A tensor ends behind the end of the file.
    #[error(
        "tensor {tensor} ends behind the end of the file, which has {file_len} bytes; the download is incomplete"
    )]
    TensorPastEnd {
        /// The tensor.
        tensor: String,
        /// Bytes of the file.
        file_len: u64,
    },
    /// Two tensors share bytes.
    #[error("tensors {first} and {second} share bytes; the file is damaged")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The other.
        second: String,
    },
    /// The file cannot be read.
    #[error("cannot read it: {0}")]
    Io(std::io::Error),
}
