//! A grammar at some place of an answer.

use forebay_core::{Constraint, ConstraintError, Ending, TokenSet};
use llguidance::api::StopReason;

/// Limits one answer to what its grammar allows.
pub struct Matcher {
    inner: llguidance::Matcher,
    /// The engine's own token for the end, behind the vocabulary. A model may have a token of this number that means
    /// nothing, and it must not be taken for the end.
    end: u32,
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, end: u32) -> Self {
        Self { inner, end }
    }

    fn failure(&self, reason: impl ToString) -> ConstraintError {
        let reason = plain(&reason.to_string());
        // Behind an error the engine's own reason to stop is gone, but for its name.
        match reason.contains(&StopReason::NoExtensionBias.to_string()) {
            true => ConstraintError::DeadEnd,
            false => ConstraintError::TooComplex { reason },
        }
    }
}

impl Clone for Matcher {
    /// Independent of this one: what one answer makes the engine work out does not count towards the limits of another.
    fn clone(&self) -> Self {
        Self { inner: self.inner.deep_clone(), end: self.end }
    }
}

/// What the engine said, without its marks.
pub(crate) fn plain(message: &str) -> String {
    let message = message.split("<non-verbose/>").next().unwrap_or_default();
    // The engine asserts some of its own limits and catches that; what it asserts helps nobody here.
    match message.contains("panic: ") {
        true => "it goes beyond a limit of the grammar engine; make it smaller".to_owned(),
        false => message.trim().to_owned(),
    }
}

impl Constraint for Matcher {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        if self.inner.is_stopped() {
            return match self.inner.get_error() {
                Some(error) => Err(self.failure(error)),
                None => Ok(Ending::Must),
            };
        }
        match self.inner.is_accepting() {
            Ok(true) => Ok(Ending::May),
            Ok(false) => Ok(Ending::No),
            Err(error) => Err(self.failure(error)),
        }
    }

    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError> {
        let mask = self.inner.compute_mask().map_err(|error| self.failure(error))?;
        set.set_words(mask.as_slice());
        set.remove(self.end);
        Ok(true)
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if token >= self.end {
            let reason = "it has no text".to_owned();
            return Err(ConstraintError::NotAllowed { token, reason });
        }
        self.inner.consume_token(token).map_err(|error| {
            let reason = plain(&error.to_string());
            ConstraintError::NotAllowed { token, reason }
        })
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        *tokens = self.inner.compute_ff_tokens();
        match self.inner.get_error() {
            Some(error) => Err(self.failure(error)),
            None => Ok(()),
        }
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        // The engine takes a number beyond its vocabulary for a fault of its own.
        let known = tokens.iter().position(|token| *token >= self.end).unwrap_or(tokens.len());
        self.inner.validate_tokens(&tokens[..known]).map_err(|error| self.failure(error))
    }
}

/// A constraint on what comes behind a think block: until its closing token everything but an end is allowed.
pub struct Reasoned<C> {
    inner: C,
    close: u32,
    thinking: bool,
}

impl<C: Constraint> Reasoned<C> {
    /// `inner` behind the token `close`, which is still to come.
    pub fn new(inner: C, close: u32) -> Self {
        Self { inner, close, thinking: true }
    }
}

impl<C: Constraint> Constraint for Reasoned<C> {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        if self.thinking { Ok(Ending::No) } else { self.inner.ending() }
    }

    fn allowed(&mut self, set: &mut TokenSet) -> Result<bool, ConstraintError> {
        if self.thinking { Ok(false) } else { self.inner.allowed(set) }
    }

    fn accept(&mut self, token: u32) -> Result<(), ConstraintError> {
        if !self.thinking {
            return self.inner.accept(token);
        }
        self.thinking = token != self.close;
        Ok(())
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        tokens.clear();
        if self.thinking { Ok(()) } else { self.inner.forced(tokens) }
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        if !self.thinking {
            return self.inner.agrees(tokens);
        }
        let Some(end) = tokens.iter().position(|token| *token == self.close) else { return Ok(tokens.len()) };
        Ok(end + 1 + self.inner.agrees(&tokens[end + 1..])?)
    }
}
