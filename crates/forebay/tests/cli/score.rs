//! `forebay score`.

use serde_json::{Value, json};

use crate::support::{Done, arg, demo, forebay, forebay_reading, smallest_memory, toy};

/// Ids of the goldens' prompt on the toy model.
fn toy_score(args: &[&str], ids: &str) -> Done {
    let dir = toy();
    let file = dir.path().join("ids.txt");
    std::fs::write(&file, ids).unwrap();
    forebay(&[&["score", "--json", "--model", arg(dir.path()), "--ids", arg(&file)], args].concat())
}

fn toy_prompt() -> String {
    forebay_testkit::toy::prompt().iter().map(|id| format!("{id} ")).collect()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

#[test]
fn totals_follow_from_the_tokens() {
    let found = toy_score(&[], &toy_prompt()).ok().json();
    let window = &found["windows"][0];
    assert_eq!(window["token_ids"], json!(forebay_testkit::toy::prompt()));
    let each = numbers(&window["log_probabilities"]);
    assert_eq!(each.len(), 19);
    assert!(each.iter().all(|&p| p < 0.0));
    let mean = each.iter().sum::<f64>() / 19.0;
    assert!((found["mean_log_probability"].as_f64().unwrap() - mean).abs() < 1e-12);
    assert!((found["perplexity"].as_f64().unwrap() - (-mean).exp()).abs() < 1e-9);
    assert_eq!((&found["tokens"], &found["scored_tokens"]), (&json!(20), &json!(19)));
}

#[test]
fn the_machine_changes_no_bit_of_a_score() {
    let base = toy_score(&[], &toy_prompt()).ok().json();
    let dir = toy();
    let memory = smallest_memory(&["--model", arg(dir.path())]);
    for settings in [
        &["--threads", "1"][..],
        &["--chunk", "3"],
        &["--cpu-features", "scalar"],
        &["--context", "20"],
        &["--memory", &memory],
    ] {
        let found = toy_score(settings, &toy_prompt()).ok().json();
        assert_eq!(found["windows"], base["windows"], "{settings:?}");
    }
    let exact = toy_score(&["--arith", "exact"], &toy_prompt()).ok().json();
    assert_ne!(exact["windows"], base["windows"]);
}

#[test]
fn windows_start_from_scratch() {
    let ids = forebay_testkit::toy::prompt();
    let whole = toy_score(&["--window", "8"], &json!(ids).to_string()).ok();
    assert!(whole.stderr.contains("3 windows of up to 8 tokens, each from scratch"), "{}", whole.stderr);
    let cut: Vec<&[u32]> = ids.chunks(8).collect();
    let given = toy_score(&[], &json!(cut).to_string()).ok().json();
    assert_eq!(whole.json()["windows"], given["windows"]);
    assert_eq!(given["scored_tokens"], 7 + 7 + 3);

    let skipped = toy_score(&["--skip", "5"], &json!(cut).to_string()).ok().json();
    assert_eq!(skipped["scored_tokens"], 3 + 3);
    let (all, late) = (&given["windows"][1], &skipped["windows"][1]);
    assert_eq!(numbers(&all["log_probabilities"])[4..], numbers(&late["log_probabilities"]));
}

/// transformers (f32, unquantised weights) says the likeliest token, and the logits of the best five, at 64 places
/// of each text of `models/demo/eval/teacher_forced.json`. The bundled weights are rounded, so not all agree.
#[test]
fn scores_are_those_of_transformers() {
    let text = std::fs::read_to_string(demo().join("eval/teacher_forced.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let wanted = &all["texts"][0];
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("ids.json");
    std::fs::write(&file, wanted["ids"].to_string()).unwrap();
    let found = forebay(&["score", "--json", "--ids", arg(&file)]).ok().json();
    let window = &found["windows"][0];
    // Entry i of a window's lists is about token i + 1, given those up to position i.
    let (mut places, mut same, mut compared, mut off) = (0, 0, 0, 0.0);
    for (at, place) in numbers(&wanted["positions"]).into_iter().map(|place| place as usize).enumerate() {
        let Some(likeliest) = window["likeliest_ids"].get(place) else { continue };
        places += 1;
        same += usize::from(*likeliest == wanted["argmax"][at]);
        let token = &wanted["ids"][place + 1];
        let top = wanted["top5_ids"][at].as_array().unwrap();
        if let Some(rank) = top.iter().position(|id| id == token) {
            let logit = wanted["top5_logits"][at][rank].as_f64().unwrap();
            let want = logit - wanted["logsumexp"][at].as_f64().unwrap();
            compared += 1;
            off += (window["log_probabilities"][place].as_f64().unwrap() - want).abs();
        }
    }
    assert!(places >= 60 && same * 10 >= places * 9, "{same} of {places} agree");
    let off = off / f64::from(compared);
    assert!(compared >= 30 && off < 0.15, "{compared} log-probabilities differ by {off} in the mean");
}

#[test]
fn texts_get_the_prefix_once_unless_it_is_refused() {
    let plain = forebay(&["score", "--json", "The capital of France is Paris."]).ok().json();
    assert_eq!(plain["prefix_ids"], json!([8162, 8164]));
    assert_eq!(plain["windows"][0]["first_scored"], 2);
    let marked =
        forebay_reading(&["score", "--json"], b"[gMASK]<sop>The capital of France is Paris.").ok().json();
    assert_eq!(plain["windows"], marked["windows"]);
    let bare = forebay(&["score", "--json", "--no-prefix", "The capital of France is Paris."]).ok().json();
    assert_eq!(bare["tokens"].as_u64().unwrap() + 2, plain["tokens"].as_u64().unwrap());
    let windows =
        forebay(&["score", "--json", "--window", "5", "The capital of France is Paris."]).ok().json();
    for window in windows["windows"].as_array().unwrap() {
        assert_eq!(window["token_ids"][1], 8164, "every window starts with the prefix");
    }
}

#[test]
fn text_output_is_short() {
    let done = forebay(&["score", "Once upon a time"]).ok();
    assert!(done.stdout.starts_with("perplexity "), "{done:#?}");
    assert_eq!(done.stdout.lines().count(), 3);
    assert!(done.stderr.contains("tok/s"), "{done:#?}");
}

#[test]
fn what_cannot_be_scored_is_said() {
    toy_score(&[], "1 2 300").fails(2, &["300", "vocabulary"]);
    toy_score(&[], "1 two").fails(2, &["two", "ids.txt"]);
    toy_score(&[], "[]").fails(2, &["longer text"]);
    toy_score(&["--context", "8", "--window", "9"], "1 2 3").fails(2, &["--window"]);
    let dir = toy();
    forebay(&["score", "--model", arg(dir.path()), "some text"]).fails(3, &["tokenizer.json"]);
}
