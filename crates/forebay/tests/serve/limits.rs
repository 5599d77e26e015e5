//! Clients that go away, wait, send too much, or do not read.

use std::io::{BufRead, BufReader, Read, Write};
use std::time::{Duration, Instant};

use serde_json::json;

use crate::client::{Server, chat, read_head, read_reply, request, with};

const JSON: [(&str, &str); 1] = [("content-type", "application/json")];
const CHAT: &str = "/v1/chat/completions";

/// An answer that goes on until the context is full.
fn endless() -> Vec<u8> {
    let body =
        with(chat("Tell me a story."), json!({"temperature": 2, "stream": true, "logit_bias": bans()}));
    request("POST", CHAT, &JSON, Some(body.to_string().as_bytes()))
}

/// No token that ends an answer.
fn bans() -> serde_json::Value {
    (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect::<serde_json::Map<_, _>>().into()
}

#[test]
fn whoever_goes_away_ends_the_work() {
    let server = Server::start();
    for stream in [true, false] {
        let before = server.metric("forebay_answers_total{reason=\"cancelled\"}");
        let body =
            with(chat("Tell me a story."), json!({"stream": stream, "temperature": 2, "logit_bias": bans()}));
        let mut connection = server.connect();
        connection.write_all(&request("POST", CHAT, &JSON, Some(body.to_string().as_bytes()))).unwrap();
        server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
        drop(connection);
        let gone = Instant::now();
        server.until("the end", |server| server.metric("forebay_requests_running") == 0.0);
        assert!(gone.elapsed() < Duration::from_secs(2), "{:?}", gone.elapsed());
        assert_eq!(
            server.metric("forebay_answers_total{reason=\"cancelled\"}"),
            before + 1.0,
            "stream {stream}"
        );
    }
    server.is_well();
}

#[test]
fn a_full_queue_says_when_to_come_back() {
    let server = Server::with(&["--max-queue", "1", "--parallel", "1"]);
    let mut running = server.connect();
    running.write_all(&endless()).unwrap();
    server.until("the first", |server| server.metric("forebay_requests_running") == 1.0);
    let mut waiting = server.connect();
    waiting.write_all(&endless()).unwrap();
    server.until("the second", |server| {
        server.metric("forebay_requests_waiting{priority=\"interactive\"}") == 1.0
    });
    let reply = server.post(CHAT, &chat("What is 2+2?"));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(
        reply.header("retry-after").is_some_and(|after| after.parse::<u64>().is_ok_and(|after| after >= 1))
    );
    // Nothing of what cannot be answered is read.
    let mut large = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9999999\r\n\r\n"
    );
    large.write_all(head.as_bytes()).unwrap();
    let reply = read_reply(&mut BufReader::new(&large));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (429, &json!("queue_full")));
    assert!(reply.header("retry-after").is_some());
    // Who waits can go away too.
    drop(waiting);
    server.until("the second's end", |server| {
        server.metric("forebay_requests_waiting{priority=\"interactive\"}") == 0.0
    });
    drop(running);
    server.until("the first's end", |server| server.metric("forebay_requests_running") == 0.0);
    server.is_well();
}

#[test]
fn many_at_once_are_answered_rightly() {
    let server = Server::start();
    std::thread::scope(|scope| {
        for _ in 0..12 {
            scope.spawn(|| server.is_well());
        }
    });
}

#[test]
fn large_bodies_are_refused_before_they_are_read() {
    let server = Server::with(&["--max-body", "64KiB"]);
    let mut connection = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 9999999\r\n\r\n"
    );
    connection.write_all(head.as_bytes()).unwrap();
    let reply = read_reply(&mut BufReader::new(&connection));
    assert_eq!((reply.status, &reply.json()["error"]["code"]), (413, &json!("request_too_large")));
    assert_eq!(reply.header("connection"), Some("close"));
    // In chunks the size is not known before.
    let mut connection = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    connection.write_all(head.as_bytes()).unwrap();
    let chunk = format!("8000\r\n{}\r\n", " ".repeat(0x8000));
    for _ in 0..4 {
        // The server may have hung up by then.
        let _ = connection.write_all(chunk.as_bytes());
    }
    assert_eq!(read_reply(&mut BufReader::new(&connection)).status, 413);
    let body = with(chat("What is 2+2?"), json!({"user": "x".repeat(30_000)})).to_string();
    assert_eq!(server.send("POST", CHAT, &JSON, Some(body.as_bytes())).status, 200);
    server.is_well();
}

#[test]
fn all_bodies_together_have_a_limit() {
    // There is room for four of the largest.
    let server = Server::with(&["--max-body", "256KiB"]);
    let len = 256 << 10;
    let body = format!("{{\"prompt\": \"x\"{}}}", " ".repeat(len - 15));
    assert_eq!(body.len(), len);
    let whole = request("POST", "/tokenize", &JSON, Some(body.as_bytes()));
    let (last, most) = whole.split_last().unwrap();
    let mut all: Vec<_> = (0..8).map(|_| server.connect()).collect();
    for connection in &mut all {
        // Those that are refused need not be read to their end.
        let _ = connection.write_all(most);
    }
    server
        .until("the refusals", |server| server.metric("forebay_http_responses_total{status=\"4xx\"}") >= 4.0);
    let mut statuses = Vec::new();
    for mut connection in all {
        let _ = connection.write_all(&[*last]);
        let reply = read_reply(&mut BufReader::new(&connection));
        if reply.status == 429 {
            assert_eq!(reply.json()["error"]["code"], "bodies_full");
            assert!(reply.header("retry-after").is_some());
        }
        statuses.push(reply.status);
    }
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 200, 200, 200, 429, 429, 429, 429]);
    // The room is there again.
    for _ in 0..5 {
        assert_eq!(server.send("POST", "/tokenize", &JSON, Some(body.as_bytes())).status, 200);
    }
    server.is_well();
}

#[test]
fn heads_have_limits() {
    let server = Server::start();
    // The limit is looked at between two reads, each of which may bring as much as the limit.
    let long = "x".repeat(200_000);
    let reply = server.send("GET", "/v1/models", &[("x-long", &long)], None);
    assert_eq!(reply.status, 431);
    let mut connection = server.connect();
    connection.write_all(b"NONSENSE\r\n\r\n").unwrap();
    assert_eq!(read_head(&mut BufReader::new(&connection)).0, 400);
    let id = server.send("GET", "/health", &[("x-request-id", "mine-1")], None);
    assert_eq!(id.header("x-request-id"), Some("mine-1"));
    let odd = server.send("GET", "/health", &[("x-request-id", "no spaces \u{e9}")], None);
    assert!(odd.header("x-request-id").is_some_and(|id| id.starts_with("req_")));
    server.is_well();
}

#[test]
fn slow_senders_are_hung_up_on() {
    let server = Server::with(&["--client-timeout", "1"]);
    for begun in [
        "POST /v1/chat/completions HTTP/1.1\r\nhost: loc".to_owned(),
        format!(
            "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{{"
        ),
    ] {
        let mut connection = server.connect();
        connection.write_all(begun.as_bytes()).unwrap();
        let began = Instant::now();
        let mut rest = Vec::new();
        // Whether it says anything: it does not wait for more.
        let _ = connection.read_to_end(&mut rest);
        assert!(began.elapsed() < Duration::from_secs(20));
        let said = String::from_utf8_lossy(&rest);
        assert!(said.is_empty() || said.contains(" 408 "), "{said}");
    }
    server.is_well();
}

#[test]
fn requests_one_behind_the_other_are_answered_in_order() {
    let server = Server::start();
    let ask = |question: &str| request("POST", CHAT, &JSON, Some(chat(question).to_string().as_bytes()));
    let wrong = request("POST", CHAT, &JSON, Some(b"{\"model\": 1}"));
    let mut connection = server.connect();
    let all =
        [ask("What is 2+2?"), wrong, ask("What is 3+3?"), request("GET", "/health", &[], None)].concat();
    connection.write_all(&all).unwrap();
    let mut reader = BufReader::new(connection);
    let mut next = || read_reply(&mut reader);
    assert_eq!(next().json()["choices"][0]["message"]["content"], "2+2=4.");
    assert_eq!(next().status, 400);
    assert_eq!(next().json()["choices"][0]["message"]["content"], "3+3=6.");
    assert_eq!(next().json()["status"], "ok");
}

#[test]
fn who_waits_is_told_its_place_and_what_to_expect_at_once() {
    let server = Server::with(&["--parallel", "1"]);
    server.is_well();
    let mut running = server.connect();
    running.write_all(&endless()).unwrap();
    server.until("the first", |server| server.metric("forebay_requests_running") == 1.0);
    let more = json!({"stream": true, "stream_options": {"include_progress": true}});
    let body = with(chat("What is 2+2?"), more).to_string();
    let mut waiting = BufReader::new(server.connect());
    waiting.get_mut().write_all(&request("POST", CHAT, &JSON, Some(body.as_bytes()))).unwrap();
    assert_eq!(read_head(&mut waiting).0, 200);
    let mut said = String::new();
    while !said.contains("\"forecast\"") {
        assert!(waiting.read_line(&mut said).unwrap() > 0, "{said}");
    }
    // It is said while the other one runs: nothing was started yet.
    assert!(said.contains("event: forebay.queued") && !said.contains("forebay.started"), "{said}");
    let data = said.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let data: serde_json::Value = serde_json::from_str(data).unwrap();
    assert_eq!(data["ahead"], 1);
    assert!(
        data["forecast"]["prefill_ms"].is_u64() && data["forecast"]["tokens_per_second"].is_number(),
        "{data}"
    );
    drop(running);
    while !said.contains("[DONE]") {
        assert!(waiting.read_line(&mut said).unwrap() > 0, "{said}");
    }
    assert!(said.contains("forebay.started"), "{said}");
}
