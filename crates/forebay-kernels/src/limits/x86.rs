//! The limits of x86-64: AVX-512 with VNNI, AVX2, and what every such processor has.

use super::{Chains, plain};
use std::arch::asm;
use std::arch::x86_64::*;

/// Enough to fill two units whose result comes after four or five cycles.
const CHAINS: usize = 12;
/// Bytes that a read asks for ahead of their use.
const AHEAD: usize = 3072;

pub(super) static AVX512: Chains = Chains {
    read: read_avx512,
    integer: integer_avx512,
    float: float_avx512,
    integer_name: "vpdpbusd, 512 bits",
    float_name: "vfmadd, 512 bits",
};

pub(super) static AVX2: Chains = Chains {
    read: read_avx2,
    integer: integer_avx2,
    float: float_avx2,
    integer_name: "vpmaddubsw, vpmaddwd and vpaddd, 256 bits",
    float_name: "vfmadd, 256 bits",
};

pub(super) static BASELINE: Chains = Chains {
    read: read_baseline,
    integer: integer_baseline,
    float: float_baseline,
    integer_name: "pmaddwd and paddd, 128 bits",
    float_name: "mulps and addps, 128 bits",
};

/// Makes the compiler think that a register changed: it can neither merge chains nor work
/// out their result.
macro_rules! renew {
    ($class:ident, $value:expr) => {
        // SAFETY: no instruction at all.
        unsafe { asm!("/* {0} */", inout($class) $value, options(nomem, nostack, preserves_flags)) }
    };
}

#[target_feature(enable = "avx512f")]
fn read_avx512(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<256>();
    let mut sums = [_mm512_setzero_si512(); 4];
    for block in blocks {
        for (i, sum) in sums.iter_mut().enumerate() {
            let at = block.as_ptr().wrapping_add(64 * i);
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
            // SAFETY: 64 readable bytes of the block.
            *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(at.cast()) });
        }
    }
    let sum = _mm512_add_epi64(_mm512_add_epi64(sums[0], sums[1]), _mm512_add_epi64(sums[2], sums[3]));
    (_mm512_reduce_add_epi64(sum) as u64).wrapping_add(plain::read(rest))
}

#[target_feature(enable = "avx512f,avx512vnni")]
fn integer_avx512(steps: u32) -> u64 {
    let mut sums = [_mm512_setzero_si512(); CHAINS];
    let ones = _mm512_set1_epi8(1);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, ones, ones);
            renew!(zmm_reg, *sum);
        }
    }
    sums.iter().map(|sum| _mm512_reduce_add_epi32(*sum) as u32 as u64).sum()
}

#[target_feature(enable = "avx512f")]
fn float_avx512(steps: u32) -> u64 {
    let mut sums = [_mm512_setzero_ps(); CHAINS];
    let one = _mm512_set1_ps(1.0);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm512_fmadd_ps(one, one, *sum);
            renew!(zmm_reg, *sum);
        }
    }
    sums.iter().map(|sum| _mm512_reduce_add_ps(*sum) as u64).sum()
}

#[target_feature(enable = "avx2")]
fn read_avx2(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<256>();
    let mut sums = [_mm256_setzero_si256(); 8];
    for block in blocks {
        for (i, sum) in sums.iter_mut().enumerate() {
            let at = block.as_ptr().wrapping_add(32 * i);
            if i % 2 == 0 {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
            }
            // SAFETY: 32 readable bytes of the block.
            *sum = _mm256_add_epi64(*sum, unsafe { _mm256_loadu_si256(at.cast()) });
        }
    }
    let mut words = [0u64; 4];
    let sum = sums.into_iter().fold(_mm256_setzero_si256(), |a, b| _mm256_add_epi64(a, b));
    // SAFETY: 32 writable bytes.
    unsafe { _mm256_storeu_si256(words.as_mut_ptr().cast(), sum) };
    words.into_iter().fold(plain::read(rest), u64::wrapping_add)
}

#[target_feature(enable = "avx2")]
fn integer_avx2(steps: u32) -> u64 {
    let mut sums = [_mm256_setzero_si256(); CHAINS];
    let (mut bytes, ones) = (_mm256_set1_epi8(1), _mm256_set1_epi16(1));
    for _ in 0..steps {
        for sum in &mut sums {
            renew!(ymm_reg, bytes);
            let pairs = _mm256_maddubs_epi16(bytes, bytes);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    let mut counts = [0u32; 8 * CHAINS];
    for (counts, sum) in counts.chunks_exact_mut(8).zip(sums) {
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_si256(counts.as_mut_ptr().cast(), sum) };
    }
    counts.iter().map(|count| u64::from(*count)).sum()
}

#[target_feature(enable = "avx2,fma")]
fn float_avx2(steps: u32) -> u64 {
    let mut sums = [_mm256_setzero_ps(); CHAINS];
    let one = _mm256_set1_ps(1.0);
    for _ in 0..steps {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(one, one, *sum);
            renew!(ymm_reg, *sum);
        }
    }
    let mut counts = [0f32; 8 * CHAINS];
    for (counts, sum) in counts.chunks_exact_mut(8).zip(sums) {
        // SAFETY: 32 writable bytes.
        unsafe { _mm256_storeu_ps(counts.as_mut_ptr(), sum) };
    }
    counts.iter().map(|count| *count as u64).sum()
}

#[target_feature(enable = "sse2")]
fn read_baseline(bytes: &[u8]) -> u64 {
    let (blocks, rest) = bytes.as_chunks::<128>();
    let mut sums = [_mm_setzero_si128(); 8];
    for block in blocks {
        for (i, sum) in sums.iter_mut().enumerate() {
            let at = block.as_ptr().wrapping_add(16 * i);
            if i % 4 == 0 {
                _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
            }
            // SAFETY: 16 readable bytes of the block.
            *sum = _mm_add_epi64(*sum, unsafe { _mm_loadu_si128(at.cast()) });
        }
    }
    let mut words = [0u64; 2];
    let sum = sums.into_iter().fold(_mm_setzero_si128(), |a, b| _mm_add_epi64(a, b));
    // SAFETY: 16 writable bytes.
    unsafe { _mm_storeu_si128(words.as_mut_ptr().cast(), sum) };
    words.into_iter().fold(plain::read(rest), u64::wrapping_add)
}

#[target_feature(enable = "sse2")]
fn integer_baseline(steps: u32) -> u64 {
    let mut sums = [_mm_setzero_si128(); CHAINS];
    let mut ones = _mm_set1_epi16(1);
    for _ in 0..steps {
        for sum in &mut sums {
            renew!(xmm_reg, ones);
            *sum = _mm_add_epi32(*sum, _mm_madd_epi16(ones, ones));
        }
    }
    let mut counts = [0u32; 4 * CHAINS];
    for (counts, sum) in counts.chunks_exact_mut(4).zip(sums) {
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_si128(counts.as_mut_ptr().cast(), sum) };
    }
    counts.iter().map(|count| u64::from(*count)).sum()
}

#[target_feature(enable = "sse2")]
fn float_baseline(steps: u32) -> u64 {
    let mut sums = [_mm_setzero_ps(); CHAINS];
    let mut one = _mm_set1_ps(1.0);
    for _ in 0..steps {
        for sum in &mut sums {
            renew!(xmm_reg, one);
            *sum = _mm_add_ps(*sum, _mm_mul_ps(one, one));
        }
    }
    let mut counts = [0f32; 4 * CHAINS];
    for (counts, sum) in counts.chunks_exact_mut(4).zip(sums) {
        // SAFETY: 16 writable bytes.
        unsafe { _mm_storeu_ps(counts.as_mut_ptr(), sum) };
    }
    counts.iter().map(|count| *count as u64).sum()
}
