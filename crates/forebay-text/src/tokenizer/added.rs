//! Added tokens: found in text before anything else, leftmost and longest first.

use aho_corasick::{AhoCorasick, BuildError, MatchKind};

/// One added token, in the form the encoder uses.
#[derive(Debug, Clone)]
pub(super) struct Added {
    pub id: u32,
    pub content: String,
    /// A control token: ends a turn, and may only come from a template.
    pub control: bool,
}

/// Search for a set of added tokens.
#[derive(Debug)]
pub(super) struct Finder {
    /// `None` when the set is empty.
    automaton: Option<AhoCorasick>,
    /// Id of each pattern of the automaton.
    ids: Vec<u32>,
}

impl Finder {
    /// A finder for the tokens of `added` that `wanted` accepts. Tokens without text never match.
    pub fn new(added: &[Added], wanted: impl Fn(&Added) -> bool) -> Result<Self, BuildError> {
        let chosen: Vec<&Added> =
            added.iter().filter(|token| !token.content.is_empty() && wanted(token)).collect();
        let ids = chosen.iter().map(|token| token.id).collect();
        if chosen.is_empty() {
            return Ok(Self { automaton: None, ids });
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(chosen.iter().map(|token| token.content.as_bytes()))?;
        Ok(Self { automaton: Some(automaton), ids })
    }

    /// The text cut at the hits: each step is the text before a hit (maybe empty) and the id of the hit; the
    /// last step has no hit.
    pub fn cut<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (&'t str, Option<u32>)> + 't {
        let mut hits = self.automaton.as_ref().map(|automaton| automaton.find_iter(text));
        let mut at = Some(0);
        std::iter::from_fn(move || {
            let start = at?;
            match hits.as_mut().and_then(Iterator::next) {
                Some(hit) => {
                    at = Some(hit.end());
                    Some((&text[start..hit.start()], self.ids.get(hit.pattern().as_usize()).copied()))
                }
                None => {
                    at = None;
                    Some((&text[start..], None))
                }
            }
        })
    }
}
