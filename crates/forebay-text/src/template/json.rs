//! JSON text as Python's `json.dumps` writes it, which is what models were trained on: separators `, ` and
//! `: `, keys in their own order, nothing escaped for HTML, non-ASCII kept unless asked otherwise.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// How deep values may nest; protects the stack.
const MAX_DEPTH: usize = 200;

/// Most spaces per level: with [`MAX_DEPTH`], a bound on what one line can cost before it is charged.
pub(super) const MAX_INDENT: usize = 16;

/// The options of Python's `json.dumps` that chat templates use.
#[derive(Debug, Clone)]
pub(super) struct JsonStyle {
    /// Write every non-ASCII character as `\uXXXX`.
    pub ensure_ascii: bool,
    /// Sort object keys.
    pub sort_keys: bool,
    /// Spaces per level (at most [`MAX_INDENT`]), each item on its own line; `None` for one line.
    pub indent: Option<usize>,
    /// Between items.
    pub item_separator: String,
    /// Between key and value.
    pub key_separator: String,
}

impl Default for JsonStyle {
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            sort_keys: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
        }
    }
}

/// Writes `value` as JSON. `charge` is called with the number of bytes written so far after every scalar, and
/// may stop the work (a template can build sequences far longer than itself).
pub(super) fn dumps(
    value: &Value,
    style: &JsonStyle,
    charge: &mut dyn FnMut(usize) -> Result<(), Error>,
) -> Result<String, Error> {
    let mut writer = Writer { out: String::new(), style, charge };
    writer.value(value, 0)?;
    Ok(writer.out)
}

struct Writer<'a> {
    out: String,
    style: &'a JsonStyle,
    charge: &'a mut dyn FnMut(usize) -> Result<(), Error>,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(refused("values nest too deeply for JSON"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)?),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => return self.map(value, depth),
            ValueKind::Seq | ValueKind::Iterable => return self.sequence(value, depth),
            other => return Err(refused(format!("a value of type {other} is not JSON"))),
        }
        (self.charge)(self.out.len())
    }

    fn sequence(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut empty = true;
        for item in value.try_iter()? {
            (self.charge)(self.out.len())?;
            self.separate(empty, depth);
            empty = false;
            self.value(&item, depth + 1)?;
        }
        self.close(empty, depth, ']');
        (self.charge)(self.out.len())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let item = value.get_item(&key)?;
            entries.push((key_text(&key)?, item));
            (self.charge)(self.out.len())?;
        }
        if self.style.sort_keys {
            entries.sort_by(|a, b| a.0.cmp(&b.0));
        }
        self.out.push('{');
        for (at, (key, item)) in entries.iter().enumerate() {
            self.separate(at == 0, depth);
            self.string(key);
            self.out.push_str(&self.style.key_separator);
            self.value(item, depth + 1)?;
        }
        self.close(entries.is_empty(), depth, '}');
        (self.charge)(self.out.len())
    }

    /// Before an item: the separator (not before the first) and, when indenting, a new line.
    fn separate(&mut self, first: bool, depth: usize) {
        if !first {
            self.out.push_str(&self.style.item_separator);
        }
        self.new_line(depth + 1);
    }

    fn close(&mut self, empty: bool, depth: usize, bracket: char) {
        if !empty {
            self.new_line(depth);
        }
        self.out.push(bracket);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = self.style.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{C}' => self.out.push_str("\\f"),
                '\0'..='\u{1F}' => self.unicode_escape(c),
                ' '..='~' => self.out.push(c),
                _ if self.style.ensure_ascii => self.unicode_escape(c),
                _ => self.out.push(c),
            }
        }
        self.out.push('"');
    }

    fn unicode_escape(&mut self, c: char) {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a String cannot fail.
            let _ = write!(self.out, "\\u{unit:04x}");
        }
    }
}

fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.as_str().unwrap_or_default().to_owned()),
        ValueKind::Number => number(key),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        other => Err(refused(format!("a key of type {other} is not JSON"))),
    }
}

fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let float = f64::try_from(value.clone())?;
    if float.is_finite() {
        Ok(float_text(float))
    } else {
        Err(refused("a number that is not finite is not JSON"))
    }
}

/// A finite float as Python's `repr`: shortest digits that read back the same, exponent form below 1e-4 and from
/// 1e16 on, always with a point or an exponent.
fn float_text(float: f64) -> String {
    let scientific = format!("{float:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else { return scientific };
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{digits}e{sign}{:02}", exponent.abs())
        }
        _ => format!("{float:?}"),
    }
}

fn refused(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn text(value: serde_json::Value, style: &JsonStyle) -> String {
        dumps(&Value::from(Serde(value)), style, &mut |_| Ok(())).unwrap()
    }

    /// Expected texts were produced by Python 3.11's `json.dumps(..., ensure_ascii=False)`.
    #[test]
    fn writes_what_python_writes() {
        let plain = JsonStyle::default();
        for (value, expected) in [
            (json!({"b": [1, 2.0, -0.0], "a": {}}), r#"{"b": [1, 2.0, -0.0], "a": {}}"#),
            (json!([null, true, false, []]), "[null, true, false, []]"),
            (json!("<b>&'é中\u{1F642}\u{7f}"), "\"<b>&'é中\u{1F642}\u{7f}\""),
            (json!("a\"\\\n\r\t\u{8}\u{c}\u{1}"), r#""a\"\\\n\r\t\b\f\u0001""#),
            (
                json!([1e16, 1e15, 123456.789, 1e-4, 1e-5, 1.5e300, 1e22]),
                "[1e+16, 1000000000000000.0, 123456.789, 0.0001, 1e-05, 1.5e+300, 1e+22]",
            ),
            (json!([u64::MAX, i64::MIN]), "[18446744073709551615, -9223372036854775808]"),
        ] {
            assert_eq!(text(value, &plain), expected);
        }
    }

    #[test]
    fn options_do_what_pythons_do() {
        let ascii = JsonStyle { ensure_ascii: true, ..JsonStyle::default() };
        assert_eq!(text(json!("é中\u{1F642}\u{7f}"), &ascii), "\"\\u00e9\\u4e2d\\ud83d\\ude42\\u007f\"");
        let sorted = JsonStyle { sort_keys: true, ..JsonStyle::default() };
        assert_eq!(text(json!({"b": 1, "a": 2}), &sorted), r#"{"a": 2, "b": 1}"#);
        let indented = JsonStyle { indent: Some(2), item_separator: ",".into(), ..JsonStyle::default() };
        assert_eq!(
            text(json!({"a": [1, {}], "b": []}), &indented),
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}"
        );
    }

    #[test]
    fn work_can_be_stopped_and_depth_is_bounded() {
        let long = Value::from(vec![1; 100]);
        let mut calls = 0;
        let stopped = dumps(&long, &JsonStyle::default(), &mut |_| {
            calls += 1;
            if calls > 10 { Err(refused("enough")) } else { Ok(()) }
        });
        assert!(stopped.is_err());
        let deep = (0..MAX_DEPTH + 5).fold(Value::from(1), |inner, _| Value::from(vec![inner]));
        assert!(dumps(&deep, &JsonStyle::default(), &mut |_| Ok(())).is_err());
        assert!(dumps(&Value::UNDEFINED, &JsonStyle::default(), &mut |_| Ok(())).is_err());
    }
}
