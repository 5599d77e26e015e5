//! Several models by name, one of them in memory.

use std::io::{BufReader, Write};
use std::path::Path;

use serde_json::{Value, json};

use crate::batches::{self, create, line, results, until};
use crate::client::{Server, chat, events, read_head, read_reply, request, with};

const DEMO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo");
const CHAT: &str = "/v1/chat/completions";

/// The bundled model by two names.
fn two(more: &[&str]) -> Server {
    let models = ["day", "night"].map(|name| format!("--model={name}={DEMO}"));
    let models: Vec<&str> = models.iter().map(String::as_str).collect();
    Server::with(&[&models[..], more].concat())
}

fn to(model: &str, body: Value) -> Value {
    with(body, json!({"model": model}))
}

/// A story that two models with the same weights tell alike, and two others would not.
fn story(model: &str, tokens: u32) -> Value {
    let bans: serde_json::Map<_, _> = (8160..8181).map(|id: u32| (id.to_string(), json!(-100))).collect();
    let more = json!({"temperature": 1, "seed": 1, "max_tokens": tokens, "logit_bias": bans});
    to(model, with(chat("Tell me a story."), more))
}

fn bytes(body: &Value) -> Vec<u8> {
    let json = [("content-type", "application/json")];
    request("POST", CHAT, &json, Some(body.to_string().as_bytes()))
}

fn state(server: &Server) -> String {
    server.get("/health").json()["state"].as_str().expect("a state").to_owned()
}

fn loads(server: &Server, model: &str) -> f64 {
    server.metric(&format!("forebay_model_loads_total{{model=\"{model}\"}}"))
}

#[test]
fn both_names_answer_in_every_interface_and_others_are_refused_with_all_names() {
    let server = two(&[]);
    assert_eq!(state(&server), "loaded day");
    let names = |list: &Value, key: &str| -> Vec<String> {
        list.as_array().unwrap().iter().map(|model| model[key].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&server.get("/v1/models").ok()["data"], "id"), ["day", "night"]);
    assert_eq!(names(&server.get("/api/tags").ok()["models"], "name"), ["day", "night"]);
    assert_eq!(names(&server.get("/api/ps").ok()["models"], "name"), ["day"]);
    assert_eq!(server.get("/v1/models/night").ok()["id"], "night");
    assert_eq!(server.post("/api/show", &json!({"name": "night:latest"})).status, 200);
    // What needs no engine leaves the one in memory where it is.
    let long = to("night", chat(&"word ".repeat(20_000)));
    assert_eq!(server.post(CHAT, &long).refused(400, "")["code"], "context_length_exceeded");
    let tokens = |body: &Value| server.post("/tokenize", body).ok()["tokens"].clone();
    assert_eq!(tokens(&json!({"model": "night", "prompt": "Hi"})), tokens(&json!({"prompt": "Hi"})));
    let count = json!({"model": "night", "messages": [{"role": "user", "content": "Hi"}]});
    assert_eq!(server.post("/v1/messages/count_tokens", &count).status, 200);
    assert_eq!((state(&server).as_str(), loads(&server, "night")), ("loaded day", 0.0));

    let first = server.post(CHAT, &story("day", 40)).ok();
    let other = server.post(CHAT, &story("night", 40)).ok();
    assert_eq!((&first["model"], &other["model"]), (&json!("day"), &json!("night")));
    assert_eq!(first["choices"], other["choices"]);
    assert_eq!(state(&server), "loaded night");
    let ask =
        json!({"model": "day", "max_tokens": 9, "messages": [{"role": "user", "content": "What is 2+2?"}]});
    let said = server.post("/v1/messages", &ask).ok();
    assert_eq!((&said["model"], &said["content"][0]["text"]), (&json!("day"), &json!("2+2=4.")));
    let ask = json!({"model": "night:latest", "prompt": "What is 2+2?", "stream": false});
    assert_eq!(server.post("/api/generate", &ask).ok()["response"], "2+2=4.");
    // An empty request brings a model into memory.
    assert_eq!(server.post("/api/chat", &json!({"model": "day"})).ok()["done_reason"], "load");
    assert_eq!(names(&server.get("/api/ps").ok()["models"], "name"), ["day"]);
    assert_eq!(loads(&server, "night"), 2.0);
    assert_eq!(server.metric("forebay_model_resident{model=\"day\"}"), 1.0);
    assert_eq!(server.metric("forebay_model_resident{model=\"night\"}"), 0.0);
    assert!(server.metric("forebay_model_load_seconds_total{model=\"night\"}") > 0.0);

    let lost = to("lost", chat("Hi"));
    for (path, body) in [
        (CHAT, lost.clone()),
        ("/v1/responses", json!({"model": "lost", "input": "Hi"})),
        ("/v1/messages", with(lost.clone(), json!({"max_tokens": 1}))),
        ("/api/chat", lost),
        ("/api/show", json!({"model": "lost"})),
        ("/tokenize", json!({"model": "lost", "prompt": "Hi"})),
    ] {
        let reply = server.post(path, &body);
        let error = reply.text();
        assert_eq!(reply.status, 404, "{path}: {error}");
        assert!(error.contains(r#"\"day\" or \"night\""#), "{path}: {error}");
    }
    assert_eq!(server.get("/v1/models/lost").status, 404);
    assert_eq!(server.get("/dashboard/state").ok()["model"]["id"], "day");
}

#[test]
fn eight_clients_take_turns() {
    let server = two(&[]);
    let want = server.post(CHAT, &story("day", 12)).ok()["choices"].clone();
    std::thread::scope(|scope| {
        for client in 0..8 {
            let (server, want) = (&server, &want);
            scope.spawn(move || {
                for round in 0..5 {
                    let model = ["day", "night"][(client + round) % 2];
                    if (client + round) % 3 == 0 {
                        let body = with(story(model, 12), json!({"stream": true}));
                        let all = server.post(CHAT, &body).events();
                        assert_eq!(all[all.len() - 1].1, "[DONE]", "{all:?}");
                        let text: String = all
                            .iter()
                            .filter_map(|(_, data)| data["choices"][0]["delta"]["content"].as_str())
                            .collect();
                        assert_eq!(text, want[0]["message"]["content"], "{model}");
                        assert_eq!(all[0].1["model"], *model);
                        continue;
                    }
                    let found = server.post(CHAT, &story(model, 12)).ok();
                    assert_eq!((&found["model"], &found["choices"]), (&json!(model), want));
                }
            });
        }
    });
    let all = loads(&server, "day") + loads(&server, "night");
    assert!((3.0..=41.0).contains(&all), "{all} loads for 40 requests");
    assert_eq!(server.metric("forebay_requests_running"), 0.0);
    // The numbers of a model that has left memory are not forgotten.
    assert_eq!(server.metric("forebay_generation_tokens_total"), 41.0 * 12.0);
}

#[test]
fn a_stream_waits_for_its_model_and_says_so() {
    let server = two(&[]);
    let mut busy = server.connect();
    busy.write_all(&bytes(&with(story("day", 100_000), json!({"stream": true, "max_tokens": null}))))
        .unwrap();
    server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
    let mut waits = server.connect();
    let more = json!({"stream": true, "stream_options": {"include_progress": true}});
    waits.write_all(&bytes(&with(story("night", 12), more))).unwrap();
    let mut waits = BufReader::new(waits);
    // The head comes although the model does not.
    let mut lines = String::new();
    let (status, _) = read_head(&mut waits);
    assert_eq!(status, 200);
    while !lines.contains("forebay.queued") {
        assert!(std::io::BufRead::read_line(&mut waits, &mut lines).unwrap() > 0, "{lines}");
    }
    assert_eq!(server.metric("forebay_requests_waiting{priority=\"interactive\"}"), 1.0);
    assert_eq!((state(&server).as_str(), loads(&server, "night")), ("loaded day", 0.0));
    // Who asks for the model in memory now comes after that.
    drop(busy);
    assert_eq!(server.ask_model("day"), "2+2=4.");
    assert_eq!(loads(&server, "night"), 1.0);
    while !lines.contains("[DONE]") {
        assert!(std::io::BufRead::read_line(&mut waits, &mut lines).unwrap() > 0, "{lines}");
    }
    assert!(lines.contains("forebay.started") && !lines.contains("\"error\""), "{lines}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_model_that_nobody_uses_leaves_and_comes_back_the_same() {
    let server = Server::with(&["--idle-unload", "1s"]);
    let ask = with(
        chat("Tell me a story."),
        json!({"temperature": 1, "seed": 7, "max_tokens": 20, "logprobs": true}),
    );
    let before = server.post(CHAT, &ask).ok()["choices"].clone();
    assert!(!files(&server).is_empty(), "the model's files are open");
    let unloaded = |server: &Server| state(server) == "unloaded (idle)";
    server.until("the end of the model", unloaded);
    let health = server.get("/health").ok();
    assert_eq!(
        (&health["status"], &health["resident"], &health["running"]),
        (&json!("ok"), &Value::Null, &json!(0))
    );
    assert_eq!(server.get("/health/live").status, 200);
    assert_eq!(server.get("/api/ps").ok()["models"], json!([]));
    assert_eq!(server.get("/dashboard/state").ok()["health"], "ready");
    assert_eq!(files(&server), Vec::<String>::new(), "they are closed");
    assert_eq!(server.metric("forebay_generation_tokens_total"), 20.0);
    assert_eq!(server.metric("forebay_expert_slots"), 0.0);
    assert_eq!(server.post(CHAT, &ask).ok()["choices"], before);
    assert_eq!(server.metric("forebay_generation_tokens_total"), 40.0);
    assert_eq!(loads(&server, "forebay-demo"), 2.0);
    server.until("the end of the model", unloaded);
    server.is_well();
}

/// Files of weights that a server has open.
#[cfg(target_os = "linux")]
fn files(server: &Server) -> Vec<String> {
    let links = std::fs::read_dir(format!("/proc/{}/fd", server.id())).expect("it runs");
    let name = |link: std::io::Result<std::fs::DirEntry>| std::fs::read_link(link.ok()?.path()).ok();
    let names = links.filter_map(name).map(|path| path.to_string_lossy().into_owned());
    names.filter(|name| name.contains(".safetensors")).collect()
}

fn copy(to: &Path) {
    for entry in std::fs::read_dir(DEMO).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
}

#[test]
fn a_model_that_cannot_be_loaded_is_refused_and_the_other_one_is_served() {
    let dir = tempfile::tempdir().unwrap();
    copy(dir.path());
    let broken = format!("--model=broken={}", dir.path().display());
    let good = format!("--model=good={DEMO}");
    let server = Server::with(&[&good, &broken]);
    std::fs::remove_file(dir.path().join("model.safetensors")).unwrap();
    std::thread::scope(|scope| {
        for client in 0..6 {
            let server = &server;
            scope.spawn(move || match client % 2 {
                0 => assert_eq!(server.ask_model("good"), "2+2=4."),
                _ => {
                    let body = with(to("broken", chat("Hi")), json!({"stream": client == 1}));
                    let reply = server.post(CHAT, &body);
                    let after: u64 = reply.header("retry-after").expect("when to try again").parse().unwrap();
                    assert!((1..=10).contains(&after), "{after}");
                    let error = reply.refused(503, "");
                    assert_eq!(error["code"], "model_unavailable");
                    let message = error["message"].as_str().unwrap();
                    assert!(message.contains("\"broken\"") && message.contains("safetensors"), "{message}");
                }
            });
        }
    });
    assert!(server.metric("forebay_model_load_failures_total{model=\"broken\"}") >= 1.0);
    // It does not cost the other one its place again and again.
    assert_eq!(server.ask_model("good"), "2+2=4.");
    let before = loads(&server, "good");
    assert_eq!(server.post(CHAT, &to("broken", chat("Hi"))).status, 503);
    assert_eq!(server.ask_model("good"), "2+2=4.");
    assert_eq!(loads(&server, "good"), before);
    assert_eq!(server.get("/health").status, 200);
}

#[test]
#[cfg(unix)]
fn the_end_finishes_what_runs_and_tells_who_waits_for_another_model() {
    let mut server = two(&[]);
    let mut runs = server.connect();
    runs.write_all(&bytes(&with(story("day", 150), json!({"stream": true})))).unwrap();
    server.until("the answer", |server| server.metric("forebay_requests_running") > 0.0);
    let mut waits = server.connect();
    waits.write_all(&bytes(&story("night", 12))).unwrap();
    server.until("the other one", |server| {
        server.metric("forebay_requests_waiting{priority=\"interactive\"}") > 0.0
    });
    server.signal("TERM");
    let refused = read_reply(&mut BufReader::new(waits));
    assert_eq!(refused.refused(503, "")["code"], "shutting_down");
    let all = events(&read_reply(&mut BufReader::new(runs)).text());
    assert_eq!(all[all.len() - 1].1, "[DONE]", "the answer is whole");
    assert_eq!(all[all.len() - 2].1["choices"][0]["finish_reason"], "length");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
#[cfg(unix)]
fn the_end_comes_at_any_moment_of_a_switch() {
    for round in 0..6u64 {
        let mut server = two(&["--idle-unload", "1s"]);
        assert_eq!(server.get("/health").status, 200);
        let mut clients: Vec<_> = ["night", "day", "night"]
            .iter()
            .map(|model| {
                let mut client = server.connect();
                client.write_all(&bytes(&story(model, 6))).unwrap();
                client
            })
            .collect();
        std::thread::sleep(std::time::Duration::from_millis(round * 37));
        server.signal("TERM");
        for client in clients.drain(..) {
            let mut client = BufReader::new(client);
            // A connection that was not taken in yet ends without a word.
            if std::io::BufRead::fill_buf(&mut client).is_ok_and(|bytes| !bytes.is_empty()) {
                let reply = read_reply(&mut client);
                assert!(matches!(reply.status, 200 | 503), "{}", reply.text());
            }
        }
        assert_eq!(server.wait().code(), Some(0), "round {round}");
    }
}

#[test]
fn a_batch_is_answered_model_by_model() {
    let dir = tempfile::tempdir().unwrap();
    let models = ["day", "night"].map(|name| format!("--model={name}={DEMO}"));
    let server = batches::server(dir.path(), &[&models[0], &models[1]]);
    let names = ["day", "night", "lost"];
    let file: String = (0..18).map(|at| line(&format!("{at}"), CHAT, &story(names[at % 3], 5))).collect();
    let made = create(&server, CHAT, &file);
    let done = until(&server, &made, &["completed"]);
    assert_eq!(done["request_counts"], json!({"total": 18, "completed": 12, "failed": 6}));
    assert_eq!(done["forebay"]["models"], json!(["day", "night"]));
    let want = server.post(CHAT, &story("night", 5)).ok();
    for (at, found) in results(&server, &done["output_file_id"]) {
        let body = &found["response"]["body"];
        assert_eq!(body["model"], names[at.parse::<usize>().unwrap() % 3]);
        assert_eq!(body["choices"], want["choices"]);
    }
    let errors = results(&server, &done["error_file_id"]);
    assert!(errors.values().all(|line| line["response"]["status_code"] == 404));
    assert_eq!((loads(&server, "day"), loads(&server, "night")), (1.0, 1.0), "each is loaded once");
    server.kill();

    // A server without one of them leaves a batch for both alone, and one with both goes on, whichever comes first.
    let dir = tempfile::tempdir().unwrap();
    let first = batches::server(dir.path(), &[&models[0], &models[1]]);
    let file = line("long", CHAT, &story("day", 300)) + &line("other", CHAT, &story("night", 5));
    let made = create(&first, CHAT, &file);
    until(&first, &made, &["in_progress"]);
    first.kill();
    let without = batches::server(dir.path(), &[&models[0]]);
    assert_eq!(batches::get(&without, &made)["status"], "in_progress");
    without.kill();
    let both = batches::server(dir.path(), &[&models[1], &models[0]]);
    let done = until(&both, &made, &["completed"]);
    assert_eq!(done["request_counts"], json!({"total": 2, "completed": 2, "failed": 0}));
}

#[test]
fn what_is_wrong_with_the_models_is_said_at_the_start() {
    let named = |name: &str| format!("--model={name}={DEMO}");
    let (day, night) = (named("day"), named("night"));
    let empty = tempfile::tempdir().unwrap();
    let folder = empty.path().to_str().unwrap();
    let none = format!("--model=none={folder}");
    for (args, code, words) in [
        (vec![day.as_str(), &day], 2, "both be called day"),
        (vec![&day, &night, "--served-name", "x"], 2, "--model NAME=DIR"),
        (vec![&day, &night, "--mirror", folder], 2, "--mirror"),
        (vec!["--model==x"], 2, "cannot be called"),
        (vec![&day, &none], 3, "config.json"),
        (vec!["--idle-unload", "5"], 2, "30m"),
    ] {
        let (status, said) = Server::last_words(&args);
        assert_eq!(status.code(), Some(code), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    // The same in a file.
    let file = empty.path().join("forebay.toml");
    std::fs::write(&file, format!("model = [\"day={DEMO}\", \"{DEMO}\"]\nidle-unload = \"1h\"\n")).unwrap();
    let server = Server::with(&["--config", file.to_str().unwrap()]);
    assert_eq!(server.get("/health").ok()["models"], json!(["day", "demo"]));
    assert_eq!(server.ask_model("demo"), "2+2=4.");
}
