//! Blocks of weights as f32: every product and difference rounded once, in the order in which it is written here.

use forebay_core::float::{bf16_to_f32, f16_to_f32};

use super::kind::{K_BLOCK, Kind};

/// Writes the weights of one row.
///
/// # Panics
/// If `bytes` are not those of `out.len()` weights.
pub fn decode_row(kind: Kind, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(kind.row_bytes(out.len() as u64), Some(bytes.len() as u64), "whole blocks");
    let blocks = bytes.chunks_exact(kind.block_bytes()).zip(out.chunks_exact_mut(kind.block_len()));
    for (block, out) in blocks {
        match kind {
            Kind::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            Kind::F16 => out[0] = half(block, 0),
            Kind::Bf16 => out[0] = bf16_to_f32(u16::from_le_bytes([block[0], block[1]])),
            Kind::Q8_0 => q8_0(block, out),
            Kind::Q4_0 => q4_0(block, out),
            Kind::Q4K => q4_k(block, out),
            Kind::Q6K => q6_k(block, out),
        }
    }
}

/// The half-precision number at byte `at`.
fn half(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// The scale, then a signed byte a weight.
fn q8_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    for (out, code) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(*code as i8);
    }
}

/// The scale, then 16 bytes: the first half of the weights in the low nibbles, the second in the high ones.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let scale = half(block, 0);
    let (low, high) = out.split_at_mut(16);
    for ((low, high), code) in low.iter_mut().zip(high).zip(&block[2..]) {
        *low = scale * (f32::from(code & 0xF) - 8.0);
        *high = scale * (f32::from(code >> 4) - 8.0);
    }
}

/// Factor of scales, factor of minima, 12 bytes with 8 pairs of 6 bits, then nibbles: of every 32 bytes the low ones
/// are the weights of one pair, the high ones those of the next.
fn q4_k(block: &[u8], out: &mut [f32]) {
    let (factor, min_factor) = (half(block, 0), half(block, 2));
    let packed = &block[4..16];
    for (part, (codes, out)) in block[16..].chunks_exact(32).zip(out.chunks_exact_mut(64)).enumerate() {
        for (high, out) in out.chunks_exact_mut(32).enumerate() {
            let (scale, min) = q4_k_pair(packed, 2 * part + high);
            let (scale, min) = (factor * f32::from(scale), min_factor * f32::from(min));
            for (out, code) in out.iter_mut().zip(codes) {
                *out = scale * f32::from(if high == 1 { code >> 4 } else { code & 0xF }) - min;
            }
        }
    }
}

/// Scale and minimum number `n`: the first four lie in the low 6 bits of bytes 0-3 and 4-7; the others have their low
/// four bits in bytes 8-11, and their high two bits above those of the first four.
fn q4_k_pair(packed: &[u8], n: usize) -> (u8, u8) {
    if n < 4 {
        return (packed[n] & 63, packed[n + 4] & 63);
    }
    let low = packed[n + 4];
    (low & 0xF | packed[n - 4] >> 6 << 4, low >> 4 | packed[n] >> 6 << 4)
}

/// 128 bytes with the low nibbles, 64 with two more bits each, 16 signed scales, the factor. Both halves of the block
/// have their own 64, 32 and 8 bytes of these.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let factor = half(block, 208);
    for (part, out) in out.chunks_exact_mut(K_BLOCK / 2).enumerate() {
        let (low, high) = (&block[64 * part..][..64], &block[128 + 32 * part..][..32]);
        let scales = &block[192 + 8 * part..][..8];
        for (n, out) in out.iter_mut().enumerate() {
            // Four runs of 32: the low nibbles of all 64 bytes, then the high ones; the bits of `high` run by run.
            let (run, at) = (n / 32, n % 32);
            let nibble = low[n % 64] >> (4 * (run / 2)) & 0xF;
            let bits = high[at] >> (2 * run) & 3;
            let code = f32::from(nibble | bits << 4) - 32.0;
            *out = factor * f32::from(scales[n / 16] as i8) * code;
        }
    }
}
