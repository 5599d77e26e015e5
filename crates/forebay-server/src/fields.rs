//! The parameters of a request, taken one by one: each has its type and range, null counts as absent, and what is left
//! over in the end is refused by its name.

use std::ops::RangeInclusive;

use serde_json::{Map, Value};

use crate::error::ApiError;

/// An object of a request.
pub struct Fields {
    /// What has not been taken yet.
    left: Map<String, Value>,
    /// The name of the object, with a point behind it; empty for the request itself.
    place: String,
}

impl Fields {
    /// The fields of the request itself.
    pub fn new(request: Map<String, Value>) -> Self {
        Self { left: request, place: String::new() }
    }

    /// The fields of an object within it.
    pub fn within(place: impl Into<String>, object: Map<String, Value>) -> Self {
        Self { left: object, place: place.into() + "." }
    }

    /// The fields of a value that must be an object.
    pub fn of(place: &str, value: Value) -> Result<Self, ApiError> {
        match value {
            Value::Object(object) => Ok(Self::within(place, object)),
            other => Err(wrong(place, "an object", &other)),
        }
    }

    /// How a client names a field of this object.
    pub fn name(&self, field: &str) -> String {
        format!("{}{field}", self.place)
    }

    /// Any value.
    pub fn value(&mut self, field: &str) -> Option<Value> {
        self.left.shift_remove(field).filter(|value| !value.is_null())
    }

    /// Text.
    pub fn string(&mut self, field: &str) -> Result<Option<String>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(wrong(&self.name(field), "a string", &other)),
        }
    }

    /// Text that has to be there.
    pub fn required_string(&mut self, field: &str) -> Result<String, ApiError> {
        self.string(field)?.ok_or_else(|| self.missing(field))
    }

    /// A value that has to be there.
    pub fn required(&mut self, field: &str) -> Result<Value, ApiError> {
        self.value(field).ok_or_else(|| self.missing(field))
    }

    fn missing(&self, field: &str) -> ApiError {
        let name = self.name(field);
        let message = format!("{name} is missing");
        ApiError::param(name, message)
    }

    /// True or false.
    pub fn bool(&mut self, field: &str) -> Result<Option<bool>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong(&self.name(field), "true or false", &other)),
        }
    }

    /// A whole number.
    pub fn integer(&mut self, field: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        let number = match &value {
            Value::Number(number) => number.as_i64().or_else(|| whole(number.as_f64()?)),
            _ => None,
        };
        match number.filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number)),
            None => {
                let most = match *range.end() {
                    i64::MAX => format!("a whole number from {}", range.start()),
                    end => format!("a whole number from {} to {end}", range.start()),
                };
                Err(wrong(&self.name(field), &most, &value))
            }
        }
    }

    /// A whole number that counts something.
    pub fn count(&mut self, field: &str, least: usize) -> Result<Option<usize>, ApiError> {
        Ok(self.integer(field, least as i64..=i64::MAX)?.map(|number| number as usize))
    }

    /// A number.
    pub fn number(&mut self, field: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match value.as_f64().filter(|number| range.contains(number)) {
            Some(number) => Ok(Some(number as f32)),
            None => {
                let expected = format!("a number from {} to {}", range.start(), range.end());
                Err(wrong(&self.name(field), &expected, &value))
            }
        }
    }

    /// A list.
    pub fn list(&mut self, field: &str) -> Result<Option<Vec<Value>>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Array(values)) => Ok(Some(values)),
            Some(other) => Err(wrong(&self.name(field), "a list", &other)),
        }
    }

    /// An object.
    pub fn object(&mut self, field: &str) -> Result<Option<Map<String, Value>>, ApiError> {
        match self.value(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(other) => Err(wrong(&self.name(field), "an object", &other)),
        }
    }

    /// One text, or a list of texts.
    pub fn strings(&mut self, field: &str) -> Result<Vec<String>, ApiError> {
        let name = self.name(field);
        match self.value(field) {
            None => Ok(Vec::new()),
            Some(Value::String(text)) => Ok(vec![text]),
            Some(Value::Array(values)) => {
                let text = |value: Value| match value {
                    Value::String(text) => Ok(text),
                    other => Err(wrong(&name, "a string or a list of strings", &other)),
                };
                values.into_iter().map(text).collect()
            }
            Some(other) => Err(wrong(&name, "a string or a list of strings", &other)),
        }
    }

    /// One of a few names.
    pub fn one_of<T: Copy>(&mut self, field: &str, names: &[(&str, T)]) -> Result<Option<T>, ApiError> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match names.iter().find(|(name, _)| value == *name) {
            Some((_, found)) => Ok(Some(*found)),
            None => {
                let all: Vec<&str> = names.iter().map(|(name, _)| *name).collect();
                Err(wrong(&self.name(field), &format!("one of {}", all.join(", ")), &value))
            }
        }
    }

    /// A field of which only some values can be honoured: those that change nothing here.
    pub fn only(&mut self, field: &str, values: &[Value], why: &str) -> Result<(), ApiError> {
        match self.value(field) {
            Some(value) if !values.contains(&value) => {
                let name = self.name(field);
                let message = format!("{name} = {} is not supported: {why}", brief(&value));
                Err(ApiError::param(name, message).code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses what is left.
    pub fn finish(self) -> Result<(), ApiError> {
        match self.left.iter().find(|(_, value)| !value.is_null()) {
            None => Ok(()),
            Some((field, _)) => {
                let name = self.name(field);
                let message = format!("the parameter {} is not supported; leave it out", brief_text(&name));
                Err(ApiError::param(name, message).code("unsupported_parameter"))
            }
        }
    }
}

/// A field that is not what it should be.
pub fn wrong(name: &str, expected: &str, found: &Value) -> ApiError {
    let message = format!("{name} must be {expected}, found {}", brief(found));
    ApiError::param(name, message)
}

fn whole(number: f64) -> Option<i64> {
    (number.fract() == 0.0 && number.abs() < 9e15).then_some(number as i64)
}

/// A value in a message; long ones are cut.
fn brief(value: &Value) -> String {
    match value {
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        other => brief_text(&other.to_string()),
    }
}

fn brief_text(text: &str) -> String {
    match text.char_indices().nth(80) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fields(value: Value) -> Fields {
        Fields::within("x", value.as_object().unwrap().clone())
    }

    #[test]
    fn null_is_absent_and_types_are_named() {
        let mut all = fields(json!({
            "a": null, "b": 3.0, "c": "3", "d": 2.5, "e": true, "f": ["s"], "g": "auto", "h": false
        }));
        assert_eq!(all.integer("a", 0..=9), Ok(None));
        assert_eq!(all.integer("b", 0..=9), Ok(Some(3)));
        let error = all.integer("c", 1..=9).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("x.c"));
        assert_eq!(error.message, "x.c must be a whole number from 1 to 9, found \"3\"");
        assert_eq!(
            all.number("d", 0.0..=2.0).unwrap_err().message,
            "x.d must be a number from 0 to 2, found 2.5"
        );
        assert!(all.number("e", 0.0..=2.0).is_err(), "a truth value is no number");
        assert_eq!(all.strings("f"), Ok(vec!["s".to_owned()]));
        assert_eq!(all.one_of("g", &[("auto", 1), ("none", 2)]), Ok(Some(1)));
        assert_eq!(all.only("h", &[json!(false)], "nothing is stored"), Ok(()));
        assert_eq!(all.finish(), Ok(()));
    }

    #[test]
    fn what_is_left_is_refused_by_name() {
        let error = fields(json!({"n": null, "wrong": 1})).finish().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("x.wrong"));
        assert_eq!(error.code, Some("unsupported_parameter"));
        let error = fields(json!({"store": true})).only("store", &[json!(false)], "nothing is stored");
        assert_eq!(error.unwrap_err().message, "x.store = true is not supported: nothing is stored");
    }
}
