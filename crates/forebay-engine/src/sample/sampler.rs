//! The sampler of one request.

use forebay_core::TokenSet;

use super::penalties::{History, changes_logits};
use super::{Logprobs, SampleError, Sampling};
use crate::rng::Rng;

/// The lowest temperature that still divides logits; anything in (0, this] acts as this.
const MIN_TEMPERATURE: f32 = 1e-4;

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
    history: History,
    /// Logits after mask, biases and penalties.
    adjusted: Vec<f32>,
    probabilities: Vec<f32>,
    order: Vec<u32>,
    non_finite: u64,
}

impl Sampler {
    /// A sampler at the start of its random sequence.
    pub fn new(sampling: Sampling) -> Result<Self, SampleError> {
        sampling.check()?;
        let rng = Rng::new(sampling.seed);
        let (history, adjusted) = (History::default(), Vec::new());
        let (probabilities, order) = (Vec::new(), Vec::new());
        Ok(Self { sampling, rng, history, adjusted, probabilities, order, non_finite: 0 })
    }

    /// Bytes of its buffers at most.
    pub(crate) fn planned_bytes(vocab: usize) -> usize {
        // Adjusted logits, probabilities, and their order, in a list that may have grown to twice its length.
        4 * size_of::<f32>() * vocab + History::planned_bytes(vocab)
    }

    /// Takes in what stands before the answer.
    pub fn prompt(&mut self, tokens: impl Iterator<Item = u32>) {
        self.history.prompt(&self.sampling, tokens);
    }

    /// How many logits were dropped so far because they were not finite.
    pub fn non_finite(&self) -> u64 {
        self.non_finite
    }

    /// The next token after a row of logits, one of `allowed` if there is such a set. Takes one random number, unless
    /// temperature is 0. An error takes none, and leaves everything as it was.
    ///
    /// The token belongs to the answer from now on, as far as penalties go.
    pub fn pick(&mut self, logits: &[f32], allowed: Option<&TokenSet>) -> Result<u32, SampleError> {
        let token = if self.sampling.temperature == 0.0 {
            if self.adjust(logits, allowed) { best_left(&self.adjusted)? } else { argmax(logits)? }
        } else {
            self.distribution(logits, allowed)?;
            draw(&self.probabilities, self.rng.next_unit())
        };
        self.non_finite += logits.iter().filter(|l| !l.is_finite()).count() as u64;
        self.history.answer(&self.sampling, token);
        Ok(token)
    }

    /// The log-probabilities that were asked for, of a row of logits and the token chosen from it.
    pub fn logprobs(&self, logits: &[f32], token: u32) -> Option<Logprobs> {
        self.sampling.logprobs.map(|count| Logprobs::of(logits, token, count))
    }

    /// The distribution that [`pick`](Self::pick) draws from, one probability per token.
    pub fn distribution(
        &mut self,
        logits: &[f32],
        allowed: Option<&TokenSet>,
    ) -> Result<&[f32], SampleError> {
        let (logits, top) = if self.adjust(logits, allowed) {
            let top = self.adjusted[best_left(&self.adjusted)? as usize];
            (&self.adjusted[..], top)
        } else {
            (logits, logits[argmax(logits)? as usize])
        };
        let inverse = 1.0 / self.sampling.temperature.max(MIN_TEMPERATURE);
        let least = self.sampling.min_p;
        self.probabilities.clear();
        self.probabilities.extend(logits.iter().map(|&logit| {
            let weight = if logit.is_finite() { libm::expf((logit - top) * inverse) } else { 0.0 };
            // The likeliest token has weight 1.
            if weight < least { 0.0 } else { weight }
        }));
        if self.sampling.top_k > 0 {
            self.keep_likeliest();
        }
        // The largest term is exp(0) = 1, so the sum is at least 1 and finite.
        let sum: f64 = self.probabilities.iter().map(|&p| f64::from(p)).sum();
        let sum = sum as f32;
        self.probabilities.iter_mut().for_each(|p| *p /= sum);
        if self.sampling.top_p < 1.0 {
            self.keep_nucleus();
        }
        Ok(&self.probabilities)
    }

    /// Mask, biases and penalties, into `adjusted`; `false` if there are none. An error is left to the caller: where
    /// no logit was finite it has to say that.
    fn adjust(&mut self, logits: &[f32], allowed: Option<&TokenSet>) -> bool {
        if (allowed.is_none() && !changes_logits(&self.sampling)) || logits.iter().all(|l| !l.is_finite()) {
            return false;
        }
        self.adjusted.clear();
        match allowed {
            Some(allowed) => {
                self.adjusted.resize(logits.len(), f32::NEG_INFINITY);
                for id in allowed.ids().map(|id| id as usize).take_while(|&id| id < logits.len()) {
                    self.adjusted[id] = logits[id];
                }
            }
            None => self.adjusted.extend_from_slice(logits),
        }
        self.history.apply(&self.sampling, &mut self.adjusted);
        true
    }

    /// Keeps the `top_k` likeliest tokens.
    fn keep_likeliest(&mut self) {
        let (weights, keep) = (&mut self.probabilities, self.sampling.top_k);
        self.order.clear();
        self.order.extend((0..weights.len() as u32).filter(|&id| weights[id as usize] > 0.0));
        if keep < self.order.len() {
            self.order.select_nth_unstable_by(keep, |a, b| by_rank(weights, *a, *b));
            self.order[keep..].iter().for_each(|&id| weights[id as usize] = 0.0);
        }
    }

    /// Keeps the most likely tokens until their mass reaches top_p (the crossing one included)
    /// and rescales them.
    fn keep_nucleus(&mut self) {
        let probabilities = &mut self.probabilities;
        let by_rank = |a: &u32, b: &u32| by_rank(probabilities, *a, *b);
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

/// The likelier token first, the lower id first on a tie.
fn by_rank(weights: &[f32], a: u32, b: u32) -> std::cmp::Ordering {
    weights[b as usize].total_cmp(&weights[a as usize]).then(a.cmp(&b))
}

/// The largest of logits some of which were taken away.
fn best_left(adjusted: &[f32]) -> Result<u32, SampleError> {
    argmax(adjusted).map_err(|_| SampleError::NothingLeft)
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
mod tests;
