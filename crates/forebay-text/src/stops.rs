//! The stop set: which tokens end a turn.
//!
//! Armed in this order, without duplicates and without a cap: `eos_token_id` of config.json, then of
//! generation_config.json, then the added token `<|endoftext|>`, then every control token by id. Added tokens
//! that are content (`<think>`, `<tool_call>`) never stop.

use crate::Tokenizer;
use std::collections::HashSet;

/// The end-of-text token, armed even where the file forgets to mark it as control.
const END_OF_TEXT: &str = "<|endoftext|>";

/// The tokens that end a turn.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopSet {
    /// In the order they were armed.
    ordered: Vec<u32>,
    /// The same ids, for look-up.
    known: HashSet<u32>,
}

impl StopSet {
    /// The set for these ids (config.json's, then generation_config.json's) and this tokenizer.
    pub fn new(configured: impl IntoIterator<Item = u32>, tokenizer: &Tokenizer) -> Self {
        let end_of_text = tokenizer.added_id(END_OF_TEXT);
        let all = configured.into_iter().chain(end_of_text).chain(tokenizer.special_ids());
        all.collect()
    }

    /// Whether this token ends the turn.
    pub fn contains(&self, id: u32) -> bool {
        self.known.contains(&id)
    }

    /// The ids in the order they were armed; the first is the model's end-of-text token.
    pub fn ids(&self) -> &[u32] {
        &self.ordered
    }
}

impl FromIterator<u32> for StopSet {
    /// A set of exactly these ids, first occurrence first. The empty set stops nothing (token-id validation).
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::default();
        for id in ids {
            if set.known.insert(id) {
                set.ordered.push(id);
            }
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_eight_are_kept_in_order() {
        let set: StopSet = (0..100).rev().chain(50..60).collect();
        assert_eq!(set.ids(), (0..100).rev().collect::<Vec<_>>());
        assert!((0..100).all(|id| set.contains(id)));
        assert!(!set.contains(100));
        assert!(!StopSet::default().contains(0));
    }

    /// Descending ids are the worst case of a sorted list: a million insertions at its front.
    #[test]
    fn a_million_ids_are_not_quadratic() {
        let set: StopSet = (0..1_000_000).rev().collect();
        assert_eq!(set.ids().len(), 1_000_000);
        assert!(set.contains(0) && set.contains(999_999));
    }
}
