//! The stream of events.

use serde_json::{Value, json};

use super::{Head, arguments, call_item, message_item, reasoning_item, status, text_part};
use crate::error::ApiError;
use crate::ids;
use crate::pipe::Part;
use crate::run::{Ended, Piece, Reason};
use crate::stream::{Out, Wire};

/// The item that is open.
struct Open {
    thinking: bool,
    id: String,
    text: String,
}

/// Writes one response.
pub struct ResponseWire {
    head: Head,
    prompt_tokens: usize,
    /// Events so far.
    events: u64,
    /// Items that are complete.
    output: Vec<Value>,
    open: Option<Open>,
    end: Option<Ended>,
}

impl ResponseWire {
    /// A response that has not begun.
    pub fn new(head: Head, prompt_tokens: usize) -> Self {
        Self { head, prompt_tokens, events: 0, output: Vec::new(), open: None, end: None }
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut Out) {
        data["type"] = name.into();
        data["sequence_number"] = self.events.into();
        self.events += 1;
        out.event(name, &data);
    }

    /// An event about the item that is open.
    fn about_item(&mut self, name: &str, item: &str, mut data: Value, out: &mut Out) {
        data["item_id"] = item.into();
        data["output_index"] = self.output.len().into();
        self.event(name, data, out);
    }

    fn item(&mut self, name: &str, item: Value, out: &mut Out) {
        let data = json!({"output_index": self.output.len(), "item": item});
        self.event(name, data, out);
    }

    /// Makes sure that an item of this kind is open, and adds to it.
    fn add(&mut self, thinking: bool, text: &str, out: &mut Out) {
        if self.open.as_ref().is_none_or(|open| open.thinking != thinking) {
            self.close("completed", out);
            let id = ids::random();
            let mut item = match thinking {
                true => reasoning_item(&id, "", "in_progress"),
                false => message_item(&id, "", "in_progress"),
            };
            item["content"] = json!([]);
            self.item("response.output_item.added", item, out);
            let part = if thinking { json!({"type": "reasoning_text", "text": ""}) } else { text_part("") };
            let id = format!("{}_{id}", if thinking { "rs" } else { "msg" });
            self.about_item(
                "response.content_part.added",
                &id,
                json!({"content_index": 0, "part": part}),
                out,
            );
            self.open = Some(Open { thinking, id, text: String::new() });
        }
        let Some(open) = &mut self.open else { return };
        open.text.push_str(text);
        let id = open.id.clone();
        match thinking {
            true => {
                let data = json!({"content_index": 0, "delta": text});
                self.about_item("response.reasoning_text.delta", &id, data, out);
            }
            false => {
                let data = json!({"content_index": 0, "delta": text, "logprobs": []});
                self.about_item("response.output_text.delta", &id, data, out);
            }
        }
    }

    /// Ends the item that is open.
    fn close(&mut self, status: &str, out: &mut Out) {
        let Some(Open { thinking, id, text }) = self.open.take() else { return };
        let bare = id.split_once('_').map_or("", |(_, bare)| bare);
        let (part, item) = match thinking {
            true => {
                let data = json!({"content_index": 0, "text": text});
                self.about_item("response.reasoning_text.done", &id, data, out);
                (json!({"type": "reasoning_text", "text": text}), reasoning_item(bare, &text, "completed"))
            }
            false => {
                let data = json!({"content_index": 0, "text": text, "logprobs": []});
                self.about_item("response.output_text.done", &id, data, out);
                (text_part(&text), message_item(bare, &text, status))
            }
        };
        self.about_item("response.content_part.done", &id, json!({"content_index": 0, "part": part}), out);
        self.item("response.output_item.done", item.clone(), out);
        self.output.push(item);
    }

    fn response(&self) -> Value {
        json!({"response": self.head.response(self.output.clone(), self.end.as_ref(), self.prompt_tokens)})
    }
}

impl Wire for ResponseWire {
    fn begin(&mut self, out: &mut Out) {
        self.event("response.created", self.response(), out);
        self.event("response.in_progress", self.response(), out);
    }

    fn piece(&mut self, _: usize, piece: Piece, out: &mut Out) {
        match piece {
            Piece::Delta(delta) => {
                if !delta.reasoning.is_empty() {
                    self.add(true, &delta.reasoning, out);
                }
                for part in delta.parts {
                    match part {
                        Part::Text(text) => self.add(false, &text, out),
                        Part::Call(call) => {
                            self.close("completed", out);
                            let (id, text) = (format!("fc_{}", call.id), arguments(&call));
                            self.item("response.output_item.added", call_item(&call, "", "in_progress"), out);
                            let data = json!({"delta": text});
                            self.about_item("response.function_call_arguments.delta", &id, data, out);
                            let data = json!({"arguments": text, "name": call.name});
                            self.about_item("response.function_call_arguments.done", &id, data, out);
                            let item = call_item(&call, &text, "completed");
                            self.item("response.output_item.done", item.clone(), out);
                            self.output.push(item);
                        }
                    }
                }
            }
            Piece::End(end) => self.end = Some(end),
            Piece::Queued { .. } | Piece::Started { .. } | Piece::Progress { .. } | Piece::Failed(_) => {}
        }
    }

    fn end(&mut self, out: &mut Out) {
        let cut = self.end.as_ref().is_some_and(|end| end.reason == Reason::Length);
        self.close(status(cut), out);
        let name = if cut { "response.incomplete" } else { "response.completed" };
        self.event(name, self.response(), out);
    }

    fn fail(&mut self, error: &ApiError, out: &mut Out) {
        let mut data = self.response();
        data["response"]["status"] = "failed".into();
        let code = if error.status.as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        data["response"]["error"] = json!({"code": code, "message": error.message});
        self.event("response.failed", data, out);
    }
}
