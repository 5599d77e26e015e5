//! `POST /tokenize` and `POST /detokenize`, as vLLM and llama.cpp have them.

use std::sync::Arc;

use axum::extract::State;
use axum::response::Response;
use forebay_text::RenderOptions;
use forebay_text::template::ToolChoice;
use serde_json::{Map, Value, json};

use crate::app::App;
use crate::ask::encode_text;
use crate::body::JsonBody;
use crate::error::ApiError;
use crate::fields::{Fields, wrong};
use crate::openai::chat;
use crate::params;
use crate::stream;
use crate::tools::{self, Tools};

/// The tokens of a text or of a conversation.
pub async fn tokenize(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let read = |body: Map<String, Value>, app: &App| {
        let mut fields = Fields::new(body);
        if let Some(model) = fields.string("model")? {
            params::named_model(&model, app)?;
        }
        let text = match fields.string("prompt")? {
            Some(text) => Some(text),
            None => fields.string("content")?,
        };
        let messages = fields.list("messages")?;
        let tools = tools::openai_tools(fields.list("tools")?)?;
        let tools = Tools::new(tools, ToolChoice::Auto, true, &tools::OPENAI)?.all;
        let add = fields.bool("add_generation_prompt")?;
        fields.finish()?;
        Ok((text, messages, tools, add))
    };
    let (app, (text, messages, tools, add), share) = body.read(&app, read).await?;
    let shared = Arc::clone(&app);
    let work = move || match (text, messages) {
        (Some(text), None) if add.is_none() && tools.is_empty() => encode_text(&text, &shared),
        (None, Some(messages)) => {
            let messages = chat::messages(messages)?;
            let options = RenderOptions {
                tools: tools.iter().map(|tool| tool.for_template()).collect(),
                enable_thinking: Some(shared.settings.think),
                add_generation_prompt: add.unwrap_or(true),
                ..RenderOptions::default()
            };
            let rendered = shared.model.template.render(&messages, &options)?;
            shared
                .model
                .tokenizer
                .encode_rendered(&rendered)
                .map_err(|error| ApiError::bad(error.to_string()))
        }
        _ => Err(ApiError::param("prompt", "send either prompt (a text) or messages (with tools, if any)")),
    };
    let ids = off_thread(work).await?;
    drop(share);
    let (count, max) = (ids.len(), app.model.context);
    Ok(stream::json(&json!({"tokens": ids, "count": count, "max_model_len": max}), Vec::new()))
}

/// The text of tokens.
pub async fn detokenize(State(app): State<Arc<App>>, body: JsonBody) -> Result<Response, ApiError> {
    let read = |body: Map<String, Value>, app: &App| {
        let mut fields = Fields::new(body);
        if let Some(model) = fields.string("model")? {
            params::named_model(&model, app)?;
        }
        let tokens = fields.required("tokens")?;
        fields.finish()?;
        let ids = ids("tokens", &tokens, app)?;
        Ok(String::from_utf8_lossy(&app.model.tokenizer.decode_bytes(&ids)).into_owned())
    };
    let (_, text, _) = body.read(&app, read).await?;
    Ok(stream::json(&json!({"prompt": text, "content": text}), Vec::new()))
}

/// Token ids of this model.
pub fn ids(name: &str, value: &Value, app: &App) -> Result<Vec<u32>, ApiError> {
    let vocab = app.model.tokenizer.vocab_size() as u64;
    let id = |id: &Value| id.as_u64().filter(|id| *id < vocab).map(|id| id as u32);
    let found = value.as_array().and_then(|all| all.iter().map(id).collect::<Option<Vec<u32>>>());
    found.ok_or_else(|| wrong(name, &format!("a list of token ids from 0 to {}", vocab - 1), value))
}

/// Does what takes time where no socket waits for it.
pub async fn off_thread<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        let message = format!("the request could not be worked on: {error}");
        ApiError::new(axum::http::StatusCode::INTERNAL_SERVER_ERROR, message)
    })?
}
