//! Drafts that are right as often as wanted, to measure what drafting is worth.

use crate::rng::Rng;

/// A draft source that knows what a greedy answer will be, and errs at a chosen rate.
#[derive(Clone, Debug)]
pub struct Foretold {
    /// Tokens of the sequence before the answer.
    before: usize,
    answer: Vec<u32>,
    acceptance: f64,
    rng: Rng,
}

impl Foretold {
    /// Drafts for the `answer` that follows `before` tokens. Each is right with probability `acceptance`, whatever
    /// the others are.
    pub fn new(before: usize, answer: Vec<u32>, acceptance: f64, seed: u64) -> Self {
        Self { before, answer, acceptance, rng: Rng::new(seed) }
    }

    /// Drafts up to `depth` tokens behind the one at `position`.
    pub(crate) fn draft(&mut self, position: usize, depth: usize, drafts: &mut Vec<u32>) {
        drafts.clear();
        let Some(at) = (position + 1).checked_sub(self.before) else { return };
        let right = self.answer.get(at..).unwrap_or_default();
        for &token in right.iter().take(depth) {
            // The token before is in the vocabulary too; 0 has none and takes the one behind.
            let wrong = token.checked_sub(1).unwrap_or(1);
            drafts.push(if self.rng.next_unit() < self.acceptance { token } else { wrong });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_are_right_as_was_asked_for() {
        let answer: Vec<u32> = (0..1000).collect();
        for acceptance in [0.0, 0.3, 0.8, 1.0] {
            let mut source = Foretold::new(5, answer.clone(), acceptance, 3);
            let (mut right, mut drafts) = (0, Vec::new());
            for position in 5..905 {
                source.draft(position, 4, &mut drafts);
                assert_eq!(drafts.len(), 4);
                let wanted = &answer[position - 4..];
                right += drafts.iter().zip(wanted).filter(|(draft, token)| draft == token).count();
            }
            assert!((right as f64 / 3600.0 - acceptance).abs() < 0.03, "{acceptance}: {right}");
        }
    }

    #[test]
    fn nothing_is_known_behind_the_answer() {
        let mut source = Foretold::new(2, vec![7, 8, 9], 1.0, 1);
        let mut drafts = vec![1];
        source.draft(2, 8, &mut drafts);
        assert_eq!(drafts, [8, 9]);
        source.draft(4, 8, &mut drafts);
        assert!(drafts.is_empty());
        source.draft(0, 8, &mut drafts);
        assert!(drafts.is_empty(), "before the answer nothing is drafted");
    }
}
