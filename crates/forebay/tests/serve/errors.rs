//! What is refused, and how it is said.

use serde_json::{Value, json};

use crate::client::{MODEL, Server, chat, with};

#[test]
fn parameters_are_refused_by_their_name() {
    let server = Server::start();
    for (more, param) in [
        (json!({"bogus": 1}), "bogus"),
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"top_p": 0}), "top_p"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 1.5}), "max_tokens"),
        (json!({"n": 0}), "n"),
        (json!({"n": 1000}), "n"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": [1]}), "stop"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"1": 101}}), "logit_bias.1"),
        (json!({"logit_bias": {"100000": 1}}), "logit_bias"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"user": 1}), "user"),
        (json!({"metadata": "m"}), "metadata"),
        (json!({"prompt_cache_key": {}}), "prompt_cache_key"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]}]}),
            "messages[0].content[0].x",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": 1}]}]}),
            "messages[0].content[0].cache_control",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]}),
            "messages[0].tool_calls[0].type",
        ),
        (
            json!({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "x": 1}}]}]}),
            "messages[0].tool_calls[0].function.x",
        ),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"x": 1}}), "stream_options.x"),
        (json!({"reasoning_effort": "some"}), "reasoning_effort"),
        (json!({"store": true}), "store"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": "Hi"}), "messages"),
        (json!({"messages": [{"role": "robot", "content": "Hi"}]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), "messages[0]"),
        (json!({"messages": [{"role": "user", "content": "Hi", "mood": "good"}]}), "messages[0].mood"),
        (json!({"chat_template_kwargs": {"x": 1}}), "chat_template_kwargs.x"),
    ] {
        let error = server.post("/v1/chat/completions", &with(chat("Hi"), more.clone())).refused(400, param);
        assert_eq!(error["type"], "invalid_request_error", "{more}");
    }
    server.post("/v1/chat/completions", &json!({"messages": []})).refused(400, "model");
    server.post("/v1/chat/completions", &with(chat("Hi"), json!({"model": "gpt"}))).refused(404, "model");
    // What names a request, or asks for what is so anyway, is taken.
    let labels =
        json!({"user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "n": null});
    server.post("/v1/chat/completions", &with(chat("Hi"), labels)).ok();
    server.is_well();
}

#[test]
fn prompts_that_do_not_fit_are_refused_and_never_cut() {
    let server = Server::with(&["--context", "64"]);
    let long = "one two three ".repeat(50);
    let error = server.post("/v1/chat/completions", &chat(&long)).refused(400, "");
    assert_eq!(error["code"], "context_length_exceeded");
    assert!(error["message"].as_str().unwrap().contains("64"));
    let full = server
        .post("/v1/chat/completions", &with(chat("Tell me a story."), json!({"temperature": 1.0})))
        .ok();
    let total = full["usage"]["total_tokens"].as_u64().unwrap();
    assert!(total <= 65, "{total}");
    server.is_well();
}

#[test]
fn bodies_and_routes_that_are_wrong_are_told_apart() {
    let server = Server::start();
    let json = [("content-type", "application/json")];
    let chat = "/v1/chat/completions";
    for (method, path, headers, body, status, code) in [
        ("POST", chat, &json[..], Some("{"), 400, "invalid_json"),
        ("POST", chat, &json[..], Some("[]"), 400, "invalid_json"),
        ("POST", chat, &json[..], Some(""), 400, "invalid_json"),
        ("POST", chat, &json[..], None, 411, "length_required"),
        ("POST", chat, &[][..], Some("{}"), 415, "unsupported_media_type"),
        ("POST", chat, &[("content-type", "text/plain")][..], Some("{}"), 415, "unsupported_media_type"),
        ("POST", chat, &[json[0], ("content-encoding", "gzip")][..], Some("{}"), 415, "unsupported_encoding"),
        ("GET", chat, &[][..], None, 405, "method_not_allowed"),
        ("DELETE", "/v1/models", &[][..], None, 405, "method_not_allowed"),
        ("GET", "/v2/models", &[][..], None, 404, "not_found"),
        ("POST", "/v1/embeddings", &json[..], Some("{}"), 404, "not_found"),
    ] {
        let reply = server.send(method, path, headers, body.map(str::as_bytes));
        assert_eq!(reply.status, status, "{method} {path} {body:?}: {}", reply.text());
        assert_eq!(reply.json()["error"]["code"], code, "{method} {path} {body:?}");
        assert!(reply.header("x-request-id").is_some());
    }
    let deep = format!("{{\"model\": {}1{}}}", "[".repeat(5000), "]".repeat(5000));
    assert_eq!(server.send("POST", chat, &json, Some(deep.as_bytes())).status, 400);
    // Each interface has its own shape.
    let reply = server.send("POST", "/v1/messages", &json, Some(b"{"));
    assert_eq!((reply.status, &reply.json()["type"]), (400, &json!("error")));
    let reply = server.send("POST", "/api/chat", &json, Some(b"{"));
    assert!(reply.status == 400 && reply.json()["error"].is_string());
    server.is_well();
}

#[test]
fn keys_open_the_door() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    std::fs::write(&file, "first\n\nsecond\n").unwrap();
    let server = Server::with(&["--api-key-file", file.to_str().unwrap(), "--api-key", "third"]);
    let status = |headers: &[(&str, &str)]| server.send("GET", "/v1/models", headers, None).status;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&[("authorization", "Bearer fourth")]), 401);
    for key in ["first", "second", "third"] {
        assert_eq!(status(&[("authorization", &format!("Bearer {key}"))]), 200, "{key}");
        assert_eq!(status(&[("x-api-key", key)]), 200, "{key}");
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 200);
    let body = json!({"model": MODEL, "max_tokens": 1, "messages": []}).to_string();
    let reply =
        server.send("POST", "/v1/messages", &[("content-type", "application/json")], Some(body.as_bytes()));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (401, &json!("authentication_error")));
}

#[test]
fn web_pages_are_let_in_by_name_only() {
    let server = Server::with(&["--cors-origin", "https://good.example"]);
    let body = chat("What is 2+2?").to_string();
    let ask = |origin: &str| {
        let headers = [("content-type", "application/json"), ("origin", origin)];
        server.send("POST", "/v1/chat/completions", &headers, Some(body.as_bytes()))
    };
    let good = ask("https://good.example");
    assert_eq!(
        (good.status, good.header("access-control-allow-origin")),
        (200, Some("https://good.example"))
    );
    let bad = ask("https://bad.example");
    assert_eq!((bad.status, bad.header("access-control-allow-origin")), (403, None));
    // A browser sends this without asking first.
    let headers = [("origin", "https://bad.example"), ("content-type", "text/plain")];
    assert_eq!(server.send("POST", "/api/generate", &headers, Some(b"{}")).status, 403);
    let preflight = [("origin", "https://good.example"), ("access-control-request-method", "POST")];
    let reply = server.send("OPTIONS", "/v1/chat/completions", &preflight, None);
    assert_eq!(reply.status, 204);
    assert!(reply.header("access-control-allow-headers").is_some_and(|all| all.contains("authorization")));
    // What clients for pages send, of which each version has more.
    let wanted = "anthropic-dangerous-direct-browser-access,anthropic-new,authorization,content-type,openai-beta,\
        x-api-key,x-stainless-helper-method,x-stainless-os,x-evil,x-stainless-(";
    let preflight = [preflight[0], preflight[1], ("access-control-request-headers", wanted)];
    let reply = server.send("OPTIONS", "/v1/messages", &preflight, None);
    let allowed: Vec<&str> = reply.header("access-control-allow-headers").unwrap().split(", ").collect();
    for name in wanted.split(',').take(8) {
        assert!(allowed.contains(&name), "{name}: {allowed:?}");
    }
    assert!(!allowed.contains(&"x-evil") && !allowed.iter().any(|name| name.contains('(')), "{allowed:?}");
    let exposed = good.header("access-control-expose-headers").unwrap();
    for (name, _) in
        good.headers.iter().filter(|(name, _)| name.starts_with("x-forebay") || name == "x-request-id")
    {
        assert!(exposed.contains(name.as_str()), "{name}: {exposed}");
    }
    let rebound = server.send("GET", "/v1/models", &[("host", "evil.example")], None);
    assert_eq!((rebound.status, &rebound.json()["error"]["code"]), (403, &json!("host_not_allowed")));
}

#[test]
fn a_public_address_needs_a_key_or_a_word() {
    let run = |args: &[&str]| {
        std::process::Command::new(env!("CARGO_BIN_EXE_forebay"))
            .arg("serve")
            .args(args)
            .env_remove("FOREBAY_API_KEY")
            .env_remove("FOREBAY_CONFIG")
            .output()
            .unwrap()
    };
    let refused = run(&["--port", "0", "--host", "0.0.0.0"]);
    assert_eq!(refused.status.code(), Some(2));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("--api-key-file") && said.contains("--allow-public"), "{said}");
    let server = Server::with(&["--host", "0.0.0.0", "--api-key", "k"]);
    let port = server.address.rsplit(':').next().unwrap().to_owned();
    let taken = run(&["--port", &port]);
    assert_eq!(taken.status.code(), Some(1));
    assert!(String::from_utf8(taken.stderr).unwrap().contains("cannot listen on"));
}

#[test]
fn a_key_from_the_environment_is_one_or_the_server_does_not_start() {
    use std::ffi::OsStr;
    #[cfg(unix)]
    let odd: &OsStr = std::os::unix::ffi::OsStrExt::from_bytes(b"k\xff");
    #[cfg(not(unix))]
    let odd = OsStr::new("k\u{e9}");
    for (key, want) in
        [(OsStr::new(""), "is empty"), (OsStr::new("two words"), "holds no key"), (odd, "holds no key")]
    {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.args(["serve", "--port", "0"]).env_remove("FOREBAY_CONFIG").env("FOREBAY_API_KEY", key);
        let output = command.output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(
            output.status.code() == Some(2) && said.contains(&format!("FOREBAY_API_KEY {want}")),
            "{key:?}: {said}"
        );
    }
}

#[test]
fn what_clients_write_makes_no_lines_in_the_log() {
    let mut server = Server::with(&["--log", "debug"]);
    let name = "a\n2026-01-01T00:00:00Z  INFO forged\u{85}forged\u{2028}forged\u{1b}[2Jb";
    let reply = server.post("/v1/chat/completions", &with(chat("Hi"), json!({name: 1})));
    assert_eq!(reply.status, 400);
    let said = server.said_until("served");
    assert!(
        said.contains("a\\n2026-01-01T00:00:00Z  INFO forged\\u{85}forged\\u{2028}forged\\u{1b}[2Jb"),
        "{said}"
    );
    assert!(!said.contains(['\u{85}', '\u{2028}', '\u{1b}']), "{said}");
}

#[test]
fn the_first_lines_say_where_everything_is() {
    let server = Server::start();
    let base = format!("http://{}", server.address);
    let lines: Vec<&str> = server.greeting.lines().collect();
    assert!(lines[0].starts_with(&format!("listening on {base} ")), "{lines:?}");
    assert!(lines[1].contains("browser") && lines[1].contains(&format!("{base}/ ")), "{lines:?}");
    assert!(lines[2].contains(&format!("{base}/v1 (OpenAI)")) && lines[2].contains("Anthropic"), "{lines:?}");
    let page = server.send("GET", "/", &[("accept", "text/html")], None);
    assert!(page.header("content-type").is_some_and(|kind| kind.starts_with("text/html")));
    // Every address is no address.
    let all = Server::with(&["--host", "0.0.0.0", "--allow-public"]);
    let port = all.address.rsplit(':').next().unwrap();
    assert!(all.greeting.contains(&format!("http://localhost:{port}/ ")), "{}", all.greeting);
}

#[test]
fn metrics_count_what_happened() {
    let server = Server::start();
    server.is_well();
    server.is_well();
    assert_eq!(server.metric("forebay_generation_tokens_total"), 12.0);
    assert_eq!(server.metric("forebay_prompt_tokens_total"), 14.0);
    assert_eq!(server.metric("forebay_prompt_tokens_cached_total"), 12.0);
    assert_eq!(server.metric("forebay_answers_total{reason=\"stop\"}"), 2.0);
    assert_eq!(server.metric("forebay_time_to_first_token_seconds_count"), 2.0);
    // The first one taught what the second one would take.
    assert_eq!(server.metric("forebay_forecast_error_seconds_count"), 1.0);
    server.get("/nowhere");
    assert_eq!(server.metric("forebay_http_responses_total{status=\"4xx\"}"), 1.0);
    let text = server.get("/metrics").text();
    let bad = |line: &&str| {
        !line.starts_with('#') && line.rsplit(' ').next().is_none_or(|v| v.parse::<f64>().is_err())
    };
    assert_eq!(text.lines().find(bad), None);
    let reply: Value = server.get("/health/live").ok();
    assert_eq!(reply["status"], "ok");
}
