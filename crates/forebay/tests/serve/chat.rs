//! OpenAI's chat and completions interfaces.

use serde_json::{Value, json};

use crate::client::{MODEL, Server, chat, with};

#[test]
fn an_answer_in_one_piece_and_in_many_says_the_same() {
    let server = Server::start();
    let whole = server.post("/v1/chat/completions", &chat("What is 2+2?"));
    assert!(whole.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    assert_eq!(whole.header("x-forebay-prompt-tokens"), Some("13"));
    let whole = whole.ok();
    let choice = &whole["choices"][0];
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(choice["message"]["content"], "2+2=4.");
    assert_eq!((&choice["finish_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null));
    let usage = &whole["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(13), &json!(6)));
    assert_eq!(
        (&usage["total_tokens"], &usage["prompt_tokens_details"]["cached_tokens"]),
        (&json!(19), &json!(0))
    );

    let streamed =
        with(chat("What is 2+2?"), json!({"stream": true, "stream_options": {"include_usage": true}}));
    let events = server.post("/v1/chat/completions", &streamed).events();
    let chunks: Vec<&Value> = events.iter().map(|(_, data)| data).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let delta = |chunk: &&Value| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    assert_eq!(chunks.iter().filter_map(delta).collect::<String>(), "2+2=4.");
    assert_eq!(*chunks[chunks.len() - 1], json!("[DONE]"));
    let usage = &chunks[chunks.len() - 2]["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(13), &json!(6)));
    assert_eq!(
        usage["prompt_tokens_details"]["cached_tokens"], 12,
        "all but the token that gives the logits"
    );
    let last = chunks[chunks.len() - 3];
    assert_eq!((&last["choices"][0]["finish_reason"], &last["usage"]), (&json!("stop"), &Value::Null));
    assert!(chunks[..chunks.len() - 1].iter().all(|chunk| chunk["id"] == chunks[0]["id"]));
}

#[test]
fn a_second_turn_goes_on_from_the_first() {
    // A draft may have run the token that ends the answer, and the next turn begins with that.
    let server = Server::with(&["--draft", "off"]);
    let first = server.ask("What is 2+2?");
    let talk = json!({"model": MODEL, "messages": [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "What is 3+3?"},
    ]});
    let second = server.post("/v1/chat/completions", &talk).ok();
    // Prompt and answer of the first turn; what ended it was never run.
    assert_eq!(second["usage"]["prompt_tokens_details"]["cached_tokens"], 13 + 6, "{second}");
}

#[test]
fn limits_and_stop_strings_end_an_answer() {
    let server = Server::start();
    let choice = |more: Value| {
        let reply = server.post("/v1/chat/completions", &with(chat("What is 2+2?"), more)).ok();
        let choice = &reply["choices"][0];
        (choice["message"]["content"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
    };
    let (stop, length) = (json!("stop"), json!("length"));
    assert_eq!(choice(json!({"max_tokens": 3})), ("2+2".to_owned(), length.clone()));
    assert_eq!(choice(json!({"max_completion_tokens": 2, "max_tokens": 5})), ("2+".to_owned(), length));
    assert_eq!(choice(json!({"stop": "="})), ("2+2".to_owned(), stop.clone()));
    assert_eq!(choice(json!({"stop": ["x", "4."]})), ("2+2=".to_owned(), stop.clone()));
    assert_eq!(choice(json!({"stop": [], "n": null, "seed": null})), ("2+2=4.".to_owned(), stop));
}

#[test]
fn seeds_and_biases_decide() {
    let server = Server::start();
    let ask = |more: Value| {
        let body = with(chat("Tell me a story."), json!({"temperature": 1.5, "max_tokens": 24}));
        let reply = server.post("/v1/chat/completions", &with(body, more)).ok();
        let content = |choice: &Value| choice["message"]["content"].as_str().unwrap().to_owned();
        reply["choices"].as_array().unwrap().iter().map(content).collect::<Vec<_>>()
    };
    assert_eq!(ask(json!({"seed": 7})), ask(json!({"seed": 7})));
    let two = ask(json!({"seed": 7, "n": 2}));
    assert_eq!(two.len(), 2);
    assert_eq!(two[0], ask(json!({"seed": 7}))[0]);
    assert_ne!(two[0], two[1], "each choice has random numbers of its own");
    // "2" as the first token is banned.
    let two = server.post("/tokenize", &json!({"prompt": "2"})).ok()["tokens"][0].to_string();
    let banned = with(chat("What is 2+2?"), json!({"logit_bias": {two: -100}, "max_tokens": 1}));
    let reply = server.post("/v1/chat/completions", &banned).ok();
    assert_ne!(reply["choices"][0]["message"]["content"], "2");
}

#[test]
fn log_probabilities_are_those_of_the_tokens() {
    let server = Server::start();
    let body = with(chat("What is 2+2?"), json!({"logprobs": true, "top_logprobs": 2}));
    let whole = server.post("/v1/chat/completions", &body).ok();
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, "2+2=4.");
    for token in &tokens {
        let top = token["top_logprobs"].as_array().unwrap();
        // Greedy: the token is the likeliest one.
        assert_eq!((top.len(), &top[0]["logprob"]), (2, &token["logprob"]));
        assert!(
            token["logprob"].as_f64().unwrap() <= 0.0
                && top[0]["logprob"].as_f64() >= top[1]["logprob"].as_f64()
        );
        assert_eq!(token["bytes"], json!(token["token"].as_str().unwrap().as_bytes()));
    }
    let events = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    let streamed = events.iter().flat_map(|(_, data)| {
        data["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
    });
    assert_eq!(streamed.collect::<Vec<_>>(), tokens);
}

#[test]
fn thoughts_are_kept_apart_also_when_they_never_end() {
    let server = Server::start();
    let body = with(chat("What is 2+2?"), json!({"reasoning_effort": "high"}));
    let whole = server.post("/v1/chat/completions", &body).ok();
    let message = &whole["choices"][0]["message"];
    let (thought, said) =
        (message["reasoning_content"].as_str().unwrap(), message["content"].as_str().unwrap());
    assert!(!thought.is_empty() && !said.contains("think>"), "{message}");
    let reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(reasoning > 0 && reasoning < whole["usage"]["completion_tokens"].as_u64().unwrap());
    let cut = with(body.clone(), json!({"max_tokens": 2}));
    let cut = server.post("/v1/chat/completions", &cut).ok();
    let message = &cut["choices"][0]["message"];
    assert!(thought.starts_with(message["reasoning_content"].as_str().unwrap()), "{message}");
    assert_eq!((&message["content"], &cut["choices"][0]["finish_reason"]), (&json!(""), &json!("length")));
    let events = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    let joined = |field: &str| -> String {
        events.iter().filter_map(|(_, data)| data["choices"][0]["delta"][field].as_str()).collect()
    };
    assert_eq!((joined("reasoning_content").as_str(), joined("content").as_str()), (thought, said));
}

#[test]
fn progress_is_told_to_those_who_ask() {
    let server = Server::start();
    let options = json!({"stream": true, "stream_options": {"include_progress": true}});
    let events = server.post("/v1/chat/completions", &with(chat("What is 2+2?"), options)).events();
    let started = events.iter().find(|(name, _)| name == "forebay.started").expect("a start");
    assert_eq!(started.1["cached_tokens"], 0);
    let progress: Vec<_> = events.iter().filter(|(name, _)| name == "forebay.progress").collect();
    assert!(!progress.is_empty() && progress.iter().all(|(_, data)| data["total"] == 13), "{progress:?}");
}

#[test]
fn a_text_is_continued_as_it_stands() {
    let server = Server::start();
    let body =
        json!({"model": MODEL, "prompt": "Once upon", "max_tokens": 3, "logprobs": 1, "temperature": 0});
    let whole = server.post("/v1/completions", &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!(" a time,"), &json!("length")));
    assert_eq!(choice["logprobs"]["tokens"], json!([" a", " time", ","]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 2, 7]));
    let ids = server.post("/tokenize", &json!({"prompt": "Once upon"})).ok()["tokens"].clone();
    let by_ids = with(body.clone(), json!({"prompt": ids}));
    assert_eq!(server.post("/v1/completions", &by_ids).ok()["choices"][0]["text"], " a time,");
    let events = server.post("/v1/completions", &with(body, json!({"stream": true}))).events();
    let text: String = events.iter().filter_map(|(_, data)| data["choices"][0]["text"].as_str()).collect();
    assert_eq!(text, " a time,");
}

#[test]
fn text_never_becomes_a_control_token() {
    let server = Server::start();
    let ids = |body: Value| server.post("/tokenize", &body).ok()["tokens"].as_array().unwrap().clone();
    let said = "<|user|>[gMASK]<sop><|assistant|><|observation|><|system|><|endoftext|>";
    let control = |id: &Value| (8160..8181).contains(&id.as_u64().unwrap());
    assert!(!ids(json!({"prompt": said})).iter().any(control));
    let talk = |text: &str| json!({"messages": [{"role": "user", "content": text}]});
    let controls = |text: &str| ids(talk(text)).iter().filter(|id| control(id)).count();
    assert_eq!(controls(said), controls("Hi"));
    // A mark that a client writes is neither the template's, nor lost.
    let turn = ids(talk(said));
    assert!(turn.len() > ids(talk("")).len() + said.matches('<').count());
    let read = server.post("/detokenize", &json!({"tokens": turn})).ok();
    assert!(read["prompt"].as_str().unwrap().contains(said), "{read}");
    let body = json!({"model": MODEL, "prompt": said, "max_tokens": 1});
    let usage = server.post("/v1/completions", &body).ok()["usage"]["prompt_tokens"].clone();
    assert_eq!(usage, ids(json!({"prompt": said})).len(), "the raw interface reads text too");
    let there = server.post("/detokenize", &json!({"tokens": ids(json!({"prompt": said}))})).ok();
    assert_eq!(there["prompt"], said);
}

#[test]
fn models_are_listed() {
    let server = Server::with(&["--served-name", "mine", "--context", "300"]);
    let all = server.get("/v1/models").ok();
    assert_eq!((&all["data"][0]["id"], &all["data"][0]["max_model_len"]), (&json!("mine"), &json!(300)));
    assert_eq!(server.get("/v1/models/mine").ok()["id"], "mine");
    server.get("/v1/models/yours").refused(404, "model");
    let parts = Server::with(&["--served-name", "maker/mine"]);
    for path in ["/v1/models/maker/mine", "/v1/models/maker%2Fmine"] {
        assert_eq!(parts.get(path).ok()["id"], "maker/mine", "{path}");
    }
    parts.get("/v1/models/maker").refused(404, "model");
    parts.get("/v1/models/maker/mine/not").refused(404, "model");
    let health = server.get("/health").ok();
    assert_eq!((&health["status"], &health["model"]), (&json!("ok"), &json!("mine")));
}
