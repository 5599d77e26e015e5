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

/// The record's lines.
fn lines(path: &std::path::Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// Bytes and time of a run that streams, as JSON has them.
fn check_cost(run: &Value) {
    let experts = &run["experts"];
    let bytes = |value: &Value| value.as_u64().unwrap();
    let ahead = &experts["ahead"];
    let causes =
        [&experts["demand_bytes"], &ahead["useful_bytes"], &ahead["late_bytes"], &ahead["wasted_bytes"]];
    assert_eq!(causes.map(bytes).iter().sum::<u64>(), bytes(&experts["bytes_read"]), "{experts}");
    assert_eq!(run["bytes_by_class"]["experts"], experts["bytes_read"]);
    assert!(bytes(&run["bytes_by_class"]["resident"]) > 0);
    let shares = run["time"]["shares"].as_object().unwrap();
    let all: f64 = shares.values().map(|share| share.as_f64().unwrap()).sum();
    assert!((all - 1.0).abs() < 1e-9, "{shares:?}");
    assert!(shares["waiting for experts"].as_f64().unwrap() > 0.0 && shares["head"].as_f64().unwrap() > 0.0);
    assert_eq!(run["roots"][0]["errors"], 0);
    // What was being read ahead when the run ended is counted by the folder only.
    assert!(bytes(&run["roots"][0]["bytes_read"]) >= bytes(&experts["bytes_read"]), "{run}");
}

#[test]
fn every_verb_that_runs_a_model_records_it_and_ends_with_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let memory = smallest_memory(&["--context", "128"]);
    let demo = demo();
    let model = ["--model", arg(&demo), "--memory", &memory, "--context", "128"];
    let row = {
        // One row of the embeddings, which this budget leaves on disk: bf16 or float, never the whole matrix.
        let plan = forebay(&[&["plan", "--json"], &model[..]].concat()).ok().json();
        assert_eq!(plan["plan"]["embedding_place"], "disk");
        plan["plan"]["embedding_bytes"].as_u64().unwrap() / 8192
    };
    // Without drafts, which take rows of embeddings too.
    let verbs: [&[&str]; 3] = [
        &["run", "--draft", "off", "What is 2+2?"],
        &["score", "one two three four"],
        &["chat", "--draft", "off"],
    ];
    for verb in verbs {
        let (record, routes) = (dir.path().join("record"), dir.path().join("routes"));
        let files = ["--record", arg(&record), "--route-trace", arg(&routes)];
        let done = forebay_reading(&[verb, &model, &files].concat(), b"What is 2+2?\n").ok();
        let last = done.stderr.lines().last().unwrap();
        assert!(last.contains("tok/s") && last.contains("of experts read"), "{done:#?}");
        assert_eq!(done.stderr.matches("tok/s").count(), 1, "{done:#?}");
        let lines = lines(&record);
        let (run, passes) = lines.split_last().unwrap();
        assert_eq!((&run["kind"], &run["schema"]), (&"run".into(), &1.into()));
        let run = &run["run"];
        check_cost(run);
        let rows: u64 = passes.iter().map(|pass| pass["rows"].as_u64().unwrap()).sum();
        let read: u64 = passes.iter().map(|pass| pass["experts"]["bytes_read"].as_u64().unwrap()).sum();
        for pass in passes {
            let shares = pass["time"]["shares"].as_object().unwrap().values();
            let all: f64 = shares.map(|share| share.as_f64().unwrap()).sum();
            assert!((all - 1.0).abs() < 1e-9, "{pass}");
        }
        assert!(rows > 0 && read > 0 && read <= run["experts"]["bytes_read"].as_u64().unwrap());
        assert_eq!(run["bytes_by_class"]["embeddings"], rows * row, "{verb:?}");
        let trace = std::fs::read_to_string(&routes).unwrap();
        // Five sparse layers (models/demo/config.json), a line for each token in each.
        assert_eq!(trace.lines().count() as u64, 1 + 5 * rows, "{verb:?}");
        assert_eq!(trace.contains("decode"), verb[0] != "score", "{verb:?}");
    }
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
    let time = &result["time"];
    let shares = time["shares"].as_object().unwrap().values();
    assert!((shares.map(|share| share.as_f64().unwrap()).sum::<f64>() - 1.0).abs() < 1e-9, "{time}");
    let timings = &result["timings"];
    let wall: f64 =
        ["load_s", "prefill_s", "decode_s"].iter().map(|name| timings[name].as_f64().unwrap()).sum();
    assert!((time["wall_s"].as_f64().unwrap() - wall).abs() < 1e-6, "{time} {wall}");
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
