//! What tokens that were there before, and the caller's wishes, do to logits.

use std::collections::HashMap;

use super::{MAX_BIAS, Sampling};

/// Where a token was seen.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// In the prompt, or in what stood before it.
    before: bool,
    /// So many times in the answer.
    answered: u32,
}

/// The tokens of a request so far, as far as penalties want to know.
#[derive(Clone, Debug, Default)]
pub(super) struct History(HashMap<u32, Seen>);

impl History {
    /// Bytes held at most: every token of the vocabulary was seen.
    pub(super) fn planned_bytes(vocab: usize) -> usize {
        // A table has a power of two places, of which an eighth stays empty, and a byte beside each.
        (vocab * 8).div_ceil(7).next_power_of_two() * (size_of::<(u32, Seen)>() + 1)
    }

    /// Bytes held.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        (self.0.capacity() * 8 / 7).next_power_of_two() * (size_of::<(u32, Seen)>() + 1)
    }

    /// Takes in tokens of the prompt.
    pub(super) fn prompt(&mut self, sampling: &Sampling, tokens: impl Iterator<Item = u32>) {
        if sampling.repetition_penalty != 1.0 {
            tokens.for_each(|token| self.0.entry(token).or_default().before = true);
        }
    }

    /// Takes in a token of the answer.
    pub(super) fn answer(&mut self, sampling: &Sampling, token: u32) {
        if penalises(sampling) {
            self.0.entry(token).or_default().answered += 1;
        }
    }

    /// Applies biases, then penalties, to `logits`. What is not finite stays as it is.
    pub(super) fn apply(&self, sampling: &Sampling, logits: &mut [f32]) {
        for &(token, bias) in &sampling.logit_bias {
            if let Some(logit) = logits.get_mut(token as usize).filter(|logit| logit.is_finite()) {
                *logit = if bias == -MAX_BIAS { f32::NEG_INFINITY } else { finite(*logit + bias) };
            }
        }
        if !penalises(sampling) {
            return;
        }
        for (&token, seen) in &self.0 {
            if let Some(logit) = logits.get_mut(token as usize).filter(|logit| logit.is_finite()) {
                *logit = finite(penalised(sampling, *seen, *logit));
            }
        }
    }
}

/// Whether logits have to be changed at all.
pub(super) fn changes_logits(sampling: &Sampling) -> bool {
    !sampling.logit_bias.is_empty() || penalises(sampling)
}

fn penalises(sampling: &Sampling) -> bool {
    sampling.repetition_penalty != 1.0
        || sampling.presence_penalty != 0.0
        || sampling.frequency_penalty != 0.0
}

fn penalised(sampling: &Sampling, seen: Seen, logit: f32) -> f32 {
    let repetition = sampling.repetition_penalty;
    let repeated = if logit > 0.0 { logit / repetition } else { logit * repetition };
    if seen.answered == 0 {
        return repeated;
    }
    repeated - sampling.frequency_penalty * seen.answered as f32 - sampling.presence_penalty
}

/// The same, or the nearest finite number: a penalty never makes a logit disappear.
fn finite(value: f32) -> f32 {
    value.clamp(f32::MIN, f32::MAX)
}
