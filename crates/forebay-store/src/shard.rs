//! The header of one safetensors file, read strictly.
//!
//! A shard is a `u64` header length, that many bytes of JSON, then the data.
//! Everything that the header claims is checked against the file's size and
//! against itself before anybody uses it; the data are not touched.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::folder::disguise;
use crate::json::{JsonError, Kind, Reader, shorten};

mod metadata;

pub use metadata::{CONTAINER_KEY, CONTAINER_VERSION, Declared};

/// The longest header that is read.
pub const MAX_HEADER_BYTES: u64 = 512 << 20;

/// The most dimensions a tensor may have.
pub const MAX_RANK: usize = 64;

/// Element type of a stored tensor.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// Bytes; quantised payloads.
    U8,
    /// Bytes; the same as [`Dtype::U8`] to a reader of payloads.
    I8,
    /// FP8, 4 exponent and 3 mantissa bits.
    F8E4m3,
    /// Any other type, by the name the header gives it. An error only when such a tensor is needed.
    Other(Box<str>),
}

impl Dtype {
    pub(crate) fn from_name(name: &str) -> Self {
        match name {
            "F32" => Dtype::F32,
            "BF16" => Dtype::Bf16,
            "F16" => Dtype::F16,
            "U8" => Dtype::U8,
            "I8" => Dtype::I8,
            "F8_E4M3" => Dtype::F8E4m3,
            other => Dtype::Other(other.into()),
        }
    }

    /// Bytes of one element; `None` for a type that is not known.
    pub fn size(&self) -> Option<u64> {
        match self {
            Dtype::F32 => Some(4),
            Dtype::Bf16 | Dtype::F16 => Some(2),
            Dtype::U8 | Dtype::I8 | Dtype::F8E4m3 => Some(1),
            Dtype::Other(_) => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dtype::F32 => "F32",
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::U8 => "U8",
            Dtype::I8 => "I8",
            Dtype::F8E4m3 => "F8_E4M3",
            Dtype::Other(name) => name,
        })
    }
}

/// One tensor as a header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderTensor {
    /// Its name.
    pub name: Arc<str>,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions, outermost first; empty for a single element.
    pub shape: Box<[u64]>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
    /// The matrix that the writer says these bytes are, if it says so.
    pub declared: Option<Declared>,
}

/// What is wrong within a header. [`ShardError`] adds the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HeaderError {
    /// Not JSON.
    #[error("the header is not valid JSON: {0}; the file is damaged, download it again")]
    Json(#[from] JsonError),
    /// A part of a tensor's description is missing or of the wrong kind.
    #[error("tensor {tensor:?}: {field} is {found}, expected {expected}; the file is damaged")]
    Field {
        /// The tensor.
        tensor: String,
        /// `dtype`, `shape`, `data_offsets` or the description as a whole.
        field: &'static str,
        /// What is there.
        found: String,
        /// What should be there.
        expected: &'static str,
    },
    /// The tensor's end lies before its start.
    #[error("tensor {tensor:?}: data_offsets [{begin}, {end}] end before they begin; the file is damaged")]
    Backwards {
        /// The tensor.
        tensor: String,
        /// First byte within the data.
        begin: u64,
        /// Byte after the last.
        end: u64,
    },
    /// The tensor ends behind the end of the file.
    #[error(
        "tensor {tensor:?} takes bytes {offset} to {end} of the file, which has only {file_len}; \
         the file is cut short, download it again"
    )]
    PastEnd {
        /// The tensor.
        tensor: String,
        /// First byte, counted from the start of the file.
        offset: u64,
        /// Byte after the last, counted from the start of the file.
        end: u64,
        /// Bytes in the file.
        file_len: u64,
    },
    /// The shape does not take the bytes that the tensor has.
    #[error(
        "tensor {tensor:?}: {dtype} {shape:?} takes {expected} bytes, but its data_offsets span {found}; \
         the file is damaged"
    )]
    Size {
        /// The tensor.
        tensor: String,
        /// Element type.
        dtype: Dtype,
        /// Dimensions.
        shape: Box<[u64]>,
        /// Bytes they take; `more than 2^64` when they cannot be counted.
        expected: String,
        /// Bytes the offsets span.
        found: u64,
    },
    /// The header's own description of formats cannot be understood.
    #[error(
        "__metadata__ says {value:?} of {key:?}, expected {expected}; the file is damaged, or was written by a newer \
         Forebay: update this one"
    )]
    Metadata {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What should be there.
        expected: &'static str,
    },
    /// Two tensors of one name.
    #[error("tensor {tensor:?} is described twice in one file; the file is damaged")]
    Duplicate {
        /// The name.
        tensor: String,
    },
    /// Two tensors share bytes.
    #[error("tensors {first:?} and {second:?} overlap at byte {offset} of the file; the file is damaged")]
    Overlap {
        /// The one that starts first.
        first: String,
        /// The other.
        second: String,
        /// First shared byte, counted from the start of the file.
        offset: u64,
    },
}

/// Why a shard cannot be used. `Display` is complete on its own.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The file cannot be opened or read.
    #[error("{}: cannot read it: {error}", file.display())]
    Read {
        /// The file.
        file: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// A folder, socket or the like carries the name of a shard.
    #[error("{}: it is not a regular file; move it out of the model folder", file.display())]
    NotAFile {
        /// The path.
        file: PathBuf,
    },
    /// No room for the eight bytes of the length.
    #[error("{}: a file of {size} bytes cannot be a safetensors file; download it again", file.display())]
    TooShort {
        /// The file.
        file: PathBuf,
        /// Its size.
        size: u64,
    },
    /// The header length is impossible.
    #[error("{}: the header should take {length} bytes, but {limit} is the most it can: {advice}", file.display())]
    HeaderLength {
        /// The file.
        file: PathBuf,
        /// The length given.
        length: u64,
        /// The most this file could hold, or [`MAX_HEADER_BYTES`].
        limit: u64,
        /// What the file seems to be, and what to do.
        advice: String,
    },
    /// The header itself is wrong.
    #[error("{}: {error}", file.display())]
    Header {
        /// The file.
        file: PathBuf,
        /// What is wrong in it.
        error: HeaderError,
    },
}

/// Reads the header of the shard `file`. Returns the file's size and its tensors in header order.
///
/// Memory is proportional to the header that is really there.
pub fn read_header(file: &Path) -> Result<(u64, Vec<HeaderTensor>), ShardError> {
    let path = || file.to_owned();
    let read_error = |error| ShardError::Read { file: path(), error };
    // Asked before opening: opening a pipe would wait for its writer.
    let meta = std::fs::metadata(file).map_err(read_error)?;
    if !meta.is_file() {
        return Err(ShardError::NotAFile { file: path() });
    }
    let mut handle = File::open(file).map_err(read_error)?;
    let size = handle.metadata().map_err(read_error)?.len();
    if size < 8 {
        return Err(ShardError::TooShort { file: path(), size });
    }
    let mut prefix = [0u8; 8];
    handle.read_exact(&mut prefix).map_err(read_error)?;
    let length = u64::from_le_bytes(prefix);
    let limit = MAX_HEADER_BYTES.min(size - 8);
    let advice = match disguise(&prefix) {
        Some(disguise) => format!("it looks like {disguise}"),
        None => "the file is cut short or damaged, download it again".to_owned(),
    };
    if length > limit {
        return Err(ShardError::HeaderLength { file: path(), length, limit, advice });
    }
    let mut header = Vec::new();
    handle.take(length).read_to_end(&mut header).map_err(read_error)?;
    if header.len() as u64 != length {
        let error = std::io::Error::new(
            std::io::ErrorKind::UnexpectedEof,
            format!("the header ends after {} of {length} bytes", header.len()),
        );
        return Err(read_error(error));
    }
    let tensors = parse_header(&header, size).map_err(|error| ShardError::Header { file: path(), error })?;
    Ok((size, tensors))
}

/// Parses the JSON of a header. `file_len` is the size of the whole file, of which the header
/// is bytes `8..8 + header.len()`.
///
/// Every tensor returned lies within the file, takes the bytes its shape needs (if its type is
/// known), and shares neither name nor bytes with another.
pub fn parse_header(header: &[u8], file_len: u64) -> Result<Vec<HeaderTensor>, HeaderError> {
    let data_start = 8 + header.len() as u64;
    let (mut tensors, mut metadata, mut declared) = (Vec::new(), 0, HashMap::new());
    let mut reader = Reader::new(header)?;
    reader.object(|reader, name| {
        if name == "__metadata__" {
            metadata += 1;
            declared = metadata::read(reader)?;
        } else {
            tensors.push(tensor(reader, &name, data_start, file_len)?);
        }
        Ok::<_, HeaderError>(())
    })?;
    reader.end()?;
    if metadata > 1 {
        return Err(HeaderError::Duplicate { tensor: "__metadata__".to_owned() });
    }
    for tensor in &mut tensors {
        tensor.declared = declared.get(&*tensor.name).copied();
    }
    reject_duplicates(&tensors)?;
    reject_overlaps(&tensors)?;
    Ok(tensors)
}

/// Reads one tensor's description and checks it against the file.
fn tensor(
    reader: &mut Reader<'_>,
    name: &str,
    data_start: u64,
    file_len: u64,
) -> Result<HeaderTensor, HeaderError> {
    let (mut dtype, mut shape, mut offsets) = (None, None, None);
    if reader.kind()? != Kind::Object {
        return Err(wrong(name, "the description", found(reader)?, "an object"));
    }
    reader.object(|reader, key| {
        let repeated = match key.as_ref() {
            "dtype" => dtype.replace(read_dtype(reader, name)?).is_some(),
            "shape" => shape.replace(integers(reader, name, "shape", SHAPE, MAX_RANK)?).is_some(),
            "data_offsets" => offsets.replace(integers(reader, name, "data_offsets", OFFSETS, 2)?).is_some(),
            _ => {
                reader.skip()?;
                false
            }
        };
        if repeated {
            return Err(wrong(name, "the description", format!("one with two {key:?}"), "one of each key"));
        }
        Ok(())
    })?;
    let absent = |field, expected| wrong(name, field, "missing".to_owned(), expected);
    let dtype = dtype.ok_or_else(|| absent("dtype", DTYPE))?;
    let shape = shape.ok_or_else(|| absent("shape", SHAPE))?;
    let offsets = offsets.ok_or_else(|| absent("data_offsets", OFFSETS))?;
    let &[begin, end] = offsets.as_slice() else {
        return Err(wrong(name, "data_offsets", format!("{offsets:?}"), OFFSETS));
    };
    let tensor = || shorten(name, 200);
    let len =
        end.checked_sub(begin).ok_or_else(|| HeaderError::Backwards { tensor: tensor(), begin, end })?;
    // Saturated ends lie behind the end of any file.
    let (offset, end) = (data_start.saturating_add(begin), data_start.saturating_add(end));
    if end > file_len || end == u64::MAX {
        return Err(HeaderError::PastEnd { tensor: tensor(), offset, end, file_len });
    }
    if let Some(element) = dtype.size() {
        let bytes = elements(&shape).and_then(|n| n.checked_mul(element));
        if bytes != Some(len) {
            let expected = bytes.map_or_else(|| "more than 2^64".to_owned(), |n| n.to_string());
            return Err(HeaderError::Size {
                tensor: tensor(),
                dtype,
                shape: shape.into(),
                expected,
                found: len,
            });
        }
    }
    Ok(HeaderTensor { name: name.into(), dtype, shape: shape.into(), offset, len, declared: None })
}

const DTYPE: &str = "a type name such as \"F32\"";
const SHAPE: &str = "an array of at most 64 sizes";
const OFFSETS: &str = "an array of two byte offsets";

fn read_dtype(reader: &mut Reader<'_>, name: &str) -> Result<Dtype, HeaderError> {
    match reader.kind()? {
        Kind::String => Ok(Dtype::from_name(&reader.string()?)),
        _ => Err(wrong(name, "dtype", found(reader)?, DTYPE)),
    }
}

fn integers(
    reader: &mut Reader<'_>,
    name: &str,
    field: &'static str,
    expected: &'static str,
    most: usize,
) -> Result<Vec<u64>, HeaderError> {
    if reader.kind()? != Kind::Array {
        return Err(wrong(name, field, found(reader)?, expected));
    }
    let mut numbers = Vec::new();
    reader.array(|reader| {
        if reader.kind()? != Kind::Number {
            return Err(wrong(name, field, format!("an array with {}", found(reader)?), expected));
        }
        let text = reader.number()?;
        let number = text
            .parse()
            .map_err(|_| wrong(name, field, format!("an array with {}", shorten(text, 40)), expected))?;
        if numbers.len() == most {
            return Err(wrong(name, field, "a longer array".to_owned(), expected));
        }
        numbers.push(number);
        Ok(())
    })?;
    Ok(numbers)
}

fn wrong(name: &str, field: &'static str, found: String, expected: &'static str) -> HeaderError {
    HeaderError::Field { tensor: shorten(name, 200), field, found, expected }
}

/// The next value in words, for an error.
fn found(reader: &mut Reader<'_>) -> Result<String, HeaderError> {
    Ok(match reader.kind()? {
        Kind::Object => "an object".to_owned(),
        Kind::Array => "an array".to_owned(),
        Kind::String => format!("the string {:?}", shorten(&reader.string()?, 40)),
        Kind::Number => format!("the number {}", shorten(reader.number()?, 40)),
        Kind::Bool => "a truth value".to_owned(),
        Kind::Null => "null".to_owned(),
    })
}

/// Number of elements of `shape`; `None` on overflow. Overflow is decided after a zero is looked
/// for, so that an empty tensor stays empty.
pub(crate) fn elements(shape: &[u64]) -> Option<u64> {
    if shape.contains(&0) {
        return Some(0);
    }
    shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size))
}

fn reject_duplicates(tensors: &[HeaderTensor]) -> Result<(), HeaderError> {
    let mut seen = HashSet::with_capacity(tensors.len());
    match tensors.iter().find(|t| !seen.insert(&t.name)) {
        None => Ok(()),
        Some(twice) => Err(HeaderError::Duplicate { tensor: shorten(&twice.name, 200) }),
    }
}

fn reject_overlaps(tensors: &[HeaderTensor]) -> Result<(), HeaderError> {
    let mut order: Vec<_> = tensors.iter().filter(|t| t.len > 0).collect();
    order.sort_unstable_by_key(|t| t.offset);
    match order.array_windows().find(|[a, b]| a.offset + a.len > b.offset) {
        None => Ok(()),
        Some([first, second]) => Err(HeaderError::Overlap {
            first: shorten(&first.name, 200),
            second: shorten(&second.name, 200),
            offset: second.offset,
        }),
    }
}

#[cfg(test)]
mod tests;
