//! `--json-schema`, `--grammar` and `--regex`: what an answer may be.

use std::path::Path;
use std::sync::Arc;

use forebay_core::Constraint;
use forebay_grammar::{Grammar, Matcher, Reasoned, Vocabulary};
use forebay_text::Tokenizer;
use forebay_text::reasoning::THINK_CLOSE;

use crate::answer::Form;
use crate::args::StructureArgs;
use crate::failure::{Exit, Failure};
use crate::prompt;

/// A grammar that is known to work with the model.
pub struct Structure {
    /// A matcher at the beginning of an answer.
    matcher: Matcher,
    /// The token that closes a think block, if the model has one.
    think_close: Option<u32>,
}

impl Structure {
    /// What was asked for, compiled; `None` if answers are free.
    pub fn read(args: &StructureArgs, tokenizer: &Arc<Tokenizer>) -> Result<Option<Self>, Failure> {
        let grammar = match (&args.json_schema, &args.grammar, &args.regex) {
            (Some(schema), ..) => Grammar::json_schema(&json_schema(schema)?)?,
            (_, Some(path), _) => Grammar::from_file(path, &prompt::read_file(path)?)?,
            (.., Some(regex)) => Grammar::regex(regex)?,
            _ => return Ok(None),
        };
        let vocabulary = Vocabulary::new(Arc::clone(tokenizer))
            .map_err(|error| Failure::new(Exit::Model, error.to_string()))?;
        let matcher = grammar.matcher(&vocabulary)?;
        Ok(Some(Self { matcher, think_close: tokenizer.added_id(THINK_CLOSE) }))
    }

    /// The limit of an answer of this form: behind its think block, if it has one.
    pub fn constraint(&self, form: Form) -> Box<dyn Constraint> {
        let matcher = self.matcher.clone();
        match (form, self.think_close) {
            (Form::Turn { thinking: true }, Some(close)) => Box::new(Reasoned::new(matcher, close)),
            _ => Box::new(matcher),
        }
    }
}

/// The text of a schema that was given itself, or as a file.
fn json_schema(given: &str) -> Result<String, Failure> {
    let text = given.trim();
    if text.starts_with('{') || text == "true" || text == "false" {
        return Ok(given.to_owned());
    }
    prompt::read_file(Path::new(given))
}
