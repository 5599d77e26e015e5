//! What stays of batches when the server ends, in whatever way.

use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use crate::batches::{create, endless, get, id, lasting, line, results, server, until};
use crate::client::{Server, chat, with};

const URL: &str = "/v1/chat/completions";

fn requests(count: usize) -> Vec<(String, Value)> {
    let request = |number: usize| {
        let more = json!({"seed": number, "temperature": 1, "max_tokens": 10 + number % 7});
        (format!("request {number}"), with(chat(&format!("Tell me a story about {number}.")), more))
    };
    (0..count).map(request).collect()
}

fn file(requests: &[(String, Value)]) -> String {
    requests.iter().map(|(name, body)| line(name, URL, body)).collect()
}

/// Everything is there once, and as it is when it is asked for directly.
fn check(server: &Server, batch: &Value, requests: &[(String, Value)]) {
    let done = until(server, batch, &["completed"]);
    let count = requests.len();
    assert_eq!(done["request_counts"], json!({"total": count, "completed": count, "failed": 0}));
    let found = results(server, &done["output_file_id"]);
    let names: BTreeSet<&String> = requests.iter().map(|(name, _)| name).collect();
    assert_eq!(found.keys().collect::<BTreeSet<_>>(), names);
    for (name, body) in requests {
        let direct = server.post(URL, body).ok();
        assert_eq!(lasting(&found[name]["response"]["body"]), lasting(&direct), "{name}");
    }
}

/// The plug is pulled again and again: each request has one result, the right one.
#[test]
fn killed_at_any_moment_every_request_is_answered_once() {
    let dir = tempfile::tempdir().unwrap();
    let requests = requests(30);
    let first = server(dir.path(), &[]);
    let batch = create(&first, URL, &file(&requests));
    let mut running = Some(first);
    let mut seen = Vec::new();
    for round in 0..12u64 {
        let last = running.take().unwrap_or_else(|| server(dir.path(), &[]));
        // Some rounds end with the first result, others somewhere.
        let before = seen.last().copied().unwrap_or(0);
        if round % 2 == 0 {
            last.until("progress", |server| {
                let now = get(server, &batch);
                now["request_counts"]["completed"].as_u64() > Some(before) || now["status"] == "completed"
            });
        }
        std::thread::sleep(Duration::from_millis(round * 7919 % 23));
        let now = get(&last, &batch);
        seen.push(now["request_counts"]["completed"].as_u64().unwrap());
        last.kill();
        if now["status"] == "completed" {
            break;
        }
        // What a crash of the machine leaves is shorter still: half of a line.
        if round % 3 == 1 {
            tear(dir.path());
        }
    }
    check(&server(dir.path(), &[]), &batch, &requests);
    let early = seen.iter().filter(|count| **count < 30).count();
    assert!(early >= 3, "the kills came too late to mean anything: {seen:?}");
}

/// Cuts the last result in half, and writes nonsense behind it.
fn tear(jobs: &Path) {
    for entry in std::fs::read_dir(jobs.join("files")).unwrap() {
        let path = entry.unwrap().path();
        // Results in the making have no record yet.
        if path.extension().is_some_and(|end| end == "jsonl") && !path.with_extension("json").exists() {
            let text = std::fs::read_to_string(&path).unwrap();
            if let Some(last) = text.lines().last() {
                std::fs::write(&path, &text[..text.len() - 1 - last.len() / 2]).unwrap();
            }
        }
    }
}

#[test]
#[cfg(unix)]
fn a_server_that_is_asked_to_end_leaves_its_batches_for_the_next_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut requests = requests(8);
    let mut first = server(dir.path(), &["--drain-timeout", "0"]);
    // Some are cut off in the middle of their answer: that is no result.
    let ends = with(endless(), json!({"max_tokens": 400, "seed": 3}));
    requests.insert(0, ("long".to_owned(), ends));
    let batch = create(&first, URL, &file(&requests));
    first.until("a result", |server| get(server, &batch)["request_counts"]["completed"].as_u64() > Some(0));
    first.signal("TERM");
    assert_eq!(first.wait().code(), Some(0));
    drop(first);
    let next = server(dir.path(), &[]);
    check(&next, &batch, &requests);
}

#[test]
fn one_server_has_a_folder_and_another_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let first = server(dir.path(), &[]);
    let (status, error) = Server::last_words(&["--jobs", dir.path().to_str().unwrap()]);
    assert_eq!(status.code(), Some(2), "{error}");
    assert!(error.contains("another server") && error.contains("--jobs"), "{error}");
    first.is_well();
    first.kill();
    server(dir.path(), &[]).is_well();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (status, error) = Server::last_words(&["--jobs", file.to_str().unwrap()]);
    assert!(status.code() == Some(1) && error.contains("--jobs"), "{error}");
}

/// What cannot be understood is set aside, and everything else goes on.
#[test]
fn damage_in_one_place_is_damage_there_only() {
    let dir = tempfile::tempdir().unwrap();
    let requests = requests(4);
    let first = server(dir.path(), &[]);
    let good = create(&first, URL, &file(&requests));
    let mut ids = Vec::new();
    for _ in 0..3 {
        let batch = create(&first, URL, &line("x", URL, &chat("What is 2+2?")));
        ids.push(id(&until(&first, &batch, &["completed"])).to_owned());
    }
    first.kill();
    let batches = dir.path().join("batches");
    let path = |at: usize| batches.join(format!("{}.json", ids[at]));
    std::fs::write(path(0), "").unwrap();
    let other = std::fs::read_to_string(path(1)).unwrap();
    std::fs::write(path(1), other.replace("\"output_file_id\":\"file-", "\"output_file_id\":\"../")).unwrap();
    std::fs::write(batches.join("batch_nonsense.json"), vec![0xff; 100]).unwrap();
    std::fs::create_dir(batches.join("batch_folder.json")).unwrap();
    let next = server(dir.path(), &[]);
    for gone in [0, 1] {
        assert_eq!(next.get(&format!("/v1/batches/{}", ids[gone])).status, 404);
    }
    assert_eq!(next.get(&format!("/v1/batches/{}", ids[2])).ok()["status"], "completed");
    check(&next, &good, &requests);
    let names = std::fs::read_dir(&batches).unwrap().map(|entry| entry.unwrap().file_name());
    assert_eq!(names.filter(|name| name.to_string_lossy().ends_with(".damaged")).count(), 4);
}

/// Results that cannot be written wait for room, and so does everything behind them.
#[test]
#[cfg(target_os = "linux")]
fn a_full_disk_pauses_a_batch_and_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let requests = requests(12);
    // A limit on the size of files stands for a full disk: both end in the middle of a line.
    let running = Server::limitable(&["--jobs", dir.path().to_str().unwrap()]);
    running.limit_files("4000");
    let batch = create(&running, URL, &file(&requests));
    running.until("the pause", |server| server.metric("forebay_batch_paused") == 1.0);
    let paused = get(&running, &batch);
    assert_eq!(paused["status"], "in_progress");
    assert!(paused["forebay"]["paused"].as_str().is_some_and(|why| why.contains("cannot be written")));
    assert!(running.get("/health").ok()["batches"]["paused"].is_string());
    running.is_well();
    running.limit_files("unlimited");
    check(&running, &batch, &requests);
    assert_eq!(running.metric("forebay_batch_paused"), 0.0);
}
