//! `POST /v1/responses`. Nothing is stored: every request brings its whole conversation.

mod read;
mod wire;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use super::arguments;
use super::once::Once;
use crate::app::App;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::ids;
use crate::pipe::{Call, Part};
use crate::run::{self, Ended, Reason};
use crate::stream::{self, Kind};

pub use read::Request;
use wire::ResponseWire;

/// Answers a conversation.
pub async fn answer(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, mut request, share) = body.read(&app, Request::read).await?;
    request.ask.share = share;
    if !request.streams {
        let Once { value, headers } = once(&app, request).await?;
        return Ok(stream::json(&value, headers));
    }
    let running = run::start(&app, request.ask, true).await?;
    let wire = ResponseWire::new(Head::new(&app, request.echo), running.prompt_tokens);
    Ok(stream::response(&app, running, wire, Kind::Events))
}

/// Answers a conversation in one piece.
pub async fn once(app: &Arc<App>, request: Request) -> Result<Once, ApiError> {
    let running = run::start(app, request.ask, false).await?;
    let head = Head::new(app, request.echo);
    let headers = stream::forecast_headers(&running);
    let prompt_tokens = running.prompt_tokens;
    let answer = running.collect().await?.into_iter().next().unwrap_or_default();
    let mut output = Vec::new();
    if !answer.reasoning.is_empty() {
        output.push(reasoning_item(&ids::random(), &answer.reasoning, "completed"));
    }
    let cut = answer.reason() == Reason::Length;
    for part in &answer.parts {
        output.push(match part {
            Part::Text(text) => message_item(&ids::random(), text, status(cut)),
            Part::Call(call) => call_item(call, &arguments(call), "completed"),
        });
    }
    Ok(Once { value: head.response(output, answer.end.as_ref(), prompt_tokens), headers })
}

/// What all objects of a response say.
struct Head {
    id: String,
    created: u64,
    model: String,
    /// What the request said, as the interface repeats it.
    echo: Value,
}

impl Head {
    /// The head of a new response.
    fn new(app: &App, echo: Value) -> Self {
        Self { id: format!("resp_{}", ids::random()), created: ids::now(), model: app.model.id.clone(), echo }
    }

    /// The response; without an end it is under way.
    fn response(&self, output: Vec<Value>, end: Option<&Ended>, prompt_tokens: usize) -> Value {
        let cut = end.is_some_and(|end| end.reason == Reason::Length);
        let mut value = json!({
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": if end.is_none() { "in_progress" } else { status(cut) },
            "model": self.model,
            "output": output,
            "error": null,
            "incomplete_details": cut.then(|| json!({"reason": "max_output_tokens"})),
            "usage": end.map(|end| usage(prompt_tokens, end)),
        });
        if let (Value::Object(value), Value::Object(echo)) = (&mut value, &self.echo) {
            value.extend(echo.clone());
        }
        value
    }
}

fn status(cut: bool) -> &'static str {
    if cut { "incomplete" } else { "completed" }
}

fn usage(prompt_tokens: usize, end: &Ended) -> Value {
    json!({
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": end.cached},
        "output_tokens": end.tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": prompt_tokens + end.tokens,
    })
}

fn text_part(text: &str) -> Value {
    json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})
}

fn message_item(id: &str, text: &str, status: &str) -> Value {
    json!({
        "id": format!("msg_{id}"),
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text)],
    })
}

fn reasoning_item(id: &str, text: &str, status: &str) -> Value {
    json!({
        "id": format!("rs_{id}"),
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "status": status,
    })
}

fn call_item(call: &Call, arguments: &str, status: &str) -> Value {
    json!({
        "id": format!("fc_{}", call.id),
        "type": "function_call",
        "call_id": format!("call_{}", call.id),
        "name": call.name,
        "arguments": arguments,
        "status": status,
    })
}
