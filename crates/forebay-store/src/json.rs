//! Strict JSON for the small untrusted files of a model folder.
//!
//! A pull reader over text already in memory: it allocates only for what its
//! caller keeps, stops at a fixed depth, and refuses what `serde_json` lets
//! pass silently: a key given twice. Both `config.json` (as a tree) and the
//! safetensors headers (streamed) are read with it.

use std::borrow::Cow;

use serde_json::{Map, Number, Value};

/// Objects and arrays may nest this deep; real files stay below ten.
pub const MAX_DEPTH: usize = 100;

/// Why a text is not the JSON that was asked for.
///
/// `Display` gives place and cause; the caller adds the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum JsonError {
    /// Something else stands where the grammar wants `expected`.
    #[error("line {line}, column {column}: expected {expected}, found {found}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// Byte within the line, from 1.
        column: usize,
        /// What JSON allows there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// One object holds the same key twice, so its meaning is open.
    #[error("line {line}, column {column}: the key {key:?} is given twice; keep one of the two")]
    DuplicateKey {
        /// Line of the second one, from 1.
        line: usize,
        /// Byte within the line, from 1.
        column: usize,
        /// The key.
        key: String,
    },
    /// Nesting deeper than [`MAX_DEPTH`].
    #[error("byte {offset}: objects or arrays nest deeper than {MAX_DEPTH} levels")]
    TooDeep {
        /// Where the limit was passed.
        offset: usize,
    },
    /// The bytes are not UTF-8.
    #[error("byte {offset} is not valid UTF-8; the file is damaged or is not JSON")]
    NotUtf8 {
        /// First byte that is not UTF-8.
        offset: usize,
    },
    /// A number beyond what a double can hold.
    #[error("line {line}, column {column}: the number {found} is out of range")]
    NumberRange {
        /// Line, from 1.
        line: usize,
        /// Byte within the line, from 1.
        column: usize,
        /// The number as written.
        found: String,
    },
}

/// What kind of value comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `{...}`
    Object,
    /// `[...]`
    Array,
    /// `"..."`
    String,
    /// Any number.
    Number,
    /// `true` or `false`.
    Bool,
    /// `null`.
    Null,
}

/// Reads one JSON text from front to back.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

/// Reads `bytes` as one JSON object; duplicate keys at any depth are an error.
pub fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, JsonError> {
    let mut reader = Reader::new(bytes)?;
    if reader.kind()? != Kind::Object {
        return Err(reader.syntax("an object ({...})"));
    }
    let map = reader.tree()?;
    reader.end()?;
    Ok(map)
}

/// The first `limit` characters of `text`, for quoting a found value in an error.
pub(crate) fn shorten(text: &str, limit: usize) -> String {
    match text.char_indices().nth(limit) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.to_owned(),
    }
}

impl<'a> Reader<'a> {
    /// A reader at the first byte of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Result<Self, JsonError> {
        let text = std::str::from_utf8(bytes).map_err(|e| JsonError::NotUtf8 { offset: e.valid_up_to() })?;
        Ok(Self { text, at: 0, depth: 0 })
    }

    /// The kind of the next value, which stays unread.
    pub fn kind(&mut self) -> Result<Kind, JsonError> {
        match self.peek() {
            Some(b'{') => Ok(Kind::Object),
            Some(b'[') => Ok(Kind::Array),
            Some(b'"') => Ok(Kind::String),
            Some(b'-' | b'0'..=b'9') => Ok(Kind::Number),
            Some(b't' | b'f') => Ok(Kind::Bool),
            Some(b'n') => Ok(Kind::Null),
            _ => Err(self.syntax("a value")),
        }
    }

    /// Reads an object: `each` is called with every key and must read the value behind it.
    ///
    /// Keys are not compared with one another here: the caller knows what it keeps.
    pub fn object<E: From<JsonError>>(
        &mut self,
        mut each: impl FnMut(&mut Self, Cow<'a, str>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'{', "an object ({...})")?;
        if self.accept(b'}') {
            self.depth -= 1;
            return Ok(());
        }
        loop {
            if self.peek() != Some(b'"') {
                return Err(self.syntax("a key in double quotes").into());
            }
            let key = self.string()?;
            self.expect(b':', "':'")?;
            each(self, key)?;
            if self.accept(b'}') {
                self.depth -= 1;
                return Ok(());
            }
            self.expect(b',', "',' or '}'")?;
        }
    }

    /// Reads an array: `each` is called once per element and must read it.
    pub fn array<E: From<JsonError>>(
        &mut self,
        mut each: impl FnMut(&mut Self) -> Result<(), E>,
    ) -> Result<(), E> {
        self.open(b'[', "an array ([...])")?;
        if self.accept(b']') {
            self.depth -= 1;
            return Ok(());
        }
        loop {
            each(self)?;
            if self.accept(b']') {
                self.depth -= 1;
                return Ok(());
            }
            self.expect(b',', "',' or ']'")?;
        }
    }

    /// Reads a string; it is borrowed from the text unless it holds escapes.
    pub fn string(&mut self) -> Result<Cow<'a, str>, JsonError> {
        self.expect(b'"', "a string")?;
        let start = self.at;
        loop {
            match self.text.as_bytes().get(self.at) {
                Some(b'"') => {
                    let plain = &self.text[start..self.at];
                    self.at += 1;
                    return Ok(Cow::Borrowed(plain));
                }
                Some(b'\\') => return self.escaped(start),
                Some(0x20..) => self.at += 1,
                _ => return Err(self.syntax("the rest of a string")),
            }
        }
    }

    /// Reads a number and gives its text, which follows the JSON grammar.
    pub fn number(&mut self) -> Result<&'a str, JsonError> {
        self.peek();
        let start = self.at;
        self.take(b'-');
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            if !self.take(b'+') {
                self.take(b'-');
            }
            self.digits()?;
        }
        Ok(&self.text[start..self.at])
    }

    /// Reads the next value, whatever it is, and forgets it.
    pub fn skip(&mut self) -> Result<(), JsonError> {
        match self.kind()? {
            Kind::Object => self.object(|reader, _| reader.skip()),
            Kind::Array => self.array(Self::skip),
            Kind::String => self.string().map(drop),
            Kind::Number => self.number().map(drop),
            Kind::Bool | Kind::Null => self.word().map(drop),
        }
    }

    /// Reads the next value as a tree; duplicate keys are an error.
    pub fn value(&mut self) -> Result<Value, JsonError> {
        match self.kind()? {
            Kind::Object => self.tree().map(Value::Object),
            Kind::Array => {
                let mut items = Vec::new();
                self.array(|reader| {
                    items.push(reader.value()?);
                    Ok::<_, JsonError>(())
                })?;
                Ok(Value::Array(items))
            }
            Kind::String => Ok(Value::String(self.string()?.into_owned())),
            Kind::Number => self.number_value(),
            Kind::Bool | Kind::Null => self.word(),
        }
    }

    /// Checks that only white space is left.
    pub fn end(&mut self) -> Result<(), JsonError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.syntax("the end of the text")),
        }
    }

    /// The syntax error "here stands something other than `expected`".
    pub fn syntax(&mut self, expected: &'static str) -> JsonError {
        let (line, column) = self.place(self.at);
        let found = match self.text[self.at..].chars().next() {
            Some(c) => format!("{c:?}"),
            None => "the end of the text".to_owned(),
        };
        JsonError::Syntax { line, column, expected, found }
    }

    fn tree(&mut self) -> Result<Map<String, Value>, JsonError> {
        let mut map = Map::new();
        self.object(|reader, key| {
            if map.contains_key(key.as_ref()) {
                let (line, column) = reader.place(reader.at);
                return Err(JsonError::DuplicateKey { line, column, key: shorten(&key, 100) });
            }
            let value = reader.value()?;
            map.insert(key.into_owned(), value);
            Ok(())
        })?;
        Ok(map)
    }

    fn number_value(&mut self) -> Result<Value, JsonError> {
        let start = self.at;
        let text = self.number()?;
        let exact = text.parse::<u64>().map(Number::from).or_else(|_| text.parse::<i64>().map(Number::from));
        let number = exact.ok().or_else(|| Number::from_f64(text.parse().ok()?));
        number.map(Value::Number).ok_or_else(|| {
            let (line, column) = self.place(start);
            JsonError::NumberRange { line, column, found: shorten(text, 40) }
        })
    }

    fn word(&mut self) -> Result<Value, JsonError> {
        let words = [("true", Value::Bool(true)), ("false", Value::Bool(false)), ("null", Value::Null)];
        for (word, value) in words {
            if self.text[self.at..].starts_with(word) {
                self.at += word.len();
                return Ok(value);
            }
        }
        Err(self.syntax("true, false or null"))
    }

    /// The rest of a string that began at `start`, from the escape at the current place on.
    fn escaped(&mut self, start: usize) -> Result<Cow<'a, str>, JsonError> {
        let mut out = self.text[start..self.at].to_owned();
        loop {
            let run = self.at;
            while matches!(self.text.as_bytes().get(self.at), Some(&b) if b >= 0x20 && b != b'"' && b != b'\\')
            {
                self.at += 1;
            }
            out.push_str(&self.text[run..self.at]);
            if self.take(b'"') {
                return Ok(Cow::Owned(out));
            }
            if !self.take(b'\\') {
                return Err(self.syntax("the rest of a string"));
            }
            out.push(self.escape()?);
        }
    }

    fn escape(&mut self) -> Result<char, JsonError> {
        let plain = match self.text.as_bytes().get(self.at) {
            Some(&c @ (b'"' | b'\\' | b'/')) => char::from(c),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => {
                self.at += 1;
                return self.unicode();
            }
            _ => return Err(self.syntax("an escape such as \\n or \\u0041")),
        };
        self.at += 1;
        Ok(plain)
    }

    fn unicode(&mut self) -> Result<char, JsonError> {
        const EXPECTED: &str = "a Unicode character as \\uXXXX";
        let first = self.hex4().ok_or_else(|| self.syntax(EXPECTED))?;
        let code = match first {
            0xD800..=0xDBFF => {
                let paired = self.take(b'\\') && self.take(b'u');
                let second = if paired { self.hex4() } else { None };
                match second {
                    Some(low @ 0xDC00..=0xDFFF) => 0x1_0000 + ((first - 0xD800) << 10) + (low - 0xDC00),
                    _ => return Err(self.syntax("the second half of a surrogate pair")),
                }
            }
            code => code,
        };
        char::from_u32(code).ok_or_else(|| self.syntax(EXPECTED))
    }

    fn hex4(&mut self) -> Option<u32> {
        let digits = self.text.as_bytes().get(self.at..self.at + 4)?;
        let code = digits.iter().try_fold(0, |code, &d| Some(code * 16 + char::from(d).to_digit(16)?))?;
        self.at += 4;
        Some(code)
    }

    fn digits(&mut self) -> Result<(), JsonError> {
        let start = self.at;
        while matches!(self.text.as_bytes().get(self.at), Some(b'0'..=b'9')) {
            self.at += 1;
        }
        if self.at == start { Err(self.syntax("a digit")) } else { Ok(()) }
    }

    fn open(&mut self, bracket: u8, expected: &'static str) -> Result<(), JsonError> {
        self.expect(bracket, expected)?;
        self.depth += 1;
        if self.depth > MAX_DEPTH { Err(JsonError::TooDeep { offset: self.at }) } else { Ok(()) }
    }

    /// Skips white space; the byte that follows, unread.
    fn peek(&mut self) -> Option<u8> {
        let bytes = self.text.as_bytes();
        while matches!(bytes.get(self.at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
        bytes.get(self.at).copied()
    }

    fn accept(&mut self, byte: u8) -> bool {
        self.peek();
        self.take(byte)
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.text.as_bytes().get(self.at) == Some(&byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), JsonError> {
        if self.accept(byte) { Ok(()) } else { Err(self.syntax(expected)) }
    }

    /// Line and column, both from 1, of byte `at`.
    fn place(&self, at: usize) -> (usize, usize) {
        let before = &self.text.as_bytes()[..at];
        let line_start = before.iter().rposition(|&b| b == b'\n').map_or(0, |i| i + 1);
        (before.iter().filter(|&&b| b == b'\n').count() + 1, at - line_start + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn fails(text: &str) -> JsonError {
        parse_object(text.as_bytes()).expect_err(text)
    }

    #[test]
    fn reads_what_json_allows() {
        let text = r#" {"a": [1, -2, 0.5e+1, true, false, null], "b\u00e9\ud83d\ude00\n": {"": "\"\\\/"}} "#;
        let map = parse_object(text.as_bytes()).unwrap();
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(Value::Object(map), expected);
    }

    #[test]
    fn refuses_what_json_forbids() {
        let texts = [
            "",
            " ",
            "{",
            "}",
            "[]",
            "7",
            "{a:1}",
            "{'a':1}",
            "{\"a\"}",
            "{\"a\" 1}",
            "{\"a\":}",
            "{\"a\":1,}",
            "{\"a\":1 \"b\":2}",
            "{\"a\":1}x",
            "{\"a\":1}{}",
            "{\"a\":01}",
            "{\"a\":+1}",
            "{\"a\":1.}",
            "{\"a\":.5}",
            "{\"a\":1e}",
            "{\"a\":-}",
            "{\"a\":nul}",
            "{\"a\":True}",
            "{\"a\":NaN}",
            "{\"a\":Infinity}",
            "{\"a\":[1,]}",
            "{\"a\":[1 2]}",
            "{\"a\":\"\n\"}",
            "{\"a\":\"\\x\"}",
            "{\"a\":\"\\u12\"}",
            "{\"a\":\"\\ud800\"}",
            "{\"a\":\"\\ud800\\u0041\"}",
            "{\"a\":\"\\udc00\"}",
            "{\"a\":\"",
            "{/*c*/}",
            "\u{feff}{}",
        ];
        for text in texts {
            fails(text);
        }
        assert!(matches!(parse_object(b"{\"\xff\":1}"), Err(JsonError::NotUtf8 { offset: 2 })));
    }

    #[test]
    fn a_key_given_twice_is_refused_at_any_depth() {
        for text in [r#"{"a":1,"b":2,"a":3}"#, r#"{"x":[{"a":1,"a":1}]}"#, r#"{"a":1,"\u0061":2}"#] {
            let JsonError::DuplicateKey { key, .. } = fails(text) else { panic!("{text}") };
            assert_eq!(key, "a");
        }
    }

    #[test]
    fn depth_is_limited() {
        let nest = |n: usize| format!("{{\"a\":{}{}}}", "[".repeat(n), "]".repeat(n));
        assert!(parse_object(nest(MAX_DEPTH - 1).as_bytes()).is_ok());
        assert!(matches!(fails(&nest(MAX_DEPTH)), JsonError::TooDeep { .. }));
        assert!(matches!(fails(&"{\"a\":".repeat(1_000_000)), JsonError::TooDeep { .. }));
        let skipped = "[".repeat(1_000_000);
        assert!(matches!(Reader::new(skipped.as_bytes()).unwrap().skip(), Err(JsonError::TooDeep { .. })));
    }

    #[test]
    fn numbers_keep_their_value_or_fail() {
        let map = parse_object(br#"{"u":18446744073709551615,"i":-9223372036854775808,"f":1e-5}"#).unwrap();
        assert_eq!(map["u"].as_u64(), Some(u64::MAX));
        assert_eq!(map["i"].as_i64(), Some(i64::MIN));
        assert_eq!(map["f"].as_f64(), Some(1e-5));
        assert!(matches!(fails(r#"{"a":1e400}"#), JsonError::NumberRange { .. }));
    }

    #[test]
    fn errors_name_the_place() {
        let JsonError::Syntax { line, column, found, .. } = fails("{\n  \"a\": 1\n  \"b\": 2\n}") else {
            panic!()
        };
        assert_eq!((line, column, found.as_str()), (3, 3, "'\"'"));
    }

    fn tree() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<u64>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".*".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::btree_map(".*", inner, 0..6).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn agrees_with_serde_json_on_valid_text(value in tree()) {
            let text = serde_json::to_string_pretty(&serde_json::json!({ "v": value })).unwrap();
            let ours = Value::Object(parse_object(text.as_bytes()).unwrap());
            prop_assert_eq!(ours, serde_json::from_str::<Value>(&text).unwrap());
        }

        #[test]
        fn accepts_only_what_serde_json_accepts(text in r#"\{("[ab\\]{0,2}"|[\[\]{}:,]|-?[0-9]{1,3}(\.[0-9])?|true|null| ){0,12}\}"#) {
            let ours = parse_object(text.as_bytes());
            let theirs = serde_json::from_str::<Map<String, Value>>(&text);
            match ours {
                Ok(map) => prop_assert_eq!(Some(map), theirs.ok()),
                Err(JsonError::DuplicateKey { .. }) => {}
                Err(_) => prop_assert!(theirs.is_err(), "{}", text),
            }
        }

        #[test]
        fn any_bytes_give_a_value_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_object(&bytes);
        }
    }
}
