//! Coded matrices: what is written comes back, and whatever is accepted is decoded within its bytes, to the same panels
//! by every decoder.

#![no_main]

use forebay_core::coded::{CodedView, encode};
use forebay_core::{Format, PanelShape};
use forebay_kernels::{Isa, Kernels};
use libfuzzer_sys::fuzz_target;

const FORMATS: [&str; 9] = [
    "int4-row", "int4-g16", "int4-g32", "int4-g48", "int4-g64", "int4-g96", "int4-g128", "int4-g192", "int4-g256",
];

/// Decodes with the scalar decoder, and compares all others with it.
fn decode(view: &CodedView<'_>) -> Vec<u8> {
    let shape = view.shape();
    let mut want = vec![0; shape.bytes()];
    let panels = want.chunks_exact_mut(shape.panel_bytes()).enumerate();
    panels.for_each(|(panel, out)| view.decode_panel(panel, out));
    let mut found = vec![0xa5; want.len()];
    for isa in Isa::available() {
        let kernels = Kernels::with_isa(isa).expect("it is available");
        kernels.decode_panels(view, 0..shape.panels(), &mut found);
        assert!(found == want, "{isa}");
    }
    want
}

fuzz_target!(|bytes: &[u8]| {
    let Some((&[format, rows, cols, edits], rest)) = bytes.split_first_chunk() else { return };
    let format: Format = FORMATS[usize::from(format) % FORMATS.len()].parse().expect("a format");
    let (rows, cols) = (1 + usize::from(rows) % 160, 2 + 2 * (usize::from(cols) % 160));
    let Some(shape) = PanelShape::new(format, rows, cols) else { return };
    if edits == 255 {
        // As they are. The bytes end where they end, so that whoever reads on is caught.
        match CodedView::new(shape, rest) {
            Ok(view) => drop(decode(&view)),
            Err(error) => assert!(error.to_string().len() < 1024),
        }
        return;
    }
    // Panels of the fuzzer's bytes, over and over, coded; then some bytes of that become others.
    let (changes, rest) = rest.split_at(rest.len().min(4 * usize::from(edits % 8)));
    let panels: Vec<u8> = match rest {
        [] => vec![0; shape.bytes()],
        rest => rest.iter().copied().cycle().take(shape.bytes()).collect(),
    };
    let mut coded = encode(&shape, &panels).expect("int4, and small");
    let view = CodedView::new(shape, &coded).expect("it was just written");
    assert_eq!(view.bytes().len(), coded.len());
    assert!(decode(&view) == panels);
    for &[low, high, by, value] in changes.as_chunks().0 {
        // Half of them where the header and the directory are.
        let place = usize::from(u16::from_le_bytes([low, high]));
        let at = if by & 1 == 0 { place % 64 } else { place % coded.len() };
        coded[at] = coded[at].wrapping_add(value);
        if by & 2 != 0 && at < 16 {
            // Frequencies that still add up.
            coded[at ^ 1] = coded[at ^ 1].wrapping_sub(value);
        }
    }
    match CodedView::new(shape, &coded) {
        Ok(view) => drop(decode(&view)),
        Err(error) => assert!(error.to_string().len() < 1024),
    }
});
