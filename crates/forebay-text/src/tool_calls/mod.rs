//! Finds the tool calls in an answer of the GLM family, as it streams.
//!
//! A call is `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>...</tool_call>`. Models write it wrong at
//! times; what is meant is taken where that is clear, and what is not understood comes back as text: nothing that a
//! model wrote is lost, and nothing is an error.

mod block;
mod types;

use serde_json::{Map, Value};

use block::Block;
pub use types::ToolTypes;

/// Opens a call.
pub const CALL_OPEN: &str = "<tool_call>";
/// Closes a call.
pub const CALL_CLOSE: &str = "</tool_call>";
/// Opens the name of an argument.
pub const KEY_OPEN: &str = "<arg_key>";
/// Closes the name of an argument.
pub const KEY_CLOSE: &str = "</arg_key>";
/// Opens the value of an argument.
pub const VALUE_OPEN: &str = "<arg_value>";
/// Closes the value of an argument.
pub const VALUE_CLOSE: &str = "</arg_value>";

/// A call that the model made.
#[derive(Debug, Clone, PartialEq)]
pub struct ParsedCall {
    /// The tool: one that was offered, or whatever the model wrote.
    pub name: String,
    /// Its arguments, in the order they were written; of a name that stands twice, the last value.
    pub arguments: Map<String, Value>,
}

/// A part of an answer.
#[derive(Debug, Clone, PartialEq)]
pub enum AnswerPart {
    /// Text beside the calls.
    Text(String),
    /// A call.
    Call(ParsedCall),
}

/// Takes the text of one answer apart, think block excluded. White space at the ends of the text is dropped: between
/// text and calls models put line breaks that mean nothing.
#[derive(Debug, Clone)]
pub struct ToolCallParser {
    tools: Vec<ToolTypes>,
    /// The call that is being read.
    block: Option<Block>,
    /// What may become an opening tag.
    held: String,
    /// White space that is text if more text follows.
    spaces: String,
    /// Whether there was any text.
    began: bool,
}

impl ToolCallParser {
    /// A parser for the answer of a model that was offered these tools.
    pub fn new(tools: Vec<ToolTypes>) -> Self {
        Self { tools, block: None, held: String::new(), spaces: String::new(), began: false }
    }

    /// Whether a call is being read.
    pub fn is_in_call(&self) -> bool {
        self.block.is_some()
    }

    /// Takes more text; returns what is certain by now, in order.
    pub fn push(&mut self, text: &str) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let mut rest = std::mem::take(&mut self.held) + text;
        loop {
            match &mut self.block {
                None => match rest.find(CALL_OPEN) {
                    Some(at) => {
                        let behind = rest.split_off(at + CALL_OPEN.len());
                        rest.truncate(at);
                        self.text(&rest, &mut parts);
                        self.block = Some(Block::default());
                        rest = behind;
                    }
                    None => {
                        let held = rest.len() - beginning_at_end(&rest, CALL_OPEN);
                        self.held = rest.split_off(held);
                        self.text(&rest, &mut parts);
                        return parts;
                    }
                },
                Some(block) => {
                    let Some(behind) = block.push(&rest) else { return parts };
                    let block = self.block.take().unwrap_or_default();
                    self.assemble(block, &mut parts);
                    rest = behind;
                }
            }
        }
    }

    /// Ends the answer. `complete` says whether the model ended it: then a call that it did not close counts if all of
    /// it is there. One that was cut off never does, as nobody should act on half an argument.
    pub fn finish(&mut self, complete: bool) -> Vec<AnswerPart> {
        let mut parts = Vec::new();
        let held = std::mem::take(&mut self.held);
        self.text(&held, &mut parts);
        if let Some(mut block) = self.block.take() {
            match complete && block.close(&self.tools) {
                true => self.assemble(block, &mut parts),
                false => self.text(&format!("{CALL_OPEN}{}", block.raw()), &mut parts),
            }
        }
        parts
    }

    fn assemble(&mut self, block: Block, parts: &mut Vec<AnswerPart>) {
        match block.call(&self.tools) {
            Some((call, loose)) => {
                if !loose.is_empty() {
                    self.text(&loose, parts);
                }
                parts.push(AnswerPart::Call(call));
            }
            None => {
                let closed = if block.is_closed() { CALL_CLOSE } else { "" };
                self.text(&format!("{CALL_OPEN}{}{closed}", block.raw()), parts);
            }
        }
    }

    fn text(&mut self, text: &str, parts: &mut Vec<AnswerPart>) {
        let mut all = std::mem::take(&mut self.spaces) + text;
        if !self.began {
            all = all.trim_start().to_owned();
        }
        self.spaces = all.split_off(all.trim_end().len());
        if all.is_empty() {
            return;
        }
        self.began = true;
        match parts.last_mut() {
            Some(AnswerPart::Text(last)) => last.push_str(&all),
            _ => parts.push(AnswerPart::Text(all)),
        }
    }
}

/// Length of the longest end of `text` that is a proper beginning of `tag` (an ASCII string).
fn beginning_at_end(text: &str, tag: &str) -> usize {
    (1..tag.len()).rev().find(|&n| text.as_bytes().ends_with(&tag.as_bytes()[..n])).unwrap_or(0)
}

#[cfg(test)]
mod tests;
