//! Going on from what earlier sequences left.

use forebay_model::{ForwardError, mtp};

use super::{GenerateError, Session};
use crate::engine::Engine;

/// How a sequence began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reused {
    /// Tokens that are in the cache and need not be run.
    pub tokens: usize,
    /// Of these, tokens whose rows were read from disk.
    pub from_disk: usize,
}

impl Session {
    /// Becomes the sequence `wanted` as far as anything is known of it: by this sequence, by earlier ones of the engine,
    /// or on disk. The rest of `wanted` is the prompt of the next [`generate`](Self::generate); at least one token is
    /// always left to run, so that there are logits to go on from. Changes no bit.
    ///
    /// # Errors
    /// If `wanted` is longer than the context; nothing is changed then.
    pub fn start_from(&mut self, engine: &mut Engine, wanted: &[u32]) -> Result<Reused, GenerateError> {
        let capacity = self.kv.capacity();
        if wanted.len() > capacity {
            return Err(ForwardError::ContextFull { tokens: wanted.len(), used: 0, capacity }.into());
        }
        let had = self.tokens.len();
        let own = self.reuse(wanted);
        let found = engine.prefixes.find(wanted);
        let kept = found.common.min(wanted.len().saturating_sub(1));
        // What goes on where it ended has its last hidden state.
        if kept < own || kept == 0 || (kept == own && own == had) {
            return Ok(Reused { tokens: own, from_disk: 0 });
        }
        self.tokens.clear();
        self.tokens.extend_from_slice(&wanted[..kept]);
        self.logits.clear();
        self.behind = wanted.get(kept).copied().filter(|_| found.common > kept);
        let drafting = match (engine.has_mtp(), self.behind) {
            (false, _) => 0,
            (true, Some(_)) => kept,
            (true, None) => kept - 1,
        };
        let carry = engine.prefixes.carry(&found, kept - 1);
        self.kv.adopt(found.blocks, kept, drafting);
        mtp::set_carry(&mut self.kv, carry);
        Ok(Reused { tokens: kept, from_disk: found.from_disk.min(kept) })
    }

    /// Leaves what is in the cache to sequences to come.
    pub(crate) fn enter(&self, engine: &mut Engine) {
        if self.kv.len() == self.tokens.len() {
            engine.prefixes.enter(&self.tokens, &self.kv, mtp::carry(&self.kv));
        }
    }
}
