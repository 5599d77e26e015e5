//! The header of a stored prefix: one block of a KV cache in a file of its own. docs/sessions.md is the source of
//! truth.
//!
//! The header says which model, settings and tokens the block belongs to; the rows behind it are the caller's
//! business. Nothing in it is trusted: sizes are bounded before anything is allocated, and a checksum covers every
//! byte.

/// The first bytes of a file.
pub const MAGIC: [u8; 8] = *b"FBPREFIX";
/// The version of the format that is written and read.
pub const VERSION: u32 = 1;
/// Tokens of a block at most.
pub const MAX_TOKENS: usize = 64;
/// Hidden states of a block at most.
pub const MAX_CARRIES: usize = 2;
/// Bytes of a header before the lists.
const FIXED: usize = 144;
/// Bytes that a header has at most.
pub const MAX_HEADER: usize = FIXED + 4 * (MAX_TOKENS + MAX_CARRIES) + 4;

/// What tells a block from all others: the block before it and its own tokens, hashed.
pub type Key = [u8; 16];

/// Everything in a header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// A hash of the model and of every setting that changes a bit of its rows.
    pub model: [u8; 32],
    /// Bytes per cached value: 2 for bfloat16, 4 for single precision.
    pub value_bytes: u32,
    /// Decoder layers, latent width, rope width, index width, layers with index keys, layers that draft, hidden
    /// width.
    pub shape: [u32; 7],
    /// The position of the first token.
    pub first: u64,
    /// The block before this one; zeros if there is none.
    pub parent: Key,
    /// This block.
    pub key: Key,
    /// Its tokens: 1 to 64.
    pub tokens: Vec<u32>,
    /// The places in the block, ascending, whose hidden states are behind the rows.
    pub carries: Vec<u32>,
    /// Bytes behind the header.
    pub payload: u64,
    /// CRC-32C of these.
    pub checksum: u32,
}

/// Why a file is no stored prefix.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PrefixError {
    /// The file ends inside the header.
    #[error("the file ends after {found} bytes, inside its header")]
    Short {
        /// Bytes there are.
        found: usize,
    },
    /// It begins with something else.
    #[error("it does not begin with FBPREFIX")]
    Magic,
    /// Another version of Forebay wrote it.
    #[error("it has version {found}, and this program reads version {VERSION}")]
    Version {
        /// The version in the file.
        found: u32,
    },
    /// The header is not what was written.
    #[error("the checksum of the header does not match")]
    Checksum,
    /// A field has a value that it cannot have.
    #[error("its {what} cannot be {found}")]
    Field {
        /// The field.
        what: &'static str,
        /// What it says.
        found: u64,
    },
}

impl Header {
    /// The bytes of the header.
    ///
    /// # Panics
    /// If it has more tokens or hidden states than a block may have.
    pub fn to_bytes(&self) -> Vec<u8> {
        assert!(
            self.tokens.len() <= MAX_TOKENS && self.carries.len() <= MAX_CARRIES,
            "a block has its limits"
        );
        let mut bytes = MAGIC.to_vec();
        bytes.extend(VERSION.to_le_bytes());
        bytes.extend((self.len() as u32).to_le_bytes());
        bytes.extend(self.model);
        bytes.extend(self.value_bytes.to_le_bytes());
        bytes.extend(self.shape.iter().flat_map(|value| value.to_le_bytes()));
        bytes.extend(self.first.to_le_bytes());
        bytes.extend(self.parent);
        bytes.extend(self.key);
        bytes.extend((self.tokens.len() as u32).to_le_bytes());
        bytes.extend((self.carries.len() as u32).to_le_bytes());
        bytes.extend(self.payload.to_le_bytes());
        bytes.extend(self.checksum.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.tokens.iter().chain(&self.carries).flat_map(|value| value.to_le_bytes()));
        bytes.extend(crc32c::crc32c(&bytes).to_le_bytes());
        bytes
    }

    /// Bytes of the header in a file.
    #[allow(clippy::len_without_is_empty, reason = "a header is never empty")]
    pub fn len(&self) -> usize {
        FIXED + 4 * (self.tokens.len() + self.carries.len()) + 4
    }

    /// Reads the header that `bytes` begin with.
    ///
    /// # Errors
    /// If there is none, or any bit of it is not as it was written.
    pub fn parse(bytes: &[u8]) -> Result<Self, PrefixError> {
        let short = PrefixError::Short { found: bytes.len() };
        let mut fields = Fields(bytes);
        if fields.take::<8>().ok_or(short.clone())? != MAGIC {
            return Err(PrefixError::Magic);
        }
        let found = fields.number().ok_or(short.clone())?;
        if found != VERSION {
            return Err(PrefixError::Version { found });
        }
        let len = fields.number().ok_or(short.clone())? as usize;
        if !(FIXED + 4..=MAX_HEADER).contains(&len) || !len.is_multiple_of(4) {
            return Err(PrefixError::Field { what: "length of the header", found: len as u64 });
        }
        let (body, checksum) = bytes.get(..len).ok_or(short.clone())?.split_at(len - 4);
        if checksum != crc32c::crc32c(body).to_le_bytes() {
            return Err(PrefixError::Checksum);
        }
        Fields(&body[16..]).header(len).ok_or(short)?
    }
}

/// The rest of the bytes that are read.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn long(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn list(&mut self, len: usize) -> Option<Vec<u32>> {
        (0..len).map(|_| self.number()).collect()
    }

    /// The fields behind the length, of a header of `len` bytes.
    fn header(mut self, len: usize) -> Option<Result<Header, PrefixError>> {
        let model = self.take()?;
        let value_bytes = self.number()?;
        let mut shape = [0; 7];
        for value in &mut shape {
            *value = self.number()?;
        }
        let (first, parent, key) = (self.long()?, self.take()?, self.take()?);
        let (tokens, carries) = (self.number()? as usize, self.number()? as usize);
        let (payload, checksum, reserved) = (self.long()?, self.number()?, self.number()?);
        let wrong = |what, found: u64| Some(Err(PrefixError::Field { what, found }));
        if !matches!(value_bytes, 2 | 4) {
            return wrong("bytes per value", value_bytes.into());
        }
        if tokens == 0 || tokens > MAX_TOKENS || !first.is_multiple_of(MAX_TOKENS as u64) {
            return wrong("number of tokens", tokens as u64);
        }
        if carries > MAX_CARRIES {
            return wrong("number of hidden states", carries as u64);
        }
        if len != FIXED + 4 * (tokens + carries) + 4 {
            return wrong("length of the header", len as u64);
        }
        if reserved != 0 {
            return wrong("reserved field", reserved.into());
        }
        let (tokens, carries) = (self.list(tokens)?, self.list(carries)?);
        if !carries.is_sorted_by(|a, b| a < b)
            || carries.last().is_some_and(|at| *at as usize >= tokens.len())
        {
            return wrong("place of a hidden state", carries.last().copied().unwrap_or(0).into());
        }
        Some(Ok(Header { model, value_bytes, shape, first, parent, key, tokens, carries, payload, checksum }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(tokens: usize, carries: &[u32]) -> Header {
        Header {
            model: [7; 32],
            value_bytes: 2,
            shape: [78, 512, 64, 128, 21, 1, 6144],
            first: 128,
            parent: [1; 16],
            key: [2; 16],
            tokens: (0..tokens as u32).map(|i| i * 1000).collect(),
            carries: carries.to_vec(),
            payload: 1 << 40,
            checksum: 0xdead_beef,
        }
    }

    #[test]
    fn the_bytes_are_where_the_document_says() {
        let bytes = header(3, &[2]).to_bytes();
        assert_eq!(bytes.len(), 144 + 4 * 4 + 4);
        assert_eq!(bytes[..16], *b"FBPREFIX\x01\0\0\0\xa4\0\0\0");
        assert_eq!((bytes[48], bytes[52], &bytes[80..88]), (2, 78, &128u64.to_le_bytes()[..]));
        assert_eq!((bytes[88], bytes[104], bytes[120], bytes[124]), (1, 2, 3, 1));
        assert_eq!(bytes[128..136], (1u64 << 40).to_le_bytes());
        assert_eq!(bytes[136..140], 0xdead_beef_u32.to_le_bytes());
        assert_eq!(bytes[148..152], 1000u32.to_le_bytes());
        assert_eq!(bytes[156..160], 2u32.to_le_bytes());
    }

    #[test]
    fn any_changed_bit_and_any_cut_is_noticed() {
        let bytes = header(64, &[5, 63]).to_bytes();
        assert_eq!(bytes.len(), MAX_HEADER);
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::parse(&damaged).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(Header::parse(&bytes[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn values_that_cannot_be_are_refused_even_with_a_sound_checksum() {
        let refused = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bytes = header(4, &[1]).to_bytes();
            change(&mut bytes);
            let end = bytes.len() - 4;
            let checksum = crc32c::crc32c(&bytes[..end]).to_le_bytes();
            bytes[end..].copy_from_slice(&checksum);
            Header::parse(&bytes).is_err()
        };
        assert!(!refused(&|_| ()));
        for (at, value) in [(48, 3), (80, 1), (120, 0), (120, 5), (120, 65), (124, 3), (124, 0), (140, 1)] {
            assert!(refused(&|bytes| bytes[at] = value), "{value} at {at}");
        }
        assert!(refused(&|bytes| bytes[123] = 255), "four billion tokens");
        assert!(refused(&|bytes| bytes[160] = 4), "a hidden state behind the last token");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn what_is_written_is_read(
            tokens in proptest::collection::vec(any::<u32>(), 1..=64),
            ends in any::<bool>(),
            (first, payload, checksum) in (0..1u64 << 50, any::<u64>(), any::<u32>()),
            rest in proptest::collection::vec(any::<u8>(), 0..40),
        ) {
            let carries = if ends { vec![tokens.len() as u32 - 1] } else { Vec::new() };
            let written =
                Header { tokens, carries, first: first * 64, payload, checksum, ..header(1, &[]) };
            let mut bytes = written.to_bytes();
            prop_assert_eq!(bytes.len(), written.len());
            bytes.extend(rest);
            prop_assert_eq!(Header::parse(&bytes), Ok(written));
        }

        #[test]
        fn whatever_is_accepted_means_what_its_bytes_say(bytes in proptest::collection::vec(any::<u8>(), 0..500)) {
            if let Ok(header) = Header::parse(&bytes) {
                prop_assert_eq!(&header.to_bytes()[..], &bytes[..header.len()]);
            }
        }
    }
}
