//! One answer: tokens from the engine become text while they arrive.

use std::io::{self, IsTerminal};

use forebay_core::CancelToken;
use forebay_engine::{Event, Finish, Request, Sampling, Session, Stats};
use forebay_text::reasoning::THINK_OPEN;
use forebay_text::{ReasoningDelta, ReasoningSplitter, RenderedPrompt, Utf8Stream};

use crate::console::{self, Output};
use crate::failure::Failure;
use crate::load::Loaded;
use crate::progress::{Progress, Unit};
use crate::recordings::Recordings;

/// What to answer.
pub struct Ask<'a> {
    /// Tokens to append to the session.
    pub prompt: &'a [u32],
    /// Most tokens of the answer.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// What kind of text the answer is.
    pub form: Form,
    /// Whether to count tokens on standard error while the answer grows unseen.
    pub count: bool,
}

/// What kind of text an answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The continuation of a text: all of it is content.
    Raw,
    /// A turn of a conversation: there may be a think block in front.
    Turn {
        /// Whether the prompt opened the think block.
        thinking: bool,
    },
}

impl Form {
    /// The form of the answer to a rendered prompt.
    pub fn of(prompt: &RenderedPrompt) -> Self {
        Self::Turn { thinking: prompt.text().trim_end().ends_with(THINK_OPEN) }
    }
}

/// An answer and what it cost.
pub struct Answer {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// The answer proper.
    pub content: String,
    /// The text of the think block.
    pub reasoning: String,
    /// Why it ended.
    pub finish: Finish,
    /// What it cost.
    pub stats: Stats,
}

impl Answer {
    /// A sentence for an answer that did not end by itself.
    pub fn ending_note(&self, max_tokens: usize, context: usize) -> Option<String> {
        match self.finish {
            Finish::Length => {
                Some(format!("the answer was cut after {max_tokens} tokens; --max-tokens allows longer ones"))
            }
            Finish::Context => Some(format!(
                "the answer was cut because the context of {context} tokens is full; --context can enlarge it"
            )),
            _ => None,
        }
    }
}

/// Decodes, splits and passes on the text of one answer.
struct Pipe<'a> {
    utf8: Utf8Stream,
    /// `None` for raw text.
    splitter: Option<ReasoningSplitter>,
    content: String,
    reasoning: String,
    on_text: &'a mut dyn FnMut(&ReasoningDelta) -> Result<(), Failure>,
}

impl Pipe<'_> {
    fn push(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let text = self.utf8.push(bytes);
        self.split(text)
    }

    fn finish(&mut self) -> Result<(), Failure> {
        let text = self.utf8.finish();
        self.split(text)?;
        let last = self.splitter.as_mut().map(ReasoningSplitter::finish).unwrap_or_default();
        self.deliver(last)
    }

    fn split(&mut self, text: String) -> Result<(), Failure> {
        let delta = match &mut self.splitter {
            Some(splitter) => splitter.push(&text),
            None => ReasoningDelta { content: text, ..ReasoningDelta::default() },
        };
        self.deliver(delta)
    }

    fn deliver(&mut self, delta: ReasoningDelta) -> Result<(), Failure> {
        self.content.push_str(&delta.content);
        self.reasoning.push_str(&delta.reasoning);
        if delta == ReasoningDelta::default() { Ok(()) } else { (self.on_text)(&delta) }
    }
}

/// Appends the prompt to the session and generates the answer; `on_text` sees its text as it becomes certain
/// and the recordings what its passes choose and cost. An error of `on_text` ends the generation.
pub fn generate(
    model: &mut Loaded,
    session: &mut Session,
    ask: &Ask<'_>,
    cancel: &CancelToken,
    recordings: &mut Recordings,
    on_text: &mut dyn FnMut(&ReasoningDelta) -> Result<(), Failure>,
) -> Result<Answer, Failure> {
    let splitter = match ask.form {
        Form::Raw => None,
        Form::Turn { thinking } => Some(ReasoningSplitter::new(thinking)),
    };
    let (content, reasoning) = Default::default();
    let mut pipe = Pipe { utf8: Utf8Stream::new(), splitter, content, reasoning, on_text };
    let mut ids = Vec::new();
    let mut failed = None;
    let mut progress = Some(Progress::start("reading the prompt", Unit::Tokens, ask.prompt.len() as u64));
    let tokenizer = &model.text.tokenizer;
    recordings.prompt_ends(session.tokens().len() + session.pending().iter().count() + ask.prompt.len());
    let (trace, mut on_pass) = recordings.watch();
    let on_event = &mut |event| match event {
        Event::Prefill { done, total, read, .. } => {
            let read = read.unwrap_or_default();
            progress.iter().for_each(|line| line.update_read(done as u64, total as u64, read));
        }
        Event::Pass(stats) => on_pass(&stats),
        Event::Token(id) => {
            if ids.is_empty() {
                // The old line goes before the new one comes.
                progress = None;
                progress = ask.count.then(|| Progress::start("answering", Unit::Tokens, 0));
            }
            ids.push(id);
            progress.iter().for_each(|line| line.update(ids.len() as u64, 0));
            if let Err(failure) = pipe.push(tokenizer.token_bytes(id).unwrap_or_default()) {
                failed.get_or_insert(failure);
                cancel.cancel();
            }
        }
    };
    let request = Request {
        prompt: ask.prompt,
        max_tokens: ask.max_tokens,
        sampling: ask.sampling,
        stops: model.stops.ids(),
    };
    let outcome = session.generate(&mut model.engine, &request, cancel, trace, on_event);
    drop(progress);
    if let Some(failure) = failed {
        return Err(failure);
    }
    pipe.finish()?;
    let outcome = outcome?;
    if outcome.stats.non_finite_logits > 0 {
        let count = outcome.stats.non_finite_logits;
        console::note(&format!(
            "{count} logits were not finite numbers and were left out; the weights may be damaged"
        ));
    }
    let Pipe { content, reasoning, .. } = pipe;
    Ok(Answer { ids, content, reasoning, finish: outcome.finish, stats: outcome.stats })
}

/// Shows an answer while it arrives: content on standard output, reasoning on standard error.
pub struct Screen<'a> {
    out: &'a mut Output,
    styled: bool,
    reasoning_open: bool,
    line_open: bool,
}

impl<'a> Screen<'a> {
    /// A screen that has shown nothing yet.
    pub fn new(out: &'a mut Output) -> Self {
        Self { out, styled: console::stderr_is_styled(), reasoning_open: false, line_open: false }
    }

    /// Whether the user would see an answer grow.
    pub fn is_live() -> bool {
        io::stdout().is_terminal()
    }

    /// Shows more.
    pub fn show(&mut self, delta: &ReasoningDelta) -> Result<(), Failure> {
        if !delta.reasoning.is_empty() {
            let text = &delta.reasoning;
            // Each piece is styled by itself, so that an interruption leaves the terminal as it was.
            console::diagnose(&if self.styled { format!("\x1b[2m{text}\x1b[0m") } else { text.clone() });
            self.reasoning_open = true;
        }
        if !delta.content.is_empty() {
            self.close_reasoning();
            self.out.write(&delta.content)?;
            self.line_open = !delta.content.ends_with('\n');
        }
        Ok(())
    }

    /// Ends the last line, once.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.close_reasoning();
        if std::mem::take(&mut self.line_open) { self.out.write("\n") } else { Ok(()) }
    }

    fn close_reasoning(&mut self) {
        if std::mem::take(&mut self.reasoning_open) {
            console::diagnose("\n");
        }
    }
}
