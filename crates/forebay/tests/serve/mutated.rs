//! Bodies that are wrong in thousands of ways: none is the server's fault, and the next good request is answered.

use std::io::{BufReader, Write};

use serde_json::{Value, json};

use crate::client::{MODEL, Reply, Server, chat, read_reply, request, with};

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

/// Bodies in all. They come over a few connections, so that thousands take seconds.
const BODIES: usize = 10_000;

/// What is wrong with a body beside its values.
fn spoil(body: &Value, numbers: &mut Numbers) -> Vec<u8> {
    let mut bytes = body.to_string().into_bytes();
    match numbers.next(9) {
        // Flipped, cut or further bytes.
        0 => {
            for _ in 0..1 + numbers.next(4) {
                let at = numbers.next(bytes.len());
                match numbers.next(3) {
                    0 => bytes[at] ^= 1 << numbers.next(8),
                    1 => bytes.truncate(at.max(1)),
                    _ => bytes.insert(at, numbers.next(256) as u8),
                }
            }
            bytes
        }
        // What JSON allows and few expect, in the place of some value or key.
        1 | 2 => {
            let deep = "[".repeat(100) + &"]".repeat(100);
            let deeper = "{\"a\":".repeat(3000) + "1" + &"}".repeat(3000);
            let digits = "9".repeat(400);
            let odd = [
                "\"\\ud800\"",
                "\"\\udfff\\ud800\"",
                "\"\\u0000\"",
                "1e999",
                "-1e999",
                "1e-999",
                "-0",
                &digits,
                &deep,
                &deeper,
                "NaN",
                "{\"a\":1,\"a\":2}",
                "\"\u{0}\"",
            ];
            let odd = odd[numbers.next(odd.len())];
            let text = String::from_utf8(bytes).unwrap();
            let places: Vec<usize> =
                std::iter::once(0).chain(text.match_indices(':').map(|(at, _)| at + 1)).collect();
            let at = places[numbers.next(places.len())];
            let end = text[at..].find([',', '}']).map_or(text.len(), |end| at + end);
            format!("{}{odd}{}", &text[..at], &text[end..]).into_bytes()
        }
        _ => bytes,
    }
}

/// A request with such a body: as it should be sent, in chunks, or as something else.
fn wrapped(path: &str, body: &[u8], numbers: &mut Numbers) -> Vec<u8> {
    let json = ("content-type", "application/json");
    match numbers.next(12) {
        0 => {
            let kinds =
                ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "application"];
            request("POST", path, &[("content-type", kinds[numbers.next(kinds.len())])], Some(body))
        }
        1 => {
            let mut bytes = request("POST", path, &[json, ("transfer-encoding", "chunked")], None);
            let size = 1 + numbers.next(body.len());
            for chunk in body.chunks(size) {
                bytes.extend(format!("{:x}\r\n", chunk.len()).bytes());
                bytes.extend(chunk);
                bytes.extend(b"\r\n");
            }
            bytes.extend(b"0\r\n\r\n");
            bytes
        }
        _ => request("POST", path, &[json], Some(body)),
    }
}

/// An error says whose fault it is.
#[track_caller]
fn check(path: &str, body: &[u8], reply: &Reply) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(600)]).into_owned();
    let text = reply.text();
    assert!((200..500).contains(&reply.status), "{path} {shown}: {} {text}", reply.status);
    if reply.status < 400 {
        // Nor does a stream that began well end in a fault of ours.
        assert!(!text.contains("server_error"), "{path} {shown}: {text}");
        return;
    }
    let error = reply.json()["error"].clone();
    assert!(!error.is_null(), "{path} {shown}: {text}");
    if path.starts_with("/api/") || path.starts_with("/v1/messages") {
        return;
    }
    let code = error["code"].as_str().unwrap_or_default();
    let whole = ["invalid_json", "unsupported_media_type", "context_length_exceeded"];
    assert!(whole.contains(&code) || error["param"].is_string(), "{path} {shown}: no field is named: {text}");
}

#[test]
fn ten_thousand_wrong_bodies_are_nobodys_fault_but_the_clients() {
    let server = Server::with(&["--max-tokens", "2"]);
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    let good = good();
    let mut seen = [0; 6];
    let mut reader = BufReader::new(server.connect());
    let mut sent = 0;
    while sent < BODIES {
        // Some one behind the other, before the first is answered.
        let mut batch = Vec::new();
        for _ in 0..1 + numbers.next(3) {
            let (path, body) = &good[sent % good.len()];
            let mut body = body.clone();
            for _ in 0..1 + numbers.next(2) {
                change(&mut body, &mut numbers);
            }
            batch.push((*path, spoil(&body, &mut numbers)));
            sent += 1;
        }
        let all: Vec<u8> = batch.iter().flat_map(|(path, body)| wrapped(path, body, &mut numbers)).collect();
        reader.get_mut().write_all(&all).unwrap();
        for (path, body) in &batch {
            let reply = read_reply(&mut reader);
            check(path, body, &reply);
            seen[usize::from(reply.status / 100)] += 1;
            if reply.header("connection") == Some("close") {
                reader = BufReader::new(server.connect());
                break;
            }
        }
        if sent % 100 == 99 {
            let reply = server
                .post("/v1/chat/completions", &with(chat("What is 2+2?"), json!({"max_tokens": 9})))
                .ok();
            assert_eq!(reply["choices"][0]["message"]["content"], "2+2=4.");
        }
    }
    assert!(seen[2] > 200 && seen[4] > 5000, "some are fine, most are not: {seen:?}");
    assert_eq!(server.metric("forebay_http_responses_total{status=\"5xx\"}"), 0.0);
}
