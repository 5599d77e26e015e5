//! OpenAI's responses interface.

use serde_json::{Value, json};

use crate::client::{MODEL, Server, with};

fn ask(input: Value) -> Value {
    json!({"model": MODEL, "input": input})
}

#[test]
fn answers_come_whole_and_in_events() {
    let server = Server::start();
    let whole = server.post("/v1/responses", &ask(json!("What is 2+2?"))).ok();
    assert_eq!((&whole["object"], &whole["status"]), (&json!("response"), &json!("completed")));
    assert_eq!(whole["output"][0]["content"][0]["text"], "2+2=4.");
    assert_eq!((&whole["usage"]["input_tokens"], &whole["usage"]["output_tokens"]), (&json!(13), &json!(6)));

    let events =
        server.post("/v1/responses", &with(ask(json!("What is 2+2?")), json!({"stream": true}))).events();
    let numbers: Vec<u64> =
        events.iter().map(|(_, data)| data["sequence_number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    assert!(events.iter().all(|(name, data)| data["type"] == **name));
    let (first, last) = (&events[0], &events[events.len() - 1]);
    assert_eq!((first.0.as_str(), last.0.as_str()), ("response.created", "response.completed"));
    let text: String = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .filter_map(|(_, data)| data["delta"].as_str())
        .collect();
    assert_eq!(
        (text.as_str(), &last.1["response"]["output"][0]["content"][0]["text"]),
        ("2+2=4.", &json!("2+2=4."))
    );
    assert_eq!(last.1["response"]["usage"]["input_tokens_details"]["cached_tokens"], 12);
    let cut =
        server.post("/v1/responses", &with(ask(json!("What is 2+2?")), json!({"max_output_tokens": 2}))).ok();
    assert_eq!(
        (&cut["status"], &cut["incomplete_details"]["reason"]),
        (&json!("incomplete"), &json!("max_output_tokens"))
    );
}

#[test]
fn calls_and_their_outputs_are_items() {
    let server = Server::start();
    let tool = json!({"type": "function", "name": "get_weather", "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}});
    let body = with(
        ask(json!([{"role": "user", "content": "What is the weather in Paris?"}])),
        json!({"tools": [tool]}),
    );
    let whole = server.post("/v1/responses", &body).ok();
    let call = &whole["output"][0];
    assert_eq!(
        (&call["type"], &call["arguments"]),
        (&json!("function_call"), &json!("{\"city\":\"Paris\"}"))
    );
    let events = server.post("/v1/responses", &with(body.clone(), json!({"stream": true}))).events();
    let done = events.iter().find(|(name, _)| name == "response.function_call_arguments.done").unwrap();
    assert_eq!(done.1["arguments"], call["arguments"]);
    let input = json!([
        {"role": "user", "content": [{"type": "input_text", "text": "What is the weather in Paris?"}]},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"},
    ]);
    let second = server.post("/v1/responses", &with(body, json!({"input": input}))).ok();
    assert_eq!(second["output"][0]["type"], "message");
}

#[test]
fn thoughts_formats_and_refusals() {
    let server = Server::start();
    let thinking = with(ask(json!("What is 2+2?")), json!({"reasoning": {"effort": "high"}}));
    let whole = server.post("/v1/responses", &thinking).ok();
    assert_eq!(
        (&whole["output"][0]["type"], &whole["output"][1]["type"]),
        (&json!("reasoning"), &json!("message"))
    );
    // What came out goes back in.
    let mut input = vec![json!({"role": "user", "content": "What is 2+2?"})];
    input.extend(whole["output"].as_array().unwrap().iter().cloned());
    input.push(json!({"role": "user", "content": "What is 3+3?"}));
    server.post("/v1/responses", &ask(json!(input))).ok();
    let format =
        json!({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}}});
    let number = server.post("/v1/responses", &with(ask(json!("What is 2+2?")), format)).ok();
    let text = number["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(text.parse::<i64>().is_ok(), "{text}");
    for (more, param) in [
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"store": true}), "store"),
        (json!({"background": true}), "background"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"input": [{"type": "item_reference", "id": "x"}]}), "input[0].type"),
        (json!({"max_tokens": 3}), "max_tokens"),
    ] {
        server.post("/v1/responses", &with(ask(json!("Hi")), more)).refused(400, param);
    }
}

#[test]
fn readers_of_lines_find_the_ends_of_events_only() {
    let server = Server::start();
    // What the response repeats of the request, in characters that some take for the end of a line.
    let said = "a\u{2028}b\u{2029}c\u{85}d";
    let body = json!({"model": MODEL, "input": "What is 2+2?", "instructions": said, "stream": true});
    let reply = server.post("/v1/responses", &body);
    assert!(!reply.text().contains(['\u{85}', '\u{2028}', '\u{2029}']));
    let (name, last) = reply.events().pop().unwrap();
    assert_eq!((name.as_str(), &last["response"]["instructions"]), ("response.completed", &json!(said)));
    // So do lines of JSON, here of an answer that can only be that text.
    let format = json!({"type": "string", "const": said});
    let body = json!({"model": MODEL, "prompt": "Say it.", "format": format});
    let reply = server.post("/api/generate", &body);
    assert!(!reply.text().contains(['\u{85}', '\u{2028}', '\u{2029}']));
    let lines = reply.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>();
    let answer: String = lines.iter().filter_map(|line| line["response"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&answer).unwrap(), said);
}
