//! `forebay run`.

use serde_json::Value;

use crate::support::{arg, command, demo, forebay, forebay_reading, smallest_memory};

/// Prompt, greedy answer: from transformers on the same model (`models/demo/eval/greedy.json`).
fn greedy(name: &str) -> String {
    let text = std::fs::read_to_string(demo().join("eval/greedy.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let prompts = all["prompts"].as_array().unwrap();
    let found = prompts.iter().find(|prompt| prompt["name"] == name).unwrap();
    found["new_text"].as_str().unwrap().to_owned()
}

#[test]
fn the_first_command_anybody_types() {
    let done = forebay(&["run", "What is 2+2?"]).ok();
    assert_eq!(done.stdout, "2+2=4.\n");
    assert!(done.stderr.contains("bundled demonstration model"), "{}", done.stderr);
    assert!(done.stderr.contains("tok/s"), "{}", done.stderr);
}

#[test]
fn what_changes_the_function_is_named() {
    let closing = |args: &[&str]| forebay(&[&["run", "What is 2+2?"], args].concat()).ok().stderr;
    assert!(!closing(&[]).contains("computed with"));
    let other = closing(&["--arith", "exact", "--kv-dtype", "f32"]);
    assert!(other.trim_end().ends_with("; computed with --arith exact --kv-dtype f32"), "{other}");
}

#[test]
fn quantize_says_whether_it_changes_anything() {
    let toy = crate::support::toy();
    let ids = toy.path().join("ids");
    std::fs::write(&ids, "1 2 3").unwrap();
    let score = ["score", "--ids", arg(&ids), "--model", arg(toy.path()), "--quantize", "int8"];
    // Every matrix of the toy is int8 or int4.
    let said = forebay(&score).ok().stderr;
    assert!(
        said.contains("note: --quantize int8 changes nothing") && !said.contains("computed with"),
        "{said}"
    );

    let head = "lm_head.weight";
    let mut tensors = forebay_testkit::toy::tensors();
    tensors.retain(|tensor| !tensor.name.starts_with(head));
    let values = forebay_testkit::toy::values(head, 300 * 64, 0.0, 1.0);
    tensors.push(forebay_testkit::container::Tensor::f32(head, &[300, 64], &values));
    let shard = toy.path().join("out-00000.safetensors");
    forebay_testkit::container::write(&shard, &tensors).unwrap();
    let said = forebay(&score).ok().stderr;
    assert!(said.contains("note: weights are re-encoded to int8"), "{said}");
    assert!(said.trim_end().ends_with("; computed with --quantize int8"), "{said}");
}

#[test]
fn answers_are_those_of_transformers() {
    assert_eq!(greedy("chat_sum"), "2+2=4.");
    let done = forebay(&["run", "What is the capital of France?"]).ok();
    assert_eq!(done.stdout, greedy("chat_capital") + "\n");
}

#[test]
fn prompts_come_from_pipes_and_files_too() {
    for input in ["What is 2+2?", "What is 2+2?\n", "What is 2+2?\r\n"] {
        assert_eq!(forebay_reading(&["run"], input.as_bytes()).ok().stdout, "2+2=4.\n", "{input:?}");
    }
    assert_eq!(forebay_reading(&["run", "-"], b"What is 2+2?").ok().stdout, "2+2=4.\n");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    std::fs::write(&file, "What is 2+2?\n").unwrap();
    assert_eq!(forebay(&["run", "--file", arg(&file)]).ok().stdout, "2+2=4.\n");
}

#[test]
fn json_holds_answer_cost_and_settings_and_nothing_else_is_printed() {
    let done = forebay(&["run", "--json", "--seed", "7", "What is 2+2?"]).ok();
    let result = done.json();
    assert_eq!(result["answer"], "2+2=4.");
    assert_eq!(result["reasoning"], "");
    assert_eq!(result["finish"], "stop");
    // 13 prompt tokens and 6 new ones, by transformers' tokenizer.
    assert_eq!(result["prompt_tokens"], 13);
    assert_eq!(result["new_tokens"], 6);
    assert_eq!(result["token_ids"], serde_json::json!([17, 10, 17, 28, 19, 13]));
    assert_eq!(result["seed"], 7);
    assert_eq!(result["settings"]["temperature"], 0.0);
    assert_eq!(result["settings"]["arith"], "int8");
    let settings = &result["settings"];
    assert_eq!((&settings["look_ahead"], &settings["reading"]["backend"]), (&"auto".into(), &"pool".into()));
    assert_eq!(
        (&settings["reading"]["access"], &settings["reading"]["depth"]),
        (&"buffered".into(), &8.into())
    );
    assert!(settings["reading"]["block_bytes"].as_u64().unwrap() > 0);
    assert!(result["experts"]["bytes_read"].as_u64().unwrap() > 0);
    assert!(result["timings"]["first_token_s"].as_f64().unwrap() > 0.0);
}

#[test]
fn a_seed_repeats_an_answer_and_settings_of_the_machine_do_not_change_it() {
    let ask =
        ["run", "--json", "--temperature", "1.5", "--top-p", "1", "--max-tokens", "12", "Tell me a story."];
    let with = |more: &[&str]| forebay(&[&ask[..], more].concat()).ok().json();
    let first = with(&["--seed", "3"]);
    let machine = ["--threads", "1", "--chunk", "5", "--cpu-features", "scalar"];
    let memory = smallest_memory(&machine);
    let small = with(&[&["--seed", "3", "--memory", &memory], &machine[..]].concat());
    assert_eq!(first["token_ids"], small["token_ids"]);
    assert!(small["experts"]["misses"].as_u64() > first["experts"]["misses"].as_u64());
    let others: Vec<Value> =
        (4..8).map(|seed| with(&["--seed", &seed.to_string()])["token_ids"].take()).collect();
    assert!(others.iter().any(|ids| *ids != first["token_ids"]));
    // Unset, the seed is new every time and can be read off.
    assert_ne!(with(&[])["seed"], with(&[])["seed"]);
}

#[test]
fn reasoning_is_kept_apart() {
    let done = forebay(&["run", "--think", "What is 2+2?"]).ok();
    let json = forebay(&["run", "--think", "--json", "What is 2+2?"]).ok().json();
    let reasoning = json["reasoning"].as_str().unwrap();
    assert!(!reasoning.is_empty() && done.stderr.contains(reasoning), "{done:#?} {json:#}");
    assert_eq!(done.stdout.trim_end(), json["answer"].as_str().unwrap().trim_end());
    assert!(!done.stdout.contains("think>"));
}

#[test]
fn raw_text_is_continued_as_it_is() {
    let raw = "[gMASK]<sop><|user|>What is 2+2?<|assistant|><think></think>";
    assert_eq!(forebay(&["run", "--no-template", raw]).ok().stdout, "2+2=4.\n");
    // In a conversation the same characters are only text.
    let json = forebay(&["run", "--json", "--max-tokens", "1", raw]).ok().json();
    assert!(json["prompt_tokens"].as_u64().unwrap() > 26);
}

#[test]
fn a_cut_answer_says_so() {
    let done = forebay(&["run", "--max-tokens", "3", "What is 2+2?"]).ok();
    assert_eq!(done.stdout, "2+2\n");
    assert!(done.stderr.contains("cut after 3 tokens"), "{}", done.stderr);
    // 13 tokens of prompt, one more than fits after it is emitted without running.
    let done = forebay(&["run", "--context", "14", "What is 2+2?"]).ok();
    assert_eq!(done.stdout, "2+\n");
    assert!(done.stderr.contains("context of 14 tokens is full"), "{}", done.stderr);
}

#[test]
fn instructions_reach_the_model() {
    let count = |args: &[&str]| forebay(args).ok().json()["prompt_tokens"].as_u64().unwrap();
    let ask = ["run", "--json", "--max-tokens", "1", "Hi"];
    assert!(count(&[&ask[..], &["--system", "Be brief."]].concat()) > count(&ask));
}

#[test]
fn the_model_folder_may_come_from_the_environment() {
    let output = command(&["run", "What is 2+2?"]).env("FOREBAY_MODEL", demo()).output().unwrap();
    assert_eq!(output.stdout, b"2+2=4.\n");
    assert!(!String::from_utf8_lossy(&output.stderr).contains("bundled"));
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    use std::process::Stdio;
    for args in [
        vec!["run", "Tell me a story."],
        vec!["run", "--json", "Hi"],
        vec!["inspect"],
        vec!["score", "a b c"],
    ] {
        let mut command = command(&args);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && !stderr.contains("error"), "{args:?}: {stderr}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_ends_the_answer_with_status_130() {
    use crate::support::Live;
    let slow = ["run", "--no-template", "--cpu-features", "scalar", "--arith", "exact", "--threads", "1"];
    // The model continues this with hundreds of tokens in many lines.
    let live = Live::start(&[&slow[..], &["--max-tokens", "2000", "The old sea captain"]].concat());
    live.line();
    live.interrupt();
    let done = live.end();
    assert_eq!(done.code, 130, "{done:#?}");
    assert!(!done.stderr.contains("error"), "{done:#?}");
}
