//! Exact integer dot products with VNNI.

pub(super) use crate::x86::avx2::dot_i8::dot16;
use std::arch::x86_64::*;

/// `sum_k w[k] x[k]`. The weights enter as the unsigned bytes w + 128; the sum starts at
/// `-128 * sum(x)`, which is what that adds.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn dot64(w: &[i8; 64], x: &[i8; 64], corrections: &[i32; 4]) -> i32 {
    // SAFETY: 64, 64 and 16 readable bytes.
    let (w, x, start) = unsafe {
        (
            _mm512_loadu_si512(w.as_ptr().cast()),
            _mm512_loadu_si512(x.as_ptr().cast()),
            _mm_loadu_si128(corrections.as_ptr().cast()),
        )
    };
    let unsigned = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
    let sums = _mm512_dpbusd_epi32(_mm512_zextsi128_si512(start), unsigned, x);
    _mm512_reduce_add_epi32(sums)
}
