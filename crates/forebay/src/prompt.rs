//! Text that the user gives: as an argument, in a file, or on standard input.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use crate::failure::Failure;

/// Longer inputs are refused unread; a token is about four bytes, so no context holds this much.
const MAX_BYTES: u64 = 256 << 20;

/// Where a text came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Argument,
    /// A file or standard input, which usually end with a newline that nobody meant.
    Stream,
}

/// The text given by `argument` (`-` is standard input), by `file`, or piped in. `what` names it in errors:
/// "prompt".
pub fn read(
    argument: Option<&str>,
    file: Option<&Path>,
    what: &'static str,
) -> Result<(String, Source), Failure> {
    let (text, source) = match (argument, file) {
        (Some("-"), _) => (read_stdin(what)?, Source::Stream),
        (Some(text), _) => (text.to_owned(), Source::Argument),
        (None, Some(path)) => (read_file(path)?, Source::Stream),
        (None, None) if io::stdin().is_terminal() => {
            return Err(Failure::usage(format!(
                "there is no {what}; give it as an argument, with --file, or through a pipe"
            )));
        }
        (None, None) => (read_stdin(what)?, Source::Stream),
    };
    if text.is_empty() {
        return Err(Failure::usage(format!("the {what} is empty; give some text")));
    }
    Ok((text, source))
}

/// A text file, read whole.
pub fn read_file(path: &Path) -> Result<String, Failure> {
    let file = File::open(path).map_err(|error| {
        Failure::usage(format!("cannot open {}: {error}; check the path", path.display()))
    })?;
    read_text(file, &path.display().to_string())
}

fn read_stdin(what: &str) -> Result<String, Failure> {
    read_text(io::stdin().lock(), &format!("the {what} on standard input"))
}

fn read_text(from: impl Read, name: &str) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|error| {
        Failure::usage(format!("cannot read {name}: {error}; check that it is a text file"))
    })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(Failure::usage(format!("{name} is longer than {MAX_BYTES} bytes; give a shorter text")));
    }
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        Failure::usage(format!("{name} is not UTF-8 text: byte {at} is wrong; convert it to UTF-8"))
    })
}

/// `text` without one newline at its end.
pub fn without_last_newline(text: &str) -> &str {
    let text = text.strip_suffix('\n').unwrap_or(text);
    text.strip_suffix('\r').unwrap_or(text)
}
