//! Packed codes to signed bytes; the interleaving stores put them in order.

use crate::scalar;
use std::arch::aarch64::*;

/// As [`scalar::int4`].
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn int4(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<32>();
    let (bytes, _) = codes.as_chunks::<16>();
    let done = blocks.len();
    let signed = |nibbles| vsubq_s8(vreinterpretq_s8_u8(nibbles), vdupq_n_s8(8));
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        // SAFETY: 16 readable bytes.
        let packed = unsafe { vld1q_u8(bytes.as_ptr()) };
        let even = signed(vandq_u8(packed, vdupq_n_u8(15)));
        let odd = signed(vshrq_n_u8::<4>(packed));
        // SAFETY: 32 writable bytes.
        unsafe { vst2q_s8(block.as_mut_ptr(), int8x16x2_t(even, odd)) }
    }
    scalar::int4(&codes[done * 16..], &mut out[done * 32..]);
}

/// As [`scalar::int2`].
#[inline]
#[target_feature(enable = "neon")]
pub(crate) fn int2(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<64>();
    let (bytes, _) = codes.as_chunks::<16>();
    let done = blocks.len();
    let three = vdupq_n_u8(3);
    let signed = |code| vsubq_s8(vreinterpretq_s8_u8(code), vdupq_n_s8(2));
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        // SAFETY: 16 readable bytes.
        let packed = unsafe { vld1q_u8(bytes.as_ptr()) };
        let four = int8x16x4_t(
            signed(vandq_u8(packed, three)),
            signed(vandq_u8(vshrq_n_u8::<2>(packed), three)),
            signed(vandq_u8(vshrq_n_u8::<4>(packed), three)),
            signed(vshrq_n_u8::<6>(packed)),
        );
        // SAFETY: 64 writable bytes.
        unsafe { vst4q_s8(block.as_mut_ptr(), four) }
    }
    scalar::int2(&codes[done * 16..], &mut out[done * 64..]);
}
