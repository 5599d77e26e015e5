//! Weights sixteen at a time.

use crate::portable::decode;
use crate::portable::lanes::LANES;
use forebay_core::panel::PANEL_LINE;

/// Half precision, widened.
#[inline(always)]
pub(crate) fn load_f16(values: &[u16; LANES]) -> [f32; LANES] {
    values.map(decode::f16)
}

/// FP8 E4M3, widened.
#[inline(always)]
pub(crate) fn load_fp8(values: &[u8; LANES]) -> [f32; LANES] {
    values.map(decode::fp8)
}

/// Code times scale of two codes a byte: value + 8, even column in the low nibble.
#[inline(always)]
pub(super) fn load_int4(codes: &[u8; LANES / 2], scale: f32) -> [f32; LANES] {
    std::array::from_fn(|i| f32::from((codes[i / 2] >> (4 * (i % 2)) & 15) as i8 - 8) * scale)
}

/// Byte `column` of each row of a unit.
#[inline(always)]
pub(super) fn int8_column(unit: &[u8; PANEL_LINE], column: usize) -> [f32; LANES] {
    std::array::from_fn(|i| f32::from(unit[4 * i + column] as i8))
}

/// Nibble `column` of each row of a unit.
#[inline(always)]
pub(super) fn int4_column(unit: &[u8; PANEL_LINE], column: usize) -> [f32; LANES] {
    std::array::from_fn(|i| f32::from(((unit[4 * i + column / 2] >> (4 * (column % 2))) & 15) as i8 - 8))
}
