//! The numeric vectors of the forward-pass spec (F-01 to F-09), on every instruction set,
//! and the accuracy of the exponential against f64.

mod common;

use common::kernels;
use forebay_core::format::Format;
use forebay_core::view::MatrixView;
use forebay_kernels::*;

#[track_caller]
fn close(found: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(found.len(), want.len());
    for (f, w) in found.iter().zip(want) {
        assert!((f - w).abs() <= tolerance * w.abs().max(1.0), "{found:?}, expected {want:?}");
    }
}

#[test]
fn f01_rms_norm() {
    for k in kernels() {
        let mut out = [0f32; 4];
        k.rms_norm(&[1.0, 2.0, 3.0, 4.0], &[1.0, 0.5, 2.0, 1.0], 1e-5, &mut out);
        close(&out, &[0.365_148_13, 0.365_148_13, 2.190_889, 1.460_592_5], 2e-7);
        // F-01b: eps matters when activations are tiny.
        let x = [1e-3, -2e-3, 1e-3, 0.0];
        k.rms_norm(&x, &[1.0; 4], 1e-5, &mut out);
        close(&out, &[0.29488, -0.58977, 0.29488, 0.0], 1e-5);
        k.rms_norm(&x, &[1.0; 4], 1e-6, &mut out);
        close(&out, &[0.63246, -1.26491, 0.63246, 0.0], 1e-5);
    }
}

#[test]
fn f02_layer_norm() {
    for k in kernels() {
        let mut out = [0f32; 4];
        let bias = [0.0, 0.5, 0.0, -1.0];
        k.layer_norm(&[1.0, 2.0, 3.0, 6.0], &[1.0, 1.0, 2.0, 1.0], &bias, 1e-6, &mut out);
        close(&out, &[-1.069_044_8, -0.034_522_414, 0.0, 0.603_567_24], 2e-7);
    }
}

fn rotated(theta: f32, position: usize) -> [f32; 4] {
    let rope = Rope::new(4, theta).unwrap();
    let (mut cos, mut sin) = ([0f32; 2], [0f32; 2]);
    rope.angles(position, &mut cos, &mut sin);
    let mut v = [1.0, 2.0, 3.0, 4.0];
    rope.rotate(&mut v, &cos, &sin);
    v
}

#[test]
fn f03_rope() {
    close(&rotated(1e4, 3), &[-1.272_232_5, 2.878_668, -1.838_865, 4.088_187], 2e-7);
    close(&rotated(1e6, 1000), &[-1.091_380_1, -1.744_977, 1.951_637_7, 4.685_622], 1e-6);
    assert_eq!(rotated(1e4, 0), [1.0, 3.0, 2.0, 4.0]);
}

#[test]
fn rope_stays_right_at_a_million() {
    // Width 64, theta 1e6: (position, pair, cosine, sine), from a double-precision C library
    // applied to the f32 angle.
    let cases = [
        (1_000_000, 0, 0.936_752_14, -0.349_993_5),
        (1_000_000, 1, -0.282_439_35, 0.959_285_14),
        (1_000_000, 5, 0.892_721_06, -0.450_609_65),
        (1_000_000, 16, 0.562_328_6, 0.826_913_9),
        (1_000_000, 31, 0.030_864_894, 0.999_523_6),
        (202_751, 3, -0.933_261_45, -0.359_197_74),
        (202_751, 31, 0.951_653_5, 0.307_173_64),
    ];
    let rope = Rope::new(64, 1e6).unwrap();
    let (mut cos, mut sin) = ([0f32; 32], [0f32; 32]);
    for (position, pair, c, s) in cases {
        rope.angles(position, &mut cos, &mut sin);
        assert_eq!((cos[pair], sin[pair]), (c, s), "pair {pair} at {position}");
    }
}

#[test]
fn impossible_rotations_are_refused() {
    for dim in [0, 5, 514] {
        assert_eq!(Rope::new(dim, 1e4), Err(RopeError::Dim { dim }));
    }
    for theta in [0.0, -1.0, f32::INFINITY] {
        assert_eq!(Rope::new(4, theta), Err(RopeError::Theta { theta }));
    }
    assert!(Rope::new(4, f32::NAN).is_err());
}

#[test]
fn f04_absorbed_attention() {
    // kv_b of one head: two key rows, then two value rows.
    let kv_b: Vec<u8> =
        [1f32, 2.0, 0.0, 1.0, 1.0, 0.0, 1.0, 1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let kv_b = MatrixView::new(Format::F32, 4, 2, &kv_b, &[]).unwrap();
    let latents = [1.0, 0.0, 0.5, -1.0];
    let rope_keys = [0.2, 0.1, -0.3, 0.4];
    for k in kernels() {
        let mut absorbed = [0f32; 2];
        combine_rows(k, kv_b, 0..2, &[0.5, -1.0], &mut absorbed);
        assert_eq!(absorbed, [0.5, 0.0]);
        let query = Attention { latent_queries: &absorbed, rope_queries: &[1.0, 2.0], heads: 1, scale: 0.5 };
        let keys = KeyCache { latents: KeyRows::F32(&latents), rope_keys: KeyRows::F32(&rope_keys) };
        let mut mixed = [0f32; 2];
        attend(k, &query, keys, Attended::Range(0..2), &mut AttendScratch::default(), &mut mixed);
        close(&mixed, &[0.759_370_6, -0.481_258_8], 2e-7);
        let mut context = [0f32; 2];
        matmul_rows(k, kv_b, 2..4, Input::exact(&mixed), &mut context);
        close(&context, &[0.759_370_6, 0.278_111_8], 2e-7);
    }
}

#[test]
fn f05_swiglu() {
    for k in kernels() {
        let mut out = [1.0, -2.0, 0.0];
        k.swiglu(&mut out, &[2.0, 3.0, 5.0]);
        close(&out, &[1.462_117_2, -0.715_217_6, 0.0], 2e-7);
    }
}

#[test]
fn f06_quantised_activations() {
    let team = Team::new(1).unwrap();
    let cases: [(&[f32], f32, &[i8]); 3] = [
        (&[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -127.0, 100.49], 1.0, &[127, 0, 2, 2, 0, -2, -127, 100]),
        (&[0.5, -1.0, 0.25, 1.27], 0.01, &[50, -100, 25, 127]),
        (&[0.0, 0.0], 1e-12, &[0, 0]),
    ];
    for k in kernels() {
        for (x, scale, codes) in cases {
            let mut q = Activations::new(x.len());
            q.quantise(k, &team, x);
            assert_eq!((q.scales(0), q.codes(0)), (vec![scale], codes.to_vec()));
        }
        // 639 * 0.1 / 127 with quantised activations; 0.5021 with exact ones.
        let codes = [1u8, 7, -8i8 as u8];
        let w = MatrixView::new(Format::Int8Row, 1, 3, &codes, &[0.1]).unwrap();
        let x = [1.0, 0.003, -0.5];
        let mut q = Activations::new(3);
        q.quantise(k, &team, &x);
        assert_eq!(q.codes(0), [127, 0, -64]);
        let mut y = [0f32];
        matmul_rows(k, w, 0..1, Input::int8(&x, &q), &mut y);
        close(&y, &[639.0 * 0.1 / 127.0], 2e-7);
        matmul_rows(k, w, 0..1, Input::exact(&x), &mut y);
        close(&y, &[0.5021], 2e-7);
    }
}

#[test]
fn f07_router() {
    let bias = [0.30, -0.20, 0.0, -0.45, -0.20];
    for k in kernels() {
        let choose = |normalise: bool| {
            let mut logits = [0.0, 1.0, -1.0, 2.0, 1.0];
            let (mut ids, mut weights) = ([0u32; 3], [0f32; 3]);
            let rule = RouterRule { normalise, scaling: 2.5 };
            route(k, &mut logits, &bias, rule, &mut ids, &mut weights).unwrap();
            assert_eq!(ids, [0, 1, 4]);
            weights
        };
        close(&choose(true), &[0.637_067, 0.931_466_5, 0.931_466_5], 2e-7);
        close(&choose(false), &[1.25, 1.827_646_5, 1.827_646_5], 2e-7);
    }
}

#[test]
fn f08_indexer() {
    let queries = [1.0, 0.0, 2.0, -1.0, 0.5, 1.0, 0.0, 0.0];
    let keys = [
        [1.0, 1.0, 1.0, 0.0],
        [-1.0, 0.0, 0.0, 2.0],
        [0.0, -2.0, 1.0, 0.0],
        [1.0, 1.0, 1.0, 0.0],
        [-1.0, 2.0, 0.0, 0.0f32],
    ];
    let want = [0.530_330_1, 0.0, 0.5f32.sqrt(), 0.530_330_1, -0.530_330_1];
    for k in kernels() {
        let mut scores = [0f32; 5];
        indexer_scores(k, &queries, &[1.0, -1.0], KeyRows::F32(keys.as_flattened()), 4, &mut scores);
        close(&scores, &want, 2e-7);
        let halves: Vec<u16> = keys.as_flattened().iter().map(|v| (v.to_bits() >> 16) as u16).collect();
        let mut same = [0f32; 5];
        indexer_scores(k, &queries, &[1.0, -1.0], KeyRows::Bf16(&halves), 4, &mut same);
        assert_eq!(same, scores);
        let lists: [&[u32]; 5] = [&[2], &[2, 0], &[2, 0, 3], &[0, 2, 3, 1], &[0, 1, 2, 3, 4]];
        for (keep, list) in (1..).zip(lists) {
            let mut out = Vec::new();
            select_top_k(&scores, keep, &mut SelectScratch::default(), &mut out);
            assert_eq!(out, list, "keep {keep}");
        }
    }
}

#[test]
fn f09_mixture_of_experts() {
    let identity: Vec<u8> = [1f32, 0.0, 0.0, 1.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    let twice: Vec<u8> = [2f32, 0.0, 0.0, 2.0].iter().flat_map(|v| v.to_le_bytes()).collect();
    fn view(codes: &[u8]) -> MatrixView<'_> {
        MatrixView::new(Format::F32, 2, 2, codes, &[]).unwrap()
    }
    let x = [1.0, -0.5];
    let weights = [0.637_067, 0.931_466_5, 0.931_466_5];
    let team = Team::new(2).unwrap();
    for k in kernels() {
        let expert = |up: &[u8]| {
            let (mut lift, mut hidden, mut down) = ([0f32; 2], [0f32; 2], [0f32; 2]);
            let weights = [view(&identity).into(), view(up).into()];
            matmul_swiglu(k, &team, weights, Input::exact(&x), &mut lift, &mut hidden);
            matmul(k, &team, view(&identity), Input::exact(&hidden), &mut down);
            down
        };
        close(&expert(&twice), &[1.462_117_2, 0.188_770_3], 2e-7);
        let mut total = [0f32; 2];
        for weight in weights {
            k.add_scaled(weight, &expert(&twice), &mut total);
        }
        k.add_scaled(1.0, &expert(&identity), &mut total);
        close(&total, &[4.386_351_5, 0.566_311], 3e-7);
    }
}

/// Distance in units of the last place of `want`, subnormal spacing at the bottom.
fn ulps(found: f32, want: f64) -> f64 {
    let last = f64::from(f32::from_bits((want as f32).to_bits() & 0x7F80_0000)).max(2f64.powi(-126))
        * 2f64.powi(-23);
    (f64::from(found) - want).abs() / last
}

#[test]
fn exponential_is_accurate_over_the_whole_range() {
    let k = Kernels::detect();
    let x: Vec<f32> = (-1_040_000..=887_000).step_by(7).map(|i| i as f32 * 1e-4).collect();
    let mut y = x.clone();
    k.exp(&mut y);
    let worst = x.iter().zip(&y).map(|(x, y)| ulps(*y, libm::exp(f64::from(*x)))).fold(0.0, f64::max);
    assert!(worst <= 1.5, "exp is off by {worst} ulp");

    let mut y = x.clone();
    k.sigmoid(&mut y);
    let exact = |x: f32| 1.0 / (1.0 + libm::exp(-f64::from(x)));
    let inside = x.iter().zip(&y).filter(|(x, _)| x.abs() < 87.0);
    let worst = inside.map(|(x, y)| ulps(*y, exact(*x))).fold(0.0, f64::max);
    assert!(worst <= 2.5, "sigmoid is off by {worst} ulp");

    let mut y = x.clone();
    k.swiglu(&mut y, &vec![1.0; x.len()]);
    let inside = x.iter().zip(&y).filter(|(x, _)| x.abs() < 87.0);
    let worst = inside.map(|(x, y)| ulps(*y, f64::from(*x) * exact(*x))).fold(0.0, f64::max);
    assert!(worst <= 2.5, "silu is off by {worst} ulp");
}

#[test]
fn exponential_of_special_values() {
    for k in kernels() {
        let mut y = [
            0.0,
            -0.0,
            88.722_83,
            88.8,
            f32::MAX,
            f32::INFINITY,
            -103.9,
            -104.1,
            f32::MIN,
            f32::NEG_INFINITY,
        ];
        k.exp(&mut y);
        let (inf, tiny) = (f32::INFINITY, f32::from_bits(1));
        assert!(y[2].is_finite());
        assert_eq!(
            [y[0], y[1], y[3], y[4], y[5], y[6], y[7], y[8], y[9]],
            [1.0, 1.0, inf, inf, inf, tiny, 0.0, 0.0, 0.0]
        );
        for bits in [0x7FC0_0000u32, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF] {
            let mut nan = [f32::from_bits(bits)];
            k.exp(&mut nan);
            assert!(nan[0].is_nan());
            let mut nan = [f32::from_bits(bits)];
            k.sigmoid(&mut nan);
            assert!(nan[0].is_nan());
        }
        let mut y = [-1000.0, 1000.0];
        k.sigmoid(&mut y);
        assert_eq!(y, [0.0, 1.0]);
    }
}
