//! What conversion changed: the weights of the result against those of the source.

use forebay_core::quant::{Encoded, decode_row};
use forebay_core::{Format, MatrixView};

/// How far converted weights are from what they were made of.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Loss {
    /// Weights compared.
    pub weights: u64,
    /// Over all rows the largest difference, as a share of the largest weight of its row.
    pub max: f64,
    squared_difference: f64,
    squared: f64,
}

impl Loss {
    /// The root of the mean squared difference, as a share of the root of the mean squared weight.
    pub fn rms(&self) -> f64 {
        match self.squared > 0.0 {
            true => (self.squared_difference / self.squared).sqrt(),
            false => 0.0,
        }
    }

    /// Compares `row` with what became of it: the last codes and scales of `encoded`.
    pub(super) fn add_row(&mut self, format: Format, row: &[f32], encoded: &Encoded, out: &mut Vec<f32>) {
        let tail = |len: usize, of: usize| len.saturating_sub(of);
        let codes = tail(encoded.codes.len(), format.row_bytes(row.len()).unwrap_or(0));
        let scales = tail(encoded.scales.len(), format.scale_count(1, row.len()).unwrap_or(0));
        let (codes, scales) = (&encoded.codes[codes..], &encoded.scales[scales..]);
        let Ok(view) = MatrixView::new(format, 1, row.len(), codes, scales) else { return };
        out.resize(row.len(), 0.0);
        decode_row(&view, 0, out);
        let (mut largest, mut furthest) = (0f32, 0f64);
        for (before, after) in row.iter().zip(&*out) {
            let (before, difference) = (f64::from(*before), f64::from(*after) - f64::from(*before));
            largest = largest.max(before.abs() as f32);
            furthest = furthest.max(difference.abs());
            self.squared += before * before;
            self.squared_difference += difference * difference;
        }
        self.weights += row.len() as u64;
        if largest > 0.0 {
            self.max = self.max.max(furthest / f64::from(largest));
        }
    }

    /// Adds what was compared elsewhere.
    pub(super) fn add(&mut self, other: &Self) {
        self.weights += other.weights;
        self.max = self.max.max(other.max);
        self.squared_difference += other.squared_difference;
        self.squared += other.squared;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::quant::encode;

    #[test]
    fn a_loss_is_a_share_of_what_there_was() {
        // One step is 0.125: 0.45 becomes 0.5 and 0.05 becomes 0; the second row becomes itself.
        let rows = [[0.875f32, -0.875, 0.45, 0.05], [7.0, 1.0, -3.0, 0.0]];
        let mut loss = Loss::default();
        let mut out = Vec::new();
        for row in &rows {
            let encoded = encode(Format::Int4Row, 1, 4, row).unwrap();
            let mut part = Loss::default();
            part.add_row(Format::Int4Row, row, &encoded, &mut out);
            loss.add(&part);
        }
        assert_eq!(loss.weights, 8);
        assert!((loss.max - 0.05 / 0.875).abs() < 1e-6, "{loss:?}");
        let squared = 2.0 * 0.875 * 0.875 + 0.45 * 0.45 + 0.05 * 0.05 + 59.0;
        assert!((loss.rms() - (2.0 * 0.05f64 * 0.05 / squared).sqrt()).abs() < 1e-6, "{loss:?}");
        assert_eq!(Loss::default().rms(), 0.0);
    }
}
