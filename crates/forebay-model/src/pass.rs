//! The sequences of a pass: whose its rows are, and who has left it.
//!
//! The rows of all sequences go through a layer together, so that what is read or multiplied for one is there for
//! all; only attention looks at each alone. What happens to one (a cancellation, a value that is not finite, an
//! expert that cannot be read) ends that one: its rows are taken out at the next layer, and no row of another
//! depends on it, because no row depends on rows of other sequences.

use std::ops::Range;

use forebay_core::CancelToken;

use crate::forward::ForwardError;
use crate::kv::KvCache;

/// What a pass does for one sequence.
pub struct Part<'a> {
    pub(crate) kv: &'a mut KvCache,
    pub(crate) tokens: &'a [u32],
    pub(crate) cancel: &'a CancelToken,
    /// So many of the tokens, the last ones, are guesses.
    drafts: usize,
    /// Why it left the pass.
    error: Option<ForwardError>,
    /// Its rows after the pass.
    rows: Range<usize>,
}

impl<'a> Part<'a> {
    /// Runs `tokens` at the positions behind those of `kv` and appends them to it, until `cancel` is raised.
    pub fn new(kv: &'a mut KvCache, tokens: &'a [u32], cancel: &'a CancelToken) -> Self {
        Self { kv, tokens, cancel, drafts: 0, error: None, rows: 0..0 }
    }

    /// The same, where the last `drafts` tokens are guesses: what they use is learnt once they are
    /// [accepted](crate::Workspace::accept).
    pub fn with_drafts(self, drafts: usize) -> Self {
        Self { drafts, ..self }
    }

    /// How it ended: the rows of the pass that were its own, which say where its hidden states and logits are, or
    /// why it left. Then the cache is as long as before.
    pub fn result(self) -> Result<Range<usize>, ForwardError> {
        self.error.map_or(Ok(self.rows), Err)
    }
}

/// Rows of a pass that belong to one sequence, at positions without a gap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    /// Which part of the pass.
    pub part: usize,
    /// Its first row, counted in the pass or in a block of it.
    pub first: usize,
    /// Rows.
    pub rows: usize,
    /// Position of the first row.
    pub position: usize,
}

impl Span {
    pub(crate) fn end(&self) -> usize {
        self.first + self.rows
    }

    /// Position behind that of the last row.
    pub(crate) fn end_position(&self) -> usize {
        self.position + self.rows
    }

    /// What lies in `rows`, counted from their first one.
    pub(crate) fn within(&self, rows: &Range<usize>) -> Option<Span> {
        let (from, to) = (self.first.max(rows.start), self.end().min(rows.end));
        (from < to).then(|| Span {
            first: from - rows.start,
            rows: to - from,
            position: self.position + from - self.first,
            ..*self
        })
    }
}

/// A pass under way.
pub(crate) struct Pass<'p, 'a> {
    pub(crate) parts: &'p mut [Part<'a>],
    /// Of all rows, in order; those of sequences that left among them until they are [taken out](Self::take_out).
    spans: Vec<Span>,
    left: &'p mut dyn FnMut(usize, &ForwardError),
    /// Whether rows of a sequence that left are still there.
    has_dead: bool,
}

impl<'p, 'a> Pass<'p, 'a> {
    /// A pass without rows yet.
    pub(crate) fn new(parts: &'p mut [Part<'a>], left: &'p mut dyn FnMut(usize, &ForwardError)) -> Self {
        Self { parts, spans: Vec::new(), left, has_dead: false }
    }

    /// Gives rows to every part that has not left, for the positions from `position` of each on.
    pub(crate) fn lay_out(&mut self, position: impl Fn(&Part<'_>) -> usize) {
        self.spans.clear();
        let mut first = 0;
        for (at, part) in self.parts.iter().enumerate().filter(|(_, part)| part.error.is_none()) {
            let rows = part.tokens.len();
            self.spans.push(Span { part: at, first, rows, position: position(part) });
            first += rows;
        }
    }

    /// Rows there are.
    pub(crate) fn rows(&self) -> usize {
        self.spans.last().map_or(0, Span::end)
    }

    pub(crate) fn spans(&self) -> &[Span] {
        &self.spans
    }

    /// Whose the rows of a block are; rows are counted from its first one.
    pub(crate) fn spans_in(&self, block: &Range<usize>) -> Vec<Span> {
        self.spans.iter().filter_map(|span| span.within(block)).collect()
    }

    /// The span of a row.
    fn span_of(&self, row: usize) -> Span {
        self.spans[self.spans.partition_point(|span| span.end() <= row)]
    }

    /// The position of a row.
    pub(crate) fn position(&self, row: usize) -> usize {
        let span = self.span_of(row);
        span.position + row - span.first
    }

    /// Whether the token of a row is a guess.
    pub(crate) fn is_draft(&self, row: usize) -> bool {
        let span = self.span_of(row);
        row + self.parts[span.part].drafts >= span.end()
    }

    /// Whether the sequence of a row is still there.
    pub(crate) fn is_alive(&self, row: usize) -> bool {
        !self.has_dead || self.is_here(self.span_of(row).part)
    }

    /// Whether a sequence is still there.
    pub(crate) fn is_here(&self, part: usize) -> bool {
        self.parts[part].error.is_none()
    }

    /// Whether all of these rows belong to sequences that left.
    pub(crate) fn all_left(&self, block: &Range<usize>) -> bool {
        self.has_dead && !self.spans_in(block).iter().any(|span| self.is_here(span.part))
    }

    /// Whether some rows belong to a sequence that left.
    pub(crate) fn has_dead(&self) -> bool {
        self.has_dead
    }

    /// Whether nobody is left.
    pub(crate) fn is_over(&self) -> bool {
        !self.parts.iter().any(|part| part.error.is_none())
    }

    /// A sequence leaves. The first reason counts.
    pub(crate) fn fail(&mut self, part: usize, error: ForwardError) {
        if self.parts[part].error.is_none() {
            (self.left)(part, &error);
            self.parts[part].error = Some(error);
            self.has_dead = true;
        }
    }

    /// The sequence of a row leaves.
    pub(crate) fn fail_row(&mut self, row: usize, error: ForwardError) {
        self.fail(self.span_of(row).part, error);
    }

    /// Everybody leaves.
    pub(crate) fn fail_all(&mut self, error: &dyn Fn() -> ForwardError) {
        (0..self.parts.len()).for_each(|part| self.fail(part, error()));
    }

    /// Those leave whose tokens were raised; whether there were any.
    pub(crate) fn look_for_cancellations(&mut self) -> bool {
        let mut found = false;
        for part in 0..self.parts.len() {
            if self.is_here(part) && self.parts[part].cancel.is_cancelled() {
                self.fail(part, ForwardError::Cancelled);
                found = true;
            }
        }
        found
    }

    /// The token that ends the whole pass: there is one only while there is one sequence.
    pub(crate) fn only_cancel(&self) -> Option<&'a CancelToken> {
        let mut here = self.parts.iter().filter(|part| part.error.is_none());
        let first = here.next()?;
        here.next().is_none().then_some(first.cancel)
    }

    /// Takes the rows of those that left out of the order: the rows that stay, as they are counted before. `None` if all
    /// do.
    pub(crate) fn take_out(&mut self) -> Option<Vec<Range<usize>>> {
        if !std::mem::take(&mut self.has_dead) {
            return None;
        }
        let parts = &*self.parts;
        self.spans.retain(|span| parts[span.part].error.is_none());
        let stay = self.spans.iter().map(|span| span.first..span.end()).collect();
        let mut first = 0;
        for span in &mut self.spans {
            span.first = first;
            first += span.rows;
        }
        Some(stay)
    }

    /// The pass is over: the caches are as long as what was run.
    pub(crate) fn advance(&mut self) {
        for span in &self.spans {
            let part = &mut self.parts[span.part];
            if part.error.is_none() {
                part.kv.advance(span.rows);
                part.rows = span.first..span.end();
            }
        }
    }
}

/// Moves the rows `stay`, of `width` values each, to the front of `values`, which ends behind them.
pub(crate) fn keep_rows<T: Copy>(values: &mut Vec<T>, width: usize, stay: &[Range<usize>]) {
    let mut at = 0;
    for rows in stay {
        values.copy_within(rows.start * width..rows.end * width, at);
        at += rows.len() * width;
    }
    values.truncate(at);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_move_to_the_front() {
        let mut values: Vec<u32> = (0..12).collect();
        keep_rows(&mut values, 2, &[1..2, 4..6]);
        assert_eq!(values, [2, 3, 8, 9, 10, 11]);
    }

    #[test]
    fn a_span_is_cut_to_a_block() {
        let span = Span { part: 3, first: 4, rows: 10, position: 100 };
        assert_eq!(span.within(&(0..4)), None);
        assert_eq!(span.within(&(2..6)), Some(Span { part: 3, first: 2, rows: 2, position: 100 }));
        assert_eq!(span.within(&(8..64)), Some(Span { part: 3, first: 0, rows: 6, position: 104 }));
    }
}
