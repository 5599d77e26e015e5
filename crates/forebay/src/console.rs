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

/// Text that may quote a file's contents, safe to show: control characters other than newlines, which could
/// steer the terminal, become `\u{1b}` and the like.
pub fn printable(text: &str) -> String {
    let shown = |c: char| c == '\n' || !c.is_control();
    text.chars().map(|c| if shown(c) { c.to_string() } else { c.escape_unicode().to_string() }).collect()
}

/// A line for the user that is not part of the result.
pub fn note(text: &str) {
    diagnose(&format!("note: {}\n", printable(text)));
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
    }
}
