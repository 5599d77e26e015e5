//! Coded weights: products with the bits of the panels they stand for, from every instruction set; decoders that
//! agree on every byte, on wrong ones too.

mod common;

use common::{floats, kernels, random, same_bits};
use forebay_core::coded::{CodedView, encode};
use forebay_core::float::fp8_e4m3_to_f32;
use forebay_core::format::{Format, GroupSize};
use forebay_core::panel::{PANEL_LINE, PANEL_ROWS, PanelShape, PanelView};
use forebay_kernels::{
    Activations, Input, Isa, Kernels, MatmulJob, Team, Weights, free_order, matmul, matmul_many,
    matmul_swiglu,
};
use proptest::prelude::*;

/// Panels and the coded matrix made of them.
struct Pair {
    shape: PanelShape,
    raw: Vec<u8>,
    coded: Vec<u8>,
}

impl Pair {
    /// Random codes, some more often than others; scales on an FP8 lattice, but one in `odd`.
    fn random(shape: PanelShape, odd: u64, next: &mut impl FnMut() -> u64) -> Self {
        let mut code = || (next() % 16).min(next() % 16) as u8;
        let mut raw: Vec<u8> = (0..shape.bytes()).map(|_| code() << 4 | code()).collect();
        for (panel, bytes) in raw.chunks_exact_mut(shape.panel_bytes()).enumerate() {
            for group in 0..shape.cols().div_ceil(shape.group_cols()) {
                let value = 0.01 + 0.003 * (panel / 8 * 7 + group * shape.group_cols() / 128) as f32;
                let at = shape.scales_at(group);
                for (row, out) in bytes[at..at + PANEL_LINE].as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let scale = fp8_e4m3_to_f32(126 - (next() % 16) as u8) * value / 7.0;
                    let beside = if next().is_multiple_of(odd) { 1.01 } else { 1.0 };
                    let inside = panel * PANEL_ROWS + row < shape.rows();
                    *out = if inside { (scale * beside).to_le_bytes() } else { [0; 4] };
                }
            }
        }
        let coded = encode(&shape, &raw).unwrap();
        Self { shape, raw, coded }
    }

    fn panels(&self) -> PanelView<'_> {
        PanelView::new(self.shape, &self.raw).unwrap()
    }

    fn view(&self) -> CodedView<'_> {
        CodedView::new(self.shape, &self.coded).unwrap()
    }
}

fn any_format() -> impl Strategy<Value = Format> {
    prop_oneof![Just(Format::Int4Row), (0..8usize).prop_map(|i| Format::Int4Group(GroupSize::ALL[i]))]
}

/// One product with a team.
fn product<'a>(
    k: Kernels,
    team: &Team,
    weights: impl Into<Weights<'a>>,
    input: Input<'_>,
    batch: usize,
) -> Vec<f32> {
    let weights = weights.into();
    let mut y = vec![f32::NAN; batch * weights.rows()];
    matmul(k, team, weights, input, &mut y);
    y
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn products_are_those_of_the_panels(
        format in any_format(),
        (rows, cols) in (1..300usize, 1..700usize),
        batch in prop_oneof![4 => 0..=20usize, 1 => 60..140usize],
        threads in 1..4usize,
        odd in prop_oneof![Just(1u64), Just(30), Just(u64::MAX)],
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let shape = PanelShape::new(format, rows, cols).unwrap();
        let pair = Pair::random(shape, odd, &mut next);
        let x = floats(batch * cols, 0, &mut next);
        let team = Team::new(threads).unwrap();
        let mut q = Activations::new(cols);
        for k in kernels() {
            q.quantise(k, &team, &x);
            for input in [Input::exact(&x), Input::int8(&x, &q)] {
                let wanted = product(k, &team, pair.panels(), input, batch);
                let found = product(k, &team, pair.view(), input, batch);
                prop_assert!(same_bits(&found, &wanted), "{k:?} {shape:?}");
            }
        }
    }

    #[test]
    fn every_way_to_multiply_takes_them(
        format in any_format(),
        (rows, cols) in (1..700usize, 1..400usize),
        batch in 1..12usize,
        threads in 1..4usize,
        int8 in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let shape = PanelShape::new(format, rows, cols).unwrap();
        let [gate, up] = [0; 2].map(|_| Pair::random(shape, 40, &mut next));
        let x = floats(batch * cols, 0, &mut next);
        let (k, team) = (Kernels::detect(), Team::new(threads).unwrap());
        let mut q = Activations::new(cols);
        q.quantise(k, &team, &x);
        let input = if int8 { Input::int8(&x, &q) } else { Input::exact(&x) };
        let wanted = [&gate, &up].map(|pair| product(k, &team, pair.panels(), input, batch));
        // Several products in one go.
        let [mut a, mut b] = [0; 2].map(|_| vec![f32::NAN; batch * rows]);
        let mut jobs = [
            MatmulJob::new(gate.view(), input, &mut a),
            MatmulJob::new(up.view(), input, &mut b),
        ];
        matmul_many(k, &team, &mut jobs);
        prop_assert!(same_bits(&a, &wanted[0]) && same_bits(&b, &wanted[1]));
        // Gate and up with their SwiGLU, both coded or one of them.
        let mut gated = wanted[0].clone();
        k.swiglu(&mut gated, &wanted[1]);
        for weights in [
            [Weights::from(gate.view()), up.view().into()],
            [gate.panels().into(), up.view().into()],
            [gate.view().into(), up.panels().into()],
        ] {
            matmul_swiglu(k, &team, weights, input, &mut b, &mut a);
            prop_assert!(same_bits(&a, &gated));
        }
        // Without the rows that the codes were made from, and in free order.
        if int8 {
            matmul(k, &team, gate.view(), Input::quantised(&q), &mut a);
            prop_assert!(same_bits(&a, &wanted[0]));
            free_order::matmul(k, &team, gate.panels(), input, &mut a);
            free_order::matmul(k, &team, gate.view(), input, &mut b);
            prop_assert!(same_bits(&a, &b));
        }
    }

    /// A decoder may do what it likes with wrong bytes, as long as all do the same and none leaves them.
    #[test]
    fn decoders_agree_whatever_the_bytes(
        format in any_format(),
        (rows, cols) in (1..150usize, 1..700usize),
        odd in prop_oneof![Just(3u64), Just(30), Just(u64::MAX)],
        seed in any::<u64>(),
        wrong in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..60),
        header in prop::option::of((0..16usize, 0..16usize)),
        flood in prop::option::of(any::<u8>()),
    ) {
        let mut next = random(seed);
        let shape = PanelShape::new(format, rows, cols).unwrap();
        let mut pair = Pair::random(shape, odd, &mut next);
        let len = pair.coded.len();
        // Frequencies that still add up: codes that need more bytes than there are.
        if let Some((from, to)) = header {
            let moved = std::mem::take(&mut pair.coded[from]);
            pair.coded[to] += moved;
        }
        // States, streams and indices: whatever leaves the view sound.
        for (place, value) in wrong {
            let at = 64 + place.index(len - 64);
            let before = std::mem::replace(&mut pair.coded[at], value);
            if CodedView::new(shape, &pair.coded).is_err() {
                pair.coded[at] = before;
            }
        }
        // Streams that never end: the last panels run into the end of the matrix.
        if let Some(byte) = flood {
            let from = len / 2;
            let before = pair.coded[from..].to_vec();
            pair.coded[from..].fill(byte);
            if CodedView::new(shape, &pair.coded).is_err() {
                pair.coded[from..].copy_from_slice(&before);
            }
        }
        let view = pair.view();
        let bytes = shape.panel_bytes();
        let mut wanted = vec![0x33; shape.bytes()];
        for (panel, out) in wanted.chunks_exact_mut(bytes).enumerate() {
            view.decode_panel(panel, out);
        }
        for k in kernels() {
            for start in 0..shape.panels().min(3) {
                let mut out = vec![0x55; shape.bytes() - start * bytes];
                k.decode_panels(&view, start..shape.panels(), &mut out);
                prop_assert!(out == wanted[start * bytes..], "{k:?} {shape:?} from panel {start}");
            }
        }
    }
}

/// The streams lie at the very end of an allocation of their own, and ask for far more bytes than there are.
#[test]
fn streams_that_ask_for_too_much_stay_inside() {
    let shape = PanelShape::new(Format::Int4Row, 64, 2048).unwrap();
    let pair = Pair::random(shape, 1, &mut random(7));
    let mut coded = pair.coded.clone();
    // Each of the sixteen codes as often as any other, so that every second code takes a byte.
    coded[..16].fill(8);
    let coded = coded.into_boxed_slice();
    let view = CodedView::new(shape, &coded).unwrap();
    let mut wanted = vec![0; shape.bytes()];
    for (panel, out) in wanted.chunks_exact_mut(shape.panel_bytes()).enumerate() {
        view.decode_panel(panel, out);
    }
    assert_ne!(wanted, pair.raw);
    for k in kernels() {
        let mut out = vec![0; shape.bytes()];
        k.decode_panels(&view, 0..4, &mut out);
        assert!(out == wanted, "{k:?}");
    }
}

#[test]
fn only_one_set_decodes_in_registers() {
    for k in kernels() {
        assert!(!k.decodes_fast() || k.isa() == Isa::Avx512);
    }
}

#[test]
#[should_panic(expected = "panels 1..3 of 2")]
fn panels_that_are_not_there() {
    let shape = PanelShape::new(Format::Int4Row, 32, 16).unwrap();
    let pair = Pair::random(shape, 1, &mut random(7));
    Kernels::detect().decode_panels(&pair.view(), 1..3, &mut vec![0; 2 * shape.panel_bytes()]);
}
