//! The built-in rendering of the GLM-5.2 family, for snapshots without a
//! template of their own and for single turns appended to a live conversation.

use super::error::RenderError;
use super::json::{JsonStyle, dumps};
use super::message::{ChatMessage, Role};
use super::options::{ReasoningEffort, RenderOptions, function_of};
use crate::prompt::RenderedPrompt;
use crate::reasoning::{THINK_CLOSE, THINK_OPEN};
use minijinja::value::Serde;
use serde_json::Value;

/// The control tokens of this rendering.
pub(super) const CONTROLS: [&str; 6] =
    ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"];

const TOOLS_INTRO: &str = "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n\
    You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n";
const TOOLS_FORMAT: &str = "</tools>\n\nFor each function call, output the function name and arguments within \
    the following XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}\
    </arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>";

/// Renders a whole conversation. The caller has checked messages and tools.
pub(super) fn render(
    messages: &[ChatMessage],
    tools: &[Value],
    options: &RenderOptions,
) -> Result<RenderedPrompt, RenderError> {
    let mut prompt = RenderedPrompt::new();
    prompt.push_control("[gMASK]");
    prompt.push_control("<sop>");
    if options.thinking() {
        let high = options.reasoning_effort == Some(ReasoningEffort::High);
        prompt.push_control("<|system|>");
        prompt.push_text(if high { "Reasoning Effort: High" } else { "Reasoning Effort: Max" });
    }
    if !tools.is_empty() {
        prompt.push_control("<|system|>");
        prompt.push_text(&tools_block(tools)?);
        if let Some(sentence) = options.tool_choice_sentence() {
            prompt.push_text("\n\n");
            prompt.push_text(&sentence);
        }
    }
    let mut previous = None;
    for message in messages {
        push_message(&mut prompt, message, previous)?;
        previous = Some(message.role);
    }
    if options.add_generation_prompt {
        push_answer_start(&mut prompt, options.thinking());
    }
    Ok(prompt)
}

/// One user turn: the first opens the conversation, later ones are appended to what the model has already seen.
pub fn user_turn(text: &str, first: bool, thinking: bool) -> RenderedPrompt {
    let mut prompt = RenderedPrompt::new();
    if first {
        prompt.push_control("[gMASK]");
        prompt.push_control("<sop>");
    }
    prompt.push_control("<|user|>");
    prompt.push_text(text);
    push_answer_start(&mut prompt, thinking);
    prompt
}

/// The think block is mandatory: without one the model does not end its turn.
fn push_answer_start(prompt: &mut RenderedPrompt, thinking: bool) {
    prompt.push_control("<|assistant|>");
    prompt.push_text(THINK_OPEN);
    if !thinking {
        prompt.push_text(THINK_CLOSE);
    }
}

/// The text that follows the system mark when tools are offered: one function object per line.
pub(super) fn tools_block(tools: &[Value]) -> Result<String, RenderError> {
    let mut block = TOOLS_INTRO.to_owned();
    for tool in tools {
        block += &json_line(function_of(tool))?;
        block.push('\n');
    }
    Ok(block + TOOLS_FORMAT)
}

fn push_message(
    prompt: &mut RenderedPrompt,
    message: &ChatMessage,
    previous: Option<Role>,
) -> Result<(), RenderError> {
    let content = message.content.as_deref().unwrap_or_default();
    match message.role {
        Role::System | Role::Developer => {
            prompt.push_control("<|system|>");
            prompt.push_text(content);
        }
        Role::User => {
            prompt.push_control("<|user|>");
            prompt.push_text(content);
        }
        Role::Assistant => {
            prompt.push_control("<|assistant|>");
            prompt.push_text("<think></think>");
            prompt.push_text(content.trim());
            for call in &message.tool_calls {
                prompt.push_text(&format!("<tool_call>{}", call.name));
                for (key, value) in &call.arguments {
                    let value = match value {
                        Value::String(text) => text.clone(),
                        other => json_line(other)?,
                    };
                    prompt.push_text(&format!("<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"));
                }
                prompt.push_text("</tool_call>");
            }
        }
        Role::Tool => {
            if previous != Some(Role::Tool) {
                prompt.push_control("<|observation|>");
            }
            prompt.push_text(&format!("<tool_response>{content}</tool_response>"));
        }
    }
    Ok(())
}

fn json_line(value: &Value) -> Result<String, RenderError> {
    let value = minijinja::Value::from(Serde(value));
    dumps(&value, &JsonStyle::default(), &mut |_| Ok(())).map_err(|error| RenderError::Failed {
        origin: "the built-in template".to_owned(),
        message: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_turns_are_only_the_turn() {
        assert_eq!(user_turn("Hi", true, false).text(), "[gMASK]<sop><|user|>Hi<|assistant|><think></think>");
        assert_eq!(user_turn("Hi", false, true).text(), "<|user|>Hi<|assistant|><think>");
    }
}
