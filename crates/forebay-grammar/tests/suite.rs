//! The public JSON-Schema-Test-Suite (tests/suite/): what is generated under a schema is valid, by the judgement of another
//! implementation, and what the suite calls invalid cannot be generated.

mod common;

use std::ops::ControlFlow;

use boon::{Compiler, SchemaIndex, Schemas};
use common::{TOKENIZER, VOCABULARY, accepts};
use forebay_core::CancelToken;
use forebay_engine::{Drafting, Engine, EngineOptions, Event, Finish, Request, Sampling, Session};
use forebay_grammar::{Grammar, GrammarError, Matcher};
use serde_json::Value;

/// A group of the suite.
struct Group {
    name: String,
    schema: Value,
    tests: Vec<Value>,
}

fn groups() -> impl Iterator<Item = Group> {
    include_str!("suite/draft2020-12.jsonl").lines().map(|line| {
        let mut group: Value = serde_json::from_str(line).unwrap();
        let name = format!("{}: {}", group["file"], group["description"]);
        let tests = group["tests"].as_array_mut().map(std::mem::take).unwrap();
        Group { name, schema: group["schema"].take(), tests }
    })
}

/// The matcher of a schema that is supported.
fn supported(group: &Group) -> Option<Matcher> {
    match Grammar::JsonSchema(group.schema.clone()).matcher(&VOCABULARY) {
        Ok(matcher) => Some(matcher),
        Err(GrammarError::Schema { path, reason }) => {
            assert!(path.starts_with('#') && !reason.contains("panic"), "{}: {path}: {reason}", group.name);
            None
        }
        Err(other) => panic!("{}: {other}", group.name),
    }
}

/// The other implementation.
struct Validator {
    schemas: Schemas,
    index: SchemaIndex,
}

impl Validator {
    fn new(schema: &Value) -> Self {
        let (mut schemas, mut compiler) = (Schemas::new(), Compiler::new());
        let name = "http://example.com/the-schema.json";
        compiler.add_resource(name, schema.clone()).unwrap();
        let index = compiler.compile(name, &mut schemas).unwrap_or_else(|error| panic!("{error}"));
        Self { schemas, index }
    }

    fn allows(&self, document: &Value) -> bool {
        self.schemas.validate(document, self.index).is_ok()
    }
}

#[test]
fn what_is_invalid_cannot_be_generated() {
    let (mut all, mut used, mut rejected, mut accepted, mut valid) = (0, 0, 0, 0, 0);
    for group in groups() {
        all += 1;
        let Some(matcher) = supported(&group) else { continue };
        used += 1;
        for test in &group.tests {
            let document = test["data"].to_string();
            let possible = accepts(&matcher, &document);
            if test["valid"] == true {
                valid += 1;
                accepted += usize::from(possible);
            } else {
                assert!(!possible, "{}, {}: {document}", group.name, test["description"]);
                rejected += 1;
            }
        }
    }
    println!(
        "{used} of {all} schemas are supported; {rejected} invalid documents rejected, {accepted} of {valid} valid ones possible"
    );
    assert!(used >= 140 && rejected >= 200, "{used} schemas, {rejected} documents");
    // Properties come in the order of the schema, so not every valid document can be generated.
    assert!(accepted * 10 >= valid * 9, "{accepted} of {valid}");
}

/// Tokens that end strings, lists and objects, and answers, are made more likely, so that most documents end in time.
fn hurried(seed: u64, stops: &[u32]) -> Sampling {
    let closes = |id: &u32| match TOKENIZER.token_bytes(*id) {
        Some(bytes) => !bytes.is_empty() && bytes.iter().all(|byte| b"\"}]".contains(byte)),
        None => false,
    };
    let ids = (0..TOKENIZER.vocab_size() as u32).filter(closes);
    let logit_bias = ids.map(|id| (id, 8.0)).chain(stops.iter().map(|&stop| (stop, 12.0))).collect();
    Sampling { temperature: 1.0, seed, logit_bias, ..Sampling::greedy() }
}

const GENERATIONS: usize = 500;
const MOST_TOKENS: usize = 80;

#[test]
fn what_is_generated_is_valid() {
    let options = EngineOptions { context: Some(256), drafting: Drafting::Depth(2), ..Default::default() };
    let mut engine = Engine::open(&common::demo(), options, &mut |_, _| {}).unwrap();
    let stops = engine.stop_ids().to_vec();
    let prompt = TOKENIZER.encode_raw("[gMASK]<sop><|user|>\nAn example, please.<|assistant|>\n");
    let mut session = Session::new(&engine);
    let usable: Vec<(Group, Matcher, Validator)> = groups()
        .filter_map(|group| {
            let matcher = supported(&group)?;
            let validator = Validator::new(&group.schema);
            Some((group, matcher, validator))
        })
        .collect();
    let (mut finished, mut forced, mut lengths) = (0, 0, 0);
    for (seed, (group, matcher, validator)) in usable.iter().cycle().take(GENERATIONS).enumerate() {
        let kept = session.reuse(&prompt);
        let sampling = hurried(seed as u64, &stops);
        let request = Request { prompt: &prompt[kept..], max_tokens: MOST_TOKENS, sampling, stops: &stops };
        let mut tokens = Vec::new();
        let mut keep = |event| {
            if let Event::Token(token) = event {
                tokens.push(token.id);
            }
            ControlFlow::Continue(())
        };
        let mut limit = matcher.clone();
        let done = session
            .generate_within(&mut engine, &request, Some(&mut limit), &CancelToken::new(), None, &mut keep)
            .unwrap_or_else(|error| panic!("{}: {error}", group.name));
        let text = String::from_utf8(TOKENIZER.decode_bytes(&tokens)).unwrap();
        lengths += tokens.len();
        forced += done.stats.drafts.forced_accepted;
        if done.finish == Finish::Stop {
            let document =
                serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {text}: {e}", group.name));
            assert!(validator.allows(&document), "{}: {text}", group.name);
            finished += 1;
        }
    }
    println!("{finished} of {GENERATIONS} ended in {lengths} tokens, {forced} of them forced");
    assert!(
        finished * 10 >= GENERATIONS * 9,
        "{finished} of {GENERATIONS} ended within {MOST_TOKENS} tokens"
    );
}
