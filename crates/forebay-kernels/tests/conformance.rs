//! Every instruction set of this machine against the scalar truth, bit for bit, and the
//! scalar truth against f64.

mod common;

use common::{Weights, any_format, floats, kernels, random, same_bits};
use forebay_core::format::{Format, GroupSize};
use forebay_core::panel::{PanelShape, PanelView};
use forebay_core::quant::{columns_per_scale, decode_row, int_code};
use forebay_kernels::*;
use proptest::prelude::*;

/// `[batch, rows]` products without threads.
fn product(k: Kernels, w: &Weights, x: &[f32], batch: usize, int8: bool) -> Vec<f32> {
    let view = w.view();
    let mut y = vec![f32::NAN; batch * view.rows()];
    let mut q = Activations::new(view.cols());
    q.quantise(k, &Team::new(1).unwrap(), x);
    let input = if int8 { Input::int8(x, &q) } else { Input::exact(x) };
    matmul_rows(k, view, 0..view.rows(), input, &mut y);
    y
}

/// The same product from panels, if the format has them.
fn panel_product(k: Kernels, w: &Weights, x: &[f32], batch: usize, int8: bool) -> Option<Vec<f32>> {
    let view = w.view();
    let shape = PanelShape::new(view.format(), view.rows(), view.cols())?;
    let mut bytes = vec![0; shape.bytes() + 1];
    shape.pack(&view, &mut bytes[1..]);
    let panels = PanelView::new(shape, &bytes[1..]).unwrap();
    let mut y = vec![f32::NAN; batch * view.rows()];
    let mut q = Activations::new(view.cols());
    q.quantise(k, &Team::new(1).unwrap(), x);
    let input = if int8 { Input::int8(x, &q) } else { Input::exact(x) };
    matmul(k, &Team::new(1).unwrap(), panels, input, &mut y);
    Some(y)
}

/// The product written down from the definition: f64 for `exact`, and for `int8` exact
/// integers, segment by segment.
fn reference(w: &Weights, x: &[f32], batch: usize) -> (Vec<f64>, Vec<f64>) {
    let view = w.view();
    let cols = view.cols();
    let mut line = vec![0f32; cols];
    let mut sums = vec![0f64; batch * view.rows()];
    let mut sizes = sums.clone();
    for r in 0..view.rows() {
        decode_row(&view, r, &mut line);
        for b in 0..batch {
            for c in 0..cols {
                let term = f64::from(line[c]) * f64::from(x[b * cols + c]);
                sums[b * view.rows() + r] += term;
                sizes[b * view.rows() + r] += term.abs();
            }
        }
    }
    (sums, sizes)
}

/// `int8` from its definition in docs/numerics.md, one column at a time.
fn int8_by_definition(w: &Weights, x: &[f32], batch: usize) -> Vec<f32> {
    let view = w.view();
    let cols = view.cols();
    let per_scale = columns_per_scale(view.format(), cols);
    let mut y = Vec::new();
    for b in 0..batch {
        let row = &x[b * cols..(b + 1) * cols];
        let mut codes = vec![0i32; cols];
        let mut scales = Vec::new();
        for (g, group) in row.chunks(64).enumerate() {
            let absmax = group.iter().fold(0f32, |m, v| m.max(v.abs()));
            let finite = group.iter().all(|v| v.is_finite());
            let scale = if finite { (absmax / 127.0).max(1e-12) } else { f32::NAN };
            for (i, v) in group.iter().enumerate() {
                codes[g * 64 + i] = if finite { (v * (1.0 / scale)).round_ties_even() as i32 } else { 0 };
            }
            scales.push(scale);
        }
        assert!(codes.iter().all(|q| q.abs() <= 127));
        for r in 0..view.rows() {
            let (mut sum, mut dot) = (0f32, 0i32);
            for c in 0..cols {
                dot += i32::from(int_code(view.format(), view.row_codes(r), c)) * codes[c];
                if c + 1 == cols || (c + 1) % 64 == 0 || (c + 1) % per_scale == 0 {
                    let scale = scales[c / 64] * view.row_scales(r)[c / per_scale];
                    sum = (dot as f32).mul_add(scale, sum);
                    dot = 0;
                }
            }
            y.push(sum);
        }
    }
    y
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    #[test]
    fn products_agree(
        format in any_format(),
        (rows, cols, batch) in (1..40usize, 1..1700usize, 0..20usize),
        offset in 0..4usize,
        spread in 0..4u32,
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let w = Weights::random(format, rows, cols, offset, &mut next);
        let x = floats(batch * cols, spread, &mut next);
        let scalar = Kernels::with_isa(Isa::Scalar).unwrap();
        let (sums, sizes) = reference(&w, &x, batch);
        let exact = product(scalar, &w, &x, batch, false);
        for ((y, sum), size) in exact.iter().zip(&sums).zip(&sizes) {
            prop_assert!((f64::from(*y) - sum).abs() <= size * 1e-5 + 1e-36, "{y} for {sum}");
        }
        let int8 = product(scalar, &w, &x, batch, true);
        if format.is_integer() {
            prop_assert!(same_bits(&int8, &int8_by_definition(&w, &x, batch)));
        } else {
            prop_assert!(same_bits(&int8, &exact), "float weights always use exact arithmetic");
        }
        for k in kernels() {
            prop_assert!(same_bits(&product(k, &w, &x, batch, false), &exact), "{k:?} exact");
            prop_assert!(same_bits(&product(k, &w, &x, batch, true), &int8), "{k:?} int8");
            if let Some(y) = panel_product(k, &w, &x, batch, true) {
                prop_assert!(same_bits(&y, &int8), "{k:?} int8 panels");
                prop_assert!(same_bits(&panel_product(k, &w, &x, batch, false).unwrap(), &exact), "{k:?} panels");
            }
        }
    }

    #[test]
    fn a_row_depends_on_nothing_else(
        format in any_format(),
        (rows, cols, batch) in (1..200usize, 1..300usize, 1..40usize),
        threads in 1..4usize,
        int8 in any::<bool>(),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let w = Weights::random(format, rows, cols, 0, &mut next);
        let x = floats(batch * cols, 1, &mut next);
        let k = Kernels::detect();
        let whole = product(k, &w, &x, batch, int8);
        // Through the team, as one of two jobs.
        let team = Team::new(threads).unwrap();
        let mut q = Activations::new(cols);
        q.quantise(k, &team, &x);
        let input = if int8 { Input::int8(&x, &q) } else { Input::exact(&x) };
        let (mut y, mut z) = (vec![0f32; whole.len()], vec![0f32; whole.len()]);
        let mut jobs = [MatmulJob::new(w.view(), input, &mut y), MatmulJob::new(w.view(), input, &mut z)];
        matmul_many(k, &team, &mut jobs);
        prop_assert!(same_bits(&y, &whole) && same_bits(&z, &whole));
        // As gate and up.
        let mut gated = whole.clone();
        k.swiglu(&mut gated, &whole);
        matmul_swiglu(k, &team, [w.view().into(); 2], input, &mut z, &mut y);
        prop_assert!(same_bits(&y, &gated));
        // Without the rows that the codes were made from.
        if int8 && format.is_integer() {
            matmul(k, &team, w.view(), Input::quantised(&q), &mut y);
            prop_assert!(same_bits(&y, &whole));
        }
        // The batch kept in two parts, and the other way round.
        let mut kept = KeptRows::new(cols);
        kept.clear(batch);
        let first = batch / 2 * cols;
        let mut half = Activations::new(cols);
        for half_of_x in [&x[..first], &x[first..]] {
            half.quantise(k, &team, half_of_x);
            kept.keep(&half);
        }
        prop_assert_eq!(kept.rows(), batch);
        let backwards: Vec<usize> = (0..batch).rev().collect();
        let mut turned = Activations::new(cols);
        turned.gather(&team, &kept, &backwards);
        for (to, from) in backwards.into_iter().enumerate() {
            prop_assert_eq!(turned.codes(to), q.codes(from));
            prop_assert_eq!(turned.scales(to), q.scales(from));
        }
        // One batch row alone, half of the weight rows.
        let b = (seed % batch as u64) as usize;
        let mut one = Activations::new(cols);
        one.gather(&team, &kept, &[b]);
        let row = &x[b * cols..(b + 1) * cols];
        let input = if int8 { Input::int8(row, &one) } else { Input::exact(row) };
        let mut part = vec![0f32; rows - rows / 2];
        matmul_rows(k, w.view(), rows / 2..rows, input, &mut part);
        prop_assert!(same_bits(&part, &whole[b * rows + rows / 2..(b + 1) * rows]));
    }

    #[test]
    fn combining_rows_agrees(
        format in any_format(),
        (rows, cols) in (1..9usize, 1..900usize),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let w = Weights::random(format, rows, cols, 1, &mut next);
        let coefficients = floats(rows, 1, &mut next);
        let mut want = vec![0f32; cols];
        let mut line = vec![0f32; cols];
        for (r, coefficient) in coefficients.iter().enumerate() {
            decode_row(&w.view(), r, &mut line);
            for (o, v) in want.iter_mut().zip(&line) {
                *o = coefficient.mul_add(*v, *o);
            }
        }
        for k in kernels() {
            let mut out = vec![0f32; cols];
            combine_rows(k, w.view(), 0..rows, &coefficients, &mut out);
            prop_assert!(same_bits(&out, &want), "{k:?}");
        }
    }

    #[test]
    fn vector_operations_agree(n in 1..600usize, spread in 0..4u32, seed in any::<u64>()) {
        let mut next = random(seed);
        let (x, w, b) = (floats(n, spread, &mut next), floats(n, 1, &mut next), floats(n, 1, &mut next));
        let run = |k: Kernels| {
            let mut all = vec![k.dot(&x, &w)];
            let mut out = b.clone();
            k.add_scaled(x[0], &w, &mut out);
            all.extend(&out);
            k.rms_norm(&x, &w, 1e-5, &mut out);
            all.extend(&out);
            k.layer_norm(&x, &w, &b, 1e-6, &mut out);
            all.extend(&out);
            out.copy_from_slice(&x);
            k.swiglu(&mut out, &w);
            all.extend(&out);
            out.copy_from_slice(&x);
            k.exp(&mut out);
            all.extend(&out);
            out.copy_from_slice(&x);
            k.sigmoid(&mut out);
            all.extend(&out);
            let mut q = Activations::new(n);
            q.quantise(k, &Team::new(1).unwrap(), &x);
            all.extend(q.scales(0));
            all.extend(q.codes(0).iter().map(|c| f32::from(*c)));
            all
        };
        let want = run(Kernels::with_isa(Isa::Scalar).unwrap());
        for k in kernels() {
            prop_assert!(same_bits(&run(k), &want), "{k:?}");
        }
    }
}

#[test]
fn the_widest_rows_stay_exact() {
    // The largest codes everywhere: 64 * 128 * 127 per group, 256 groups.
    let cols = 16_384;
    for format in [Format::Int8Row, Format::Int4Row, Format::Int4Group(GroupSize::new(256).unwrap())] {
        let lowest = if format == Format::Int8Row { 0x80 } else { 0x00 };
        let mut w = Weights::random(format, 1, cols, 0, &mut random(1));
        w.fill(lowest, 1.0);
        let x = vec![127f32; cols];
        let code = if format == Format::Int8Row { -128.0 } else { -8.0 };
        for k in kernels() {
            assert_eq!(product(k, &w, &x, 1, true), [code * 127.0 * cols as f32], "{k:?} {format}");
            assert_eq!(product(k, &w, &x, 1, false), [code * 127.0 * cols as f32], "{k:?} {format}");
        }
    }
}

#[test]
fn a_damaged_group_gives_nan_and_leaves_other_rows_alone() {
    let w = Weights::random(Format::Int8Row, 3, 200, 0, &mut random(2));
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = vec![1f32; 3 * 200];
        x[200 + 130] = bad;
        for k in kernels() {
            let y = product(k, &w, &x, 3, true);
            assert!(y[3..6].iter().all(|v| v.is_nan()), "{k:?}");
            assert!(y[..3].iter().chain(&y[6..]).all(|v| v.is_finite()), "{k:?}");
        }
    }
}

#[test]
fn nothing_in_nothing_out() {
    let team = Team::new(2).unwrap();
    let k = Kernels::detect();
    for (rows, cols, batch) in [(0, 7, 2), (5, 7, 0), (0, 0, 0), (4, 0, 0)] {
        let w = Weights::random(Format::Int4Row, rows, cols, 0, &mut random(3));
        let x = vec![1f32; batch * cols];
        let mut q = Activations::new(cols);
        q.quantise(k, &team, &x);
        let mut y = vec![0f32; batch * rows];
        matmul(k, &team, w.view(), Input::int8(&x, &q), &mut y);
        matmul(k, &team, w.view(), Input::exact(&x), &mut y);
    }
}

/// Every format, group sizes included.
fn all_formats() -> Vec<Format> {
    let mut formats = vec![Format::F32, Format::Bf16, Format::F16, Format::Fp8Block];
    formats.extend([Format::Int8Row, Format::Int4Row, Format::Int2Row]);
    formats.extend(GroupSize::ALL.map(Format::Int4Group));
    formats
}

/// `exact` products of every instruction set and layout against the scalar room's from rows.
fn exact_agrees(w: &Weights, x: &[f32], batch: usize, what: &str) {
    let want = product(Kernels::with_isa(Isa::Scalar).unwrap(), w, x, batch, false);
    for k in kernels() {
        assert!(same_bits(&product(k, w, x, batch, false), &want), "{k:?} rows {what} x {batch}");
        if let Some(y) = panel_product(k, w, x, batch, false) {
            assert!(same_bits(&y, &want), "{k:?} panels {what} x {batch}");
        }
    }
}

#[test]
fn every_number_of_columns() {
    let mut next = random(4);
    for format in all_formats() {
        for cols in (1..=200).chain([767, 768, 769, 1543]) {
            let w = Weights::random(format, 3, cols, 1, &mut next);
            for batch in [1, 2, 3, 4, 7, 33] {
                let x = floats(batch * cols, 2, &mut next);
                exact_agrees(&w, &x, batch, &format!("{format} {cols}"));
            }
        }
    }
}

#[test]
fn extreme_codes_and_activations() {
    let (rows, cols) = (17, 77);
    let mut next = random(5);
    // Huge numbers of both signs cancel, overflow and make NaN; tiny ones underflow to either zero.
    let edges = [
        f32::MAX,
        f32::MIN,
        f32::MIN_POSITIVE,
        -1e-45,
        1e-45,
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
    ];
    for format in all_formats() {
        let mut w = Weights::random(format, rows, cols, 0, &mut next);
        for (code, scale) in [(0x80, 1.0), (0x00, -0.0), (0x88, -1.0), (0x7F, 1e-38), (0xFF, 1e38)] {
            w.fill(code, scale);
            for kinds in [9, 11, 12] {
                for batch in [1, 2, 5, 13, 20] {
                    let x: Vec<f32> = (0..batch * cols).map(|_| edges[(next() % kinds) as usize]).collect();
                    exact_agrees(&w, &x, batch, &format!("{format} {code} {scale} {kinds}"));
                }
            }
        }
    }
}

#[test]
fn few_batch_rows_of_sixteen_weight_rows_and_more() {
    let (team, mut next) = (Team::new(1).unwrap(), random(6));
    let rows = 37;
    for format in all_formats().into_iter().filter(|f| f.is_integer()) {
        for cols in [1, 63, 64, 65, 127, 128, 129, 191, 193, 256, 1543, 4224] {
            let mut w = Weights::random(format, rows, cols, 1, &mut next);
            // Random codes, then the lowest and the highest ones in all places.
            for code in [None, Some(0x00), Some(0x80), Some(0x7F), Some(0xFF)] {
                if let Some(code) = code {
                    w.fill(code, -0.75);
                }
                for batch in 1..=4 {
                    let largest = |v: f32| if code.is_some() { v.signum() } else { v };
                    let x: Vec<f32> = floats(batch * cols, 1, &mut next).into_iter().map(largest).collect();
                    let want = int8_by_definition(&w, &x, batch);
                    for k in kernels() {
                        let what = format!("{k:?} {format} {cols} {code:?} x {batch}");
                        assert!(same_bits(&product(k, &w, &x, batch, true), &want), "{what}");
                        let mut q = Activations::new(cols);
                        q.quantise(k, &team, &x);
                        let mut part = vec![0f32; batch * (rows - 6)];
                        matmul_rows(k, w.view(), 5..rows - 1, Input::int8(&x, &q), &mut part);
                        for (part, want) in part.chunks(rows - 6).zip(want.chunks(rows)) {
                            assert!(same_bits(part, &want[5..rows - 1]), "{what} from row 5");
                        }
                    }
                }
            }
        }
    }
}

/// Large batches go by in tiles, panels in groups and columns in blocks: all of them several times.
#[test]
fn many_batch_rows_panels_and_columns() {
    let (rows, cols, batch) = (150, 3072 + 130, 71);
    let mut next = random(7);
    let group = |size| Format::Int4Group(GroupSize::new(size).unwrap());
    for format in [Format::Int8Row, Format::Int4Row, group(64), group(192), group(16)] {
        let w = Weights::random(format, rows, cols, 1, &mut next);
        let x = floats(batch * cols, 1, &mut next);
        let want = int8_by_definition(&w, &x, batch);
        for k in kernels() {
            assert!(same_bits(&product(k, &w, &x, batch, true), &want), "{k:?} {format} rows");
            let y = panel_product(k, &w, &x, batch, true).unwrap();
            assert!(same_bits(&y, &want), "{k:?} {format} panels");
        }
    }
}
