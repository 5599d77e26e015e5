//! What a request asks of the template besides the messages: thinking, tools, tool choice.

use super::error::RenderError;
use serde_json::{Map, Value};
use std::str::FromStr;

/// How much a thinking model should think.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReasoningEffort {
    /// Do not think.
    None,
    /// Very little.
    Minimal,
    /// Little.
    Low,
    /// Some.
    Medium,
    /// Much.
    High,
    /// As much as possible.
    Xhigh,
}

impl ReasoningEffort {
    const ALL: [Self; 6] = [Self::None, Self::Minimal, Self::Low, Self::Medium, Self::High, Self::Xhigh];

    /// The name used in requests and templates.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Minimal => "minimal",
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
            Self::Xhigh => "xhigh",
        }
    }
}

/// A name that is no [`ReasoningEffort`].
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown reasoning effort {found:?}; use none, minimal, low, medium, high or xhigh")]
pub struct UnknownEffort {
    /// What was given.
    pub found: String,
}

impl FromStr for ReasoningEffort {
    type Err = UnknownEffort;

    fn from_str(name: &str) -> Result<Self, UnknownEffort> {
        Self::ALL
            .into_iter()
            .find(|effort| effort.name() == name)
            .ok_or_else(|| UnknownEffort { found: name.to_owned() })
    }
}

/// Whether and which tool the model must call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// Tools are not offered.
    None,
    /// Some tool must be called.
    Required,
    /// This tool must be called; only it is offered.
    Function(String),
}

/// The request's options for rendering.
#[derive(Debug, Clone, Default)]
pub struct RenderOptions {
    /// Tools offered, as in the request: `{"type": "function", "function": {...}}` or the inner object alone.
    pub tools: Vec<Value>,
    /// What the model must do with them.
    pub tool_choice: ToolChoice,
    /// Thinking on or off; decides over `reasoning_effort` when given.
    pub enable_thinking: Option<bool>,
    /// Thinking is on when this is given and is not [`ReasoningEffort::None`]. The built-in rendering, like the
    /// model family's own, knows only high and maximal: everything but high is shown to the model as "Max".
    pub reasoning_effort: Option<ReasoningEffort>,
    /// End the prompt where the assistant's answer begins.
    pub add_generation_prompt: bool,
    /// Further variables for the model's own template (the request's `chat_template_kwargs`). They do not
    /// replace the variables above.
    pub extra: Map<String, Value>,
}

impl RenderOptions {
    /// Whether the answer starts inside an open think block.
    pub fn thinking(&self) -> bool {
        self.enable_thinking.unwrap_or(!matches!(self.reasoning_effort, None | Some(ReasoningEffort::None)))
    }

    /// The tools that are really offered, without the keys that are for the server and not for the model.
    pub(super) fn offered_tools(&self) -> Result<Vec<Value>, RenderError> {
        let named = self.tools.iter().enumerate().map(|(at, tool)| Ok((tool_name(tool, at)?, tool)));
        let named: Vec<(&str, &Value)> = named.collect::<Result<_, RenderError>>()?;
        let wanted = match &self.tool_choice {
            ToolChoice::None => return Ok(Vec::new()),
            ToolChoice::Auto => None,
            ToolChoice::Required if named.is_empty() => return Err(RenderError::ToolChoiceWithoutTools),
            ToolChoice::Required => None,
            ToolChoice::Function(name) if named.iter().all(|(known, _)| known != name) => {
                return Err(RenderError::UnknownTool { name: name.clone() });
            }
            ToolChoice::Function(name) => Some(name),
        };
        let offered = named.into_iter().filter(|(name, _)| wanted.is_none_or(|wanted| wanted == name));
        Ok(offered.map(|(_, tool)| without_server_keys(tool)).collect())
    }

    /// The sentence that tells the model about a binding tool choice.
    pub(super) fn tool_choice_sentence(&self) -> Option<String> {
        match &self.tool_choice {
            ToolChoice::Auto | ToolChoice::None => None,
            ToolChoice::Required => {
                Some("You must call one of the functions above. Do not answer directly.".to_owned())
            }
            ToolChoice::Function(name) => {
                Some(format!("You must call the function `{name}`. Do not answer directly."))
            }
        }
    }
}

fn tool_name(tool: &Value, at: usize) -> Result<&str, RenderError> {
    function_of(tool)["name"].as_str().ok_or(RenderError::BadTool { index: at })
}

/// The tool's `function` member, or the tool itself.
pub(super) fn function_of(tool: &Value) -> &Value {
    tool.get("function").unwrap_or(tool)
}

/// A copy without `defer_loading` and `strict`, on the tool and on its function; other keys keep their order.
fn without_server_keys(tool: &Value) -> Value {
    let strip = |value: &mut Value| {
        if let Value::Object(fields) = value {
            fields.retain(|key, _| key != "defer_loading" && key != "strict");
        }
    };
    let mut tool = tool.clone();
    strip(&mut tool);
    if let Some(function) = tool.get_mut("function") {
        strip(function);
    }
    tool
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn options(choice: ToolChoice) -> RenderOptions {
        let tools = vec![
            json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": {"strict": 1}}}),
            json!({"name": "g", "defer_loading": true, "description": "d"}),
        ];
        RenderOptions { tools, tool_choice: choice, ..RenderOptions::default() }
    }

    #[test]
    fn thinking_follows_the_switch_then_the_effort() {
        use ReasoningEffort as E;
        for (switch, effort, expected) in [
            (None, None, false),
            (None, Some(E::None), false),
            (None, Some(E::Minimal), true),
            (None, Some(E::High), true),
            (Some(true), None, true),
            (Some(true), Some(E::None), true),
            (Some(false), Some(E::High), false),
        ] {
            let options = RenderOptions {
                enable_thinking: switch,
                reasoning_effort: effort,
                ..RenderOptions::default()
            };
            assert_eq!(options.thinking(), expected, "{switch:?} {effort:?}");
        }
        assert_eq!("xhigh".parse(), Ok(E::Xhigh));
        assert!("High".parse::<E>().is_err());
    }

    #[test]
    fn server_keys_are_removed_but_not_from_schemas() {
        let offered = options(ToolChoice::Auto).offered_tools().unwrap();
        let expected = json!([
            {"type": "function", "function": {"name": "f", "parameters": {"strict": 1}}},
            {"name": "g", "description": "d"},
        ]);
        assert_eq!(Value::Array(offered), expected);
    }

    #[test]
    fn tool_choice_restricts_the_list_or_is_refused() {
        assert!(options(ToolChoice::None).offered_tools().unwrap().is_empty());
        assert_eq!(options(ToolChoice::Required).offered_tools().unwrap().len(), 2);
        let only = options(ToolChoice::Function("g".into())).offered_tools().unwrap();
        assert_eq!(only, [json!({"name": "g", "description": "d"})]);
        let unknown = options(ToolChoice::Function("h".into())).offered_tools().unwrap_err();
        assert!(matches!(unknown, RenderError::UnknownTool { name } if name == "h"));
        let without = RenderOptions { tool_choice: ToolChoice::Required, ..RenderOptions::default() };
        assert!(matches!(without.offered_tools().unwrap_err(), RenderError::ToolChoiceWithoutTools));
        let broken = RenderOptions { tools: vec![json!({"type": "function"})], ..RenderOptions::default() };
        assert!(matches!(broken.offered_tools().unwrap_err(), RenderError::BadTool { index: 0 }));
    }
}
