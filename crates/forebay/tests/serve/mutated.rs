//! Bodies that are wrong in a thousand ways: none is the server's fault, and the next good request is answered.

use std::io::{BufReader, Write};

use serde_json::{Value, json};

use crate::client::{MODEL, Server, chat, read_reply, request, with};

/// Numbers that are the same every time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

fn good() -> Vec<(&'static str, Value)> {
    let tool = json!({"type": "function", "function": {"name": "f", "strict": true,
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}});
    let chat = with(
        chat("Hi"),
        json!({"max_tokens": 2, "temperature": 0.5, "top_p": 0.5, "stop": ["x"], "seed": 1, "n": 1,
            "logit_bias": {"5": 1}, "tools": [tool], "response_format": {"type": "json_object"},
            "stream": true, "stream_options": {"include_usage": true}, "logprobs": true, "top_logprobs": 1}),
    );
    let message = json!({"model": MODEL, "max_tokens": 2, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "x"},
        {"type": "text", "text": "Hi"}]}], "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "auto"}, "stop_sequences": ["x"]});
    vec![
        ("/v1/chat/completions", chat),
        ("/v1/completions", json!({"model": MODEL, "prompt": "Hi", "max_tokens": 2, "logprobs": 1})),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2,
            "reasoning": {"effort": "none"}, "text": {"format": {"type": "text"}}}),
        ),
        ("/v1/messages", message),
        (
            "/api/chat",
            json!({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}],
            "options": {"num_predict": 2, "stop": ["x"]}, "think": false, "format": ""}),
        ),
        ("/tokenize", json!({"prompt": "Hi"})),
    ]
}

/// Something that does not belong where it is put.
fn odd(numbers: &mut Numbers) -> Value {
    let all = [
        json!(null),
        json!(true),
        json!(-1),
        json!(1e308),
        json!(18446744073709551615u64),
        json!(0.1),
        json!(""),
        json!("\u{0}"),
        json!("<|user|>"),
        json!("x".repeat(3000)),
        json!([]),
        json!([[]]),
        json!({}),
        json!({"type": "x"}),
        json!([null]),
        json!({"$ref": "#"}),
        json!(9223372036854775807i64),
        json!("\u{fffd}\u{1f600}"),
        json!({"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}}),
        json!({"pattern": "(((((a*)*)*)*)*)*b"}),
    ];
    all[numbers.next(all.len())].clone()
}

/// Puts something odd at a random place.
fn change(value: &mut Value, numbers: &mut Numbers) {
    let children = match value {
        Value::Array(all) => all.len(),
        Value::Object(all) => all.len(),
        _ => 0,
    };
    if children == 0 || numbers.next(4) == 0 {
        match value {
            Value::Object(all) if numbers.next(3) == 0 => {
                all.insert(
                    ["x", "type", "stream", "content", "name"][numbers.next(5)].to_owned(),
                    odd(numbers),
                );
            }
            _ => *value = odd(numbers),
        }
        return;
    }
    let at = numbers.next(children);
    match value {
        Value::Array(all) => change(&mut all[at], numbers),
        Value::Object(all) => {
            if let Some(child) = all.values_mut().nth(at) {
                change(child, numbers);
            }
        }
        _ => {}
    }
}

#[test]
fn a_thousand_wrong_bodies_are_nobodys_fault_but_the_clients() {
    let server = Server::with(&["--max-tokens", "2"]);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let good = good();
    let mut seen = [0; 6];
    for turn in 0..1200 {
        let (path, body) = &good[turn % good.len()];
        let mut body = body.clone();
        for _ in 0..1 + numbers.next(2) {
            change(&mut body, &mut numbers);
        }
        let mut bytes = body.to_string().into_bytes();
        if turn % 3 == 0 {
            // Also wrong as bytes.
            for _ in 0..1 + numbers.next(4) {
                let at = numbers.next(bytes.len());
                match numbers.next(3) {
                    0 => bytes[at] ^= 1 << numbers.next(8),
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, numbers.next(256) as u8),
                }
            }
        }
        let mut connection = server.connect();
        connection
            .write_all(&request("POST", path, &[("content-type", "application/json")], Some(&bytes)))
            .unwrap();
        let reply = read_reply(&mut BufReader::new(connection));
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(600)]).into_owned();
        assert!((200..500).contains(&reply.status), "{path} {shown}: {} {}", reply.status, reply.text());
        if reply.status >= 400 {
            assert!(!reply.json()["error"].is_null(), "{path} {shown}: {}", reply.text());
        } else {
            // Nor does a stream that began well end in a fault of ours.
            assert!(!reply.text().contains("server_error"), "{path} {shown}: {}", reply.text());
        }
        seen[usize::from(reply.status / 100)] += 1;
        if turn % 100 == 99 {
            let reply = server
                .post("/v1/chat/completions", &with(chat("What is 2+2?"), json!({"max_tokens": 9})))
                .ok();
            assert_eq!(reply["choices"][0]["message"]["content"], "2+2=4.");
        }
    }
    assert!(seen[2] > 50 && seen[4] > 500, "some are fine, most are not: {seen:?}");
    assert_eq!(server.metric("forebay_http_responses_total{status=\"5xx\"}"), 0.0);
}
