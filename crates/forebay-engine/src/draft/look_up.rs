//! Drafts from the text itself: what followed when the same tokens last stood side by side (prompt lookup).

use super::MAX_DEPTH;

/// Tokens that must be the same at least.
const LEAST: usize = 2;
/// More equal tokens say no more.
const MOST: usize = 16;

/// How many tokens are the same before a looked-up draft, in classes: the more, the more often it is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeated {
    /// Two.
    Two,
    /// Three or four.
    Few,
    /// Five to eight.
    Several,
    /// More.
    Many,
}

impl Repeated {
    /// All classes.
    pub const ALL: [Repeated; 4] = [Repeated::Two, Repeated::Few, Repeated::Several, Repeated::Many];

    fn of(tokens: usize) -> Self {
        match tokens {
            ..=2 => Repeated::Two,
            3..=4 => Repeated::Few,
            5..=8 => Repeated::Several,
            _ => Repeated::Many,
        }
    }
}

/// Where the text repeats itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Match {
    /// Place of the first token that may come again.
    at: usize,
    /// How many tokens before it are the same.
    pub repeated: Repeated,
    /// How many tokens are known to follow, at most [`MAX_DEPTH`].
    pub len: usize,
}

impl Match {
    /// The longest stretch of at least two tokens at the end of `said` and `next` that was there before, the latest
    /// of several equally long ones. Two tokens at least follow it, else the text only repeats one token.
    pub fn find(said: &[u32], next: u32) -> Option<Self> {
        let last = said.len();
        let mut best: Option<(usize, usize)> = None;
        // Positions of `next` that two tokens follow, `next` itself at `last` counted as one of them.
        for at in (LEAST - 1..last.saturating_sub(1)).rev().filter(|&at| said[at] == next) {
            let same = said[..at].iter().rev().zip(said.iter().rev()).take(MOST - 1);
            let tokens = 1 + same.take_while(|(a, b)| a == b).count();
            if tokens >= LEAST && best.is_none_or(|(most, _)| tokens > most) {
                best = Some((tokens, at));
                if tokens == MOST {
                    break;
                }
            }
        }
        let (tokens, at) = best?;
        Some(Self { at: at + 1, repeated: Repeated::of(tokens), len: (last - at).min(MAX_DEPTH) })
    }

    /// Drafts into `drafts` what came after it, up to `depth` tokens.
    pub fn draft(&self, said: &[u32], next: u32, depth: usize, drafts: &mut Vec<u32>) {
        let all = said[self.at..].iter().copied().chain([next]);
        drafts.clear();
        drafts.extend(all.take(depth));
    }
}

/// Drafts into `drafts` what followed the longest stretch at the end that was there before, up to `depth` tokens.
///
/// `said` and then `next` are all tokens so far.
pub fn look_up(said: &[u32], next: u32, depth: usize, drafts: &mut Vec<u32>) {
    drafts.clear();
    if let Some(found) = Match::find(said, next) {
        found.draft(said, next, depth, drafts);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drafts(tokens: &[u32], depth: usize) -> Vec<u32> {
        let (next, said) = tokens.split_last().unwrap();
        let mut drafts = vec![99];
        look_up(said, *next, depth, &mut drafts);
        drafts
    }

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
            assert_eq!(drafts(tokens, 4), want, "{tokens:?}");
        }
    }

    #[test]
    fn never_deeper_than_asked_for() {
        assert_eq!(drafts(&[1, 2, 3, 4, 5, 6, 7, 1, 2], 3), [3, 4, 5]);
        assert!(drafts(&[1, 2, 3, 1, 2], 0).is_empty());
    }

    /// Three equal tokens say more than two, even if those are nearer.
    #[test]
    fn the_longest_stretch_counts() {
        let text = [9, 1, 2, 50, 51, 8, 1, 2, 60, 61, 9, 1, 2];
        assert_eq!(drafts(&text, 2), [50, 51]);
        let (next, said) = text.split_last().unwrap();
        let found = Match::find(said, *next).unwrap();
        assert_eq!((found.repeated, found.len), (Repeated::Few, MAX_DEPTH));
        assert_eq!(drafts(&text[1..], 2), [60, 61], "of equally long ones the latest");
    }

    /// A plain search over all pairs of places finds the same.
    #[test]
    fn nothing_is_overlooked() {
        let mut rng = crate::rng::Rng::new(5);
        for _ in 0..2000 {
            let len = 1 + (rng.next_unit() * 40.0) as usize;
            let text: Vec<u32> = (0..len).map(|_| (rng.next_unit() * 3.0) as u32).collect();
            let (next, said) = text.split_last().unwrap();
            let equal =
                |end: usize| (1..=MOST.min(end)).take_while(|n| text[end - n] == text[len - n]).count();
            let ends = (1..len).rev().filter(|end| len - end >= 2);
            let want =
                ends.fold((1, 0), |best, end| if equal(end) > best.0 { (equal(end), end) } else { best });
            let found = Match::find(said, *next).map(|found| (found.repeated, found.at));
            assert_eq!(found, (want.0 > 1).then(|| (Repeated::of(want.0), want.1)), "{text:?}");
        }
    }
}
