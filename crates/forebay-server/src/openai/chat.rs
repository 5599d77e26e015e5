//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use forebay_text::ChatMessage;
use serde_json::{Map, Value, json};

use super::once::Once;
use super::{call, finish_reason, logprobs, usage};
use crate::app::App;
use crate::ask::{Ask, Input};
use crate::body::JsonBody;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::ids;
use crate::params;
use crate::pipe::Part;
use crate::run::{self, Ended, Piece, Reason, Whole};
use crate::stream::{self, Kind, Out, Wire};
use crate::tools::{self, Tools};

/// A request, and how its answer is wanted.
pub struct Request {
    /// What is asked.
    pub ask: Ask,
    streams: bool,
    usage: bool,
    progress: bool,
    logprobs: bool,
}

impl Request {
    /// Reads the body of a request.
    pub fn read(body: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let given =
            fields.list("messages")?.ok_or_else(|| ApiError::param("messages", "messages is missing"))?;
        let mut ask = Ask::new(Input::Chat(messages(given)?), app);
        params::sampling(&mut fields, &mut ask)?;
        params::stop(&mut fields, "stop", &mut ask)?;
        params::choices(&mut fields, &mut ask)?;
        params::thinking(&mut fields, &mut ask)?;
        ask.format = params::response_format(&mut fields)?;
        let most = [fields.count("max_completion_tokens", 1)?, fields.count("max_tokens", 1)?];
        ask.max_tokens = most.into_iter().flatten().next().or(ask.max_tokens);
        let top = fields.integer("top_logprobs", 0..=i64::MAX)?;
        let logprobs = fields.bool("logprobs")?.unwrap_or(false);
        if let Some(top) = top.filter(|_| !logprobs) {
            let message = format!("top_logprobs = {top} needs logprobs = true");
            return Err(ApiError::param("top_logprobs", message));
        }
        if logprobs {
            ask.sampling.logprobs = Some(params::check_logprobs("top_logprobs", top.unwrap_or(0))?);
        }
        let all = tools::openai_tools(fields.list("tools")?)?;
        let choice = tools::openai_choice(fields.value("tool_choice"))?;
        ask.tools =
            Tools::new(all, choice, fields.bool("parallel_tool_calls")?.unwrap_or(true), &tools::OPENAI)?;
        let streams = fields.bool("stream")?.unwrap_or(false);
        let mut options =
            Fields::within("stream_options", fields.object("stream_options")?.unwrap_or_default());
        let usage = options.bool("include_usage")?.unwrap_or(false);
        let progress = options.bool("include_progress")?.unwrap_or(false);
        options.finish()?;
        labels(&mut fields)?;
        fields.finish()?;
        Ok(Self { ask, streams, usage, progress, logprobs })
    }
}

/// Fields that name a request, or ask for what is the case anyway.
pub fn labels(fields: &mut Fields) -> Result<(), ApiError> {
    for name in ["user", "safety_identifier", "prompt_cache_key"] {
        fields.string(name)?;
    }
    fields.object("metadata")?;
    fields.only("store", &[json!(false)], "nothing is stored")?;
    fields.only("service_tier", &[json!("auto"), json!("default")], "there is one tier")?;
    fields.only("modalities", &[json!(["text"])], "answers are text")
}

/// The messages of a conversation.
pub fn messages(values: Vec<Value>) -> Result<Vec<ChatMessage>, ApiError> {
    let message = |(at, value): (usize, Value)| {
        check_fields(at, &value)?;
        ChatMessage::from_json(&value)
            .map_err(|error| ApiError::param(format!("messages[{at}]"), format!("messages[{at}]: {error}")))
    };
    values.into_iter().enumerate().map(message).collect()
}

/// An error if a message has fields that would be ignored.
fn check_fields(at: usize, message: &Value) -> Result<(), ApiError> {
    let known = |name: &str| {
        let names = ["role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name"];
        // What answers have, and clients send back.
        names.contains(&name) || ["refusal", "annotations", "audio", "function_call"].contains(&name)
    };
    let fields = message.as_object().into_iter().flatten();
    match fields.filter(|(_, value)| !value.is_null()).find(|(name, value)| {
        let empty = value.as_array().is_some_and(Vec::is_empty);
        !known(name)
            || (matches!(name.as_str(), "refusal" | "annotations" | "audio" | "function_call") && !empty)
    }) {
        None => {}
        Some((name, _)) => return Err(unsupported(&format!("messages[{at}]"), name)),
    }
    let list = |name: &str| message[name].as_array().into_iter().flatten().enumerate();
    for (number, part) in list("content") {
        let place = format!("messages[{at}].content[{number}]");
        only_fields(&place, part, &["type", "text", "cache_control"])?;
        let control = part.get("cache_control").map(|control| ("cache_control".to_owned(), control.clone()));
        params::cache_control(&mut Fields::within(place, control.into_iter().collect()))?;
    }
    for (number, call) in list("tool_calls") {
        let place = format!("messages[{at}].tool_calls[{number}]");
        // `index` is what streams number them by.
        only_fields(&place, call, &["id", "type", "function", "name", "arguments", "index"])?;
        if let Some(function) = call.get("function") {
            only_fields(&format!("{place}.function"), function, &["name", "arguments", "index"])?;
        }
        for (name, good) in [("id", call["id"].is_string()), ("type", call["type"] == "function")] {
            if !good && !call[name].is_null() {
                let expected = if name == "id" { "a string" } else { "function" };
                return Err(wrong(&format!("{place}.{name}"), expected, &call[name]));
            }
        }
    }
    Ok(())
}

/// An error if an object has fields that would be ignored.
fn only_fields(place: &str, object: &Value, known: &[&str]) -> Result<(), ApiError> {
    let mut fields = object.as_object().into_iter().flatten().filter(|(_, value)| !value.is_null());
    match fields.find(|(name, _)| !known.contains(&name.as_str())) {
        None => Ok(()),
        Some((name, _)) => Err(unsupported(place, name)),
    }
}

fn unsupported(place: &str, name: &str) -> ApiError {
    let name: String = name.chars().take(80).collect();
    let place = format!("{place}.{name}");
    let message = format!("{place} is not supported; leave it out");
    ApiError::param(place, message).code("unsupported_parameter")
}

/// Answers a conversation.
pub async fn answer(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, mut request, share) = body.read(&app, Request::read).await?;
    request.ask.share = share;
    if !request.streams {
        let Once { value, headers } = once(&app, request).await?;
        return Ok(stream::json(&value, headers));
    }
    let running = run::start(&app, request.ask, true).await?;
    let wire = ChatWire {
        head: Head::new(&app, "chat.completion.chunk"),
        app: Arc::clone(&app),
        usage: request.usage,
        progress: request.progress,
        logprobs: request.logprobs,
        prompt_tokens: running.prompt_tokens,
        choices: vec![Choice::default(); running.choices],
    };
    Ok(stream::response(&app, running, wire, Kind::Events))
}

/// Answers a conversation in one piece.
pub async fn once(app: &Arc<App>, request: Request) -> Result<Once, ApiError> {
    let running = run::start(app, request.ask, false).await?;
    let headers = stream::forecast_headers(&running);
    let prompt_tokens = running.prompt_tokens;
    let answers = running.collect().await?;
    Ok(Once { value: whole(app, prompt_tokens, &answers, request.logprobs), headers })
}

/// The response to a conversation in one piece.
pub fn whole(app: &App, prompt_tokens: usize, answers: &[Whole], with_logprobs: bool) -> Value {
    let choice = |(index, answer): (usize, &Whole)| {
        let content = answer.content();
        let calls: Vec<Value> = answer.calls().map(call).collect();
        let content = if content.is_empty() && !calls.is_empty() { Value::Null } else { content.into() };
        let mut message = json!({"role": "assistant", "content": content});
        if !answer.reasoning.is_empty() {
            message["reasoning_content"] = answer.reasoning.as_str().into();
        }
        if !calls.is_empty() {
            message["tool_calls"] = calls.into();
        }
        message["refusal"] = Value::Null;
        let tokens =
            with_logprobs.then(|| json!({"content": logprobs(&answer.tokens, app), "refusal": null}));
        json!({
            "index": index,
            "message": message,
            "logprobs": tokens,
            "finish_reason": finish_reason(answer.reason()),
        })
    };
    let choices: Vec<Value> = answers.iter().enumerate().map(choice).collect();
    let ends = answers.iter().filter_map(|answer| answer.end.as_ref());
    Head::new(app, "chat.completion").object(json!({
        "choices": choices,
        "usage": usage(prompt_tokens, ends),
    }))
}

/// What every object of one response begins with.
pub struct Head {
    id: String,
    object: &'static str,
    created: u64,
    model: String,
}

impl Head {
    /// The head of a new response.
    pub fn new(app: &App, object: &'static str) -> Self {
        let kind = if object == "text_completion" { "cmpl" } else { "chatcmpl" };
        let id = format!("{kind}-{}", ids::random());
        Self { id, object, created: ids::now(), model: app.model.id.clone() }
    }

    /// An object of the response.
    pub fn object(&self, rest: Value) -> Value {
        let mut object = json!({
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
        });
        if let (Value::Object(object), Value::Object(rest)) = (&mut object, rest) {
            object.extend(rest);
        }
        object
    }
}

/// What was sent of a choice.
#[derive(Clone, Default)]
struct Choice {
    calls: usize,
    end: Option<Ended>,
}

/// The stream of chunks.
struct ChatWire {
    app: Arc<App>,
    head: Head,
    usage: bool,
    progress: bool,
    logprobs: bool,
    prompt_tokens: usize,
    choices: Vec<Choice>,
}

impl ChatWire {
    fn chunk(&self, index: usize, delta: Value, tokens: Option<Value>, finish: Option<Reason>) -> Value {
        let mut rest = json!({"choices": [{
            "index": index,
            "delta": delta,
            "logprobs": tokens,
            "finish_reason": finish.map(finish_reason),
        }]});
        if self.usage {
            rest["usage"] = Value::Null;
        }
        self.head.object(rest)
    }
}

impl Wire for ChatWire {
    fn begin(&mut self, out: &mut Out) {
        for index in 0..self.choices.len() {
            out.data(&self.chunk(index, json!({"role": "assistant", "content": ""}), None, None));
        }
    }

    fn piece(&mut self, index: usize, piece: Piece, out: &mut Out) {
        match piece {
            Piece::Delta(delta) => {
                let mut tokens = (self.logprobs && !delta.tokens.is_empty())
                    .then(|| json!({"content": logprobs(&delta.tokens, &self.app), "refusal": null}));
                if !delta.reasoning.is_empty() {
                    out.data(&self.chunk(index, json!({"reasoning_content": delta.reasoning}), None, None));
                }
                for part in delta.parts {
                    let delta = match part {
                        Part::Text(text) => json!({"content": text}),
                        Part::Call(found) => {
                            let mut shown = call(&found);
                            shown["index"] = self.choices[index].calls.into();
                            self.choices[index].calls += 1;
                            json!({"tool_calls": [shown]})
                        }
                    };
                    out.data(&self.chunk(index, delta, tokens.take(), None));
                }
                // A token whose text is held back.
                if tokens.is_some() {
                    out.data(&self.chunk(index, json!({"content": ""}), tokens, None));
                }
            }
            Piece::End(end) => {
                out.data(&self.chunk(index, json!({}), None, Some(end.reason)));
                self.choices[index].end = Some(end);
            }
            piece if self.progress => progress(index, &piece, out),
            _ => {}
        }
    }

    fn end(&mut self, out: &mut Out) {
        if self.usage {
            let ends = self.choices.iter().filter_map(|choice| choice.end.as_ref());
            let usage = usage(self.prompt_tokens, ends);
            out.data(&self.head.object(json!({"choices": [], "usage": usage})));
        }
        out.raw("data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        stream::fail_event(error, Dialect::OpenAi, out);
    }
}

/// The events of those who asked for them: what is expected, and how far the prompt is.
pub fn progress(index: usize, piece: &Piece, out: &mut Out) {
    let millis = |time: &Option<std::time::Duration>| time.map(|time| time.as_millis() as u64);
    match piece {
        Piece::Queued { ahead, forecast } => out.event(
            "forebay.queued",
            &json!({
                "index": index,
                "ahead": ahead,
                "forecast": {
                    "wait_ms": millis(&forecast.wait),
                    "prefill_ms": millis(&forecast.prefill),
                    "first_token_ms": millis(&forecast.first_token),
                    "tokens_per_second": forecast.tokens_per_second,
                },
            }),
        ),
        Piece::Started { reused, forecast } => out.event(
            "forebay.started",
            &json!({
                "index": index,
                "cached_tokens": reused,
                "forecast": {
                    "prefill_ms": millis(&forecast.prefill),
                    "first_token_ms": millis(&forecast.first_token),
                    "tokens_per_second": forecast.tokens_per_second,
                },
            }),
        ),
        Piece::Progress { done, total, read, left } => out.event(
            "forebay.progress",
            &json!({"index": index, "done": done, "total": total, "bytes_read": read, "left_ms": millis(left)}),
        ),
        Piece::Delta(_) | Piece::End(_) | Piece::Failed(_) => {}
    }
}
