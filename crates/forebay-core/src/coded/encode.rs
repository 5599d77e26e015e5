//! Making a coded matrix.

use super::STREAMS;
use super::places::{
    ALIGN, BEHIND, BYTES_AT, ENCODING_AT, ENTRIES, Encoding, HEADER, PALETTE_AT, Places, code_runs,
};
use super::rans::{self, Line};
use super::scales::{self, Fitted};
use super::table::{self, CODES};
use crate::format::Format;
use crate::panel::{PANEL_LINE, PanelShape};

/// The coded matrix of these panels; scales become indices where that takes fewer bytes. `None` if the format is not
/// int4, or if the result would have more than 2^32 bytes.
///
/// It may be longer than the panels: whether it pays is for the caller to say.
///
/// # Panics
/// Unless `panels` has exactly the bytes of `shape`.
pub fn encode(shape: &PanelShape, panels: &[u8]) -> Option<Vec<u8>> {
    assert_eq!(panels.len(), shape.bytes(), "the panels are of another matrix");
    if !matches!(shape.format(), Format::Int4Row | Format::Int4Group(_)) {
        return None;
    }
    let frequencies = table::fit(&count(shape, panels));
    let steps = table::steps(&frequencies);
    let fitted = scales::fit(shape, panels);
    let places = Places::new(shape, if fitted.is_some() { Encoding::Index } else { Encoding::Lines })?;

    let mut out = vec![0; places.chains];
    out[..CODES].copy_from_slice(&frequencies);
    match &fitted {
        Some(fitted) => write_indices(fitted, &places, &mut out),
        None => write_lines(shape, panels, &places, &mut out),
    }
    let mut room = [const { Vec::new() }; STREAMS];
    let mut lines: Vec<Line> = Vec::with_capacity(shape.panel_bytes() / PANEL_LINE);
    for (panel, bytes) in panels.chunks_exact(shape.panel_bytes()).enumerate() {
        lines.clear();
        code_runs(shape).for_each(|run| lines.extend_from_slice(bytes[run].as_chunks().0));
        let chain = rans::encode(&lines, &steps, &mut room);
        let exceptions = fitted.as_ref().map_or(&[][..], |fitted| &fitted.exceptions[panel]).as_flattened();
        let [first, second] = chain.streams;
        let parts = [[&chain.states[..], exceptions], [first, &[]], [second, &[]]];
        for (part, bytes) in parts.iter().enumerate() {
            let entry = places.directory + 4 * (panel * ENTRIES + part);
            let here = u32::try_from(out.len()).ok()?;
            put(&mut out, entry, here);
            bytes.iter().for_each(|bytes| out.extend_from_slice(bytes));
        }
    }
    let end = out.len();
    put(&mut out, places.directory + shape.panels() * 4 * ENTRIES, u32::try_from(end).ok()?);
    out.resize((end + BEHIND).next_multiple_of(ALIGN), 0);
    let bytes = u32::try_from(out.len()).ok()?;
    put(&mut out, BYTES_AT, bytes);
    Some(out)
}

/// How often each code occurs.
fn count(shape: &PanelShape, panels: &[u8]) -> [u64; CODES] {
    let mut pairs = [0u64; 1 << 8];
    for panel in panels.chunks_exact(shape.panel_bytes()) {
        code_runs(shape).for_each(|run| panel[run].iter().for_each(|byte| pairs[usize::from(*byte)] += 1));
    }
    let mut counts = [0; CODES];
    for (byte, count) in pairs.iter().enumerate() {
        counts[byte & 15] += count;
        counts[byte >> 4] += count;
    }
    counts
}

fn write_lines(shape: &PanelShape, panels: &[u8], places: &Places, out: &mut [u8]) {
    let mut lines = out[places.scales..].chunks_exact_mut(PANEL_LINE);
    for panel in panels.chunks_exact(shape.panel_bytes()) {
        for (group, line) in (0..places.groups).zip(&mut lines) {
            line.copy_from_slice(&panel[shape.scales_at(group)..][..PANEL_LINE]);
        }
    }
}

fn write_indices(fitted: &Fitted, places: &Places, out: &mut [u8]) {
    put(out, ENCODING_AT, 1);
    out[PALETTE_AT..][..fitted.palette.len()].copy_from_slice(&fitted.palette);
    for (out, value) in out[HEADER..].chunks_exact_mut(4).zip(&fitted.blocks) {
        out.copy_from_slice(&value.to_le_bytes());
    }
    let indices = fitted.indices.as_flattened();
    out[places.scales..][..indices.len()].copy_from_slice(indices);
}

fn put(out: &mut [u8], at: usize, value: u32) {
    out[at..at + 4].copy_from_slice(&value.to_le_bytes());
}
