//! What the KV cache probably holds, as far as one can tell beside the engine's thread: a forecast counts on it before a
//! job's turn comes.

use std::collections::VecDeque;

/// Most sequences that are remembered.
const MOST: usize = 256;

/// The tokens of sequences that ended, the last one first.
#[derive(Debug)]
pub(super) struct Seen {
    sequences: VecDeque<Vec<u32>>,
    tokens: usize,
    most_tokens: usize,
}

impl Seen {
    /// Of a cache of so many positions.
    pub fn new(most_tokens: usize) -> Self {
        Self { sequences: VecDeque::new(), tokens: 0, most_tokens }
    }

    /// A sequence ended with these tokens in the cache. What is oldest leaves, as it does from the cache.
    pub fn add(&mut self, tokens: &[u32]) {
        // What goes on from another one holds all of it.
        self.sequences.retain(|earlier| !tokens.starts_with(earlier));
        if !self.sequences.iter().any(|other| other.starts_with(tokens)) {
            self.sequences.push_front(tokens.to_vec());
        }
        self.tokens = self.sequences.iter().map(Vec::len).sum();
        while self.tokens > self.most_tokens || self.sequences.len() > MOST {
            self.tokens -= self.sequences.pop_back().map_or(self.tokens, |oldest| oldest.len());
        }
    }

    /// How many tokens of a prompt need not be computed: never all of them, as the last one brings the logits.
    pub fn known(&self, prompt: &[u32]) -> usize {
        let common = |other: &Vec<u32>| other.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let longest = self.sequences.iter().map(common).max().unwrap_or(0);
        longest.min(prompt.len().saturating_sub(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_common_beginning_is_known_but_for_the_last_token() {
        let mut seen = Seen::new(100);
        assert_eq!(seen.known(&[1, 2, 3]), 0);
        seen.add(&[1, 2, 3, 4]);
        seen.add(&[1, 2, 9]);
        assert_eq!(seen.known(&[1, 2, 3, 4]), 3);
        assert_eq!(seen.known(&[1, 2, 3, 4, 5]), 4);
        assert_eq!(seen.known(&[1, 2, 9, 9, 9]), 3);
        assert_eq!(seen.known(&[2, 1]), 0);
        assert_eq!(seen.known(&[]), 0);
    }

    #[test]
    fn a_sequence_that_goes_on_from_another_one_takes_its_place() {
        let mut seen = Seen::new(8);
        seen.add(&[1, 2, 3]);
        seen.add(&[1, 2, 3, 4, 5]);
        seen.add(&[1, 2]);
        assert_eq!((seen.sequences.len(), seen.tokens), (1, 5));
    }

    #[test]
    fn the_oldest_leave_first() {
        let mut seen = Seen::new(6);
        seen.add(&[1, 1, 1]);
        seen.add(&[2, 2, 2]);
        seen.add(&[3]);
        assert_eq!([1, 2, 3].map(|first| seen.known(&[first; 4])), [0, 3, 1]);
        seen.add(&[4; 7]);
        assert_eq!((seen.known(&[4; 7]), seen.tokens), (0, 0), "more than the cache holds");
    }
}
