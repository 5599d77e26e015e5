//! Anthropic's interface.

use serde_json::{Value, json};

use crate::client::{MODEL, Reply, Server, with};

fn ask(question: &str) -> Value {
    json!({"model": MODEL, "max_tokens": 100, "messages": [{"role": "user", "content": question}]})
}

fn weather() -> Value {
    json!({
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "The name of the city"}},
            "required": ["city"],
        },
    })
}

#[track_caller]
fn refused(reply: Reply, status: u16, words: &str) {
    assert_eq!(reply.status, status, "{}", reply.text());
    let error = reply.json();
    assert_eq!(error["type"], "error", "{error}");
    let kind = match status {
        400 => "invalid_request_error",
        404 => "not_found_error",
        _ => "",
    };
    assert_eq!(error["error"]["type"], kind);
    assert!(error["error"]["message"].as_str().unwrap().contains(words), "{error}");
}

#[test]
fn messages_are_answered_whole_and_streamed() {
    let server = Server::start();
    let whole = server.post("/v1/messages", &ask("What is 2+2?")).ok();
    assert_eq!(whole["content"], json!([{"type": "text", "text": "2+2=4."}]));
    assert_eq!((&whole["stop_reason"], &whole["role"]), (&json!("end_turn"), &json!("assistant")));
    assert_eq!((&whole["usage"]["input_tokens"], &whole["usage"]["output_tokens"]), (&json!(13), &json!(6)));

    let events = server.post("/v1/messages", &with(ask("What is 2+2?"), json!({"stream": true}))).events();
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    let deltas = names.iter().filter(|name| **name == "content_block_delta").count();
    let mut want = vec!["message_start", "ping", "content_block_start"];
    want.extend(vec!["content_block_delta"; deltas]);
    want.extend(["content_block_stop", "message_delta", "message_stop"]);
    assert_eq!(names, want);
    assert!(events.iter().all(|(name, data)| data["type"] == **name));
    let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(text, "2+2=4.");
    let usage = &events[0].1["message"]["usage"];
    assert_eq!((&usage["input_tokens"], &usage["cache_read_input_tokens"]), (&json!(1), &json!(12)));
    let end = &events[events.len() - 2].1;
    assert_eq!(
        (&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]),
        (&json!("end_turn"), &json!(6))
    );
}

#[test]
fn answers_end_for_a_reason() {
    let server = Server::start();
    let end = |more: Value| {
        let whole = server.post("/v1/messages", &with(ask("What is 2+2?"), more)).ok();
        (whole["stop_reason"].clone(), whole["stop_sequence"].clone(), whole["content"][0]["text"].clone())
    };
    assert_eq!(end(json!({"max_tokens": 2})), (json!("max_tokens"), Value::Null, json!("2+")));
    let stops = json!({"stop_sequences": ["x", "="]});
    assert_eq!(end(stops), (json!("stop_sequence"), json!("="), json!("2+2")));
}

#[test]
fn tools_are_used_and_their_results_come_back() {
    let server = Server::start();
    let question = with(ask("What is the weather in Paris?"), json!({"tools": [weather()]}));
    let whole = server.post("/v1/messages", &question).ok();
    assert_eq!(whole["stop_reason"], "tool_use");
    let used = &whole["content"][0];
    assert_eq!((&used["type"], &used["input"]), (&json!("tool_use"), &json!({"city": "Paris"})));

    let events = server.post("/v1/messages", &with(question.clone(), json!({"stream": true}))).events();
    let input: String =
        events.iter().filter_map(|(_, data)| data["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), json!({"city": "Paris"}));
    let start = events.iter().find(|(name, _)| name == "content_block_start").unwrap();
    assert_eq!(
        (&start.1["content_block"]["name"], &start.1["content_block"]["input"]),
        (&json!("get_weather"), &json!({}))
    );

    let talk = with(
        question,
        json!({"messages": [
            {"role": "user", "content": [{"type": "text", "text": "What is the weather in Paris?"}]},
            {"role": "assistant", "content": whole["content"]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used["id"], "content": "sunny"}]},
        ]}),
    );
    let second = server.post("/v1/messages", &talk).ok();
    assert_eq!((&second["stop_reason"], &second["content"][0]["type"]), (&json!("end_turn"), &json!("text")));
    let any = with(ask("What is 2+2?"), json!({"tools": [weather()], "tool_choice": {"type": "any"}}));
    assert_eq!(server.post("/v1/messages", &any).ok()["stop_reason"], "tool_use");
}

#[test]
fn thoughts_are_blocks_of_their_own() {
    let server = Server::start();
    let body = with(
        ask("What is 2+2?"),
        json!({"max_tokens": 1200, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    );
    let whole = server.post("/v1/messages", &body).ok();
    assert_eq!(
        (&whole["content"][0]["type"], &whole["content"][1]["type"]),
        (&json!("thinking"), &json!("text"))
    );
    let events = server.post("/v1/messages", &with(body, json!({"stream": true}))).events();
    let thought: String = events.iter().filter_map(|(_, data)| data["delta"]["thinking"].as_str()).collect();
    assert_eq!(whole["content"][0]["thinking"], thought);
    assert!(events.iter().any(|(_, data)| data["delta"]["type"] == "signature_delta"));
    let blocks: Vec<u64> = events
        .iter()
        .filter(|(name, _)| name == "content_block_start")
        .map(|(_, data)| data["index"].as_u64().unwrap())
        .collect();
    assert_eq!(blocks, [0, 1]);
}

#[test]
fn tokens_are_counted_and_errors_have_their_shape() {
    let server = Server::start();
    let count = json!({"model": MODEL, "messages": [{"role": "user", "content": "What is 2+2?"}]});
    assert_eq!(server.post("/v1/messages/count_tokens", &count).ok(), json!({"input_tokens": 13}));
    refused(server.post("/v1/messages", &count), 400, "max_tokens");
    refused(server.post("/v1/messages", &with(ask("Hi"), json!({"model": "other"}))), 404, "other");
    refused(server.post("/v1/messages", &with(ask("Hi"), json!({"bogus": 1}))), 400, "bogus");
    let image = json!([{"role": "user", "content": [{"type": "image", "source": {}}]}]);
    refused(
        server.post("/v1/messages", &with(ask("Hi"), json!({"messages": image}))),
        400,
        "messages[0].content[0].type",
    );
    let prefill = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "He"}]);
    refused(server.post("/v1/messages", &with(ask("Hi"), json!({"messages": prefill}))), 400, "last message");
    let budget = json!({"thinking": {"type": "enabled", "budget_tokens": 1024}});
    refused(server.post("/v1/messages", &with(ask("Hi"), budget)), 400, "budget_tokens");
}

#[test]
fn names_and_numbers_of_tools_have_the_limits_of_this_interface() {
    let server = Server::start();
    let count = |names: &[String]| {
        let tools: Vec<Value> = names.iter().map(|name| with(weather(), json!({"name": name}))).collect();
        let body = json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "tools": tools});
        server.post("/v1/messages/count_tokens", &body)
    };
    let names = |count: usize| (0..count).map(|at| format!("tool_{at}")).collect::<Vec<_>>();
    count(&["x".repeat(128)]).ok();
    refused(count(&["x".repeat(129)]), 400, "1 to 128");
    count(&names(1024)).ok();
    refused(count(&names(1025)), 400, "at most 1024");
}

#[test]
fn wishes_about_caching_are_taken_where_their_form_is_right() {
    let server = Server::start();
    let body = |control: &Value| {
        let result =
            json!({"type": "tool_result", "tool_use_id": "t", "content": [], "cache_control": control});
        let used = json!({"type": "tool_use", "id": "t", "name": "f", "input": {}, "cache_control": control});
        let text = json!({"type": "text", "text": "Hi", "cache_control": control});
        let messages = json!([
            {"role": "user", "content": [text]},
            {"role": "assistant", "content": [used]},
            {"role": "user", "content": [result]},
        ]);
        json!({
            "model": MODEL, "max_tokens": 1, "messages": messages, "system": [text], "cache_control": control,
            "tools": [with(weather(), json!({"cache_control": control}))],
        })
    };
    for good in [json!({"type": "ephemeral"}), json!({"type": "ephemeral", "ttl": "1h"}), Value::Null] {
        server.post("/v1/messages", &body(&good)).ok();
    }
    let places = [
        "/cache_control",
        "/system/0/cache_control",
        "/tools/0/cache_control",
        "/messages/0/content/0/cache_control",
        "/messages/1/content/0/cache_control",
        "/messages/2/content/0/cache_control",
    ];
    for place in places {
        for wrong in
            [json!("ephemeral"), json!({}), json!({"type": "x"}), json!({"type": "ephemeral", "ttl": 5})]
        {
            let mut body = body(&json!({"type": "ephemeral"}));
            *body.pointer_mut(place).unwrap() = wrong;
            refused(server.post("/v1/messages", &body), 400, "cache_control");
        }
    }
}
