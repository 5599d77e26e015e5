//! What the description of the interfaces promises, held against the server.

use serde_json::{Map, Value, json};

use crate::batches;
use crate::client::{MODEL, Server};
use crate::files::upload;

fn document(server: &Server) -> Value {
    let reply = server.get("/openapi.json");
    assert_eq!(reply.header("content-type"), Some("application/json"));
    reply.ok()
}

/// The fields of a request, and those that have to be there, in every form that it may have.
fn forms<'d>(document: &'d Value, request: &Value) -> Vec<(&'d Map<String, Value>, Vec<&'d str>)> {
    let place = request["requestBody"]["content"]["application/json"]["schema"]["$ref"].as_str().unwrap();
    let schema = document.pointer(place.strip_prefix('#').unwrap()).unwrap();
    let forms: Vec<&Value> =
        schema["anyOf"].as_array().map_or_else(|| vec![schema], |forms| forms.iter().collect());
    let form = |schema: &'d Value| {
        let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
        (schema["properties"].as_object().unwrap(), required.collect())
    };
    forms.into_iter().map(form).collect()
}

/// Every field of one form of a request is known, and no other.
fn check(server: &Server, file: &Value, path: &str, all: &Map<String, Value>, required: &[&str]) {
    let mut good = json!({});
    for name in required {
        good[*name] = match *name {
            "model" | "name" => MODEL.into(),
            "messages" => json!([{"role": "user", "content": "Hi"}]),
            "max_tokens" => 2.into(),
            "tokens" => json!([5]),
            "endpoint" => "/v1/chat/completions".into(),
            "input_file_id" => file.clone(),
            "completion_window" => "24h".into(),
            _ => "Hi".into(),
        };
    }
    assert_eq!(server.post(path, &good).status, 200, "{path} with what is required: {good}");
    for name in required {
        let mut without = good.clone();
        without.as_object_mut().unwrap().remove(*name);
        assert_eq!(server.post(path, &without).status, 400, "{path} without {name}");
    }
    for (name, schema) in all {
        let mut odd = good.clone();
        // No field takes this, but those that take anything.
        odd[name] = json!([[{"\u{0}": 1}]]);
        let reply = server.post(path, &odd);
        let text = reply.text();
        assert!(!text.contains("leave it out"), "{path} {name}: {text}");
        let refused = !schema.as_object().unwrap().is_empty();
        assert_eq!(reply.status, if refused { 400 } else { 200 }, "{path} {name}: {text}");
        assert!(!refused || text.contains(name.as_str()), "{path} {name}: {text}");
    }
    let mut more = good.clone();
    more["no_such_thing"] = 1.into();
    let reply = server.post(path, &more);
    assert!(reply.status == 400 && reply.text().contains("no_such_thing"), "{path}: {}", reply.text());
}

#[test]
fn every_parameter_that_is_described_is_known_and_no_other() {
    let jobs = tempfile::tempdir().unwrap();
    let server = batches::server(jobs.path(), &["--max-tokens", "2"]);
    let document = document(&server);
    let file = upload(&server, b"{}\n")["id"].clone();
    let mut seen = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        let post =
            methods.get("post").filter(|post| !post["requestBody"]["content"]["application/json"].is_null());
        for (all, required) in post.map(|post| forms(&document, post)).unwrap_or_default() {
            seen += all.len();
            check(&server, &file, path, all, &required);
        }
    }
    assert!(seen > 100, "{seen}");
}

#[test]
fn it_is_open_and_everything_that_is_not_says_so() {
    let server = Server::with(&["--api-key", "k"]);
    let document = document(&server);
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            // Which goes on for ever.
            if path == "/dashboard/events" && operation["security"] == json!([]) {
                continue;
            }
            let path = path.replace("{id}", MODEL);
            let reply = server.send(&method.to_ascii_uppercase(), &path, &[], None);
            let open = operation["security"] == json!([]);
            assert_eq!(reply.status == 401, !open, "{method} {path}: {}", reply.status);
            let status = reply.status.to_string();
            assert!(operation["responses"].get(&status).is_some(), "{method} {path} answers {status}");
        }
    }
}
