//! JSON schemas: what is handed to the engine, and where a schema is at fault.

use llguidance::api::TopLevelGrammar;
use llguidance::{JsonCompileOptions, ParserFactory};
use serde_json::{Map, Value};

use crate::{grammar, joined};

/// White space between the parts of a document. A run has an end, so that no model goes on with blanks for ever.
const WHITE_SPACE: &str = r"[\x20\x0A\x0D\x09]{1,64}";
/// Most properties of an object. The time to compile them grows with their square.
pub(crate) const MAX_PROPERTIES: usize = 1000;
/// Most properties of all objects together.
const ALL_PROPERTIES: usize = 2000;
/// Most patterns of properties: each is compared with each.
const ALL_PATTERNS: usize = 100;
/// Largest least common multiple of all `multipleOf`, decimal point and final zeros left out: so many remainders have
/// to be told apart.
const MULTIPLE: u64 = 100_000;
/// Most schemas that are compiled to find the one at fault.
const MOST_TRIES: usize = 400;

/// A schema that cannot be used.
pub(crate) struct SchemaFault {
    /// JSON pointer to the innermost schema at fault.
    pub(crate) path: String,
    /// What is wrong there.
    pub(crate) reason: String,
}

/// A matcher for the documents of `schema`.
pub(crate) fn compile(factory: &ParserFactory, schema: &Value) -> Result<llguidance::Matcher, SchemaFault> {
    if let Some(dialect) = schema.get("$schema").filter(|dialect| !is_known(dialect)) {
        let reason =
            format!("the dialect {dialect} is not known; use one of json-schema.org, or leave $schema out");
        return Err(SchemaFault { path: "#/$schema".to_owned(), reason });
    }
    if let Some(fault) = survey(schema) {
        return Err(fault);
    }
    if let Some((path, reason)) = joined::fault(schema) {
        return Err(SchemaFault { path, reason });
    }
    alone(factory, schema).map_err(|reason| {
        let mut search = Search { factory, root: schema, reference: is_reference(&reason), tries: 0 };
        let (path, reason) = search.innermost(schema, "#".to_owned(), reason);
        SchemaFault { path, reason }
    })
}

/// Whether this is the name of a published dialect.
fn is_known(dialect: &Value) -> bool {
    let name = dialect.as_str().unwrap_or_default().trim_end_matches('#');
    let name = name.strip_prefix("https://").or_else(|| name.strip_prefix("http://"));
    let drafts = ["draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12"];
    drafts.iter().any(|draft| name == Some(&format!("json-schema.org/{draft}/schema")))
}

/// A matcher for a schema by itself.
fn alone(factory: &ParserFactory, schema: &Value) -> Result<llguidance::Matcher, String> {
    let mut schema = match schema {
        Value::Bool(true) => Value::Object(Map::new()),
        Value::Object(_) => schema.clone(),
        Value::Bool(false) => return Err("false allows no document at all".to_owned()),
        _ => return Err("a schema is an object, true or false".to_owned()),
    };
    // The engine reads its options from the schema; a schema's own are none of its business.
    let options = JsonCompileOptions {
        whitespace_pattern: Some(WHITE_SPACE.to_owned()),
        ..JsonCompileOptions::default()
    };
    options.apply_to(&mut schema);
    grammar::compile(factory, TopLevelGrammar::from_json_schema(schema))
}

/// Looks for the schema at fault by compiling parts of it.
struct Search<'a> {
    factory: &'a ParserFactory,
    root: &'a Value,
    /// Whether the fault is a reference that leads nowhere.
    reference: bool,
    tries: usize,
}

impl Search<'_> {
    /// The path of the innermost schema in `schema` that is at fault by itself, and why.
    fn innermost(&mut self, schema: &Value, path: String, reason: String) -> (String, String) {
        for (step, part) in parts(schema) {
            if self.tries == MOST_TRIES {
                break;
            }
            self.tries += 1;
            if let Err(reason) = alone(self.factory, &self.with_definitions(part))
                // What it refers to may be elsewhere in the whole.
                && is_reference(&reason) == self.reference
            {
                return self.innermost(part, format!("{path}/{step}"), reason);
            }
        }
        (path, reason)
    }

    /// A part of the root with the definitions that it may refer to.
    fn with_definitions(&self, part: &Value) -> Value {
        let mut part = part.clone();
        if let (Value::Object(part), Value::Object(root)) = (&mut part, self.root) {
            for name in ["$defs", "definitions"] {
                if let Some(all) = root.get(name).filter(|_| !part.contains_key(name)) {
                    part.insert(name.to_owned(), all.clone());
                }
            }
        }
        part
    }
}

fn is_reference(reason: &str) -> bool {
    reason.contains("$ref") || reason.contains("Reference segment")
}

/// The schemas directly within a schema, and the steps that lead to them.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let Value::Object(schema) = schema else { return Vec::new() };
    let mut all = Vec::new();
    for (keyword, value) in schema {
        match (keyword.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(named)) => {
                all.extend(named.iter().map(|(name, part)| (format!("{keyword}/{}", step(name)), part)));
            }
            ("prefixItems" | "allOf" | "anyOf" | "oneOf" | "items", Value::Array(listed)) => {
                all.extend(listed.iter().enumerate().map(|(at, part)| (format!("{keyword}/{at}"), part)));
            }
            ("items" | "additionalItems" | "additionalProperties", Value::Object(_)) => {
                all.push((keyword.clone(), value));
            }
            _ => {}
        }
    }
    all
}

/// A name as a step of a JSON pointer.
pub(crate) fn step(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

/// What can be seen without compiling: what would take too long, and an `$id` below the root in a schema with
/// references.
fn survey(root: &Value) -> Option<SchemaFault> {
    let mut open: Vec<(String, &Value)> = vec![("#".to_owned(), root)];
    let (mut identified, mut refers) = (None, false);
    let mut sizes = Sizes { properties: 0, patterns: 0, multiple: 1 };
    while let Some((path, schema)) = open.pop() {
        let has = |keyword: &str| schema.get(keyword).is_some_and(Value::is_string);
        refers |= has("$ref");
        if path != "#" && has("$id") {
            identified.get_or_insert_with(|| path.clone());
        }
        if let Some(reason) = sizes.exceeded_with(schema) {
            return Some(SchemaFault { path, reason });
        }
        open.extend(parts(schema).into_iter().map(|(step, part)| (format!("{path}/{step}"), part)));
    }
    let reason = "an $id below the root changes what $ref means, which is not supported; use names in $defs";
    Some(SchemaFault { path: identified.filter(|_| refers)?, reason: reason.to_owned() })
}

/// What the time to compile a schema depends on.
struct Sizes {
    properties: usize,
    patterns: usize,
    multiple: u64,
}

impl Sizes {
    /// Adds those of one schema, and says which limit is exceeded.
    fn exceeded_with(&mut self, schema: &Value) -> Option<String> {
        let members = |keyword: &str| schema.get(keyword).and_then(Value::as_object).map_or(0, Map::len);
        let count = members("properties");
        self.properties += count;
        self.patterns += members("patternProperties");
        if let Some(Value::Number(multiple)) = schema.get("multipleOf") {
            let digits = digits(&multiple.to_string());
            let others = self.multiple / common_divisor(self.multiple, digits);
            self.multiple = others.saturating_mul(digits);
        }
        if count > MAX_PROPERTIES {
            Some(format!("there are {count} properties; use at most {MAX_PROPERTIES}"))
        } else if self.properties > ALL_PROPERTIES {
            Some(format!("all objects together have more than {ALL_PROPERTIES} properties; use fewer"))
        } else if self.patterns > ALL_PATTERNS {
            Some(format!("there are more than {ALL_PATTERNS} patternProperties; use fewer"))
        } else if self.multiple > MULTIPLE {
            Some(format!(
                "multipleOf is not possible with numbers whose least common multiple has digits above {MULTIPLE}; use rounder ones"
            ))
        } else {
            None
        }
    }
}

/// The digits of a number without sign, point, exponent and the zeros at either end; at least 1.
fn digits(number: &str) -> u64 {
    let mantissa = number.split(['e', 'E']).next().unwrap_or_default();
    let digits: String = mantissa.chars().filter(char::is_ascii_digit).collect();
    match digits.trim_matches('0') {
        "" => 1,
        digits => digits.parse().unwrap_or(u64::MAX),
    }
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}
