//! Requests that are made to hurt: heads that say two things, schemas that explode, clients that only hold the line.

use std::io::{BufReader, Read, Write};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Reply, Server, chat, read_reply, with};

const CHAT: &str = "/v1/chat/completions";

/// What comes back for these bytes, until the server hangs up or says nothing more for a while.
fn raw(server: &Server, bytes: &[u8]) -> String {
    let mut stream = server.connect();
    stream.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
    // The server may have hung up by then.
    let _ = stream.write_all(bytes);
    let mut all = Vec::new();
    let mut part = [0; 4096];
    while let Ok(len @ 1..) = stream.read(&mut part) {
        all.extend_from_slice(&part[..len]);
    }
    String::from_utf8_lossy(&all).into_owned()
}

fn statuses(said: &str) -> Vec<&str> {
    said.split("HTTP/1.").skip(1).filter_map(|reply| reply.split(' ').nth(1)).collect()
}

#[test]
fn heads_that_say_two_things_are_never_taken_for_two_requests() {
    let server = Server::with(&["--client-timeout", "2"]);
    let body = chat("What is 2+2?").to_string();
    let len = body.len();
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n");
    // Each hides a second request in what one reader takes for the body of the first.
    let hidden = "GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n";
    for (name, bytes) in [
        (
            "length and chunks",
            format!(
                "{head}content-length: {}\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n{hidden}",
                5 + hidden.len()
            ),
        ),
        (
            "two lengths",
            format!("{head}content-length: 0\r\ncontent-length: {}\r\n\r\n{hidden}", hidden.len()),
        ),
        ("a list of lengths", format!("{head}content-length: 0, {}\r\n\r\n{hidden}", hidden.len())),
        ("a signed length", format!("{head}content-length: +{}\r\n\r\n{hidden}", hidden.len())),
        ("a negative length", format!("{head}content-length: -1\r\n\r\n{hidden}")),
        (
            "a length that is too large",
            format!("{head}content-length: 99999999999999999999999\r\n\r\n{hidden}"),
        ),
        ("another coding", format!("{head}transfer-encoding: gzip\r\n\r\n{hidden}")),
        (
            "chunks that are not the last coding",
            format!("{head}transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n{hidden}"),
        ),
        ("a space in front of the colon", format!("{head}content-length : {}\r\n\r\n{hidden}", hidden.len())),
        ("a folded line", format!("{head}x-a: b\r\n content-length: {len}\r\n\r\n{body}")),
        ("a chunk of a size that is none", format!("{head}transfer-encoding: chunked\r\n\r\nzz\r\n{hidden}")),
        (
            "a chunk that is too large",
            format!("{head}transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n{hidden}"),
        ),
    ] {
        let said = raw(&server, bytes.as_bytes());
        let all = statuses(&said);
        assert!(all.len() <= 1, "{name}: {all:?}");
        assert!(all.iter().all(|status| status.starts_with('4')), "{name}: {said}");
    }
    server.is_well();
}

#[test]
fn odd_ways_to_ask_are_answered_or_refused() {
    let server = Server::start();
    let body = chat("What is 2+2?").to_string();
    let head = |line: &str, more: &str| {
        let len = body.len();
        format!(
            "{line}\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len}\r\n{more}\r\n{body}"
        )
    };
    // Somebody who waits for permission gets it, and then the answer.
    let said = raw(&server, head(&format!("POST {CHAT} HTTP/1.1"), "expect: 100-continue\r\n").as_bytes());
    assert!(statuses(&said).ends_with(&["200"]) && said.contains("2+2=4."), "{said}");
    let said = raw(&server, head(&format!("POST http://localhost{CHAT} HTTP/1.1"), "").as_bytes());
    assert!(said.contains("2+2=4."), "{said}");
    // The old protocol hangs up behind each answer.
    let said = raw(&server, head(&format!("POST {CHAT} HTTP/1.0"), "").as_bytes());
    assert!(statuses(&said) == ["200"] && said.contains("2+2=4."), "{said}");
    // Nothing is upgraded: the request is answered as it is.
    for protocol in ["websocket", "h2c"] {
        let more = format!("connection: upgrade\r\nupgrade: {protocol}\r\n");
        let said = raw(&server, head(&format!("POST {CHAT} HTTP/1.1"), &more).as_bytes());
        assert!(statuses(&said) == ["200"] && said.contains("2+2=4."), "{said}");
    }
    for line in [
        "PRI * HTTP/2.0",
        "GET /health HTTP/3.0",
        "GET  /health HTTP/1.1",
        "GET /hea\u{0}lth HTTP/1.1",
        "\u{16}\u{3}\u{1}",
        "CONNECT localhost:80 HTTP/1.1",
        "TRACE /health HTTP/1.1",
        "GET /../../etc/passwd HTTP/1.1",
        "GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1",
        "GET /v1/models/%ff%00 HTTP/1.1",
        "OPTIONS * HTTP/1.1",
    ] {
        let said = raw(&server, format!("{line}\r\nhost: localhost\r\nconnection: close\r\n\r\n").as_bytes());
        let all = statuses(&said);
        assert!(all.iter().all(|status| status.starts_with('4') || *status == "204"), "{line:?}: {said}");
    }
    let many: String = (0..200).map(|at| format!("x-{at}: 1\r\n")).collect();
    let said = raw(&server, format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{many}\r\n").as_bytes());
    assert_eq!(statuses(&said), ["431"]);
    server.is_well();
}

#[test]
fn drips_of_a_head_do_not_hold_the_line() {
    let server = Server::with(&["--client-timeout", "1", "--max-connections", "4"]);
    let began = Instant::now();
    let mut slow: Vec<_> = (0..4).map(|_| server.connect()).collect();
    for byte in
        b"GET /health HTTP/1.1\r\nx-very-slow: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
    {
        let open = slow.iter_mut().all(|stream| stream.write_all(&[*byte]).is_ok());
        if !open || began.elapsed() > Duration::from_secs(3) {
            break;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    // All four are hung up on, though each kept sending: others are let in.
    server.is_well();
    assert!(began.elapsed() < Duration::from_secs(20));
}

fn schema(schema: &Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
}

/// Schemas that are small and mean much.
fn bombs() -> Vec<(&'static str, String)> {
    let text = |value: Value| value.to_string();
    let nested = |open: &str, inner: &str, close: &str, depth: usize| {
        let schema = open.repeat(depth) + inner + &close.repeat(depth);
        text(schema_text()).replace("\"SCHEMA\"", &schema)
    };
    let one = |value: Value| text(schema(&value));
    let names = |count: usize| (0..count).map(|at| format!("name-{at}")).collect::<Vec<_>>();
    let doubling = {
        let mut defs = serde_json::Map::new();
        for at in 0..40 {
            let next = json!({"$ref": format!("#/$defs/d{}", at + 1)});
            defs.insert(
                format!("d{at}"),
                json!({"type": "object", "properties": {"a": next, "b": next}, "required": ["a", "b"]}),
            );
        }
        defs.insert("d40".to_owned(), json!({"type": "integer"}));
        json!({"$defs": defs, "$ref": "#/$defs/d0"})
    };
    let crossed = {
        let choice = |at: usize| json!({"anyOf": (0..12).map(|n| json!({"type": "object", "properties": {format!("p{at}x{n}"): {"type": "integer"}}})).collect::<Vec<_>>()});
        json!({"allOf": (0..12).map(choice).collect::<Vec<_>>()})
    };
    let wide: serde_json::Map<_, _> =
        names(20_000).into_iter().map(|name| (name, json!({"type": "string"}))).collect();
    vec![
        ("a loop of references", one(json!({"$ref": "#"}))),
        (
            "two that refer to each other",
            one(
                json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
            ),
        ),
        ("a reference to nothing", one(json!({"$ref": "#/$defs/none"}))),
        ("a reference elsewhere", one(json!({"$ref": "http://localhost:1/schema.json"}))),
        ("a reference to a file", one(json!({"$ref": "file:///etc/passwd"}))),
        ("a hundred thousand choices", one(json!({"enum": names(100_000)}))),
        (
            "twenty thousand fields",
            one(json!({"type": "object", "properties": wide, "required": names(20_000)})),
        ),
        ("deep allOf", nested("{\"allOf\":[", "{\"type\":\"integer\"}", "]}", 50)),
        ("deeper anyOf", nested("{\"anyOf\":[{\"type\":\"null\"},", "{\"type\":\"integer\"}", "]}", 60)),
        ("deep items", nested("{\"type\":\"array\",\"items\":", "{\"type\":\"integer\"}", "}", 60)),
        ("doubling references", one(doubling)),
        ("choices of choices", one(crossed)),
        ("a huge maxLength", one(json!({"type": "string", "maxLength": 1_000_000_000_000_u64}))),
        ("a huge minLength", one(json!({"type": "string", "minLength": 100_000_000}))),
        (
            "huge maxItems",
            one(
                json!({"type": "array", "items": {"type": "string"}, "minItems": 1_000_000, "maxItems": 2_000_000}),
            ),
        ),
        (
            "a pattern that repeats repeats",
            one(json!({"type": "string", "pattern": "^((((a{1,100}){1,100}){1,100}){1,100})$"})),
        ),
        ("a pattern with nested stars", one(json!({"type": "string", "pattern": "^(((((a*)*)*)*)*)*b$"}))),
        ("a pattern that looks ahead", one(json!({"type": "string", "pattern": "^(?=.*a)(?!.*b).{1000}$"}))),
        (
            "a pattern of all signs",
            one(json!({"type": "string", "pattern": "^(\\p{L}{1,500}\\p{N}{1,500}){1,500}$"})),
        ),
        (
            "patterns that must hold at once",
            one(
                json!({"allOf": (0..30).map(|n| json!({"type": "string", "pattern": format!("(a|b)*a(a|b){{{n}}}")})).collect::<Vec<_>>()}),
            ),
        ),
        ("a number between nothing", one(json!({"type": "number", "minimum": 1e308, "maximum": -1e308}))),
        ("a multiple of next to nothing", one(json!({"type": "number", "multipleOf": 1e-300}))),
        (
            "a multiple of much",
            one(
                json!({"type": "integer", "multipleOf": 9_007_199_254_740_993_u64, "minimum": 0, "maximum": u64::MAX}),
            ),
        ),
    ]
}

fn schema_text() -> Value {
    schema(&json!("SCHEMA"))
}

/// No schema may take longer, on the slowest machine: a good one takes milliseconds.
const LONG: Duration = Duration::from_secs(60);
/// Nor more memory.
#[cfg(target_os = "linux")]
const MUCH: u64 = 1 << 30;

#[test]
fn schemas_that_explode_are_refused_or_enforced_in_bounds() {
    let server = Server::with(&["--max-tokens", "4"]);
    #[cfg(target_os = "linux")]
    let before = server.resident_bytes();
    for (name, format) in bombs() {
        let body = with(chat("Hi"), json!({"response_format": "FORMAT"})).to_string();
        let body = body.replace("\"FORMAT\"", &format);
        let began = Instant::now();
        let headers = [("content-type", "application/json")];
        let reply: Reply = server.send("POST", CHAT, &headers, Some(body.as_bytes()));
        assert!(began.elapsed() < LONG, "{name} took {:?}", began.elapsed());
        let text = reply.text();
        assert!(reply.status == 200 || reply.status == 400, "{name}: {} {text}", reply.status);
        if reply.status == 400 {
            assert!(reply.json()["error"]["message"].is_string(), "{name}: {text}");
        }
        println!(
            "{name}: {} in {:?}: {}",
            reply.status,
            began.elapsed(),
            &text.chars().take(160).collect::<String>()
        );
        // The same as the parameters of a tool.
        let schema: Option<Value> = serde_json::from_str::<Value>(&format).ok();
        let Some(parameters) =
            schema.map(|all| all["json_schema"]["schema"].clone()).filter(Value::is_object)
        else {
            continue;
        };
        let tool = json!({"type": "function", "function": {"name": "f", "strict": true,
            "parameters": {"type": "object", "properties": {"a": parameters}, "required": ["a"]}}});
        let began = Instant::now();
        let reply = server.post(CHAT, &with(chat("Hi"), json!({"tools": [tool], "tool_choice": "required"})));
        assert!(began.elapsed() < LONG, "{name} as a tool took {:?}", began.elapsed());
        assert!(
            reply.status == 200 || reply.status == 400,
            "{name} as a tool: {} {}",
            reply.status,
            reply.text()
        );
        println!("   tool: {} in {:?}", reply.status, began.elapsed());
    }
    let reply = server.post(CHAT, &with(chat("What is 2+2?"), json!({"max_tokens": 9}))).ok();
    assert_eq!(reply["choices"][0]["message"]["content"], "2+2=4.");
    #[cfg(target_os = "linux")]
    {
        let more = server.peak_bytes().saturating_sub(before);
        println!("memory: {} MiB", more >> 20);
        assert!(more < MUCH, "{more} bytes more than before");
    }
}

#[test]
fn a_refusal_that_leaves_bytes_unread_ends_the_connection() {
    let server = Server::start();
    let mut stream = server.connect();
    let body = "x".repeat(100);
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 100000\r\n\r\n{body}"
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut reader = BufReader::new(stream);
    assert_eq!(read_reply(&mut reader).status, 415);
    // What follows is the rest of the body, whatever it looks like.
    let _ = reader.get_mut().write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let mut rest = Vec::new();
    let _ = reader.get_mut().set_read_timeout(Some(Duration::from_secs(2)));
    let _ = reader.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("HTTP/1.1 200"));
    server.is_well();
}
