//! Byte counts as people write them.

use std::fmt;
use std::str::FromStr;

/// A number of bytes.
///
/// Parses `16G`, `16GB`, `1.5GiB`, `800m`, `4096`: decimal units are powers of
/// 1000 and `i` units powers of 1024, as disks and memory are sold and reported.
/// Displays with decimal units.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct ByteSize(pub u64);

/// A byte count that could not be understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a size; write a number with an optional unit, such as 16G, 1.5GiB or 800M")]
pub struct ParseByteSizeError {
    /// What was given.
    pub text: String,
}

impl FromStr for ByteSize {
    type Err = ParseByteSizeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let fail = || ParseByteSizeError { text: text.to_owned() };
        let trimmed = text.trim();
        let split = trimmed.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let factor: u64 = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kb" => 1_000,
            "m" | "mb" => 1_000_000,
            "g" | "gb" => 1_000_000_000,
            "t" | "tb" => 1_000_000_000_000,
            "p" | "pb" => 1_000_000_000_000_000,
            "kib" => 1 << 10,
            "mib" => 1 << 20,
            "gib" => 1 << 30,
            "tib" => 1 << 40,
            "pib" => 1 << 50,
            _ => return Err(fail()),
        };
        let number = number.trim();
        if let Ok(whole) = number.parse::<u64>() {
            return whole.checked_mul(factor).map(ByteSize).ok_or_else(fail);
        }
        let value: f64 = number.parse().map_err(|_| fail())?;
        let bytes = value * factor as f64;
        if !bytes.is_finite() || bytes < 0.0 || bytes >= u64::MAX as f64 {
            return Err(fail());
        }
        Ok(ByteSize(bytes.round() as u64))
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [(u64, &str); 4] =
            [(1_000_000_000_000, "TB"), (1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB")];
        for (factor, unit) in UNITS {
            if self.0 >= factor {
                return write!(f, "{:.2} {unit}", self.0 as f64 / factor as f64);
            }
        }
        write!(f, "{} B", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_what_people_write() {
        for (text, bytes) in [
            ("4096", 4096),
            ("16G", 16_000_000_000),
            ("16 GB", 16_000_000_000),
            ("1.5GiB", 1_610_612_736),
            ("800m", 800_000_000),
            ("2kib", 2048),
            ("1P", 1_000_000_000_000_000),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap(), ByteSize(bytes), "{text}");
        }
    }

    #[test]
    fn refuses_what_is_no_size() {
        for text in ["", "G", "-1G", "1X", "nan", "inf", "99999999999T", "99999P", "1 2G"] {
            assert!(text.parse::<ByteSize>().is_err(), "{text}");
        }
    }

    #[test]
    fn shows_decimal_units() {
        assert_eq!(ByteSize(18_915_328).to_string(), "18.92 MB");
        assert_eq!(ByteSize(999).to_string(), "999 B");
    }
}
