//! Random weights and numbers for the kernel suites.
#![allow(dead_code, reason = "every suite uses its own part")]

use forebay_core::format::{Format, GroupSize};
use forebay_core::view::MatrixView;
use forebay_kernels::{Isa, Kernels};
use proptest::prelude::*;

/// Every kernel set of this machine.
pub fn kernels() -> impl Iterator<Item = Kernels> {
    Isa::available().map(|isa| Kernels::with_isa(isa).unwrap())
}

/// A small generator of 64-bit numbers.
pub fn random(seed: u64) -> impl FnMut() -> u64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// Numbers of about 1; with `spread` 1 some zeros, with 2 very large and very small
/// ones as well, with 3 subnormal ones only.
pub fn floats(n: usize, spread: u32, next: &mut impl FnMut() -> u64) -> Vec<f32> {
    (0..n)
        .map(|_| {
            let bits = next();
            let value = (bits >> 40) as f32 / (1 << 23) as f32 - 1.0;
            match (spread, bits % 8) {
                (1.., 0) => 0.0,
                (1.., 1) => -0.0,
                (2, 2) => value * 1e18,
                (2, 3) => value * 1e-20,
                (2, 4) => value * 1e-30,
                (3, _) => f32::from_bits((bits as u32) & 0x807F_FFFF),
                _ => value,
            }
        })
        .collect()
}

/// Equal bits, all NaN being one.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len()
        && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()))
}

/// Every weight format.
pub fn any_format() -> impl Strategy<Value = Format> {
    prop_oneof![
        Just(Format::F32),
        Just(Format::Bf16),
        Just(Format::F16),
        Just(Format::Fp8Block),
        Just(Format::Int8Row),
        Just(Format::Int4Row),
        Just(Format::Int2Row),
        (0..8usize).prop_map(|i| Format::Int4Group(GroupSize::ALL[i])),
        (0..8usize).prop_map(|i| Format::Int4Group(GroupSize::ALL[i])),
    ]
}

/// A matrix whose codes start `offset` bytes into their buffer.
pub struct Weights {
    format: Format,
    rows: usize,
    cols: usize,
    offset: usize,
    codes: Vec<u8>,
    scales: Vec<f32>,
}

impl Weights {
    /// Random codes, every value of the format among them, NaN and infinity excepted.
    pub fn random(
        format: Format,
        rows: usize,
        cols: usize,
        offset: usize,
        next: &mut impl FnMut() -> u64,
    ) -> Self {
        let elements = rows * cols;
        let mut codes = vec![0u8; offset];
        match format {
            Format::F32 => codes.extend(floats(elements, 2, next).iter().flat_map(|v| v.to_le_bytes())),
            // Exponents below the largest: finite.
            Format::Bf16 => codes.extend((0..elements).flat_map(|_| (next() as u16 & 0xC7FF).to_le_bytes())),
            Format::F16 => codes.extend((0..elements).flat_map(|_| (next() as u16 & 0xBFFF).to_le_bytes())),
            Format::Fp8Block => codes.extend((0..elements).map(|_| next() as u8 & 0xF7)),
            _ => codes.extend((0..format.payload_bytes(rows, cols).unwrap()).map(|_| next() as u8)),
        }
        let scales = floats(format.scale_count(rows, cols).unwrap(), 0, next);
        Self { format, rows, cols, offset, codes, scales }
    }

    /// The same code byte and scale everywhere.
    pub fn fill(&mut self, code: u8, scale: f32) {
        self.codes.fill(code);
        self.scales.fill(scale);
    }

    /// The matrix.
    pub fn view(&self) -> MatrixView<'_> {
        let codes = &self.codes[self.offset..];
        MatrixView::new(self.format, self.rows, self.cols, codes, &self.scales).unwrap()
    }
}
