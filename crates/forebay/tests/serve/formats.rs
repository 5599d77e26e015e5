//! What an answer has to be.

use serde_json::{Value, json};

use crate::client::{Server, chat, with};

fn content(server: &Server, question: &str, more: Value) -> Value {
    let body = with(with(chat(question), json!({"max_tokens": 300})), more);
    let reply = server.post("/v1/chat/completions", &body).ok();
    assert_eq!(reply["choices"][0]["finish_reason"], "stop", "{reply}");
    serde_json::from_str(reply["choices"][0]["message"]["content"].as_str().unwrap()).expect("JSON")
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": false,
    })
}

#[test]
fn schemas_are_obeyed() {
    let server = Server::start();
    let schema = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": person()}});
    let question = "Give me a JSON object with name Anna and age 7.";
    let found = content(&server, question, json!({"response_format": schema}));
    assert_eq!(found, json!({"name": "Anna", "age": 7}));
    // Also where the model has something else in mind, and with thoughts in front.
    for more in [json!({}), json!({"enable_thinking": true})] {
        let more = with(more, json!({"response_format": schema, "temperature": 1.5, "seed": 3}));
        let found = content(&server, "What is 2+2?", more);
        assert!(found["name"].is_string() && found["age"].is_i64(), "{found}");
    }
    let object = content(&server, question, json!({"response_format": {"type": "json_object"}}));
    assert!(object.is_object());
}

#[test]
fn schemas_that_cannot_be_obeyed_are_refused() {
    let server = Server::start();
    let refused = |format: Value, param: &str| {
        let body = with(chat("Hi"), json!({"response_format": format}));
        server.post("/v1/chat/completions", &body).refused(400, param)
    };
    let error = refused(
        json!({"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objec"}}}),
        "response_format",
    );
    assert_eq!(error["code"], "invalid_schema");
    refused(json!({"type": "xml"}), "response_format.type");
    refused(json!({"type": "json_schema"}), "response_format.json_schema");
    refused(json!({"type": "json_object", "extra": 1}), "response_format.extra");
    refused(json!("json_object"), "response_format");
}
