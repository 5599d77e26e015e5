//! What answers hold.

use serde_json::{Map, Value, json};

use super::parts::{any_of, list, one_of, reference, shape, switch, text};

const FORECAST: [(&str, &str); 5] = [
    ("x-forebay-prompt-tokens", "Tokens of the prompt"),
    ("x-forebay-queue-ahead", "Requests that come first"),
    ("x-forebay-forecast-wait-ms", "Expected time in the queue"),
    ("x-forebay-forecast-prefill-ms", "Expected time for the prompt"),
    ("x-forebay-forecast-tokens-per-second", "Expected speed of the answer"),
];

/// What is said about time, by the names of headers.
pub fn headers() -> Map<String, Value> {
    let number = |what: &str| json!({"description": what, "schema": {"type": "number", "minimum": 0}});
    FORECAST.iter().map(|(name, what)| ((*name).to_owned(), number(what))).collect()
}

/// The headers of every answer of the model.
pub fn forecast() -> Value {
    let header = |name: &str| json!({"$ref": format!("#/components/headers/{name}")});
    FORECAST.iter().map(|(name, _)| ((*name).to_owned(), header(name))).collect::<Map<_, _>>().into()
}

fn number() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn maybe(name: &str) -> Value {
    json!({"type": [name, "null"]})
}

/// The schemas of all answers.
pub fn schemas() -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| _ = all.insert(name.to_owned(), schema);
    errors(&mut add);
    openai(&mut add);
    others(&mut add);
    operation(&mut add);
    all
}

fn errors(add: &mut impl FnMut(&str, Value)) {
    add(
        "Error",
        shape(json!({"error": shape(json!({
            "message": text(), "type": text(), "param": maybe("string"), "code": maybe("string"),
        }))})),
    );
    add(
        "AnthropicError",
        shape(json!({
            "type": {"const": "error"}, "error": shape(json!({"type": text(), "message": text()})),
        })),
    );
    add("OllamaError", shape(json!({"error": text()})));
}

fn openai(add: &mut impl FnMut(&str, Value)) {
    let model = json!({
        "id": text(), "object": {"const": "model"}, "created": number(), "owned_by": text(), "max_model_len": number(),
    });
    add("Model", shape(model));
    add("Models", shape(json!({"object": {"const": "list"}, "data": list(reference("Model"))})));
    add(
        "Usage",
        shape(json!({
            "prompt_tokens": number(),
            "completion_tokens": number(),
            "total_tokens": number(),
            "prompt_tokens_details": shape(json!({"cached_tokens": number()})),
            "completion_tokens_details": shape(json!({"reasoning_tokens": number()})),
        })),
    );
    let finish = one_of(&["stop", "length", "tool_calls"]);
    let mut message = shape(json!({"role": {"const": "assistant"}, "content": maybe("string")}));
    message["properties"]["reasoning_content"] = text();
    message["properties"]["tool_calls"] = list(shape(json!({
        "id": text(), "type": {"const": "function"}, "function": shape(json!({"name": text(), "arguments": text()})),
    })));
    let head = |object: &str, choice: Value| {
        shape(json!({
            "id": text(), "object": {"const": object}, "created": number(), "model": text(),
            "choices": list(choice), "usage": reference("Usage"),
        }))
    };
    let choice = json!({
        "index": number(), "message": message, "logprobs": maybe("object"), "finish_reason": finish.clone(),
    });
    add("ChatCompletion", head("chat.completion", shape(choice)));
    let choice =
        json!({"index": number(), "text": text(), "logprobs": maybe("object"), "finish_reason": finish});
    add("Completion", head("text_completion", shape(choice)));
    let item = json!({"id": text(), "type": one_of(&["message", "reasoning", "function_call"])});
    add(
        "Response",
        shape(json!({
            "id": text(),
            "object": {"const": "response"},
            "created_at": number(),
            "status": one_of(&["completed", "incomplete"]),
            "model": text(),
            "output": list(shape(item)),
            "incomplete_details": maybe("object"),
            "usage": shape(json!({
                "input_tokens": number(),
                "input_tokens_details": shape(json!({"cached_tokens": number()})),
                "output_tokens": number(),
                "output_tokens_details": shape(json!({"reasoning_tokens": number()})),
                "total_tokens": number(),
            })),
        })),
    );
    add("Tokens", shape(json!({"tokens": list(number()), "count": number(), "max_model_len": number()})));
    add("Text", shape(json!({"prompt": text(), "content": text()})));
}

fn others(add: &mut impl FnMut(&str, Value)) {
    let block = shape(json!({"type": one_of(&["text", "thinking", "tool_use"])}));
    add(
        "Message",
        shape(json!({
            "id": text(),
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": text(),
            "content": list(block),
            "stop_reason": one_of(&["end_turn", "stop_sequence", "tool_use", "max_tokens"]),
            "stop_sequence": maybe("string"),
            "usage": shape(json!({
                "input_tokens": number(), "cache_creation_input_tokens": number(), "cache_read_input_tokens": number(),
                "output_tokens": number(),
            })),
        })),
    );
    add("Count", shape(json!({"input_tokens": number()})));
    let head = json!({"model": text(), "created_at": text(), "done": switch()});
    let with = |name: &str, schema: Value| {
        let mut all = shape(head.clone());
        all["properties"][name] = schema;
        all["required"].as_array_mut().into_iter().for_each(|names| names.push(name.into()));
        all
    };
    add("OllamaChat", with("message", shape(json!({"role": {"const": "assistant"}, "content": text()}))));
    add("OllamaGeneration", with("response", text()));
    let details = json!({"family": text(), "families": list(text()), "format": text()});
    let model = json!({
        "name": text(), "model": text(), "modified_at": text(), "size": number(), "details": shape(details.clone()),
    });
    add("OllamaModels", shape(json!({"models": list(shape(model))})));
    add("OllamaVersion", shape(json!({"version": text()})));
    add(
        "OllamaShow",
        shape(json!({
            "details": shape(details), "model_info": {"type": "object"}, "capabilities": list(text()), "modified_at": text(),
        })),
    );
}

fn operation(add: &mut impl FnMut(&str, Value)) {
    add(
        "About",
        shape(json!({"name": text(), "version": text(), "model": text(), "interfaces": list(text())})),
    );
    add(
        "Health",
        shape(json!({
            "status": one_of(&["ok", "draining", "failed"]),
            "reason": maybe("string"),
            "model": text(),
            "context": number(),
            "models": list(text()),
            "resident": maybe("string"),
            "state": text(),
            "running": number(),
            "waiting": number(),
            "waiting_batch": number(),
            "max_queue": number(),
        })),
    );
    add(
        "Life",
        any_of(&[
            shape(json!({"status": {"const": "ok"}})),
            shape(json!({"status": {"const": "failed"}, "reason": text()})),
        ]),
    );
}
