//! Which instruction sets there are, and which of them this machine has.

use std::fmt;
use std::str::FromStr;

/// One room of kernels. Every room computes the same bits; they differ in speed only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// No SIMD: the readable truth that the others are compared with.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL and VNNI (and all of [`Isa::Avx2`]).
    Avx512,
    /// AArch64 with NEON.
    Neon,
    /// AArch64 with NEON and the dot-product extension.
    NeonDot,
    /// AArch64 with NEON, the dot-product extension and the int8 matrix extension.
    NeonI8mm,
}

/// An instruction set that this machine does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this processor has no {isa}; choose one of: {}", available_names())]
pub struct IsaUnavailable {
    /// What was asked for.
    pub isa: Isa,
}

/// A name that is not an instruction set.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not an instruction set; use scalar, avx2, avx512, neon, neon-dotprod or neon-i8mm")]
pub struct ParseIsaError {
    /// What was given.
    pub text: String,
}

impl Isa {
    /// All instruction sets, slowest first.
    pub const ALL: [Isa; 6] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon, Isa::NeonDot, Isa::NeonI8mm];

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => has_avx2(),
            Isa::Avx512 => has_avx512(),
            Isa::Neon => has_neon(),
            Isa::NeonDot => has_dotprod(),
            Isa::NeonI8mm => has_i8mm(),
        }
    }

    /// The instruction sets of this machine, slowest first; never empty.
    pub fn available() -> impl Iterator<Item = Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available())
    }

    /// The name used in settings and reports.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
            Isa::NeonDot => "neon-dotprod",
            Isa::NeonI8mm => "neon-i8mm",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = ParseIsaError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|isa| isa.name() == text)
            .ok_or_else(|| ParseIsaError { text: text.to_owned() })
    }
}

fn available_names() -> String {
    Isa::available().map(Isa::name).collect::<Vec<_>>().join(", ")
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx2() -> bool {
    false
}

/// VNNI is asked for by name: processors exist that have AVX-512 F, BW and VL without it.
#[cfg(target_arch = "x86_64")]
fn has_avx512() -> bool {
    has_avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
}

/// What decoding coded weights in registers needs beyond AVX-512 as asked for above: not a room of its own, because
/// products need none of it.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_vbmi() -> bool {
    is_x86_feature_detected!("avx512vbmi")
        && is_x86_feature_detected!("avx512vbmi2")
        && is_x86_feature_detected!("popcnt")
}

#[cfg(not(target_arch = "x86_64"))]
fn has_avx512() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_neon() -> bool {
    std::arch::is_aarch64_feature_detected!("neon")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_neon() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_dotprod() -> bool {
    has_neon() && std::arch::is_aarch64_feature_detected!("dotprod")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_dotprod() -> bool {
    false
}

#[cfg(target_arch = "aarch64")]
fn has_i8mm() -> bool {
    has_dotprod() && std::arch::is_aarch64_feature_detected!("i8mm")
}

#[cfg(not(target_arch = "aarch64"))]
fn has_i8mm() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().is_err());
    }

    #[test]
    fn scalar_is_always_there_and_foreign_sets_never() {
        assert_eq!(Isa::available().next(), Some(Isa::Scalar));
        let foreign = if cfg!(target_arch = "aarch64") { Isa::Avx2 } else { Isa::NeonI8mm };
        assert!(!foreign.is_available());
        assert!(IsaUnavailable { isa: foreign }.to_string().contains("scalar"));
    }
}
