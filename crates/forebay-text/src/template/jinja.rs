//! Runs a model's own Jinja template and keeps its control tokens apart from everything else.
//!
//! Before the template is compiled, each control token in its source is replaced by one private-use character
//! that occurs nowhere in the conversation. Where that character comes out, the template put a control token;
//! a literal `<|user|>` that comes out was typed by someone, and stays text. User text itself is handed to
//! the template unchanged, so trimming, splitting and comparing work as the template's author meant.

use super::clock::strftime;
use super::error::{RenderError, TemplateError};
use super::guard;
use super::json::{JsonStyle, MAX_INDENT, dumps};
use crate::Tokenizer;
use crate::prompt::RenderedPrompt;
use aho_corasick::{AhoCorasick, MatchKind};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, State, Value};
use regex::Regex;
use serde_json::Value as Json;
use std::collections::HashSet;
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

const NAME: &str = "chat template";

/// Work allowed for a render: a fixed part, and more for larger conversations. One unit is about one
/// instruction or 64 bytes of text made by the template, so this bounds time and memory.
const FUEL: u64 = 2_000_000;
const FUEL_PER_VALUE: u64 = 1_000;
const BYTES_PER_FUEL: u64 = 4;

/// `{% generation %}` marks the trained spans of a prompt; for rendering it means nothing.
static GENERATION_TAG: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("the pattern is a constant of this file")
});

/// A compiled template with marked control tokens.
pub(super) struct JinjaTemplate {
    origin: String,
    source: String,
    /// Named special tokens (`bos_token`, ...) that the template may refer to.
    names: Vec<(String, String)>,
    /// Literal texts of the control tokens.
    controls: Vec<String>,
    /// Finds them in the template; `None` when there are none.
    finder: Option<AhoCorasick>,
    /// Compiled with markers that suit every conversation without the same private-use characters.
    usual: Marked,
}

/// A template compiled with one set of markers, ascending and parallel to the control tokens.
struct Marked {
    environment: Environment<'static>,
    markers: Vec<char>,
}

impl JinjaTemplate {
    /// Compiles the template; `names` are the named special tokens of tokenizer_config.json.
    pub fn new(
        source: &str,
        origin: &str,
        names: Vec<(String, String)>,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TemplateError> {
        let source = GENERATION_TAG
            .replace_all(source, |tag: &regex::Captures| {
                let word = if tag.get(2).is_some() { "endif" } else { "if true" };
                format!("{{%{} {word} {}%}}", &tag[1], &tag[3])
            })
            .into_owned();
        let source = guard::guarded(&source)
            .map_err(|message| TemplateError::Syntax { origin: origin.to_owned(), message })?;
        let controls: Vec<String> = tokenizer
            .control_tokens()
            .filter(|(_, content)| !content.is_empty())
            .map(|(_, content)| content.to_owned())
            .collect();
        let syntax = |message: String| TemplateError::Syntax { origin: origin.to_owned(), message };
        let finder = match controls.is_empty() {
            true => None,
            false => Some(
                AhoCorasick::builder()
                    .match_kind(MatchKind::LeftmostLongest)
                    .build(&controls)
                    .map_err(|error| syntax(error.to_string()))?,
            ),
        };
        let markers = free_markers(controls.len(), &private_use_in([source.as_str()]))
            .ok_or_else(|| syntax("it uses too many private-use characters".to_owned()))?;
        let environment =
            compile(marked(&source, finder.as_ref(), &markers)).map_err(|error| syntax(describe(&error)))?;
        let usual = Marked { environment, markers };
        Ok(Self { origin: origin.to_owned(), source, names, controls, finder, usual })
    }

    /// Renders with these variables, all of which may hold user text.
    pub fn render(&self, variables: &serde_json::Map<String, Json>) -> Result<RenderedPrompt, RenderError> {
        let size = measure(variables);
        if size.has_nul {
            return Err(RenderError::NulCharacter);
        }
        if self.usual.markers.iter().any(|marker| size.private_use.contains(marker)) {
            let mut taken = size.private_use.clone();
            taken.extend(private_use_in([self.source.as_str()]));
            let markers = free_markers(self.controls.len(), &taken).ok_or(RenderError::NoMarkersLeft)?;
            let environment = compile(marked(&self.source, self.finder.as_ref(), &markers))
                .map_err(|error| self.failed(&error))?;
            self.run(&Marked { environment, markers }, variables, size.fuel)
        } else {
            self.run(&self.usual, variables, size.fuel)
        }
    }

    /// Renders the template as it was written, without telling control tokens from text.
    pub fn render_unmarked(&self, variables: &serde_json::Map<String, Json>) -> Result<String, RenderError> {
        let plain = compile(self.source.clone()).map_err(|error| self.failed(&error))?;
        self.evaluate(&plain, &[], variables, measure(variables).fuel)
    }

    fn run(
        &self,
        with: &Marked,
        variables: &serde_json::Map<String, Json>,
        fuel: u64,
    ) -> Result<RenderedPrompt, RenderError> {
        let output = self.evaluate(&with.environment, &with.markers, variables, fuel)?;
        let mut prompt = RenderedPrompt::new();
        let mut text_from = 0;
        // One pass whatever the number of control tokens: markers are ascending.
        for (at, c) in output.char_indices().filter(|(_, c)| is_private_use(c)) {
            let Ok(which) = with.markers.binary_search(&c) else { continue };
            prompt.push_text(&output[text_from..at]);
            prompt.push_control(&self.controls[which]);
            text_from = at + c.len_utf8();
        }
        prompt.push_text(&output[text_from..]);
        Ok(prompt)
    }

    fn evaluate(
        &self,
        environment: &Environment<'static>,
        markers: &[char],
        variables: &serde_json::Map<String, Json>,
        fuel: u64,
    ) -> Result<String, RenderError> {
        let mut all = serde_json::Map::new();
        for (name, content) in &self.names {
            let finder = self.finder.as_ref().filter(|_| !markers.is_empty());
            all.insert(name.clone(), marked(content, finder, markers).into());
        }
        all.extend(variables.iter().map(|(name, value)| (name.clone(), value.clone())));
        let mut environment = environment.clone();
        environment.set_fuel(Some(fuel));
        environment
            .get_template(NAME)
            .and_then(|template| template.render(Value::from(Serde(&all))))
            .map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &Error) -> RenderError {
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(current) = cause {
            if let Some(refusal) = current.downcast_ref::<Refusal>() {
                return RenderError::Refused { message: refusal.0.clone() };
            }
            if current.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::OutOfFuel) {
                return RenderError::OutOfFuel { origin: self.origin.clone() };
            }
            cause = current.source();
        }
        RenderError::Failed { origin: self.origin.clone(), message: describe(error) }
    }
}

/// An error of the engine with everything that caused it, on one line.
fn describe(error: &Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    text
}

/// The source with each control token replaced by its marker.
fn marked(source: &str, finder: Option<&AhoCorasick>, markers: &[char]) -> String {
    match finder {
        Some(finder) => {
            let markers: Vec<String> = markers.iter().map(char::to_string).collect();
            finder.replace_all(source, &markers)
        }
        None => source.to_owned(),
    }
}

/// Planes 15 and 16, which Unicode leaves to private agreement.
fn is_private_use(c: &char) -> bool {
    matches!(c, '\u{F0000}'..='\u{FFFFD}' | '\u{100000}'..='\u{10FFFD}')
}

fn private_use_in<'t>(texts: impl IntoIterator<Item = &'t str>) -> HashSet<char> {
    texts.into_iter().flat_map(str::chars).filter(is_private_use).collect()
}

/// `count` private-use characters outside `taken`, or `None` when too few are left.
fn free_markers(count: usize, taken: &HashSet<char>) -> Option<Vec<char>> {
    let free = ('\u{F0000}'..='\u{10FFFD}').filter(|c| is_private_use(c) && !taken.contains(c));
    let markers: Vec<char> = free.take(count).collect();
    (markers.len() == count).then_some(markers)
}

/// What a render needs to know about its variables.
struct Size {
    has_nul: bool,
    private_use: HashSet<char>,
    fuel: u64,
}

fn measure(variables: &serde_json::Map<String, Json>) -> Size {
    let mut size = Size { has_nul: false, private_use: HashSet::new(), fuel: FUEL };
    let text = |text: &str, size: &mut Size| {
        size.has_nul |= text.contains('\0');
        // Four-byte characters of these planes begin with F3 or F4; most text has none.
        if text.bytes().any(|byte| byte >= 0xF3) {
            size.private_use.extend(private_use_in([text]));
        }
        size.fuel += text.len() as u64 / BYTES_PER_FUEL;
    };
    let mut pending: Vec<&Json> = Vec::new();
    for (name, value) in variables {
        text(name, &mut size);
        pending.push(value);
    }
    while let Some(value) = pending.pop() {
        size.fuel += FUEL_PER_VALUE;
        match value {
            Json::String(content) => text(content, &mut size),
            Json::Array(items) => pending.extend(items),
            Json::Object(fields) => {
                for (key, value) in fields {
                    text(key, &mut size);
                    pending.push(value);
                }
            }
            Json::Null | Json::Bool(_) | Json::Number(_) => {}
        }
    }
    size
}

/// The environment that chat templates are written for: blocks trimmed, Python's methods on strings, lists and
/// objects, and the functions that the Hugging Face library adds.
fn compile(source: String) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_auto_escape_callback(|_| AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_filter(guard::FILTER, |state: &State, value: Value| {
        guard::measure(state, &value, false).map(|()| value)
    });
    environment.add_filter(guard::MEMBER_FILTER, |state: &State, value: Value| {
        guard::measure(state, &value, true).map(|()| value)
    });
    environment.add_filter("string", |state: &State, value: Value| {
        guard::measure(state, &value, false).and_then(|()| minijinja::filters::string(state, &value))
    });
    environment.set_formatter(|out, state, value| {
        guard::measure(state, value, false)?;
        minijinja::escape_formatter(out, state, value)
    });
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_template_owned(NAME, source)?;
    Ok(environment)
}

/// `tojson` as the Hugging Face library defines it. The engine's own refuses `ensure_ascii` and escapes for HTML.
fn tojson(state: &State, value: &Value, options: Kwargs) -> Result<String, Error> {
    let mut style = JsonStyle {
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        indent: options.get::<Option<usize>>("indent")?,
        ..JsonStyle::default()
    };
    match options.get::<Option<Vec<String>>>("separators")?.as_deref() {
        Some([item, key]) => (style.item_separator, style.key_separator) = (item.clone(), key.clone()),
        Some(_) => return Err(Error::new(ErrorKind::InvalidOperation, "separators must be two strings")),
        None if style.indent.is_some() => style.item_separator = ",".to_owned(),
        None => {}
    }
    options.assert_all_used()?;
    if style.indent.is_some_and(|indent| indent > MAX_INDENT) {
        let message = format!("tojson: indent may be at most {MAX_INDENT}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    }
    // The result is paid for when it is returned; this pays while it grows, so that it cannot grow unpaid.
    let mut paid = 0;
    dumps(value, &style, &mut |written| {
        let due = (written - paid) as u64 / 64 + 1;
        paid = written;
        state.consume_fuel(due)
    })
}

/// A template's deliberate refusal, told apart from its accidents by this type.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception was called").with_source(Refusal(message)))
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    strftime(now, format).map_err(|directive| {
        Error::new(ErrorKind::InvalidOperation, format!("strftime_now does not know %{directive}"))
    })
}
