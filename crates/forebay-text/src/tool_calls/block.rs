//! The inside of one call.

use serde_json::{Map, Value};

use super::types::ToolTypes;
use super::{
    CALL_CLOSE, CALL_OPEN, KEY_CLOSE, KEY_OPEN, ParsedCall, VALUE_CLOSE, VALUE_OPEN, beginning_at_end,
};

/// Where in a call the text behind `at` belongs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Place {
    /// In front of the arguments.
    #[default]
    Head,
    Key,
    AfterKey,
    Value,
    /// Behind an argument.
    Between,
    /// Behind the closing tag.
    Closed,
    /// There was none: the next call begins.
    Broken,
}

/// A call as it is read.
#[derive(Debug, Clone, Default)]
pub(super) struct Block {
    /// All text since the opening tag, without the closing one.
    raw: String,
    /// Where the piece at `place` begins.
    at: usize,
    /// No tag that matters begins before this.
    seen: usize,
    place: Place,
    head: String,
    key: String,
    arguments: Vec<(String, String)>,
    /// Text that has no place in a call.
    loose: String,
}

impl Block {
    /// Takes more text. `Some` once the call is over, with what is behind it.
    pub fn push(&mut self, text: &str) -> Option<String> {
        self.raw.push_str(text);
        loop {
            match self.place {
                Place::Value => {
                    let end = self.value_end()?;
                    let (to, next) = match end {
                        ValueEnd::Closed(to) => (to, to + VALUE_CLOSE.len()),
                        ValueEnd::WithCall(to) => (to, to),
                    };
                    self.argument(to);
                    self.moved(next, Place::Between);
                }
                Place::Closed | Place::Broken => {
                    // What is behind it is another's.
                    return Some(self.raw.split_off(self.at));
                }
                _ => {
                    let (to, tag) = self.next_tag()?;
                    let piece = self.raw[self.at..to].to_owned();
                    self.leave(&piece);
                    self.enter(to, tag);
                }
            }
        }
    }

    /// The first tag that matters at this place.
    fn next_tag(&mut self) -> Option<(usize, &'static str)> {
        let tags: &[&'static str] = match self.place {
            Place::Key => &[KEY_CLOSE, VALUE_OPEN, CALL_CLOSE, CALL_OPEN],
            Place::AfterKey => &[VALUE_OPEN, KEY_OPEN, CALL_CLOSE, CALL_OPEN],
            _ => &[KEY_OPEN, CALL_CLOSE, CALL_OPEN],
        };
        let found = tags.iter().filter_map(|tag| Some((self.raw[self.seen..].find(tag)? + self.seen, *tag)));
        let first = found.min_by_key(|(at, _)| *at);
        if first.is_none() {
            let undecided = tags.iter().map(|tag| beginning_at_end(&self.raw[self.seen..], tag)).max();
            self.seen = self.raw.len() - undecided.unwrap_or(0);
        }
        first
    }

    /// What the piece at this place was.
    fn leave(&mut self, piece: &str) {
        match self.place {
            Place::Head => self.head = piece.to_owned(),
            Place::Key => self.key = piece.trim().to_owned(),
            Place::AfterKey | Place::Between => self.drop_loose(piece),
            Place::Value | Place::Closed | Place::Broken => {}
        }
    }

    fn enter(&mut self, at: usize, tag: &'static str) {
        let behind = at + tag.len();
        let place = match tag {
            KEY_CLOSE => Place::AfterKey,
            VALUE_OPEN => Place::Value,
            KEY_OPEN => {
                self.orphan();
                Place::Key
            }
            CALL_CLOSE => {
                self.orphan();
                // The tag is no part of what was inside.
                self.raw.replace_range(at..behind, "");
                return self.moved(at, Place::Closed);
            }
            _ => {
                self.orphan();
                return self.moved(at, Place::Broken);
            }
        };
        self.moved(behind, place);
    }

    fn moved(&mut self, at: usize, place: Place) {
        (self.at, self.seen, self.place) = (at, at, place);
    }

    /// A name whose value never came is text.
    fn orphan(&mut self) {
        let key = std::mem::take(&mut self.key);
        self.drop_loose(&key);
    }

    fn drop_loose(&mut self, text: &str) {
        let text = without_tags(text);
        let text = text.trim();
        if text.is_empty() {
            return;
        }
        if !self.loose.is_empty() {
            self.loose.push('\n');
        }
        self.loose.push_str(text);
    }

    /// The value ends at `to`.
    fn argument(&mut self, to: usize) {
        let value = self.raw[self.at..to].to_owned();
        self.arguments.push((std::mem::take(&mut self.key), value));
    }

    /// Where the value ends, once that is certain. The tag that closes a call may stand in a value as text: it ends one
    /// that was not closed only where another call follows, or nothing.
    fn value_end(&mut self) -> Option<ValueEnd> {
        loop {
            let ahead = &self.raw[self.seen..];
            let close = ahead.find(VALUE_CLOSE).map(|at| at + self.seen);
            let call = ahead.find(CALL_CLOSE).map(|at| at + self.seen);
            match (close, call) {
                (Some(close), Some(call)) if close < call => return Some(ValueEnd::Closed(close)),
                (close, Some(call)) => {
                    let behind = self.raw[call + CALL_CLOSE.len()..].trim_start();
                    if behind.starts_with(CALL_OPEN) {
                        return Some(ValueEnd::WithCall(call));
                    }
                    if close.is_none() && CALL_OPEN.starts_with(behind) {
                        self.seen = call;
                        return None;
                    }
                    self.seen = call + CALL_CLOSE.len();
                }
                (Some(close), None) => return Some(ValueEnd::Closed(close)),
                (None, None) => {
                    let undecided =
                        [VALUE_CLOSE, CALL_CLOSE].map(|tag| beginning_at_end(ahead, tag)).into_iter().max();
                    self.seen = self.raw.len() - undecided.unwrap_or(0);
                    return None;
                }
            }
        }
    }

    /// Ends a call at the end of the answer; `false` if it is not all there.
    pub fn close(&mut self, tools: &[ToolTypes]) -> bool {
        let mut end = self.raw.trim_end().len();
        let inside = self.raw[self.at.min(end)..end].to_owned();
        if let Some(at) = inside.rfind(CALL_CLOSE).filter(|at| at + CALL_CLOSE.len() == inside.len()) {
            // It ended a value that was not closed.
            end = self.at + at;
        } else {
            let half = [CALL_CLOSE, VALUE_CLOSE, KEY_CLOSE].map(|tag| beginning_at_end(&inside, tag));
            // Two characters are needed to tell a tag from a sign.
            end -= half.into_iter().max().filter(|half| *half > 1).unwrap_or(0);
        }
        let end = end.max(self.at);
        match self.place {
            Place::Value => self.argument(end),
            Place::Head => {
                self.head = self.raw[self.at..end].to_owned();
                let known = |name: &str| tools.iter().any(|tool| tool.name == name);
                let Some(head) = Head::read(&self.head, &known) else { return false };
                if !known(&head.name) || !head.rest.is_empty() {
                    return false;
                }
            }
            Place::Key => return false,
            Place::AfterKey => return false,
            Place::Between => {
                let piece = self.raw[self.at..end].to_owned();
                self.drop_loose(&piece);
            }
            Place::Closed | Place::Broken => {}
        }
        self.moved(end, Place::Broken);
        true
    }

    /// All text since the opening tag, without the closing one.
    pub fn raw(&self) -> &str {
        &self.raw
    }

    /// Whether there was a closing tag.
    pub fn is_closed(&self) -> bool {
        self.place == Place::Closed
    }

    /// The call, and text that has no place in it; `None` if it is none.
    pub fn call(&self, tools: &[ToolTypes]) -> Option<(ParsedCall, String)> {
        let known = |name: &str| tools.iter().any(|tool| tool.name == name);
        let head = Head::read(&self.head, &known)?;
        let tool = tools.iter().find(|tool| tool.name == head.name);
        let mut arguments = head.arguments;
        for (key, text) in &self.arguments {
            let value = match tool {
                Some(tool) => tool.typed(key, text),
                None => types_of_nobody(text),
            };
            arguments.insert(key.clone(), value);
        }
        let mut loose = head.rest;
        if !loose.is_empty() && !self.loose.is_empty() {
            loose.push('\n');
        }
        loose.push_str(&self.loose);
        Some((ParsedCall { name: head.name, arguments }, loose))
    }
}

fn types_of_nobody(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.to_owned()))
}

enum ValueEnd {
    /// At its own tag.
    Closed(usize),
    /// At the tag that closes the call.
    WithCall(usize),
}

/// What stands in front of the arguments: the name, and whatever a model puts there instead of arguments.
struct Head {
    name: String,
    arguments: Map<String, Value>,
    /// Text that is neither.
    rest: String,
}

impl Head {
    fn read(head: &str, known: &dyn Fn(&str) -> bool) -> Option<Self> {
        let text = without_tags(head);
        let text = text.trim();
        if let Some(call) = json_object(text) {
            return Self::of_json(&call);
        }
        let end = text.find(|c: char| !is_name(c)).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        if name.is_empty() {
            // A name in other letters; a whole sentence is none.
            let fits = !text.is_empty() && !text.contains(char::is_whitespace) && !text.contains(['{', '}']);
            return fits.then(|| Self { name: text.to_owned(), arguments: Map::new(), rest: String::new() });
        }
        let short = name.rsplit('.').next().unwrap_or(name);
        let name = if !known(name) && known(short) { short } else { name };
        let rest = rest.trim();
        let inner = rest.strip_prefix('(').and_then(|rest| rest.strip_suffix(')')).unwrap_or(rest).trim();
        let (arguments, rest) = match json_object(inner) {
            Some(arguments) => (arguments, String::new()),
            None => (Map::new(), if inner.is_empty() { String::new() } else { rest.to_owned() }),
        };
        Some(Self { name: name.to_owned(), arguments, rest })
    }

    /// The form that other families write: `{"name": ..., "arguments": {...}}`.
    fn of_json(call: &Map<String, Value>) -> Option<Self> {
        let known =
            |key: &String| matches!(key.as_str(), "name" | "arguments" | "parameters" | "type" | "id");
        if !call.keys().all(known) {
            return None;
        }
        let name = call.get("name")?.as_str()?.to_owned();
        let arguments = match call.get("arguments").or_else(|| call.get("parameters")) {
            None | Some(Value::Null) => Map::new(),
            Some(Value::Object(arguments)) => arguments.clone(),
            Some(Value::String(text)) => json_object(text)?,
            Some(_) => return None,
        };
        Some(Self { name, arguments, rest: String::new() })
    }
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-')
}

fn json_object(text: &str) -> Option<Map<String, Value>> {
    if !text.starts_with('{') {
        return None;
    }
    serde_json::from_str(text).ok()
}

/// `text` without anything that looks like a tag of a word.
fn without_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(open) = rest.find('<') {
        let inside = &rest[open + 1..];
        let word = inside.strip_prefix('/').unwrap_or(inside);
        let end = word.find(|c: char| !is_name(c)).unwrap_or(word.len());
        let tag = end > 0 && word[end..].starts_with('>');
        out.push_str(&rest[..open]);
        if tag {
            rest = &word[end + 1..];
        } else {
            out.push('<');
            rest = inside;
        }
    }
    out + rest
}
