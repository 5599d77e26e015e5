//! A rendered conversation, with control tokens kept apart from text.
//!
//! A control token (`<|user|>`, `[gMASK]`, ...) in a rendered prompt is a [`PromptPart::Control`], put there by
//! the template; everything else, whoever wrote it, is [`PromptPart::Text`] and is encoded with control tokens
//! switched off. So no text in a message, tool description or tool result can end a turn or open another one,
//! whole, in pieces, or joined from several fields: there is nothing to escape and nothing to guess.

/// One part of a [`RenderedPrompt`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PromptPart {
    /// Text. Added tokens that are content (`<think>`, `<tool_call>`) are active in it, control tokens are not.
    Text(String),
    /// The literal text of one control token that the template emitted.
    Control(String),
}

impl PromptPart {
    /// Its text.
    pub fn content(&self) -> &str {
        match self {
            PromptPart::Text(text) | PromptPart::Control(text) => text,
        }
    }
}

/// What a chat template makes of a conversation. Text parts never follow one another: they are joined, so that
/// the encoder cuts text exactly where it would cut the whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RenderedPrompt {
    parts: Vec<PromptPart>,
}

impl RenderedPrompt {
    /// An empty prompt.
    pub fn new() -> Self {
        Self::default()
    }

    /// Appends text.
    pub fn push_text(&mut self, text: &str) {
        if text.is_empty() {
            return;
        }
        match self.parts.last_mut() {
            Some(PromptPart::Text(last)) => last.push_str(text),
            _ => self.parts.push(PromptPart::Text(text.to_owned())),
        }
    }

    /// Appends a control token, given by its literal text.
    pub fn push_control(&mut self, content: &str) {
        self.parts.push(PromptPart::Control(content.to_owned()));
    }

    /// Appends a part.
    pub fn push(&mut self, part: &PromptPart) {
        match part {
            PromptPart::Text(text) => self.push_text(text),
            PromptPart::Control(content) => self.push_control(content),
        }
    }

    /// What this has behind `before`; `None` if it does not begin with it, or `before` is empty.
    pub fn after(&self, before: &RenderedPrompt) -> Option<RenderedPrompt> {
        let (last, same) = before.parts.split_last()?;
        if self.parts.get(..same.len())? != same {
            return None;
        }
        let mut rest = RenderedPrompt::new();
        match (last, self.parts.get(same.len())?) {
            (PromptPart::Text(old), PromptPart::Text(new)) => rest.push_text(new.strip_prefix(old.as_str())?),
            (old, new) if old == new => {}
            _ => return None,
        }
        self.parts[before.parts.len()..].iter().for_each(|part| rest.push(part));
        Some(rest)
    }

    /// The parts in order.
    pub fn parts(&self) -> &[PromptPart] {
        &self.parts
    }

    /// How many control tokens the prompt holds.
    pub fn control_count(&self) -> usize {
        self.parts.iter().filter(|part| matches!(part, PromptPart::Control(_))).count()
    }

    /// The prompt as one string, for people and logs. Encoding it again would activate control tokens that
    /// users typed: use [`crate::Tokenizer::encode_rendered`].
    pub fn text(&self) -> String {
        self.parts.iter().map(PromptPart::content).collect()
    }

    /// Inserts `addition` right after the first occurrence of `block` inside a text part; false when no text
    /// part holds it.
    pub(crate) fn insert_after(&mut self, block: &str, addition: &str) -> bool {
        for part in &mut self.parts {
            if let PromptPart::Text(text) = part
                && let Some(start) = text.find(block)
            {
                text.insert_str(start + block.len(), addition);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_texts_are_one_part() {
        let mut prompt = RenderedPrompt::new();
        prompt.push_control("<|user|>");
        prompt.push_text("a");
        prompt.push_text("");
        prompt.push_text("b");
        prompt.push_control("<|assistant|>");
        assert_eq!(
            prompt.parts(),
            [
                PromptPart::Control("<|user|>".into()),
                PromptPart::Text("ab".into()),
                PromptPart::Control("<|assistant|>".into()),
            ]
        );
        assert_eq!(prompt.text(), "<|user|>ab<|assistant|>");
        assert_eq!(prompt.control_count(), 2);
    }

    #[test]
    fn a_prompt_that_does_not_continue_the_other_has_nothing_behind_it() {
        let prompt = |parts: &[(&str, bool)]| {
            let mut prompt = RenderedPrompt::new();
            for (text, control) in parts {
                if *control { prompt.push_control(text) } else { prompt.push_text(text) }
            }
            prompt
        };
        let old = prompt(&[("<a>", true), ("x", false)]);
        let longer = prompt(&[("<a>", true), ("xy", false), ("<b>", true)]);
        assert_eq!(longer.after(&old).unwrap().text(), "y<b>");
        assert_eq!(old.after(&old).unwrap().text(), "");
        for other in [
            prompt(&[]),
            prompt(&[("<a>", true)]),
            prompt(&[("<b>", true), ("x", false)]),
            prompt(&[("<a>", true), ("z", false)]),
        ] {
            assert!(other.after(&old).is_none());
        }
    }

    #[test]
    fn insertion_looks_only_inside_text() {
        let mut prompt = RenderedPrompt::new();
        prompt.push_control("ab");
        prompt.push_text("xaby ab");
        assert!(prompt.insert_after("ab", "!"));
        assert_eq!(prompt.text(), "abxab!y ab");
        assert!(!prompt.insert_after("zz", "!"));
    }
}
