//! A conversation as the model saw it: the messages for the template, the token ids for the KV cache.
//!
//! What the model generated is kept as it generated it, think block included, and never encoded again: text
//! need not encode to the ids it came from, and every id that changes costs its KV rows. So a new turn is the
//! old ids and then whatever the template adds after the old messages.

use forebay_text::template::Role;
use forebay_text::{ChatMessage, RenderOptions};

use serde_json::{Value, json};

use crate::answer::{Answer, Form};
use crate::failure::Failure;
use crate::load::TextSide;

/// Messages and ids so far.
pub struct Conversation {
    system: Option<String>,
    /// Turns of user and assistant.
    turns: Vec<ChatMessage>,
    /// Every token of the conversation; empty when it must be encoded anew.
    ids: Vec<u32>,
    think: bool,
}

/// A new turn, ready to be answered.
pub struct Prompt {
    /// The whole conversation up to the place of the answer.
    pub ids: Vec<u32>,
    /// The form of the answer.
    pub form: Form,
}

impl Conversation {
    /// An empty conversation.
    pub fn new(system: Option<String>, think: bool) -> Self {
        Self { system, turns: Vec::new(), ids: Vec::new(), think }
    }

    /// Whether nothing has been said.
    pub fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }

    /// Messages so far, instructions apart.
    pub fn turns(&self) -> usize {
        self.turns.len()
    }

    /// What is kept of it.
    pub fn talk(&self) -> Talk {
        let Self { system, turns, ids, think } = self;
        let (system, turns, ids, think) = (system.clone(), turns.clone(), ids.clone(), *think);
        Talk { conversation: Self { system, turns, ids, think } }
    }

    /// Tokens so far.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// The instructions.
    pub fn system(&self) -> Option<&str> {
        self.system.as_deref()
    }

    /// Changes the instructions. They come first, so everything after them is encoded anew.
    pub fn set_system(&mut self, text: &str) {
        self.system = Some(text.to_owned());
        self.ids.clear();
    }

    /// The same conversation without its first `turns` messages of the user and their answers.
    pub fn without_oldest(&self, turns: usize) -> Self {
        let rest = self.turns.get(2 * turns..).unwrap_or_default().to_vec();
        Self { turns: rest, ..Self::new(self.system.clone(), self.think) }
    }

    /// Forgets what was said, but not the instructions.
    pub fn clear(&mut self) {
        self.turns.clear();
        self.ids.clear();
    }

    /// The messages, instructions first.
    pub fn messages(&self) -> Vec<ChatMessage> {
        let system = self.system.iter().map(|text| ChatMessage::text(Role::System, text.as_str()));
        system.chain(self.turns.iter().cloned()).collect()
    }

    /// The conversation with `user` said next.
    pub fn prompt(&self, user: &str, text: &TextSide) -> Result<Prompt, Failure> {
        let mut messages = self.messages();
        let options = |add_generation_prompt| RenderOptions {
            enable_thinking: Some(self.think),
            add_generation_prompt,
            ..RenderOptions::default()
        };
        let before = match self.ids.is_empty() {
            true => None,
            false => text.template.render(&messages, &options(false)).ok(),
        };
        messages.push(ChatMessage::text(Role::User, user));
        let full = text.template.render(&messages, &options(true))?;
        let form = Form::of(&full);
        let ids = match before.and_then(|before| full.after(&before)) {
            Some(new) => [self.ids.as_slice(), &text.tokenizer.encode_rendered(&new)?].concat(),
            // A template that rewrites earlier turns: then so do we.
            None => text.tokenizer.encode_rendered(&full)?,
        };
        Ok(Prompt { ids, form })
    }

    /// Takes in the answer to a prompt made from `user`.
    pub fn answered(&mut self, user: &str, prompt: Prompt, answer: &Answer) {
        self.turns.push(ChatMessage::text(Role::User, user));
        self.turns.push(ChatMessage::text(Role::Assistant, answer.content.as_str()));
        self.ids = prompt.ids;
        self.ids.extend(answer.tokens.iter().map(|token| token.id));
    }
}

/// A conversation as it is kept on disk.
pub struct Talk {
    conversation: Conversation,
}

impl Talk {
    /// What [`to_json`](Self::to_json) made; `None` if it is something else.
    pub fn from_json(value: &Value) -> Option<Self> {
        let system = match &value["system"] {
            Value::Null => None,
            text => Some(text.as_str()?.to_owned()),
        };
        let mut turns = Vec::new();
        for turn in value["turns"].as_array()? {
            turns.push(match (turn["user"].as_str(), turn["assistant"].as_str()) {
                (Some(text), None) => ChatMessage::text(Role::User, text),
                (None, Some(text)) => ChatMessage::text(Role::Assistant, text),
                _ => return None,
            });
        }
        let ids = value["ids"].as_array()?.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
        let ids = ids.collect::<Option<Vec<u32>>>()?;
        let think = value["think"].as_bool()?;
        Some(Self { conversation: Conversation { system, turns, ids, think } })
    }

    /// For a file.
    pub fn to_json(&self) -> Value {
        let Conversation { system, turns, ids, think } = &self.conversation;
        let turns: Vec<Value> = turns.iter().map(|turn| json!({turn.role.name(): turn.content})).collect();
        json!({"system": system, "think": think, "turns": turns, "ids": ids})
    }

    /// The conversation, to go on with. Other instructions, or thinking where there was none, come first or lie
    /// between: then everything is encoded anew.
    pub fn go_on(self, system: Option<String>, think: bool) -> Conversation {
        let mut conversation = self.conversation;
        if let Some(text) = system.filter(|text| conversation.system() != Some(text)) {
            conversation.set_system(&text);
        }
        if conversation.think != think {
            conversation.think = think;
            conversation.ids.clear();
        }
        conversation
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_engine::{Finish, Stats, Token};
    use std::path::Path;

    fn demo() -> TextSide {
        TextSide::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")).ok().unwrap()
    }

    fn answer(ids: Vec<u32>, content: &str) -> Answer {
        let (reasoning, finish, stats) = (String::new(), Finish::Stop, Stats::default());
        let tokens = ids.into_iter().map(|id| Token { id, logprobs: None }).collect();
        Answer { tokens, content: content.to_owned(), reasoning, finish, stats }
    }

    #[test]
    fn a_turn_is_the_generated_ids_and_what_the_template_adds() {
        let text = demo();
        let mut conversation = Conversation::new(Some("Be brief.".to_owned()), false);
        let first = conversation.prompt("What is 2+2?", &text).unwrap();
        // "2+2=4." in single bytes: not what encoding gives, so re-encoding would be seen.
        let generated: Vec<u32> =
            "2+2=4.".bytes().map(|b| text.tokenizer.id_of(&char::from(b).to_string()).unwrap()).collect();
        let odd = [&generated[..], &text.tokenizer.encode_raw("Yes")].concat();
        let kept = [first.ids.as_slice(), &odd].concat();
        conversation.answered("What is 2+2?", first, &answer(odd, "2+2=4.Yes"));
        let second = conversation.prompt("And 3+3?", &text).unwrap();
        assert_eq!(second.ids[..kept.len()], kept);
        let rest = text.tokenizer.decode_bytes(&second.ids[kept.len()..]);
        assert_eq!(String::from_utf8(rest).unwrap(), "<|user|>And 3+3?<|assistant|><think></think>");
        assert_eq!(second.form, Form::Turn { thinking: false });
    }

    #[test]
    fn thinking_stays_in_the_ids_and_new_instructions_encode_anew() {
        let text = demo();
        let mut conversation = Conversation::new(None, true);
        let first = conversation.prompt("Hi", &text).unwrap();
        assert_eq!(first.form, Form::Turn { thinking: true });
        let generated = text.tokenizer.encode_raw("Hm.</think>Hello");
        let kept = [first.ids.as_slice(), &generated].concat();
        conversation.answered("Hi", first, &answer(generated, "Hello"));
        let second = conversation.prompt("Bye", &text).unwrap();
        assert_eq!(second.ids[..kept.len()], kept);

        conversation.set_system("Be kind.");
        let anew = conversation.prompt("Bye", &text).unwrap();
        let shown = String::from_utf8(text.tokenizer.decode_bytes(&anew.ids)).unwrap();
        assert!(
            shown.contains("<|system|>Be kind.<|user|>Hi<|assistant|><think></think>Hello<|user|>Bye"),
            "{shown}"
        );
        conversation.clear();
        assert!(conversation.is_empty() && conversation.system() == Some("Be kind."));
    }
}
