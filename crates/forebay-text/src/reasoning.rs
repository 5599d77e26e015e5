//! Splits an answer into its reasoning (inside the think block) and its content, as it streams.

/// Opens a think block.
pub const THINK_OPEN: &str = "<think>";
/// Closes a think block.
pub const THINK_CLOSE: &str = "</think>";

/// What one chunk of answer text adds to each side; either may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReasoningDelta {
    /// Text inside the think block.
    pub reasoning: String,
    /// Text of the answer proper.
    pub content: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nothing seen yet; an opening mark here starts a think block.
    Start,
    Thinking,
    Answering,
}

/// Streaming splitter. Only the first think block counts: marks after it are content, and so is an opening mark
/// anywhere but at the very start. The marks themselves are dropped, no other character is.
#[derive(Debug, Clone)]
pub struct ReasoningSplitter {
    place: Place,
    /// The beginning of a mark that may still be completed.
    held: String,
}

impl ReasoningSplitter {
    /// A splitter for one answer. `inside` says whether the prompt ended in an open think block (thinking on).
    pub fn new(inside: bool) -> Self {
        Self { place: if inside { Place::Thinking } else { Place::Start }, held: String::new() }
    }

    /// Whether the answer is inside its think block now (for counting reasoning tokens).
    pub fn is_thinking(&self) -> bool {
        self.place == Place::Thinking
    }

    /// Takes more text. A possible beginning of the awaited mark is held back until it is decided.
    pub fn push(&mut self, text: &str) -> ReasoningDelta {
        let mut delta = ReasoningDelta::default();
        let mut rest = std::mem::take(&mut self.held) + text;
        if self.place == Place::Start {
            if let Some(after) = rest.strip_prefix(THINK_OPEN) {
                rest = after.to_owned();
                self.place = Place::Thinking;
            } else if THINK_OPEN.starts_with(rest.as_str()) {
                self.held = rest;
                return delta;
            } else {
                self.place = Place::Answering;
            }
        }
        if self.place == Place::Thinking {
            match rest.split_once(THINK_CLOSE) {
                Some((reasoning, content)) => {
                    delta.reasoning.push_str(reasoning);
                    rest = content.to_owned();
                    self.place = Place::Answering;
                }
                None => {
                    self.held = rest.split_off(rest.len() - held_back(&rest, THINK_CLOSE));
                    delta.reasoning.push_str(&rest);
                    return delta;
                }
            }
        }
        delta.content.push_str(&rest);
        delta
    }

    /// Ends the answer: what was held back belongs to the side it was found in.
    pub fn finish(&mut self) -> ReasoningDelta {
        let held = std::mem::take(&mut self.held);
        match self.place {
            Place::Thinking => ReasoningDelta { reasoning: held, ..Default::default() },
            Place::Start | Place::Answering => ReasoningDelta { content: held, ..Default::default() },
        }
    }
}

/// Length of the longest end of `text` that is a proper beginning of `mark` (an ASCII string).
fn held_back(text: &str, mark: &str) -> usize {
    (1..mark.len()).rev().find(|&n| text.as_bytes().ends_with(&mark.as_bytes()[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split(inside: bool, chunks: &[&str]) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(inside);
        let (mut reasoning, mut content) = (String::new(), String::new());
        for delta in chunks.iter().map(|chunk| splitter.push(chunk)).collect::<Vec<_>>() {
            reasoning += &delta.reasoning;
            content += &delta.content;
        }
        let last = splitter.finish();
        (reasoning + &last.reasoning, content + &last.content)
    }

    fn owned(pair: (&str, &str)) -> (String, String) {
        (pair.0.to_owned(), pair.1.to_owned())
    }

    #[test]
    fn splits_at_the_first_closing_mark() {
        assert_eq!(split(true, &["I think</think>Sure."]), owned(("I think", "Sure.")));
        assert_eq!(split(true, &["I </th", "ink", ">a</think>b"]), owned(("I ", "a</think>b")));
        assert_eq!(split(true, &["never closed </thi"]), owned(("never closed </thi", "")));
        assert_eq!(split(true, &["<</think>x"]), owned(("<", "x")));
    }

    #[test]
    fn without_thinking_everything_is_content_unless_it_opens_a_block_first() {
        assert_eq!(split(false, &["2+2=4."]), owned(("", "2+2=4.")));
        assert_eq!(split(false, &["a</think>b"]), owned(("", "a</think>b")));
        assert_eq!(split(false, &["<th", "ink>r</think>c"]), owned(("r", "c")));
        assert_eq!(split(false, &["<th"]), owned(("", "<th")));
        assert_eq!(split(false, &["a<think>b</think>c"]), owned(("", "a<think>b</think>c")));
    }

    #[test]
    fn text_flows_as_soon_as_it_cannot_be_a_mark() {
        let mut splitter = ReasoningSplitter::new(true);
        assert_eq!(splitter.push("abc").reasoning, "abc");
        assert_eq!(splitter.push("<").reasoning, "");
        assert_eq!(splitter.push("b>").reasoning, "<b>");
        assert!(splitter.is_thinking());
        assert_eq!(splitter.push("</think>d").content, "d");
        assert!(!splitter.is_thinking());
        assert_eq!(splitter.push("<").content, "<");
    }

    proptest! {
        /// Chunking never changes the outcome, and nothing but one mark disappears.
        #[test]
        fn chunking_does_not_matter(
            tokens in proptest::collection::vec(
                proptest::sample::select(vec!["</think>", "</thi", "nk>", "<", "<think>", "é", "x", " "]), 0..12),
            inside: bool,
            size in 1usize..5,
        ) {
            let text = tokens.concat();
            let letters: Vec<String> = text.chars().map(String::from).collect();
            let chunks: Vec<String> = letters.chunks(size).map(|chunk| chunk.concat()).collect();
            let chunks: Vec<&str> = chunks.iter().map(String::as_str).collect();
            let whole = split(inside, &[&text]);
            prop_assert_eq!(&split(inside, &chunks), &whole);
            if inside {
                let expected = text.split_once("</think>").unwrap_or((&text, ""));
                prop_assert_eq!(whole, owned(expected));
            }
        }
    }
}
