//! The interface of Ollama: `/api/chat`, `/api/generate`, `/api/tags`, `/api/ps`, `/api/version` and `/api/show`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::response::Response;
use forebay_text::ChatMessage;
use forebay_text::template::{ReasoningEffort, Role, ToolChoice};
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::ask::{Ask, Input};
use crate::body::{JsonBody, Share};
use crate::error::{ApiError, Dialect};
use crate::fields::{Fields, wrong};
use crate::fleet::Standing;
use crate::grammars::Format;
use crate::ids;
use crate::openai::chat;
use crate::params;
use crate::pipe::{Call, Part};
use crate::run::{self, Ended, Piece, Reason};
use crate::stream::{self, Kind, Out, Wire};
use crate::tools::{self, Tools};

/// Which of the two an answer is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    Chat,
    Generate,
}

/// Answers a conversation.
pub async fn chat(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, request, share) = body.read(&app, Request::chat).await?;
    answer(&app, request, share, Of::Chat).await
}

/// Answers a prompt.
pub async fn generate(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let (app, request, share) = body.read(&app, Request::generate).await?;
    answer(&app, request, share, Of::Generate).await
}

/// A request, and how its answer is wanted.
struct Request {
    ask: Ask,
    streams: bool,
    /// Whether only the model is wanted.
    loads: bool,
}

impl Request {
    fn chat(body: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let given = fields.list("messages")?.unwrap_or_default();
        let loads = given.is_empty();
        let messages = given.into_iter().enumerate().map(message).collect::<Result<Vec<_>, _>>()?;
        let mut ask = Ask::new(Input::Chat(messages), app);
        let all = tools::openai_tools(fields.list("tools")?)?;
        ask.tools = Tools::new(all, ToolChoice::Auto, true, &tools::OPENAI)?;
        let streams = common(&mut fields, &mut ask, app)?;
        fields.finish()?;
        Ok(Self { ask, streams, loads })
    }

    fn generate(body: Map<String, Value>, app: &App) -> Result<Self, ApiError> {
        let mut fields = Fields::new(body);
        params::check_model(&mut fields, app)?;
        let prompt = fields.string("prompt")?.unwrap_or_default();
        let system = fields.string("system")?.filter(|system| !system.is_empty());
        let raw = fields.bool("raw")?.unwrap_or(false);
        let input = match (raw, system) {
            (true, None) => Input::Text(prompt.clone()),
            (true, Some(_)) => {
                return Err(ApiError::param(
                    "system",
                    "system needs the template, which raw = true leaves out",
                ));
            }
            (false, system) => {
                let system = system.map(|text| ChatMessage::text(Role::System, text));
                Input::Chat(
                    system.into_iter().chain([ChatMessage::text(Role::User, prompt.clone())]).collect(),
                )
            }
        };
        let mut ask = Ask::new(input, app);
        let streams = common(&mut fields, &mut ask, app)?;
        fields.only("suffix", &[json!("")], "text is only continued at its end")?;
        fields.only("template", &[json!("")], "the model's own template is used")?;
        fields.only("images", &[json!([])], "the model reads text")?;
        fields.only("context", &[json!([])], "send the conversation to /api/chat")?;
        fields.finish()?;
        Ok(Self { ask, streams, loads: prompt.is_empty() })
    }
}

async fn answer(app: &Arc<App>, request: Request, share: Share, of: Of) -> Result<Response, ApiError> {
    let Request { ask, streams, loads } = request;
    if loads {
        return loaded(app, of).await;
    }
    let began = Instant::now();
    let ask = Ask { share, ..ask };
    let running = run::start(app, ask, streams).await?;
    let mut wire = Lines {
        model: app.model.id.clone(),
        of,
        prompt_tokens: running.prompt_tokens,
        began,
        calls: 0,
        end: None,
    };
    if streams {
        return Ok(stream::response(app, running, wire, Kind::Lines));
    }
    let headers = stream::forecast_headers(&running);
    let whole = running.collect().await?.into_iter().next().unwrap_or_default();
    let calls: Vec<Value> = whole.calls().map(|call| wire.call(call)).collect();
    let mut value = wire.object(whole.content(), whole.reasoning.clone(), calls);
    wire.end = whole.end;
    wire.finish(&mut value);
    Ok(stream::json(&value, headers))
}

/// What both requests share; whether the answer is streamed.
fn common(fields: &mut Fields, ask: &mut Ask, app: &App) -> Result<bool, ApiError> {
    ask.format = match fields.value("format") {
        None => Format::Text,
        Some(Value::String(name)) if name.is_empty() => Format::Text,
        Some(Value::String(name)) if name == "json" => Format::JsonObject,
        Some(schema @ Value::Object(_)) => Format::Schema(schema),
        Some(other) => return Err(wrong("format", "json, or a JSON schema", &other)),
    };
    match fields.value("think") {
        None => {}
        Some(Value::Bool(think)) => ask.think = Some(think),
        Some(Value::String(name)) => {
            let names = [
                ("low", ReasoningEffort::Low),
                ("medium", ReasoningEffort::Medium),
                ("high", ReasoningEffort::High),
            ];
            let found = names.iter().find(|(known, _)| *known == name);
            let (_, effort) = found
                .ok_or_else(|| wrong("think", "true, false, low, medium or high", &name.clone().into()))?;
            ask.effort = Some(*effort);
        }
        Some(other) => return Err(wrong("think", "true, false, low, medium or high", &other)),
    }
    // How long a model stays is not up to one client.
    match fields.value("keep_alive") {
        None | Some(Value::String(_) | Value::Number(_)) => {}
        Some(other) => return Err(wrong("keep_alive", "a time, as text or in seconds", &other)),
    }
    options(Fields::within("options", fields.object("options")?.unwrap_or_default()), ask, app)?;
    Ok(fields.bool("stream")?.unwrap_or(true))
}

fn options(mut options: Fields, ask: &mut Ask, app: &App) -> Result<(), ApiError> {
    let sampling = &mut ask.sampling;
    let set = |value: Option<f32>, target: &mut f32| *target = value.unwrap_or(*target);
    set(options.number("temperature", 0.0..=2.0)?, &mut sampling.temperature);
    set(params::top_p(&mut options)?, &mut sampling.top_p);
    set(options.number("min_p", 0.0..=1.0)?, &mut sampling.min_p);
    set(options.number("repeat_penalty", 0.01..=2.0)?, &mut sampling.repetition_penalty);
    set(options.number("presence_penalty", -2.0..=2.0)?, &mut sampling.presence_penalty);
    set(options.number("frequency_penalty", -2.0..=2.0)?, &mut sampling.frequency_penalty);
    if let Some(top_k) = options.integer("top_k", 0..=i64::MAX)? {
        sampling.top_k = top_k as usize;
    }
    params::seed(&mut options, ask)?;
    params::stop(&mut options, "stop", ask)?;
    // Less than one goes on until the context is full.
    if let Some(most) = options.integer("num_predict", -2..=i64::MAX)? {
        ask.max_tokens = usize::try_from(most).ok().filter(|most| *most > 0);
    }
    if let Some(context) = options.count("num_ctx", 1)?
        && context > app.model.context
    {
        let message = format!(
            "options.num_ctx = {context} is more than the context of {} tokens that this server was started with",
            app.model.context
        );
        return Err(ApiError::param("options.num_ctx", message));
    }
    options.only("repeat_last_n", &[json!(-1)], "penalties look at everything")?;
    options.finish()
}

fn message((at, value): (usize, Value)) -> Result<ChatMessage, ApiError> {
    let place = format!("messages[{at}]");
    let Value::Object(mut fields) = value else { return Err(wrong(&place, "an object", &value)) };
    // The same under other names.
    if let Some(thought) = fields.shift_remove("thinking") {
        fields.insert("reasoning_content".to_owned(), thought);
    }
    if let Some(name) = fields.shift_remove("tool_name") {
        fields.insert("name".to_owned(), name);
    }
    if fields.get("images").is_some_and(|images| images.as_array().is_some_and(Vec::is_empty)) {
        fields.shift_remove("images");
    }
    fields.entry("content").or_insert_with(|| "".into());
    let mut found = chat::messages(vec![Value::Object(fields)]).map_err(|error| ApiError {
        message: error.message.replace("messages[0]", &place),
        param: error.param.map(|param| param.replace("messages[0]", &place)),
        ..error
    })?;
    Ok(found.swap_remove(0))
}

/// The answer to those who only want the model to be there.
async fn loaded(app: &App, of: Of) -> Result<Response, ApiError> {
    app.load().await?;
    let mut value = json!({"model": app.model.id, "created_at": now()});
    match of {
        Of::Chat => value["message"] = json!({"role": "assistant", "content": ""}),
        Of::Generate => value["response"] = "".into(),
    }
    value["done"] = true.into();
    value["done_reason"] = "load".into();
    Ok(stream::json(&value, Vec::new()))
}

/// The stream of lines.
struct Lines {
    model: String,
    of: Of,
    prompt_tokens: usize,
    began: Instant,
    calls: usize,
    end: Option<Ended>,
}

impl Lines {
    fn object(&self, content: String, reasoning: String, calls: Vec<Value>) -> Value {
        let mut value = json!({"model": self.model, "created_at": now()});
        let target = match self.of {
            Of::Chat => {
                value["message"] = json!({"role": "assistant", "content": content});
                &mut value["message"]
            }
            Of::Generate => {
                value["response"] = content.into();
                &mut value
            }
        };
        if !reasoning.is_empty() {
            target["thinking"] = reasoning.into();
        }
        if !calls.is_empty() {
            target["tool_calls"] = calls.into();
        }
        value["done"] = false.into();
        value
    }

    fn call(&mut self, call: &Call) -> Value {
        let index = self.calls;
        self.calls += 1;
        json!({
            "id": format!("call_{}", call.id),
            "function": {"index": index, "name": call.name, "arguments": call.arguments},
        })
    }

    fn finish(&self, value: &mut Value) {
        let Some(end) = &self.end else { return };
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        value["done"] = true.into();
        value["done_reason"] = if end.reason == Reason::Length { "length" } else { "stop" }.into();
        value["total_duration"] = nanos(self.began.elapsed()).into();
        value["load_duration"] = nanos(end.times.wait).into();
        value["prompt_eval_count"] = self.prompt_tokens.into();
        value["prompt_eval_duration"] = nanos(end.times.prefill).into();
        value["eval_count"] = end.tokens.into();
        value["eval_duration"] = nanos(end.times.decode).into();
    }
}

impl Wire for Lines {
    fn begin(&mut self, _: &mut Out) {}

    fn piece(&mut self, _: usize, piece: Piece, out: &mut Out) {
        match piece {
            Piece::Delta(delta) => {
                let content = delta.content();
                let calls: Vec<Value> = delta
                    .parts
                    .iter()
                    .filter_map(|part| match part {
                        Part::Call(call) => Some(self.call(call)),
                        Part::Text(_) => None,
                    })
                    .collect();
                if !content.is_empty() || !delta.reasoning.is_empty() || !calls.is_empty() {
                    out.line(&self.object(content, delta.reasoning, calls));
                }
            }
            Piece::End(end) => self.end = Some(end),
            Piece::Queued { .. } | Piece::Started { .. } | Piece::Progress { .. } | Piece::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Out) {
        let mut last = self.object(String::new(), String::new(), Vec::new());
        self.finish(&mut last);
        out.line(&last);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        stream::fail_event(error, Dialect::Ollama, out);
    }
}

/// The models.
pub async fn tags(State(app): State<Arc<App>>) -> Response {
    let models: Vec<Value> = app.all().map(|app| listed(&app)).collect();
    stream::json(&json!({"models": models}), Vec::new())
}

/// The models that are loaded: one, or none.
pub async fn running(State(app): State<Arc<App>>) -> Response {
    let models: Vec<Value> = match app.fleet.look().standing {
        Standing::Resident(place) => {
            let app = app.of(place);
            let mut model = listed(&app);
            model["context_length"] = app.model.context.into();
            vec![model]
        }
        _ => Vec::new(),
    };
    stream::json(&json!({"models": models}), Vec::new())
}

/// The version.
pub async fn version() -> Response {
    stream::json(&json!({"version": env!("CARGO_PKG_VERSION")}), Vec::new())
}

/// What is known of the model.
pub async fn show(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let read = |body: Map<String, Value>, app: &App| {
        let mut fields = Fields::new(body);
        let name = match fields.string("model")? {
            Some(name) => name,
            None => fields.required_string("name")?,
        };
        fields.bool("verbose")?;
        fields.finish()?;
        params::named_model(&name, app)
    };
    let (app, ..) = body.read(&app, read).await?;
    let family = &app.model.family;
    let mut info = Map::new();
    info.insert("general.architecture".to_owned(), family.as_str().into());
    info.insert(format!("{family}.context_length"), app.model.context.into());
    Ok(stream::json(
        &json!({
            "details": details(&app),
            "model_info": info,
            "capabilities": ["completion", "tools", "thinking"],
            "modified_at": timestamp(app.model.created),
        }),
        Vec::new(),
    ))
}

fn listed(app: &App) -> Value {
    json!({
        "name": app.model.id,
        "model": app.model.id,
        "modified_at": timestamp(app.model.created),
        "size": app.model.bytes,
        "digest": "",
        "details": details(app),
    })
}

fn details(app: &App) -> Value {
    json!({
        "parent_model": "",
        "format": "forebay",
        "family": app.model.family,
        "families": [app.model.family],
        "parameter_size": "",
        "quantization_level": "",
    })
}

fn now() -> String {
    timestamp(ids::now())
}

/// A time in the form of RFC 3339.
fn timestamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // The civil calendar, counted from the first of March of the year 0 (Howard Hinnant, "chrono-compatible low-level
    // date algorithms").
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + 400 * era + u64::from(month <= 2);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_calendar_has_them() {
        for (seconds, want) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_796_299_200, "2026-12-03T12:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(timestamp(seconds), want);
        }
    }
}
