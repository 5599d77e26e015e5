//! GBNF, the grammar files of llama.cpp: reading, checking, and what they are in Lark.
//!
//! Characters are Unicode characters, so what a grammar allows is always text. A rule is *regular* if it does not lead back
//! to itself; regular parts become terminals, as large as possible, the others rules (docs/structured-output.md).

mod lark;
mod read;

use std::fmt;

pub use read::read;

/// Most bytes of a GBNF file.
pub const MAX_BYTES: usize = 1 << 18;
/// Most rules of a GBNF file.
pub const MAX_RULES: usize = 4096;
/// Deepest nesting of parentheses.
pub const MAX_NESTING: usize = 64;
/// Largest number in a repetition `{m,n}`.
pub const MAX_REPEAT: u32 = 10_000;

/// A grammar that was read: names resolved, all rules reachable and able to end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gbnf {
    rules: Vec<Rule>,
    root: usize,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Rule {
    name: String,
    body: Node,
}

/// What a part of a rule stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Node {
    /// This text; may be empty.
    Text(String),
    /// One character of these ranges, or of none of them.
    Class { ranges: Vec<(char, char)>, negated: bool },
    /// What the rule of this number stands for.
    Rule(usize),
    /// One after the other.
    Sequence(Vec<Node>),
    /// One of these.
    Choice(Vec<Node>),
    /// So many times, without an upper limit if there is none.
    Repeat { node: Box<Node>, least: u32, most: Option<u32> },
}

impl Gbnf {
    /// The same language in Lark, as `llguidance` reads it.
    pub fn to_lark(&self) -> String {
        lark::write(self)
    }
}

/// Why a text is no GBNF grammar, and where. Lines and columns count from 1; columns count characters.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("line {line}, column {column}: {problem}")]
pub struct GbnfError {
    /// The line.
    pub line: usize,
    /// The column.
    pub column: usize,
    /// What is wrong there.
    pub problem: Problem,
}

/// What is wrong with a GBNF grammar.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "every variant says in its message what it is")]
pub enum Problem {
    #[error("the grammar has {bytes} bytes; at most {MAX_BYTES} are read")]
    TooLong { bytes: usize },
    #[error("there are more than {MAX_RULES} rules")]
    TooManyRules,
    #[error("parentheses nest deeper than {MAX_NESTING} levels; give inner parts a rule of their own")]
    TooDeep,
    #[error("expected {expected}, found {found}")]
    Unexpected { expected: &'static str, found: Found },
    #[error("rule {name} is defined a second time; join both with |")]
    Duplicate { name: String },
    #[error("rule {name} is not defined")]
    Undefined { name: String },
    #[error("there is no rule root, which is where an answer begins; add: root ::= ...")]
    NoRoot,
    #[error("rule {name} can never come to an end: every way through it leads back into it")]
    Endless { name: String },
    #[error("this {what} is not closed")]
    Unclosed { what: &'static str },
    #[error(
        "\\{escape} is no escape; use \\n \\r \\t \\\" \\\\ \\[ \\] \\- \\^ \\xHH \\uHHHH or \\UHHHHHHHH"
    )]
    Escape { escape: String },
    #[error("the bytes written with \\x are no UTF-8 text, and answers are text; write the character itself")]
    NotText,
    #[error("a class needs at least one character")]
    EmptyClass,
    #[error("an item has one of ? * + {{m,n}}, not two; use parentheses")]
    TwoRepeats,
    #[error(
        "{found} is no repetition; use {{m}}, {{m,}} or {{m,n}} with numbers up to {MAX_REPEAT}, m at most n"
    )]
    Repeat { found: String },
}

/// What stood where something else was expected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// This character.
    Char(char),
    /// The end of the file.
    End,
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Found::Char(c) => write!(f, "{c:?}"),
            Found::End => f.write_str("the end of the grammar"),
        }
    }
}
