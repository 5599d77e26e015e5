//! NVFP4 as ModelOpt stores it: 4-bit floats in groups of 16, each with an FP8 scale, and one scale for the matrix
//! (docs/convert.md). Only ever read, to be converted.

use crate::float::FP8_E4M3;

/// Columns that share an FP8 scale.
pub const NVFP4_GROUP: usize = 16;

/// The value of each code: sign, two bits of exponent, one of mantissa.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// Decodes one row: `codes` has two columns a byte, the even one in the low bits; `scales` one FP8 number per
/// 16 columns; `scale_2` is the matrix's. Code times scale is exact, so that there is one rounding.
///
/// # Panics
/// If `codes` or `scales` is too short for `out`.
pub fn decode_row(codes: &[u8], scales: &[u8], scale_2: f32, out: &mut [f32]) {
    for (group, out) in out.chunks_mut(NVFP4_GROUP).enumerate() {
        let scale = FP8_E4M3[usize::from(scales[group])];
        let codes = &codes[group * NVFP4_GROUP / 2..];
        for (col, out) in out.iter_mut().enumerate() {
            let byte = codes[col / 2];
            let code = if col.is_multiple_of(2) { byte & 0xF } else { byte >> 4 };
            *out = E2M1[usize::from(code)] * scale * scale_2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By hand: byte 0x7a holds -1 and 6.
    #[test]
    fn low_bits_are_the_even_column_and_groups_have_their_own_scale() {
        let mut out = [0.0; 18];
        decode_row(&[0x7A; 9], &[0x38, 0x7E], 0.5, &mut out);
        assert_eq!(out[..4], [-0.5, 3.0, -0.5, 3.0]);
        assert_eq!(out[16..], [-224.0, 1344.0]);
        let codes: Vec<u8> = (0..8).map(|i| (2 * i) | (2 * i + 1) << 4).collect();
        let mut all = [0.0; 16];
        decode_row(&codes, &[0x38], 1.0, &mut all);
        assert_eq!(all[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
        assert!(all[..8].iter().zip(&all[8..]).all(|(plus, minus)| *minus == -plus));
    }
}
