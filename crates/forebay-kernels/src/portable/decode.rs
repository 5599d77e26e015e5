//! Weight codes to i8 and to f32, a chunk of columns at a time.

use super::Room;
use super::lanes::LANES;
use super::line::{Line, with_line};
use forebay_core::format::{FP8_BLOCK, Format};
use forebay_core::quant::{columns_per_scale, int_code};
use forebay_core::view::MatrixView;

/// The integer codes of columns `start..start + out.len()`; `start` is a multiple of [`CHUNK`](super::CHUNK).
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

/// Columns of a row that share a scale.
#[inline(always)]
pub(crate) fn per_scale(view: &MatrixView<'_>) -> usize {
    match view.format() {
        Format::Fp8Block => FP8_BLOCK,
        format => columns_per_scale(format, view.cols()),
    }
}

/// The weights of columns `start..start + out.len()` of `row`: code times scale, one rounding.
/// `start` is a multiple of sixteen.
///
/// # Safety
/// As the methods of [`Room`].
#[inline(always)]
pub(crate) unsafe fn weights<R: Room>(view: &MatrixView<'_>, row: usize, start: usize, out: &mut [f32]) {
    let per_scale = per_scale(view);
    // SAFETY: passed on to the caller.
    unsafe {
        row_weights::<R>(view.format(), per_scale, view.row_codes(row), view.row_scales(row), start, out)
    }
}

/// As [`weights`] for the codes and scales of a row, `per_scale` columns sharing one of them;
/// `start` is a multiple of sixteen, and scales count from column 0.
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
    if R::PLAIN {
        return plain(format, per_scale, bytes, scales, start, out);
    }
    // SAFETY: passed on to the caller.
    let done = with_line!(format, F => unsafe { lines::<R, F>(per_scale, bytes, scales, start, out) }, 0);
    plain(format, per_scale, bytes, scales, start + done, &mut out[done..]);
}

/// The whole lines of `out`; returns how many columns they are.
#[inline(always)]
unsafe fn lines<R: Room, F: Line>(
    per_scale: usize,
    bytes: &[u8],
    scales: &[f32],
    start: usize,
    out: &mut [f32],
) -> usize {
    let (out, _) = out.as_chunks_mut::<LANES>();
    let codes = &bytes[start / LANES * F::BYTES..][..out.len() * F::BYTES];
    let ahead = codes.len();
    let mut at = start;
    let mut done = 0;
    while done < out.len() {
        let group = at / per_scale;
        // One scale a row stands for all columns, even if they are no whole lines.
        let here = (((group + 1) * per_scale - at).div_ceil(LANES)).min(out.len() - done);
        let scale: *const f32 = if F::SCALED { &scales[group] } else { std::ptr::null() };
        // SAFETY: passed on to the caller; the codes were just checked to be as many.
        unsafe {
            let scale = F::scale::<R>(scale);
            for (i, out) in out[done..done + here].iter_mut().enumerate() {
                let codes = codes.as_ptr().add((done + i) * F::BYTES);
                // The columns after these are likely next.
                R::prefetch(codes.wrapping_add(ahead));
                let weights = F::line::<R>(codes, scale);
                R::store(F::from_order::<R>(weights), out);
            }
        }
        done += here;
        at += here * LANES;
    }
    done * LANES
}

/// As [`row_weights`], one weight at a time.
#[inline(always)]
pub(crate) fn plain(
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
            by_group(per_scale, scales, start, out, |col, scale| fp8(bytes[col]) * scale);
        }
        Format::Int8Row | Format::Int4Row | Format::Int2Row | Format::Int4Group(_) => {
            let weight = |col, scale| f32::from(int_code(format, bytes, col)) * scale;
            by_group(per_scale, scales, start, out, weight);
        }
    }
}

/// `out[i]` = the weight of column `start + i` with the scale of its group.
#[inline(always)]
fn by_group(
    per_scale: usize,
    scales: &[f32],
    start: usize,
    out: &mut [f32],
    weight: impl Fn(usize, f32) -> f32,
) {
    let mut col = start;
    let end = start + out.len();
    while col < end {
        let group = col / per_scale;
        let group_end = end.min((group + 1) * per_scale);
        for (o, col) in out[col - start..group_end - start].iter_mut().zip(col..) {
            *o = weight(col, scales[group]);
        }
        col = group_end;
    }
}

/// Half precision without branches: exponent and mantissa are moved into place as a
/// tiny f32, then an exact multiplication by 2^112 corrects the exponent's bias.
#[inline(always)]
pub(crate) fn f16(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7FFF) << 13;
    let sign = u32::from(bits & 0x8000) << 16;
    let finite = f32::from_bits(magnitude) * f32::from_bits((112 + 127) << 23);
    let special = f32::from_bits(magnitude | 0x7F80_0000);
    let value = if bits & 0x7C00 == 0x7C00 { special } else { finite };
    f32::from_bits(value.to_bits() | sign)
}

/// FP8 E4M3 without branches, by the same device: the bias differs by 120.
#[inline(always)]
pub(crate) fn fp8(code: u8) -> f32 {
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
