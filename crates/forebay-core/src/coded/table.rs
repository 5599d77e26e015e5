//! Frequencies of the sixteen codes: how they are chosen, and what a decoder looks up.

use super::FREQUENCY_BITS;

/// Codes of four bits.
pub(super) const CODES: usize = 16;
/// What frequencies add up to.
pub(super) const TOTAL: usize = 1 << FREQUENCY_BITS;

/// The frequencies that code these counts in the fewest bytes: a code that occurs has at least 1, one that does not
/// has 0. Given one after another to the code that gains most from it, which is best because every further one
/// gains less.
pub(super) fn fit(counts: &[u64; CODES]) -> [u8; CODES] {
    let mut frequencies = counts.map(|count| u8::from(count > 0));
    if counts.iter().all(|count| *count == 0) {
        frequencies[0] = 1;
    }
    let given: usize = frequencies.iter().map(|f| usize::from(*f)).sum();
    for _ in given..TOTAL {
        let gain = |code: usize| counts[code] as f64 * log_of_step(frequencies[code]);
        let best = (0..CODES)
            .filter(|code| frequencies[*code] > 0)
            .max_by(|a, b| gain(*a).total_cmp(&gain(*b)))
            .unwrap_or(0);
        frequencies[best] += 1;
    }
    frequencies
}

/// `ln((f + 1) / f)`, by a series of its own: the same bits on every machine, so that a matrix is coded to the
/// same bytes everywhere.
fn log_of_step(f: u8) -> f64 {
    let y = 1.0 / (2.0 * f64::from(f) + 1.0);
    let (mut power, mut sum) = (y, 0.0);
    for odd in (1..40).step_by(2) {
        sum += power / f64::from(odd);
        power *= y * y;
    }
    2.0 * sum
}

/// What the lowest seven bits of a state stand for, looked up by their value.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
pub struct Slots {
    /// The code.
    pub code: [u8; TOTAL],
    /// Its frequency.
    pub frequency: [u8; TOTAL],
    /// The slot's number among those of its code, from 0 on.
    pub rank: [u8; TOTAL],
}

impl Slots {
    /// The slots of frequencies that add up to 128: those of code 0 first. What they have too few stays zero, what
    /// they have too many is left out.
    pub(super) fn new(frequencies: &[u8; CODES]) -> Self {
        let mut slots = Self { code: [0; TOTAL], frequency: [0; TOTAL], rank: [0; TOTAL] };
        let mut first = 0;
        for (code, frequency) in (0..).zip(frequencies) {
            let end = TOTAL.min(first + usize::from(*frequency));
            slots.code[first..end].fill(code);
            slots.frequency[first..end].fill(*frequency);
            for (rank, out) in (0..).zip(&mut slots.rank[first..end]) {
                *out = rank;
            }
            first = end;
        }
        slots
    }
}

/// What an encoder needs of one code.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Step {
    /// The code's frequency.
    pub frequency: u32,
    /// Its first slot.
    pub first: u32,
    /// A state that is not below this one puts down a byte first.
    pub most: u32,
    /// `2^32 / frequency`, rounded up: exact for the states that are divided.
    pub reciprocal: u64,
}

/// The steps of all codes.
pub(super) fn steps(frequencies: &[u8; CODES]) -> [Step; CODES] {
    let mut first = 0;
    frequencies.map(|f| {
        let frequency = u32::from(f);
        let reciprocal = (1u64 << 32).div_ceil(u64::from(frequency.max(1)));
        let step = Step { frequency, first, most: frequency << 9, reciprocal };
        first += frequency;
        step
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bits(counts: &[u64; CODES], frequencies: &[u8; CODES]) -> f64 {
        let pairs = counts.iter().zip(frequencies).filter(|(count, _)| **count > 0);
        pairs.map(|(count, f)| *count as f64 * (128.0 / f64::from(*f)).log2()).sum()
    }

    #[test]
    fn few_codes() {
        let mut counts = [0; CODES];
        assert_eq!(fit(&counts)[0], 128);
        counts[9] = 5;
        assert_eq!(fit(&counts)[9], 128);
        counts[3] = 15;
        assert_eq!((fit(&counts)[3], fit(&counts)[9]), (96, 32));
    }

    #[test]
    fn logarithms_are_right() {
        for f in 1..=128u8 {
            let wanted = ((f64::from(f) + 1.0) / f64::from(f)).ln();
            assert!((log_of_step(f) - wanted).abs() < 1e-15, "{f}");
        }
    }

    #[test]
    fn division_by_reciprocal_is_exact() {
        for frequency in 1..=128u8 {
            let mut one = [0; CODES];
            one[0] = frequency;
            let step = steps(&one)[0];
            for x in (0..1u64 << 16).step_by(7).chain((1 << 16) - 300..1 << 16) {
                assert_eq!((x * step.reciprocal) >> 32, x / u64::from(frequency));
            }
        }
    }

    proptest! {
        /// No single move of one slot from one code to another makes it smaller: for such sums that is the optimum.
        #[test]
        fn no_exchange_is_better(counts in prop::array::uniform16(prop_oneof![Just(0u64), 1..100_000u64])) {
            let best = fit(&counts);
            prop_assert_eq!(best.iter().map(|f| usize::from(*f)).sum::<usize>(), TOTAL);
            for code in 0..CODES {
                prop_assert_eq!(best[code] > 0, counts[code] > 0 || counts.iter().all(|c| *c == 0) && code == 0);
            }
            for from in 0..CODES {
                for to in 0..CODES {
                    if from != to && best[from] > 1 && best[to] > 0 {
                        let mut other = best;
                        other[from] -= 1;
                        other[to] += 1;
                        prop_assert!(bits(&counts, &other) >= bits(&counts, &best) - 1e-6);
                    }
                }
            }
        }
    }
}
