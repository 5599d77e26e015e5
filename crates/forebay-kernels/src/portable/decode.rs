//! Weight codes to i8 and to f32, a chunk of columns at a time.

use super::{CHUNK, Room};
use forebay_core::format::{FP8_BLOCK, Format};
use forebay_core::quant::columns_per_scale;
use forebay_core::view::MatrixView;

/// The integer codes of columns `start..start + out.len()`; `start` is a multiple of [`CHUNK`].
///
/// # Safety
/// As the methods of [`Room`].
#[inline(always)]
pub(crate) unsafe fn codes<R: Room>(format: Format, row_codes: &[u8], start: usize, out: &mut [i8]) {
    match format {
        Format::Int4Row | Format::Int4Group(_) => {
            let bytes = &row_codes[start / 2..][..out.len().div_ceil(2)];
            // SAFETY: the instruction set is there, says the caller.
            unsafe { R::unpack_int4(bytes, out) }
        }
        Format::Int2Row => {
            let bytes = &row_codes[start / 4..][..out.len().div_ceil(4)];
            // SAFETY: as above.
            unsafe { R::unpack_int2(bytes, out) }
        }
        _ => out.copy_from_slice(bytemuck::cast_slice(&row_codes[start..][..out.len()])),
    }
}

/// The weights of columns `start..start + out.len()` of `row`: code times scale, one rounding.
/// `start` is a multiple of [`CHUNK`] and `out` at most a chunk.
///
/// # Safety
/// As the methods of [`Room`].
#[inline(always)]
pub(crate) unsafe fn weights<R: Room>(view: &MatrixView<'_>, row: usize, start: usize, out: &mut [f32]) {
    let per_scale = columns_per_scale(view.format(), view.cols());
    // SAFETY: passed on to the caller.
    unsafe {
        row_weights::<R>(view.format(), per_scale, view.row_codes(row), view.row_scales(row), start, out)
    }
}

/// As [`weights`] for the codes and scales of a row, `per_scale` columns sharing one of them.
///
/// # Safety
/// As the methods of [`Room`].
#[inline(always)]
pub(crate) unsafe fn row_weights<R: Room>(
    format: Format,
    per_scale: usize,
    bytes: &[u8],
    scales: &[f32],
    start: usize,
    out: &mut [f32],
) {
    match format {
        Format::F32 => {
            let (quads, _) = bytes[4 * start..][..4 * out.len()].as_chunks::<4>();
            for (o, b) in out.iter_mut().zip(quads) {
                *o = f32::from_le_bytes(*b);
            }
        }
        Format::Bf16 => {
            let (pairs, _) = bytes[2 * start..][..2 * out.len()].as_chunks::<2>();
            for (o, b) in out.iter_mut().zip(pairs) {
                *o = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
            }
        }
        Format::F16 => {
            let (pairs, _) = bytes[2 * start..][..2 * out.len()].as_chunks::<2>();
            for (o, b) in out.iter_mut().zip(pairs) {
                *o = f16(u16::from_le_bytes(*b));
            }
        }
        Format::Fp8Block => {
            let blocks = out.chunks_mut(FP8_BLOCK).zip(bytes[start..].chunks(FP8_BLOCK));
            for ((out, codes), scale) in blocks.zip(&scales[start / FP8_BLOCK..]) {
                for (o, code) in out.iter_mut().zip(codes) {
                    *o = fp8(*code) * scale;
                }
            }
        }
        Format::Int8Row | Format::Int4Row | Format::Int2Row | Format::Int4Group(_) => {
            let mut unpacked = [0i8; CHUNK];
            let unpacked = &mut unpacked[..out.len()];
            // SAFETY: passed on to the caller.
            unsafe { codes::<R>(format, bytes, start, unpacked) };
            let groups = out.chunks_mut(per_scale).zip(unpacked.chunks(per_scale));
            for ((out, codes), scale) in groups.zip(&scales[start / per_scale..]) {
                for (o, code) in out.iter_mut().zip(codes) {
                    *o = f32::from(*code) * scale;
                }
            }
        }
    }
}

/// Half precision without branches: exponent and mantissa are moved into place as a
/// tiny f32, then an exact multiplication by 2^112 corrects the exponent's bias.
#[inline(always)]
fn f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    let finite = f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23);
    let special = f32::from_bits(magnitude | 0x7F80_0000);
    let value = if bits & 0x7C00 == 0x7C00 { special } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

/// FP8 E4M3 without branches, by the same device: the bias differs by 120.
#[inline(always)]
fn fp8(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F) << 20;
    let sign = u32::from(code & 0x80) << 24;
    let finite = f32::from_bits(magnitude) * f32::from_bits((120 + 127) << 23);
    let value = if code & 0x7F == 0x7F { f32::NAN } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::float::{f16_to_f32, fp8_e4m3_to_f32};

    fn same(a: f32, b: f32) -> bool {
        a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
    }

    #[test]
    fn every_half_and_every_fp8_code() {
        assert!((0..=u16::MAX).all(|bits| same(f16(bits), f16_to_f32(bits))));
        assert!((0..=u8::MAX).all(|code| same(fp8(code), fp8_e4m3_to_f32(code))));
    }
}
