//! Conversations as clients send them, checked once so that every template sees the same shapes.

use serde_json::{Map, Value, json};
use std::fmt;

/// Who speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions.
    System,
    /// Instructions; rendered as [`Role::System`].
    Developer,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// A tool's result.
    Tool,
}

impl Role {
    const ALL: [Self; 5] = [Self::System, Self::Developer, Self::User, Self::Assistant, Self::Tool];

    /// The name used in requests and templates.
    pub fn name(self) -> &'static str {
        match self {
            Self::System => "system",
            Self::Developer => "developer",
            Self::User => "user",
            Self::Assistant => "assistant",
            Self::Tool => "tool",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A call that the assistant made in an earlier turn.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The id that the tool's result refers to, when the client gave one.
    pub id: Option<String>,
    /// The function.
    pub name: String,
    /// Its arguments, in the client's order.
    pub arguments: Map<String, Value>,
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatMessage {
    /// Who speaks.
    pub role: Role,
    /// The text; `None` where the client sent null (an assistant that only calls tools).
    pub content: Option<String>,
    /// The assistant's reasoning, when the client sent it back. Templates may use it.
    pub reasoning_content: Option<String>,
    /// The assistant's calls.
    pub tool_calls: Vec<ToolCall>,
    /// For a tool's result: the call that it answers.
    pub tool_call_id: Option<String>,
    /// A participant's name. Templates may use it.
    pub name: Option<String>,
}

/// What is wrong with a message. The caller adds which message it was.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MessageError {
    /// Not a JSON object.
    #[error("a message must be an object with role and content, found {found}")]
    NotAnObject {
        /// The JSON type found.
        found: &'static str,
    },
    /// The role is missing or unknown.
    #[error("unknown role {found}; use system, developer, user, assistant or tool")]
    UnknownRole {
        /// The value of `role`.
        found: String,
    },
    /// Content is neither text nor a list of text parts.
    #[error("{place} must be a string or a list of text parts, found {found}")]
    BadContent {
        /// `content`, or `content[i]`.
        place: String,
        /// What was found.
        found: String,
    },
    /// A field that must be a string is something else.
    #[error("{field} must be a string, found {found}")]
    NotAString {
        /// The field.
        field: &'static str,
        /// The JSON type found.
        found: &'static str,
    },
    /// A tool call without a usable shape.
    #[error("tool_calls must be a list of calls, each with a function name, found {found}")]
    BadToolCall {
        /// The JSON type found.
        found: &'static str,
    },
    /// A tool call whose arguments are JSON, but not an object.
    #[error("the arguments of tool call {name:?} must be a JSON object, found {found}")]
    ArgumentsNotObject {
        /// The function's name.
        name: String,
        /// The JSON type found.
        found: &'static str,
    },
}

impl ChatMessage {
    /// A message that is only text.
    pub fn text(role: Role, content: impl Into<String>) -> Self {
        Self {
            role,
            content: Some(content.into()),
            reasoning_content: None,
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
        }
    }

    /// Reads one element of an OpenAI-style `messages` list. Unknown fields are ignored.
    pub fn from_json(message: &Value) -> Result<Self, MessageError> {
        let Value::Object(fields) = message else {
            return Err(MessageError::NotAnObject { found: type_name(message) });
        };
        let role = fields.get("role").unwrap_or(&Value::Null);
        let role = Role::ALL
            .into_iter()
            .find(|known| role == known.name())
            .ok_or_else(|| MessageError::UnknownRole { found: role.to_string() })?;
        let content = content_text(fields.get("content").unwrap_or(&Value::Null))?;
        if content.is_none() && role != Role::Assistant {
            let (place, found) = ("content".to_owned(), "null".to_owned());
            return Err(MessageError::BadContent { place, found });
        }
        Ok(Self {
            role,
            content,
            reasoning_content: optional_string(fields, "reasoning_content")?,
            tool_calls: tool_calls(fields.get("tool_calls").unwrap_or(&Value::Null))?,
            tool_call_id: optional_string(fields, "tool_call_id")?,
            name: optional_string(fields, "name")?,
        })
    }

    /// The message as templates expect it: the client's shape, arguments as an object, absent fields left out.
    pub(super) fn to_context(&self) -> Value {
        let mut fields = Map::new();
        fields.insert("role".to_owned(), self.role.name().into());
        fields.insert("content".to_owned(), self.content.clone().into());
        for (field, value) in [
            ("reasoning_content", &self.reasoning_content),
            ("tool_call_id", &self.tool_call_id),
            ("name", &self.name),
        ] {
            if let Some(text) = value {
                fields.insert(field.to_owned(), text.clone().into());
            }
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(ToolCall::to_context).collect();
            fields.insert("tool_calls".to_owned(), Value::Array(calls));
        }
        Value::Object(fields)
    }
}

impl ToolCall {
    fn to_context(&self) -> Value {
        let mut call = json!({
            "type": "function",
            "function": { "name": self.name, "arguments": self.arguments },
        });
        if let Some(id) = &self.id {
            call["id"] = id.clone().into();
        }
        call
    }
}

/// Text, or text parts joined without separator; null is no text.
fn content_text(content: &Value) -> Result<Option<String>, MessageError> {
    match content {
        Value::Null => Ok(None),
        Value::String(text) => Ok(Some(text.clone())),
        Value::Array(parts) => {
            let part_text = |(at, part): (usize, &Value)| match part_text(part) {
                Some(text) => Ok(text.to_owned()),
                None => {
                    Err(MessageError::BadContent { place: format!("content[{at}]"), found: describe(part) })
                }
            };
            parts.iter().enumerate().map(part_text).collect::<Result<String, _>>().map(Some)
        }
        other => Err(MessageError::BadContent { place: "content".to_owned(), found: describe(other) }),
    }
}

fn part_text(part: &Value) -> Option<&str> {
    match part["type"].as_str()? {
        "text" | "input_text" => part["text"].as_str(),
        _ => None,
    }
}

/// A value for an error message: its type, and for an object its own `type` field.
fn describe(value: &Value) -> String {
    match &value["type"] {
        Value::String(kind) => format!("an object of type {kind:?}"),
        _ => type_name(value).to_owned(),
    }
}

fn optional_string(fields: &Map<String, Value>, field: &'static str) -> Result<Option<String>, MessageError> {
    match fields.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(other) => Err(MessageError::NotAString { field, found: type_name(other) }),
    }
}

fn tool_calls(calls: &Value) -> Result<Vec<ToolCall>, MessageError> {
    match calls {
        Value::Null => Ok(Vec::new()),
        Value::Array(calls) => calls.iter().map(tool_call).collect(),
        other => Err(MessageError::BadToolCall { found: type_name(other) }),
    }
}

/// `{id, function: {name, arguments}}`, or the inner object alone.
fn tool_call(call: &Value) -> Result<ToolCall, MessageError> {
    let function = call.get("function").unwrap_or(call);
    let name = function["name"].as_str().ok_or(MessageError::BadToolCall { found: type_name(function) })?;
    let arguments = match &function["arguments"] {
        // A string that is not JSON means no arguments: the model wrote it, and the turn must still render.
        Value::String(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        other => other.clone(),
    };
    let arguments = match arguments {
        Value::Null => Map::new(),
        Value::Object(arguments) => arguments,
        other => {
            return Err(MessageError::ArgumentsNotObject { name: name.to_owned(), found: type_name(&other) });
        }
    };
    Ok(ToolCall { id: call["id"].as_str().map(str::to_owned), name: name.to_owned(), arguments })
}

fn type_name(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(message: Value) -> Result<ChatMessage, MessageError> {
        ChatMessage::from_json(&message)
    }

    #[test]
    fn content_is_text_or_text_parts() {
        let content = |content: Value| parse(json!({"role": "user", "content": content}));
        assert_eq!(content(json!("a")).unwrap().content.as_deref(), Some("a"));
        let parts = json!([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]);
        assert_eq!(content(parts).unwrap().content.as_deref(), Some("ab"));
        assert_eq!(content(json!([])).unwrap().content.as_deref(), Some(""));
        for wrong in [
            json!(null),
            json!(1),
            json!({}),
            json!(["a"]),
            json!([{"type": "image_url", "image_url": {}}]),
            json!([{"type": "text", "text": 1}]),
        ] {
            let error = content(wrong).unwrap_err();
            assert!(matches!(error, MessageError::BadContent { .. }), "{error}");
        }
        let image = content(json!([{"type": "image_url"}])).unwrap_err();
        let expected =
            "content[0] must be a string or a list of text parts, found an object of type \"image_url\"";
        assert_eq!(image.to_string(), expected);
    }

    #[test]
    fn roles_are_a_closed_set() {
        for role in ["system", "developer", "user", "assistant", "tool"] {
            assert_eq!(parse(json!({"role": role, "content": ""})).unwrap().role.to_string(), role);
        }
        for wrong in [json!({"role": "function", "content": ""}), json!({"content": ""}), json!({"role": 1})]
        {
            assert!(matches!(parse(wrong).unwrap_err(), MessageError::UnknownRole { .. }));
        }
        assert!(matches!(parse(json!([])).unwrap_err(), MessageError::NotAnObject { found: "a list" }));
    }

    #[test]
    fn arguments_are_an_object_or_its_json() {
        let call = |arguments: Value| {
            let calls =
                json!([{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]);
            parse(json!({"role": "assistant", "content": null, "tool_calls": calls}))
        };
        let expected = json!({"b": 1, "a": [2]});
        for arguments in [expected.clone(), json!(expected.to_string())] {
            let message = call(arguments).unwrap();
            assert_eq!(
                Value::Object(message.tool_calls[0].arguments.clone()).to_string(),
                expected.to_string()
            );
            assert_eq!(message.tool_calls[0].id.as_deref(), Some("c1"));
        }
        for none in [json!(null), json!("{broken"), json!("")] {
            assert!(call(none).unwrap().tool_calls[0].arguments.is_empty());
        }
        for wrong in [json!([1]), json!("[1]"), json!("7"), json!(true)] {
            assert!(matches!(call(wrong).unwrap_err(), MessageError::ArgumentsNotObject { .. }));
        }
    }

    #[test]
    fn broken_calls_and_fields_are_named() {
        let assistant = |field: &str, value: Value| {
            parse(json!({"role": "assistant", "content": "", field: value})).unwrap_err()
        };
        for wrong in [json!({}), json!([1]), json!([{"function": {}}]), json!([{"function": {"name": 1}}])] {
            assert!(matches!(assistant("tool_calls", wrong), MessageError::BadToolCall { .. }));
        }
        let error = assistant("tool_call_id", json!(1));
        assert_eq!(error, MessageError::NotAString { field: "tool_call_id", found: "a number" });
    }
}
