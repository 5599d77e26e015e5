//! The pre-tokenizer: cuts text into the pieces inside which merges may happen.
//!
//! The tables of letters and numbers are those of the `regex` crate, the same that the Hugging Face
//! tokenizer library uses when built without C code (Unicode 16.0 at the time of writing).

use regex::Regex;
use std::sync::LazyLock;

/// The pattern as a tokenizer.json spells it; the only one the encoder implements.
pub(super) const PATTERN: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`PATTERN`] without its look-ahead, which [`Pieces`] does by hand: what is left needs no backtracking, so the
/// search takes linear time on any text.
static WITHOUT_LOOKAHEAD: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(&PATTERN.replace(r"|\s+(?!\S)", "")).expect("the pattern is a constant of this file")
});

/// The pieces of `text`, in order; their concatenation is `text`. Added tokens are not known here.
pub fn pieces(text: &str) -> Pieces<'_> {
    Pieces { text, at: 0 }
}

/// Iterator of [`pieces`].
#[derive(Debug, Clone)]
pub struct Pieces<'t> {
    text: &'t str,
    at: usize,
}

impl<'t> Iterator for Pieces<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let start = self.at;
        let rest = self.text.get(start..).filter(|rest| !rest.is_empty())?;
        // Every character starts some alternative, so a match begins at `start`; the fallback keeps the text whole.
        let end = WITHOUT_LOOKAHEAD.find_at(self.text, start).map_or(self.text.len(), |found| found.end());
        let piece = &self.text[start..end];
        self.at = end - given_back(piece, end == start + rest.len());
        Some(&self.text[start..self.at])
    }
}

/// How many bytes a run of spaces leaves to the word that follows it: its last character, if the run has
/// others and something follows. Only that alternative yields a piece that ends in a space other than CR or LF.
fn given_back(piece: &str, at_end_of_text: bool) -> usize {
    match piece.chars().next_back() {
        Some(last)
            if last.is_whitespace()
                && !matches!(last, '\r' | '\n')
                && !at_end_of_text
                && last.len_utf8() < piece.len() =>
        {
            last.len_utf8()
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// T-01, all lines: (text, pieces).
    #[test]
    fn t01_pieces() {
        let table: &[(&str, &[&str])] = &[
            ("Hello world", &["Hello", " world"]),
            ("don't", &["don", "'t"]),
            ("DON'T I'LL we've", &["DON", "'T", " I", "'LL", " we", "'ve"]),
            ("x's's", &["x", "'s", "'s"]),
            (" 's", &[" '", "s"]),
            ("'sx", &["'s", "x"]),
            ("12345", &["123", "45"]),
            ("a1b22c333d4444", &["a", "1", "b", "22", "c", "333", "d", "444", "4"]),
            ("  hello", &[" ", " hello"]),
            ("a  b", &["a", " ", " b"]),
            ("foo  ", &["foo", "  "]),
            ("   \n  x", &["   \n", " ", " x"]),
            ("a \n\n b", &["a", " \n\n", " b"]),
            ("\n\n\nfoo", &["\n\n\n", "foo"]),
            (" \r\n", &[" \r\n"]),
            ("foo\t\tbar", &["foo", "\t", "\tbar"]),
            ("tab\tword", &["tab", "\tword"]),
            ("!!!\n\nx", &["!!!\n\n", "x"]),
            (" !?", &[" !?"]),
            ("a!!b", &["a", "!!", "b"]),
            ("x = 1;\r\ny", &["x", " =", " ", "1", ";\r\n", "y"]),
            ("$100.50", &["$", "100", ".", "50"]),
            ("...hello", &["...", "hello"]),
            ("(hello)", &["(hello", ")"]),
            ("_foo", &["_foo"]),
            ("é中文٣½x", &["é中文", "٣½", "x"]),
            ("\u{A0}a", &["\u{A0}a"]),
            ("\u{3000}中", &["\u{3000}中"]),
            ("e\u{301}t", &["e", "\u{301}t"]),
            ("🙂ok", &["🙂ok"]),
            ("a\u{200B}b", &["a", "\u{200B}b"]),
        ];
        for (text, expected) in table {
            assert_eq!(pieces(text).collect::<Vec<_>>(), *expected, "{text:?}");
        }
        assert_eq!(pieces("").count(), 0);
    }

    proptest! {
        #[test]
        fn pieces_join_to_the_text(text in any::<String>()) {
            prop_assert_eq!(pieces(&text).collect::<String>(), text);
        }
    }
}
