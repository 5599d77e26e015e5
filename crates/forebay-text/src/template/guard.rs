//! Bounds what a template can build.
//!
//! The engine's fuel is charged for instructions and text, but not for lists that share their items: sixty times
//! `x = [x, x]` is cheap to build and takes for ever to print, and a value nested ten thousand deep overflows the
//! stack. So each value is measured, with everything it shares counted again, where the template gives it a
//! name: [`guarded`] rewrites the source so that every `set`, `for`, `with`, `macro` and `call` passes its values
//! through the filter [`FILTER`], which charges for them and refuses what is too large or too deep. What is
//! printed, joined or made a string is measured too. The operator `*` is refused, because it repeats
//! lists without a name, and a namespace inside another value, because it could come to hold itself.
//!
//! The limit of this: between two names, one expression can still combine bounded values as often as its source
//! mentions them (`a ~ [b, b, b]`), or repeat one with `map`, and comparing two lists costs what they hold while
//! the engine charges for their outermost items only. So a hostile template can still take much longer than its
//! fuel suggests (minutes, not for ever). Rendering is not a sandbox: use templates of models that you trust.

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, State, Value};
use regex::Regex;
use std::collections::HashSet;
use std::sync::LazyLock;

static END_RAW: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\{%[-+]?\s*endraw").expect("the pattern is a constant of this file"));

/// The filter that measures; no template of a model uses this name.
pub(super) const FILTER: &str = "forebay_bounded";
/// The same for a value that is put into a namespace.
pub(super) const MEMBER_FILTER: &str = "forebay_bounded_member";

/// How deep a value may nest: deeper than the JSON of any request, and no danger to the stack.
const MAX_DEPTH: usize = 130;
/// A value may hold this part of the render's work in text, and this part of it in values. The allowance grows
/// with the conversation, which itself always costs less.
const TEXT_SHARE: u64 = 16;
const NODE_SHARE: u64 = 256;
/// Values measured for one unit of work.
const NODES_PER_FUEL: u64 = 4;

/// Charges for `value` as if nothing in it were shared. `member`: it goes into a namespace.
pub(super) fn measure(state: &State, value: &Value, member: bool) -> Result<(), Error> {
    if value.as_object().is_none() {
        return Ok(());
    }
    let work = state.fuel_levels().map_or(u64::MAX, |(used, left)| used.saturating_add(left));
    if is_namespace(value) && member {
        return Err(refused("a namespace may not be put into a namespace"));
    }
    let mut seen = Seen { nodes: 0, text: 0, paid: 0, work };
    walk(state, value, 0, &mut seen)?;
    state.consume_fuel(seen.cost() - seen.paid)
}

struct Seen {
    nodes: u64,
    /// Text, in units of 64 bytes.
    text: u64,
    /// Of [`Seen::cost`], what has been charged.
    paid: u64,
    /// Allowed for the whole render.
    work: u64,
}

impl Seen {
    fn cost(&self) -> u64 {
        self.text + self.nodes / NODES_PER_FUEL
    }
}

fn walk(state: &State, value: &Value, depth: usize, seen: &mut Seen) -> Result<(), Error> {
    seen.nodes += 1;
    seen.text += value.as_str().map_or(0, |text| text.len() as u64 / 64);
    if seen.text > seen.work / TEXT_SHARE || seen.nodes > seen.work / NODE_SHARE {
        return Err(Error::new(ErrorKind::OutOfFuel, "a value of the template is too large"));
    }
    if seen.cost() > seen.paid + 256 {
        state.consume_fuel(seen.cost() - seen.paid)?;
        seen.paid = seen.cost();
    }
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        return Ok(());
    }
    if depth >= MAX_DEPTH {
        return Err(refused("values of the template nest too deeply"));
    }
    if depth > 0 && is_namespace(value) {
        return Err(refused("a namespace may not be part of another value"));
    }
    let is_map = value.kind() == ValueKind::Map;
    for item in value.try_iter()? {
        walk(state, &item, depth + 1, seen)?;
        if is_map {
            walk(state, &value.get_item(&item)?, depth + 1, seen)?;
        }
    }
    Ok(())
}

fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("Namespace"))
}

fn refused(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// One token inside a tag: its text and where it starts.
type Token<'s> = (usize, &'s str);

/// The source with its bindings measured, or what is refused in it.
pub(super) fn guarded(source: &str) -> Result<String, String> {
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut at = 0;
    while let Some(open) = source[at..].find('{').map(|found| at + found) {
        let rest = &source[open..];
        let body = open + 2;
        if rest.starts_with("{#") {
            let end = source[body..].find("#}").map_or(source.len(), |found| body + found + 2);
            out.push_str(&source[at..end]);
            at = end;
        } else if rest.starts_with("{{") || rest.starts_with("{%") {
            let close = if rest.starts_with("{{") { "}}" } else { "%}" };
            // An unfinished tag is left for the engine to complain about.
            let Some((tokens, end)) = tokens_until(source, body, close) else { break };
            if let Some((position, _)) = tokens.iter().find(|(_, token)| token.starts_with('*')) {
                let line = source[..*position].matches('\n').count() + 1;
                return Err(format!("line {line}: the operator * is not supported in chat templates"));
            }
            out.push_str(&source[at..open]);
            at = end + 2;
            let tag = &source[open..at];
            if close == "%}" {
                rewrite(tag, open, &tokens, &mut out);
                if tokens.iter().map(|token| token.1).find(|token| !matches!(*token, "-" | "+"))
                    == Some("raw")
                {
                    // Up to the tag that ends it, which is copied like any other.
                    let raw_end = END_RAW.find_at(source, at).map_or(source.len(), |found| found.start());
                    out.push_str(&source[at..raw_end]);
                    at = raw_end;
                }
            } else {
                out.push_str(tag);
            }
        } else {
            out.push_str(&source[at..=open]);
            at = open + 1;
        }
    }
    out.push_str(&source[at..]);
    Ok(out)
}

/// The tokens from `from` to the `close` outside strings and brackets, and where that is.
fn tokens_until<'s>(source: &'s str, from: usize, close: &str) -> Option<(Vec<Token<'s>>, usize)> {
    let mut tokens = Vec::new();
    let mut braces = 0_usize;
    let mut at = from;
    while let Some(c) = source[at..].chars().next() {
        let rest = &source[at..];
        if rest.starts_with(close) && braces == 0 {
            return Some((tokens, at));
        }
        let length = match c {
            '\'' | '"' => string_length(rest, c)?,
            _ if c.is_alphanumeric() || c == '_' => {
                rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len())
            }
            '=' | '!' | '<' | '>' if rest[1..].starts_with('=') => 2,
            _ => c.len_utf8(),
        };
        match c {
            '{' => braces += 1,
            '}' => braces = braces.saturating_sub(1),
            _ => {}
        }
        if !c.is_whitespace() {
            tokens.push((at, &rest[..length]));
        }
        at += length;
    }
    None
}

fn string_length(text: &str, quote: char) -> Option<usize> {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return Some(at + 1),
            _ => {}
        }
    }
    None
}

/// Copies a block tag; `start` is where it lies in the source that the tokens count from.
fn rewrite(tag: &str, start: usize, tokens: &[Token], out: &mut String) {
    let control = |token: &Token| matches!(token.1, "-" | "+");
    let left = usize::from(tokens.first().is_some_and(|first| first.0 == start + 2 && control(first)));
    let tokens = &tokens[left..];
    let right = tokens.last().filter(|last| tag.len() - (last.0 - start) == 3 && control(last));
    let words = &tokens[..tokens.len() - usize::from(right.is_some())];
    let Some((keyword, words)) = words.split_first() else {
        out.push_str(tag);
        return;
    };
    let depths: Vec<usize> = words
        .iter()
        .scan(0_usize, |depth, token| {
            let before = *depth;
            match token.1 {
                "(" | "[" | "{" => *depth += 1,
                ")" | "]" | "}" => *depth = depth.saturating_sub(1),
                _ => {}
            }
            Some(before)
        })
        .collect();
    let is_name = |text: &str| text.starts_with(|c: char| c.is_alphabetic() || c == '_');
    // Names that follow an opening bracket or a comma at this depth.
    let listed = |level: usize| {
        words.iter().enumerate().filter(move |(at, _)| depths[*at] == level).filter_map(move |(at, token)| {
            let starts = match at.checked_sub(1) {
                None => level == 0,
                Some(before) => matches!(words[before].1, "," | "("),
            };
            (starts && is_name(token.1)).then_some(token.1)
        })
    };
    let names: Vec<&str> = match keyword.1 {
        "set" => {
            let Some(equals) = words.iter().position(|token| token.1 == "=") else {
                out.push_str(tag);
                return;
            };
            let filter =
                if words[..equals].iter().any(|token| token.1 == ".") { MEMBER_FILTER } else { FILTER };
            let value = words[equals].0 + 1 - start;
            let end = right.map_or(tag.len() - 2, |sign| sign.0 - start);
            out.push_str(&format!("{}({})|{filter} {}", &tag[..value], &tag[value..end], &tag[end..]));
            return;
        }
        "for" => {
            let names = words.iter().map(|token| token.1).take_while(|word| *word != "in");
            names.filter(|word| is_name(word)).collect()
        }
        "with" => listed(0).collect(),
        "macro" | "call" => {
            // Only the first pair of brackets holds parameters.
            let first = words.iter().position(|token| token.1 == ")").unwrap_or(words.len());
            let last = words.get(first).map_or(usize::MAX, |token| token.0);
            let known: HashSet<&str> = listed(1).collect();
            words
                .iter()
                .filter(|word| word.0 < last)
                .map(|word| word.1)
                .filter(|word| known.contains(word))
                .collect()
        }
        _ => Vec::new(),
    };
    out.push_str(tag);
    let sign = right.map_or("", |sign| sign.1);
    for name in names {
        out.push_str(&format!("{{% set {name} = {name}|{FILTER} {sign}%}}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn bindings_are_measured() {
        for (source, expected) in [
            ("{%- set a = 1 -%}", "{%- set a =( 1 )|forebay_bounded -%}"),
            ("{% set n.a=[x]%}", "{% set n.a=([x])|forebay_bounded_member %}"),
            (
                "{% for k, v in x -%}",
                "{% for k, v in x -%}{% set k = k|forebay_bounded -%}{% set v = v|forebay_bounded -%}",
            ),
            (
                "{% macro m(a, b=f(c, d)) %}",
                "{% macro m(a, b=f(c, d)) %}{% set a = a|forebay_bounded %}{% set b = b|forebay_bounded %}",
            ),
            (
                "{% raw %}endraw {% set a = 1 * 2 %}{% endraw %}",
                "{% raw %}endraw {% set a = 1 * 2 %}{% endraw %}",
            ),
            ("{%-%}{%%}{%--%}{% set %}{{}}{", "{%-%}{%%}{%--%}{% set %}{{}}{"),
        ] {
            assert_eq!(guarded(source).unwrap(), expected);
        }
        assert!(guarded("a\n{{ b * c }}").unwrap_err().contains("line 2"));
    }

    #[test]
    fn long_tags_are_not_quadratic() {
        let names: String = (0..100_000).map(|n| format!("a{n},")).collect();
        assert!(guarded(&format!("{{% macro m({names}) %}}")).is_ok());
    }

    proptest! {
        #[test]
        fn no_source_panics(source in "(\\{%|%\\}|\\{\\{|\\}\\}|\\{#|#\\}|-|\\+| |set|for|in|with|macro|call|raw|endraw|a|é|=|\\.|,|\\(|\\)|\\[|'|\"|\\\\|\\|){0,24}") {
            let _ = guarded(&source);
        }
    }
}
