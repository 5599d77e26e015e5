//! The four ways to say what an answer may be, and their compilation.

use std::path::Path;

use llguidance::ParserFactory;
use llguidance::api::TopLevelGrammar;
use serde_json::Value;

use crate::gbnf::{self, GbnfError};
use crate::matcher::{Matcher, plain};
use crate::schema::{self, SchemaFault};
use crate::vocabulary::Vocabulary;

/// Most bytes of a JSON schema.
pub const MAX_SCHEMA: usize = 1 << 20;
/// Most bytes of a regular expression.
pub const MAX_REGEX: usize = 1 << 14;
/// Most bytes of a Lark grammar.
pub const MAX_LARK: usize = 1 << 18;
/// Deepest nesting of brackets in a Lark grammar or a regular expression.
const MAX_NESTING: usize = 200;
/// The compiler follows chains of rules by calling itself, and a grammar of the largest size has long ones.
const COMPILER_STACK: usize = 512 << 20;

/// What an answer may be.
#[derive(Debug, Clone, PartialEq)]
pub enum Grammar {
    /// A JSON document that a schema allows.
    JsonSchema(Value),
    /// A text that a regular expression matches as a whole.
    Regex(String),
    /// A text of a Lark grammar in the dialect of `llguidance`.
    Lark(String),
    /// A text of a GBNF grammar.
    Gbnf(gbnf::Gbnf),
}

/// Why a grammar cannot be used.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum GrammarError {
    /// It is too long to be looked at.
    #[error("the {what} has {bytes} bytes; use at most {limit}")]
    TooLong {
        /// Which kind of grammar.
        what: &'static str,
        /// Its size.
        bytes: usize,
        /// The largest size.
        limit: usize,
    },
    /// Brackets nest too deep.
    #[error(
        "brackets of the {what} nest deeper than {MAX_NESTING} levels; give inner parts a name of their own"
    )]
    TooDeep {
        /// Which kind of grammar.
        what: &'static str,
    },
    /// The text of a schema is no JSON.
    #[error("the JSON schema is no JSON document: {reason}")]
    NotJson {
        /// Where and why.
        reason: String,
    },
    /// A schema asks for what is not supported.
    #[error("the JSON schema cannot be used, at {path}: {reason}")]
    Schema {
        /// JSON pointer to the innermost schema that is at fault; `#` is the whole.
        path: String,
        /// What is wrong there.
        reason: String,
    },
    /// A GBNF grammar has a fault.
    #[error("the GBNF grammar has a fault in {0}")]
    Gbnf(#[from] GbnfError),
    /// A regular expression or a Lark grammar has a fault, or takes too much work.
    #[error("the {what} cannot be used: {reason}")]
    Refused {
        /// Which kind of grammar.
        what: &'static str,
        /// What its compiler said.
        reason: String,
    },
}

impl Grammar {
    /// Reads a JSON schema.
    pub fn json_schema(text: &str) -> Result<Self, GrammarError> {
        at_most("JSON schema", text, MAX_SCHEMA)?;
        match serde_json::from_str(text) {
            Ok(schema) => Ok(Self::JsonSchema(schema)),
            Err(error) => Err(GrammarError::NotJson { reason: error.to_string() }),
        }
    }

    /// Reads a regular expression; anchors at its ends are allowed and change nothing.
    pub fn regex(text: &str) -> Result<Self, GrammarError> {
        at_most("regular expression", text, MAX_REGEX)?;
        let start = text.strip_prefix('^').unwrap_or(text);
        let escaped = start.len() - start.trim_end_matches('$').trim_end_matches('\\').len();
        let inner = match start.strip_suffix('$') {
            // A backslash makes it a character, unless that one is a character itself.
            Some(inner) if escaped % 2 == 1 => inner,
            _ => start,
        };
        Ok(Self::Regex(inner.to_owned()))
    }

    /// Reads a GBNF grammar.
    pub fn gbnf(text: &str) -> Result<Self, GrammarError> {
        Ok(Self::Gbnf(gbnf::read(text)?))
    }

    /// Reads a Lark grammar. Its faults are found when it is compiled.
    pub fn lark(text: &str) -> Result<Self, GrammarError> {
        at_most("Lark grammar", text, MAX_LARK)?;
        Ok(Self::Lark(text.to_owned()))
    }

    /// Reads a GBNF or Lark grammar: which of the two it is says the ending of `path`, else its text.
    pub fn from_file(path: &Path, text: &str) -> Result<Self, GrammarError> {
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("gbnf") => Self::gbnf(text),
            Some("lark") => Self::lark(text),
            _ if text.contains("::=") => Self::gbnf(text),
            _ => Self::lark(text),
        }
    }

    /// A matcher at the beginning of an answer of a model with this vocabulary.
    pub fn matcher(&self, vocabulary: &Vocabulary) -> Result<Matcher, GrammarError> {
        let factory = vocabulary.factory();
        let compiled = on_a_large_stack(|| self.compile(factory))?;
        Ok(Matcher::new(compiled, factory.tok_env().tok_trie().eos_token()))
    }

    fn compile(&self, factory: &ParserFactory) -> Result<llguidance::Matcher, GrammarError> {
        match self {
            Self::JsonSchema(schema) => schema::compile(factory, schema)
                .map_err(|SchemaFault { path, reason }| GrammarError::Schema { path, reason }),
            Self::Regex(regex) => {
                shallow("regular expression", regex)?;
                refused("regular expression", compile(factory, TopLevelGrammar::from_regex(regex)))
            }
            Self::Lark(lark) => {
                shallow("Lark grammar", lark)?;
                refused("Lark grammar", compile(factory, TopLevelGrammar::from_lark(lark.clone())))
            }
            Self::Gbnf(gbnf) => {
                refused("GBNF grammar", compile(factory, TopLevelGrammar::from_lark(gbnf.to_lark())))
            }
        }
    }
}

/// A matcher, or what its compiler said.
pub(crate) fn compile(
    factory: &ParserFactory,
    grammar: TopLevelGrammar,
) -> Result<llguidance::Matcher, String> {
    let matcher = llguidance::Matcher::new(factory.create_parser(grammar));
    match matcher.get_error() {
        Some(error) => Err(plain(&error)),
        None => Ok(matcher),
    }
}

fn refused<T>(what: &'static str, compiled: Result<T, String>) -> Result<T, GrammarError> {
    compiled.map_err(|reason| GrammarError::Refused { what, reason })
}

fn at_most(what: &'static str, text: &str, limit: usize) -> Result<(), GrammarError> {
    let bytes = text.len();
    if bytes > limit { Err(GrammarError::TooLong { what, bytes, limit }) } else { Ok(()) }
}

/// An error if brackets nest too deep for a parser that calls itself. Brackets in strings count too.
fn shallow(what: &'static str, text: &str) -> Result<(), GrammarError> {
    let mut depth = 0usize;
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > MAX_NESTING {
            return Err(GrammarError::TooDeep { what });
        }
    }
    Ok(())
}

/// Runs `work` on a thread of its own with room for deep calls.
fn on_a_large_stack<T: Send>(
    work: impl FnOnce() -> Result<T, GrammarError> + Send,
) -> Result<T, GrammarError> {
    let refused = |reason: String| GrammarError::Refused { what: "grammar", reason };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(COMPILER_STACK);
        match thread.spawn_scoped(scope, work) {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| Err(refused("its compiler failed; make it simpler".to_owned()))),
            Err(error) => Err(refused(format!("no thread could be started to compile it: {error}"))),
        }
    })
}
