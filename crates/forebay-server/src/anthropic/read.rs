//! Reading requests.

use forebay_text::ChatMessage;
use forebay_text::template::{ReasoningEffort, Role, ToolCall, ToolChoice};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::ask::{Ask, Input};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::params;
use crate::tools::{self, Tool, Tools};

/// A budget for thoughts from which on the model is told to think as much as it can.
const LARGE_BUDGET: i64 = 16_384;

/// A request, and how its answer is wanted.
pub struct Request {
    /// What is asked.
    pub ask: Ask,
    /// Whether the answer is sent as it grows.
    pub streams: bool,
}

impl Request {
    /// Reads the body of a request; `answers` says whether an answer is wanted, or a count only.
    pub fn read(body: Map<String, Value>, app: &App, answers: bool) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let system = fields.value("system").map(|system| text_blocks("system", system)).transpose()?;
        let given =
            fields.list("messages")?.ok_or_else(|| ApiError::param("messages", "messages is missing"))?;
        let mut messages: Vec<ChatMessage> = system
            .filter(|text| !text.is_empty())
            .map(|text| ChatMessage::text(Role::System, text))
            .into_iter()
            .collect();
        for (at, message) in given.into_iter().enumerate() {
            add_message(&mut messages, &format!("messages[{at}]"), message)?;
        }
        match messages.last().map(|message| message.role) {
            None | Some(Role::System) => {
                return Err(ApiError::param("messages", "messages is empty; send at least one message"));
            }
            Some(Role::Assistant) => {
                let message = "the last message is the assistant's: going on from half an answer is not \
                    supported; end with a message of the user";
                return Err(ApiError::param("messages", message).code("unsupported_parameter"));
            }
            Some(_) => {}
        }
        let mut ask = Ask::new(Input::Chat(messages), app);
        let all = fields.list("tools")?.unwrap_or_default();
        let all = all.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
        let (choice, parallel) = tool_choice(&mut fields)?;
        ask.tools = Tools::new(all, choice, parallel, &tools::ANTHROPIC)?;
        let most = fields.count("max_tokens", 1)?;
        thinking(&mut fields, &mut ask, most)?;
        if answers {
            ask.max_tokens =
                Some(most.ok_or_else(|| ApiError::param("max_tokens", "max_tokens is missing"))?);
            let temperature = fields.number("temperature", 0.0..=2.0)?;
            ask.sampling.temperature = temperature.unwrap_or(ask.sampling.temperature);
            ask.sampling.top_p = params::top_p(&mut fields)?.unwrap_or(ask.sampling.top_p);
            if let Some(top_k) = fields.integer("top_k", 0..=i64::MAX)? {
                ask.sampling.top_k = top_k as usize;
            }
            params::stop(&mut fields, "stop_sequences", &mut ask)?;
        }
        let streams = answers && fields.bool("stream")?.unwrap_or(false);
        fields.object("metadata")?;
        params::cache_control(&mut fields)?;
        fields.only("service_tier", &[json!("auto"), json!("standard_only")], "there is one tier")?;
        fields.finish()?;
        Ok(Self { ask, streams })
    }
}

fn thinking(fields: &mut Fields, ask: &mut Ask, most: Option<usize>) -> Result<(), ApiError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(()) };
    let mut thinking = Fields::within("thinking", thinking);
    let kinds = [("enabled", true), ("disabled", false), ("adaptive", true)];
    let wanted = thinking.one_of("type", &kinds)?;
    ask.think = Some(wanted.ok_or_else(|| ApiError::param("thinking.type", "thinking.type is missing"))?);
    if let Some(budget) = thinking.integer("budget_tokens", 1..=i64::MAX)? {
        if most.is_some_and(|most| budget >= most as i64) {
            let message =
                "thinking.budget_tokens must be less than max_tokens, as thoughts are part of the answer";
            return Err(ApiError::param("thinking.budget_tokens", message));
        }
        let large = budget >= LARGE_BUDGET;
        ask.effort = Some(if large { ReasoningEffort::Xhigh } else { ReasoningEffort::High });
    }
    thinking.finish()
}

fn tool((at, value): (usize, Value)) -> Result<Tool, ApiError> {
    let place = format!("tools[{at}]");
    let mut fields = Fields::of(&place, value)?;
    if let Some(kind) = fields.string("type")?.filter(|kind| kind != "custom") {
        return Err(wrong(&format!("{place}.type"), "custom (a tool of your own)", &kind.into()));
    }
    params::cache_control(&mut fields)?;
    let (name, description) = (fields.required_string("name")?, fields.string("description")?);
    let (schema, strict) = (fields.required("input_schema")?, fields.bool("strict")?.unwrap_or(false));
    fields.finish()?;
    Tool::new(&place, name, description, Some(schema), strict, &tools::ANTHROPIC)
}

fn tool_choice(fields: &mut Fields) -> Result<(ToolChoice, bool), ApiError> {
    let Some(choice) = fields.object("tool_choice")? else { return Ok((ToolChoice::Auto, true)) };
    let mut choice = Fields::within("tool_choice", choice);
    let kind = choice.required_string("type")?;
    let found = match kind.as_str() {
        "auto" => ToolChoice::Auto,
        "any" => ToolChoice::Required,
        "none" => ToolChoice::None,
        "tool" => ToolChoice::Function(choice.required_string("name")?),
        _ => return Err(wrong("tool_choice.type", "auto, any, tool or none", &kind.into())),
    };
    let parallel = !choice.bool("disable_parallel_tool_use")?.unwrap_or(false);
    choice.finish()?;
    Ok((found, parallel))
}

/// A text, or blocks of text.
fn text_blocks(place: &str, value: Value) -> Result<String, ApiError> {
    match value {
        Value::String(text) => Ok(text),
        Value::Array(blocks) => {
            let mut all = String::new();
            for (at, block) in blocks.into_iter().enumerate() {
                let place = format!("{place}[{at}]");
                let mut block = Fields::of(&place, block)?;
                match block.required_string("type")?.as_str() {
                    "text" => all += &text_of(&mut block)?,
                    other => return Err(wrong(&format!("{place}.type"), "text", &other.into())),
                }
                block.finish()?;
            }
            Ok(all)
        }
        other => Err(wrong(place, "a text or a list of text blocks", &other)),
    }
}

fn text_of(block: &mut Fields) -> Result<String, ApiError> {
    params::cache_control(block)?;
    block.only("citations", &[json!([])], "the model reads text")?;
    block.required_string("text")
}

/// Adds a message, as one of ours or as several: results of tools are messages of their own here.
fn add_message(messages: &mut Vec<ChatMessage>, place: &str, message: Value) -> Result<(), ApiError> {
    let mut fields = Fields::of(place, message)?;
    let roles = [("user", Role::User), ("assistant", Role::Assistant), ("system", Role::System)];
    let role = fields.one_of("role", &roles)?;
    let role =
        role.ok_or_else(|| ApiError::param(format!("{place}.role"), format!("{place}.role is missing")))?;
    let content = fields.required("content")?;
    fields.finish()?;
    let place = format!("{place}.content");
    let blocks = match content {
        Value::String(text) => {
            messages.push(ChatMessage::text(role, text));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        other => return Err(wrong(&place, "a text or a list of blocks", &other)),
    };
    let mut own = ChatMessage { content: None, ..ChatMessage::text(role, "") };
    for (at, block) in blocks.into_iter().enumerate() {
        let place = format!("{place}[{at}]");
        let mut block = Fields::of(&place, block)?;
        let kind = block.required_string("type")?;
        match (kind.as_str(), role) {
            ("text", _) => {
                let text = text_of(&mut block)?;
                own.content.get_or_insert_default().push_str(&text);
            }
            ("thinking", Role::Assistant) => {
                let thought = block.required_string("thinking")?;
                block.string("signature")?;
                own.reasoning_content.get_or_insert_default().push_str(&thought);
            }
            ("tool_use", Role::Assistant) => own.tool_calls.push(tool_use(&mut block)?),
            ("tool_result", Role::User) => {
                // What the user said in front of it comes first.
                if own.content.is_some() {
                    messages.push(std::mem::replace(
                        &mut own,
                        ChatMessage { content: None, ..ChatMessage::text(role, "") },
                    ));
                }
                messages.push(tool_result(&place, &mut block)?);
            }
            _ => {
                let expected = match role {
                    Role::Assistant => "text, thinking or tool_use",
                    Role::User => "text or tool_result",
                    _ => "text",
                };
                return Err(wrong(&format!("{place}.type"), expected, &kind.into()));
            }
        }
        block.finish()?;
    }
    let only_results = role == Role::User && messages.last().is_some_and(|last| last.role == Role::Tool);
    if own.content.is_some() || !own.tool_calls.is_empty() || own.reasoning_content.is_some() {
        messages.push(own);
    } else if !only_results {
        return Err(ApiError::param(&place, format!("{place} is empty; send some text")));
    }
    Ok(())
}

fn tool_use(block: &mut Fields) -> Result<ToolCall, ApiError> {
    params::cache_control(block)?;
    let id = block.required_string("id")?;
    let name = block.required_string("name")?;
    let arguments = block.object("input")?.unwrap_or_default();
    Ok(ToolCall { id: Some(id), name, arguments })
}

fn tool_result(place: &str, block: &mut Fields) -> Result<ChatMessage, ApiError> {
    params::cache_control(block)?;
    let id = block.required_string("tool_use_id")?;
    let content = block.value("content");
    let mut text = content
        .map(|content| text_blocks(&format!("{place}.content"), content))
        .transpose()?
        .unwrap_or_default();
    // The model has no other way to see it.
    if block.bool("is_error")?.unwrap_or(false) && !text.to_ascii_lowercase().starts_with("error") {
        text = format!("Error: {text}");
    }
    Ok(ChatMessage { tool_call_id: Some(id), ..ChatMessage::text(Role::Tool, text) })
}
