//! The bundled model's vocabulary, and texts walked through a matcher.
#![allow(dead_code, reason = "every suite uses its own part")]

use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

use forebay_core::{Constraint, Ending};
use forebay_grammar::{Grammar, Matcher, Vocabulary};
use forebay_text::Tokenizer;

/// The bundled model.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> =
    LazyLock::new(|| Arc::new(Tokenizer::from_file(&demo().join("tokenizer.json")).unwrap()));

pub static VOCABULARY: LazyLock<Vocabulary> =
    LazyLock::new(|| Vocabulary::new(Arc::clone(&TOKENIZER)).unwrap());

pub fn matcher(grammar: &Grammar) -> Matcher {
    grammar.matcher(&VOCABULARY).unwrap_or_else(|error| panic!("{error}"))
}

pub fn gbnf(text: &str) -> Matcher {
    matcher(&Grammar::gbnf(text).unwrap_or_else(|error| panic!("{error}")))
}

pub fn schema(text: &str) -> Matcher {
    matcher(&Grammar::json_schema(text).unwrap())
}

/// The bytes of `text` that may come next, token by token as the tokenizer cuts it.
pub fn walk(matcher: &mut Matcher, text: &str) -> usize {
    let mut bytes = 0;
    for id in TOKENIZER.encode_plain(text) {
        if matcher.ending().unwrap() == Ending::Must || matcher.agrees(&[id]).unwrap() == 0 {
            break;
        }
        matcher.accept(id).unwrap();
        bytes += TOKENIZER.token_bytes(id).unwrap().len();
    }
    bytes
}

/// Whether `text` is a whole answer.
pub fn accepts(start: &Matcher, text: &str) -> bool {
    let mut matcher = start.clone();
    walk(&mut matcher, text) == text.len() && matcher.ending().unwrap() != Ending::No
}

/// Whether some answer begins with `text`.
pub fn begins(start: &Matcher, text: &str) -> bool {
    walk(&mut start.clone(), text) == text.len()
}

/// What is forced behind `text`.
pub fn forced(start: &Matcher, text: &str) -> String {
    let mut matcher = start.clone();
    assert_eq!(walk(&mut matcher, text), text.len(), "{text:?} is not allowed");
    let mut tokens = Vec::new();
    if matcher.ending().unwrap() != Ending::Must {
        matcher.forced(&mut tokens).unwrap();
    }
    String::from_utf8(TOKENIZER.decode_bytes(&tokens)).unwrap()
}
