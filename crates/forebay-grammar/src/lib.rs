//! Structured output: what an answer may be, as a limit on every next token.
//!
//! A [`Grammar`] is a JSON schema, a regular expression, a Lark grammar or a GBNF grammar. Together with the
//! [`Vocabulary`] of a model it gives a [`Matcher`]: one an answer, which implements
//! [`forebay_core::Constraint`]. GBNF is read here ([`gbnf`]) and becomes Lark; schemas, expressions and Lark are
//! compiled and matched by `llguidance`.
//!
//! Nothing of a grammar is trusted: sizes, nesting and work per step are bounded, and what goes beyond is an error.

pub mod gbnf;

mod grammar;
mod joined;
mod matcher;
mod schema;
mod vocabulary;

pub use grammar::{Grammar, GrammarError};
pub use matcher::{Matcher, Reasoned};
pub use vocabulary::{Vocabulary, VocabularyError};
