//! How a server ends.
#![cfg(unix)]

use std::io::{BufReader, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Server, chat, events, read_reply, request, with};

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
fn a_second_signal_waits_for_nothing() {
    let mut server = Server::start();
    let mut connection = server.connect();
    connection.write_all(&story(2000)).unwrap();
    server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
    server.signal("TERM");
    std::thread::sleep(Duration::from_millis(50));
    server.signal("TERM");
    let began = Instant::now();
    // Whatever is left of the answer is read, so that nobody waits for this client.
    let _ = read_reply(&mut BufReader::new(connection));
    assert_eq!(server.wait().code(), Some(0));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
}
