//! The page and what it is told, as a program sees them. How it looks and behaves in a browser: `.ci/browser`.

use std::io::{BufRead, BufReader, Write};

use serde_json::{Value, json};

use crate::client::{Server, chat, read_head, request, with};

const PAGE: [&str; 4] = ["/dashboard", "/dashboard/app.js", "/dashboard/app.css", "/dashboard/icon.svg"];

#[test]
fn a_browser_gets_the_page_and_a_program_the_interfaces() {
    let server = Server::start();
    let html = server.send("GET", "/", &[("accept", "text/html,*/*;q=0.8")], None);
    assert_eq!((html.status, html.header("content-type")), (200, Some("text/html; charset=utf-8")));
    assert_eq!(html.header("vary"), Some("accept"));
    assert_eq!(server.get("/").ok()["name"], "forebay");
    for path in PAGE {
        let reply = server.get(path);
        let policy = reply.header("content-security-policy").unwrap_or_default();
        assert_eq!(reply.status, 200, "{path}");
        assert!(policy.starts_with("default-src 'none';") && !policy.contains("unsafe"), "{path}: {policy}");
    }
}

#[test]
fn what_is_shown_needs_the_key_and_the_page_does_not() {
    let server = Server::with(&["--api-key", "sesame"]);
    for path in PAGE {
        assert_eq!(server.get(path).status, 200, "{path}");
    }
    for path in ["/dashboard/state", "/dashboard/events"] {
        assert_eq!(server.get(path).status, 401, "{path}");
    }
    let key = [("authorization", "Bearer sesame")];
    assert_eq!(server.send("GET", "/dashboard/state", &key, None).status, 200);
}

#[test]
fn a_request_is_seen_with_what_it_cost() {
    let server = Server::start();
    let state = || server.get("/dashboard/state").ok();
    let before = state();
    assert_eq!(
        (&before["jobs"], &before["recent"], &before["decode"]),
        (&json!([]), &json!([]), &Value::Null)
    );
    // Five layers with 64 experts and the MTP layer; two hexadecimal digits each.
    assert_eq!(before["memory"]["experts"], 384);
    assert_eq!(server.ask("What is 2+2?"), "2+2=4.");
    server.until("the end", |_| state()["jobs"] == json!([]) && state()["map"]["cells"].is_string());
    let after = state();
    let ended = &after["recent"][0];
    assert_eq!((&ended["how"], &ended["prompt_tokens"]), (&json!("complete"), &json!(13)));
    assert_eq!((&ended["stats"]["new_tokens"], &ended["stats"]["computed"]), (&json!(6), &json!(13)));
    assert_eq!(after["totals"]["new_tokens"], 6);
    assert_eq!(after["map"]["cells"].as_str().map(str::len), Some(2 * 384));
    // The parts of a pass are all of it.
    let pass = &after["decode"];
    let parts: f64 = pass["phases"].as_array().unwrap().iter().map(|part| part["ms"].as_f64().unwrap()).sum();
    assert!((parts - pass["ms"].as_f64().unwrap()).abs() < 0.2, "{pass}");
    // Asked again, all but one of its tokens are known.
    server.ask("What is 2+2?");
    server.until("the end", |_| state()["recent"][0]["id"] == 2);
    assert_eq!(state()["recent"][0]["reused"], 12);
}

#[test]
fn events_come_when_something_changes() {
    let server = Server::start();
    let mut stream = server.connect();
    stream.write_all(&request("GET", "/dashboard/events", &[], None)).unwrap();
    let mut stream = BufReader::new(stream);
    let (status, _) = read_head(&mut stream);
    assert_eq!(status, 200);
    let mut seen = |done: &dyn Fn(&str, &Value) -> bool| {
        let mut name = String::new();
        loop {
            let mut line = String::new();
            assert!(stream.read_line(&mut line).unwrap() > 0, "the stream ended");
            if let Some(found) = line.trim_end().strip_prefix("event: ") {
                name = found.to_owned();
            } else if let Some(data) = line.trim_end().strip_prefix("data: ")
                && done(&name, &serde_json::from_str(data).unwrap())
            {
                return;
            }
        }
    };
    seen(&|name, value| name == "map" && value["layers"].as_array().unwrap().len() == 6);
    seen(&|name, value| name == "state" && value["health"] == "ready");
    let ask = with(chat("Tell me a story."), json!({"max_tokens": 20, "temperature": 0}));
    server.post("/v1/chat/completions", &ask).ok();
    seen(&|name, value| name == "state" && value["recent"][0]["stats"]["new_tokens"] == 20);
    drop(stream);
    server.is_well();
}
