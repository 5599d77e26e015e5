//! The bundled model's full-precision checkpoint against transformers' own outputs.
//!
//! The checkpoint (55 MiB of BF16) is not part of the repository; the environment variable
//! `FOREBAY_DEMO_BF16` names a folder that holds it. Without it these tests say that they
//! were skipped; the quantised weights that ship with Forebay are tested in `demo.rs`.

mod common;

use std::path::PathBuf;

use common::{all_logits, argmax, eval, greedy, ids, open_as_transformers, perplexity};

fn checkpoint() -> Option<PathBuf> {
    let dir = std::env::var_os("FOREBAY_DEMO_BF16").map(PathBuf::from);
    if dir.is_none() {
        println!("skipped: FOREBAY_DEMO_BF16 does not name the full-precision demo checkpoint");
    }
    dir
}

/// All eight prompts of `greedy.json`, two of them longer than the selection: 64 tokens each,
/// and the most likely token at every position. Their smallest top-2 gap is 0.0025, far above
/// rounding, so no tie is excused.
#[test]
fn greedy_texts_are_those_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open_as_transformers(&dir);
    let golden = eval("greedy.json");
    let prompts = golden["prompts"].as_array().unwrap();
    assert_eq!(prompts.len(), 8);
    for prompt in prompts {
        let name = &prompt["name"];
        let (start, new) = (ids(&prompt["prompt_ids"]), ids(&prompt["new_ids"]));
        let have = greedy(&mut engine, &start, new.len());
        assert_eq!(have, new, "{name}");
        let sequence: Vec<u32> = start.iter().chain(&new).copied().collect();
        let best: Vec<u32> = all_logits(&mut engine, &sequence).iter().map(|row| argmax(row)).collect();
        assert_eq!(best, ids(&prompt["tf_argmax"]), "{name}");
    }
}

#[test]
fn teacher_forced_logits_are_those_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open_as_transformers(&dir);
    for text in eval("teacher_forced.json")["texts"].as_array().unwrap() {
        let rows = all_logits(&mut engine, &ids(&text["ids"]));
        for (i, position) in ids(&text["positions"]).into_iter().enumerate() {
            let row = &rows[position as usize];
            assert_eq!(argmax(row), ids(&text["argmax"])[i], "{}: position {position}", text["name"]);
            let logits: Vec<f32> = serde_json::from_value(text["top5_logits"][i].clone()).unwrap();
            for (id, want) in ids(&text["top5_ids"][i]).into_iter().zip(logits) {
                let have = row[id as usize];
                // The file rounds to four digits; the logit range is about 30.
                assert!(
                    (have - want).abs() < 2e-3,
                    "{}: position {position}, {id}: {have}, want {want}",
                    text["name"]
                );
            }
        }
    }
}

#[test]
fn perplexity_is_that_of_transformers() {
    let Some(dir) = checkpoint() else { return };
    let mut engine = open_as_transformers(&dir);
    let want = eval("perplexity.json");
    for segment in eval("heldout.json")["segments"].as_array().unwrap() {
        let name = segment["name"].as_str().unwrap();
        let have = perplexity(&mut engine, segment, usize::MAX);
        let want = want[name]["f32"]["ppl"].as_f64().unwrap();
        assert!((have / want - 1.0).abs() < 1e-3, "{name}: perplexity {have}, want {want}");
    }
}
