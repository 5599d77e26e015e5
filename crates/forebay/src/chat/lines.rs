//! Where the user's lines come from: an editor with history on a terminal, plain lines elsewhere.

use std::fmt::Display;
use std::io::{self, BufRead, IsTerminal, Read, StdinLock};
use std::path::{Path, PathBuf};

use forebay_io::file::check_irregular;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::console;
use crate::dirs;
use crate::failure::Failure;

/// Commands may have this many bytes even where the context holds no message as long.
const COMMAND: u64 = 64 << 10;
/// A history of more bytes is none: an editor keeps a hundred lines.
const MAX_HISTORY: u64 = 16 << 20;

/// One thing that the user did.
pub enum Input {
    /// A line, without its newline.
    Line(String),
    /// A line with more bytes than any message or command may have; its end has been skipped.
    TooLong,
    /// A line that is not text.
    NotText,
    /// Ctrl-C at the prompt: the line is given up.
    Abandoned,
    /// Ctrl-D, or the end of the file.
    End,
}

/// A source of lines.
pub enum Lines {
    /// A terminal.
    Editor {
        /// The line editor.
        editor: Box<DefaultEditor>,
        /// Where its history is kept, if there is a place for it.
        history: Option<PathBuf>,
    },
    /// A file or a pipe.
    Plain {
        /// Standard input.
        stdin: StdinLock<'static>,
        /// The longest line in bytes.
        longest: u64,
    },
}

impl Lines {
    /// Lines from the terminal if there is one on both sides, else from standard input, of which a line with
    /// much more than `message` bytes is never in memory.
    pub fn open(message: u64) -> Result<Self, Failure> {
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Self::Plain { stdin: io::stdin().lock(), longest: message.max(COMMAND) });
        }
        let editor = DefaultEditor::new().map_err(|error| {
            Failure::runtime(format!("cannot use this terminal: {error}; pipe the messages in instead"))
        })?;
        let mut editor = Box::new(editor);
        let history = history_file().filter(|path| match check_history(path) {
            Ok(()) => true,
            Err(error) => {
                cannot_keep(path, &error);
                false
            }
        });
        if let Some(path) = &history {
            // There is none at the first start.
            let _ = editor.load_history(path);
        }
        Ok(Self::Editor { editor, history })
    }

    /// Whether a person is typing.
    pub fn is_interactive(&self) -> bool {
        matches!(self, Self::Editor { .. })
    }

    /// Waits for the next line.
    pub fn next(&mut self) -> Result<Input, Failure> {
        match self {
            Self::Editor { editor, history } => match editor.readline("> ") {
                Ok(line) => {
                    if !line.trim().is_empty() && editor.add_history_entry(line.as_str()).unwrap_or(false) {
                        keep(editor, history);
                    }
                    Ok(Input::Line(line))
                }
                Err(ReadlineError::Eof) => Ok(Input::End),
                Err(ReadlineError::Interrupted) => Ok(Input::Abandoned),
                Err(error) => Err(Failure::runtime(format!(
                    "cannot read from the terminal: {error}; pipe the messages in instead"
                ))),
            },
            Self::Plain { stdin, longest } => plain_line(stdin, *longest).map_err(|error| {
                Failure::runtime(format!("cannot read standard input: {error}; check where it comes from"))
            }),
        }
    }
}

/// Appends to the history file; says once if that cannot be done.
fn keep(editor: &mut DefaultEditor, history: &mut Option<PathBuf>) {
    let Some(path) = history else { return };
    let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let saved = folder.map_err(ReadlineError::from).and_then(|()| editor.append_history(path));
    if let Err(error) = saved {
        cannot_keep(path, &error);
        *history = None;
    }
}

fn cannot_keep(path: &Path, error: &dyn Display) {
    console::note(&format!("the history cannot be kept in {}: {error}", path.display()));
}

/// Whether the file of the history may be read: opening a pipe would wait for its other end.
fn check_history(path: &Path) -> io::Result<()> {
    check_irregular(path)?;
    match std::fs::metadata(path).is_ok_and(|found| found.len() > MAX_HISTORY) {
        true => Err(io::Error::other(format!("it is longer than {MAX_HISTORY} bytes; remove it"))),
        false => Ok(()),
    }
}

/// The history belongs to the user, never to a model folder.
fn history_file() -> Option<PathBuf> {
    dirs::data().map(|data| data.join("chat-history"))
}

fn plain_line(stdin: &mut impl BufRead, longest: u64) -> io::Result<Input> {
    let mut bytes = Vec::new();
    // Room for the newline, which may have two characters.
    let count = stdin.take(longest.saturating_add(2)).read_until(b'\n', &mut bytes)?;
    if count == 0 {
        return Ok(Input::End);
    }
    let complete = bytes.ends_with(b"\n");
    while matches!(bytes.last(), Some(b'\n' | b'\r')) {
        bytes.pop();
    }
    if bytes.len() as u64 > longest {
        if !complete {
            stdin.skip_until(b'\n')?;
        }
        return Ok(Input::TooLong);
    }
    Ok(String::from_utf8(bytes).map_or(Input::NotText, Input::Line))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_too_long_is_skipped_to_its_end() {
        let mut input = &b"1234\r\n12345\n1234567890\n\xff\n12"[..];
        let mut seen = Vec::new();
        loop {
            seen.push(match plain_line(&mut input, 4).unwrap() {
                Input::Line(line) => line,
                Input::TooLong => "too long".to_owned(),
                Input::NotText => "not text".to_owned(),
                Input::Abandoned => unreachable!("only at a terminal"),
                Input::End => break,
            });
        }
        assert_eq!(seen, ["1234", "too long", "too long", "not text", "12"]);
    }
}
