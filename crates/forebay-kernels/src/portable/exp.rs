//! Exponential, sigmoid and SiLU from one polynomial, no libm.

/// ln 2 = `LN2_HIGH + LN2_LOW`; the high part has nine bits, so `n * LN2_HIGH` is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = (std::f64::consts::LN_2 - 355.0 / 512.0) as f32;
/// Adding this rounds to an integer (half to even) and leaves it in the low mantissa bits.
const ROUNDER: f32 = 12_582_912.0;
/// From here on the result is infinite.
const HIGHEST: f32 = 90.0;
/// From here down the result is zero.
const LOWEST: f32 = -110.0;
/// 1/7!, 1/6!, ... 1/1!, 1/0!: the Taylor series leaves 5e-9 for |r| <= ln(2)/2.
const TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 1.0 / 2.0, 1.0, 1.0];

/// `e^x` over the whole range: 0 below, infinity above, NaN for NaN, subnormal results kept.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Written as selects, not min/max, so that NaN passes through.
    let x = if x > HIGHEST { HIGHEST } else { x };
    let x = if x < LOWEST { LOWEST } else { x };
    let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUNDER);
    let n = rounded - ROUNDER;
    let r = (-n).mul_add(LN2_HIGH, x);
    let r = (-n).mul_add(LN2_LOW, r);
    let mut p = TAYLOR[0];
    for c in &TAYLOR[1..] {
        p = p.mul_add(r, *c);
    }
    // 2^n in two factors, so that subnormal results round once and n = 128 does not overflow early.
    let n = rounded.to_bits().wrapping_sub(ROUNDER.to_bits()) as i32;
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// `2^n` for -126 <= n <= 127 (for others, which only NaN brings, some number).
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `1 / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `gate[i] = silu(gate[i]) * up[i]`.
#[inline(always)]
pub(crate) fn swiglu(gate: &mut [f32], up: &[f32]) {
    for (g, u) in gate.iter_mut().zip(up) {
        *g = silu(*g) * u;
    }
}

/// `values[i] = exp(values[i])`.
#[inline(always)]
pub(crate) fn exp_all(values: &mut [f32]) {
    for v in values {
        *v = exp(*v);
    }
}

/// `values[i] = sigmoid(values[i])`.
#[inline(always)]
pub(crate) fn sigmoid_all(values: &mut [f32]) {
    for v in values {
        *v = sigmoid(*v);
    }
}
