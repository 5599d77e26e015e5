//! What the measurement asks of each side.

use std::fmt;
use std::str::FromStr;

/// Rows (outputs) and columns (inputs) of a weight matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.cols)
    }
}

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || format!("{text:?} is not ROWSxCOLUMNS, both multiples of 256 (such as 2048x6144)");
        let (rows, cols) = text.split_once('x').ok_or_else(wrong)?;
        let number = |text: &str| {
            text.parse().ok().filter(|n: &usize| *n > 0 && n.is_multiple_of(256)).ok_or_else(wrong)
        };
        Ok(Self { rows: number(rows)?, cols: number(cols)? })
    }
}

/// One engine's products of one kind of weights with one batch of activations.
///
/// A product starts from f32 activations: quantising them is part of what is measured.
pub trait Contender {
    /// Engine, weight format and layout.
    fn name(&self) -> String;
    /// Bits of a weight code: contenders with the same number are compared.
    fn bits(&self) -> u8;
    /// Bytes of one matrix, scales included.
    fn matrix_bytes(&self) -> usize;
    /// Makes ready for samples of `products` products. Not timed.
    fn prepare(&mut self, products: usize);
    /// Called before a sample. Not timed.
    fn wake(&mut self);
    /// One sample. Timed.
    fn run(&mut self);
    /// Called after a sample, so that idle threads do not slow the next contender. Not timed.
    fn rest(&mut self);
    /// What the last product computed: `[batch, rows]`, row-major.
    fn results(&self) -> Vec<f32>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_rows_by_columns() {
        assert_eq!("512x256".parse(), Ok(Shape { rows: 512, cols: 256 }));
        for wrong in ["", "512", "512x", "512x100", "0x256", "512x256x256", "-256x256"] {
            assert!(wrong.parse::<Shape>().is_err(), "{wrong}");
        }
    }
}
