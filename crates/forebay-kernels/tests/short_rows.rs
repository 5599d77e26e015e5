//! Many batch rows against weight rows that fit one chunk of columns, which is how the value half
//! of `kv_b` is multiplied: the sums never wait in memory, and the bits are those of the scalar truth.

mod common;

use common::{Weights, any_format, floats, kernels, random, same_bits};
use forebay_kernels::{Input, Isa, Kernels, matmul_rows};
use proptest::prelude::*;
use std::ops::Range;

fn product(k: Kernels, w: &Weights, rows: Range<usize>, x: &[f32], batch: usize) -> Vec<f32> {
    let mut y = vec![f32::NAN; batch * rows.len()];
    matmul_rows(k, w.view(), rows, Input::exact(x), &mut y);
    y
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn rows_of_one_chunk_have_the_scalar_bits(
        format in any_format(),
        fours in 1..10usize,
        lines in 1..50usize,
        batch in 16..140usize,
        first in 0..9usize,
        spread in 0..4u32,
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        // The first row need not start anything; up to 768 columns are one chunk.
        let (rows, cols) = (first..first + 4 * fours, 16 * lines);
        let w = Weights::random(format, rows.end, cols, 0, &mut next);
        let x = floats(batch * cols, spread, &mut next);
        let truth = product(Kernels::with_isa(Isa::Scalar).unwrap(), &w, rows.clone(), &x, batch);
        for k in kernels() {
            prop_assert!(same_bits(&product(k, &w, rows.clone(), &x, batch), &truth), "{k:?}");
        }
    }
}
