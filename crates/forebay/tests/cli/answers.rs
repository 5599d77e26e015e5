//! What the options of sampling and structured output do to a run and a chat.

use serde_json::Value;

use crate::support::{arg, forebay, forebay_reading};

fn json(args: &[&str]) -> Value {
    forebay(&[&["run", "--json"], args].concat()).ok().json()
}

#[test]
fn a_stop_string_ends_the_answer_in_front_of_it() {
    let whole = forebay(&["run", "What is the capital of France?"]).ok().stdout;
    assert_eq!(whole, "The capital of France is Paris.\n");
    for draft in ["off", "3"] {
        let run = [
            "run",
            "What is the capital of France?",
            "--draft",
            draft,
            "--stop",
            "xyz",
            "--stop",
            "nce is P",
        ];
        let done = forebay(&run).ok();
        assert_eq!(done.stdout, "The capital of Fra\n");
        let run = json(&run[1..]);
        assert_eq!((&run["answer"], &run["finish"]), (&"The capital of Fra".into(), &"stop".into()));
    }
    forebay(&["run", "x", "--stop", ""]).fails(2, &["--stop"]);
    let chat = forebay_reading(&["chat", "--stop", " is"], b"What is the capital of France?\nWhat is 3+4?\n");
    assert_eq!(chat.ok().stdout, "The capital of France\n3+4=7.\n");
}

#[test]
fn log_probabilities_are_listed() {
    let run = json(&["What is 2+2?", "--logprobs", "2", "--temperature", "0"]);
    let all = run["logprobs"].as_array().unwrap();
    assert_eq!(all.len(), run["token_ids"].as_array().unwrap().len());
    let text: String = all.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, run["answer"].as_str().unwrap());
    for (token, id) in all.iter().zip(run["token_ids"].as_array().unwrap()) {
        assert_eq!((&token["id"], token["top"].as_array().unwrap().len()), (id, 2));
        // Greedy: the likeliest one.
        assert_eq!((&token["top"][0]["id"], &token["top"][0]["logprob"]), (id, &token["logprob"]));
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
        assert_eq!(token["bytes"].as_array().unwrap().len(), token["token"].as_str().unwrap().len());
    }
    assert_eq!(json(&["What is 2+2?"])["logprobs"], Value::Null);
}

#[test]
fn biases_and_penalties_reach_the_sampler() {
    let greedy = json(&["What is 2+2?", "--temperature", "0"]);
    let first = greedy["token_ids"][0].to_string();
    let banned = json(&["What is 2+2?", "--temperature", "0", "--logit-bias", &format!("{first}=-100")]);
    assert_ne!(banned["token_ids"][0].to_string(), first);
    assert_eq!(banned["settings"]["logit_bias"][&first], -100.0);
    let settings =
        ["--top-k", "5", "--min-p", "0.1", "--repetition-penalty", "1.2", "--presence-penalty", "0.5"];
    let run =
        json(&[&["What is 2+2?", "--seed", "3", "--frequency-penalty", "-0.5"], &settings[..]].concat());
    let set = |name: &str| run["settings"][name].as_f64().unwrap();
    let names = ["top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"];
    assert_eq!(names.map(set), [5.0, 0.1, 1.2, 0.5, -0.5]);
    forebay(&["run", "x", "--logit-bias", "9999=1"]).fails(2, &["token 9999", "0 to 8191"]);
    let idle = forebay(&["run", "What is 2+2?", "--temperature", "0", "--top-k", "3"]).ok().stderr;
    assert!(idle.contains("--top-k changes nothing at temperature 0"), "{idle}");
}

#[test]
fn an_answer_has_the_form_that_was_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let schema = r#"{"type":"object","properties":{"name":{"enum":["Paris","Rome"]},"large":{"type":"boolean"}},
        "required":["name","large"],"additionalProperties":false}"#;
    let file = dir.path().join("city.json");
    std::fs::write(&file, schema).unwrap();
    let mut answers = Vec::new();
    for (given, draft) in [(schema, "off"), (arg(&file), "4"), (schema, "auto")] {
        let run = json(&[
            "What is the capital of France?",
            "--json-schema",
            given,
            "--seed",
            "1",
            "--draft",
            draft,
        ]);
        let answer: Value = serde_json::from_str(run["answer"].as_str().unwrap()).unwrap();
        assert!(
            answer["large"].is_boolean() && ["Paris", "Rome"].contains(&answer["name"].as_str().unwrap())
        );
        assert_eq!((&run["finish"], &run["settings"]["structure"]), (&"stop".into(), &"json-schema".into()));
        let drafts = &run["timings"]["drafts"];
        assert!(
            drafts["forced"].as_u64() > Some(0) && drafts["forced"] == drafts["forced_accepted"],
            "{drafts}"
        );
        answers.push(run["token_ids"].clone());
    }
    assert!(answers.iter().all(|answer| *answer == answers[0]));

    let gbnf = dir.path().join("answer.gbnf");
    std::fs::write(&gbnf, "root ::= \"[\" (\"yes\" | \"no\") \"]\"").unwrap();
    let answer = forebay(&["run", "Is water wet?", "--grammar", arg(&gbnf)]).ok().stdout;
    assert!(["[yes]\n", "[no]\n"].contains(&&*answer), "{answer}");
    let lark = dir.path().join("grammar");
    std::fs::write(&lark, "start: \"<\" /[0-9]{3}/ \">\"\n").unwrap();
    let chat = forebay_reading(&["chat", "--grammar", arg(&lark)], b"One?\nTwo?\n").ok().stdout;
    assert!(
        chat.lines().count() == 2 && chat.lines().all(|line| line.len() == 5 && line.starts_with('<')),
        "{chat}"
    );
    let regex =
        forebay(&["run", "Is water wet?", "--think", "--max-tokens", "400", "--regex", "(yes|no)"]).ok();
    assert!(["yes\n", "no\n", ""].contains(&&*regex.stdout), "{regex:?}");
}

#[test]
fn what_cannot_be_a_form_is_refused_in_words() {
    let dir = tempfile::tempdir().unwrap();
    let gbnf = dir.path().join("a.gbnf");
    std::fs::write(&gbnf, "root ::= \"a\"\n  | b").unwrap();
    forebay(&["run", "x", "--grammar", arg(&gbnf)]).fails(2, &["line 2, column 5", "rule b is not defined"]);
    let schema = r#"{"properties":{"a":{"not":{}}}}"#;
    forebay(&["run", "x", "--json-schema", schema]).fails(2, &["#/properties/a", "not"]);
    forebay(&["run", "x", "--json-schema", "{"]).fails(2, &["no JSON document"]);
    forebay(&["run", "x", "--json-schema", "/no/such/file"]).fails(2, &["/no/such/file"]);
    forebay(&["chat", "--regex", "("]).fails(2, &["regular expression"]);
}
