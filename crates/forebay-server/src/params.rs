//! Parameters that several interfaces share.

use forebay_engine::sample::{MAX_BIAS, MAX_LOGPROBS};
use forebay_text::stop_strings::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
use forebay_text::template::ReasoningEffort;
use serde_json::{Value, json};

use crate::app::App;
use crate::ask::{Ask, MAX_CHOICES};
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::grammars::Format;

/// The names of efforts.
pub const EFFORTS: [(&str, ReasoningEffort); 6] = [
    ("none", ReasoningEffort::None),
    ("minimal", ReasoningEffort::Minimal),
    ("low", ReasoningEffort::Low),
    ("medium", ReasoningEffort::Medium),
    ("high", ReasoningEffort::High),
    ("xhigh", ReasoningEffort::Xhigh),
];

/// An error unless `model` is the one that `app` is about.
pub fn check_model(fields: &mut Fields, app: &App) -> Result<(), ApiError> {
    let model = fields.required_string("model")?;
    named_model(&model, app)
}

/// An error unless this is the model that `app` is about.
pub fn named_model(model: &str, app: &App) -> Result<(), ApiError> {
    if app.place_of(model) == Some(app.place) {
        return Ok(());
    }
    let model = model.chars().take(80).collect::<String>();
    let names: Vec<String> = app.served_names().iter().map(|name| format!("{name:?}")).collect();
    let message = format!("the model {model:?} is not served here; use {}", names.join(" or "));
    Err(ApiError {
        status: axum::http::StatusCode::NOT_FOUND,
        ..ApiError::param("model", message).code("model_not_found")
    })
}

/// How tokens are chosen, as the OpenAI interfaces name it, with what vLLM and others add.
pub fn sampling(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    let sampling = &mut ask.sampling;
    let set = |value: Option<f32>, target: &mut f32| *target = value.unwrap_or(*target);
    set(fields.number("temperature", 0.0..=2.0)?, &mut sampling.temperature);
    set(top_p(fields)?, &mut sampling.top_p);
    set(fields.number("min_p", 0.0..=1.0)?, &mut sampling.min_p);
    set(fields.number("presence_penalty", -2.0..=2.0)?, &mut sampling.presence_penalty);
    set(fields.number("frequency_penalty", -2.0..=2.0)?, &mut sampling.frequency_penalty);
    let repetition = fields.number("repetition_penalty", 0.0..=2.0)?;
    if repetition == Some(0.0) {
        return Err(wrong(&fields.name("repetition_penalty"), "a number above 0 and up to 2", &json!(0)));
    }
    set(repetition, &mut sampling.repetition_penalty);
    // Some write -1 for "all".
    if let Some(top_k) = fields.integer("top_k", -1..=i64::MAX)? {
        sampling.top_k = usize::try_from(top_k).unwrap_or(0);
    }
    seed(fields, ask)?;
    logit_bias(fields, ask)
}

/// `top_p`, which is above 0.
pub fn top_p(fields: &mut Fields) -> Result<Option<f32>, ApiError> {
    match fields.number("top_p", 0.0..=1.0)? {
        Some(found) if found <= 0.0 => {
            Err(wrong(&fields.name("top_p"), "a number above 0 and up to 1", &json!(found)))
        }
        found => Ok(found),
    }
}

/// The seed: any whole number.
pub fn seed(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    if let Some(seed) = fields.integer("seed", i64::MIN..=i64::MAX)? {
        ask.sampling.seed = seed as u64;
    }
    Ok(())
}

fn logit_bias(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    let name = fields.name("logit_bias");
    for (token, bias) in fields.object("logit_bias")?.unwrap_or_default() {
        let id: u32 = token.parse().map_err(|_| {
            let message = format!("{name} names {token:?}; its keys are token ids");
            ApiError::param(&name, message)
        })?;
        let in_range = |bias: &f64| (f64::from(-MAX_BIAS)..=f64::from(MAX_BIAS)).contains(bias);
        let Some(bias) = bias.as_f64().filter(in_range) else {
            return Err(wrong(&format!("{name}.{token}"), "a number from -100 to 100", &bias));
        };
        ask.sampling.logit_bias.push((id, bias as f32));
    }
    Ok(())
}

/// Stop strings, checked here so that the error has the name that the client knows.
pub fn stop(fields: &mut Fields, field: &str, ask: &mut Ask) -> Result<(), ApiError> {
    let name = fields.name(field);
    let strings = fields.strings(field)?;
    if strings.len() > MAX_STOP_STRINGS {
        let message = format!("{name} has {} strings; use at most {MAX_STOP_STRINGS}", strings.len());
        return Err(ApiError::param(name, message));
    }
    if let Some(bad) = strings.iter().find(|text| text.is_empty() || text.len() > MAX_STOP_BYTES) {
        let message = format!("a string of {name} has {} bytes; use 1 to {MAX_STOP_BYTES}", bad.len());
        return Err(ApiError::param(name, message));
    }
    ask.stop = strings;
    Ok(())
}

/// How many answers.
pub fn choices(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    ask.choices = fields.integer("n", 1..=MAX_CHOICES as i64)?.unwrap_or(1) as usize;
    Ok(())
}

/// Whether and how much the model thinks.
pub fn thinking(fields: &mut Fields, ask: &mut Ask) -> Result<(), ApiError> {
    ask.effort = fields.one_of("reasoning_effort", &EFFORTS)?;
    ask.think = fields.bool("enable_thinking")?;
    let place = fields.name("chat_template_kwargs");
    let mut extra = Fields::within(&place, fields.object("chat_template_kwargs")?.unwrap_or_default());
    ask.think = ask.think.or(extra.bool("enable_thinking")?);
    extra.finish()
}

/// `response_format` of the chat interface.
pub fn response_format(fields: &mut Fields) -> Result<Format, ApiError> {
    let place = fields.name("response_format");
    let Some(format) = fields.object("response_format")? else { return Ok(Format::Text) };
    let mut format = Fields::within(&place, format);
    let found = match format.required_string("type")?.as_str() {
        "text" => Format::Text,
        "json_object" => Format::JsonObject,
        "json_schema" => {
            let schema = format.required("json_schema")?;
            let mut schema = Fields::of(&format.name("json_schema"), schema)?;
            let found = json_schema(&mut schema)?;
            schema.finish()?;
            found
        }
        other => {
            return Err(wrong(&format.name("type"), "text, json_object or json_schema", &other.into()));
        }
    };
    format.finish()?;
    Ok(found)
}

/// The fields of a named schema. What it allows is always enforced, so that `strict` changes nothing.
pub fn json_schema(fields: &mut Fields) -> Result<Format, ApiError> {
    fields.string("name")?;
    fields.string("description")?;
    fields.bool("strict")?;
    match fields.required("schema")? {
        schema @ (Value::Object(_) | Value::Bool(_)) => Ok(Format::Schema(schema)),
        other => Err(wrong(&fields.name("schema"), "a JSON schema", &other)),
    }
}

/// How many alternatives are listed, of those that can be.
pub fn check_logprobs(name: &str, count: i64) -> Result<usize, ApiError> {
    match usize::try_from(count).ok().filter(|count| *count <= MAX_LOGPROBS) {
        Some(count) => Ok(count),
        None => Err(wrong(name, &format!("a number from 0 to {MAX_LOGPROBS}"), &count.into())),
    }
}

/// Where the client would like the prompt to be kept. Every prompt is kept as far as there is room, so that only the form
/// of the wish matters.
pub fn cache_control(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(control) = fields.object("cache_control")? else { return Ok(()) };
    let mut control = Fields::within(fields.name("cache_control"), control);
    let kind = control.required("type")?;
    if kind != "ephemeral" {
        return Err(wrong(&control.name("type"), "ephemeral", &kind));
    }
    control.one_of("ttl", &[("5m", ()), ("1h", ())])?;
    control.finish()
}
