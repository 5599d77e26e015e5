//! Little-endian fields, read with their place at hand and written without surprises.

use super::error::FormatError;

/// Reads fields from front to back. Nothing is allocated beyond what the bytes at hand can hold.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    /// Where `bytes` begins in the file.
    base: usize,
    at: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8], base: usize) -> Self {
        Self { bytes, base, at: 0 }
    }

    /// An error about what was read last, or is to be read next.
    pub fn wrong(
        &self,
        what: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> FormatError {
        let (expected, found) = (expected.to_string(), found.to_string());
        FormatError { at: self.base + self.at, what: what.into(), expected, found }
    }

    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn take(&mut self, len: usize, what: &str) -> Result<&'a [u8], FormatError> {
        if len > self.left() {
            return Err(self.wrong(
                what,
                format!("{len} more bytes"),
                format!("cut off after {}", self.left()),
            ));
        }
        self.at += len;
        Ok(&self.bytes[self.at - len..self.at])
    }

    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], FormatError> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N, what)?);
        Ok(array)
    }

    pub fn u8(&mut self, what: &str) -> Result<u8, FormatError> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub fn u16(&mut self, what: &str) -> Result<u16, FormatError> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub fn u32(&mut self, what: &str) -> Result<u32, FormatError> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub fn u64(&mut self, what: &str) -> Result<u64, FormatError> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// A flag: 0 or 1.
    pub fn bool(&mut self, what: &str) -> Result<bool, FormatError> {
        match self.u8(what)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(self.wrong(what, "0 or 1", other)),
        }
    }

    /// A field that must have this value.
    pub fn exactly(&mut self, value: u64, what: &str) -> Result<(), FormatError> {
        match self.u64(what)? {
            found if found == value => Ok(()),
            found => Err(self.wrong(what, value, found)),
        }
    }

    /// A length in two bytes and that many bytes of UTF-8, `limit` at most.
    pub fn text(&mut self, limit: usize, what: &str) -> Result<String, FormatError> {
        let len = usize::from(self.u16(what)?);
        if len > limit {
            return Err(self.wrong(what, format!("at most {limit} bytes of text"), len));
        }
        match std::str::from_utf8(self.take(len, what)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(self.wrong(what, "UTF-8 text", "something else")),
        }
    }

    /// The number of entries that follow, each of at least `least` bytes: never more than there can be.
    pub fn count(&mut self, least: usize, what: &str) -> Result<usize, FormatError> {
        let count = self.u32(what)?;
        let most = self.left() / least;
        match usize::try_from(count) {
            Ok(count) if count <= most => Ok(count),
            _ => Err(self.wrong(what, format!("at most {most} (what the header has room for)"), count)),
        }
    }
}

/// Appends fields.
#[derive(Default)]
pub(super) struct Fields(pub Vec<u8>);

impl Fields {
    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Text of at most 65,535 bytes: what is longer is cut, and then refused by the reader.
    pub fn text(&mut self, text: &str) {
        let len = text.len().min(usize::from(u16::MAX));
        self.u16(len as u16);
        self.0.extend(&text.as_bytes()[..len]);
    }

    pub fn count(&mut self, count: usize) {
        self.u32(count as u32);
    }
}
