//! The header of one GGUF file: metadata and tensors. Every count, length and offset is checked against the file
//! before it is used, and memory is taken only for bytes that are there.

use std::collections::{BTreeMap, HashSet};
use std::io::{BufReader, ErrorKind, Read};
use std::path::Path;

use forebay_io::file::open_regular;

use super::error::GgufError;
use super::kind::{Kind, name_of};

/// The longest header that is read: tokens and merges of the largest vocabularies take a twentieth of it.
pub const MAX_HEADER_BYTES: u64 = 256 << 20;
const MAX_TENSORS: u64 = 1 << 18;
const MAX_KEYS: u64 = 1 << 16;
/// Bytes of a key. The names of tensors are shorter.
const MAX_KEY: u64 = 1 << 10;
const MAX_NAME: u64 = 255;
const MAX_TOKEN: u64 = 1 << 16;
const MAX_TEXT: u64 = 16 << 20;
/// Tokens of a vocabulary.
const MAX_TOKENS: u64 = 1 << 20;
const MAX_ALIGNMENT: u64 = 1 << 20;
const DEFAULT_ALIGNMENT: u64 = 32;
/// The vocabulary. Arrays other than this and the next two are not kept.
pub const TOKENS: &str = "tokenizer.ggml.tokens";
/// Which tokens are joined, the most important pair first.
pub const MERGES: &str = "tokenizer.ggml.merges";
/// What kind of token each is.
pub const TOKEN_TYPES: &str = "tokenizer.ggml.token_type";

/// A metadata value.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// A number without a fraction.
    Integer(i128),
    /// A number in single precision.
    Single(f32),
    /// A number in double precision.
    Double(f64),
    /// Yes or no.
    Bool(bool),
    /// A text.
    Text(String),
    /// The texts of [`TOKENS`] or [`MERGES`].
    Texts(Vec<String>),
    /// The numbers of [`TOKEN_TYPES`].
    Integers(Vec<i32>),
    /// Any other array, by its length: its contents were read past.
    Array(u64),
}

/// One tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// Its name.
    pub name: String,
    /// The type of its weights.
    pub kind: Kind,
    /// Dimensions, outermost first (the file has them the other way round); 1 to 4 of them, none of them 0.
    pub shape: Vec<u64>,
    /// First byte, counted from the start of the file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What a file says of itself.
#[derive(Clone, Debug, PartialEq)]
pub struct Header {
    /// Metadata by key.
    pub metadata: BTreeMap<String, Value>,
    /// The tensors, in the order of the file.
    pub tensors: Vec<Info>,
}

impl Header {
    /// Reads the header of the file `path`; its size comes with it.
    pub fn read(path: &Path) -> Result<(u64, Self), GgufError> {
        // Asked before opening: opening a pipe would wait for its writer.
        let meta = std::fs::metadata(path).map_err(GgufError::Io)?;
        if !meta.is_file() {
            let what = "it is not a regular file";
            return Err(GgufError::Io(std::io::Error::new(ErrorKind::InvalidInput, what)));
        }
        let file = open_regular(path).map_err(GgufError::Io)?;
        Ok((meta.len(), Self::parse(BufReader::new(file), meta.len())?))
    }

    /// Reads a header from the first bytes of a file of `file_len` bytes.
    ///
    /// # Errors
    /// If anything in it cannot be, or a tensor has a type that is not read.
    pub fn parse(bytes: impl Read, file_len: u64) -> Result<Self, GgufError> {
        let mut input = Input { bytes, at: 0, end: file_len.min(MAX_HEADER_BYTES) };
        if input.array("the first four bytes").map_err(|_| GgufError::Magic)? != *b"GGUF" {
            return Err(GgufError::Magic);
        }
        let version = input.u32("the version")?;
        if !matches!(version, 2 | 3) {
            return Err(GgufError::Version { found: version });
        }
        let tensors = input.count("the number of tensors", MAX_TENSORS)?;
        let keys = input.count("the number of metadata values", MAX_KEYS)?;
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = input.text("a metadata key", MAX_KEY)?;
            let value = input.value(&key)?;
            if metadata.contains_key(&key) {
                return Err(GgufError::Duplicate { what: "the metadata key", name: key });
            }
            metadata.insert(key, value);
        }
        let alignment = alignment(&metadata)?;
        let mut infos = Vec::new();
        for _ in 0..tensors {
            infos.push(input.tensor(alignment)?);
        }
        let data = input.at.next_multiple_of(alignment);
        for info in &mut infos {
            let end = data.checked_add(info.offset).and_then(|at| at.checked_add(info.len));
            if end.is_none_or(|end| end > file_len) {
                return Err(GgufError::TensorPastEnd { tensor: info.name.clone(), file_len });
            }
            info.offset += data;
        }
        reject_duplicates(&infos)?;
        reject_overlaps(&infos)?;
        Ok(Self { metadata, tensors: infos })
    }
}

fn alignment(metadata: &BTreeMap<String, Value>) -> Result<u64, GgufError> {
    let refuse = |found| GgufError::Alignment { found, most: MAX_ALIGNMENT };
    match metadata.get("general.alignment") {
        None => Ok(DEFAULT_ALIGNMENT),
        Some(Value::Integer(n)) => match u64::try_from(*n) {
            Ok(n) if n.is_power_of_two() && n <= MAX_ALIGNMENT => Ok(n),
            _ => Err(refuse(n.to_string())),
        },
        Some(_) => Err(refuse("no integer".to_owned())),
    }
}

fn reject_duplicates(infos: &[Info]) -> Result<(), GgufError> {
    let mut seen = HashSet::with_capacity(infos.len());
    match infos.iter().find(|info| !seen.insert(&info.name)) {
        None => Ok(()),
        Some(info) => Err(GgufError::Duplicate { what: "tensor", name: info.name.clone() }),
    }
}

fn reject_overlaps(infos: &[Info]) -> Result<(), GgufError> {
    let mut order: Vec<&Info> = infos.iter().collect();
    order.sort_unstable_by_key(|info| info.offset);
    match order.array_windows().find(|[a, b]| a.offset + a.len > b.offset) {
        None => Ok(()),
        Some([a, b]) => Err(GgufError::Overlap { first: a.name.clone(), second: b.name.clone() }),
    }
}

/// The bytes of a header, up to a limit.
struct Input<R> {
    bytes: R,
    /// Bytes read.
    at: u64,
    /// Where reading ends at the latest.
    end: u64,
}

impl<R: Read> Input<R> {
    fn past_end(&self, what: &str) -> GgufError {
        GgufError::PastEnd { what: what.to_owned(), limit: MAX_HEADER_BYTES }
    }

    /// Counts `len` bytes as read, if there are so many.
    fn advance(&mut self, len: u64, what: &str) -> Result<(), GgufError> {
        match self.at.checked_add(len) {
            Some(at) if at <= self.end => {
                self.at = at;
                Ok(())
            }
            _ => Err(self.past_end(what)),
        }
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        self.advance(N as u64, what)?;
        let mut out = [0; N];
        match self.bytes.read_exact(&mut out) {
            Ok(()) => Ok(out),
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => Err(self.past_end(what)),
            Err(error) => Err(GgufError::Io(error)),
        }
    }

    fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn count(&mut self, what: &str, most: u64) -> Result<u64, GgufError> {
        match self.u64(what)? {
            found if found > most => Err(GgufError::TooMany { what: what.to_owned(), found, most }),
            found => Ok(found),
        }
    }

    /// Reads past `len` bytes.
    fn skip(&mut self, len: u64, what: &str) -> Result<(), GgufError> {
        self.advance(len, what)?;
        let read = std::io::copy(&mut (&mut self.bytes).take(len), &mut std::io::sink());
        match read.map_err(GgufError::Io)? {
            read if read == len => Ok(()),
            _ => Err(self.past_end(what)),
        }
    }

    fn text(&mut self, what: &str, most: u64) -> Result<String, GgufError> {
        let len = self.count(&format!("the length of {what}"), most)?;
        self.advance(len, what)?;
        // The memory grows with what is really there.
        let mut out = Vec::new();
        (&mut self.bytes).take(len).read_to_end(&mut out).map_err(GgufError::Io)?;
        if out.len() as u64 != len {
            return Err(self.past_end(what));
        }
        String::from_utf8(out).map_err(|_| GgufError::Text { what: what.to_owned() })
    }

    fn value(&mut self, key: &str) -> Result<Value, GgufError> {
        let what = format!("the metadata value {key:?}");
        let kind = self.u32(&what)?;
        let unknown =
            || GgufError::ValueType { key: key.to_owned(), found: kind, why: "there is no such type" };
        Ok(match kind {
            0 => Value::Integer(u8::from_le_bytes(self.array(&what)?).into()),
            1 => Value::Integer(i8::from_le_bytes(self.array(&what)?).into()),
            2 => Value::Integer(u16::from_le_bytes(self.array(&what)?).into()),
            3 => Value::Integer(i16::from_le_bytes(self.array(&what)?).into()),
            4 => Value::Integer(self.u32(&what)?.into()),
            5 => Value::Integer(i32::from_le_bytes(self.array(&what)?).into()),
            6 => Value::Single(f32::from_le_bytes(self.array(&what)?)),
            7 => match self.array(&what)? {
                [byte @ (0 | 1)] => Value::Bool(byte == 1),
                _ => {
                    let why = "it must be 0 or 1, and is neither";
                    return Err(GgufError::ValueType { key: key.to_owned(), found: kind, why });
                }
            },
            8 => Value::Text(self.text(&what, MAX_TEXT)?),
            9 => self.value_array(key, &what)?,
            10 => Value::Integer(self.u64(&what)?.into()),
            11 => Value::Integer(i64::from_le_bytes(self.array(&what)?).into()),
            12 => Value::Double(f64::from_le_bytes(self.array(&what)?)),
            _ => return Err(unknown()),
        })
    }

    /// An array of numbers or texts.
    fn value_array(&mut self, key: &str, what: &str) -> Result<Value, GgufError> {
        let kind = self.u32(what)?;
        let refuse = |why| GgufError::ValueType { key: key.to_owned(), found: kind, why };
        let len = self.u64(what)?;
        let size = match kind {
            0 | 1 | 7 => 1,
            2 | 3 => 2,
            4..=6 => 4,
            10..=12 => 8,
            8 => return self.texts(key, what, len),
            9 => return Err(refuse("arrays of arrays are not read")),
            _ => return Err(refuse("there is no such type")),
        };
        if key == TOKEN_TYPES && kind == 5 {
            check_length(key, len)?;
            let numbers = (0..len).map(|_| Ok(i32::from_le_bytes(self.array(what)?)));
            return Ok(Value::Integers(numbers.collect::<Result<_, GgufError>>()?));
        }
        self.skip(len.checked_mul(size).ok_or_else(|| self.past_end(what))?, what)?;
        Ok(Value::Array(len))
    }

    fn texts(&mut self, key: &str, what: &str, len: u64) -> Result<Value, GgufError> {
        if key != TOKENS && key != MERGES {
            // Each takes 8 bytes of the header at least, so this ends.
            for _ in 0..len {
                let bytes = self.u64(what)?;
                self.skip(bytes, what)?;
            }
            return Ok(Value::Array(len));
        }
        check_length(key, len)?;
        let mut out = Vec::new();
        for _ in 0..len {
            out.push(self.text(what, MAX_TOKEN)?);
        }
        Ok(Value::Texts(out))
    }

    /// One tensor, its offset still counted from the start of the data.
    fn tensor(&mut self, alignment: u64) -> Result<Info, GgufError> {
        let name = self.text("the name of a tensor", MAX_NAME)?;
        if !name.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(GgufError::Text { what: format!("the name of a tensor, {name:?},") });
        }
        let what = format!("the description of tensor {name:?}");
        let rank = self.u32(&what)?;
        if !(1..=4).contains(&rank) {
            let what = format!("the number of dimensions of tensor {name:?}");
            return Err(GgufError::TooMany { what, found: rank.into(), most: 4 });
        }
        let mut dims = Vec::new();
        for _ in 0..rank {
            dims.push(self.u64(&what)?);
        }
        let id = self.u32(&what)?;
        let offset = self.u64(&what)?;
        let Some(kind) = Kind::from_id(id) else {
            return Err(GgufError::Kind { tensor: name, found: name_of(id) });
        };
        let rows = dims[1..].iter().try_fold(1u64, |product, dim| product.checked_mul(*dim));
        let len = kind.row_bytes(dims[0]).zip(rows).and_then(|(row, rows)| row.checked_mul(rows));
        let Some(len) = len.filter(|len| *len > 0) else {
            let expected =
                format!("none of them 0, and the first a multiple of {} for {kind}", kind.block_len());
            return Err(GgufError::Shape { tensor: name, found: dims, expected });
        };
        if !offset.is_multiple_of(alignment) {
            return Err(GgufError::Misaligned { tensor: name, offset, alignment });
        }
        dims.reverse();
        Ok(Info { name, kind, shape: dims, offset, len })
    }
}

/// That an array which is kept is no longer than any vocabulary.
fn check_length(key: &str, len: u64) -> Result<(), GgufError> {
    match len > MAX_TOKENS {
        true => {
            let what = format!("the length of {key}");
            Err(GgufError::TooMany { what, found: len, most: MAX_TOKENS })
        }
        false => Ok(()),
    }
}
