//! Stop strings: texts that end an answer where they first appear, and of which nothing is ever shown.
//!
//! Text arrives in pieces that know nothing of stop strings. What may be the beginning of one is held back until it is
//! decided, and everything in front of it is passed on at once.

/// Most stop strings of a request.
pub const MAX_STOP_STRINGS: usize = 64;
/// Most bytes of a stop string.
pub const MAX_STOP_BYTES: usize = 1 << 10;

/// Why stop strings cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StopStringError {
    /// It would stop everything.
    #[error("a stop string is empty; leave it out, or give it some text")]
    Empty,
    /// Too long.
    #[error("a stop string has {bytes} bytes; use at most {MAX_STOP_BYTES}")]
    TooLong {
        /// Its length.
        bytes: usize,
    },
    /// Too many.
    #[error("there are {count} stop strings; use at most {MAX_STOP_STRINGS}")]
    TooMany {
        /// So many.
        count: usize,
    },
}

/// Looks for stop strings in the text of an answer as it arrives: one an answer.
///
/// The answer ends at the first place where any of them is complete, and if several are, where the longest of those
/// begins. So the outcome does not depend on how the text is cut.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    strings: Vec<Searched>,
    /// The beginning of what may become a stop string.
    held: String,
    found: Option<usize>,
}

impl StopMatcher {
    /// A matcher for these strings, at the beginning of an answer.
    pub fn new(strings: impl IntoIterator<Item = String>) -> Result<Self, StopStringError> {
        let strings: Vec<Searched> = strings.into_iter().map(Searched::new).collect();
        if strings.len() > MAX_STOP_STRINGS {
            return Err(StopStringError::TooMany { count: strings.len() });
        }
        for string in &strings {
            match string.text.len() {
                0 => return Err(StopStringError::Empty),
                bytes if bytes > MAX_STOP_BYTES => return Err(StopStringError::TooLong { bytes }),
                _ => {}
            }
        }
        Ok(Self { strings, ..Self::default() })
    }

    /// Takes more text and returns what is certain to belong to the answer: nothing from a stop string on.
    pub fn push(&mut self, text: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        let before = self.held.len();
        let mut all = std::mem::take(&mut self.held) + text;
        for (at, byte) in text.bytes().enumerate() {
            let complete = |string: &mut Searched| string.step(byte).then_some(string.text.len());
            let lengths = self.strings.iter_mut().map(complete).enumerate();
            let longest =
                lengths.filter_map(|(place, length)| Some((length?, place))).max_by_key(|(n, _)| *n);
            if let Some((length, place)) = longest {
                self.found = Some(place);
                all.truncate(before + at + 1 - length);
                return all;
            }
        }
        let undecided = self.strings.iter().map(|string| string.matched).max().unwrap_or(0);
        self.held = all.split_off(all.len() - undecided);
        all
    }

    /// Ends the answer: what was held back belongs to it, as no stop string was completed.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// The stop string that was found: its place in the order they were given in.
    pub fn found(&self) -> Option<usize> {
        self.found
    }
}

/// A string that is looked for one byte after the other (Knuth, Morris and Pratt).
#[derive(Debug, Clone)]
struct Searched {
    text: Vec<u8>,
    /// By length of a beginning: the longest proper end of it that is a beginning too.
    fallback: Vec<usize>,
    /// So many bytes at the end of what was seen are a beginning.
    matched: usize,
}

impl Searched {
    fn new(text: String) -> Self {
        let mut searched = Self { text: text.into_bytes(), fallback: vec![0, 0], matched: 0 };
        for at in 1..searched.text.len() {
            searched.advance(searched.text[at]);
            searched.fallback.push(searched.matched);
        }
        searched.matched = 0;
        searched
    }

    /// Whether the string is complete with `byte`.
    fn step(&mut self, byte: u8) -> bool {
        self.advance(byte);
        self.matched == self.text.len()
    }

    fn advance(&mut self, byte: u8) {
        while self.matched > 0 && self.text[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        if self.text[self.matched] == byte {
            self.matched += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn matcher(strings: &[&str]) -> StopMatcher {
        StopMatcher::new(strings.iter().map(|s| (*s).to_owned())).unwrap()
    }

    /// What was shown, piece by piece, and which string was found.
    fn shown(strings: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher = matcher(strings);
        let mut shown: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        shown.push(matcher.finish());
        (shown, matcher.found())
    }

    fn owned(pieces: &[&str]) -> Vec<String> {
        pieces.iter().map(|piece| (*piece).to_owned()).collect()
    }

    #[test]
    fn a_stop_string_over_several_pieces_is_never_begun() {
        let (pieces, found) = shown(&["END"], &["aE", "N", "D", "b"]);
        assert_eq!((pieces, found), (owned(&["a", "", "", "", ""]), Some(0)));
        let (pieces, found) = shown(&["END"], &["aE", "N", "x", "E"]);
        assert_eq!((pieces, found), (owned(&["a", "", "ENx", "", "E"]), None));
    }

    #[test]
    fn the_first_to_be_complete_ends_the_answer() {
        let (pieces, found) = shown(&["bcd", "c"], &["ab", "cd"]);
        assert_eq!((pieces.concat(), found), ("ab".to_owned(), Some(1)));
        // Both end at the same place: the longer one began first.
        let (pieces, found) = shown(&["c", "bc"], &["abc"]);
        assert_eq!((pieces.concat(), found), ("a".to_owned(), Some(1)));
    }

    #[test]
    fn repeats_and_characters_of_several_bytes() {
        let (pieces, found) = shown(&["aab"], &["a", "a", "a", "b"]);
        assert_eq!((pieces, found), (owned(&["", "", "a", "", ""]), Some(0)));
        let (pieces, found) = shown(&["é中"], &["xé", "é", "中!"]);
        assert_eq!((pieces, found), (owned(&["x", "é", "", ""]), Some(0)));
        // U+00E9 and U+00E8 begin with the same byte.
        let (pieces, found) = shown(&["é"], &["è", "e"]);
        assert_eq!((pieces, found), (owned(&["è", "e", ""]), None));
    }

    #[test]
    fn without_stop_strings_everything_passes() {
        assert_eq!(shown(&[], &["a", "b"]), (owned(&["a", "b", ""]), None));
    }

    #[test]
    fn what_cannot_be_used_is_said() {
        let new = |strings: Vec<String>| StopMatcher::new(strings).map(|_| ());
        assert_eq!(new(vec![String::new()]), Err(StopStringError::Empty));
        assert_eq!(new(vec!["x".repeat(1025)]), Err(StopStringError::TooLong { bytes: 1025 }));
        assert_eq!(new(vec!["x".to_owned(); 65]), Err(StopStringError::TooMany { count: 65 }));
        assert_eq!(new(vec!["x".repeat(1024); 64]), Ok(()));
    }

    /// By the definition: of all places where a string ends the first, and there the longest.
    fn plainly<'a>(strings: &[String], text: &'a str) -> (&'a str, bool) {
        let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
        for end in ends {
            let complete = strings.iter().filter(|s| text[..end].ends_with(s.as_str()));
            if let Some(longest) = complete.map(|s| s.len()).max() {
                return (&text[..end - longest], true);
            }
        }
        (text, false)
    }

    proptest! {
        #[test]
        fn the_outcome_is_that_of_the_definition_however_the_text_is_cut(
            strings in proptest::collection::vec("[abé中]{1,4}", 0..4),
            text in "[abcé中]{0,40}",
            size in 1usize..7,
        ) {
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let pieces: Vec<String> = letters.chunks(size).map(|chunk| chunk.concat()).collect();
            let mut matcher = StopMatcher::new(strings.clone()).unwrap();
            let (want, stopped) = plainly(&strings, &text);
            let mut so_far = String::new();
            for piece in &pieces {
                so_far += &matcher.push(piece);
                prop_assert!(want.starts_with(&so_far), "more than the answer was shown");
            }
            so_far += &matcher.finish();
            prop_assert_eq!((so_far.as_str(), matcher.found().is_some()), (want, stopped));
        }
    }
}
