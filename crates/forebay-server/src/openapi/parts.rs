//! Pieces that descriptions are made of.

use serde_json::{Value, json};

/// The type of bodies.
pub const JSON: &str = "application/json";

/// Where a schema is described.
pub fn reference(name: &str) -> Value {
    json!({"$ref": format!("#/components/schemas/{name}")})
}

/// A response of this shape.
pub fn json_answer(what: &str, schema: Value) -> Value {
    json!({"description": what, "content": {JSON: {"schema": schema}}})
}

/// A part of the path.
pub fn path_parameter(name: &str, what: &str) -> Value {
    json!({"name": name, "in": "path", "required": true, "description": what,
        "schema": {"type": "string", "minLength": 1}})
}

/// Text.
pub fn text() -> Value {
    json!({"type": "string"})
}

/// True or false.
pub fn switch() -> Value {
    json!({"type": "boolean"})
}

/// A whole number that is not less than `least`.
pub fn count(least: i64) -> Value {
    json!({"type": "integer", "minimum": least, "maximum": i64::MAX})
}

/// A number.
pub fn number(least: f64, most: f64) -> Value {
    json!({"type": "number", "minimum": least, "maximum": most})
}

/// A number above 0.
pub fn above_zero(most: f64) -> Value {
    json!({"type": "number", "exclusiveMinimum": 0, "maximum": most})
}

/// One of a few values.
pub fn one_of(values: &[&str]) -> Value {
    json!({"type": "string", "enum": values})
}

/// A list of such.
pub fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

/// Either.
pub fn any_of(choices: &[Value]) -> Value {
    json!({"anyOf": choices})
}

/// An object with these fields and no others; all but those in `required` may also be null.
pub fn fields(required: &[&str], all: Value) -> Value {
    let mut all = all;
    if let Value::Object(all) = &mut all {
        all.iter_mut()
            .filter(|(name, _)| !required.contains(&name.as_str()))
            .for_each(|(_, schema)| or_null(schema));
    }
    let mut schema = json!({"type": "object", "properties": all, "additionalProperties": false});
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
    schema
}

/// Null counts as absent.
fn or_null(schema: &mut Value) {
    if schema.as_object().is_some_and(|schema| schema.is_empty()) {
        return;
    }
    *schema = match schema["anyOf"].take() {
        Value::Array(mut choices) => {
            choices.push(json!({"type": "null"}));
            json!({"anyOf": choices})
        }
        _ => {
            if let Value::Object(schema) = schema {
                schema.remove("anyOf");
            }
            json!({"anyOf": [schema, {"type": "null"}]})
        }
    };
}

/// An object of an answer: these fields are always there; others may be.
pub fn shape(always: Value) -> Value {
    let names: Vec<&String> = always.as_object().into_iter().flatten().map(|(name, _)| name).collect();
    let mut schema = json!({"type": "object"});
    schema["required"] = json!(names);
    schema["properties"] = always;
    schema
}
