//! The two arithmetic modes.

use std::fmt;
use std::str::FromStr;

/// How matrices with integer codes are multiplied (docs/numerics.md).
///
/// Matrices stored as floats are always multiplied exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Arith {
    /// Weights dequantised to f32, activations f32: the oracle mode.
    Exact,
    /// Activations quantised to int8 in groups of 64, exact integer dots. The default.
    #[default]
    Int8,
}

impl fmt::Display for Arith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Arith::Exact => "exact",
            Arith::Int8 => "int8",
        })
    }
}

/// An arithmetic mode that is not known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an arithmetic mode; use exact or int8")]
pub struct ParseArithError {
    /// What was given.
    pub text: String,
}

impl FromStr for Arith {
    type Err = ParseArithError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "exact" => Ok(Arith::Exact),
            "int8" => Ok(Arith::Int8),
            _ => Err(ParseArithError { text: text.to_owned() }),
        }
    }
}
