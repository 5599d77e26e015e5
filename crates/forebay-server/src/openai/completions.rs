//! `POST /v1/completions`: the continuation of a text, without a template.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value, json};

use super::chat::{Head, labels, progress};
use super::once::Once;
use super::{finish_reason, tokens, usage};
use crate::app::App;
use crate::ask::{Ask, Input};
use crate::body::JsonBody;
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::params;
use crate::pipe::TokenInfo;
use crate::run::{self, Ended, Piece, Reason};
use crate::stream::{self, Kind, Out, Wire};

/// A request, and how its answer is wanted.
pub struct Request {
    /// What is asked.
    pub ask: Ask,
    streams: bool,
    usage: bool,
    progress: bool,
}

impl Request {
    /// Reads the body of a request.
    pub fn read(body: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let mut ask = Ask::new(prompt(fields.required("prompt")?, app)?, app);
        params::sampling(&mut fields, &mut ask)?;
        params::stop(&mut fields, "stop", &mut ask)?;
        params::choices(&mut fields, &mut ask)?;
        ask.format = params::response_format(&mut fields)?;
        // 16 is what this interface has always had.
        ask.max_tokens = fields.count("max_tokens", 1)?.or(Some(16));
        if let Some(count) = fields.integer("logprobs", 0..=i64::MAX)? {
            ask.sampling.logprobs = Some(params::check_logprobs("logprobs", count)?);
        }
        fields.only("echo", &[json!(false)], "the prompt is not sent back")?;
        fields.only("best_of", &[json!(1)], "use n, and choose")?;
        fields.only("suffix", &[], "text is only continued at its end")?;
        let streams = fields.bool("stream")?.unwrap_or(false);
        let mut options =
            Fields::within("stream_options", fields.object("stream_options")?.unwrap_or_default());
        let usage = options.bool("include_usage")?.unwrap_or(false);
        let progress = options.bool("include_progress")?.unwrap_or(false);
        options.finish()?;
        labels(&mut fields)?;
        fields.finish()?;
        Ok(Self { ask, streams, usage, progress })
    }
}

/// One text, or one list of tokens; either may stand in a list by itself.
fn prompt(value: Value, app: &App) -> Result<Input, ApiError> {
    let expected = "one text, or one list of token ids";
    match value {
        Value::String(text) if text.is_empty() => {
            Err(wrong("prompt", "a text that is not empty", &text.into()))
        }
        Value::String(text) => Ok(Input::Text(text)),
        Value::Array(mut values) => match values.first() {
            Some(Value::Number(_)) => Ok(Input::Ids(tokens::ids("prompt", &Value::Array(values), app)?)),
            Some(Value::String(_) | Value::Array(_)) if values.len() == 1 => prompt(values.remove(0), app),
            Some(Value::String(_) | Value::Array(_)) => {
                let message = "several prompts in one request are not supported; send a request for each";
                Err(ApiError::param("prompt", message).code("unsupported_parameter"))
            }
            _ => Err(wrong("prompt", expected, &Value::Array(values))),
        },
        other => Err(wrong("prompt", expected, &other)),
    }
}

/// Continues a text.
pub async fn answer(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, mut request, share) = body.read(&app, Request::read).await?;
    request.ask.share = share;
    if !request.streams {
        let Once { value, headers } = once(&app, request).await?;
        return Ok(stream::json(&value, headers));
    }
    let running = run::start(&app, request.ask, true).await?;
    let wire = TextWire {
        head: Head::new(&app, "text_completion"),
        app: Arc::clone(&app),
        usage: request.usage,
        progress: request.progress,
        prompt_tokens: running.prompt_tokens,
        offsets: vec![0; running.choices],
        ends: Vec::new(),
    };
    Ok(stream::response(&app, running, wire, Kind::Events))
}

/// Continues a text in one piece.
pub async fn once(app: &Arc<App>, request: Request) -> Result<Once, ApiError> {
    let with_logprobs = request.ask.sampling.logprobs.is_some();
    let running = run::start(app, request.ask, false).await?;
    let prompt_tokens = running.prompt_tokens;
    let headers = stream::forecast_headers(&running);
    let answers = running.collect().await?;
    let choices: Vec<Value> = answers
        .iter()
        .enumerate()
        .map(|(index, answer)| {
            let shown = with_logprobs.then(|| logprobs(&answer.tokens, &mut 0, app));
            choice(index, &answer.content(), shown, Some(answer.reason()))
        })
        .collect();
    let ends = answers.iter().filter_map(|answer| answer.end.as_ref());
    let usage = usage(prompt_tokens, ends);
    let value = Head::new(app, "text_completion").object(json!({"choices": choices, "usage": usage}));
    Ok(Once { value, headers })
}

fn choice(index: usize, text: &str, logprobs: Option<Value>, finish: Option<Reason>) -> Value {
    json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish.map(finish_reason)})
}

/// The log-probabilities of some tokens, as this interface shows them. `offset` is where their text begins.
fn logprobs(tokens: &[TokenInfo], offset: &mut usize, app: &App) -> Value {
    let text = |id: u32| {
        let bytes = app.model.tokenizer.token_bytes(id).unwrap_or_default();
        String::from_utf8_lossy(bytes).into_owned()
    };
    let (mut texts, mut chosen, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for TokenInfo { token } in tokens {
        let Some(found) = &token.logprobs else { continue };
        let own = text(token.id);
        offsets.push(*offset);
        *offset += own.chars().count();
        texts.push(own);
        chosen.push(found.chosen);
        let top = found.top.iter().map(|(id, logprob)| (text(*id), json!(logprob)));
        tops.push(Value::Object(top.collect()));
    }
    json!({"tokens": texts, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
}

/// The stream of chunks.
struct TextWire {
    app: Arc<App>,
    head: Head,
    usage: bool,
    progress: bool,
    prompt_tokens: usize,
    offsets: Vec<usize>,
    ends: Vec<Ended>,
}

impl TextWire {
    fn chunk(&self, choice: Value) -> Value {
        let mut rest = json!({"choices": [choice]});
        if self.usage {
            rest["usage"] = Value::Null;
        }
        self.head.object(rest)
    }
}

impl Wire for TextWire {
    fn begin(&mut self, _: &mut Out) {}

    fn piece(&mut self, index: usize, piece: Piece, out: &mut Out) {
        match piece {
            Piece::Delta(delta) => {
                let shown = (!delta.tokens.is_empty())
                    .then(|| logprobs(&delta.tokens, &mut self.offsets[index], &self.app));
                out.data(&self.chunk(choice(index, &delta.content(), shown, None)));
            }
            Piece::End(end) => {
                out.data(&self.chunk(choice(index, "", None, Some(end.reason))));
                self.ends.push(end);
            }
            piece if self.progress => progress(index, &piece, out),
            _ => {}
        }
    }

    fn end(&mut self, out: &mut Out) {
        if self.usage {
            let usage = usage(self.prompt_tokens, self.ends.iter());
            out.data(&self.head.object(json!({"choices": [], "usage": usage})));
        }
        out.raw("data: [DONE]\n\n");
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        stream::fail_event(error, Dialect::OpenAi, out);
    }
}
