//! The bundled model as it ships: the answers and the perplexity that a user gets in the default
//! mode. `bf16.rs` compares its full-precision source with transformers.

mod common;

use std::path::Path;

use common::{demo, eval, greedy_on, ids, open_as_transformers, perplexity};
use forebay_engine::{Engine, EngineOptions, Session};
use forebay_text::template::Role;
use forebay_text::{ChatMessage, ChatTemplate, RenderOptions, StopSet, Tokenizer};
use serde_json::Value;

/// Windows of each held-out segment on which the default mode is compared with the exact one:
/// a few thousand tokens, so that an unoptimised build takes seconds.
const COMPARED_WINDOWS: usize = 2;
/// Questions asked of each group of simple tasks; groups of up to twice as many are asked whole.
const SAMPLE: usize = 10;

/// The engine as a user gets it: int8 activations, BF16 cache, the config's epsilon.
fn open_as_shipped() -> Engine {
    let options = EngineOptions { context: Some(600), ..Default::default() };
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

/// The text side of the bundled model.
struct Chat {
    tokenizer: Tokenizer,
    template: ChatTemplate,
}

impl Chat {
    fn read(dir: &Path) -> Self {
        let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap();
        let template = ChatTemplate::load(dir, &tokenizer).unwrap();
        Self { tokenizer, template }
    }

    fn prompt(&self, question: &str) -> Vec<u32> {
        let options = RenderOptions { add_generation_prompt: true, ..Default::default() };
        let rendered = self.template.render(&[ChatMessage::text(Role::User, question)], &options).unwrap();
        self.tokenizer.encode_rendered(&rendered).unwrap()
    }

    /// The answer to `prompt`, up to where the model stops.
    fn answer(&self, engine: &mut Engine, prompt: &[u32]) -> String {
        let stops = StopSet::new(engine.stop_ids().iter().copied(), &self.tokenizer);
        let mut session = Session::new(engine);
        let tokens = greedy_on(engine, &mut session, prompt, 48, stops.ids());
        String::from_utf8(self.tokenizer.decode_bytes(&tokens)).unwrap()
    }
}

/// What the default mode costs: its activations in eight bits and its cache in BF16 change the
/// perplexity by less than 0.2%.
#[test]
fn the_default_mode_predicts_as_well_as_the_exact_one() {
    let (mut exact, mut default) = (open_as_transformers(&demo()), open_as_shipped());
    let text = eval("heldout.json");
    let (mut exact_log, mut default_log, mut count) = (0.0, 0.0, 0.0);
    for segment in segments(&text) {
        let want = perplexity(&mut exact, segment, COMPARED_WINDOWS);
        let have = perplexity(&mut default, segment, COMPARED_WINDOWS);
        println!("{}: perplexity {have:.4}, exact {want:.4}", segment["name"]);
        assert!((have / want - 1.0).abs() < 1e-2, "{}: {have}, exact {want}", segment["name"]);
        exact_log += want.ln();
        default_log += have.ln();
        count += 1.0;
    }
    // Windows are equally long and each segment has as many of them, so this is the mean over all tokens.
    let (have, want) = ((default_log / count).exp(), (exact_log / count).exp());
    assert!((have / want - 1.0).abs() < 2e-3, "perplexity {have}, exact {want}");
}

fn segments(text: &Value) -> &[Value] {
    let segments = text["segments"].as_array().unwrap();
    assert_eq!(segments.len(), 4);
    segments
}

/// The sum, the capital, the JSON object and the tool call that the unquantised model answers
/// rightly in transformers.
#[test]
fn the_default_mode_gives_the_recorded_answers() {
    let (mut engine, chat) = (open_as_shipped(), Chat::read(&demo()));
    let golden = eval("greedy.json");
    for name in ["chat_sum", "chat_capital", "chat_json", "chat_tool"] {
        let prompt = golden["prompts"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap();
        let answer = chat.answer(&mut engine, &ids(&prompt["prompt_ids"]));
        assert_eq!(answer, prompt["new_text"].as_str().unwrap(), "{name}");
    }
}

/// A sample of every group of `tasks.json` in which the unquantised model made no mistake;
/// `cargo xtask tasks` asks them all.
#[test]
fn simple_tasks_are_answered_rightly() {
    let (mut engine, chat) = (open_as_shipped(), Chat::read(&demo()));
    let mut asked = 0;
    for group in eval("tasks.json")["groups"].as_array().unwrap() {
        let [right, of] = ids(&group["recorded"])[..] else { panic!("{}", group["recorded"]) };
        if right < of {
            continue;
        }
        let tasks: Vec<(String, String)> = serde_json::from_value(group["tasks"].clone()).unwrap();
        let step = if tasks.len() > 2 * SAMPLE { tasks.len() / SAMPLE } else { 1 };
        for (question, answer) in tasks.iter().step_by(step) {
            assert_eq!(&chat.answer(&mut engine, &chat.prompt(question)), answer, "{question}");
            asked += 1;
        }
    }
    assert!(asked >= 64, "{asked} questions were asked");
}
