//! What an answer may be: grammars, compiled once for requests that ask for the same.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use forebay_grammar::{Grammar, GrammarError, Matcher, Vocabulary};
use forebay_text::Tokenizer;
use serde_json::{Value, json};

use crate::error::ApiError;

/// Compiled grammars that are kept.
const KEPT: usize = 16;

/// The grammars of a model.
#[derive(Default)]
pub struct Grammars {
    vocabulary: OnceLock<Result<Vocabulary, String>>,
    /// By their text, the latest last.
    compiled: Mutex<VecDeque<(String, Matcher)>>,
}

/// What an answer has to be.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Format {
    /// Anything.
    #[default]
    Text,
    /// A JSON object.
    JsonObject,
    /// A JSON document of this schema.
    Schema(Value),
}

impl Format {
    /// The schema of the documents that are allowed.
    pub fn schema(&self) -> Option<Value> {
        match self {
            Self::Text => None,
            Self::JsonObject => Some(json!({"type": "object"})),
            Self::Schema(schema) => Some(schema.clone()),
        }
    }
}

impl Grammars {
    /// A matcher at the beginning of a document of `schema`. Takes time: not for the threads that serve sockets.
    pub fn schema(&self, schema: &Value, tokenizer: &Arc<Tokenizer>) -> Result<Matcher, ApiError> {
        let text = schema.to_string();
        self.matcher(&format!("schema {text}"), tokenizer, || Grammar::json_schema(&text))
    }

    /// A matcher at the beginning of a text of a Lark grammar.
    pub fn lark(&self, text: &str, tokenizer: &Arc<Tokenizer>) -> Result<Matcher, ApiError> {
        self.matcher(&format!("lark {text}"), tokenizer, || Grammar::lark(text))
    }

    fn matcher(
        &self,
        name: &str,
        tokenizer: &Arc<Tokenizer>,
        grammar: impl FnOnce() -> Result<Grammar, GrammarError>,
    ) -> Result<Matcher, ApiError> {
        if let Some((_, matcher)) = self.lock().iter().find(|(known, _)| known == name) {
            return Ok(matcher.clone());
        }
        let vocabulary = self
            .vocabulary
            .get_or_init(|| Vocabulary::new(Arc::clone(tokenizer)).map_err(|error| error.to_string()));
        let vocabulary = vocabulary.as_ref().map_err(ApiError::bad)?;
        let matcher = grammar()?.matcher(vocabulary)?;
        let mut compiled = self.lock();
        compiled.push_back((name.to_owned(), matcher.clone()));
        if compiled.len() > KEPT {
            compiled.pop_front();
        }
        Ok(matcher)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<(String, Matcher)>> {
        self.compiled.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
