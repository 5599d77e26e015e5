//! Weight formats and the exact bytes they take (docs/format.md section 6).

use std::fmt;
use std::str::FromStr;

/// Side of the square blocks that share one FP8 multiplier.
pub const FP8_BLOCK: usize = 128;

/// Columns per scale of a grouped int4 matrix: one of [`GroupSize::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct GroupSize(u16);

impl GroupSize {
    /// Every group size a container may use, in the order in which a reader tries them.
    pub const ALL: [GroupSize; 8] = [
        GroupSize(16),
        GroupSize(32),
        GroupSize(48),
        GroupSize(64),
        GroupSize(96),
        GroupSize(128),
        GroupSize(192),
        GroupSize(256),
    ];

    /// The group size of `columns` columns, if it is one of the eight.
    pub fn new(columns: usize) -> Option<Self> {
        Self::ALL.into_iter().find(|size| size.get() == columns)
    }

    /// Columns per group.
    pub fn get(self) -> usize {
        usize::from(self.0)
    }
}

/// How the numbers of one weight matrix are stored.
///
/// A matrix is `rows x cols` (`[out, in]`, row-major): `y[r] = sum_c W[r, c] x[c]`.
/// Rows are byte-aligned and nothing lies between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
    /// FP8 E4M3 codes with one f32 multiplier per 128 x 128 block.
    Fp8Block,
    /// Signed bytes, one scale per row.
    Int8Row,
    /// Two nibbles a byte (value + 8, even column low), one scale per row.
    Int4Row,
    /// Four 2-bit codes a byte (value + 2, lowest bits first), one scale per row.
    Int2Row,
    /// As [`Format::Int4Row`] with one scale per group of columns; the last group may be partial.
    Int4Group(GroupSize),
}

impl Format {
    /// Bytes of one row of codes.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Format::F32 => cols.checked_mul(4),
            Format::Bf16 | Format::F16 => cols.checked_mul(2),
            Format::Fp8Block | Format::Int8Row => Some(cols),
            Format::Int4Row | Format::Int4Group(_) => Some(cols.div_ceil(2)),
            Format::Int2Row => Some(cols.div_ceil(4)),
        }
    }

    /// Bytes of all codes of a `rows x cols` matrix; `None` on overflow.
    pub fn payload_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        self.row_bytes(cols)?.checked_mul(rows)
    }

    /// Number of f32 scales of a `rows x cols` matrix; `None` on overflow.
    pub fn scale_count(self, rows: usize, cols: usize) -> Option<usize> {
        match self {
            Format::F32 | Format::Bf16 | Format::F16 => Some(0),
            Format::Fp8Block => rows.div_ceil(FP8_BLOCK).checked_mul(cols.div_ceil(FP8_BLOCK)),
            Format::Int8Row | Format::Int4Row | Format::Int2Row => Some(rows),
            Format::Int4Group(size) => cols.div_ceil(size.get()).checked_mul(rows),
        }
    }

    /// Bytes of codes and scales together; `None` on overflow.
    pub fn total_bytes(self, rows: usize, cols: usize) -> Option<usize> {
        let scales = self.scale_count(rows, cols)?.checked_mul(4)?;
        self.payload_bytes(rows, cols)?.checked_add(scales)
    }

    /// What a reader takes this format for in a matrix of `cols` columns when it has nothing but byte counts to go by
    /// (docs/convert.md, "Formats are named"): the smallest group size with as many groups, and int4 by row if there is one group.
    pub fn as_inferred(self, cols: usize) -> Self {
        let Format::Int4Group(size) = self else { return self };
        let groups = cols.div_ceil(size.get());
        if groups <= 1 {
            return Format::Int4Row;
        }
        let same = GroupSize::ALL.into_iter().find(|other| cols.div_ceil(other.get()) == groups);
        Format::Int4Group(same.unwrap_or(size))
    }

    /// Whether the codes are small integers, so that the `int8` arithmetic applies.
    pub fn is_integer(self) -> bool {
        matches!(self, Format::Int8Row | Format::Int4Row | Format::Int2Row | Format::Int4Group(_))
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::F32 => f.write_str("f32"),
            Format::Bf16 => f.write_str("bf16"),
            Format::F16 => f.write_str("f16"),
            Format::Fp8Block => f.write_str("fp8-e4m3"),
            Format::Int8Row => f.write_str("int8"),
            Format::Int4Row => f.write_str("int4-row"),
            Format::Int2Row => f.write_str("int2-row"),
            Format::Int4Group(size) => write!(f, "int4-g{}", size.get()),
        }
    }
}

/// A format name that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a weight format; use int8, int4-g64 (or g16, g32, g48, g96, g128, g192, g256), int4-row or int2-row"
)]
pub struct ParseFormatError {
    /// What was given.
    pub text: String,
}

impl FromStr for Format {
    type Err = ParseFormatError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let grouped = || text.strip_prefix("int4-g")?.parse().ok().and_then(GroupSize::new);
        match text {
            "f32" => Ok(Format::F32),
            "bf16" => Ok(Format::Bf16),
            "f16" => Ok(Format::F16),
            "fp8-e4m3" => Ok(Format::Fp8Block),
            "int8" => Ok(Format::Int8Row),
            "int4-row" => Ok(Format::Int4Row),
            "int2-row" => Ok(Format::Int2Row),
            _ => grouped().map(Format::Int4Group).ok_or_else(|| ParseFormatError { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn group(size: usize) -> Format {
        Format::Int4Group(GroupSize::new(size).unwrap())
    }

    #[test]
    fn published_sizes_of_glm_5_2() {
        // Payload and scale bytes of the public artifact.
        let cases = [
            (Format::Int8Row, 154_880, 6144, 951_582_720, 619_520),
            (Format::Int4Row, 2048, 6144, 6_291_456, 8_192),
            (Format::Int4Row, 28_672, 512, 7_340_032, 114_688),
            (Format::Int4Row, 6144, 16_384, 50_331_648, 24_576),
            (Format::Int8Row, 6144, 12_288, 75_497_472, 24_576),
        ];
        for (format, rows, cols, payload, scales) in cases {
            assert_eq!(format.payload_bytes(rows, cols), Some(payload));
            assert_eq!(format.scale_count(rows, cols).map(|n| n * 4), Some(scales));
        }
        let expert = |f: Format| 2 * f.total_bytes(2048, 6144).unwrap() + f.total_bytes(6144, 2048).unwrap();
        assert_eq!(expert(Format::Int4Row), 18_915_328);
        assert_eq!(expert(Format::Int8Row), 37_789_696);
        assert_eq!(expert(group(128)), 20_054_016);
    }

    #[test]
    fn partial_groups_and_odd_widths_round_up() {
        assert_eq!(group(64).scale_count(3, 200), Some(12));
        assert_eq!(group(16).payload_bytes(2, 33), Some(34));
        assert_eq!(Format::Int2Row.payload_bytes(3, 5), Some(6));
        assert_eq!(Format::Fp8Block.scale_count(129, 128), Some(2));
    }

    #[test]
    fn groups_are_inferred_from_their_number() {
        // One group for a whole row too.
        let read = |cols, size| group(size).as_inferred(cols);
        assert_eq!((read(65, 16), read(65, 64), read(200, 48)), (group(16), group(48), group(48)));
        assert_eq!((read(200, 64), read(200, 128), read(100, 64)), (group(64), group(128), group(64)));
        assert_eq!((read(31, 16), read(64, 64), read(31, 32)), (group(16), Format::Int4Row, Format::Int4Row));
        for cols in [512, 2048, 6144, 12_288, 16_384] {
            assert!(GroupSize::ALL.iter().all(|size| read(cols, size.get()) == Format::Int4Group(*size)));
        }
        assert_eq!(Format::Int8Row.as_inferred(7), Format::Int8Row);
    }

    #[test]
    fn overflow_is_none() {
        assert_eq!(Format::F32.payload_bytes(usize::MAX, 2), None);
        assert_eq!(Format::Int8Row.total_bytes(usize::MAX / 4, 2), None);
    }

    #[test]
    fn names_round_trip() {
        let mut all = vec![Format::F32, Format::Bf16, Format::F16, Format::Fp8Block];
        all.extend([Format::Int8Row, Format::Int4Row, Format::Int2Row]);
        all.extend(GroupSize::ALL.map(Format::Int4Group));
        for format in all {
            assert_eq!(format.to_string().parse::<Format>(), Ok(format));
        }
        assert!("int4-g40".parse::<Format>().is_err());
        assert!("q4_0".parse::<Format>().is_err());
    }
}
