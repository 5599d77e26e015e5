//! The types of weights in GGUF files.

use std::fmt;

/// Weights in a block of the K types.
pub const K_BLOCK: usize = 256;

/// A type whose weights can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// Bytes, one half-precision scale for 32.
    Q8_0,
    /// Nibbles, one half-precision scale for 32.
    Q4_0,
    /// Nibbles; scale and minimum of 6 bits for 32, a pair of half-precision factors for 256.
    Q4K,
    /// Six bits; a scale of 8 bits for 16, one half-precision factor for 256.
    Q6K,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4K, Self::Q6K];

    /// The number that stands for it in a file.
    pub fn id(self) -> u32 {
        match self {
            Self::F32 => 0,
            Self::F16 => 1,
            Self::Q4_0 => 2,
            Self::Q8_0 => 8,
            Self::Q4K => 12,
            Self::Q6K => 14,
            Self::Bf16 => 30,
        }
    }

    /// The type with this number, if it is one that is read.
    pub fn from_id(id: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.id() == id)
    }

    /// The type with this name, if it is one that is read.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4K => "Q4_K",
            Self::Q6K => "Q6_K",
        }
    }

    /// Weights of a block.
    pub fn block_len(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
            Self::Q8_0 | Self::Q4_0 => 32,
            Self::Q4K | Self::Q6K => K_BLOCK,
        }
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Q8_0 => 2 + 32,
            Self::Q4_0 => 2 + 16,
            Self::Q4K => 2 + 2 + 12 + 128,
            Self::Q6K => 128 + 64 + 16 + 2,
        }
    }

    /// Bytes of `cols` weights; `None` if they do not fill whole blocks or are too many.
    pub fn row_bytes(self, cols: u64) -> Option<u64> {
        let block = self.block_len() as u64;
        cols.is_multiple_of(block).then(|| (cols / block).checked_mul(self.block_bytes() as u64))?
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What messages call the type with the number `id`.
pub fn name_of(id: u32) -> String {
    let other = match id {
        3 => "Q4_1",
        6 => "Q5_0",
        7 => "Q5_1",
        9 => "Q8_1",
        10 => "Q2_K",
        11 => "Q3_K",
        13 => "Q5_K",
        15 => "Q8_K",
        16 => "IQ2_XXS",
        17 => "IQ2_XS",
        18 => "IQ3_XXS",
        19 => "IQ1_S",
        20 => "IQ4_NL",
        21 => "IQ3_S",
        22 => "IQ2_S",
        23 => "IQ4_XS",
        24 => "I8",
        25 => "I16",
        26 => "I32",
        27 => "I64",
        28 => "F64",
        29 => "IQ1_M",
        34 => "TQ1_0",
        35 => "TQ2_0",
        39 => "MXFP4",
        _ => return Kind::from_id(id).map_or_else(|| format!("number {id}"), |kind| kind.name().to_owned()),
    };
    other.to_owned()
}
