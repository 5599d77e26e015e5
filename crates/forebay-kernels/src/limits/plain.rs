//! The limits in plain Rust: what is left of every read, and processors without a room of their own.

/// The sum of the 64-bit words.
#[inline(always)]
pub(super) fn read(bytes: &[u8]) -> u64 {
    let (words, _) = bytes.as_chunks::<8>();
    words.iter().fold(0, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)))
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
pub(super) use chains::PLAIN;

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
mod chains {
    use super::super::Chains;
    use std::hint::black_box;

    const CHAINS: usize = 12;
    const LANES: usize = 16;

    pub(in super::super) static PLAIN: Chains = Chains {
        read: super::read,
        integer,
        float,
        integer_name: "integer multiply and add, as compiled",
        float_name: "float multiply and add, as compiled",
    };

    fn integer(steps: u32) -> u64 {
        let mut sums = [[0u32; LANES]; CHAINS];
        let (mut x, y) = (black_box([1u32; LANES]), black_box([1u32; CHAINS]));
        for _ in 0..steps {
            // The compiler must think that the factors change.
            x = black_box(x);
            for (sum, y) in sums.iter_mut().zip(y) {
                for (sum, x) in sum.iter_mut().zip(x) {
                    *sum = sum.wrapping_add(x.wrapping_mul(y));
                }
            }
        }
        sums.as_flattened().iter().map(|sum| u64::from(*sum)).sum()
    }

    fn float(steps: u32) -> u64 {
        let mut sums = [[0f32; LANES]; CHAINS];
        let (mut x, y) = (black_box([1f32; LANES]), black_box([1f32; CHAINS]));
        for _ in 0..steps {
            x = black_box(x);
            for (sum, y) in sums.iter_mut().zip(y) {
                for (sum, x) in sum.iter_mut().zip(x) {
                    *sum += x * y;
                }
            }
        }
        sums.as_flattened().iter().map(|sum| *sum as u64).sum()
    }
}
