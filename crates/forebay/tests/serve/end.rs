//! How a server ends.
#![cfg(unix)]

use std::io::{BufReader, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{MODEL, Server, chat, events, read_reply, request, with};

fn story(tokens: u32) -> Vec<u8> {
    let bans: serde_json::Map<_, _> = (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect();
    let more = json!({"stream": true, "temperature": 1, "seed": 1, "max_tokens": tokens, "logit_bias": bans});
    let body = with(chat("Tell me a story."), more).to_string();
    request("POST", "/v1/chat/completions", &[("content-type", "application/json")], Some(body.as_bytes()))
}

#[test]
fn what_is_under_way_is_finished_and_nothing_new_is_taken() {
    for signal in ["TERM", "INT"] {
        let mut server = Server::start();
        let mut connection = server.connect();
        connection.write_all(&story(150)).unwrap();
        server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
        server.signal(signal);
        let reply = read_reply(&mut BufReader::new(connection));
        let all = events(&reply.text());
        assert_eq!(all[all.len() - 1].1, "[DONE]", "the answer is whole");
        assert_eq!(all[all.len() - 2].1["choices"][0]["finish_reason"], "length");
        assert_eq!(server.wait().code(), Some(0), "{signal}");
    }
}

#[test]
fn a_second_signal_ends_the_process_at_once() {
    for (first, second, status) in [("INT", "INT", 130), ("TERM", "INT", 130), ("TERM", "TERM", 143)] {
        // One answer that would go on for long, and a client that would be waited for.
        let mut server = Server::with(&["--drain-timeout", "600"]);
        let mut connection = server.connect();
        connection.write_all(&story(100_000)).unwrap();
        server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
        server.signal(first);
        server.until("the end", |server| std::net::TcpStream::connect(&server.address).is_err());
        server.signal(second);
        assert_eq!(server.wait().code(), Some(status), "{first} {second}");
    }
}

#[test]
fn answers_that_the_end_cuts_off_are_errors_in_every_interface() {
    let bans: serde_json::Map<_, _> = (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect();
    let long = |body: serde_json::Value| with(body, json!({"model": MODEL}));
    let messages = json!([{"role": "user", "content": "Tell me a story."}]);
    let all = [
        (
            "/v1/chat/completions",
            json!({"messages": messages, "temperature": 1, "max_tokens": 100_000, "logit_bias": bans}),
        ),
        ("/v1/completions", json!({"prompt": "Once", "max_tokens": 100_000, "logit_bias": bans})),
        ("/v1/responses", json!({"input": "Tell me a story.", "temperature": 1, "logit_bias": bans})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 100_000, "temperature": 2})),
        ("/api/chat", json!({"messages": messages, "options": {"temperature": 2}})),
        ("/api/generate", json!({"prompt": "Tell me a story.", "options": {"temperature": 2}})),
    ];
    let mut server = Server::with(&["--drain-timeout", "0", "--parallel", "1"]);
    // The first one never ends by itself; the others wait behind it.
    let mut asked = Vec::new();
    for (path, body) in all {
        for stream in [true, false] {
            let body = with(long(body.clone()), json!({"stream": stream})).to_string();
            let json = [("content-type", "application/json")];
            let mut connection = server.connect();
            connection.write_all(&request("POST", path, &json, Some(body.as_bytes()))).unwrap();
            asked.push((path, stream, connection));
            let so_far = asked.len() as f64;
            server.until("its turn", |server| {
                let waiting = server.metric("forebay_requests_waiting{priority=\"interactive\"}");
                server.metric("forebay_requests_running") + waiting == so_far
            });
        }
    }
    server.signal("TERM");
    for (path, stream, connection) in asked {
        let reply = read_reply(&mut BufReader::new(connection));
        let text = reply.text();
        assert!(text.contains("shutting down"), "{path} {stream}: {text}");
        for whole in ["[DONE]", "message_stop", "response.completed", "\"done\":true"] {
            assert!(!text.contains(whole), "{path} {stream}: {text}");
        }
        assert!(!text.contains("\"finish_reason\":\"stop\""), "{path} {stream}: {text}");
        if !stream {
            assert_eq!(reply.status, 503, "{path}: {text}");
            assert!(reply.header("retry-after").is_some(), "{path}");
            continue;
        }
        if path.starts_with("/api/") {
            let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
            assert!(last["error"].is_string(), "{path}: {last}");
            continue;
        }
        let (name, last) = events(&text).pop().unwrap();
        let error = if path == "/v1/responses" { &last["response"]["error"] } else { &last["error"] };
        assert!(error["message"].is_string(), "{path}: {name} {last}");
        match path {
            "/v1/messages" => assert_eq!(name, "error"),
            "/v1/responses" => {
                assert_eq!(
                    (name.as_str(), &last["response"]["status"]),
                    ("response.failed", &json!("failed"))
                );
            }
            _ => assert_eq!(error["code"], "shutting_down"),
        }
    }
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn clients_that_hold_all_connections_do_not_hold_up_the_end() {
    let mut server =
        Server::with(&["--max-connections", "2", "--client-timeout", "600", "--drain-timeout", "1"]);
    // One asks for more than the system keeps for it, and reads nothing; the other says nothing.
    let mut deaf = server.connect();
    deaf.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    let many = request("GET", "/openapi.json", &[], None).repeat(1_000_000);
    assert!(deaf.write_all(&many).is_err(), "the server waits until its answers are taken");
    let idle = server.connect();
    server.signal("TERM");
    let began = Instant::now();
    assert_eq!(server.wait().code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(60), "{:?}", began.elapsed());
    drop((deaf, idle));
}
