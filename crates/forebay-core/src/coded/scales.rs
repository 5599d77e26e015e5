//! Scales as indices: exact where int4 weights were made of an FP8 checkpoint (performance spec 2.6).
//!
//! The scale of a group is the largest weight over 7, and each weight of such a checkpoint is one of 127 magnitudes
//! times the value of its block. So the scales of a block are a few points of a lattice, and an index for each and
//! the value give them back, bit for bit. That is proven for every single scale; one that does not come back is kept
//! as it is, as an exception.

use super::SCALE_BLOCK;
use super::places::{ALIGN, INDEX_BYTES};
use crate::float::{f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use crate::format::Format;
use crate::panel::{PANEL_LINE, PANEL_ROWS, PanelShape};

/// The index of a scale that is an exception.
pub const EXCEPTION: u8 = 15;
/// Magnitudes that indices choose from.
pub(super) const PALETTE: usize = EXCEPTION as usize;
/// The largest magnitude of E4M3: 448.
pub(super) const LARGEST: u8 = 126;
/// The smallest scale that quantising gives, to groups of zeros too: on no lattice.
const SMALLEST_SCALE: f32 = 1e-8;
/// Different scales, the largest first, that a block's value is derived from: the first, unless it is on no lattice.
const ANCHORS: usize = 3;

/// The scales of one panel, as they are written.
#[derive(Clone, Copy, Debug)]
pub enum Scales<'a> {
    /// A line for each group.
    Lines(&'a [u8]),
    /// Indices.
    Index(IndexScales<'a>),
}

/// The scales of one panel as indices.
#[derive(Clone, Copy, Debug)]
pub struct IndexScales<'a> {
    /// What the indices stand for, in units of a block's value; the last one means an exception.
    pub magnitudes: [f32; PALETTE + 1],
    /// The values of the blocks of the panel's rows: little-endian f32.
    pub blocks: &'a [[u8; 4]],
    /// Sixteen indices for each group, that of row 0 in the low nibble of the first byte.
    pub indices: &'a [[u8; INDEX_BYTES]],
    /// The exceptions, in the order of the indices: little-endian f32. What there is too few of is 0.
    pub exceptions: &'a [[u8; 4]],
    /// Groups that share a block.
    pub groups_per_block: usize,
}

impl Scales<'_> {
    /// Writes the lines of scales of a panel of this shape, and nothing else.
    pub(super) fn write(&self, shape: &PanelShape, out: &mut [u8]) {
        match self {
            Scales::Lines(lines) => {
                for (group, line) in lines.chunks_exact(PANEL_LINE).enumerate() {
                    let at = shape.scales_at(group);
                    out[at..at + PANEL_LINE].copy_from_slice(line);
                }
            }
            Scales::Index(scales) => scales.write(shape, out),
        }
    }
}

impl IndexScales<'_> {
    fn write(&self, shape: &PanelShape, out: &mut [u8]) {
        let mut exceptions = self.exceptions.iter();
        let blocks = self.indices.chunks(self.groups_per_block).zip(self.blocks).enumerate();
        for (block, (groups, value)) in blocks {
            let value = f32::from_le_bytes(*value);
            let scales = self.magnitudes.map(|magnitude| scale(magnitude, value).to_le_bytes());
            for (group, indices) in groups.iter().enumerate() {
                let at = shape.scales_at(block * self.groups_per_block + group);
                let lanes = out[at..at + PANEL_LINE].as_chunks_mut::<4>().0;
                for (row, out) in lanes.iter_mut().enumerate() {
                    let index = indices[row / 2] >> (4 * (row % 2)) & 15;
                    *out = if index == EXCEPTION {
                        exceptions.next().copied().unwrap_or_default()
                    } else {
                        scales[usize::from(index)]
                    };
                }
            }
        }
    }
}

/// The scale of a group whose largest weight has this magnitude: two roundings, as in the quantiser.
fn scale(magnitude: f32, block: f32) -> f32 {
    magnitude * block / 7.0
}

/// How many groups share a block, if scales of this format can be indices.
pub(super) fn groups_per_block(format: Format) -> Option<usize> {
    match format {
        Format::Int4Group(size) if SCALE_BLOCK.is_multiple_of(size.get()) => Some(SCALE_BLOCK / size.get()),
        _ => None,
    }
}

/// The scales of a whole matrix as indices.
pub(super) struct Fitted {
    pub palette: [u8; PALETTE + 1],
    /// One value for each block, block rows one after the other.
    pub blocks: Vec<f32>,
    /// For each panel and group.
    pub indices: Vec<[u8; INDEX_BYTES]>,
    /// For each panel.
    pub exceptions: Vec<Vec<[u8; 4]>>,
}

/// Indices for the scales of these panels, where they take fewer bytes than the scales do.
pub(super) fn fit(shape: &PanelShape, panels: &[u8]) -> Option<Fitted> {
    let per_block = groups_per_block(shape.format())?;
    let groups = shape.cols().div_ceil(shape.group_cols());
    let lines: Vec<[[u8; 4]; PANEL_ROWS]> = panels
        .chunks_exact(shape.panel_bytes())
        .flat_map(|panel| {
            (0..groups).map(|group| {
                let lanes = panel[shape.scales_at(group)..].as_chunks::<4>().0;
                std::array::from_fn(|row| lanes[row])
            })
        })
        .collect();

    let mut magnitudes = vec![[None; PANEL_ROWS]; lines.len()];
    let mut blocks = Vec::new();
    for panels in (0..shape.panels()).step_by(SCALE_BLOCK / PANEL_ROWS) {
        let panels = panels..shape.panels().min(panels + SCALE_BLOCK / PANEL_ROWS);
        for first in (0..groups).step_by(per_block) {
            let here = first..groups.min(first + per_block);
            let places = || panels.clone().flat_map(|panel| here.clone().map(move |g| panel * groups + g));
            let value = block_value(places().flat_map(|at| lines[at]).map(f32::from_le_bytes).collect());
            for at in places() {
                magnitudes[at] = lines[at].map(|bytes| magnitude(bytes, value));
            }
            blocks.push(value);
        }
    }

    let palette = palette(magnitudes.iter().flatten().copied().flatten());
    let mut indices = Vec::with_capacity(lines.len());
    let mut exceptions = vec![Vec::new(); shape.panels()];
    for (at, (line, magnitudes)) in lines.iter().zip(&magnitudes).enumerate() {
        let mut packed = [0; INDEX_BYTES];
        for (row, (bytes, magnitude)) in line.iter().zip(magnitudes).enumerate() {
            let known = magnitude.and_then(|m| palette[..PALETTE].iter().position(|entry| *entry == m));
            let index = known.map_or(EXCEPTION, |index| index as u8);
            if known.is_none() {
                exceptions[at / groups].push(*bytes);
            }
            packed[row / 2] |= index << (4 * (row % 2));
        }
        indices.push(packed);
    }
    let kept = exceptions.iter().map(Vec::len).sum::<usize>();
    let takes = (4 * blocks.len()).next_multiple_of(ALIGN) + INDEX_BYTES * indices.len() + 4 * kept;
    (takes < PANEL_LINE * lines.len()).then_some(Fitted { palette, blocks, indices, exceptions })
}

/// The value that gives the most of these scales back, or 1 if none gives half of the different ones.
fn block_value(mut scales: Vec<f32>) -> f32 {
    scales.retain(|scale| scale.is_normal() && *scale > 0.0);
    scales.sort_unstable_by(|a, b| b.total_cmp(a));
    scales.dedup();
    if scales.len() > 1 {
        scales.retain(|scale| *scale != SMALLEST_SCALE);
    }
    let mut best = (scales.len() / 2 + 1, 1.0);
    for anchor in scales.iter().take(ANCHORS) {
        // Twice the magnitude and half the value is the same lattice: the largest scale can be taken for one of the
        // upper eight magnitudes, and is the uppermost where the checkpoint's maker used the range of FP8.
        for code in (LARGEST - 7..=LARGEST).rev() {
            let magnitude = fp8_e4m3_to_f32(code);
            let about = (f64::from(*anchor) * 7.0 / f64::from(magnitude)) as f32;
            // Two roundings: not more than three steps beside it.
            for step in [0, 1, -1, 2, -2, 3, -3, 4, -4] {
                let value = f32::from_bits(about.to_bits().saturating_add_signed(step));
                if !value.is_finite() || scale(magnitude, value) != *anchor {
                    continue;
                }
                let misses = scales.iter().filter(|s| self::magnitude(s.to_le_bytes(), value).is_none());
                let missed = misses.take(best.0).count();
                if missed < best.0 {
                    best = (missed, value);
                }
                if missed == 0 {
                    return value;
                }
            }
        }
    }
    best.1
}

/// The magnitude that gives a scale of a block of this value back, every bit of it, if there is one.
fn magnitude(bytes: [u8; 4], value: f32) -> Option<u8> {
    let wanted = f32::from_le_bytes(bytes);
    let code = f32_to_fp8_e4m3(wanted * 7.0 / value);
    (code <= LARGEST && scale(fp8_e4m3_to_f32(code), value).to_le_bytes() == bytes).then_some(code)
}

/// The magnitudes that occur most often, in ascending order.
fn palette(magnitudes: impl Iterator<Item = u8>) -> [u8; PALETTE + 1] {
    let mut counts = [0u64; LARGEST as usize + 1];
    magnitudes.for_each(|magnitude| counts[usize::from(magnitude)] += 1);
    let mut used: Vec<u8> = (0..=LARGEST).filter(|code| counts[usize::from(*code)] > 0).collect();
    used.sort_by_key(|code| std::cmp::Reverse(counts[usize::from(*code)]));
    used.truncate(PALETTE);
    used.sort_unstable();
    let mut palette = [0; PALETTE + 1];
    palette[..used.len()].copy_from_slice(&used);
    palette
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn values_are_found_whatever_magnitude_is_largest() {
        for (value, codes) in [
            (0.000_123_4f32, vec![126, 100, 119, 7, 1]),
            (1.0, vec![111, 110, 90]),
            (3.3e-5, vec![64, 63, 62, 61]),
            (2f32.powi(-13), vec![125, 121, 120]),
        ] {
            let scales: Vec<f32> = codes.iter().map(|code| scale(fp8_e4m3_to_f32(*code), value)).collect();
            let found = block_value(scales.clone());
            for scale in scales {
                assert!(magnitude(scale.to_le_bytes(), found).is_some(), "{value}: {scale} with {found}");
            }
        }
    }

    #[test]
    fn what_is_on_no_lattice_has_no_magnitude() {
        for bytes in [f32::NAN, f32::INFINITY, -0.0, -1.0, 1e-8].map(f32::to_le_bytes) {
            assert_eq!(magnitude(bytes, 0.25), None);
        }
        assert_eq!(magnitude([0; 4], 0.25), Some(0));
        assert_eq!(block_value(vec![]), 1.0);
        // The largest scale is none of the lattice.
        let lattice = [448.0, 320.0, 288.0, 256.0].map(|magnitude| scale(magnitude, 0.01));
        let value = block_value([&[1.1], &lattice[..]].concat());
        assert!(lattice.iter().all(|scale| magnitude(scale.to_le_bytes(), value).is_some()));
        assert_eq!(block_value(vec![f32::NAN, 0.0, -3.0]), 1.0);
    }

    proptest! {
        /// Every bit comes back from whatever has a magnitude.
        #[test]
        fn a_magnitude_is_a_proof(bits in any::<u32>(), value in any::<f32>()) {
            if let Some(code) = magnitude(bits.to_le_bytes(), value) {
                prop_assert_eq!((fp8_e4m3_to_f32(code) * value / 7.0).to_bits(), bits);
            }
        }

        #[test]
        fn any_block_of_an_fp8_checkpoint(
            value in 1e-30f32..1e20,
            codes in prop::collection::vec(1..=LARGEST, 1..40),
        ) {
            let scales: Vec<f32> = codes.iter().map(|code| scale(fp8_e4m3_to_f32(*code), value)).collect();
            let found = block_value(scales.clone());
            for scale in scales {
                prop_assert!(magnitude(scale.to_le_bytes(), found).is_some());
            }
        }
    }
}
