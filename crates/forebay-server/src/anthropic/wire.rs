//! The stream of events.

use serde_json::{Value, json};

use super::{SIGNATURE, stop_reason, stop_sequence, tool_use, usage};
use crate::app::App;
use crate::error::{ApiError, Dialect};
use crate::ids;
use crate::pipe::Part;
use crate::run::{Ended, Piece};
use crate::stream::{self, Out, Wire};

/// The block that is open.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Thinking,
    Text,
}

/// Writes one message.
pub struct MessageWire {
    model: String,
    prompt_tokens: usize,
    stop: Vec<String>,
    /// Blocks so far.
    blocks: usize,
    open: Option<Open>,
    end: Option<Ended>,
}

impl MessageWire {
    /// A message that has not begun.
    pub fn new(app: &App, prompt_tokens: usize, stop: Vec<String>) -> Self {
        Self { model: app.model.id.clone(), prompt_tokens, stop, blocks: 0, open: None, end: None }
    }

    fn start(&mut self, block: Value, out: &mut Out) {
        let event = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        out.event("content_block_start", &event);
    }

    fn delta(&mut self, delta: Value, out: &mut Out) {
        let event = json!({"type": "content_block_delta", "index": self.blocks, "delta": delta});
        out.event("content_block_delta", &event);
    }

    /// Ends the block that is open.
    fn close(&mut self, out: &mut Out) {
        let Some(open) = self.open.take() else { return };
        if open == Open::Thinking {
            self.delta(json!({"type": "signature_delta", "signature": SIGNATURE}), out);
        }
        self.stop(out);
    }

    fn stop(&mut self, out: &mut Out) {
        out.event("content_block_stop", &json!({"type": "content_block_stop", "index": self.blocks}));
        self.blocks += 1;
    }

    /// Makes sure that a block of this kind is open.
    fn open(&mut self, wanted: Open, out: &mut Out) {
        if self.open == Some(wanted) {
            return;
        }
        self.close(out);
        let block = match wanted {
            Open::Thinking => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Open::Text => json!({"type": "text", "text": ""}),
        };
        self.start(block, out);
        self.open = Some(wanted);
    }
}

impl Wire for MessageWire {
    /// What was known of the prompt is part of the first event, and is known when its turn comes.
    fn begin(&mut self, _: &mut Out) {}

    fn piece(&mut self, _: usize, piece: Piece, out: &mut Out) {
        match piece {
            Piece::Started { reused, .. } => {
                let message = json!({
                    "id": format!("msg_{}", ids::random()),
                    "type": "message",
                    "role": "assistant",
                    "model": self.model,
                    "content": [],
                    "stop_reason": null,
                    "stop_sequence": null,
                    "usage": usage(self.prompt_tokens, reused, 0),
                });
                out.event("message_start", &json!({"type": "message_start", "message": message}));
                out.event("ping", &json!({"type": "ping"}));
            }
            Piece::Delta(delta) => {
                if !delta.reasoning.is_empty() {
                    self.open(Open::Thinking, out);
                    self.delta(json!({"type": "thinking_delta", "thinking": delta.reasoning}), out);
                }
                for part in delta.parts {
                    match part {
                        Part::Text(text) => {
                            self.open(Open::Text, out);
                            self.delta(json!({"type": "text_delta", "text": text}), out);
                        }
                        Part::Call(call) => {
                            self.close(out);
                            self.start(tool_use(&call, json!({})), out);
                            let input = Value::Object(call.arguments).to_string();
                            self.delta(json!({"type": "input_json_delta", "partial_json": input}), out);
                            self.stop(out);
                        }
                    }
                }
            }
            Piece::End(end) => self.end = Some(end),
            Piece::Queued { .. } | Piece::Progress { .. } | Piece::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Out) {
        self.close(out);
        let Some(end) = &self.end else { return };
        let delta = json!({
            "stop_reason": stop_reason(end.reason),
            "stop_sequence": stop_sequence(end.reason, &self.stop),
        });
        let usage = usage(self.prompt_tokens, end.cached, end.tokens);
        out.event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        stream::fail_event(error, Dialect::Anthropic, out);
    }
}
