//! `GET /openapi.json`: every route, parameter, answer and error, as OpenAPI 3.1 has it.
//!
//! The document is built from the limits that readers of requests use, so that it says what they do. Tests hold it against
//! the routes and the fields that exist. It needs no key: it says what a server of this version understands.

mod answers;
mod batches;
mod parts;
mod requests;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::stream;

use parts::{JSON, reference};

const ABOUT: &str = "The engine behind HTTP, in the interfaces of OpenAI, Anthropic and Ollama. What is not described here is \
    refused by its name; `null` counts as absent. docs/api.md says what every parameter does.";

/// Errors that every request may meet, whatever it asks for.
const ALWAYS: [(&str, &str); 7] = [
    ("400", "The request cannot be understood: a head that is none"),
    ("401", "No key, or a wrong one"),
    ("403", "A web page that is not listed, or a host name that is not this machine's"),
    ("404", "No such route or model"),
    ("408", "The request did not arrive in time"),
    ("431", "The head of the request is too large"),
    ("503", "The server ends, or the engine failed"),
];
/// What a body may add.
const OF_BODIES: [(&str, &str); 5] = [
    ("400", "A parameter is wrong, the body is no JSON object, or the prompt is too long"),
    ("411", "A body without a length"),
    ("413", "The body is too large"),
    ("415", "The body is not JSON, or encoded"),
    ("429", "Other bodies fill the room that there is for them; Retry-After says when to come back"),
];
/// What an answer of the model may add.
const OF_ANSWERS: [(&str, &str); 2] = [
    ("429", "The queue is full, or the room for bodies; Retry-After says when to come back"),
    ("500", "The answer could not be computed"),
];

/// The document.
pub async fn describe(State(app): State<Arc<App>>) -> Response {
    stream::json(&document(&app.served_names()), Vec::new())
}

/// The document of a server that serves models of these names.
pub fn document(models: &[String]) -> Value {
    let mut schemas = requests::schemas(models);
    schemas.extend(answers::schemas());
    schemas.extend(batches::schemas());
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Forebay",
            "version": env!("CARGO_PKG_VERSION"),
            "description": ABOUT,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{}, {"bearer": []}, {"header": []}],
        "tags": [
            {"name": "OpenAI"}, {"name": "Anthropic"}, {"name": "Ollama"}, {"name": "Tokens"}, {"name": "Operation"},
            {"name": "Dashboard"},
        ],
        "paths": paths(),
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "headers": answers::headers(),
            "schemas": schemas,
        },
    })
}

/// Whose shapes a route has.
#[derive(Clone, Copy)]
enum Of {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Of {
    fn error(self) -> &'static str {
        match self {
            Self::OpenAi => "Error",
            Self::Anthropic => "AnthropicError",
            Self::Ollama => "OllamaError",
        }
    }
}

fn paths() -> Value {
    let mut paths = Map::new();
    let mut add = |path: &str, method: &str, operation: Value| {
        let methods = paths.entry(path).or_insert_with(|| json!({}));
        methods[method] = operation;
    };
    generations(&mut add);
    bodies(&mut add);
    lookups(&mut add);
    batches::paths(&mut add);
    Value::Object(paths)
}

/// What the model answers to.
fn generations(add: &mut impl FnMut(&str, &str, Value)) {
    let events = Some("text/event-stream");
    for (path, of, tag, summary, request, answer, streams) in [
        (
            "/v1/chat/completions",
            Of::OpenAi,
            "OpenAI",
            "Answer a conversation",
            "ChatRequest",
            "ChatCompletion",
            events,
        ),
        (
            "/v1/completions",
            Of::OpenAi,
            "OpenAI",
            "Continue a text",
            "CompletionRequest",
            "Completion",
            events,
        ),
        (
            "/v1/responses",
            Of::OpenAi,
            "OpenAI",
            "Answer a conversation; nothing is stored",
            "ResponseRequest",
            "Response",
            events,
        ),
        (
            "/v1/messages",
            Of::Anthropic,
            "Anthropic",
            "Answer a conversation",
            "MessageRequest",
            "Message",
            events,
        ),
        (
            "/api/chat",
            Of::Ollama,
            "Ollama",
            "Answer a conversation",
            "OllamaChatRequest",
            "OllamaChat",
            Some("application/x-ndjson"),
        ),
        (
            "/api/generate",
            Of::Ollama,
            "Ollama",
            "Answer a prompt",
            "OllamaGenerateRequest",
            "OllamaGeneration",
            Some("application/x-ndjson"),
        ),
    ] {
        let mut content = json!({JSON: {"schema": reference(answer)}});
        if let Some(kind) = streams {
            // What is in it comes piece by piece; no schema describes that.
            content[kind] = json!({});
        }
        let ok = json!({"description": "The answer", "headers": answers::forecast(), "content": content});
        let errors = ALWAYS.iter().chain(&OF_BODIES).chain(&OF_ANSWERS);
        add(path, "post", operation(path, tag, summary, Some(request), ok, errors, of));
    }
}

/// What takes a body and asks nothing of the model.
fn bodies(add: &mut impl FnMut(&str, &str, Value)) {
    for (path, of, tag, summary, request, answer) in [
        (
            "/v1/messages/count_tokens",
            Of::Anthropic,
            "Anthropic",
            "Count the tokens of a conversation",
            "CountRequest",
            "Count",
        ),
        (
            "/tokenize",
            Of::OpenAi,
            "Tokens",
            "The tokens of a text or a conversation",
            "TokenizeRequest",
            "Tokens",
        ),
        ("/detokenize", Of::OpenAi, "Tokens", "The text of tokens", "DetokenizeRequest", "Text"),
        ("/api/show", Of::Ollama, "Ollama", "What is known of a model", "OllamaShowRequest", "OllamaShow"),
    ] {
        let ok = parts::json_answer("As asked", reference(answer));
        let errors = ALWAYS.iter().chain(&OF_BODIES).chain(&OF_ANSWERS[1..]);
        add(path, "post", operation(path, tag, summary, Some(request), ok, errors, of));
    }
}

/// What is only looked at.
fn lookups(add: &mut impl FnMut(&str, &str, Value)) {
    let text =
        |kind: &str| json!({"description": "As asked", "content": {kind: {"schema": {"type": "string"}}}});
    let mut root = parts::json_answer("What runs here", reference("About"));
    root["content"]["text/html"] = json!({"schema": {"type": "string"}});
    for (path, of, tag, summary, ok) in [
        ("/", Of::OpenAi, "Operation", "What runs here; a page for browsers", root),
        (
            "/openapi.json",
            Of::OpenAi,
            "Operation",
            "This document",
            parts::json_answer("The document", json!({"type": "object"})),
        ),
        (
            "/health",
            Of::OpenAi,
            "Operation",
            "Whether requests are taken, and how many wait",
            parts::json_answer("They are", reference("Health")),
        ),
        (
            "/health/ready",
            Of::OpenAi,
            "Operation",
            "The same",
            parts::json_answer("They are", reference("Health")),
        ),
        (
            "/health/live",
            Of::OpenAi,
            "Operation",
            "Whether a restart would help",
            parts::json_answer("It would not", reference("Life")),
        ),
        ("/metrics", Of::OpenAi, "Operation", "What was counted, for Prometheus", text("text/plain")),
        (
            "/v1/models",
            Of::OpenAi,
            "OpenAI",
            "All models",
            parts::json_answer("The models", reference("Models")),
        ),
        (
            "/v1/models/{id}",
            Of::OpenAi,
            "OpenAI",
            "One model",
            parts::json_answer("The model", reference("Model")),
        ),
        (
            "/api/tags",
            Of::Ollama,
            "Ollama",
            "All models",
            parts::json_answer("The models", reference("OllamaModels")),
        ),
        (
            "/api/ps",
            Of::Ollama,
            "Ollama",
            "The models that are loaded",
            parts::json_answer("The models", reference("OllamaModels")),
        ),
        (
            "/api/version",
            Of::Ollama,
            "Ollama",
            "The version",
            parts::json_answer("The version", reference("OllamaVersion")),
        ),
        ("/dashboard", Of::OpenAi, "Dashboard", "The page for people", text("text/html")),
        ("/dashboard/app.js", Of::OpenAi, "Dashboard", "Its script", text("text/javascript")),
        ("/dashboard/app.css", Of::OpenAi, "Dashboard", "Its style", text("text/css")),
        ("/dashboard/icon.svg", Of::OpenAi, "Dashboard", "Its icon", text("image/svg+xml")),
        (
            "/dashboard/state",
            Of::OpenAi,
            "Dashboard",
            "What it shows",
            parts::json_answer(
                "Measured, counted or planned; null where nobody knows",
                json!({"type": "object"}),
            ),
        ),
        (
            "/dashboard/events",
            Of::OpenAi,
            "Dashboard",
            "The same, as it changes, without an end",
            json!({"description": "As they come", "content": {"text/event-stream": {}}}),
        ),
    ] {
        let mut found = operation(path, tag, summary, None, ok, ALWAYS.iter(), of);
        if path.starts_with("/health") {
            let what = reference(if path.ends_with("live") { "Life" } else { "Health" });
            found["responses"]["503"] =
                parts::json_answer("Not now, or never again: the body says why", what);
        }
        if path.contains("{id}") {
            found["parameters"] = json!([parts::path_parameter("id", "The name of a model")]);
        }
        let open = path == "/" || path == "/openapi.json" || path.starts_with("/health");
        if open || crate::dashboard::is_open(path) {
            found["security"] = json!([]);
        }
        add(path, "get", found);
    }
}

/// One operation; later errors of a status replace earlier ones.
fn operation<'e>(
    path: &str,
    tag: &str,
    summary: &str,
    request: Option<&str>,
    ok: Value,
    errors: impl Iterator<Item = &'e (&'e str, &'e str)>,
    of: Of,
) -> Value {
    let mut responses = json!({"200": ok});
    for (status, what) in errors {
        // Heads that cannot be read are answered without a body.
        responses[*status] = parts::json_answer(what, reference(of.error()));
    }
    if let Some(retry) = responses.get_mut("429") {
        let seconds = json!({"description": "Seconds", "schema": {"type": "integer", "minimum": 1}});
        retry["headers"] = json!({"retry-after": seconds});
    }
    let name: String =
        path.split(['/', '_', '.', '{', '}']).filter(|part| !part.is_empty()).collect::<Vec<_>>().join("_");
    let name = if name.is_empty() { "root".to_owned() } else { name };
    let mut operation =
        json!({"operationId": name, "tags": [tag], "summary": summary, "responses": responses});
    if let Some(request) = request {
        operation["requestBody"] =
            json!({"required": true, "content": {JSON: {"schema": reference(request)}}});
    }
    operation
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SOURCES: [&str; 2] = [include_str!("lib.rs"), include_str!("dashboard.rs")];
    const READERS: [&str; 9] = [
        include_str!("params.rs"),
        include_str!("tools.rs"),
        include_str!("ollama.rs"),
        include_str!("anthropic/read.rs"),
        include_str!("openai/batches.rs"),
        include_str!("openai/chat.rs"),
        include_str!("openai/completions.rs"),
        include_str!("openai/responses/read.rs"),
        include_str!("openai/tokens.rs"),
    ];

    /// The text in the first quotes of each piece that follows one of `marks`.
    fn quoted(source: &str, marks: &[String]) -> BTreeSet<String> {
        let code = source.split("#[cfg(test)]").next().unwrap();
        let behind = |mark: &String| -> Vec<String> {
            let pieces = code.split(mark.as_str()).skip(1);
            let inside = pieces.filter_map(|piece| piece.trim_start().strip_prefix('"')?.split('"').next());
            inside.map(str::to_owned).collect()
        };
        marks.iter().flat_map(behind).collect()
    }

    /// All routes, a part of a path that may have parts itself written as any other.
    fn routes() -> BTreeSet<String> {
        let found = SOURCES.iter().flat_map(|source| quoted(source, &[".route(".to_owned()]));
        found.map(|route| route.replace("{*", "{")).collect()
    }

    #[test]
    fn every_route_and_every_field_of_a_request_is_in_the_manual() {
        let manual = include_str!("../../../docs/api.md");
        let quotes: BTreeSet<&str> = manual.split('`').skip(1).step_by(2).collect();
        // With the method in front, or without it.
        let named: BTreeSet<&str> = quotes.iter().filter_map(|quote| quote.split(' ').next_back()).collect();
        let missing: Vec<_> = routes().into_iter().filter(|route| !named.contains(route.as_str())).collect();
        assert!(missing.is_empty(), "docs/api.md lacks {missing:?}");
        let schemas = requests::schemas(&[]);
        let mut fields = BTreeSet::new();
        for (_, schema) in schemas.iter().filter(|(name, _)| name.ends_with("Request")) {
            let forms =
                schema["anyOf"].as_array().map_or_else(|| vec![schema], |forms| forms.iter().collect());
            for form in forms {
                fields.extend(form["properties"].as_object().unwrap().keys().cloned());
            }
        }
        let words: BTreeSet<&str> =
            quotes.iter().flat_map(|quote| quote.split(['.', '[', ' ', '='])).collect();
        let missing: Vec<_> = fields.iter().filter(|field| !words.contains(field.as_str())).collect();
        assert!(fields.len() > 60 && missing.is_empty(), "docs/api.md lacks {missing:?}");
    }

    #[test]
    fn every_route_is_described_and_nothing_else() {
        let known = routes();
        let document = document(&["m".to_owned()]);
        let described: BTreeSet<String> = document["paths"].as_object().unwrap().keys().cloned().collect();
        assert!(known.len() > 20, "{known:?}");
        assert_eq!(known, described);
        let all = document["paths"].as_object().unwrap().values().filter_map(Value::as_object).flatten();
        for (_, operation) in all.filter(|(_, found)| !found["requestBody"]["content"][JSON].is_null()) {
            let after = &operation["responses"]["429"]["headers"]["retry-after"];
            assert!(after.is_object(), "{}: any body may find no room", operation["operationId"]);
        }
    }

    /// The names of all fields of requests.
    fn names(schema: &Value, found: &mut BTreeSet<String>) {
        if let Some(fields) = schema["properties"].as_object() {
            found.extend(fields.keys().cloned());
        }
        match schema {
            Value::Object(all) => all.values().for_each(|value| names(value, found)),
            Value::Array(all) => all.iter().for_each(|value| names(value, found)),
            _ => {}
        }
    }

    #[test]
    fn every_field_that_is_read_is_described() {
        let methods = [
            "string",
            "required_string",
            "value",
            "required",
            "bool",
            "integer",
            "count",
            "number",
            "list",
            "object",
            "strings",
            "one_of",
            "only",
        ];
        let marks = methods.map(|method| format!(".{method}("));
        let read: BTreeSet<String> = READERS.iter().flat_map(|source| quoted(source, &marks)).collect();
        let mut described = BTreeSet::new();
        requests::schemas(&[]).values().for_each(|schema| names(schema, &mut described));
        batches::schemas().values().for_each(|schema| names(schema, &mut described));
        let missing: Vec<_> = read.difference(&described).collect();
        assert!(read.len() > 60 && missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn references_lead_somewhere() {
        let document = document(&["m".to_owned()]);
        let text = document.to_string();
        for reference in quoted(&text, &["\"$ref\":".to_owned()]) {
            let place = reference.strip_prefix('#').unwrap();
            assert!(document.pointer(place).is_some(), "{reference}");
        }
        assert_eq!(document.pointer("/components/schemas/ModelName/enum/1").unwrap(), "m:latest");
    }
}
