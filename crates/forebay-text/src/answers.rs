//! The ids of earlier answers, for prompts that hold these answers as text again.
//!
//! Whoever sends a conversation sends text, and text need not encode to the ids that the model generated; every id
//! that changes costs its place in the KV cache, and all behind it. So the ids of answers are remembered with the
//! prompts that they followed, and put back where a new prompt continues the same conversation: also when spaces at
//! the ends of an answer, or around the end of its think block, were trimmed. A template that drops the think blocks of
//! earlier turns makes another conversation from there on, and is encoded as it stands.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::prompt::{PromptPart, RenderedPrompt};
use crate::reasoning::THINK_CLOSE;
use crate::tokenizer::{EncodeError, Tokenizer};

/// Answers that are remembered at most.
const MAX_ANSWERS: usize = 64;
/// Bytes of prompts and answers that are remembered at most.
const MAX_BYTES: usize = 16 << 20;

/// Answers of a conversation, or of several. A clone shares what it holds: it is cheap, and whoever encodes with one
/// keeps nobody from remembering more.
#[derive(Clone, Debug, Default)]
pub struct AnswerIds {
    /// The last ones, the newest last.
    turns: VecDeque<Arc<Turn>>,
    bytes: usize,
}

/// An answer, and what it followed.
#[derive(Debug)]
pub struct Turn {
    prompt: RenderedPrompt,
    /// Everything that was generated, think block included.
    answer: String,
    /// Of prompt and answer.
    ids: Vec<u32>,
}

impl Turn {
    /// `answer` was generated after `prompt`, whose ids were `prompt_ids`.
    pub fn new(prompt: RenderedPrompt, prompt_ids: &[u32], answer: &[u32], tokenizer: &Tokenizer) -> Self {
        let text = String::from_utf8_lossy(&tokenizer.decode_bytes(answer)).into_owned();
        Self { prompt, answer: text, ids: [prompt_ids, answer].concat() }
    }

    fn bytes(&self) -> usize {
        let prompt: usize = self.prompt.parts().iter().map(|part| part.content().len()).sum();
        prompt + self.answer.len() + 4 * self.ids.len()
    }
}

/// The ids of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedPrompt {
    /// All of them.
    pub ids: Vec<u32>,
    /// How many, from the first one on, are as they were run and generated before.
    pub known: usize,
}

impl AnswerIds {
    /// Remembers an answer. The oldest ones are forgotten where there are too many.
    pub fn remember(&mut self, turn: Turn) {
        self.bytes += turn.bytes();
        self.turns.push_back(Arc::new(turn));
        while self.turns.len() > MAX_ANSWERS || self.bytes > MAX_BYTES {
            let Some(oldest) = self.turns.pop_front() else { return };
            self.bytes -= oldest.bytes();
        }
    }

    /// The ids of `prompt`, those of a remembered answer in its place.
    ///
    /// # Errors
    /// As [`Tokenizer::encode_rendered`].
    pub fn encode(
        &self,
        prompt: &RenderedPrompt,
        tokenizer: &Tokenizer,
    ) -> Result<EncodedPrompt, EncodeError> {
        let continued = self.turns.iter().filter_map(|turn| Some((&turn.ids, continued(turn, prompt)?)));
        match continued.max_by_key(|(ids, _)| ids.len()) {
            Some((ids, rest)) => {
                let known = ids.len();
                let ids = [&ids[..], &tokenizer.encode_rendered(&rest)?].concat();
                Ok(EncodedPrompt { ids, known })
            }
            None => Ok(EncodedPrompt { ids: tokenizer.encode_rendered(prompt)?, known: 0 }),
        }
    }
}

/// What `prompt` has behind the prompt and answer of `turn`; `None` if it does not begin with them.
fn continued(turn: &Turn, prompt: &RenderedPrompt) -> Option<RenderedPrompt> {
    let behind = prompt.after(&turn.prompt)?;
    let (said, parts) = match behind.parts().split_first() {
        Some((PromptPart::Text(said), parts)) => (said.as_str(), parts),
        _ => ("", behind.parts()),
    };
    let mut rest = RenderedPrompt::new();
    rest.push_text(after_answer(said, &turn.answer)?);
    parts.iter().for_each(|part| rest.push(part));
    Some(rest)
}

/// The spaces that `said` has behind `answer`; `None` if it says something else.
fn after_answer<'s>(said: &'s str, answer: &str) -> Option<&'s str> {
    let same = said.split(THINK_CLOSE).map(str::trim).eq(answer.split(THINK_CLOSE).map(str::trim));
    let end = |text: &str| text.trim_end().len();
    let (said_end, answer_end) = (&said[end(said)..], &answer[end(answer)..]);
    same.then(|| said_end.strip_prefix(answer_end).unwrap_or(said_end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::{ChatMessage, ChatTemplate, RenderOptions, Role};
    use std::path::Path;

    fn demo() -> (Tokenizer, ChatTemplate) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let tokenizer = Tokenizer::from_file(&dir.join("tokenizer.json")).unwrap();
        let template = ChatTemplate::load(&dir, &tokenizer).unwrap();
        (tokenizer, template)
    }

    fn render(template: &ChatTemplate, said: &[(Role, &str)], thinking: bool) -> RenderedPrompt {
        let messages: Vec<_> = said.iter().map(|(role, text)| ChatMessage::text(*role, *text)).collect();
        let options = RenderOptions {
            enable_thinking: Some(thinking),
            add_generation_prompt: true,
            ..RenderOptions::default()
        };
        template.render(&messages, &options).unwrap()
    }

    /// `text` in single characters: not what encoding gives, so that encoding it again would be seen.
    fn odd(tokenizer: &Tokenizer, text: &str) -> Vec<u32> {
        text.chars().flat_map(|c| tokenizer.encode_raw(&c.to_string())).collect()
    }

    #[test]
    fn answers_keep_their_ids_also_where_they_come_back_trimmed() {
        let (tokenizer, template) = demo();
        let first = render(&template, &[(Role::User, "What is 2+2?")], false);
        let first_ids = tokenizer.encode_rendered(&first).unwrap();
        for generated in ["2+2=4.", " 2+2=4.\n\n", "\n2+2=4. "] {
            let mut answers = AnswerIds::default();
            let answer = odd(&tokenizer, generated);
            answers.remember(Turn::new(first.clone(), &first_ids, &answer, &tokenizer));
            let kept = [&first_ids[..], &answer].concat();
            let second = |said| {
                let talk = [(Role::User, "What is 2+2?"), (Role::Assistant, said), (Role::User, "And 3+3?")];
                answers.encode(&render(&template, &talk, false), &tokenizer).unwrap()
            };
            for said in ["2+2=4.", generated] {
                let found = second(said);
                assert_eq!(found.known, kept.len(), "{generated:?} as {said:?}");
                assert_eq!(found.ids[..found.known], kept);
                let rest = String::from_utf8(tokenizer.decode_bytes(&found.ids[found.known..])).unwrap();
                assert_eq!(rest, "<|user|>And 3+3?<|assistant|><think></think>");
            }
            for said in ["2+2=5.", "2+2=4", "2+2=4.!", ""] {
                let talk = [(Role::User, "What is 2+2?"), (Role::Assistant, said), (Role::User, "And 3+3?")];
                let rendered = render(&template, &talk, false);
                let found = second(said);
                assert_eq!(found.known, 0, "{said:?} was never said");
                assert_eq!(found.ids, tokenizer.encode_rendered(&rendered).unwrap());
            }
        }
    }

    /// The demo's template, as GLM-5.2's, leaves think blocks of earlier turns out.
    #[test]
    fn a_dropped_think_block_begins_anew_at_its_turn() {
        let (tokenizer, template) = demo();
        let mut answers = AnswerIds::default();
        let mut talk = vec![(Role::User, "Hi")];
        let first = render(&template, &talk, true);
        let first_ids = tokenizer.encode_rendered(&first).unwrap();
        // Without a thought there is nothing to drop.
        let hello = odd(&tokenizer, "</think>Hello");
        answers.remember(Turn::new(first, &first_ids, &hello, &tokenizer));
        let upto_hello = first_ids.len() + hello.len();

        talk.extend([(Role::Assistant, "Hello"), (Role::User, "Think")]);
        let second = render(&template, &talk, true);
        let encoded = answers.encode(&second, &tokenizer).unwrap();
        assert_eq!(encoded.known, upto_hello);
        let thought = odd(&tokenizer, "Hm.</think>Done");
        answers.remember(Turn::new(second, &encoded.ids, &thought, &tokenizer));

        talk.extend([(Role::Assistant, "Done"), (Role::User, "Bye")]);
        let third = answers.encode(&render(&template, &talk, true), &tokenizer).unwrap();
        assert_eq!(third.known, upto_hello, "from the turn that thought on, it is another conversation");
        // Where the block is kept, trimmed inside, nothing is lost.
        let mut kept = RenderedPrompt::new();
        kept.push_control("<|user|>");
        kept.push_text("Q");
        kept.push_control("<|assistant|>");
        kept.push_text("<think>");
        let ids = tokenizer.encode_rendered(&kept).unwrap();
        let generated = odd(&tokenizer, "Hm.\n</think>\n\nDone\n");
        answers.remember(Turn::new(kept.clone(), &ids, &generated, &tokenizer));
        kept.push_text("Hm.</think>Done");
        kept.push_control("<|user|>");
        let known = answers.encode(&kept, &tokenizer).unwrap().known;
        assert_eq!(known, ids.len() + generated.len());
    }

    #[test]
    fn what_is_remembered_is_bounded() {
        let (tokenizer, _) = demo();
        let mut answers = AnswerIds::default();
        for at in 0..100 {
            let mut prompt = RenderedPrompt::new();
            prompt.push_control("<|user|>");
            prompt.push_text(&format!("{at}").repeat(100_000));
            answers.remember(Turn::new(prompt, &[1, 2], &[3], &tokenizer));
            assert!(answers.turns.len() <= MAX_ANSWERS && answers.bytes <= MAX_BYTES);
            assert_eq!(answers.bytes, answers.turns.iter().map(|turn| turn.bytes()).sum::<usize>());
        }
        assert_eq!(answers.turns.len(), MAX_ANSWERS);
    }
}
