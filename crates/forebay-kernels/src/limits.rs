//! What the machine can do at most: reading memory, and multiplying in registers.
//!
//! A kernel's speed means something only beside these limits, measured in the same
//! run with the same [`Team`] and the instructions of the same room. Everything here
//! does a known amount of work and says how much; the caller holds the clock.
//!
//! The chains of multiply-adds multiply one by one, so that the sum of their
//! accumulators is the number of multiply-adds that really happened: an optimiser
//! that left some out would be seen.

mod plain;

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

use crate::{Isa, Kernels, Team};
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that a thread reads at a time.
const READ_PART: usize = 1 << 20;
/// Steps of one part of a chain, each one multiply-add of every accumulator; few enough
/// that f32 accumulators count exactly.
const STEPS: u32 = 1 << 16;

/// One room's limits. The functions need the room's instruction set.
struct Chains {
    /// The sum of the 64-bit little-endian words of whole words.
    read: unsafe fn(&[u8]) -> u64,
    /// This many steps of exact integer multiply-adds; their count.
    integer: unsafe fn(u32) -> u64,
    /// This many steps of f32 multiply-adds; their count.
    float: unsafe fn(u32) -> u64,
    /// The instructions of the integer chain.
    integer_name: &'static str,
    /// The instructions of the float chain.
    float_name: &'static str,
}

/// Reads all of `bytes` once, with the room's widest loads and with prefetches, the team
/// sharing the work. Returns the sum of its 64-bit words (the last bytes of a part that
/// fill no word are left out), so that no read can be saved.
pub fn read(kernels: Kernels, team: &Team, bytes: &[u8]) -> u64 {
    let chains = chains(kernels.isa());
    let sum = AtomicU64::new(0);
    team.run(bytes.len().div_ceil(READ_PART), &|part| {
        let from = part * READ_PART;
        let end = bytes.len().min(from + READ_PART);
        // SAFETY: `Kernels` exist only for instruction sets that the processor has.
        let part = unsafe { (chains.read)(&bytes[from..end]) };
        sum.fetch_add(part, Ordering::Relaxed);
    });
    sum.into_inner()
}

/// Runs `parts` chains of exact integer multiply-adds, in registers only, the team sharing
/// the work. Returns the number of multiply-adds.
pub fn integer_multiply_adds(kernels: Kernels, team: &Team, parts: usize) -> u64 {
    multiply_adds(chains(kernels.isa()).integer, team, parts)
}

/// As [`integer_multiply_adds`], in single precision: fused where the room has fused ones.
pub fn float_multiply_adds(kernels: Kernels, team: &Team, parts: usize) -> u64 {
    multiply_adds(chains(kernels.isa()).float, team, parts)
}

/// The instructions that [`integer_multiply_adds`] uses.
pub fn integer_instructions(kernels: Kernels) -> &'static str {
    chains(kernels.isa()).integer_name
}

/// The instructions that [`float_multiply_adds`] uses.
pub fn float_instructions(kernels: Kernels) -> &'static str {
    chains(kernels.isa()).float_name
}

fn multiply_adds(chain: unsafe fn(u32) -> u64, team: &Team, parts: usize) -> u64 {
    let count = AtomicU64::new(0);
    team.run(parts, &|_| {
        // SAFETY: the chain is that of a room whose instruction set the processor has.
        let done = unsafe { chain(STEPS) };
        count.fetch_add(done, Ordering::Relaxed);
    });
    count.into_inner()
}

#[cfg(target_arch = "x86_64")]
fn chains(isa: Isa) -> &'static Chains {
    match isa {
        Isa::Avx512 => &x86::AVX512,
        Isa::Avx2 => &x86::AVX2,
        _ => &x86::BASELINE,
    }
}

#[cfg(target_arch = "aarch64")]
fn chains(isa: Isa) -> &'static Chains {
    match isa {
        Isa::NeonDot => &arm::DOTPROD,
        Isa::NeonI8mm => &arm::I8MM,
        // NEON belongs to every AArch64 processor, and the compiler uses it in the scalar room too.
        _ => &arm::NEON,
    }
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn chains(_isa: Isa) -> &'static Chains {
    &plain::PLAIN
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Odd, so that every word differs.
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;

    fn rooms() -> impl Iterator<Item = Kernels> {
        Isa::available().map(|isa| Kernels::with_isa(isa).unwrap())
    }

    #[test]
    fn every_room_reads_every_word_once() {
        let team = Team::new(3).unwrap();
        for len in [0, 7, 8, 255, 256, 1000, READ_PART - 8, 2 * READ_PART + 4096 + 24] {
            let mut bytes = crate::Buffer::zeroed(len).unwrap();
            for (i, word) in bytes.chunks_exact_mut(8).enumerate() {
                word.copy_from_slice(&(i as u64).wrapping_mul(FACTOR).to_le_bytes());
            }
            let words = (len / 8) as u64;
            // 0 + 1 + ... + (words - 1), times the factor.
            let want = (words * words.saturating_sub(1) / 2).wrapping_mul(FACTOR);
            for kernels in rooms() {
                assert_eq!(read(kernels, &team, &bytes), want, "{kernels:?}, {len} bytes");
            }
        }
    }

    #[test]
    fn no_multiply_add_is_left_out() {
        let team = Team::new(2).unwrap();
        for kernels in rooms() {
            for count in [integer_multiply_adds, float_multiply_adds] {
                let one = count(kernels, &team, 1);
                // At least twelve accumulators, each of at least four lanes.
                assert!(one >= u64::from(STEPS) * 12 * 4, "{kernels:?}: {one}");
                assert_eq!(one % u64::from(STEPS), 0, "{kernels:?}");
                assert_eq!(count(kernels, &team, 5), 5 * one, "{kernels:?}");
            }
            assert!(!integer_instructions(kernels).is_empty() && !float_instructions(kernels).is_empty());
        }
    }
}
