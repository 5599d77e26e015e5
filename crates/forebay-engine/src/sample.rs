//! From logits to a token: greedy, temperature and nucleus (decode spec section 1).
//!
//! Order of operations: non-finite logits are dropped, temperature, softmax,
//! top-p, draw. Ties go to the lower token id everywhere.

use crate::rng::Rng;

/// The lowest temperature that still divides logits; anything in (0, this] acts as this.
const MIN_TEMPERATURE: f32 = 1e-4;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy; up to 2.
    pub temperature: f32,
    /// Smallest probability mass kept, in (0, 1]; 1 keeps everything.
    pub top_p: f32,
    /// Seed of the request's generator.
    pub seed: u64,
}

impl Default for Sampling {
    /// The defaults of decode spec section 1.3: temperature 0.7, top-p 0.9, seed 0.
    fn default() -> Self {
        Self { temperature: 0.7, top_p: 0.9, seed: 0 }
    }
}

impl Sampling {
    /// Always the most likely token.
    pub fn greedy() -> Self {
        Self { temperature: 0.0, top_p: 1.0, seed: 0 }
    }

    /// An error unless every value is in its range.
    pub fn check(&self) -> Result<(), SampleError> {
        if !(0.0..=2.0).contains(&self.temperature) {
            return Err(SampleError::Temperature { found: self.temperature });
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(SampleError::TopP { found: self.top_p });
        }
        Ok(())
    }
}

/// Why no token could be chosen.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// Temperature out of range or not a number.
    #[error("temperature is {found}; use a number from 0 (greedy) to 2")]
    Temperature {
        /// The value given.
        found: f32,
    },
    /// top_p out of range or not a number.
    #[error("top_p is {found}; use a number above 0 and up to 1 (1 keeps every token)")]
    TopP {
        /// The value given.
        found: f32,
    },
    /// Every logit is NaN or infinite.
    #[error(
        "none of the {vocab} logits is a finite number, so no token can be chosen; the weights may be damaged"
    )]
    NoFiniteLogit {
        /// Number of logits.
        vocab: usize,
    },
}

/// The largest finite logit's index; the first one on a tie.
pub fn argmax(logits: &[f32]) -> Result<u32, SampleError> {
    let mut best: Option<(usize, f32)> = None;
    for (id, &logit) in logits.iter().enumerate() {
        if logit.is_finite() && best.is_none_or(|(_, top)| logit > top) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id as u32).ok_or(SampleError::NoFiniteLogit { vocab: logits.len() })
}

/// Chooses tokens for one request, with its own generator and reused buffers.
#[derive(Clone, Debug)]
pub struct Sampler {
    sampling: Sampling,
    rng: Rng,
    probabilities: Vec<f32>,
    order: Vec<u32>,
    non_finite: u64,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    pub fn new(sampling: Sampling) -> Result<Self, SampleError> {
        sampling.check()?;
        let rng = Rng::new(sampling.seed);
        Ok(Self { sampling, rng, probabilities: Vec::new(), order: Vec::new(), non_finite: 0 })
    }

    /// How many logits were dropped so far because they were not finite.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// The next token after a row of logits.
    pub fn pick(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        self.non_finite += logits.iter().filter(|l| !l.is_finite()).count() as u64;
        if self.sampling.temperature == 0.0 {
            return argmax(logits);
        }
        self.distribution(logits)?;
        let u = self.rng.next_unit();
        Ok(draw(&self.probabilities, u))
    }

    /// The distribution that [`pick`](Self::pick) draws from, one probability per token.
    pub fn distribution(&mut self, logits: &[f32]) -> Result<&[f32], SampleError> {
        let top = logits[argmax(logits)? as usize];
        let inverse = 1.0 / self.sampling.temperature.max(MIN_TEMPERATURE);
        self.probabilities.clear();
        self.probabilities.extend(
            logits.iter().map(|&l| if l.is_finite() { libm::expf((l - top) * inverse) } else { 0.0 }),
        );
        // The largest term is exp(0) = 1, so the sum is at least 1 and finite.
        let sum: f64 = self.probabilities.iter().map(|&p| f64::from(p)).sum();
        let sum = sum as f32;
        self.probabilities.iter_mut().for_each(|p| *p /= sum);
        if self.sampling.top_p < 1.0 {
            self.keep_nucleus();
        }
        Ok(&self.probabilities)
    }

    /// Keeps the most likely tokens until their mass reaches top_p (the crossing one included)
    /// and rescales them.
    fn keep_nucleus(&mut self) {
        let probabilities = &mut self.probabilities;
        let by_rank = |a: &u32, b: &u32| {
            probabilities[*b as usize].total_cmp(&probabilities[*a as usize]).then(a.cmp(b))
        };
        self.order.clear();
        self.order.extend((0..probabilities.len() as u32).filter(|&id| probabilities[id as usize] > 0.0));
        let target = f64::from(self.sampling.top_p);
        let (mut kept, mut mass, mut sorted) = (0, 0f64, 0);
        while kept < self.order.len() {
            if kept == sorted {
                // The nucleus is usually small: sort ever larger prefixes instead of the vocabulary.
                let upto = (sorted * 4).max(64).min(self.order.len());
                if upto < self.order.len() {
                    self.order[sorted..].select_nth_unstable_by(upto - sorted - 1, by_rank);
                }
                self.order[sorted..upto].sort_unstable_by(by_rank);
                sorted = upto;
            }
            mass += f64::from(probabilities[self.order[kept] as usize]);
            kept += 1;
            if mass >= target {
                break;
            }
        }
        for &id in &self.order[kept..] {
            probabilities[id as usize] = 0.0;
        }
        let mass = mass as f32;
        for &id in &self.order[..kept] {
            probabilities[id as usize] /= mass;
        }
    }
}

/// The first token whose cumulative probability exceeds `u`; the last possible one if rounding leaves none.
fn draw(probabilities: &[f32], u: f64) -> u32 {
    let mut sum = 0f64;
    let mut last = 0;
    for (id, &p) in probabilities.iter().enumerate() {
        if p > 0.0 {
            sum += f64::from(p);
            last = id as u32;
            if sum > u {
                break;
            }
        }
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sampler(temperature: f32, top_p: f32, seed: u64) -> Sampler {
        Sampler::new(Sampling { temperature, top_p, seed }).unwrap()
    }

    fn close(found: &[f32], want: &[f32]) {
        assert_eq!(found.len(), want.len());
        for (a, b) in found.iter().zip(want) {
            assert!((a - b).abs() < 2e-7, "{found:?} against {want:?}");
        }
    }

    #[test]
    fn d01_nucleus() {
        let logits = [2.0, 1.0, 0.0, -1.0];
        let cases: [(f32, f32, [f32; 4]); 6] = [
            (1.0, 1.0, [0.6439143, 0.2368828, 0.0871443, 0.0320586]),
            (1.0, 0.9, [0.6652409, 0.2447285, 0.0900306, 0.0]),
            (1.0, 0.5, [1.0, 0.0, 0.0, 0.0]),
            (0.5, 0.9, [0.880_797, 0.1192029, 0.0, 0.0]),
            (2.0, 0.9, [0.4550542, 0.2760043, 0.1674051, 0.1015363]),
            (1e-9, 1.0, [1.0, 0.0, 0.0, 0.0]),
        ];
        for (temperature, top_p, want) in cases {
            close(sampler(temperature, top_p, 0).distribution(&logits).unwrap(), &want);
        }
    }

    #[test]
    fn d02_ties_by_ascending_id() {
        let kept = |n: usize, p: f32| -> Vec<usize> {
            let logits = vec![0.5; n];
            let mut s = sampler(1.0, p, 0);
            let d = s.distribution(&logits).unwrap();
            (0..n).filter(|&i| d[i] > 0.0).collect()
        };
        assert_eq!(kept(4, 0.5), [0, 1]);
        assert_eq!(kept(6, 0.5), [0, 1, 2]);
        assert_eq!(kept(4, 0.9), [0, 1, 2, 3]);
    }

    #[test]
    fn d03_non_finite() {
        let logits = [1.0, f32::NAN, 3.0, f32::INFINITY, 2.0];
        assert_eq!(argmax(&logits), Ok(2));
        let mut s = sampler(1.0, 1.0, 0);
        close(s.distribution(&logits).unwrap(), &[0.0900306, 0.0, 0.6652409, 0.0, 0.2447285]);
        s.pick(&logits).unwrap();
        assert_eq!(s.non_finite(), 2);
        let none = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
        assert_eq!(argmax(&none), Err(SampleError::NoFiniteLogit { vocab: 3 }));
        assert!(sampler(1.0, 0.9, 0).pick(&none).is_err());
        assert_eq!(argmax(&[3.0, 1.0, 3.0]), Ok(0));
    }

    #[test]
    fn d04_draws_of_seed_one() {
        let mut s = sampler(1.0, 0.9, 1);
        let logits = [2.0, 1.0, 0.0, -1.0];
        let draws: Vec<u32> = (0..8).map(|_| s.pick(&logits).unwrap()).collect();
        assert_eq!(draws, [1, 0, 1, 1, 0, 0, 0, 0]);
    }

    /// Low temperatures leave one possible token, and small vocabularies fewer than a sorting block.
    #[test]
    fn a_peaked_or_tiny_distribution_has_a_nucleus() {
        let logits: Vec<f32> = (0..300).map(|i| if i == 77 { 9.0 } else { (i % 7) as f32 }).collect();
        for temperature in [1e-45, 1e-4, 0.01, 0.1, 0.15, 0.3, 1.0, 2.0] {
            for top_p in [1e-6, 0.5, 0.9, 0.999] {
                let mut s = sampler(temperature, top_p, 5);
                let picked = s.pick(&logits).unwrap() as usize;
                assert!(s.distribution(&logits).unwrap()[picked] > 0.0);
                if temperature <= 0.15 {
                    assert_eq!(picked, 77, "temperature {temperature}, top-p {top_p}");
                }
                assert_eq!(sampler(temperature, top_p, 5).pick(&[1.0]), Ok(0));
            }
        }
    }

    #[test]
    fn zero_draw_never_picks_an_impossible_token() {
        assert_eq!(draw(&[0.0, 0.0, 1.0], 0.0), 2);
        assert_eq!(draw(&[0.5, 0.499_999, 0.0], 0.999_999_9), 1);
    }

    #[test]
    fn ranges_are_checked() {
        for bad in [-0.1, 2.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(
                Sampler::new(Sampling { temperature: bad, ..Sampling::default() }),
                Err(SampleError::Temperature { .. })
            ));
        }
        for bad in [0.0, -1.0, 1.1, f32::NAN] {
            assert!(matches!(
                Sampler::new(Sampling { top_p: bad, ..Sampling::default() }),
                Err(SampleError::TopP { .. })
            ));
        }
    }

    proptest! {
        /// The partial sort keeps exactly what a full sort keeps.
        #[test]
        fn nucleus_equals_the_plain_definition(
            logits in proptest::collection::vec(-8i32..8, 1..400),
            top_p in 0.05f32..0.999,
        ) {
            let logits: Vec<f32> = logits.iter().map(|&l| l as f32 / 2.0).collect();
            let full = sampler(1.0, 1.0, 0).distribution(&logits).unwrap().to_vec();
            let mut order: Vec<usize> = (0..full.len()).collect();
            order.sort_by(|a, b| full[*b].total_cmp(&full[*a]).then(a.cmp(b)));
            let mut mass = 0f64;
            let mut want = std::collections::BTreeSet::new();
            for id in order {
                want.insert(id);
                mass += f64::from(full[id]);
                if mass >= f64::from(top_p) {
                    break;
                }
            }
            let mut s = sampler(1.0, top_p, 0);
            let got = s.distribution(&logits).unwrap();
            let kept: std::collections::BTreeSet<usize> = (0..got.len()).filter(|&i| got[i] > 0.0).collect();
            prop_assert_eq!(kept, want);
            prop_assert!((got.iter().map(|p| f64::from(*p)).sum::<f64>() - 1.0).abs() < 1e-4);
        }
    }
}
