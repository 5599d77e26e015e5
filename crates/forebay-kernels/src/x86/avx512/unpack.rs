//! Packed codes to signed bytes, 64 at a time.

use crate::scalar;
use std::arch::x86_64::*;

/// As [`scalar::int4`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn int4(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<64>();
    let (bytes, _) = codes.as_chunks::<32>();
    let done = blocks.len();
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        // SAFETY: 32 readable bytes.
        let packed = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
        // Each byte in the low half of 16 bits; a copy shifted by four puts its high nibble above.
        let wide = _mm512_cvtepu8_epi16(packed);
        let both = _mm512_or_si512(wide, _mm512_slli_epi16(wide, 4));
        let nibbles = _mm512_and_si512(both, _mm512_set1_epi8(15));
        let signed = _mm512_sub_epi8(nibbles, _mm512_set1_epi8(8));
        // SAFETY: 64 writable bytes.
        unsafe { _mm512_storeu_si512(block.as_mut_ptr().cast(), signed) }
    }
    scalar::int4(&codes[done * 32..], &mut out[done * 64..]);
}

/// As [`scalar::int2`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) fn int2(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<64>();
    let (bytes, _) = codes.as_chunks::<16>();
    let done = blocks.len();
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        // SAFETY: 16 readable bytes.
        let packed = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        // Each byte in the low quarter of 32 bits; shifted copies put its other codes above.
        let wide = _mm512_cvtepu8_epi32(packed);
        let both = _mm512_or_si512(wide, _mm512_slli_epi32(wide, 6));
        let all = _mm512_or_si512(both, _mm512_slli_epi32(both, 12));
        let twos = _mm512_and_si512(all, _mm512_set1_epi8(3));
        let signed = _mm512_sub_epi8(twos, _mm512_set1_epi8(2));
        // SAFETY: 64 writable bytes.
        unsafe { _mm512_storeu_si512(block.as_mut_ptr().cast(), signed) }
    }
    scalar::int2(&codes[done * 16..], &mut out[done * 64..]);
}
