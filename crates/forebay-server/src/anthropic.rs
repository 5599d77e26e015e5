//! The interface of Anthropic: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod read;
mod wire;

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Value, json};

use crate::app::App;
use crate::ask::Prepared;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::ids;
use crate::openai::tokens::off_thread;
use crate::pipe::{Call, Part};
use crate::run::{self, Reason, Whole};
use crate::stream::{self, Kind};

use read::Request;
use wire::MessageWire;

/// What a think block is signed with. Nobody has to check it: thoughts that come back are shown to the model as the
/// client sends them.
const SIGNATURE: &str = "forebay";

/// Answers a conversation.
pub async fn messages(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, mut request, share) = body.read(&app, |body, app| Request::read(body, app, true)).await?;
    request.ask.share = share;
    let stop = request.ask.stop.clone();
    let running = run::start(&app, request.ask, request.streams).await?;
    if request.streams {
        let wire = MessageWire::new(&app, running.prompt_tokens, stop);
        return Ok(stream::response(&app, running, wire, Kind::Events));
    }
    let headers = stream::forecast_headers(&running);
    let prompt_tokens = running.prompt_tokens;
    let answers = running.collect().await?;
    let answer = answers.into_iter().next().unwrap_or_default();
    Ok(stream::json(&message(&app, prompt_tokens, &answer, &stop), headers))
}

/// Counts the tokens of a conversation.
pub async fn count_tokens(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, mut request, share) = body.read(&app, |body, app| Request::read(body, app, false)).await?;
    request.ask.share = share;
    let shared = Arc::clone(&app);
    let prepared = off_thread(move || Prepared::of(request.ask, &shared)).await?;
    Ok(stream::json(&json!({"input_tokens": prepared.ids.len()}), Vec::new()))
}

fn message(app: &App, prompt_tokens: usize, answer: &Whole, stop: &[String]) -> Value {
    let mut content = Vec::new();
    if !answer.reasoning.is_empty() {
        let thought = json!({"type": "thinking", "thinking": answer.reasoning, "signature": SIGNATURE});
        content.push(thought);
    }
    content.extend(answer.parts.iter().map(|part| match part {
        Part::Text(text) => json!({"type": "text", "text": text}),
        Part::Call(call) => tool_use(call, Value::Object(call.arguments.clone())),
    }));
    let (cached, tokens) = answer.end.as_ref().map_or((0, 0), |end| (end.cached, end.tokens));
    json!({
        "id": format!("msg_{}", ids::random()),
        "type": "message",
        "role": "assistant",
        "model": app.model.id,
        "content": content,
        "stop_reason": stop_reason(answer.reason()),
        "stop_sequence": stop_sequence(answer.reason(), stop),
        "usage": usage(prompt_tokens, cached, tokens),
    })
}

fn tool_use(call: &Call, input: Value) -> Value {
    json!({"type": "tool_use", "id": format!("toolu_{}", call.id), "name": call.name, "input": input})
}

fn usage(prompt_tokens: usize, cached: usize, tokens: usize) -> Value {
    json!({
        "input_tokens": prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": tokens,
    })
}

fn stop_reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop => "end_turn",
        Reason::StopString(_) => "stop_sequence",
        Reason::Calls => "tool_use",
        Reason::Length => "max_tokens",
    }
}

fn stop_sequence(reason: Reason, stop: &[String]) -> Option<&String> {
    match reason {
        Reason::StopString(place) => stop.get(place),
        _ => None,
    }
}
