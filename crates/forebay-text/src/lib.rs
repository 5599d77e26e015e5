//! Strings at the edge: tokenizer, chat template, stop set, incremental decoding.
//!
//! The way in: messages -> [`template::ChatTemplate`] -> [`prompt::RenderedPrompt`] (which spans are
//! control tokens, which are text) -> [`tokenizer::Tokenizer::encode_rendered`] -> ids. The way out: ids
//! -> [`tokenizer::Tokenizer::token_bytes`] -> [`stream::Utf8Stream`] -> [`reasoning::ReasoningSplitter`],
//! until an id is in the [`stops::StopSet`].
//!
//! Behind the think block, [`tool_calls::ToolCallParser`] finds the calls of an answer.
//!
//! Answers that come back as text in a later prompt get the ids back that they were generated with: [`answers`].
//!
//! User text can never become a control token: see [`prompt`] for how that holds by construction.

pub mod answers;
pub mod prompt;
pub mod reasoning;
pub mod stop_strings;
pub mod stops;
pub mod stream;
pub mod template;
pub mod tokenizer;
pub mod tool_calls;

mod limits;

pub use answers::{AnswerIds, EncodedPrompt, Turn};
pub use prompt::{PromptPart, RenderedPrompt};
pub use reasoning::{ReasoningDelta, ReasoningSplitter};
pub use stop_strings::{StopMatcher, StopStringError};
pub use stops::StopSet;
pub use stream::Utf8Stream;
pub use template::{ChatMessage, ChatTemplate, RenderOptions};
pub use tokenizer::Tokenizer;
pub use tool_calls::{AnswerPart, ParsedCall, ToolCallParser, ToolTypes};
