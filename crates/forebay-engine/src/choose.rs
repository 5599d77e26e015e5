//! The choice of a request's tokens, one behind every row of logits: sampling, a constraint if there is one, and the
//! tokens that end the answer.

use std::borrow::Cow;

use forebay_core::{Constraint, Ending, TokenSet};

use crate::sample::{Logprobs, Sampler, Sampling};
use crate::session::GenerateError;

/// A token of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// How likely the model found it, if that was asked for.
    pub logprobs: Option<Logprobs>,
}

/// What comes behind a row of logits.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Choice {
    /// A token.
    Token(Token),
    /// Nothing: this stop token was chosen, or the constraint lets nothing follow.
    End(Option<u32>),
}

/// Chooses the tokens of one request, in their order.
pub(crate) struct Chooser<'r> {
    sampler: Sampler,
    constraint: Option<Box<dyn Constraint + 'r>>,
    stops: Cow<'r, [u32]>,
    allowed: TokenSet,
}

impl<'r> Chooser<'r> {
    /// A chooser at the start of an answer behind the tokens of `prompt`, in a vocabulary of `vocab` tokens.
    pub(crate) fn new(
        sampling: &Sampling,
        constraint: Option<Box<dyn Constraint + 'r>>,
        stops: impl Into<Cow<'r, [u32]>>,
        vocab: usize,
        prompt: impl Iterator<Item = u32>,
    ) -> Result<Self, GenerateError> {
        let mut sampler = Sampler::new(sampling.clone())?;
        sampling.check_tokens(vocab)?;
        sampler.prompt(prompt);
        Ok(Self { sampler, constraint, stops: stops.into(), allowed: TokenSet::new() })
    }

    /// Bytes that the choice of a request's tokens takes at most, its constraint apart.
    pub(crate) fn planned_bytes(vocab: usize) -> usize {
        vocab.div_ceil(8) + Sampler::planned_bytes(vocab)
    }

    /// What comes behind `logits`. It is part of the answer from now on: the next call is for the row behind it.
    ///
    /// # Errors
    /// If nothing can be chosen; nothing has changed then, and no random number was used.
    pub(crate) fn choose(&mut self, logits: &[f32]) -> Result<Choice, GenerateError> {
        let mut limited = false;
        if let Some(constraint) = self.constraint.as_deref_mut() {
            let ending = constraint.ending()?;
            if ending == Ending::Must {
                return Ok(Choice::End(None));
            }
            limited = constraint.allowed(&mut self.allowed)?;
            if !limited && ending == Ending::No {
                self.allowed = (0..logits.len() as u32).collect();
                limited = true;
            }
            if limited {
                self.stops.iter().for_each(|&stop| match ending {
                    Ending::No => self.allowed.remove(stop),
                    _ => self.allowed.insert(stop),
                });
                if ending == Ending::May && self.allowed.is_empty() {
                    return Ok(Choice::End(None));
                }
            }
        }
        let id = self.sampler.pick(logits, limited.then_some(&self.allowed))?;
        if self.stops.contains(&id) {
            return Ok(Choice::End(Some(id)));
        }
        if let Some(constraint) = self.constraint.as_deref_mut() {
            constraint.accept(id)?;
        }
        Ok(Choice::Token(Token { id, logprobs: self.sampler.logprobs(logits, id) }))
    }

    /// Whether nothing can follow what was chosen.
    pub(crate) fn is_complete(&mut self) -> Result<bool, GenerateError> {
        match self.constraint.as_deref_mut() {
            Some(constraint) => Ok(constraint.ending()? == Ending::Must),
            None => Ok(false),
        }
    }

    /// Replaces `tokens` by those that the constraint says come next, at most `most`.
    pub(crate) fn forced(&mut self, most: usize, tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        tokens.clear();
        if let Some(constraint) = self.constraint.as_deref_mut().filter(|_| most > 0)
            && constraint.ending()? != Ending::Must
        {
            constraint.forced(tokens)?;
            tokens.truncate(most);
        }
        Ok(())
    }

    /// Cuts off what the constraint does not allow to come next.
    pub(crate) fn cut(&mut self, tokens: &mut Vec<u32>) -> Result<(), GenerateError> {
        if let Some(constraint) = self.constraint.as_deref_mut().filter(|_| !tokens.is_empty()) {
            tokens.truncate(constraint.agrees(tokens)?);
        }
        Ok(())
    }

    /// How many logits were dropped so far because they were not finite.
    pub(crate) fn non_finite(&self) -> u64 {
        self.sampler.non_finite()
    }
}
