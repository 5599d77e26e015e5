//! What a grammar says about the next token, in words that the decoder understands.
//!
//! The decoder works on token ids and knows no text; a grammar works on text and knows no logits. They meet here:
//! before a token is chosen the decoder asks which ones are allowed, and afterwards it tells which one it was.

use std::fmt;

/// A set of token ids.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct TokenSet {
    /// Bit `id % 32` of word `id / 32`; ids behind the last word are not in the set.
    words: Vec<u32>,
}

impl TokenSet {
    /// The empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes this the set with these words: bit `id % 32` of word `id / 32`.
    pub fn set_words(&mut self, words: &[u32]) {
        self.words.clear();
        self.words.extend_from_slice(words);
    }

    /// Whether `id` is in the set.
    pub fn contains(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Puts `id` into the set.
    pub fn insert(&mut self, id: u32) {
        let at = id as usize / 32;
        if at >= self.words.len() {
            self.words.resize(at + 1, 0);
        }
        self.words[at] |= 1 << (id % 32);
    }

    /// Takes `id` out of the set.
    pub fn remove(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }

    /// Number of ids in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether nothing is in the set.
    pub fn is_empty(&self) -> bool {
        self.words.iter().all(|word| *word == 0)
    }

    /// The ids in the set, ascending.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        let bits = |(at, word): (usize, &u32)| {
            let (at, word) = (at as u32 * 32, *word);
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at + bit)
        };
        self.words.iter().enumerate().flat_map(bits)
    }
}

impl FromIterator<u32> for TokenSet {
    fn from_iter<I: IntoIterator<Item = u32>>(ids: I) -> Self {
        let mut set = Self::new();
        ids.into_iter().for_each(|id| set.insert(id));
        set
    }
}

impl fmt::Debug for TokenSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.ids()).finish()
    }
}

/// Whether an answer may end where it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It is not complete.
    No,
    /// It is complete, and could also go on.
    May,
    /// It is complete, and nothing can follow.
    Must,
}

/// A hard limit on what an answer may be: one a request, at the state behind the tokens that it was told of.
///
/// All answers depend on the accepted tokens alone: asking never changes what is allowed.
pub trait Constraint {
    /// Whether the answer may end here. Stop tokens are the decoder's: they are allowed if it may.
    fn ending(&mut self) -> Result<Ending, ConstraintError>;

    /// Replaces `set` by the tokens that may come next; `false` if all may. Not asked where the answer must end.
    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError>;

    /// Moves on behind `token`.
    fn accept(&mut self, token: u32) -> Result<(), ConstraintError>;

    /// Replaces `tokens` by those that are certain to come next, as far as that is known.
    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError>;

    /// How many of `tokens`, from the first one on, may come next one after the other.
    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError>;
}

/// One that is lent.
impl<C: Constraint + ?Sized> Constraint for &mut C {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        (**self).ending()
    }

    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError> {
        (**self).allowed(set)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        (**self).accept(token)
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        (**self).forced(tokens)
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        (**self).agrees(tokens)
    }
}

/// Why a constraint cannot say what comes next.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConstraintError {
    /// A limit on time or memory was reached.
    #[error("the grammar took too much work at this place and was given up: {reason}; make it simpler")]
    TooComplex {
        /// What its engine said.
        reason: String,
    },
    /// A token was accepted that is not allowed.
    #[error("token {token} is not allowed by the grammar at this place: {reason}")]
    NotAllowed {
        /// The token.
        token: u32,
        /// What its engine said.
        reason: String,
    },
    /// No token of the vocabulary continues the answer.
    #[error(
        "the grammar leads nowhere: no token of this model can continue the answer, and it is not complete"
    )]
    DeadEnd,
    /// What decides it failed.
    #[error("the grammar's engine failed: {reason}; please report this as a bug")]
    Broken {
        /// What it said.
        reason: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_set_holds_what_was_put_in() {
        let mut set: TokenSet = [0, 31, 32, 1000].into_iter().collect();
        assert!([0, 31, 32, 1000].into_iter().all(|id| set.contains(id)));
        assert!(![1, 30, 33, 999, 1001, u32::MAX].into_iter().any(|id| set.contains(id)));
        assert_eq!((set.len(), set.is_empty()), (4, false));
        set.remove(31);
        set.remove(u32::MAX);
        assert_eq!(set.ids().collect::<Vec<_>>(), [0, 32, 1000]);
        assert_eq!(format!("{set:?}"), "{0, 32, 1000}");
        set.set_words(&[0b101, 1]);
        assert_eq!(set.ids().collect::<Vec<_>>(), [0, 2, 32]);
        set.set_words(&[0]);
        assert!(set.is_empty());
    }
}
