//! Reading requests.

use forebay_text::ChatMessage;
use forebay_text::template::{Role, ToolCall};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::ask::{Ask, Input};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::grammars::Format;
use crate::openai::chat::labels;
use crate::params::{self, EFFORTS};
use crate::tools::{self, Tool, Tools};

/// A request, and how its answer is wanted.
pub struct Request {
    /// What is asked.
    pub ask: Ask,
    /// Whether the answer is sent as it grows.
    pub streams: bool,
    /// What the response repeats of the request.
    pub echo: Value,
}

/// What the response repeats as it came.
const REPEATED: [&str; 8] =
    ["instructions", "max_output_tokens", "metadata", "reasoning", "text", "tool_choice", "tools", "user"];

impl Request {
    /// Reads the body of a request.
    pub fn read(body: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let mut echo: Map<String, Value> = REPEATED
            .iter()
            .map(|name| ((*name).to_owned(), body.get(*name).cloned().unwrap_or_default()))
            .collect();
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let instructions = fields.string("instructions")?;
        let mut messages: Vec<ChatMessage> =
            instructions.map(|text| ChatMessage::text(Role::System, text)).into_iter().collect();
        match fields.required("input")? {
            Value::String(text) => messages.push(ChatMessage::text(Role::User, text)),
            Value::Array(items) => {
                for (at, item) in items.into_iter().enumerate() {
                    add_item(&mut messages, &format!("input[{at}]"), item)?;
                }
            }
            other => return Err(wrong("input", "a text or a list of items", &other)),
        }
        let mut ask = Ask::new(Input::Chat(messages), app);
        params::sampling(&mut fields, &mut ask)?;
        ask.max_tokens = fields.count("max_output_tokens", 1)?.or(ask.max_tokens);
        if let Some(reasoning) = fields.object("reasoning")? {
            let mut reasoning = Fields::within("reasoning", reasoning);
            ask.effort = reasoning.one_of("effort", &EFFORTS)?;
            // The thoughts themselves are sent.
            reasoning.string("summary")?;
            reasoning.string("generate_summary")?;
            reasoning.finish()?;
        }
        ask.format = text_format(&mut fields)?;
        let all = fields.list("tools")?.unwrap_or_default();
        let all = all.into_iter().enumerate().map(tool).collect::<Result<_, _>>()?;
        let choice = tools::openai_choice(fields.value("tool_choice"))?;
        let parallel = fields.bool("parallel_tool_calls")?.unwrap_or(true);
        ask.tools = Tools::new(all, choice, parallel, &tools::OPENAI)?;
        let streams = fields.bool("stream")?.unwrap_or(false);
        labels(&mut fields)?;
        let stateless = "nothing is stored; send the whole conversation as input";
        fields.only("previous_response_id", &[], stateless)?;
        fields.only("conversation", &[], stateless)?;
        fields.only("background", &[json!(false)], "answers are sent to whoever asks")?;
        fields.only("truncation", &[json!("disabled")], "what is too long is refused")?;
        // Nothing is encrypted here: thoughts are sent as they are.
        fields.only(
            "include",
            &[json!([]), json!(["reasoning.encrypted_content"])],
            "nothing else can be included",
        )?;
        fields.finish()?;
        if echo["tool_choice"].is_null() {
            echo["tool_choice"] = "auto".into();
        }
        for (name, empty) in [("tools", json!([])), ("metadata", json!({}))] {
            if echo[name].is_null() {
                echo[name] = empty;
            }
        }
        if echo["text"].is_null() {
            echo["text"] = json!({"format": {"type": "text"}});
        }
        echo.insert("parallel_tool_calls".to_owned(), parallel.into());
        // As the client would write them, not as they are held in single precision.
        let plain = |value: f32| json!(value.to_string().parse::<f64>().unwrap_or_default());
        echo.insert("temperature".to_owned(), plain(ask.sampling.temperature));
        echo.insert("top_p".to_owned(), plain(ask.sampling.top_p));
        echo.insert("store".to_owned(), false.into());
        echo.insert("truncation".to_owned(), "disabled".into());
        echo.insert("previous_response_id".to_owned(), Value::Null);
        Ok(Self { ask, streams, echo: Value::Object(echo) })
    }
}

fn text_format(fields: &mut Fields) -> Result<Format, ApiError> {
    let Some(text) = fields.object("text")? else { return Ok(Format::Text) };
    let mut text = Fields::within("text", text);
    let found = match text.object("format")? {
        None => Format::Text,
        Some(format) => {
            let mut format = Fields::within("text.format", format);
            let found = match format.required_string("type")?.as_str() {
                "text" => Format::Text,
                "json_object" => Format::JsonObject,
                "json_schema" => params::json_schema(&mut format)?,
                other => {
                    return Err(wrong("text.format.type", "text, json_object or json_schema", &other.into()));
                }
            };
            format.finish()?;
            found
        }
    };
    text.only("verbosity", &[json!("medium")], "the model knows one")?;
    text.finish()?;
    Ok(found)
}

fn tool((at, value): (usize, Value)) -> Result<Tool, ApiError> {
    let place = format!("tools[{at}]");
    let mut fields = Fields::of(&place, value)?;
    let kind = fields.required_string("type")?;
    if kind != "function" {
        return Err(wrong(&format!("{place}.type"), "function (a tool of your own)", &kind.into()));
    }
    let (name, description) = (fields.required_string("name")?, fields.string("description")?);
    let (schema, strict) = (fields.value("parameters"), fields.bool("strict")?.unwrap_or(false));
    fields.finish()?;
    Tool::new(&place, name, description, schema, strict, &tools::OPENAI)
}

/// Adds an item of the conversation: calls and thoughts join the assistant's message that they belong to.
fn add_item(messages: &mut Vec<ChatMessage>, place: &str, item: Value) -> Result<(), ApiError> {
    let mut fields = Fields::of(place, item)?;
    let kind = fields.string("type")?;
    // Names of ours, which come back.
    fields.string("id")?;
    fields.string("status")?;
    match kind.as_deref() {
        None | Some("message") => {
            let roles = [
                ("user", Role::User),
                ("assistant", Role::Assistant),
                ("system", Role::System),
                ("developer", Role::Developer),
            ];
            let role = fields.one_of("role", &roles)?;
            let role = role.ok_or_else(|| {
                ApiError::param(format!("{place}.role"), format!("{place}.role is missing"))
            })?;
            let content = content(&format!("{place}.content"), fields.required("content")?)?;
            match last_of_assistant(messages, role).filter(|last| last.content.is_none()) {
                // Thoughts come in front of what was said.
                Some(last) if last.tool_calls.is_empty() => last.content = Some(content),
                _ => messages.push(ChatMessage::text(role, content)),
            }
        }
        Some("function_call") => {
            let id = fields.required_string("call_id")?;
            let name = fields.required_string("name")?;
            let text = fields.required_string("arguments")?;
            let arguments = match serde_json::from_str(&text) {
                Ok(Value::Object(arguments)) => arguments,
                _ => {
                    let name = format!("{place}.arguments");
                    return Err(wrong(&name, "the text of a JSON object", &text.into()));
                }
            };
            let call = ToolCall { id: Some(id), name, arguments };
            assistant(messages).tool_calls.push(call);
        }
        Some("function_call_output") => {
            let id = fields.required_string("call_id")?;
            let text = content(&format!("{place}.output"), fields.required("output")?)?;
            messages.push(ChatMessage { tool_call_id: Some(id), ..ChatMessage::text(Role::Tool, text) });
        }
        Some("reasoning") => {
            let summary = fields.value("summary");
            let summary = summary.map(|parts| content(&format!("{place}.summary"), parts)).transpose()?;
            fields.only("encrypted_content", &[json!("")], "thoughts are sent and taken as they are")?;
            // What the thought was, or at least what it was about.
            let thought = match fields.value("content") {
                Some(parts) => content(&format!("{place}.content"), parts)?,
                None => summary.unwrap_or_default(),
            };
            let message = ChatMessage { content: None, ..ChatMessage::text(Role::Assistant, "") };
            messages.push(ChatMessage { reasoning_content: Some(thought), ..message });
        }
        Some(other) => {
            let expected = "message, function_call, function_call_output or reasoning";
            return Err(wrong(&format!("{place}.type"), expected, &other.into()));
        }
    }
    fields.finish()
}

fn last_of_assistant(messages: &mut [ChatMessage], role: Role) -> Option<&mut ChatMessage> {
    messages.last_mut().filter(|last| role == Role::Assistant && last.role == Role::Assistant)
}

/// The assistant's message that a call belongs to.
fn assistant(messages: &mut Vec<ChatMessage>) -> &mut ChatMessage {
    if !messages.last().is_some_and(|last| last.role == Role::Assistant) {
        messages.push(ChatMessage { content: None, ..ChatMessage::text(Role::Assistant, "") });
    }
    let last = messages.len() - 1;
    &mut messages[last]
}

/// A text, or parts that are text.
fn content(place: &str, value: Value) -> Result<String, ApiError> {
    let parts = match value {
        Value::String(text) => return Ok(text),
        Value::Array(parts) => parts,
        other => return Err(wrong(place, "a text or a list of text parts", &other)),
    };
    let mut all = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        let place = format!("{place}[{at}]");
        let mut part = Fields::of(&place, part)?;
        let kind = part.required_string("type")?;
        if !["input_text", "output_text", "text", "reasoning_text", "summary_text"].contains(&kind.as_str()) {
            return Err(wrong(&format!("{place}.type"), "input_text or output_text", &kind.into()));
        }
        all += &part.required_string("text")?;
        part.only("annotations", &[json!([])], "the model reads text")?;
        part.only("logprobs", &[json!([])], "the model reads text")?;
        part.finish()?;
    }
    Ok(all)
}
