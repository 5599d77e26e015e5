//! Text that the user gives: as an argument, in a file, or on standard input.

use std::fs::File;
use std::io::{self, IsTerminal, Read};
use std::path::Path;

use forebay_io::file::open_regular;
use forebay_text::Tokenizer;

use crate::failure::Failure;
use crate::outputs::is_stream;

/// Longer texts and lists of ids are refused unread: what they take lies outside the memory plan.
const MAX_BYTES: u64 = 16 << 20;

/// Tokens longer than this (runs of spaces or dashes, in some vocabularies) do not raise a limit: no text is
/// made of them alone.
const LONGEST_TOKEN: u64 = 256;

/// The most that is read of a text.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    /// Bytes.
    pub bytes: u64,
    /// The context that holds no more, in tokens; `None` if there is another reason.
    pub context: Option<usize>,
}

impl Limit {
    /// The limit of what has nothing to do with a context.
    pub const FILE: Self = Self { bytes: MAX_BYTES, context: None };

    /// What fits into `context` tokens if all are as long as the tokenizer's longest. A longer text is known not
    /// to fit before the memory for encoding it is spent.
    pub fn of_context(context: usize, tokenizer: &Tokenizer) -> Self {
        let ids = 0..u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let longest = ids.filter_map(|id| tokenizer.token_bytes(id)).map(<[u8]>::len).max().unwrap_or(0);
        let longest = (longest as u64).clamp(1, LONGEST_TOKEN);
        Self { bytes: (context as u64).saturating_mul(longest), context: Some(context) }
    }

    /// Refuses a text of `bytes` bytes (or more) that is longer.
    pub fn check(self, bytes: usize, name: &str) -> Result<(), Failure> {
        if bytes as u64 <= self.bytes {
            return Ok(());
        }
        let (limit, why) = (self.bytes, self.context);
        Err(Failure::usage(match why {
            Some(context) => format!(
                "{name} is longer than {limit} bytes, and a context of {context} tokens cannot hold more; shorten it or raise --context"
            ),
            None => format!("{name} is longer than {limit} bytes; give a shorter one"),
        }))
    }
}

/// Where a text came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The command line.
    Argument,
    /// A file or standard input, which usually end with a newline that nobody meant.
    Stream,
}

/// The text given by `argument` (`-` is standard input), by `file`, or piped in. `what` names it in errors:
/// "prompt". `limit` is asked when there is something to read.
pub fn read(
    argument: Option<&str>,
    file: Option<&Path>,
    what: &'static str,
    limit: impl FnOnce() -> Result<Limit, Failure>,
) -> Result<(String, Source), Failure> {
    let (text, source) = match (argument, file) {
        (Some("-"), _) => (read_stdin(what, limit()?)?, Source::Stream),
        (Some(text), _) => {
            limit()?.check(text.len(), &format!("the {what}"))?;
            (text.to_owned(), Source::Argument)
        }
        (None, Some(path)) => {
            let file = open(path)?;
            (read_text(file, &path.display().to_string(), limit()?)?, Source::Stream)
        }
        (None, None) if io::stdin().is_terminal() => {
            return Err(Failure::usage(format!(
                "there is no {what}; give it as an argument, with --file, or through a pipe"
            )));
        }
        (None, None) => (read_stdin(what, limit()?)?, Source::Stream),
    };
    if text.is_empty() {
        return Err(Failure::usage(format!("the {what} is empty; give some text")));
    }
    Ok((text, source))
}

/// A text file, read whole.
pub fn read_file(path: &Path) -> Result<String, Failure> {
    read_text(open(path)?, &path.display().to_string(), Limit::FILE)
}

/// Opens a file that was named to be read. A pipe is opened only if the shell has done so already, as in
/// `--file <(command)`: any other might never have a writer.
pub fn open(path: &Path) -> Result<File, Failure> {
    let opened = if is_stream(path) { File::open(path) } else { open_regular(path) };
    opened.map_err(|error| Failure::usage(format!("cannot open {}: {error}; check the path", path.display())))
}

fn read_stdin(what: &str, limit: Limit) -> Result<String, Failure> {
    read_text(io::stdin().lock(), &format!("the {what} on standard input"), limit)
}

fn read_text(from: impl Read, name: &str, limit: Limit) -> Result<String, Failure> {
    let mut bytes = Vec::new();
    from.take(limit.bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(|error| {
        Failure::usage(format!("cannot read {name}: {error}; check that it is a text file"))
    })?;
    limit.check(bytes.len(), name)?;
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
