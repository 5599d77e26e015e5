//! Chat templates: a conversation becomes a prompt.
//!
//! [`ChatTemplate::load`] takes the model's own template (chat_template.jinja, else the one in
//! tokenizer_config.json) and falls back to the built-in GLM-5.2 rendering in [`glm`]. Messages and options are
//! checked and put into one shape first ([`ChatMessage`], [`RenderOptions`]), so both kinds see the same input.

mod clock;
mod error;
pub mod glm;
mod guard;
mod jinja;
mod json;
mod message;
mod options;

pub use error::{RenderError, TemplateError};
pub use message::{ChatMessage, MessageError, Role, ToolCall};
pub use options::{ReasoningEffort, RenderOptions, ToolChoice, UnknownEffort};

use crate::Tokenizer;
use crate::limits::{self, ReadError};
use crate::prompt::RenderedPrompt;
use jinja::JinjaTemplate;
use regex::Regex;
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use std::sync::LazyLock;

static COMMENT: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)\{#.*?#\}").expect("the pattern is a constant of this file"));
static CONTROL_FORM: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"<\|[A-Za-z0-9_]+\|>|\[gMASK\]|<sop>").expect("the pattern is a constant of this file")
});

/// A chat template ready to render. Immutable; share it between threads.
pub struct ChatTemplate {
    origin: String,
    kind: Kind,
}

enum Kind {
    BuiltIn,
    Own(Box<JinjaTemplate>),
}

impl ChatTemplate {
    /// The template of a model folder: chat_template.jinja, else `chat_template` of tokenizer_config.json (a
    /// string, or the entry "default" of a list), else the built-in one.
    ///
    /// Refused when the template writes a control token that `tokenizer` lacks.
    pub fn load(dir: &Path, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        let file = dir.join("chat_template.jinja");
        let config_file = dir.join("tokenizer_config.json");
        let config_origin = config_file.display().to_string();
        let config = match read_optional(&config_file, limits::CONFIG_JSON)? {
            Some(bytes) if limits::starts_with_byte_order_mark(&bytes) => {
                return Err(TemplateError::ByteOrderMark { origin: config_origin });
            }
            Some(bytes) => serde_json::from_slice(&bytes)
                .map_err(|source| TemplateError::Json { origin: config_origin.clone(), source })?,
            None => Value::Null,
        };
        let (source, origin) = match read_optional(&file, limits::TEMPLATE)? {
            Some(bytes) => (text(bytes, &file)?, file.display().to_string()),
            None => match template_in(&config, &config_origin)? {
                Some(source) => (source, config_origin),
                None => {
                    let built_in = Self::built_in();
                    check_controls(glm::CONTROLS, built_in.origin(), tokenizer)?;
                    return Ok(built_in);
                }
            },
        };
        Self::own(&source, &origin, named_tokens(&config), tokenizer)
    }

    /// A template given as Jinja source; `origin` names it in errors.
    pub fn from_source(source: &str, origin: &str, tokenizer: &Tokenizer) -> Result<Self, TemplateError> {
        Self::own(source, origin, Vec::new(), tokenizer)
    }

    /// The built-in GLM-5.2 rendering.
    pub fn built_in() -> Self {
        Self { origin: "the built-in GLM-5.2 template".to_owned(), kind: Kind::BuiltIn }
    }

    fn own(
        source: &str,
        origin: &str,
        names: Vec<(String, String)>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TemplateError> {
        check_controls(control_like(&COMMENT.replace_all(source, "")), origin, tokenizer)?;
        let template = JinjaTemplate::new(source, origin, names, tokenizer)?;
        check_markers(&template, origin, tokenizer)?;
        Ok(Self { origin: origin.to_owned(), kind: Kind::Own(Box::new(template)) })
    }

    /// Where the template came from, for people.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// Whether this is the built-in rendering, not the model's own.
    pub fn is_built_in(&self) -> bool {
        matches!(self.kind, Kind::BuiltIn)
    }

    /// Renders a conversation.
    pub fn render(
        &self,
        messages: &[ChatMessage],
        options: &RenderOptions,
    ) -> Result<RenderedPrompt, RenderError> {
        if messages.is_empty() {
            return Err(RenderError::NoMessages);
        }
        let tools = options.offered_tools()?;
        match &self.kind {
            Kind::BuiltIn => {
                let prompt = glm::render(messages, &tools, options)?;
                if prompt.text().contains('\0') { Err(RenderError::NulCharacter) } else { Ok(prompt) }
            }
            Kind::Own(template) => {
                let prompt = render_own(template, messages, &tools, options)?;
                if prompt.parts().is_empty() {
                    return Err(RenderError::Empty { origin: self.origin.clone() });
                }
                Ok(prompt)
            }
        }
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ChatTemplate").field(&self.origin).finish()
    }
}

/// The model's template knows nothing of a binding tool choice. The sentence goes where the built-in rendering
/// puts it if the template writes the same tools block, else into a system message of its own in front.
fn render_own(
    template: &JinjaTemplate,
    messages: &[ChatMessage],
    tools: &[Value],
    options: &RenderOptions,
) -> Result<RenderedPrompt, RenderError> {
    let mut variables = variables(messages, tools, options);
    let mut prompt = template.render(&variables)?;
    let Some(sentence) = options.tool_choice_sentence() else { return Ok(prompt) };
    if prompt.insert_after(&glm::tools_block(tools)?, &format!("\n\n{sentence}")) {
        return Ok(prompt);
    }
    let instruction = ChatMessage::text(Role::System, sentence).to_context();
    if let Some(Value::Array(messages)) = variables.get_mut("messages") {
        messages.insert(0, instruction);
    }
    template.render(&variables)
}

fn variables(messages: &[ChatMessage], tools: &[Value], options: &RenderOptions) -> Map<String, Value> {
    let mut variables = options.extra.clone();
    let messages = messages.iter().map(ChatMessage::to_context).collect();
    variables.insert("messages".to_owned(), Value::Array(messages));
    // Templates are written for callers that always pass this, null when there are none.
    let tools = if tools.is_empty() { Value::Null } else { Value::Array(tools.to_vec()) };
    variables.insert("tools".to_owned(), tools);
    variables.insert("add_generation_prompt".to_owned(), options.add_generation_prompt.into());
    variables.insert("enable_thinking".to_owned(), options.thinking().into());
    if let Some(effort) = options.reasoning_effort {
        variables.insert("reasoning_effort".to_owned(), effort.name().into());
    }
    variables
}

/// Refuses the first of these texts that is not a control token of the tokenizer: it would reach the model as
/// ordinary text, and the model would not know where a turn begins.
fn check_controls<'t>(
    tokens: impl IntoIterator<Item = &'t str>,
    origin: &str,
    tokenizer: &Tokenizer,
) -> Result<(), TemplateError> {
    let control: HashSet<&str> = tokenizer.control_tokens().map(|(_, content)| content).collect();
    // Added tokens that are content are the tokenizer's choice, but not for the marks of a turn.
    let known = |token: &str| {
        control.contains(token) || (!glm::CONTROLS.contains(&token) && tokenizer.added_id(token).is_some())
    };
    match tokens.into_iter().find(|token| !known(token)) {
        Some(token) => {
            Err(TemplateError::MissingControl { origin: origin.to_owned(), token: token.to_owned() })
        }
        None => Ok(()),
    }
}

/// What a template writes that has the form of the family's control tokens: `<|name|>`, `[gMASK]`, `<sop>`.
fn control_like(source: &str) -> impl Iterator<Item = &str> {
    CONTROL_FORM.find_iter(source).map(|found| found.as_str())
}

/// Renders a few harmless conversations with and without markers. A template that composes control tokens from
/// pieces (`'<|' + role + '|>'`) gives different results and is refused: its tokens would silently become text.
fn check_markers(template: &JinjaTemplate, origin: &str, tokenizer: &Tokenizer) -> Result<(), TemplateError> {
    for (messages, options) in sample_conversations() {
        let variables = variables(&messages, &options.tools, &options);
        // A template may refuse a sample (no tools, say); then there is nothing to compare.
        let Ok(plain) = template.render_unmarked(&variables) else { continue };
        let expected = tokenizer.split_controls(&plain);
        let marked = template.render(&variables);
        if marked.as_ref() != Ok(&expected) {
            let found =
                marked.map_or_else(|error| error.to_string(), |prompt| format!("{:?}", prompt.parts()));
            let expected = format!("{:?}", expected.parts());
            return Err(TemplateError::ComposedControl { origin: origin.to_owned(), expected, found });
        }
    }
    Ok(())
}

fn sample_conversations() -> Vec<(Vec<ChatMessage>, RenderOptions)> {
    let user = ChatMessage::text(Role::User, "Hi");
    let system = ChatMessage::text(Role::System, "Be brief.");
    let answer = ChatMessage::text(Role::Assistant, "Hello");
    let thought = ChatMessage { reasoning_content: Some("Hm.".to_owned()), ..answer.clone() };
    let arguments = Map::from_iter([("city".to_owned(), json!("Roma")), ("days".to_owned(), json!(2))]);
    let call = ToolCall { id: Some("call_1".to_owned()), name: "weather".to_owned(), arguments };
    let calling = ChatMessage { content: None, tool_calls: vec![call], ..answer.clone() };
    let result =
        ChatMessage { tool_call_id: Some("call_1".to_owned()), ..ChatMessage::text(Role::Tool, "sunny") };
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "weather", "description": "The weather", "parameters": parameters});
    let tools = vec![json!({"type": "function", "function": function})];

    let direct = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let thinking = RenderOptions { reasoning_effort: Some(ReasoningEffort::High), ..direct.clone() };
    let with_tools = RenderOptions { tools, ..direct.clone() };
    vec![
        (vec![user.clone()], direct.clone()),
        (vec![user.clone(), answer.clone(), user.clone()], direct),
        (vec![system, user.clone(), thought, user.clone()], thinking),
        (vec![user.clone(), calling, result.clone(), result, answer, user], with_tools),
    ]
}

fn read_optional(path: &Path, limit: u64) -> Result<Option<Vec<u8>>, TemplateError> {
    match limits::read_capped(path, limit) {
        Ok(bytes) => Ok(Some(bytes)),
        Err(ReadError::Io(source)) if source.kind() == ErrorKind::NotFound => Ok(None),
        Err(ReadError::Io(source)) => Err(TemplateError::Io { path: path.to_owned(), source }),
        Err(ReadError::NotAFile) => Err(TemplateError::NotAFile { path: path.to_owned() }),
        Err(ReadError::TooLarge) => {
            Err(TemplateError::TooLarge { origin: path.display().to_string(), limit })
        }
    }
}

fn text(bytes: Vec<u8>, path: &Path) -> Result<String, TemplateError> {
    String::from_utf8(bytes).map_err(|error| TemplateError::NotText {
        origin: path.display().to_string(),
        at: error.utf8_error().valid_up_to(),
    })
}

/// The template inside tokenizer_config.json.
fn template_in(config: &Value, origin: &str) -> Result<Option<String>, TemplateError> {
    let bad = |found: &str| TemplateError::BadShape { origin: origin.to_owned(), found: found.to_owned() };
    match &config["chat_template"] {
        Value::Null => Ok(None),
        Value::String(source) if source.len() as u64 > limits::TEMPLATE => {
            Err(TemplateError::TooLarge { origin: origin.to_owned(), limit: limits::TEMPLATE })
        }
        Value::String(source) => Ok(Some(source.clone())),
        Value::Array(list) => list
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(|source| Some(source.to_owned()))
            .ok_or_else(|| bad("a list without a template named \"default\"")),
        _ => Err(bad("neither a string nor a list")),
    }
}

/// The special tokens that tokenizer_config.json names, for templates that refer to them.
fn named_tokens(config: &Value) -> Vec<(String, String)> {
    ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"]
        .into_iter()
        .filter_map(|name| {
            let token = &config[name];
            let content = token.as_str().or_else(|| token["content"].as_str())?;
            Some((name.to_owned(), content.to_owned()))
        })
        .collect()
}
