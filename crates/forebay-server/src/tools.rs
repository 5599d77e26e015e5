//! The tools of a request: what the model is shown, how its calls are read, and what it can be held to.

use std::collections::HashSet;
use std::fmt::Write;

use forebay_text::template::ToolChoice;
use forebay_text::tool_calls::{CALL_CLOSE, CALL_OPEN, KEY_CLOSE, KEY_OPEN, VALUE_CLOSE, VALUE_OPEN};
use forebay_text::{Tokenizer, ToolTypes};
use serde_json::{Map, Value, json};

use crate::error::ApiError;
use crate::fields::{Fields, wrong};

/// How much of an interface's tools is taken.
pub struct Limits {
    /// Most tools of a request.
    pub tools: usize,
    /// Most characters of a tool's name.
    pub name: usize,
}

/// What OpenAI's interfaces take, and Ollama's.
pub const OPENAI: Limits = Limits { tools: 128, name: 64 };
/// What Anthropic's interface takes.
pub const ANTHROPIC: Limits = Limits { tools: 1024, name: 128 };

/// A tool that is offered to the model.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// What the model calls it.
    pub name: String,
    /// The JSON schema of its parameters, if there is one.
    pub parameters: Value,
    /// Whether calls must have arguments of that schema.
    pub strict: bool,
    /// What the model is shown: `{"name": ..., "description": ..., "parameters": ...}`.
    shown: Value,
}

impl Tool {
    /// A tool from its parts, at `place` in the request.
    pub fn new(
        place: &str,
        name: String,
        description: Option<String>,
        parameters: Option<Value>,
        strict: bool,
        limits: &Limits,
    ) -> Result<Self, ApiError> {
        let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || name.len() > limits.name || !name.chars().all(good) {
            let message = format!("{place}.name must be 1 to {} letters, digits, _, - or .", limits.name);
            return Err(ApiError::param(format!("{place}.name"), message));
        }
        if let Some(other) = parameters.as_ref().filter(|schema| !schema.is_object()) {
            return Err(wrong(&format!("{place}.parameters"), "a JSON schema (an object)", other));
        }
        let mut shown = Map::from_iter([("name".to_owned(), json!(name))]);
        shown.extend(description.map(|text| ("description".to_owned(), json!(text))));
        shown.extend(parameters.clone().map(|schema| ("parameters".to_owned(), schema)));
        Ok(Self { name, parameters: parameters.unwrap_or(Value::Null), strict, shown: Value::Object(shown) })
    }

    /// The tool as templates take it.
    pub fn for_template(&self) -> Value {
        json!({"type": "function", "function": self.shown})
    }

    /// The tool as the parser of calls takes it.
    pub fn types(&self) -> ToolTypes {
        ToolTypes { name: self.name.clone(), parameters: self.parameters.clone() }
    }
}

/// All tools of a request and what the model must do with them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tools {
    /// Those that are offered.
    pub all: Vec<Tool>,
    /// What the model must do.
    pub choice: ToolChoice,
    /// Whether it may make several calls in one answer.
    pub parallel: bool,
}

impl Tools {
    /// Checks them together.
    pub fn new(
        all: Vec<Tool>,
        choice: ToolChoice,
        parallel: bool,
        limits: &Limits,
    ) -> Result<Self, ApiError> {
        if all.len() > limits.tools {
            let message = format!("there are {} tools; send at most {}", all.len(), limits.tools);
            return Err(ApiError::param("tools", message));
        }
        let mut names = HashSet::new();
        if let Some(twice) = all.iter().find(|tool| !names.insert(tool.name.as_str())) {
            return Err(ApiError::param(
                "tools",
                format!("there are two tools with the name {}", twice.name),
            ));
        }
        if let ToolChoice::Function(name) = &choice
            && !names.contains(name.as_str())
        {
            let message = format!("tool_choice names the function {name:?}, which is not in tools");
            return Err(ApiError::param("tool_choice", message));
        }
        if all.is_empty() && !matches!(choice, ToolChoice::Auto | ToolChoice::None) {
            let message = "tool_choice needs tools; send tools or leave tool_choice out";
            return Err(ApiError::param("tool_choice", message));
        }
        Ok(Self { all, choice, parallel })
    }

    /// Those that the model may call.
    pub fn offered(&self) -> Vec<&Tool> {
        let named = |tool: &&Tool| match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Function(name) => *name == tool.name,
            ToolChoice::Auto | ToolChoice::Required => true,
        };
        self.all.iter().filter(named).collect()
    }

    /// Whether the model can be left to itself: no call is required, none has to obey a schema, and it may make many.
    pub fn are_free(&self) -> bool {
        let offered = self.offered();
        match self.choice {
            ToolChoice::None => true,
            ToolChoice::Auto => {
                offered.is_empty() || (self.parallel && !offered.iter().any(|tool| tool.strict))
            }
            ToolChoice::Required | ToolChoice::Function(_) => false,
        }
    }

    /// The Lark grammar of the answers that are allowed; beside calls, where none is required, free text or a document
    /// of `document`.
    pub fn grammar(&self, document: Option<&Value>, tokenizer: &Tokenizer) -> Result<String, ApiError> {
        let marks = Marks { tokenizer };
        if tokenizer.added_id(CALL_OPEN).is_none() || tokenizer.added_id(VALUE_CLOSE).is_none() {
            let message = "this model has no tokens for tool calls, so that none can be required, \
                strict or kept single; leave strict, tool_choice and parallel_tool_calls out";
            return Err(ApiError::param("tool_choice", message).code("unsupported_parameter"));
        }
        let offered = self.offered();
        let mut rules = String::new();
        for (at, tool) in offered.iter().enumerate() {
            tool_rule(&mut rules, at, tool, &marks)?;
        }
        let any: Vec<String> = (0..offered.len()).map(|at| format!("tool{at}")).collect();
        let any = any.join(" | ");
        let named = matches!(self.choice, ToolChoice::Function(_));
        let several = self.parallel && !named;
        let calls = if several { "call+" } else { "call" };
        let start = match (&self.choice, document) {
            (ToolChoice::Auto, Some(_)) => format!("document | {calls}"),
            (ToolChoice::Auto, None) if several => "TEXT? (call TEXT?)*".to_owned(),
            (ToolChoice::Auto, None) => "TEXT? call? ".to_owned(),
            _ => calls.to_owned(),
        };
        let (open, close) = (marks.of(CALL_OPEN), marks.of(CALL_CLOSE));
        let mut grammar = format!("start: {start}\ncall: {open} ({any}) {close}\n{rules}");
        grammar.push_str("TEXT: /(?s:.)+/\nVALUE: /(?s:.)+/\nKEY: /[^<>\\n]+/\n");
        if let Some(schema) = document {
            let _ = writeln!(grammar, "document: %json {schema}");
        }
        Ok(grammar)
    }
}

/// How the tags of a call stand in a grammar.
struct Marks<'a> {
    tokenizer: &'a Tokenizer,
}

impl Marks<'_> {
    /// A tag that is a token of its own, or its text.
    fn of(&self, tag: &str) -> String {
        match self.tokenizer.added_id(tag) {
            Some(_) => tag.to_owned(),
            None => Value::from(tag).to_string(),
        }
    }
}

/// The rules for the inside of a call of one tool.
fn tool_rule(rules: &mut String, at: usize, tool: &Tool, marks: &Marks<'_>) -> Result<(), ApiError> {
    let place = format!("the parameters of tool {}", tool.name);
    let schema = &tool.parameters;
    if let Some(found) =
        ["anyOf", "oneOf", "allOf", "not", "$ref"].iter().find(|key| schema.get(**key).is_some())
    {
        let message = format!("{place} must be an object with properties to be enforced, found {found}");
        return Err(ApiError::param("tools", message).code("invalid_schema"));
    }
    let none = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&none);
    let required: Vec<&str> = schema["required"]
        .as_array()
        .map(|all| all.iter().filter_map(Value::as_str).collect())
        .unwrap_or_default();
    if let Some(missing) = required.iter().find(|name| !properties.contains_key(**name)) {
        let message = format!("{place} require {missing:?}, which is not among their properties");
        return Err(ApiError::param("tools", message).code("invalid_schema"));
    }
    let name = Value::from(tool.name.as_str());
    let mut body = format!("tool{at}: {name}");
    let (open, close) = (marks.of(KEY_OPEN), marks.of(KEY_CLOSE));
    let (open_value, close_value) = (marks.of(VALUE_OPEN), marks.of(VALUE_CLOSE));
    let mut values = String::new();
    for (number, (key, property)) in properties.iter().enumerate() {
        let value = format!("value{at}x{number}");
        let optional = if required.contains(&key.as_str()) { "" } else { "?" };
        let key = Value::from(key.as_str());
        let _ = write!(body, " ({open} {key} {close} {open_value} {value} {close_value}){optional}");
        let _ = writeln!(values, "{value}: {}", value_rule(property, schema));
    }
    // An object of which nothing is said may have anything.
    if properties.is_empty() && schema["additionalProperties"] != false && !schema.is_null() {
        let _ = write!(body, " ({open} KEY {close} {open_value} VALUE {close_value})*");
    }
    let _ = write!(rules, "{body}\n{values}");
    Ok(())
}

/// What the value of a parameter may be: text stands as it is, everything else as JSON.
fn value_rule(property: &Value, root: &Value) -> String {
    let resolved = local(property, root);
    let literal = |value: &Value| match value {
        Value::String(text) => lark_text(text),
        other => lark_text(&other.to_string()),
    };
    if let Some(values) = resolved["enum"].as_array().filter(|values| !values.is_empty()) {
        return values.iter().map(literal).collect::<Vec<_>>().join(" | ");
    }
    if let Some(value) = resolved.get("const") {
        return literal(value);
    }
    let types: Vec<&str> = match &resolved["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    if types.contains(&"string") || (types.is_empty() && mentions_text(resolved, root)) {
        return text_rule(resolved);
    }
    if types.is_empty()
        && !["anyOf", "oneOf", "allOf", "properties"].iter().any(|key| resolved.get(*key).is_some())
    {
        return "VALUE?".to_owned();
    }
    let mut schema = resolved.clone();
    if let Value::Object(schema) = &mut schema {
        for key in ["$defs", "definitions"] {
            if let Some(all) = root.get(key).filter(|_| !schema.contains_key(key)) {
                schema.insert(key.to_owned(), all.clone());
            }
        }
    }
    format!("%json {schema}")
}

/// Text with the lengths of a schema.
fn text_rule(schema: &Value) -> String {
    let least = schema["minLength"].as_u64().unwrap_or(0);
    match (least, schema["maxLength"].as_u64()) {
        (0, None) => "VALUE?".to_owned(),
        (1, None) => "VALUE".to_owned(),
        (least, None) => format!("/(?s:.){{{least},}}/"),
        (_, Some(0)) => "\"\"".to_owned(),
        (0, Some(most)) => format!("/(?s:.){{1,{most}}}/?"),
        (least, Some(most)) => format!("/(?s:.){{{least},{most}}}/"),
    }
}

/// Whether one of the choices of a schema is text.
fn mentions_text(schema: &Value, root: &Value) -> bool {
    let choices = ["anyOf", "oneOf"].into_iter().filter_map(|name| schema[name].as_array()).flatten();
    choices.map(|choice| local(choice, root)).any(|choice| choice["type"] == "string")
}

/// What a local reference leads to.
fn local<'s>(schema: &'s Value, root: &'s Value) -> &'s Value {
    let mut schema = schema;
    for _ in 0..8 {
        let Some(path) = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) else { break };
        let Some(found) = root.pointer(path) else { break };
        schema = found;
    }
    schema
}

/// A literal; Lark has no way to write some characters in one.
fn lark_text(text: &str) -> String {
    Value::from(text).to_string()
}

/// `tools` of the OpenAI chat interface.
pub fn openai_tools(values: Option<Vec<Value>>) -> Result<Vec<Tool>, ApiError> {
    let tool = |(at, value): (usize, Value)| {
        let place = format!("tools[{at}]");
        let mut outer = Fields::of(&place, value)?;
        outer.one_of("type", &[("function", ())])?.ok_or_else(|| {
            ApiError::param(format!("{place}.type"), format!("{place}.type is missing; it must be function"))
        })?;
        let function = outer.required("function")?;
        outer.finish()?;
        let place = format!("{place}.function");
        let mut function = Fields::of(&place, function)?;
        let found = Tool::new(
            &place,
            function.required_string("name")?,
            function.string("description")?,
            function.value("parameters"),
            function.bool("strict")?.unwrap_or(false),
            &OPENAI,
        )?;
        function.finish()?;
        Ok(found)
    };
    values.unwrap_or_default().into_iter().enumerate().map(tool).collect()
}

/// `tool_choice` of the OpenAI chat interface.
pub fn openai_choice(value: Option<Value>) -> Result<ToolChoice, ApiError> {
    let place = "tool_choice";
    match value {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(name)) => match name.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" => Ok(ToolChoice::Required),
            _ => Err(wrong(place, "auto, none, required or a named function", &name.into())),
        },
        Some(Value::Object(choice)) => {
            let mut choice = Fields::within(place, choice);
            choice.one_of("type", &[("function", ())])?;
            // The two interfaces write it in two ways.
            let name = match choice.value("function") {
                Some(function) => {
                    let mut function = Fields::of("tool_choice.function", function)?;
                    let name = function.required_string("name")?;
                    function.finish()?;
                    name
                }
                None => choice.required_string("name")?,
            };
            choice.finish()?;
            Ok(ToolChoice::Function(name))
        }
        Some(other) => Err(wrong(place, "auto, none, required or a named function", &other)),
    }
}
