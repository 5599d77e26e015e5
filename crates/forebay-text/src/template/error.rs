//! What can be wrong with a chat template or a conversation.

use std::path::PathBuf;

/// Why a chat template was refused when it was loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Not a regular file, so it was not opened.
    #[error("{} is not a regular file; put the model's own file there", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },
    /// The file begins with a UTF-8 byte order mark.
    #[error("{origin} starts with a byte order mark; save it as UTF-8 without one")]
    ByteOrderMark {
        /// Which file.
        origin: String,
    },
    /// The file is larger than any real template.
    #[error("{origin} is larger than {limit} bytes; check that it is the right file")]
    TooLarge {
        /// Which file.
        origin: String,
        /// The limit in bytes.
        limit: u64,
    },
    /// tokenizer_config.json is not JSON.
    #[error("{origin} is not valid JSON: {source}; fetch it again")]
    Json {
        /// Which file.
        origin: String,
        /// Position and reason.
        source: serde_json::Error,
    },
    /// `chat_template` in tokenizer_config.json has an unknown shape.
    #[error(
        "{origin}: chat_template is {found}, expected a string, or a list with a template named \"default\""
    )]
    BadShape {
        /// Which file.
        origin: String,
        /// What was found.
        found: String,
    },
    /// The template is not UTF-8 text.
    #[error("{origin} is not UTF-8 text at byte {at}; fetch it again")]
    NotText {
        /// Which file.
        origin: String,
        /// Where the text breaks off.
        at: usize,
    },
    /// The template is not valid Jinja.
    #[error(
        "{origin} is not a usable Jinja template: {message}; replace chat_template.jinja, or remove it (and chat_template in \
         tokenizer_config.json) for the built-in one"
    )]
    Syntax {
        /// Which file.
        origin: String,
        /// What the parser said, with the line.
        message: String,
    },
    /// The template composes control tokens out of pieces, so they cannot be told from user text.
    #[error(
        "{origin} puts control tokens together from pieces, which cannot be kept apart from what users type \
         (expected {expected:?}, found {found:?}); replace chat_template.jinja, or remove it (and chat_template \
         in tokenizer_config.json) for the built-in one"
    )]
    ComposedControl {
        /// Which file.
        origin: String,
        /// What the template makes of a test conversation.
        expected: String,
        /// What it makes when its control tokens are marked.
        found: String,
    },
    /// The template writes a control token that the tokenizer does not have as one.
    #[error(
        "{origin} writes {token:?}, which is not a control token of the tokenizer; template and tokenizer.json \
         do not belong together, so fetch both again from the same model"
    )]
    MissingControl {
        /// Which template.
        origin: String,
        /// The first such token in the template.
        token: String,
    },
}

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RenderError {
    /// There is no message.
    #[error("the list of messages is empty; send at least one message")]
    NoMessages,
    /// Text holds U+0000.
    #[error("text may not contain the character U+0000")]
    NulCharacter,
    /// A tool without a name.
    #[error(
        "tool number {index} has no function name; send {{\"type\": \"function\", \"function\": {{\"name\": ...}}}}"
    )]
    BadTool {
        /// Position in the list of tools, from 0.
        index: usize,
    },
    /// The tool choice names a function that is not offered.
    #[error("tool_choice names the function {name:?}, which is not in tools")]
    UnknownTool {
        /// The name.
        name: String,
    },
    /// A tool call is required, but no tools are offered.
    #[error("tool_choice needs tools; send tools or leave tool_choice out")]
    ToolChoiceWithoutTools,
    /// The template itself refused the conversation.
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// What the template said.
        message: String,
    },
    /// The template made nothing of the conversation.
    #[error(
        "{origin} made an empty prompt of this conversation; replace chat_template.jinja, or remove it (and \
         chat_template in tokenizer_config.json) for the built-in one"
    )]
    Empty {
        /// Which template.
        origin: String,
    },
    /// The template does too much work for a conversation of this size.
    #[error(
        "{origin} did not finish within its work limit; send less, or replace chat_template.jinja, or remove it \
         (and chat_template in tokenizer_config.json) for the built-in one"
    )]
    OutOfFuel {
        /// Which template.
        origin: String,
    },
    /// The template failed.
    #[error("{origin} failed: {message}")]
    Failed {
        /// Which template.
        origin: String,
        /// What went wrong, with the line.
        message: String,
    },
    /// The conversation uses nearly all of Unicode's private-use characters; none are left to mark control
    /// tokens with.
    #[error("the conversation uses too many different private-use characters")]
    NoMarkersLeft,
}
