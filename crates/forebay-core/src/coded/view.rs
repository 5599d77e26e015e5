//! A checked window on the bytes of a coded matrix.

use super::places::{
    ALIGN, BEHIND, BYTES_AT, CodedError, ENCODING_AT, ENTRIES, Encoding, HEADER, INDEX_BYTES, MORE_ZEROS_AT,
    PALETTE_AT, Places, ZEROS_AT, code_runs, number, word,
};
use super::rans;
use super::scales::{IndexScales, LARGEST, PALETTE, Scales, groups_per_block};
use super::table::{CODES, Slots, TOTAL};
use super::{SCALE_BLOCK, STATE_BYTES, STREAMS};
use crate::float::fp8_e4m3_to_f32;
use crate::format::Format;
use crate::panel::{PANEL_LINE, PANEL_ROWS, PanelShape};

/// A coded matrix, wherever its bytes live.
///
/// A view exists only where sizes, places, frequencies and values of blocks are such that every panel can be decoded
/// without leaving the bytes. What stands in the streams is not checked: wrong bytes there give wrong codes, the same
/// ones from every decoder.
#[derive(Clone, Copy, Debug)]
pub struct CodedView<'a> {
    shape: PanelShape,
    bytes: &'a [u8],
    encoding: Encoding,
    places: Places,
}

/// Where the chain of a panel lies.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// The states that decoding starts with, little-endian: 32 for the even bytes of a line, 32 for the odd ones.
    pub states: &'a [u8; STATE_BYTES],
    /// Where the two streams start, in the bytes of the matrix; 32 bytes can be read there.
    pub streams: [usize; STREAMS],
}

impl<'a> CodedView<'a> {
    /// A view on the coded matrix at the start of `bytes`, which may go on behind it and have any alignment.
    ///
    /// # Errors
    /// If the format has no coded matrices, or the bytes are none of this shape.
    pub fn new(shape: PanelShape, bytes: &'a [u8]) -> Result<Self, CodedError> {
        let format = shape.format();
        if !matches!(format, Format::Int4Row | Format::Int4Group(_)) {
            return Err(CodedError::Format { format });
        }
        let bytes = check_length(bytes)?;
        check_zeros(bytes)?;
        check_frequencies(bytes)?;
        let encoding = encoding(format, bytes)?;
        let places = Places::new(&shape, encoding).filter(|places| places.chains <= bytes.len());
        let Some(places) = places else {
            let wanted = Places::new(&shape, encoding).map_or(usize::MAX, |places| places.chains);
            return Err(CodedError::Short { part: "scales and places", wanted, found: bytes.len() });
        };
        let view = Self { shape, bytes, encoding, places };
        view.check_scales()?;
        view.check_directory()?;
        Ok(view)
    }

    /// How the decoded matrix lies in panels.
    pub fn shape(&self) -> PanelShape {
        self.shape
    }

    /// The bytes of the coded matrix, without what follows them: a multiple of 64.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Whether scales are written as indices.
    pub fn has_index_scales(&self) -> bool {
        self.encoding == Encoding::Index
    }

    /// What decoders look codes up in.
    pub fn slots(&self) -> Slots {
        Slots::new(self.bytes.first_chunk().unwrap_or(&[0; CODES]))
    }

    /// The chain of panel `panel`.
    ///
    /// # Panics
    /// If there is no such panel.
    pub fn chain(&self, panel: usize) -> Chain<'a> {
        let [states, first, second] = self.entry(panel);
        let states = self.bytes[states..].first_chunk().expect("the directory was checked");
        Chain { states, streams: [first, second] }
    }

    /// The scales of panel `panel`.
    ///
    /// # Panics
    /// If there is no such panel.
    pub fn scales(&self, panel: usize) -> Scales<'a> {
        let Places { groups, blocks, scales, .. } = self.places;
        let [states, first, _] = self.entry(panel);
        if self.encoding == Encoding::Lines {
            let len = groups * PANEL_LINE;
            return Scales::Lines(&self.bytes[scales + panel * len..][..len]);
        }
        let palette = &self.bytes[PALETTE_AT..][..PALETTE];
        let mut magnitudes = [0.0; PALETTE + 1];
        for (magnitude, code) in magnitudes.iter_mut().zip(palette) {
            *magnitude = fp8_e4m3_to_f32(*code);
        }
        let block_row = panel * PANEL_ROWS / SCALE_BLOCK;
        Scales::Index(IndexScales {
            magnitudes,
            blocks: self.bytes[HEADER + 4 * block_row * blocks..][..4 * blocks].as_chunks().0,
            indices: &self.bytes[scales..].as_chunks::<INDEX_BYTES>().0[panel * groups..][..groups],
            exceptions: self.bytes[states + STATE_BYTES..first].as_chunks().0,
            groups_per_block: groups_per_block(self.shape.format()).unwrap_or(1),
        })
    }

    /// Writes the lines of scales of panel `panel` to their places in `out`, and nothing else.
    ///
    /// # Panics
    /// If there is no such panel, or `out` has not the bytes of one.
    pub fn decode_scales(&self, panel: usize, out: &mut [u8]) {
        assert_eq!(out.len(), self.shape.panel_bytes(), "the panel is of another matrix");
        self.scales(panel).write(&self.shape, out);
    }

    /// Writes panel `panel`: the bytes that were coded.
    ///
    /// # Panics
    /// If there is no such panel, or `out` has not the bytes of one.
    pub fn decode_panel(&self, panel: usize, out: &mut [u8]) {
        self.decode_scales(panel, out);
        let (slots, chain) = (self.slots(), self.chain(panel));
        let mut decoder = rans::Decoder::new(&slots, self.bytes, chain.states, chain.streams);
        for run in code_runs(&self.shape) {
            out[run].as_chunks_mut().0.iter_mut().for_each(|line| decoder.line(line));
        }
    }

    /// Where states, first and second stream of a panel start.
    fn entry(&self, panel: usize) -> [usize; ENTRIES] {
        assert!(panel < self.shape.panels(), "panel {panel} of {}", self.shape.panels());
        let at = self.places.directory + 4 * ENTRIES * panel;
        std::array::from_fn(|entry| number(self.bytes, at + 4 * entry).unwrap_or(usize::MAX))
    }

    /// Palette and values of blocks are numbers that scales can be made of.
    fn check_scales(&self) -> Result<(), CodedError> {
        let palette = &self.bytes[PALETTE_AT..][..PALETTE + 1];
        let most = if self.has_index_scales() { LARGEST } else { 0 };
        let wrong = |entry: usize, code: u8| code > if entry < PALETTE { most } else { 0 };
        if let Some((entry, code)) = palette.iter().enumerate().find(|(entry, code)| wrong(*entry, **code)) {
            return Err(CodedError::Field {
                field: "magnitude",
                offset: PALETTE_AT + entry,
                found: f64::from(*code),
                wanted: "at most 126, and 0 where there is none",
            });
        }
        let blocks = self.places.blocks * self.shape.rows().div_ceil(SCALE_BLOCK);
        for (block, value) in self.bytes[HEADER..][..4 * blocks].as_chunks().0.iter().enumerate() {
            let value = f32::from_le_bytes(*value);
            if !(value.is_finite() && value.is_sign_positive()) {
                return Err(CodedError::Field {
                    field: "a block's value of",
                    offset: HEADER + 4 * block,
                    found: f64::from(value),
                    wanted: "finite and not negative",
                });
            }
        }
        Ok(())
    }

    /// States and streams follow one another up to the end, behind which there are bytes to read in vain.
    fn check_directory(&self) -> Result<(), CodedError> {
        let to = self.bytes.len() - BEHIND;
        let panels = self.shape.panels();
        let mut from = self.places.chains;
        for panel in 0..panels {
            let [states, first, second] = self.entry(panel);
            let next =
                number(self.bytes, self.places.directory + 4 * ENTRIES * (panel + 1)).unwrap_or(usize::MAX);
            let exceptions = first.checked_sub(states).and_then(|len| len.checked_sub(STATE_BYTES));
            let whole =
                exceptions.is_some_and(|len| len.is_multiple_of(4) && (len == 0 || self.has_index_scales()));
            // Nothing lies between two panels.
            if states != from || !whole || second < first || next < second || next > to {
                return Err(CodedError::Directory { panel, places: [states, first, second], from, to });
            }
            from = next;
        }
        if (from + BEHIND).next_multiple_of(ALIGN) != self.bytes.len() {
            return Err(CodedError::Directory { panel: panels, places: [from; ENTRIES], from, to });
        }
        Ok(())
    }
}

/// The bytes that the header says there are.
fn check_length(bytes: &[u8]) -> Result<&[u8], CodedError> {
    let short = |part, wanted| CodedError::Short { part, wanted, found: bytes.len() };
    let len = number(bytes, BYTES_AT).filter(|_| bytes.len() >= HEADER).ok_or(short("header", HEADER))?;
    if len < HEADER + BEHIND || !len.is_multiple_of(ALIGN) {
        return Err(CodedError::Field {
            field: "a length of",
            offset: BYTES_AT,
            found: len as f64,
            wanted: "a multiple of 64",
        });
    }
    bytes.get(..len).ok_or(short("bytes", len))
}

fn check_zeros(bytes: &[u8]) -> Result<(), CodedError> {
    for range in [ZEROS_AT..PALETTE_AT, MORE_ZEROS_AT..HEADER] {
        let start = range.start;
        if let Some(at) = bytes[range].iter().position(|byte| *byte != 0) {
            let offset = start + at;
            let found = f64::from(bytes[offset]);
            return Err(CodedError::Field { field: "a reserved byte of", offset, found, wanted: "0" });
        }
    }
    Ok(())
}

fn check_frequencies(bytes: &[u8]) -> Result<(), CodedError> {
    let sum: usize = bytes[..CODES].iter().map(|f| usize::from(*f)).sum();
    if sum != TOTAL {
        let (field, wanted) = ("frequencies of", "128 together");
        return Err(CodedError::Field { field, offset: 0, found: sum as f64, wanted });
    }
    Ok(())
}

fn encoding(format: Format, bytes: &[u8]) -> Result<Encoding, CodedError> {
    let found = u32::from_le_bytes(word(bytes, ENCODING_AT).unwrap_or_default());
    match (found, groups_per_block(format)) {
        (0, _) => Ok(Encoding::Lines),
        (1, Some(_)) => Ok(Encoding::Index),
        _ => Err(CodedError::Field {
            field: "scale encoding",
            offset: ENCODING_AT,
            found: f64::from(found),
            wanted: "0, or 1 in int4-g16, g32, g64 and g128",
        }),
    }
}
