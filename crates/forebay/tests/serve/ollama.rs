//! Ollama's interface.

use serde_json::{Value, json};

use crate::client::{MODEL, Reply, Server, with};

fn lines(reply: &Reply) -> Vec<Value> {
    assert_eq!(reply.header("content-type"), Some("application/x-ndjson"), "{}", reply.text());
    reply.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn chat(question: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
}

#[test]
fn answers_come_in_lines_unless_in_one_piece() {
    let server = Server::start();
    let all = lines(&server.post("/api/chat", &chat("What is 2+2?")));
    let text: String = all.iter().filter_map(|line| line["message"]["content"].as_str()).collect();
    assert_eq!(text, "2+2=4.");
    let (last, rest) = all.split_last().unwrap();
    assert!(rest.iter().all(|line| line["done"] == false));
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    assert_eq!((&last["prompt_eval_count"], &last["eval_count"]), (&json!(13), &json!(6)));
    let whole = server.post("/api/chat", &with(chat("What is 2+2?"), json!({"stream": false}))).ok();
    assert_eq!((&whole["message"]["content"], &whole["done"]), (&json!("2+2=4."), &json!(true)));

    let ask = json!({"model": format!("{MODEL}:latest"), "prompt": "What is 2+2?", "stream": false,
        "options": {"num_predict": 2, "temperature": 0, "num_ctx": 1024}});
    let cut = server.post("/api/generate", &ask).ok();
    assert_eq!((&cut["response"], &cut["done_reason"]), (&json!("2+"), &json!("length")));
    let raw = json!({"model": MODEL, "prompt": "Once upon", "raw": true, "stream": false,
        "options": {"num_predict": 2, "temperature": 0}});
    assert_eq!(server.post("/api/generate", &raw).ok()["response"], " a time");
    let load = server.post("/api/generate", &json!({"model": MODEL})).ok();
    assert_eq!(load["done_reason"], "load");
}

#[test]
fn tools_thoughts_and_formats() {
    let server = Server::start();
    let tool = json!({"type": "function", "function": {"name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}}});
    let body = with(chat("What is the weather in Paris?"), json!({"tools": [tool]}));
    let all = lines(&server.post("/api/chat", &body));
    let calls: Vec<&Value> =
        all.iter().map(|line| &line["message"]["tool_calls"]).filter(|c| c.is_array()).collect();
    assert_eq!(calls[0][0]["function"]["arguments"], json!({"city": "Paris"}));
    let messages = json!([
        {"role": "user", "content": "What is the weather in Paris?"},
        {"role": "assistant", "tool_calls": calls[0]},
        {"role": "tool", "tool_name": "get_weather", "content": "sunny"},
    ]);
    let second = server.post("/api/chat", &with(body, json!({"messages": messages, "stream": false}))).ok();
    assert!(!second["message"]["content"].as_str().unwrap().is_empty());
    let thinking = with(chat("What is 2+2?"), json!({"think": true, "stream": false}));
    assert!(server.post("/api/chat", &thinking).ok()["message"]["thinking"].is_string());
    let format = json!({"format": {"type": "integer"}, "stream": false});
    let number = server.post("/api/chat", &with(chat("What is 2+2?"), format)).ok();
    assert!(number["message"]["content"].as_str().unwrap().parse::<i64>().is_ok());
}

#[test]
fn models_are_described_and_errors_are_a_line() {
    let server = Server::start();
    assert_eq!(server.get("/api/tags").ok()["models"][0]["name"], MODEL);
    assert_eq!(server.get("/api/ps").ok()["models"][0]["name"], MODEL);
    assert!(server.get("/api/version").ok()["version"].is_string());
    let shown = server.post("/api/show", &json!({"model": MODEL})).ok();
    assert!(shown["capabilities"].as_array().unwrap().contains(&json!("tools")));
    let refused = |body: Value, status: u16, word: &str| {
        let reply = server.post("/api/chat", &body);
        let error = reply.json()["error"].as_str().unwrap_or_default().to_owned();
        assert!(reply.status == status && error.contains(word), "{status} {word}: {}", reply.text());
    };
    refused(with(chat("Hi"), json!({"model": "other"})), 404, "other");
    refused(with(chat("Hi"), json!({"options": {"mirostat": 1}})), 400, "mirostat");
    refused(with(chat("Hi"), json!({"options": {"num_ctx": 100_000}})), 400, "num_ctx");
    refused(with(chat("Hi"), json!({"think": "hard"})), 400, "think");
    // Tools are checked as everywhere.
    let tool = |name: &str| json!({"type": "function", "function": {"name": name}});
    refused(with(chat("Hi"), json!({"tools": [tool("f"), tool("f")]})), 400, "two tools");
    let many: Vec<Value> = (0..129).map(|at| tool(&format!("f{at}"))).collect();
    refused(with(chat("Hi"), json!({"tools": many})), 400, "at most 128");
    refused(with(chat("Hi"), json!({"keep_alive": []})), 400, "keep_alive");
}
