//! Where the parts of a coded matrix lie, and what can be wrong with its bytes.

use super::STATE_BYTES;
use crate::format::Format;
use crate::panel::{PANEL_LINE, PANEL_ROWS, PanelShape};
use std::ops::Range;

/// Bytes before the scales.
pub(super) const HEADER: usize = 64;
/// Offsets in the header: frequencies come first.
pub(super) const ENCODING_AT: usize = 16;
pub(super) const BYTES_AT: usize = 20;
pub(super) const ZEROS_AT: usize = 24;
pub(super) const PALETTE_AT: usize = 32;
pub(super) const MORE_ZEROS_AT: usize = 48;
/// Entries of the directory for each panel: where its states start, its first stream, and its second one.
pub(super) const ENTRIES: usize = 3;
/// Every part starts at a multiple of this, and so does whatever follows the matrix.
pub(super) const ALIGN: usize = 64;
/// Bytes behind the last stream, at least: a decoder reads as many at a time.
pub(super) const BEHIND: usize = 32;
/// Bytes of the indices of one group of a panel: half a byte a row.
pub(super) const INDEX_BYTES: usize = PANEL_ROWS / 2;

/// Bytes that are no coded matrix of the shape that they were said to have.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CodedError {
    /// Only int4 panels can be coded.
    #[error(
        "{format} matrices cannot be coded, only int4-row and int4-gN; the container is damaged or of another version, \
         run `forebay verify` on it"
    )]
    Format {
        /// The format of the matrix.
        format: Format,
    },
    /// A part reaches beyond the end.
    #[error(
        "the {part} of a coded matrix end at byte {wanted}, but there are only {found} bytes; the container is damaged, \
         run `forebay verify` on it"
    )]
    Short {
        /// The part that is cut off.
        part: &'static str,
        /// Where it ends.
        wanted: usize,
        /// Bytes there are.
        found: usize,
    },
    /// A field of the header or the scales has a value that it cannot have.
    #[error(
        "byte {offset} of a coded matrix: {field} {found}, which should be {wanted}; the container is damaged or of \
         another version, run `forebay verify` on it"
    )]
    Field {
        /// What the field says.
        field: &'static str,
        /// Where it lies.
        offset: usize,
        /// What it says.
        found: f64,
        /// What it may say.
        wanted: &'static str,
    },
    /// The directory's places do not follow one another.
    #[error(
        "panel {panel} of a coded matrix lies at bytes {places:?} of {from}..={to}, which is no order; the container is \
         damaged, run `forebay verify` on it"
    )]
    Directory {
        /// The panel; as many as there are panels for the end of the last one.
        panel: usize,
        /// Where it says that states, first stream and second stream start.
        places: [usize; ENTRIES],
        /// Where the part of the panel before ends.
        from: usize,
        /// Where the streams must end.
        to: usize,
    },
}

/// The ways in which scales are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Encoding {
    /// As in the panels.
    Lines,
    /// Indices into a palette, a value for each block, and exceptions.
    Index,
}

/// Where the parts start.
#[derive(Clone, Copy, Debug)]
pub(super) struct Places {
    /// Groups of a panel.
    pub groups: usize,
    /// Blocks of a block row; 0 without index scales.
    pub blocks: usize,
    /// Lines of scales, or the indices; the values of the blocks start behind the header.
    pub scales: usize,
    pub directory: usize,
    /// The first panel's states, if nothing lies between.
    pub chains: usize,
}

impl Places {
    /// The places in a matrix of int4 panels; `None` if they cannot be counted.
    pub(super) fn new(shape: &PanelShape, encoding: Encoding) -> Option<Self> {
        let (panels, groups) = (shape.panels(), shape.cols().div_ceil(shape.group_cols()));
        let (blocks, scales, per_group) = match encoding {
            Encoding::Lines => (0, HEADER, PANEL_LINE),
            Encoding::Index => {
                let blocks = shape.cols().div_ceil(super::SCALE_BLOCK);
                let values = shape.rows().div_ceil(super::SCALE_BLOCK).checked_mul(blocks)?.checked_mul(4)?;
                (blocks, values.checked_add(HEADER)?.checked_next_multiple_of(ALIGN)?, INDEX_BYTES)
            }
        };
        let directory = panels.checked_mul(groups)?.checked_mul(per_group)?.checked_add(scales)?;
        let directory = directory.checked_next_multiple_of(ALIGN)?;
        let entries = panels.checked_mul(ENTRIES)?.checked_add(1)?;
        let chains = entries.checked_mul(4)?.checked_add(directory)?.checked_next_multiple_of(ALIGN)?;
        panels.checked_mul(STATE_BYTES)?.checked_add(chains)?;
        Some(Self { groups, blocks, scales, directory, chains })
    }
}

/// The lines of codes of a panel, as ranges of its bytes in ascending order: one for each group of columns, for its
/// scales lie between them.
pub fn code_runs(shape: &PanelShape) -> impl Iterator<Item = Range<usize>> + use<> {
    let shape = *shape;
    let group = shape.group_cols();
    (0..shape.cols().div_ceil(group)).map(move |index| {
        let (start, scales) = (shape.codes_at(index * group), shape.scales_at(index));
        // With one scale a row the scales come first.
        start..if scales > start { scales } else { shape.panel_bytes() }
    })
}

/// The four bytes at `at`, if they are there.
pub(super) fn word(bytes: &[u8], at: usize) -> Option<[u8; 4]> {
    bytes.get(at..)?.first_chunk().copied()
}

/// The number at `at`, if it is there and can be one of bytes.
pub(super) fn number(bytes: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_le_bytes(word(bytes, at)?)).ok()
}
