//! Counts how many simple questions a version of the bundled model answers rightly.

use std::ops::ControlFlow;
use std::path::Path;

use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Event, Request, Sampling, Session};
use forebay_text::template::Role;
use forebay_text::{ChatMessage, ChatTemplate, RenderOptions, StopSet, Tokenizer};
use serde_json::Value;

use crate::Outcome;

/// The questions: groups of pairs of question and whole right answer.
const TASKS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../models/demo/eval/tasks.json");
/// No right answer is longer.
const MAX_TOKENS: usize = 48;
/// Wrong answers shown for each group.
const SHOWN: usize = 3;

/// Asks every question of the file in a conversation of its own, greedily, and prints what is
/// right by group. An answer is right when all of it is as written in the file.
pub(crate) fn tasks(model: &Path, options: EngineOptions) -> Outcome {
    let tokenizer = Tokenizer::from_file(&model.join("tokenizer.json"))?;
    let template = ChatTemplate::load(model, &tokenizer)?;
    let mut engine = Engine::open(model, options, &mut |_, _| {})?;
    let stops = StopSet::new(engine.stop_ids().iter().copied(), &tokenizer);
    let mut session = Session::new(&engine);
    let mut ask = |question: &str| -> Outcome<String> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let rendered = template.render(&[ChatMessage::text(Role::User, question)], &options)?;
        let prompt = tokenizer.encode_rendered(&rendered)?;
        session.truncate(0);
        let mut ids = Vec::new();
        let mut keep = |event| {
            if let Event::Token(token) = event {
                ids.push(token.id);
            }
            ControlFlow::Continue(())
        };
        let sampling = Sampling::greedy();
        let request = Request { prompt: &prompt, max_tokens: MAX_TOKENS, sampling, stops: stops.ids() };
        session.generate(&mut engine, &request, &CancelToken::new(), None, &mut keep)?;
        Ok(String::from_utf8_lossy(&tokenizer.decode_bytes(&ids)).trim().to_owned())
    };

    let file: Value = serde_json::from_slice(&std::fs::read(TASKS)?)?;
    for group in file["groups"].as_array().ok_or("no groups in the file of tasks")? {
        let pairs: Vec<(String, String)> = serde_json::from_value(group["tasks"].clone())?;
        let mut wrong = Vec::new();
        for (question, answer) in &pairs {
            let found = ask(question)?;
            if found != *answer {
                wrong.push(format!("{question} {found:?}, right is {answer:?}"));
            }
        }
        let name = group["name"].as_str().ok_or("a group of tasks has no name")?;
        println!("{name:22} {:3} of {:3}", pairs.len() - wrong.len(), pairs.len());
        wrong.iter().take(SHOWN).for_each(|task| println!("  {task}"));
    }
    Ok(())
}
