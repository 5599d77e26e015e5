//! What the bytes of a weight format mean, and how they are made.
//!
//! This is the readable truth of docs/format.md section 6; the SIMD
//! decoders in `forebay-kernels` are compared with it bit for bit.

use crate::float::{FP8_E4M3, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use crate::format::{FP8_BLOCK, Format};
use crate::view::MatrixView;

/// Writes row `row` of `view` as f32: code times scale, one rounding each.
///
/// # Panics
/// If `row` is out of range or `out` is not `cols` long.
pub fn decode_row(view: &MatrixView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), view.cols(), "one output per column");
    let codes = view.row_codes(row);
    let scales = view.row_scales(row);
    match view.format() {
        Format::F32 => {
            for (o, b) in out.iter_mut().zip(codes.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        Format::Bf16 => {
            for (o, b) in out.iter_mut().zip(codes.chunks_exact(2)) {
                *o = bf16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Format::F16 => {
            for (o, b) in out.iter_mut().zip(codes.chunks_exact(2)) {
                *o = f16_to_f32(u16::from_le_bytes([b[0], b[1]]));
            }
        }
        Format::Fp8Block => {
            let blocks = out.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK)).zip(scales);
            for ((out, codes), scale) in blocks {
                for (o, code) in out.iter_mut().zip(codes) {
                    *o = FP8_E4M3[usize::from(*code)] * scale;
                }
            }
        }
        Format::Int8Row | Format::Int4Row | Format::Int2Row | Format::Int4Group(_) => {
            let per_scale = columns_per_scale(view.format(), view.cols());
            for (c, o) in out.iter_mut().enumerate() {
                *o = f32::from(int_code(view.format(), codes, c)) * scales[c / per_scale];
            }
        }
    }
}

/// The signed integer at column `col` of one row of codes; `format` must be an integer format.
#[inline]
pub fn int_code(format: Format, row_codes: &[u8], col: usize) -> i8 {
    match format {
        Format::Int4Row | Format::Int4Group(_) => {
            let byte = row_codes[col / 2];
            let nibble = if col.is_multiple_of(2) { byte & 0xF } else { byte >> 4 };
            nibble as i8 - 8
        }
        Format::Int2Row => ((row_codes[col / 4] >> (2 * (col % 4))) & 3) as i8 - 2,
        _ => row_codes[col] as i8,
    }
}

/// Columns that share one scale in an integer format: the group size, or the whole row.
#[inline]
pub fn columns_per_scale(format: Format, cols: usize) -> usize {
    match format {
        Format::Int4Group(size) => size.get(),
        _ => cols.max(1),
    }
}

/// The codes and scales of a freshly encoded matrix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoded {
    /// Row after row, as [`Format::row_bytes`] says.
    pub codes: Vec<u8>,
    /// As [`MatrixView::scales`] orders them.
    pub scales: Vec<f32>,
}

/// A format that weights cannot be encoded to.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("weights cannot be encoded as {format}; choose int8, int4-row, int2-row, int4-gN, bf16, f16 or f32")]
pub struct EncodeError {
    /// The format asked for.
    pub format: Format,
}

/// Encodes a `rows x cols` f32 matrix, `values` row-major.
///
/// Integer formats follow the reference's quantiser: `s = max(absmax / qmax, 1e-8)`,
/// `q = clamp(round_half_even(w / s))`, per row or per group; unused bits of a row's last byte are 0.
///
/// # Panics
/// If `values` is not `rows * cols` long.
pub fn encode(format: Format, rows: usize, cols: usize, values: &[f32]) -> Result<Encoded, EncodeError> {
    assert_eq!(values.len(), rows * cols, "one value per element");
    let mut out = Encoded::default();
    for row in values.chunks_exact(cols.max(1)) {
        encode_row(format, row, &mut out)?;
    }
    Ok(out)
}

/// Appends one row to `out`, as [`encode`] does.
pub fn encode_row(format: Format, row: &[f32], out: &mut Encoded) -> Result<(), EncodeError> {
    match format {
        Format::F32 => out.codes.extend(row.iter().flat_map(|v| v.to_le_bytes())),
        Format::Bf16 => out.codes.extend(row.iter().flat_map(|v| f32_to_bf16(*v).to_le_bytes())),
        Format::F16 => out.codes.extend(row.iter().flat_map(|v| f32_to_f16(*v).to_le_bytes())),
        Format::Fp8Block => return Err(EncodeError { format }),
        Format::Int8Row => quantise::<1>(format, row, [-128, 127, 0], out),
        Format::Int4Row | Format::Int4Group(_) => quantise::<2>(format, row, [-8, 7, 8], out),
        Format::Int2Row => quantise::<4>(format, row, [-2, 1, 2], out),
    }
    Ok(())
}

/// The first number of `row` that is infinite or not a number.
pub fn first_not_finite(row: &[f32]) -> Option<usize> {
    // In whole numbers, so that a compiler may look at many at once; one branch a row.
    (largest_bits(row) >= f32::INFINITY.to_bits() as i32).then(|| row.iter().position(|v| !v.is_finite()))?
}

/// The bits of the largest absolute value: for numbers without their sign, the order of the bits is theirs.
fn largest_bits(values: &[f32]) -> i32 {
    values.iter().fold(0, |most, value| most.max((value.to_bits() & 0x7FFF_FFFF) as i32))
}

/// Adding this to a number of magnitude below 2^22 leaves no bits behind the point, rounded half to even, and
/// the integer in the lowest bits.
const TO_INTEGER: f32 = 12_582_912.0;

/// Appends the codes of `row`, each with `bias` added, `PER_BYTE` to a byte, and their scales. A group begins with a
/// byte: the sizes of groups are even.
fn quantise<const PER_BYTE: usize>(
    format: Format,
    row: &[f32],
    [low, high, bias]: [i32; 3],
    out: &mut Encoded,
) {
    for group in row.chunks(columns_per_scale(format, row.len())) {
        let largest = largest_bits(group);
        if largest >= f32::INFINITY.to_bits() as i32 {
            let scale = scale_not_finite(group, high);
            out.scales.push(scale);
            pack::<PER_BYTE>(group, &mut out.codes, |value| {
                // NaN becomes 0, and so does everything beside an infinity.
                let code = (value / scale).round_ties_even().clamp(low as f32, high as f32) as i32;
                (code + bias) as u8
            });
            continue;
        }
        let scale = (f32::from_bits(largest as u32) / high as f32).max(1e-8);
        out.scales.push(scale);
        pack::<PER_BYTE>(group, &mut out.codes, |value| {
            // The quotient is at most `high` and a rounding: far below 2^22.
            let code = (value / scale + TO_INTEGER).to_bits() as i32 - TO_INTEGER.to_bits() as i32;
            (code.clamp(low, high) + bias) as u8
        });
    }
}

/// Appends the codes of `values`, the first in the lowest bits; unused bits of the last byte are 0.
#[inline(always)]
fn pack<const PER_BYTE: usize>(values: &[f32], codes: &mut Vec<u8>, code: impl Fn(f32) -> u8) {
    let byte = |some: &[f32]| {
        some.iter().rev().fold(0, |byte: u32, value| byte << (8 / PER_BYTE) | u32::from(code(*value))) as u8
    };
    let (whole, rest) = values.as_chunks::<PER_BYTE>();
    codes.extend(whole.iter().map(|some| byte(some)));
    if !rest.is_empty() {
        codes.push(byte(rest));
    }
}

/// The scale of a group with an infinity or a NaN in it.
fn scale_not_finite(group: &[f32], high: i32) -> f32 {
    let absmax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
    (absmax / high as f32).max(1e-8)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::GroupSize;
    use proptest::prelude::*;

    fn grouped(size: usize) -> Format {
        Format::Int4Group(GroupSize::new(size).unwrap())
    }

    fn decode(format: Format, rows: usize, cols: usize, e: &Encoded) -> Vec<f32> {
        let view = MatrixView::new(format, rows, cols, &e.codes, &e.scales).unwrap();
        let mut out = vec![0.0; rows * cols];
        for (r, line) in out.chunks_exact_mut(cols).enumerate() {
            decode_row(&view, r, line);
        }
        out
    }

    #[test]
    fn v01_int4_row() {
        let w = [0.875, -0.875, 0.4375, 0.0625, -0.1875];
        let e = encode(Format::Int4Row, 1, 5, &w).unwrap();
        assert_eq!(e.codes, [0x1F, 0x8C, 0x06]);
        assert_eq!(e.scales, [0.125]);
        assert_eq!(decode(Format::Int4Row, 1, 5, &e), [0.875, -0.875, 0.5, 0.0, -0.25]);
        // Other writers pad with 8 instead of 0; the padding must not matter.
        let padded = Encoded { codes: vec![0x1F, 0x8C, 0x86], scales: e.scales.clone() };
        assert_eq!(decode(Format::Int4Row, 1, 5, &padded), decode(Format::Int4Row, 1, 5, &e));
    }

    #[test]
    fn v02_int2_row() {
        let w = [0.875, -0.875, 0.4375, 0.0625, -0.1875];
        let e = encode(Format::Int2Row, 1, 5, &w).unwrap();
        assert_eq!(e.scales, [0.875]);
        assert_eq!(e.codes[0], 0xA7);
        assert_eq!(e.codes[1] & 3, 0x02);
        assert_eq!(decode(Format::Int2Row, 1, 5, &e), [0.875, -0.875, 0.0, 0.0, 0.0]);
    }

    #[test]
    fn v03_int8_row() {
        let e = encode(Format::Int8Row, 1, 3, &[1.0, -1.0, 0.25]).unwrap();
        assert_eq!(e.codes, [0x7F, 0x81, 0x20]);
        assert_eq!(e.scales, [1.0 / 127.0]);
    }

    #[test]
    fn converter_vectors() {
        let e = encode(Format::Int4Row, 1, 5, &[0.7, -0.3, 0.2, 0.1, -0.7]).unwrap();
        assert_eq!((e.codes, e.scales), (vec![0x5F, 0x9A, 0x01], vec![0.7f32 / 7.0]));
        let join = [0.05, -0.05, 0.02, 0.049, 1.5, -0.2, 0.3, 0.1];
        let codes = |format| {
            let e = encode(format, 1, 8, &join).unwrap();
            (0..8).map(|col| int_code(format, &e.codes, col)).collect::<Vec<_>>()
        };
        assert_eq!(codes(Format::Int4Row), [0, 0, 0, 0, 7, -1, 1, 0]);
        assert_eq!(codes(Format::Int8Row), [4, -4, 2, 4, 127, -17, 25, 8]);
    }

    #[test]
    fn what_is_not_finite_is_found_and_harms_no_other_group() {
        assert_eq!(first_not_finite(&[0.0, -1.0, f32::MAX, f32::MIN_POSITIVE]), None);
        assert_eq!(first_not_finite(&[]), None);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(first_not_finite(&[1.0, bad, bad]), Some(1));
            let mut row = [0.5f32; 32];
            row[3] = bad;
            let e = encode(grouped(16), 1, 32, &row).unwrap();
            assert!(e.codes[8..].iter().all(|byte| *byte == 0xFF) && e.scales[1] == 0.5 / 7.0);
        }
    }

    #[test]
    fn v05_grouped_decode() {
        let e = Encoded { codes: vec![0x99; 10], scales: vec![0.5, 2.0] };
        let w = decode(grouped(16), 1, 20, &e);
        assert!(w[..16].iter().all(|v| *v == 0.5) && w[16..].iter().all(|v| *v == 2.0));
        assert_eq!(w.iter().sum::<f32>(), 16.0);
    }

    #[test]
    fn v07_odd_width_rows() {
        let e = Encoded { codes: vec![0x98, 0x07, 0x70, 0x0F], scales: vec![1.0, 1.0] };
        assert_eq!(decode(Format::Int4Row, 2, 3, &e), [0.0, 1.0, -1.0, -8.0, -1.0, 7.0]);
    }

    #[test]
    fn zeros_take_the_smallest_scale() {
        for format in [Format::Int8Row, Format::Int4Row, Format::Int2Row, grouped(16)] {
            let e = encode(format, 2, 17, &[0.0; 34]).unwrap();
            assert!(e.scales.iter().all(|s| *s == 1e-8), "{format}");
            assert!(decode(format, 2, 17, &e).iter().all(|v| *v == 0.0), "{format}");
        }
    }

    #[test]
    fn fp8_is_read_but_not_written() {
        assert!(encode(Format::Fp8Block, 1, 1, &[1.0]).is_err());
        let codes: Vec<u8> = vec![0x38; 130 * 2];
        let e = Encoded { codes, scales: vec![2.0, 3.0] };
        let w = decode(Format::Fp8Block, 2, 130, &e);
        assert_eq!((w[0], w[127], w[128], w[259]), (2.0, 2.0, 3.0, 3.0));
    }

    /// Codes and scales by the letter of the spec, one by one.
    fn check_definition(format: Format, cols: usize, w: &[f32], e: &Encoded) {
        let (low, high) = match format {
            Format::Int8Row => (-128f32, 127f32),
            Format::Int2Row => (-2.0, 1.0),
            Format::Int4Row | Format::Int4Group(_) => (-8.0, 7.0),
            _ => return,
        };
        let row_bytes = format.row_bytes(cols).unwrap();
        let per_scale = columns_per_scale(format, cols);
        for (r, row) in w.chunks_exact(cols).enumerate() {
            for (g, group) in row.chunks(per_scale).enumerate() {
                let absmax = group.iter().map(|v| v.abs()).fold(0f32, f32::max);
                let scale = (absmax / high).max(1e-8);
                assert_eq!(e.scales[r * cols.div_ceil(per_scale) + g].to_bits(), scale.to_bits());
                for (c, value) in group.iter().enumerate() {
                    let wanted = (value / scale).round_ties_even().clamp(low, high) as i8;
                    let codes = &e.codes[r * row_bytes..(r + 1) * row_bytes];
                    assert_eq!(int_code(format, codes, g * per_scale + c), wanted, "{format}: {value}");
                }
            }
        }
    }

    fn any_format() -> impl Strategy<Value = Format> {
        prop_oneof![
            Just(Format::F32),
            Just(Format::Bf16),
            Just(Format::F16),
            Just(Format::Int8Row),
            Just(Format::Int4Row),
            Just(Format::Int2Row),
            (0..8usize).prop_map(|i| Format::Int4Group(GroupSize::ALL[i])),
        ]
    }

    proptest! {
        /// Sizes are exact, the error is at most half a step (a step below the negative end,
        /// which symmetric scales never use), and a second encoding changes nothing.
        #[test]
        fn round_trip(format in any_format(), rows in 1..4usize, cols in 1..300usize, seed in any::<u64>()) {
            let mut state = seed | 1;
            let mut next = move || {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            };
            let w: Vec<f32> = (0..rows * cols).map(|_| next()).collect();
            let e = encode(format, rows, cols, &w).unwrap();
            prop_assert_eq!(Some(e.codes.len()), format.payload_bytes(rows, cols));
            prop_assert_eq!(Some(e.scales.len()), format.scale_count(rows, cols));
            let back = decode(format, rows, cols, &e);
            check_definition(format, cols, &w, &e);
            let per_scale = columns_per_scale(format, cols);
            for (i, (a, b)) in w.iter().zip(&back).enumerate() {
                let bound = match format {
                    Format::F32 => 0.0,
                    Format::Bf16 => a.abs() / 256.0,
                    Format::F16 => a.abs() / 2048.0 + 1e-7,
                    _ => {
                        let (r, c) = (i / cols, i % cols);
                        e.scales[r * cols.div_ceil(per_scale) + c / per_scale] * 0.500_01
                    }
                };
                prop_assert!((a - b).abs() <= bound, "{} -> {} (bound {})", a, b, bound);
            }
            if !format.is_integer() {
                prop_assert_eq!(encode(format, rows, cols, &back).unwrap(), e);
            }
        }
    }
}
