//! The two streams of a terminal program: results on standard output, everything else on standard error.

use std::io::{self, ErrorKind, IsTerminal, StdoutLock, Write};

use crate::failure::Failure;

/// Standard output. A reader that went away ends the program quietly.
pub struct Output(StdoutLock<'static>);

impl Output {
    /// Takes standard output for this thread.
    pub fn new() -> Self {
        Self(io::stdout().lock())
    }

    /// Writes text so that the reader sees it now.
    pub fn write(&mut self, text: &str) -> Result<(), Failure> {
        self.0.write_all(text.as_bytes()).and_then(|()| self.0.flush()).map_err(|error| match error.kind() {
            ErrorKind::BrokenPipe => Failure::PipeClosed,
            _ => Failure::runtime(format!(
                "cannot write to standard output: {error}; check where it is redirected to"
            )),
        })
    }

    /// Writes one JSON value on one line.
    pub fn json(&mut self, value: &serde_json::Value) -> Result<(), Failure> {
        self.write(&format!("{value}\n"))
    }
}

/// Writes to standard error. Nobody can be told if that fails, so it is not an error.
pub fn diagnose(text: &str) {
    let mut stderr = io::stderr().lock();
    let _ = stderr.write_all(text.as_bytes()).and_then(|()| stderr.flush());
}

/// Text that may quote a file's contents, safe to show: characters other than newlines that steer the terminal, or the
/// order in which it shows others, become `\u{1b}` and the like.
pub fn printable(text: &str) -> String {
    let shown = |c: char| c == '\n' || !(c.is_control() || reorders(c));
    text.chars().map(|c| if shown(c) { c.to_string() } else { c.escape_unicode().to_string() }).collect()
}

/// The same as one line: a name with a newline in it could pretend to be the next line.
pub fn one_line(text: &str) -> String {
    printable(text).replace('\n', "\\u{a}")
}

/// Whether a character has others shown in another order, or breaks lines where no newline is: a name could then look
/// like another one.
fn reorders(c: char) -> bool {
    matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// A line for the user that is not part of the result.
pub fn note(text: &str) {
    diagnose(&format!("note: {}\n", one_line(text)));
}

/// A line saying what went wrong. Library messages may quote file contents with newlines in them.
pub fn error(message: &str) {
    let line: Vec<&str> = message.lines().map(str::trim).filter(|part| !part.is_empty()).collect();
    diagnose(&format!("error: {}\n", printable(&line.join(" "))));
}

/// Whether standard error can show styles and redrawn lines.
pub fn stderr_is_rich() -> bool {
    let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
    io::stderr().is_terminal() && !dumb
}

/// Whether text on standard error may be styled (<https://no-color.org>).
pub fn stderr_is_styled() -> bool {
    stderr_is_rich() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_that_is_shown_steers_the_terminal() {
        assert_eq!(printable("a\x1b[2J\r\x07\u{9b}b\n\u{e9}"), "a\\u{1b}[2J\\u{d}\\u{7}\\u{9b}b\n\u{e9}");
        let reordered = "model-\u{202e}txt.\u{2066}x\u{2069}\u{200f}\u{61c}\u{2028}";
        assert_eq!(printable(reordered), "model-\\u{202e}txt.\\u{2066}x\\u{2069}\\u{200f}\\u{61c}\\u{2028}");
        assert_eq!(one_line("x\nverdict  whole\u{1b}"), "x\\u{a}verdict  whole\\u{1b}");
        // What joins letters is part of words and of names.
        assert_eq!(printable("\u{645}\u{200c}\u{200d}"), "\u{645}\u{200c}\u{200d}");
    }
}
