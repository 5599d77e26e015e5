//! Where the user's lines come from: an editor with history on a terminal, plain lines elsewhere.

use std::io::{self, BufRead, IsTerminal, Read, StdinLock};
use std::path::PathBuf;

use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

use crate::console;
use crate::dirs;
use crate::failure::Failure;

/// A longer line is no message.
const MAX_LINE: u64 = 64 << 20;

/// One thing that the user did.
pub enum Input {
    /// A line, without its newline.
    Line(String),
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
    Plain(StdinLock<'static>),
}

impl Lines {
    /// Lines from the terminal if there is one on both sides, else from standard input.
    pub fn open() -> Result<Self, Failure> {
        if !(io::stdin().is_terminal() && io::stdout().is_terminal()) {
            return Ok(Self::Plain(io::stdin().lock()));
        }
        let editor = DefaultEditor::new().map_err(|error| {
            Failure::runtime(format!("cannot use this terminal: {error}; pipe the messages in instead"))
        })?;
        let mut editor = Box::new(editor);
        let history = history_file();
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
            Self::Plain(stdin) => plain_line(stdin),
        }
    }
}

/// Appends to the history file; says once if that cannot be done.
fn keep(editor: &mut DefaultEditor, history: &mut Option<PathBuf>) {
    let Some(path) = history else { return };
    let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
    let saved = folder.map_err(ReadlineError::from).and_then(|()| editor.append_history(path));
    if let Err(error) = saved {
        console::note(&format!("the history cannot be kept in {}: {error}", path.display()));
        *history = None;
    }
}

/// The history belongs to the user, never to a model folder.
fn history_file() -> Option<PathBuf> {
    dirs::data().map(|data| data.join("chat-history"))
}

fn plain_line(stdin: &mut StdinLock<'static>) -> Result<Input, Failure> {
    let mut bytes = Vec::new();
    let read = stdin.take(MAX_LINE).read_until(b'\n', &mut bytes);
    let count = read.map_err(|error| {
        Failure::runtime(format!("cannot read standard input: {error}; check where it comes from"))
    })?;
    if count == 0 {
        return Ok(Input::End);
    }
    while matches!(bytes.last(), Some(b'\n' | b'\r')) {
        bytes.pop();
    }
    Ok(String::from_utf8(bytes).map_or(Input::NotText, Input::Line))
}
