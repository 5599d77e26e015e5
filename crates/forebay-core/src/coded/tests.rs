//! Coded matrices as a whole: round trips, an independent decoder, sizes, and bytes that are wrong.

use super::*;
use crate::float::{f32_to_fp8_e4m3, fp8_e4m3_to_f32};
use crate::format::{Format, GroupSize};
use crate::panel::{PANEL_LINE, PANEL_ROWS, PanelShape};
use crate::quant;
use crate::view::MatrixView;
use proptest::prelude::*;

/// A small generator of 64-bit numbers.
fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

fn grouped(size: usize) -> Format {
    Format::Int4Group(GroupSize::new(size).unwrap())
}

/// How scales are drawn.
#[derive(Clone, Copy, Debug)]
enum ScaleKind {
    /// Any bits, NaN among them.
    Bits,
    Zero,
    /// The smallest one, as groups of zeros have it.
    Smallest,
    /// Lattice points, but for every `n`th.
    Lattice(u64),
}

/// Panels of this shape whose codes are `codes` of them at most, padding rows filled as any others.
fn panels(shape: &PanelShape, codes: u64, kind: ScaleKind, seed: u64) -> Vec<u8> {
    let mut next = random(seed);
    let set: Vec<u8> = (0..16).map(|_| next() as u8 & 15).collect();
    // Minimum of two draws: some codes are more frequent than others.
    let code = |next: &mut dyn FnMut() -> u64| {
        let [a, b] = [next() % codes, next() % codes];
        set[a.min(b) as usize]
    };
    let mut bytes: Vec<u8> = (0..shape.bytes()).map(|_| code(&mut next) | code(&mut next) << 4).collect();
    for (panel, bytes) in bytes.chunks_exact_mut(shape.panel_bytes()).enumerate() {
        for group in 0..shape.cols().div_ceil(shape.group_cols()) {
            let at = shape.scales_at(group);
            for out in bytes[at..at + PANEL_LINE].as_chunks_mut::<4>().0 {
                let block = (panel / 8 * 1009 + group * shape.group_cols() / 128) as f32;
                let value = 0.001 + block * 0.000_37;
                *out = match kind {
                    ScaleKind::Bits => (next() as u32).to_le_bytes(),
                    ScaleKind::Zero => [0; 4],
                    ScaleKind::Smallest => 1e-8f32.to_le_bytes(),
                    ScaleKind::Lattice(n) => {
                        let scale = fp8_e4m3_to_f32(126 - (next() % 14) as u8) * value / 7.0;
                        let beside = if next().is_multiple_of(n) { 1.001 } else { 1.0 };
                        (scale * beside).to_le_bytes()
                    }
                };
            }
        }
    }
    bytes
}

/// By the letter of docs/format.md, a code at a time, sharing nothing with the decoder.
fn independent(shape: &PanelShape, bytes: &[u8], panel: usize) -> Vec<u8> {
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    let float = |at: usize| f32::from_bits(word(at));
    let (panels, cols) = (shape.rows().div_ceil(16), shape.cols());
    let padded = cols.div_ceil(16) * 16;
    let group = match shape.format() {
        Format::Int4Group(size) => size.get(),
        _ => padded,
    };
    let groups = cols.div_ceil(group);
    let indexed = word(16) == 1;
    let blocks = cols.div_ceil(128);
    let block_bytes = 4 * blocks * shape.rows().div_ceil(128);
    let scales = 64 + if indexed { block_bytes.div_ceil(64) * 64 } else { 0 };
    let directory = (scales + panels * groups * if indexed { 8 } else { 64 }).div_ceil(64) * 64;

    let entry = directory + 12 * panel;
    let states = word(entry) as usize;
    let mut at = [word(entry + 4) as usize, word(entry + 8) as usize];
    let mut exception = states + 128;
    let mut state: Vec<u32> = (0..64)
        .map(|i| u32::from(u16::from_le_bytes([bytes[states + 2 * i], bytes[states + 2 * i + 1]])))
        .collect();
    let mut take = |half: usize| {
        (0..32)
            .map(|lane| {
                let x = &mut state[32 * half + lane];
                let (mut code, mut first) = (0, 0);
                while first + u32::from(bytes[code]) <= *x % 128 {
                    first += u32::from(bytes[code]);
                    code += 1;
                }
                *x = u32::from(bytes[code]) * (*x / 128) + *x % 128 - first;
                if *x < 256 {
                    *x = *x * 256 + u32::from(bytes[at[half]]);
                    at[half] += 1;
                }
                code as u8
            })
            .collect::<Vec<u8>>()
    };

    let mut out = Vec::new();
    let scale_line = |g: usize, exception: &mut usize| -> Vec<u8> {
        if !indexed {
            return bytes[scales + (panel * groups + g) * 64..][..64].to_vec();
        }
        let value = float(64 + 4 * (panel * 16 / 128 * blocks + g * group / 128));
        let nibbles = &bytes[scales + (panel * groups + g) * 8..][..8];
        let one = |row: usize| match nibbles[row / 2] >> (row % 2 * 4) & 15 {
            15 => {
                *exception += 4;
                float(*exception - 4)
            }
            index => fp8_e4m3_to_f32(bytes[32 + usize::from(index)]) * value / 7.0,
        };
        (0..16).map(one).flat_map(f32::to_le_bytes).collect()
    };
    if shape.format() == Format::Int4Row {
        out.extend(scale_line(0, &mut exception));
    }
    for g in 0..groups {
        for _ in 0..group.min(padded - g * group) / 8 {
            let [low_even, low_odd, high_even, high_odd] = [take(0), take(1), take(0), take(1)];
            for lane in 0..32 {
                out.extend([low_even[lane] | high_even[lane] << 4, low_odd[lane] | high_odd[lane] << 4]);
            }
        }
        if shape.format() != Format::Int4Row {
            out.extend(scale_line(g, &mut exception));
        }
    }
    out
}

fn decode(view: &CodedView<'_>) -> Vec<u8> {
    let mut out = vec![0x55; view.shape().bytes()];
    for (panel, out) in out.chunks_exact_mut(view.shape().panel_bytes()).enumerate() {
        view.decode_panel(panel, out);
    }
    out
}

fn any_shape() -> impl Strategy<Value = PanelShape> {
    let format = prop_oneof![
        Just(Format::Int4Row),
        (0..8usize).prop_map(|i| Format::Int4Group(GroupSize::ALL[i])),
        Just(grouped(64)),
    ];
    (format, 1..300usize, 1..600usize)
        .prop_map(|(format, rows, cols)| PanelShape::new(format, rows, cols).unwrap())
}

fn any_scales() -> impl Strategy<Value = ScaleKind> {
    prop_oneof![
        Just(ScaleKind::Bits),
        Just(ScaleKind::Zero),
        Just(ScaleKind::Smallest),
        Just(ScaleKind::Lattice(u64::MAX)),
        Just(ScaleKind::Lattice(50)),
        Just(ScaleKind::Lattice(2)),
    ]
}

#[test]
fn one_code_takes_no_bytes_at_all() {
    // By hand: every frequency is that of code 8, so no state ever changes, and streams are empty.
    let shape = PanelShape::new(Format::Int4Row, 16, 32).unwrap();
    let mut raw = vec![0x88; shape.bytes()];
    raw[..64].fill(3);
    let coded = encode(&shape, &raw).unwrap();
    let mut wanted = vec![0; 64];
    wanted[8] = 128;
    wanted[20..24].copy_from_slice(&[128, 1, 0, 0]);
    wanted.extend([3; 64]);
    let directory = wanted.len();
    wanted.resize(directory + 64, 0);
    wanted[directory..directory + 2].copy_from_slice(&[192, 0]);
    wanted[directory + 4..directory + 6].copy_from_slice(&[64, 1]);
    wanted[directory + 8..directory + 10].copy_from_slice(&[64, 1]);
    wanted[directory + 12..directory + 14].copy_from_slice(&[64, 1]);
    wanted.extend([0, 1].repeat(64));
    wanted.resize(384, 0);
    assert_eq!(coded, wanted);
    assert_eq!(decode(&CodedView::new(shape, &coded).unwrap()), raw);
}

#[test]
fn only_int4_panels_are_coded() {
    let shape = PanelShape::new(Format::Int8Row, 16, 16).unwrap();
    assert_eq!(encode(&shape, &vec![0; shape.bytes()]), None);
    assert!(matches!(CodedView::new(shape, &[0; 1000]), Err(CodedError::Format { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Every byte comes back, from both decoders, and the matrix knows where it ends.
    #[test]
    fn round_trip(shape in any_shape(), codes in 1..=16u64, kind in any_scales(), seed in any::<u64>()) {
        let raw = panels(&shape, codes, kind, seed);
        let coded = encode(&shape, &raw).unwrap();
        let mut more = coded.clone();
        more.extend([0xEE; 100]);
        let view = CodedView::new(shape, &more).unwrap();
        prop_assert_eq!(view.bytes(), &coded[..]);
        prop_assert!(decode(&view) == raw, "{:?}", shape);
        let last = shape.panels() - 1;
        for panel in [0, last / 2, last] {
            let wanted = &raw[panel * shape.panel_bytes()..][..shape.panel_bytes()];
            prop_assert!(independent(&shape, &coded, panel) == wanted, "{:?}", shape);
        }
    }

    /// Whatever byte is wrong, wherever the bytes end: an error, or wrong bytes; never a panic.
    #[test]
    fn wrong_bytes(
        shape in any_shape(),
        lattice in any::<bool>(),
        seed in any::<u64>(),
        wrong in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8), 1..8),
        keep in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let kind = if lattice { ScaleKind::Lattice(20) } else { ScaleKind::Bits };
        let raw = panels(&shape, 15, kind, seed);
        let mut coded = encode(&shape, &raw).unwrap();
        let len = coded.len();
        for (place, value, region) in wrong {
            // Three of four in the header and what follows it.
            let at = if region == 0 { place.index(len) } else { place.index(len.min(if region == 1 { 64 } else { 1024 })) };
            coded[at] = value;
        }
        let coded = &coded[..keep.map_or(len, |keep| keep.index(len))];
        if let Ok(view) = CodedView::new(shape, coded) {
            let out = decode(&view);
            prop_assert_eq!(out.len(), raw.len());
        }
    }
}

#[test]
fn a_cut_matrix_is_always_refused() {
    for (format, kind) in [(Format::Int4Row, ScaleKind::Bits), (grouped(32), ScaleKind::Lattice(9))] {
        let shape = PanelShape::new(format, 33, 96).unwrap();
        let coded = encode(&shape, &panels(&shape, 12, kind, 4)).unwrap();
        for len in 0..coded.len() {
            let error = CodedView::new(shape, &coded[..len]).unwrap_err();
            assert!(matches!(error, CodedError::Short { .. }), "{len}: {error}");
            assert!(error.to_string().contains("forebay verify"));
        }
    }
}

#[test]
fn every_rule_of_the_header_and_the_directory_is_kept() {
    let shape = PanelShape::new(grouped(64), 128, 256).unwrap();
    let sound = encode(&shape, &panels(&shape, 12, ScaleKind::Lattice(30), 4)).unwrap();
    let view = CodedView::new(shape, &sound).unwrap();
    assert!(view.has_index_scales());
    let directory = 64 + 64 + 8 * 4 * 8;
    let fails = |at: usize, bytes: &[u8]| {
        let mut wrong = sound.clone();
        wrong[at..at + bytes.len()].copy_from_slice(bytes);
        CodedView::new(shape, &wrong).unwrap_err()
    };
    let is_field = |error: CodedError, wanted: usize| {
        let CodedError::Field { offset, .. } = error else { panic!("{error}") };
        assert_eq!(offset, wanted);
    };
    is_field(fails(3, &[sound[3] ^ 1]), 0);
    for encoding in [0, 2, 256] {
        let error = fails(16, &u32::to_le_bytes(encoding));
        if encoding > 0 {
            is_field(error, 16);
        }
    }
    is_field(fails(20, &[sound[20] + 1]), 20);
    is_field(fails(20, &[0; 4]), 20);
    for reserved in [24, 31, 47, 48, 63] {
        is_field(fails(reserved, &[1]), reserved);
    }
    is_field(fails(33, &[127]), 33);
    for value in [f32::NAN, f32::INFINITY, -1.0] {
        is_field(fails(68, &value.to_le_bytes()), 68);
    }
    for entry in 0..=3 * 8 {
        let at = directory + 4 * entry;
        // The boundary between two streams, and the end by a byte or two, may lie elsewhere for all that can be seen.
        for wrong in [sound[at] ^ 1, sound[at] ^ 2].into_iter().filter(|_| entry % 3 != 2 && entry < 24) {
            let error = fails(at, &[wrong]);
            let CodedError::Directory { .. } = error else { panic!("{entry}: {error}") };
        }
        let CodedError::Directory { .. } = fails(at, &[0xFF; 4]) else { panic!("{entry}") };
    }
}

/// Weights as a checkpoint has them that was quantised to FP8 by blocks: `../shared/prototypes/fp8_lattice.py`.
fn fp8_checkpoint(rows: usize, cols: usize, seed: u64) -> Vec<f32> {
    let mut next = random(seed);
    let mut uniform = || ((next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
    let mut weights: Vec<f32> = (0..rows * cols)
        .map(|_| {
            let (size, angle) = ((-2.0 * uniform().ln()).sqrt(), std::f64::consts::TAU * uniform());
            (size * angle.cos()) as f32
        })
        .collect();
    for row in (0..rows).step_by(128) {
        for col in (0..cols).step_by(128) {
            let places = || (row..row + 128).flat_map(|r| (col..col + 128).map(move |c| r * cols + c));
            let value = places().fold(0f32, |most, at| most.max(weights[at].abs())) / 448.0;
            for at in places() {
                weights[at] = fp8_e4m3_to_f32(f32_to_fp8_e4m3(weights[at] / value)) * value;
            }
        }
    }
    weights
}

/// Coded bytes over the bytes of panels, which are those of the reference container.
fn ratio(format: Format, rows: usize, cols: usize, weights: &[f32]) -> f64 {
    let encoded = quant::encode(format, rows, cols, weights).unwrap();
    let view = MatrixView::new(format, rows, cols, &encoded.codes, &encoded.scales).unwrap();
    let shape = PanelShape::new(format, rows, cols).unwrap();
    assert_eq!(Some(shape.bytes()), format.total_bytes(rows, cols));
    let mut raw = vec![0; shape.bytes()];
    shape.pack(&view, &mut raw);
    let coded = encode(&shape, &raw).unwrap();
    let view = CodedView::new(shape, &coded).unwrap();
    assert_eq!(view.has_index_scales(), matches!(format, Format::Int4Group(_)));
    assert!(decode(&view) == raw);
    coded.len() as f64 / raw.len() as f64
}

#[test]
fn sizes_of_an_fp8_checkpoint_hold_their_bounds() {
    let (gate, down) = (fp8_checkpoint(128, 6144, 1), fp8_checkpoint(384, 2048, 2));
    for (format, most) in [(Format::Int4Row, 0.77), (grouped(64), 0.81)] {
        // Gate and up have one shape and down another one: as many weights each.
        let [gate, down] = [ratio(format, 128, 6144, &gate), ratio(format, 384, 2048, &down)];
        let record = (2.0 * gate + down) / 3.0;
        println!("{format}: {gate:.4} and {down:.4}, a record {record:.4}");
        assert!(record <= most, "{format}: {gate} and {down}");
    }
}

#[test]
fn scales_of_no_lattice_stay_as_they_are() {
    let shape = PanelShape::new(grouped(64), 128, 512).unwrap();
    let raw = panels(&shape, 15, ScaleKind::Bits, 3);
    let coded = encode(&shape, &raw).unwrap();
    assert!(!CodedView::new(shape, &coded).unwrap().has_index_scales());
    // A group of 96 columns does not lie in one block.
    let shape = PanelShape::new(grouped(96), 128, 768).unwrap();
    let raw = panels(&shape, 15, ScaleKind::Lattice(u64::MAX), 3);
    assert!(!CodedView::new(shape, &encode(&shape, &raw).unwrap()).unwrap().has_index_scales());
}

#[test]
fn a_few_scales_beside_the_lattice_are_exceptions() {
    let shape = PanelShape::new(grouped(64), 16 * 9, 512).unwrap();
    let raw = panels(&shape, 15, ScaleKind::Lattice(20), 3);
    let coded = encode(&shape, &raw).unwrap();
    let view = CodedView::new(shape, &coded).unwrap();
    assert!(view.has_index_scales());
    let exceptions: usize = (0..shape.panels())
        .map(|panel| match view.scales(panel) {
            Scales::Index(scales) => scales.exceptions.len(),
            Scales::Lines(_) => panic!("index scales"),
        })
        .sum();
    let scales = shape.panels() * PANEL_ROWS * 8;
    assert!((scales / 40..scales / 10).contains(&exceptions), "{exceptions} of {scales}");
}
