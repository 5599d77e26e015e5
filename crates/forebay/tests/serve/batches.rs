//! Batches: from a file of requests to files of results.

use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::client::{MODEL, Server, chat, with};
use crate::files::upload;

/// A line of a batch.
pub fn line(name: &str, url: &str, body: &Value) -> String {
    json!({"custom_id": name, "method": "POST", "url": url, "body": body}).to_string() + "\n"
}

/// A server that keeps its batches there.
pub fn server(jobs: &std::path::Path, more: &[&str]) -> Server {
    Server::with(&[&["--jobs", jobs.to_str().unwrap()], more].concat())
}

pub fn create(server: &Server, endpoint: &str, file: &str) -> Value {
    let file = upload(server, file.as_bytes());
    let body = json!({"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"});
    server.post("/v1/batches", &body).ok()
}

pub fn id(object: &Value) -> &str {
    object["id"].as_str().expect("an id")
}

pub fn get(server: &Server, batch: &Value) -> Value {
    server.get(&format!("/v1/batches/{}", id(batch))).ok()
}

/// Waits until a batch is in one of these states.
#[track_caller]
pub fn until(server: &Server, batch: &Value, states: &[&str]) -> Value {
    let there = |server: &Server| states.iter().any(|state| get(server, batch)["status"] == *state);
    server.until("the batch", there);
    get(server, batch)
}

/// The lines of a file of results by their names; each name is there once.
pub fn results(server: &Server, file: &Value) -> BTreeMap<String, Value> {
    let Some(file) = file.as_str() else { return BTreeMap::new() };
    let text = server.get(&format!("/v1/files/{file}/content")).text();
    let mut all = BTreeMap::new();
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).expect("a line of JSON");
        let name = line["custom_id"].as_str().expect("a name").to_owned();
        assert!(all.insert(name.clone(), line).is_none(), "{name} is there twice");
    }
    all
}

/// What must be the same whenever a request is answered.
pub fn lasting(answer: &Value) -> Value {
    json!([answer["choices"], answer["output"][0]["content"], answer["usage"]["completion_tokens"]])
}

#[test]
fn every_endpoint_answers_as_it_does_directly_and_errors_are_lines() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), &[]);
    let say = |text: &str| with(chat(text), json!({"max_tokens": 12, "seed": 5, "temperature": 0.9}));
    let cases = [
        ("/v1/chat/completions", say("What is 2+2?"), say("Tell me a story.")),
        (
            "/v1/completions",
            json!({"model": MODEL, "prompt": "Once upon", "logprobs": 2, "temperature": 0}),
            json!({"model": MODEL, "prompt": "It was", "n": 2, "seed": 1}),
        ),
        (
            "/v1/responses",
            json!({"model": MODEL, "input": "What is 2+2?", "temperature": 0}),
            json!({"model": MODEL, "input": "Tell me a story.", "max_output_tokens": 9, "temperature": 0}),
        ),
    ];
    for (endpoint, one, other) in cases {
        let bogus = with(one.clone(), json!({"bogus": 1}));
        let lost = with(one.clone(), json!({"model": "lost"}));
        let all = [("one", &one), ("bogus", &bogus), ("other", &other), ("lost", &lost)];
        let file: String = all.map(|(name, body)| line(name, endpoint, body)).concat();
        let made = create(&server, endpoint, &file);
        assert_eq!((&made["object"], &made["endpoint"]), (&json!("batch"), &json!(endpoint)));
        let done = until(&server, &made, &["completed"]);
        assert_eq!(done["request_counts"], json!({"total": 4, "completed": 2, "failed": 2}));
        assert_eq!(done["forebay"]["eta_seconds"], 0);
        assert!(done["forebay"]["tokens_per_second"].as_f64().is_some_and(|rate| rate > 0.0));
        let output = results(&server, &done["output_file_id"]);
        assert_eq!(output.keys().collect::<Vec<_>>(), ["one", "other"]);
        for (name, body) in [("one", &one), ("other", &other)] {
            let response = &output[name]["response"];
            assert_eq!((&response["status_code"], &output[name]["error"]), (&json!(200), &Value::Null));
            let direct = server.post(endpoint, body).ok();
            let mut found = response["body"].clone();
            // Parts of a response have names of their own.
            if endpoint == "/v1/responses" {
                found["choices"] = json!(found["usage"]["output_tokens"] == direct["usage"]["output_tokens"]);
                let mut want = lasting(&direct);
                want[0] = true.into();
                assert_eq!(lasting(&found), want, "{name}");
            } else {
                assert_eq!(lasting(&found), lasting(&direct), "{endpoint} {name}");
            }
        }
        let errors = results(&server, &done["error_file_id"]);
        let error = |name: &str| {
            let response = &errors[name]["response"];
            (response["status_code"].clone(), response["body"]["error"]["param"].clone())
        };
        assert_eq!(error("bogus"), (json!(400), json!("bogus")));
        assert_eq!(error("lost"), (json!(404), json!("model")));
    }
    assert_eq!(server.metric("forebay_batches{status=\"completed\"}"), 3.0);
    assert_eq!(server.metric("forebay_batch_requests{state=\"completed\"}"), 6.0);
    assert_eq!(server.metric("forebay_batch_requests{state=\"waiting\"}"), 0.0);
    let list = server.get("/v1/batches?limit=2").ok();
    assert_eq!((list["data"].as_array().unwrap().len(), &list["has_more"]), (2, &json!(true)));
    let output = list["data"][0]["output_file_id"].as_str().unwrap();
    let made = json!({"input_file_id": output, "endpoint": "/v1/responses", "completion_window": "24h"});
    server.post("/v1/batches", &made).refused(400, "input_file_id");
    assert_eq!(server.send("DELETE", &format!("/v1/files/{output}"), &[], None).ok()["deleted"], true);
}

#[test]
fn files_that_are_wrong_fail_with_their_lines_and_requests_that_are_wrong_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), &["--max-body", "64KiB"]);
    let url = "/v1/chat/completions";
    let good = line("good", url, &chat("What is 2+2?"));
    let faults = |file: String| {
        let batch = create(&server, url, &file);
        let failed = until(&server, &batch, &["failed"]);
        assert_eq!(
            (&failed["output_file_id"], &failed["request_counts"]["completed"]),
            (&Value::Null, &json!(0))
        );
        let faults = failed["errors"]["data"].as_array().unwrap().clone();
        faults.iter().map(|fault| (fault["line"].clone(), fault["code"].clone())).collect::<Vec<_>>()
    };
    let streams = line("s", url, &with(chat("x"), json!({"stream": true})));
    let other = line("o", "/v1/embeddings", &chat("x"));
    assert_eq!(
        faults(format!("{good}{good}{{\n{streams}{other}")),
        [
            (json!(2), json!("duplicate_custom_id")),
            (json!(3), json!("invalid_json_line")),
            (json!(4), json!("unsupported_parameter")),
            (json!(5), json!("mismatched_url")),
        ]
    );
    assert_eq!(faults("\n".to_owned()), [(Value::Null, json!("empty_file"))]);
    let huge = line("huge", url, &chat(&"x".repeat(3 << 20)));
    assert_eq!(faults(format!("{good}{huge}")), [(json!(2), json!("line_too_long"))]);
    let deep = format!("{{\"custom_id\": {}", "[".repeat(60_000));
    assert_eq!(faults(deep), [(json!(1), json!("invalid_json_line"))]);
    // A hundred thousand tiny lines: right ones, and wrong ones.
    let mut many = String::new();
    for number in 0..100_000 {
        let _ = write!(many, r#"{{"custom_id":"{number}","method":"POST","url":"{url}","body":{{}}}}"#);
        many.push('\n');
    }
    assert_eq!(faults(many), [(json!(50_001), json!("too_many_requests"))]);
    assert_eq!(faults("{}\n".repeat(100_000)).len(), 101);
    #[cfg(target_os = "linux")]
    {
        let memory = server.peak_memory();
        let file = upload(&server, "{}\n".repeat(10_000_000).as_bytes());
        let body = json!({"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"});
        until(&server, &server.post("/v1/batches", &body).ok(), &["failed"]);
        let more = server.peak_memory().saturating_sub(memory);
        assert!(more < 16 << 20, "a file of 30 MB took {more} bytes of memory");
    }

    let file = upload(&server, good.as_bytes());
    let fine = json!({"input_file_id": file["id"], "endpoint": url, "completion_window": "24h"});
    for (wrong, param) in [
        (json!({"input_file_id": "file-000000000000000000000000"}), "input_file_id"),
        (json!({"input_file_id": "../../x"}), "input_file_id"),
        (json!({"input_file_id": null}), "input_file_id"),
        (json!({"endpoint": "/v1/embeddings"}), "endpoint"),
        (json!({"completion_window": "1h"}), "completion_window"),
        (json!({"metadata": {"a": 1}}), "metadata"),
        (json!({"metadata": {"a": "x".repeat(513)}}), "metadata"),
        (json!({"output_expires_after": {}}), "output_expires_after"),
    ] {
        server.post("/v1/batches", &with(fine.clone(), wrong)).refused(400, param);
    }
    let named = server.post("/v1/batches", &with(fine, json!({"metadata": {"a": "b"}}))).ok();
    assert_eq!(until(&server, &named, &["completed"])["metadata"], json!({"a": "b"}));
    server.is_well();
}

/// An answer that goes on until the context is full.
pub fn endless() -> Value {
    let bans: serde_json::Map<_, _> = (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect();
    with(chat("Tell me a story."), json!({"temperature": 2, "logit_bias": bans}))
}

#[test]
fn who_waits_comes_first_and_a_batch_can_be_cancelled() {
    let dir = tempfile::tempdir().unwrap();
    let server = server(dir.path(), &["--max-queue", "1"]);
    let url = "/v1/chat/completions";
    let mut file = line("short", url, &chat("What is 2+2?"));
    for number in 0..20 {
        file += &line(&format!("long {number}"), url, &endless());
    }
    let batch = create(&server, url, &file);
    server.until("a result", |server| get(server, &batch)["request_counts"]["completed"] == 1);
    // Batch work takes nobody's place in the queue.
    server.is_well();
    let running = get(&server, &batch);
    assert_eq!((&running["status"], &running["output_file_id"]), (&json!("in_progress"), &Value::Null));
    assert_eq!(running["request_counts"]["total"], 21);
    assert!(running["forebay"]["eta_seconds"].is_u64());
    let input = running["input_file_id"].as_str().unwrap().to_owned();
    assert_eq!(server.send("DELETE", &format!("/v1/files/{input}"), &[], None).status, 409);
    // A second one waits for its turn.
    let second = create(&server, url, &line("second", url, &chat("What is 2+2?")));
    let cancel = format!("/v1/batches/{}/cancel", id(&batch));
    let cancelled = server.send("POST", &cancel, &[], Some(b"")).ok();
    assert_eq!(cancelled["status"], "cancelling");
    let over = until(&server, &batch, &["cancelled"]);
    let count = over["request_counts"]["completed"].as_u64().unwrap() as usize;
    let output = results(&server, &over["output_file_id"]);
    assert!(output.len() == count && output.contains_key("short"), "what was answered can be fetched");
    assert_eq!((&over["error_file_id"], &over["request_counts"]["failed"]), (&Value::Null, &json!(0)));
    assert_eq!(server.send("POST", &cancel, &[], Some(b"")).status, 409);
    until(&server, &second, &["completed"]);
    assert_eq!(server.send("DELETE", &format!("/v1/files/{input}"), &[], None).status, 200);
    server.is_well();
}
