//! The interface of OpenAI: models, chat, completions, responses, files, batches; and what vLLM adds.

pub mod batches;
pub mod chat;
pub mod completions;
pub mod files;
pub mod models;
pub mod once;
pub mod pages;
pub mod responses;
pub mod tokens;

use serde_json::{Value, json};

use crate::app::App;
use crate::pipe::{Call, TokenInfo};
use crate::run::{Ended, Reason};

/// What one answer, or several to one prompt, cost.
pub fn usage<'e>(prompt_tokens: usize, ends: impl Iterator<Item = &'e Ended>) -> Value {
    let (mut completion, mut reasoning, mut cached) = (0, 0, None);
    for end in ends {
        completion += end.tokens;
        reasoning += end.reasoning_tokens;
        // Further choices find the prompt of the first one: what was known before that counts.
        cached = Some(cached.map_or(end.cached, |least: usize| least.min(end.cached)));
    }
    let cached = cached.unwrap_or(0);
    json!({
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}

/// The name of a reason.
pub fn finish_reason(reason: Reason) -> &'static str {
    match reason {
        Reason::Stop | Reason::StopString(_) => "stop",
        Reason::Calls => "tool_calls",
        Reason::Length => "length",
    }
}

/// A call, as the chat interface shows it.
pub fn call(call: &Call) -> Value {
    json!({
        "id": format!("call_{}", call.id),
        "type": "function",
        "function": {"name": call.name, "arguments": arguments(call)},
    })
}

/// Arguments, as text.
pub fn arguments(call: &Call) -> String {
    Value::Object(call.arguments.clone()).to_string()
}

/// The log-probabilities of some tokens, as the chat interface shows them.
pub fn logprobs(tokens: &[TokenInfo], app: &App) -> Vec<Value> {
    let show = |id: u32, logprob: f64| {
        let bytes = app.model.tokenizer.token_bytes(id).unwrap_or_default();
        json!({"token": String::from_utf8_lossy(bytes), "logprob": logprob, "bytes": bytes})
    };
    let one = |info: &TokenInfo| {
        let found = info.token.logprobs.as_ref()?;
        let mut shown = show(info.token.id, found.chosen);
        let top: Vec<Value> = found.top.iter().map(|(id, logprob)| show(*id, *logprob)).collect();
        shown["top_logprobs"] = top.into();
        Some(shown)
    };
    tokens.iter().filter_map(one).collect()
}
