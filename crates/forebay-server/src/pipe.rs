//! From the tokens of an answer to its text: think block, stop strings and tool calls, as they stream.

use std::sync::Arc;

use forebay_engine::session::Token;
use forebay_text::{
    AnswerPart, ReasoningDelta, ReasoningSplitter, StopMatcher, Tokenizer, ToolCallParser, Utf8Stream,
};
use serde_json::{Map, Value};

use crate::ids;

/// A call of a tool.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// Random letters, for the name of the call.
    pub id: String,
    /// The tool.
    pub name: String,
    /// Its arguments.
    pub arguments: Map<String, Value>,
}

/// How likely a token of the content was.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenInfo {
    /// The token, and how likely it and others were.
    pub token: Token,
}

/// What is certain of an answer since the last one of these.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text of the think block.
    pub reasoning: String,
    /// The answer proper and its calls, in order.
    pub parts: Vec<Part>,
    /// Tokens of the answer proper, where log-probabilities were asked for.
    pub tokens: Vec<TokenInfo>,
}

/// A part of the answer proper.
#[derive(Clone, Debug, PartialEq)]
pub enum Part {
    /// Text.
    Text(String),
    /// A call.
    Call(Call),
}

impl Part {
    /// Its text; a call has none.
    pub fn text(&self) -> &str {
        match self {
            Self::Text(text) => text,
            Self::Call(_) => "",
        }
    }
}

impl Delta {
    /// Whether there is nothing to tell.
    pub fn is_empty(&self) -> bool {
        self.reasoning.is_empty() && self.parts.is_empty() && self.tokens.is_empty()
    }

    /// All text of the answer proper.
    pub fn content(&self) -> String {
        self.parts.iter().map(Part::text).collect()
    }

    fn text(&mut self, text: String) {
        if text.is_empty() {
            return;
        }
        match self.parts.last_mut() {
            Some(Part::Text(last)) => last.push_str(&text),
            _ => self.parts.push(Part::Text(text)),
        }
    }
}

/// Takes one answer apart.
pub struct Pipe {
    tokenizer: Arc<Tokenizer>,
    utf8: Utf8Stream,
    /// `None` for the continuation of a text.
    splitter: Option<ReasoningSplitter>,
    /// Looks at the answer proper only: no stop string cuts reasoning short.
    stop: StopMatcher,
    /// `None` where no tools are offered.
    calls: Option<ToolCallParser>,
    made_calls: bool,
    /// Tokens of the think block, its marks included.
    reasoning_tokens: usize,
}

impl Pipe {
    /// A pipe at the beginning of an answer. `thinking` is `None` for the continuation of a text, else whether the prompt
    /// opened the think block.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        thinking: Option<bool>,
        stop: StopMatcher,
        calls: Option<ToolCallParser>,
    ) -> Self {
        let splitter = thinking.map(ReasoningSplitter::new);
        let (made_calls, reasoning_tokens) = (false, 0);
        Self { tokenizer, utf8: Utf8Stream::new(), splitter, stop, calls, made_calls, reasoning_tokens }
    }

    /// Takes the next token.
    pub fn push(&mut self, token: Token) -> Delta {
        let thinking = self.splitter.as_ref().is_some_and(ReasoningSplitter::is_thinking);
        let text = self.utf8.push(self.tokenizer.token_bytes(token.id).unwrap_or_default());
        let mut delta = self.split(&text);
        if thinking || self.splitter.as_ref().is_some_and(ReasoningSplitter::is_thinking) {
            self.reasoning_tokens += 1;
        } else if token.logprobs.is_some() {
            delta.tokens.push(TokenInfo { token });
        }
        delta
    }

    /// Ends the answer. `complete` says whether the model ended it.
    pub fn finish(&mut self, complete: bool) -> Delta {
        let text = self.utf8.finish();
        let mut delta = self.split(&text);
        let last = self.splitter.as_mut().map(ReasoningSplitter::finish).unwrap_or_default();
        delta.reasoning.push_str(&last.reasoning);
        let content = self.stop.push(&last.content) + &self.stop.finish();
        self.content(content, &mut delta);
        if let Some(calls) = &mut self.calls {
            let parts = calls.finish(complete && self.stop.found().is_none());
            self.take(parts, &mut delta);
        }
        delta
    }

    /// Whether a stop string was found: which one.
    pub fn stopped(&self) -> Option<usize> {
        self.stop.found()
    }

    /// Whether there was a call.
    pub fn made_calls(&self) -> bool {
        self.made_calls
    }

    /// Tokens of the think block.
    pub fn reasoning_tokens(&self) -> usize {
        self.reasoning_tokens
    }

    fn split(&mut self, text: &str) -> Delta {
        let ReasoningDelta { reasoning, content } = match &mut self.splitter {
            Some(splitter) => splitter.push(text),
            None => ReasoningDelta { content: text.to_owned(), ..ReasoningDelta::default() },
        };
        let mut delta = Delta { reasoning, ..Delta::default() };
        let content = self.stop.push(&content);
        self.content(content, &mut delta);
        delta
    }

    fn content(&mut self, content: String, delta: &mut Delta) {
        match &mut self.calls {
            None => delta.text(content),
            Some(calls) => {
                let parts = calls.push(&content);
                self.take(parts, delta);
            }
        }
    }

    fn take(&mut self, parts: Vec<AnswerPart>, delta: &mut Delta) {
        for part in parts {
            match part {
                AnswerPart::Text(text) => delta.text(text),
                AnswerPart::Call(call) => {
                    self.made_calls = true;
                    let (id, name, arguments) = (ids::random(), call.name, call.arguments);
                    delta.parts.push(Part::Call(Call { id, name, arguments }));
                }
            }
        }
    }
}
