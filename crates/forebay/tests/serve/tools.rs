//! Calls of tools.

use serde_json::{Value, json};

use crate::client::{MODEL, Server, chat, with};

fn weather() -> Value {
    json!({"type": "function", "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    }})
}

fn measure(strict: bool) -> Value {
    json!({"type": "function", "function": {
        "name": "measure",
        "strict": strict,
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"type": "string", "enum": ["m", "km"]},
                "count": {"type": "integer", "minimum": 3, "maximum": 5},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 2},
            },
            "required": ["unit", "count", "tags"],
            "additionalProperties": false,
        },
    }})
}

const QUESTION: &str = "What is the weather in Paris?";

#[test]
fn a_call_comes_apart_from_text_whole_and_streamed() {
    let server = Server::start();
    let body = with(chat(QUESTION), json!({"tools": [weather()]}));
    let whole = server.post("/v1/chat/completions", &body).ok();
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["content"]),
        (&json!("tool_calls"), &Value::Null)
    );
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(call["function"], json!({"name": "get_weather", "arguments": "{\"city\":\"Paris\"}"}));
    assert!(call["id"].as_str().is_some_and(|id| id.len() == 29 && id.starts_with("call_")));

    let events = server.post("/v1/chat/completions", &with(body, json!({"stream": true}))).events();
    let deltas: Vec<&Value> =
        events.iter().map(|(_, data)| &data["choices"][0]["delta"]["tool_calls"]).collect();
    let calls: Vec<&&Value> = deltas.iter().filter(|calls| calls.is_array()).collect();
    assert_eq!(calls.len(), 1);
    assert_eq!((&calls[0][0]["index"], &calls[0][0]["function"]), (&json!(0), &call["function"]));
    assert_eq!(events[events.len() - 2].1["choices"][0]["finish_reason"], "tool_calls");
}

#[test]
fn a_result_goes_back_and_the_prompt_of_the_call_is_known() {
    let server = Server::start();
    let mut body = with(chat(QUESTION), json!({"tools": [weather()]}));
    let first = server.post("/v1/chat/completions", &body).ok();
    let message = first["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "{\"temperature\": 21}"}));
    let second = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(second["choices"][0]["finish_reason"], "stop");
    assert!(!second["choices"][0]["message"]["content"].as_str().unwrap().is_empty());
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let before = &first["usage"];
    let known = before["prompt_tokens"].as_u64().unwrap() + before["completion_tokens"].as_u64().unwrap();
    assert!(cached + 1 >= known, "{cached} of {known} tokens are known");
}

#[test]
fn what_is_required_is_done_and_what_is_not_offered_is_not() {
    let server = Server::start();
    let ask = |question: &str, more: Value| {
        let body = with(with(chat(question), json!({"tools": [weather(), measure(false)]})), more);
        server.post("/v1/chat/completions", &body).ok()["choices"][0].clone()
    };
    // A question that no tool helps with.
    let required = ask("What is 2+2?", json!({"tool_choice": "required"}));
    assert_eq!(required["finish_reason"], "tool_calls", "{required}");
    let named = json!({"type": "function", "function": {"name": "measure"}});
    let named = ask(QUESTION, json!({"tool_choice": named}));
    let calls = named["message"]["tool_calls"].as_array().unwrap();
    assert_eq!((calls.len(), &calls[0]["function"]["name"]), (1, &json!("measure")));
    obeys(calls[0]["function"]["arguments"].as_str().unwrap());
    let none = ask("What is 2+2?", json!({"tool_choice": "none"}));
    assert_eq!((&none["message"]["content"], &none["finish_reason"]), (&json!("2+2=4."), &json!("stop")));
    let single = ask(QUESTION, json!({"tool_choice": "required", "parallel_tool_calls": false}));
    assert_eq!(single["message"]["tool_calls"].as_array().unwrap().len(), 1);
}

/// The arguments are of the schema of `measure`.
fn obeys(arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(["m", "km"].contains(&arguments["unit"].as_str().unwrap()), "{arguments}");
    assert!((3..=5).contains(&arguments["count"].as_u64().unwrap()), "{arguments}");
    let tags = arguments["tags"].as_array().unwrap();
    assert!((1..=2).contains(&tags.len()) && tags.iter().all(|tag| tag == "a" || tag == "b"), "{arguments}");
}

#[test]
fn strict_tools_are_obeyed_whatever_the_model_would_like() {
    let server = Server::start();
    for seed in 0..6 {
        let more = json!({
            "tools": [measure(true)], "tool_choice": "required", "temperature": 2, "seed": seed, "max_tokens": 400,
            "parallel_tool_calls": false,
        });
        let choice =
            server.post("/v1/chat/completions", &with(chat("Measure."), more)).ok()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        obeys(choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap());
    }
    // Strict, but free to say something else.
    let more = json!({"tools": [measure(true)]});
    let choice =
        server.post("/v1/chat/completions", &with(chat("What is 2+2?"), more)).ok()["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "2+2=4.");
}

#[test]
fn tools_that_make_no_sense_are_refused_by_name() {
    let server = Server::start();
    let refused = |more: Value, param: &str| {
        let error = server.post("/v1/chat/completions", &with(chat("Hi"), more)).refused(400, param);
        error["message"].as_str().unwrap().to_owned()
    };
    refused(json!({"tool_choice": "required"}), "tool_choice");
    refused(json!({"tool_choice": "always"}), "tool_choice");
    refused(
        json!({"tools": [weather()], "tool_choice": {"type": "function", "function": {"name": "x"}}}),
        "tool_choice",
    );
    refused(json!({"tools": [{"type": "web_search"}]}), "tools[0].type");
    refused(json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}), "tools[0].function.name");
    refused(json!({"tools": [weather(), weather()]}), "tools");
    let bad = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": {
        "type": "object", "properties": {"a": {"type": "strin"}},
    }}});
    let message = refused(json!({"tools": [bad]}), "tools");
    assert!(message.contains("tool f") && message.contains("#/properties/a"), "{message}");
    refused(json!({"functions": []}), "functions");
    let message =
        json!({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]});
    let talk = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}, message]});
    server.post("/v1/chat/completions", &talk).refused(400, "messages[1]");
}

#[test]
fn a_stop_string_behind_a_call_does_not_hide_the_call() {
    let server = Server::start();
    // What ends an answer is banned, so that it goes on behind its call.
    let bans: serde_json::Map<_, _> = (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect();
    let body = with(chat(QUESTION), json!({"tools": [weather()], "logit_bias": bans, "max_tokens": 80}));
    let whole = server.post("/v1/chat/completions", &body).ok()["choices"][0].clone();
    assert_eq!(whole["message"]["tool_calls"][0]["function"]["name"], "get_weather", "{whole}");
    let behind = whole["message"]["content"].as_str().unwrap().trim();
    let stop: String = behind.chars().take(4).collect();
    let stopped = server.post("/v1/chat/completions", &with(body, json!({"stop": stop}))).ok();
    let choice = &stopped["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{stop:?}: {choice}");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["name"], "get_weather");
    assert!(!choice["message"]["content"].as_str().unwrap_or_default().contains(&stop), "{choice}");
}
