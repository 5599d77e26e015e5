//! The step from a chosen token to the next pass, the same for one sequence alone and for several at once.

use std::ops::ControlFlow;
use std::time::Instant;

use super::{Finish, GenerateError, Session, Stats, Token};
use crate::choose::{Choice, Chooser};

impl Session {
    /// Goes on with what was chosen behind the last row that was kept, and tells it: the token to run next, or why the
    /// answer is over.
    pub(crate) fn go_on(
        &mut self,
        chosen: Option<Choice>,
        chooser: &mut Chooser<'_>,
        stats: &mut Stats,
        max_tokens: usize,
        began: Instant,
        tell: &mut dyn FnMut(Token) -> ControlFlow<()>,
    ) -> Result<ControlFlow<Finish, u32>, GenerateError> {
        if let Some(chosen) = chosen.filter(|_| stats.new_tokens < max_tokens) {
            let next = match chosen {
                Choice::Token(next) => next,
                Choice::End(_) => return Ok(ControlFlow::Break(Finish::Stop)),
            };
            let id = next.id;
            self.pending = Some(id);
            stats.new_tokens += 1;
            stats.first_token.get_or_insert_with(|| began.elapsed());
            if tell(next).is_break() {
                return Ok(ControlFlow::Break(Finish::Ended));
            }
            if stats.new_tokens < max_tokens {
                if self.kv.len() == self.kv.capacity() {
                    return Ok(ControlFlow::Break(Finish::Context));
                }
                return Ok(ControlFlow::Continue(id));
            }
        }
        // An answer that is complete with its last token was not cut.
        let complete = chooser.is_complete()?;
        Ok(ControlFlow::Break(if complete { Finish::Stop } else { Finish::Length }))
    }
}
