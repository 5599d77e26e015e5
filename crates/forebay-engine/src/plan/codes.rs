//! What the slots of coded experts should hold: as they are, or decoded (docs/planning.md, "Coded experts").
//!
//! Either way the same bytes come from disk for an expert, and the same bits come out. Coded slots are more, so that
//! less is read; but whatever is multiplied has to be decoded first, every time. Which of the two gains more follows
//! from four rates: of disk, memory and decoder, and of hits by slots.

use forebay_io::Rates;
use forebay_model::SlotCodes;

use super::outlook::Expectation;

/// Bytes per second that a disk is assumed to give as long as it is not measured: a good NVMe disk.
const ASSUMED_DISK: f64 = 3e9;
/// Bytes per second that memory is assumed to give a core as long as it is not measured.
const ASSUMED_MEMORY_PER_CORE: f64 = 8e9;
/// Bytes per second of decoded panels that one core is assumed to give with AVX-512 VBMI.
const ASSUMED_FAST: f64 = 4.5e9;
/// The same of a core without.
const ASSUMED_PLAIN: f64 = 0.25e9;

/// How fast a machine decodes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decoder {
    /// Bytes of decoded panels per second and core.
    pub per_core: f64,
    /// Cores that decode.
    pub cores: usize,
}

impl Decoder {
    /// As measured, or as is usual for processors that decode in registers (`fast`) and for others.
    pub fn new(measured: Option<f64>, fast: bool, cores: usize) -> Self {
        let assumed = if fast { ASSUMED_FAST } else { ASSUMED_PLAIN };
        Self { per_core: measured.filter(|rate| *rate > 0.0).unwrap_or(assumed), cores: cores.max(1) }
    }

    /// Seconds that all cores take for `bytes` of decoded panels.
    pub fn seconds(&self, bytes: f64) -> f64 {
        bytes / (self.per_core * self.cores as f64)
    }

    /// The rates to choose by: what was measured, and what is usual where nothing was.
    pub(super) fn complete(&self, rates: &Rates) -> Rates {
        Rates {
            disk: rates.disk.or(Some(ASSUMED_DISK)),
            memory: rates.memory.or(Some(ASSUMED_MEMORY_PER_CORE * self.cores as f64)),
            ..*rates
        }
    }
}

/// What the slots of a plan hold, and why.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlotChoice {
    /// What they hold.
    pub slots: SlotCodes,
    /// Whether the caller asked for it.
    pub asked: bool,
    /// Most tokens per second that way, at the rates chosen by.
    pub tokens_per_second: Option<f64>,
    /// The same the other way; `None` if the model does not fit that way, or nobody asked.
    pub other: Option<f64>,
    /// What was chosen by: the disk's, the memory's and the decoder's rate.
    pub rates: Rates,
    /// Decoding.
    pub decoder: Decoder,
    /// Whether a rate among them is not measured.
    pub assumed: bool,
}

impl SlotChoice {
    /// The choice between two expectations at the same rates, the first of which is for coded slots. Where both are
    /// as fast, coded ones are taken: they leave memory to others. `None` if neither is possible.
    pub(super) fn between(coded: Option<&Expectation>, decoded: Option<&Expectation>) -> Option<SlotCodes> {
        let speed = |of: &Expectation| of.tokens_per_second.unwrap_or(0.0);
        match (coded, decoded) {
            (None, None) => None,
            (Some(_), None) => Some(SlotCodes::Coded),
            (None, Some(_)) => Some(SlotCodes::Decoded),
            (Some(coded), Some(decoded)) if speed(decoded) > speed(coded) => Some(SlotCodes::Decoded),
            _ => Some(SlotCodes::Coded),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_measured_wins_over_what_is_usual() {
        let decoder = Decoder::new(Some(2e9), true, 4);
        assert_eq!(decoder.seconds(8e9), 1.0);
        assert_eq!(Decoder::new(None, true, 0), Decoder { per_core: 4.5e9, cores: 1 });
        assert_eq!(Decoder::new(Some(0.0), false, 1).per_core, 0.25e9);
        let rates = decoder.complete(&Rates { disk: Some(1e9), ..Rates::default() });
        assert_eq!((rates.disk, rates.memory), (Some(1e9), Some(32e9)));
    }
}
