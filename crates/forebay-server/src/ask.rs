//! What a request asks for, whatever interface it came through, and what becomes of it before the engine sees it.

use std::sync::Arc;

use axum::http::StatusCode;
use forebay_core::Constraint;
use forebay_engine::{Priority, Sampling};
use forebay_grammar::{Matcher, Reasoned};
use forebay_text::reasoning::{THINK_CLOSE, THINK_OPEN};
use forebay_text::template::{ReasoningEffort, ToolChoice};
use forebay_text::tokenizer::EncodeError;
use forebay_text::{ChatMessage, RenderOptions, RenderedPrompt, StopMatcher, ToolCallParser};
use serde_json::{Map, Value};

use crate::app::App;
use crate::body::Share;
use crate::error::ApiError;
use crate::grammars::Format;
use crate::pipe::Pipe;
use crate::tools::Tools;

/// Most answers to one request.
pub const MAX_CHOICES: usize = 16;

/// What the answer goes on from.
#[derive(Clone, Debug)]
pub enum Input {
    /// A conversation.
    Chat(Vec<ChatMessage>),
    /// A text, to the letter.
    Text(String),
    /// Tokens.
    Ids(Vec<u32>),
}

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    /// What the answer goes on from.
    pub input: Input,
    /// Whether the model thinks; decides over `effort`.
    pub think: Option<bool>,
    /// How much it thinks.
    pub effort: Option<ReasoningEffort>,
    /// Variables for the model's own template.
    pub extra: Map<String, Value>,
    /// What the model may call.
    pub tools: Tools,
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Texts in front of which an answer ends.
    pub stop: Vec<String>,
    /// What an answer has to be.
    pub format: Format,
    /// Answers that are wanted.
    pub choices: usize,
    /// What comes first.
    pub priority: Priority,
    /// Held until the request is in tokens.
    pub share: Share,
}

impl Ask {
    /// A request that leaves everything to the server.
    pub fn new(input: Input, app: &App) -> Self {
        let mut sampling = app.model.sampling.clone();
        sampling.seed = crate::ids::seed();
        Self {
            input,
            think: None,
            effort: None,
            extra: Map::new(),
            tools: Tools { parallel: true, ..Tools::default() },
            max_tokens: app.settings.max_tokens,
            sampling,
            stop: Vec::new(),
            format: Format::Text,
            choices: 1,
            priority: Priority::Interactive,
            share: Share::default(),
        }
    }
}

/// A request in tokens.
pub struct Prepared {
    /// The prompt.
    pub ids: Vec<u32>,
    /// The prompt as the template made it; `None` for the continuation of a text.
    pub rendered: Option<RenderedPrompt>,
    /// Whether the prompt opened a think block; `None` for the continuation of a text.
    pub thinking: Option<bool>,
    /// Most tokens of an answer.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Answers that are wanted.
    pub choices: usize,
    /// What comes first.
    pub priority: Priority,
    stop: StopMatcher,
    tools: Tools,
    matcher: Option<Matcher>,
    think_close: Option<u32>,
}

impl Prepared {
    /// Renders, encodes and compiles. Takes time: not for the threads that serve sockets.
    pub fn of(ask: Ask, app: &App) -> Result<Self, ApiError> {
        let tokenizer = &app.model.tokenizer;
        let stop = StopMatcher::new(ask.stop.iter().cloned())?;
        ask.sampling.check()?;
        ask.sampling.check_tokens(tokenizer.vocab_size())?;
        let matcher = matcher(&ask, app)?;
        let (ids, rendered) = encode(&ask, app)?;
        let thinking = rendered.as_ref().map(|prompt| prompt.text().trim_end().ends_with(THINK_OPEN));
        if ids.is_empty() {
            return Err(ApiError::bad("the prompt is empty; send some text"));
        }
        Ok(Self {
            ids,
            rendered,
            thinking,
            max_tokens: ask.max_tokens,
            sampling: ask.sampling,
            choices: ask.choices,
            priority: ask.priority,
            stop,
            tools: ask.tools,
            matcher,
            think_close: tokenizer.added_id(THINK_CLOSE),
        })
    }

    /// Where the text of one answer comes from.
    pub fn pipe(&self, app: &App) -> Pipe {
        let offered = self.tools.offered();
        let calls = (!offered.is_empty())
            .then(|| ToolCallParser::new(offered.into_iter().map(|tool| tool.types()).collect()));
        Pipe::new(Arc::clone(&app.model.tokenizer), self.thinking, self.stop.clone(), calls)
    }

    /// The limit of one answer: behind its think block, if it has one.
    pub fn constraint(&self) -> Option<Box<dyn Constraint + Send>> {
        let matcher = self.matcher.clone()?;
        Some(match (self.thinking, self.think_close) {
            (Some(true), Some(close)) => Box::new(Reasoned::new(matcher, close)),
            _ => Box::new(matcher),
        })
    }
}

/// What limits the answers, compiled.
fn matcher(ask: &Ask, app: &App) -> Result<Option<Matcher>, ApiError> {
    let tokenizer = &app.model.tokenizer;
    let schema = ask.format.schema();
    let alone = match &schema {
        // Compiled by itself, a schema's fault is found with its place.
        Some(schema) => {
            Some(app.grammars.schema(schema, tokenizer).map_err(|error| error.at("response_format"))?)
        }
        None => None,
    };
    let calls = !ask.tools.offered().is_empty() && (!ask.tools.are_free() || schema.is_some());
    if !calls {
        return Ok(alone);
    }
    for tool in ask.tools.offered().into_iter().filter(|tool| tool.parameters.is_object()) {
        app.grammars.schema(&tool.parameters, tokenizer).map_err(|error| {
            let message = format!("the parameters of tool {}: {}", tool.name, error.message);
            ApiError { message, ..error }.at("tools")
        })?;
    }
    let document = schema.as_ref().filter(|_| ask.tools.choice == ToolChoice::Auto);
    let grammar = ask.tools.grammar(document, tokenizer)?;
    app.grammars.lark(&grammar, tokenizer).map(Some).map_err(|error| error.at("tools"))
}

/// The ids of the prompt, and the prompt.
fn encode(ask: &Ask, app: &App) -> Result<(Vec<u32>, Option<RenderedPrompt>), ApiError> {
    let tokenizer = &app.model.tokenizer;
    let messages = match &ask.input {
        Input::Ids(ids) => return Ok((ids.clone(), None)),
        Input::Text(text) => return Ok((encode_text(text, app)?, None)),
        Input::Chat(messages) => messages,
    };
    let think = ask.think.or_else(|| (ask.effort.is_none() && app.settings.think).then_some(true));
    let options = RenderOptions {
        tools: ask.tools.all.iter().map(|tool| tool.for_template()).collect(),
        tool_choice: ask.tools.choice.clone(),
        enable_thinking: think,
        reasoning_effort: ask.effort,
        add_generation_prompt: true,
        extra: ask.extra.clone(),
    };
    let rendered = app.model.template.render(messages, &options)?;
    let ids = app.answers().encode(&rendered, tokenizer).map_err(unencodable)?;
    Ok((ids, Some(rendered)))
}

/// The ids of a client's text: no control token comes out of it.
pub fn encode_text(text: &str, app: &App) -> Result<Vec<u32>, ApiError> {
    let mut prompt = RenderedPrompt::new();
    prompt.push_text(text);
    app.model.tokenizer.encode_rendered(&prompt).map_err(unencodable)
}

fn unencodable(error: EncodeError) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}
