//! Tokens that are guessed at and then verified: where drafts come from and what became of them (decode spec
//! sections 4 and 5).

mod control;
mod foretold;

pub use control::{Controller, Forecast, Observed};
pub use foretold::Foretold;

/// The deepest draft: a verifying pass has one row more.
pub const MAX_DEPTH: usize = 8;

/// Whether tokens are drafted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Drafting {
    /// No: one token a pass.
    #[default]
    Off,
    /// As many as measurements say is fastest, none included.
    Auto,
    /// Always so many, at most [`MAX_DEPTH`]: by the MTP layer if the model has one, else looked up in what was
    /// said before.
    Depth(usize),
}

impl std::fmt::Display for Drafting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Drafting::Off => f.write_str("off"),
            Drafting::Auto => f.write_str("auto"),
            Drafting::Depth(depth) => write!(f, "{depth}"),
        }
    }
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftStats {
    /// Tokens drafted, before the budget and the context cut any off.
    pub proposed: u64,
    /// Tokens verified.
    pub verified: u64,
    /// Tokens that turned out to be what the model says.
    pub accepted: u64,
    /// By how many drafts were accepted: passes that verified any.
    pub passes: [u64; MAX_DEPTH + 1],
}

impl DraftStats {
    /// Adds those of another run.
    pub fn join(&mut self, other: &Self) {
        self.proposed += other.proposed;
        self.verified += other.verified;
        self.accepted += other.accepted;
        self.passes.iter_mut().zip(other.passes).for_each(|(all, more)| *all += more);
    }

    /// Adds a pass.
    pub fn add(&mut self, seen: &Observed) {
        self.proposed += seen.drafted as u64;
        if seen.verified > 0 {
            self.verified += seen.verified as u64;
            self.accepted += seen.accepted as u64;
            self.passes[seen.accepted.min(MAX_DEPTH)] += 1;
        }
    }
}

/// Drafts into `drafts` what followed the last two tokens where they last stood side by side, up to `depth` tokens.
///
/// `said` and then `next` are all tokens so far.
pub fn look_up(said: &[u32], next: u32, depth: usize, drafts: &mut Vec<u32>) {
    drafts.clear();
    let Some(&before) = said.last().filter(|_| said.len() >= 3) else { return };
    let all = |at: usize| said.get(at).copied().unwrap_or(next);
    let last = said.len();
    // `next` stands at `last`. Two tokens at least follow an earlier pair, else the text only repeats one token.
    let found = (1..last - 1).rev().find(|&at| said[at] == next && said[at - 1] == before);
    let Some(found) = found else { return };
    drafts.extend((found + 1..=last).take(depth).map(all));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Decode spec D-06.
    #[test]
    fn published_lookups() {
        let cases: [(&[u32], &[u32]); 5] = [
            (&[5, 6, 7, 8, 5, 6, 9, 5, 6], &[9, 5, 6]),
            (&[1, 2, 1, 2], &[1, 2]),
            (&[7, 7, 7, 7, 7], &[7, 7]),
            (&[1, 2, 1], &[]),
            (&[1, 2, 3, 4], &[]),
        ];
        for (tokens, want) in cases {
            let (next, said) = tokens.split_last().unwrap();
            let mut drafts = vec![99];
            look_up(said, *next, 4, &mut drafts);
            assert_eq!(drafts, want, "{tokens:?}");
        }
    }

    #[test]
    fn never_deeper_than_asked_for() {
        let mut drafts = Vec::new();
        look_up(&[1, 2, 3, 4, 5, 6, 7, 1], 2, 3, &mut drafts);
        assert_eq!(drafts, [3, 4, 5]);
        look_up(&[1, 2, 3, 1], 2, 0, &mut drafts);
        assert!(drafts.is_empty());
    }
}
