//! What requests may say.

use forebay_engine::sample::{MAX_BIAS, MAX_LOGPROBS};
use forebay_text::stop_strings::{MAX_STOP_BYTES, MAX_STOP_STRINGS};
use serde_json::{Map, Value, json};

use super::parts::{above_zero, any_of, count, fields, list, number, one_of, reference, switch, text};
use crate::ask::MAX_CHOICES;
use crate::params::EFFORTS;
use crate::tools::{ANTHROPIC, Limits, OPENAI};

/// The schemas of all requests, and of what they are made of.
pub fn schemas(models: &[String]) -> Map<String, Value> {
    let mut all = Map::new();
    let mut add = |name: &str, schema: Value| _ = all.insert(name.to_owned(), schema);
    let tagged = models.iter().flat_map(|name| [name.clone(), format!("{name}:latest")]);
    add("ModelName", json!({"type": "string", "enum": tagged.collect::<Vec<_>>()}));
    add(
        "JsonSchema",
        json!({"type": ["object", "boolean"], "description": "A JSON schema; docs/structured-output.md says which can be enforced"}),
    );
    openai_parts(&mut add);
    add("ChatRequest", chat());
    add("CompletionRequest", completion());
    responses(&mut add);
    messages(&mut add);
    ollama(&mut add);
    let names = || json!({"model": reference("ModelName")});
    add(
        "TokenizeRequest",
        any_of(&[
            fields(&["prompt"], with(names(), json!({"prompt": text()}))),
            fields(&["content"], with(names(), json!({"content": text()}))),
            fields(
                &["messages"],
                with(
                    names(),
                    json!({
                        "messages": {"type": "array", "items": reference("ChatMessage"), "minItems": 1},
                        "tools": tools("Tool", &OPENAI),
                        "add_generation_prompt": switch(),
                    }),
                ),
            ),
        ]),
    );
    add(
        "DetokenizeRequest",
        fields(
            &["tokens"],
            json!({
                "model": reference("ModelName"),
                "tokens": list(json!({"type": "integer", "minimum": 0})),
            }),
        ),
    );
    all
}

/// `all` with these as well.
fn with(mut all: Value, more: Value) -> Value {
    if let (Value::Object(all), Value::Object(more)) = (&mut all, more) {
        all.extend(more);
    }
    all
}

fn sampling() -> Value {
    let bias = f64::from(MAX_BIAS);
    json!({
        "temperature": number(0.0, 2.0),
        "top_p": above_zero(1.0),
        "top_k": count(-1),
        "min_p": number(0.0, 1.0),
        "presence_penalty": number(-2.0, 2.0),
        "frequency_penalty": number(-2.0, 2.0),
        "repetition_penalty": above_zero(2.0),
        "seed": {"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX},
        "logit_bias": {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": number(-bias, bias),
        },
    })
}

/// What only names a request, and what is so anyway.
fn labels() -> Value {
    json!({
        "user": text(),
        "metadata": {"type": "object"},
        "safety_identifier": text(),
        "prompt_cache_key": text(),
        "store": {"const": false},
        "service_tier": one_of(&["auto", "default"]),
        "modalities": {"const": ["text"]},
    })
}

fn stop() -> Value {
    let one = json!({"type": "string", "minLength": 1, "maxLength": MAX_STOP_BYTES});
    any_of(&[one.clone(), json!({"type": "array", "items": one, "maxItems": MAX_STOP_STRINGS})])
}

fn choices() -> Value {
    json!({"type": "integer", "minimum": 1, "maximum": MAX_CHOICES})
}

fn logprobs() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS})
}

fn tools(of: &str, limits: &Limits) -> Value {
    json!({"type": "array", "items": reference(of), "maxItems": limits.tools})
}

fn tool_name(limits: &Limits) -> Value {
    json!({"type": "string", "pattern": "^[A-Za-z0-9_.-]+$", "maxLength": limits.name})
}

fn cache_control() -> Value {
    fields(&["type"], json!({"type": {"const": "ephemeral"}, "ttl": one_of(&["5m", "1h"])}))
}

fn empty() -> Value {
    json!({"type": "array", "maxItems": 0})
}

fn stream_options() -> Value {
    fields(&[], json!({"include_usage": switch(), "include_progress": switch()}))
}

fn effort() -> Value {
    one_of(&EFFORTS.map(|(name, _)| name))
}

fn openai_parts(add: &mut impl FnMut(&str, Value)) {
    let part = fields(
        &["type", "text"],
        json!({"type": {"const": "text"}, "text": text(), "cache_control": cache_control()}),
    );
    let content = any_of(&[text(), list(part)]);
    let call = fields(
        &["function"],
        json!({
            "id": text(),
            "type": {"const": "function"},
            "function": fields(&["name"], json!({"name": text(), "arguments": {}, "index": {}})),
            "index": {},
        }),
    );
    let message = |roles: &[&str], required: &[&str]| {
        let all = json!({
            "role": one_of(roles),
            "content": content,
            "reasoning_content": text(),
            "tool_calls": list(call.clone()),
            "tool_call_id": text(),
            "name": text(),
            // What answers have and clients send back, where nothing is in it.
            "refusal": {"type": "null"},
            "annotations": {"type": "array", "maxItems": 0},
            "audio": {"type": "null"},
            "function_call": {"type": "null"},
        });
        fields(required, all)
    };
    add(
        "ChatMessage",
        any_of(&[
            message(&["system", "developer", "user", "tool"], &["role", "content"]),
            message(&["assistant"], &["role"]),
        ]),
    );
    let function = fields(
        &["name"],
        json!({
            "name": tool_name(&OPENAI),
            "description": text(),
            "parameters": {"type": "object"},
            "strict": switch(),
        }),
    );
    add("Tool", fields(&["type", "function"], json!({"type": {"const": "function"}, "function": function})));
    let named = fields(&["name"], json!({"name": text()}));
    add(
        "ToolChoice",
        any_of(&[
            one_of(&["auto", "none", "required"]),
            fields(&["function"], json!({"type": {"const": "function"}, "function": named})),
            fields(&["name"], json!({"type": {"const": "function"}, "name": text()})),
        ]),
    );
    let schema = json!({
        "name": text(), "description": text(), "strict": switch(), "schema": reference("JsonSchema"),
    });
    add(
        "ResponseFormat",
        any_of(&[
            fields(&["type"], json!({"type": one_of(&["text", "json_object"])})),
            fields(
                &["type", "json_schema"],
                json!({
                    "type": {"const": "json_schema"},
                    "json_schema": fields(&["schema"], schema.clone()),
                }),
            ),
        ]),
    );
    add(
        "TextFormat",
        any_of(&[
            fields(&["type"], json!({"type": one_of(&["text", "json_object"])})),
            fields(&["type", "schema"], with(json!({"type": {"const": "json_schema"}}), schema)),
        ]),
    );
}

fn chat() -> Value {
    let own = json!({
        "model": reference("ModelName"),
        "messages": {"type": "array", "items": reference("ChatMessage"), "minItems": 1},
        "max_completion_tokens": count(1),
        "max_tokens": count(1),
        "n": choices(),
        "stop": stop(),
        "logprobs": switch(),
        "top_logprobs": logprobs(),
        "response_format": reference("ResponseFormat"),
        "tools": tools("Tool", &OPENAI),
        "tool_choice": reference("ToolChoice"),
        "parallel_tool_calls": switch(),
        "reasoning_effort": effort(),
        "enable_thinking": switch(),
        "chat_template_kwargs": fields(&[], json!({"enable_thinking": switch()})),
        "stream": switch(),
        "stream_options": stream_options(),
    });
    fields(&["model", "messages"], with(with(own, sampling()), labels()))
}

fn completion() -> Value {
    let own = json!({
        "model": reference("ModelName"),
        "prompt": any_of(&[
            json!({"type": "string", "minLength": 1}),
            json!({"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}),
            json!({"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 1}),
        ]),
        "max_tokens": count(1),
        "n": choices(),
        "stop": stop(),
        "logprobs": logprobs(),
        "response_format": reference("ResponseFormat"),
        "echo": {"const": false},
        "best_of": {"const": 1},
        "suffix": {"type": "null"},
        "stream": switch(),
        "stream_options": stream_options(),
    });
    fields(&["model", "prompt"], with(with(own, sampling()), labels()))
}

fn responses(add: &mut impl FnMut(&str, Value)) {
    let part = fields(
        &["type", "text"],
        json!({
            "type": one_of(&["input_text", "output_text", "text", "reasoning_text", "summary_text"]),
            "text": text(),
            "annotations": empty(),
            "logprobs": empty(),
        }),
    );
    add("TextParts", any_of(&[text(), list(part)]));
    let item = |kind: &str, required: &[&str], more: Value| {
        let names = json!({"type": {"const": kind}, "id": text(), "status": text()});
        fields(required, with(names, more))
    };
    add(
        "InputItem",
        any_of(&[
            item(
                "message",
                &["role", "content"],
                json!({
                    "role": one_of(&["user", "assistant", "system", "developer"]), "content": reference("TextParts"),
                }),
            ),
            item(
                "function_call",
                &["type", "call_id", "name", "arguments"],
                json!({
                    "call_id": text(), "name": text(), "arguments": text(),
                }),
            ),
            item(
                "function_call_output",
                &["type", "call_id", "output"],
                json!({
                    "call_id": text(), "output": reference("TextParts"),
                }),
            ),
            item(
                "reasoning",
                &["type"],
                json!({
                    "summary": reference("TextParts"), "encrypted_content": {"const": ""}, "content": reference("TextParts"),
                }),
            ),
        ]),
    );
    add(
        "FunctionTool",
        fields(
            &["type", "name"],
            json!({
                "type": {"const": "function"},
                "name": tool_name(&OPENAI),
                "description": text(),
                "parameters": {"type": "object"},
                "strict": switch(),
            }),
        ),
    );
    let own = json!({
        "model": reference("ModelName"),
        "input": any_of(&[text(), list(reference("InputItem"))]),
        "instructions": text(),
        "max_output_tokens": count(1),
        "reasoning": fields(&[], json!({"effort": effort(), "summary": text(), "generate_summary": text()})),
        "text": fields(&[], json!({"format": reference("TextFormat"), "verbosity": {"const": "medium"}})),
        "tools": tools("FunctionTool", &OPENAI),
        "tool_choice": reference("ToolChoice"),
        "parallel_tool_calls": switch(),
        "stream": switch(),
        "previous_response_id": {"type": "null"},
        "conversation": {"type": "null"},
        "background": {"const": false},
        "truncation": {"const": "disabled"},
        "include": {"enum": [[], ["reasoning.encrypted_content"]]},
    });
    add("ResponseRequest", fields(&["model", "input"], with(with(own, sampling()), labels())));
}

fn messages(add: &mut impl FnMut(&str, Value)) {
    let block = |kind: &str, required: &[&str], more: Value| {
        let mut names = vec!["type"];
        names.extend(required);
        fields(&names, with(json!({"type": {"const": kind}}), more))
    };
    let text_block = block(
        "text",
        &["text"],
        json!({"text": text(), "cache_control": cache_control(), "citations": empty()}),
    );
    add("TextBlocks", any_of(&[text(), list(text_block.clone())]));
    let result = block(
        "tool_result",
        &["tool_use_id"],
        json!({
            "tool_use_id": text(), "content": reference("TextBlocks"), "is_error": switch(),
            "cache_control": cache_control(),
        }),
    );
    let thought = block("thinking", &["thinking"], json!({"thinking": text(), "signature": text()}));
    let tool_use = block(
        "tool_use",
        &["id", "name"],
        json!({
            "id": text(), "name": text(), "input": {"type": "object"}, "cache_control": cache_control(),
        }),
    );
    let message = |role: &str, blocks: &[Value]| {
        let content = any_of(&[text(), json!({"type": "array", "items": any_of(blocks), "minItems": 1})]);
        fields(&["role", "content"], json!({"role": {"const": role}, "content": content}))
    };
    add(
        "AnthropicMessage",
        any_of(&[
            message("user", &[text_block.clone(), result]),
            message("assistant", &[text_block.clone(), thought, tool_use]),
            message("system", &[text_block]),
        ]),
    );
    add(
        "AnthropicTool",
        fields(
            &["name", "input_schema"],
            json!({
                "type": {"const": "custom"},
                "name": tool_name(&ANTHROPIC),
                "description": text(),
                "input_schema": {"type": "object"},
                "strict": switch(),
                "cache_control": cache_control(),
            }),
        ),
    );
    let choice = |kinds: &[&str], more: Value, required: &[&str]| {
        let own = json!({"type": one_of(kinds), "disable_parallel_tool_use": switch()});
        fields(required, with(own, more))
    };
    let shared = json!({
        "model": reference("ModelName"),
        "messages": {"type": "array", "items": reference("AnthropicMessage"), "minItems": 1},
        "max_tokens": count(1),
        "system": reference("TextBlocks"),
        "tools": tools("AnthropicTool", &ANTHROPIC),
        "tool_choice": any_of(&[
            choice(&["auto", "any", "none"], json!({}), &["type"]),
            choice(&["tool"], json!({"name": text()}), &["type", "name"]),
        ]),
        "thinking": fields(&["type"], json!({
            "type": one_of(&["enabled", "disabled", "adaptive"]), "budget_tokens": count(1),
        })),
        "metadata": {"type": "object"},
        "cache_control": cache_control(),
        "service_tier": one_of(&["auto", "standard_only"]),
    });
    add("CountRequest", fields(&["model", "messages"], shared.clone()));
    let own = json!({
        "temperature": number(0.0, 2.0),
        "top_p": above_zero(1.0),
        "top_k": count(0),
        "stop_sequences": stop(),
        "stream": switch(),
    });
    add("MessageRequest", fields(&["model", "messages", "max_tokens"], with(shared, own)));
}

fn ollama(add: &mut impl FnMut(&str, Value)) {
    let call = fields(
        &["function"],
        json!({
            "id": text(),
            "type": {"const": "function"},
            "function": {"type": "object", "required": ["name"], "properties": {"name": text(), "arguments": {}}},
        }),
    );
    add(
        "OllamaMessage",
        fields(
            &["role"],
            json!({
                "role": one_of(&["system", "developer", "user", "assistant", "tool"]),
                "content": text(),
                "thinking": text(),
                "tool_calls": list(call),
                "tool_call_id": text(),
                "tool_name": text(),
                "images": {"type": "array", "maxItems": 0},
            }),
        ),
    );
    add(
        "OllamaOptions",
        fields(
            &[],
            json!({
                "temperature": number(0.0, 2.0),
                "top_p": above_zero(1.0),
                "top_k": count(0),
                "min_p": number(0.0, 1.0),
                "repeat_penalty": number(0.01, 2.0),
                "presence_penalty": number(-2.0, 2.0),
                "frequency_penalty": number(-2.0, 2.0),
                "seed": {"type": "integer", "minimum": i64::MIN, "maximum": i64::MAX},
                "stop": stop(),
                "num_predict": count(-2),
                "num_ctx": count(1),
                "repeat_last_n": {"const": -1},
            }),
        ),
    );
    let shared = json!({
        "model": reference("ModelName"),
        "stream": switch(),
        "format": any_of(&[one_of(&["", "json"]), json!({"type": "object"})]),
        "think": any_of(&[switch(), one_of(&["low", "medium", "high"])]),
        "keep_alive": {"type": ["string", "number"]},
        "options": reference("OllamaOptions"),
    });
    add(
        "OllamaChatRequest",
        fields(
            &["model"],
            with(
                shared.clone(),
                json!({
                    "messages": list(reference("OllamaMessage")), "tools": tools("Tool", &OPENAI),
                }),
            ),
        ),
    );
    add(
        "OllamaGenerateRequest",
        fields(
            &["model"],
            with(
                shared,
                json!({
                    "prompt": text(),
                    "system": text(),
                    "raw": switch(),
                    "suffix": {"const": ""},
                    "template": {"const": ""},
                    "images": {"type": "array", "maxItems": 0},
                    "context": {"type": "array", "maxItems": 0},
                }),
            ),
        ),
    );
    add(
        "OllamaShowRequest",
        any_of(&[
            fields(&["model"], json!({"model": reference("ModelName"), "verbose": switch()})),
            fields(&["name"], json!({"name": reference("ModelName"), "verbose": switch()})),
        ]),
    );
}
