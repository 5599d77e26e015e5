//! Files and batches: the work of the night.

use serde_json::{Map, Value, json};

use super::parts::{self, fields, list, one_of, reference, shape, text};
use super::{ALWAYS, OF_BODIES, Of};
use crate::openai::once::Endpoint;

/// A list that is sent a page at a time.
const PAGES: (&str, &str) = ("400", "A parameter is wrong, or `after` names nothing in the list");
const IN_USE: (&str, &str) = ("409", "Not as things stand: the message says why");
const DISK: (&str, &str) = ("507", "The server's disk does not take it");
const CROWDED: (&str, &str) = ("429", "Too many batches are not over");

/// Their routes.
pub fn paths(add: &mut impl FnMut(&str, &str, Value)) {
    let mut route =
        |method: &str, path: &str, summary: &str, body: Option<&str>, ok: Value, more: &[(&str, &str)]| {
            let of_body: &[_] = if body.is_some() { &OF_BODIES } else { &[] };
            let errors = ALWAYS.iter().chain(of_body).chain(more);
            let mut found = super::operation(path, "OpenAI", summary, body, ok, errors, Of::OpenAi);
            let name = format!("{method}_{}", found["operationId"].as_str().unwrap_or_default());
            found["operationId"] = name.into();
            if body == Some("FileUpload") {
                found["requestBody"]["content"] =
                    json!({"multipart/form-data": {"schema": reference("FileUpload")}});
            }
            if path.contains("{id}") {
                found["parameters"] = json!([parts::path_parameter("id", "The name that the list has")]);
            }
            if more.contains(&PAGES) {
                found["parameters"] = page(path == "/v1/files");
            }
            add(path, method, found);
        };
    let answer = |name: &str| parts::json_answer("As asked", reference(name));
    let too_large = ("413", "The file is too large, or there is no room for it");
    let what = "Take a file with requests of a batch";
    route("post", "/v1/files", what, Some("FileUpload"), answer("File"), &[too_large, DISK]);
    route("get", "/v1/files", "All files", None, answer("Files"), &[PAGES]);
    route("get", "/v1/files/{id}", "One file", None, answer("File"), &[]);
    route("delete", "/v1/files/{id}", "Delete a file", None, answer("DeletedFile"), &[IN_USE, DISK]);
    let content = json!({"description": "Its bytes", "content": {"application/jsonl": {}}});
    route(
        "get",
        "/v1/files/{id}/content",
        "What is in a file",
        None,
        content,
        &[("500", "It cannot be read")],
    );
    route(
        "post",
        "/v1/batches",
        "Answer the requests of a file",
        Some("BatchRequest"),
        answer("Batch"),
        &[CROWDED, DISK],
    );
    route("get", "/v1/batches", "All batches", None, answer("Batches"), &[PAGES]);
    route("get", "/v1/batches/{id}", "One batch", None, answer("Batch"), &[]);
    route("post", "/v1/batches/{id}/cancel", "Give a batch up", None, answer("Batch"), &[IN_USE, DISK]);
}

/// What a client may say of a list.
fn page(of_files: bool) -> Value {
    let parameter = |name: &str, what: &str, schema: Value| json!({"name": name, "in": "query", "description": what, "schema": schema});
    let most = if of_files { 10_000 } else { 100 };
    let mut all = vec![
        parameter("after", "Behind this one", text()),
        parameter("limit", "At most so many", json!({"type": "integer", "minimum": 1, "maximum": most})),
    ];
    if of_files {
        all.push(parameter("order", "By time", one_of(&["asc", "desc"])));
        all.push(parameter("purpose", "Only files for this", one_of(&["batch", "batch_output"])));
    }
    all.into()
}

/// Their schemas.
pub fn schemas() -> Map<String, Value> {
    let count = || json!({"type": "integer", "minimum": 0});
    let pages = |of: &str| {
        let id = json!({"type": ["string", "null"]});
        json!({"object": {"const": "list"}, "data": list(reference(of)), "first_id": id, "last_id": id, "has_more": parts::switch()})
    };
    let file = json!({
        "id": text(), "object": {"const": "file"}, "bytes": count(), "created_at": count(), "filename": text(),
        "purpose": one_of(&["batch", "batch_output"]), "status": {"const": "processed"},
    });
    let batch = json!({
        "id": text(), "object": {"const": "batch"}, "endpoint": text(), "input_file_id": text(), "completion_window": text(),
        "created_at": count(),
        "status": one_of(&["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled"]),
        "request_counts": shape(json!({"total": count(), "completed": count(), "failed": count()})),
    });
    let endpoints: Vec<&str> = Endpoint::ALL.iter().map(|(name, _)| *name).collect();
    let metadata = json!({
        "type": "object", "maxProperties": 16, "propertyNames": {"maxLength": 64},
        "additionalProperties": {"type": "string", "maxLength": 512},
    });
    let request = fields(
        &["endpoint", "input_file_id", "completion_window"],
        json!({
            "endpoint": one_of(&endpoints), "input_file_id": text(), "completion_window": {"const": "24h"},
            "metadata": metadata,
        }),
    );
    let upload = json!({
        "type": "object", "required": ["purpose", "file"],
        "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
    });
    let deleted = json!({"id": text(), "object": {"const": "file"}, "deleted": parts::switch()});
    [
        ("File", shape(file)),
        ("Files", shape(pages("File"))),
        ("DeletedFile", shape(deleted)),
        ("FileUpload", upload),
        ("Batch", shape(batch)),
        ("Batches", shape(pages("Batch"))),
        ("BatchRequest", request),
    ]
    .map(|(name, schema)| (name.to_owned(), schema))
    .into_iter()
    .collect()
}
