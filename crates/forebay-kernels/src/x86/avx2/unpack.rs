//! Packed codes to signed bytes, 32 at a time.

use crate::scalar;
use std::arch::x86_64::*;

/// As [`scalar::int4`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn int4(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<32>();
    let (bytes, _) = codes.as_chunks::<16>();
    let done = blocks.len();
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        // SAFETY: 16 readable bytes.
        let packed = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        // Each byte in the low half of 16 bits; a copy shifted by four puts its high nibble above.
        let wide = _mm256_cvtepu8_epi16(packed);
        let both = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
        let nibbles = _mm256_and_si256(both, _mm256_set1_epi8(15));
        let signed = _mm256_sub_epi8(nibbles, _mm256_set1_epi8(8));
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(block.as_mut_ptr().cast(), signed) }
    }
    scalar::int4(&codes[done * 16..], &mut out[done * 32..]);
}

/// As [`scalar::int2`].
#[inline]
#[target_feature(enable = "avx2")]
pub(super) fn int2(codes: &[u8], out: &mut [i8]) {
    let (blocks, _) = out.as_chunks_mut::<32>();
    let (bytes, _) = codes.as_chunks::<8>();
    let done = blocks.len();
    for (block, bytes) in blocks.iter_mut().zip(bytes) {
        let packed = _mm_cvtsi64_si128(i64::from_le_bytes(*bytes));
        // Each byte in the low quarter of 32 bits; three shifted copies put its other codes above.
        let wide = _mm256_cvtepu8_epi32(packed);
        let both = _mm256_or_si256(wide, _mm256_slli_epi32(wide, 6));
        let all = _mm256_or_si256(both, _mm256_slli_epi32(both, 12));
        let twos = _mm256_and_si256(all, _mm256_set1_epi8(3));
        let signed = _mm256_sub_epi8(twos, _mm256_set1_epi8(2));
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(block.as_mut_ptr().cast(), signed) }
    }
    scalar::int2(&codes[done * 8..], &mut out[done * 32..]);
}
