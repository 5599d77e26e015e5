//! What a value that a model wrote as text is, by the schema of its tool.

use serde_json::Value;

/// References are followed so many times.
const MAX_REFERENCES: usize = 8;

/// A tool's name and the types of its parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolTypes {
    /// The name.
    pub name: String,
    /// The JSON schema of its parameters: an object with `properties`, or nothing.
    pub parameters: Value,
}

/// What a value may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Text,
    Integer,
    Number,
    Boolean,
    Object,
    Array,
    Null,
    /// Of a type that does not exist.
    Unknown,
}

impl ToolTypes {
    /// A value of parameter `key`, written as `text`. Text stays text to the letter; other types are JSON, and what does
    /// not parse as that stays text.
    pub fn typed(&self, key: &str, text: &str) -> Value {
        let verbatim = || Value::String(text.to_owned());
        let Some(schema) = self.parameters["properties"].get(key) else {
            return serde_json::from_str(text).unwrap_or_else(|_| verbatim());
        };
        let schema = self.resolved(schema);
        let kinds = self.kinds(schema);
        if kinds.first() == Some(&Kind::Text) && schema.get("type").is_some() {
            return verbatim();
        }
        if kinds.first() == Some(&Kind::Unknown) {
            return verbatim();
        }
        let parsed: Option<Value> = serde_json::from_str(text).ok();
        match parsed {
            Some(value) if kinds.is_empty() => value,
            Some(value) if !value.is_string() && kinds.iter().any(|kind| kind.holds(&value)) => value,
            // Some models put text into quotes where it may also be something else.
            _ if kinds.contains(&Kind::Text) => verbatim(),
            Some(Value::Bool(_)) if kinds.iter().all(|kind| matches!(kind, Kind::Integer | Kind::Number)) => {
                verbatim()
            }
            Some(value) => value,
            None => verbatim(),
        }
    }

    /// What a schema allows, the first one first; empty if it does not say.
    fn kinds(&self, schema: &Value) -> Vec<Kind> {
        match &schema["type"] {
            Value::String(name) => return vec![Kind::of(name)],
            Value::Array(names) => {
                // By the published rule the first type that is not null is meant.
                let names = names.iter().filter_map(Value::as_str);
                let meant = names.map(Kind::of).find(|kind| *kind != Kind::Null);
                return meant.into_iter().collect();
            }
            _ => {}
        }
        if let Some(values) = schema["enum"].as_array() {
            return values.iter().map(Kind::of_value).collect();
        }
        if let Some(value) = schema.get("const") {
            return vec![Kind::of_value(value)];
        }
        let choices = ["anyOf", "oneOf"].into_iter().filter_map(|name| schema[name].as_array()).flatten();
        choices.flat_map(|choice| self.kinds_of_choice(choice)).collect()
    }

    fn kinds_of_choice(&self, choice: &Value) -> Vec<Kind> {
        let choice = self.resolved(choice);
        match &choice["type"] {
            Value::Array(names) => names.iter().filter_map(Value::as_str).map(Kind::of).collect(),
            Value::String(name) => vec![Kind::of(name)],
            _ => match choice["enum"].as_array() {
                Some(values) => values.iter().map(Kind::of_value).collect(),
                None => choice.get("const").map(Kind::of_value).into_iter().collect(),
            },
        }
    }

    /// What a local reference leads to.
    fn resolved<'s>(&'s self, schema: &'s Value) -> &'s Value {
        let mut schema = schema;
        for _ in 0..MAX_REFERENCES {
            let Some(path) = schema["$ref"].as_str().and_then(|path| path.strip_prefix('#')) else { break };
            let Some(found) = self.parameters.pointer(path) else { break };
            schema = found;
        }
        schema
    }
}

impl Kind {
    fn of(name: &str) -> Self {
        match name {
            "string" => Self::Text,
            "integer" => Self::Integer,
            "number" => Self::Number,
            "boolean" => Self::Boolean,
            "object" => Self::Object,
            "array" => Self::Array,
            "null" => Self::Null,
            _ => Self::Unknown,
        }
    }

    fn of_value(value: &Value) -> Self {
        match value {
            Value::String(_) => Self::Text,
            Value::Number(_) => Self::Number,
            Value::Bool(_) => Self::Boolean,
            Value::Object(_) => Self::Object,
            Value::Array(_) => Self::Array,
            Value::Null => Self::Null,
        }
    }

    fn holds(self, value: &Value) -> bool {
        match self {
            Self::Text => value.is_string(),
            Self::Integer | Self::Number => value.is_number(),
            Self::Boolean => value.is_boolean(),
            Self::Object => value.is_object(),
            Self::Array => value.is_array(),
            Self::Null => value.is_null(),
            Self::Unknown => false,
        }
    }
}
