//! One answer: tokens from the engine become text while they arrive.

use std::io::{self, IsTerminal};
use std::ops::ControlFlow;

use forebay_core::CancelToken;
use forebay_engine::{Event, Finish, Request, Sampling, Session, Stats, Token};
use forebay_text::reasoning::THINK_OPEN;
use forebay_text::{ReasoningDelta, ReasoningSplitter, RenderedPrompt, StopMatcher, Utf8Stream};

use crate::console::{self, Output};
use crate::failure::Failure;
use crate::load::Loaded;
use crate::progress::{Progress, Unit};
use crate::recordings::Recordings;
use crate::structure::Structure;

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
    /// Texts in front of which the answer ends.
    pub stop: &'a [String],
    /// What the answer may be.
    pub structure: Option<&'a Structure>,
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
    /// Its tokens: those that say a stop string, and those of the think block, among them.
    pub tokens: Vec<Token>,
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
    /// Looks at the answer proper only: no stop string cuts reasoning short.
    stop: StopMatcher,
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
        let mut last = self.splitter.as_mut().map(ReasoningSplitter::finish).unwrap_or_default();
        last.content = self.stop.push(&last.content) + &self.stop.finish();
        self.deliver(last)
    }

    fn split(&mut self, text: String) -> Result<(), Failure> {
        let mut delta = match &mut self.splitter {
            Some(splitter) => splitter.push(&text),
            None => ReasoningDelta { content: text, ..ReasoningDelta::default() },
        };
        delta.content = self.stop.push(&delta.content);
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
    let stop = StopMatcher::new(ask.stop.iter().cloned())?;
    let mut constraint = ask.structure.map(|structure| structure.constraint(ask.form));
    let mut pipe = Pipe { utf8: Utf8Stream::new(), splitter, stop, content, reasoning, on_text };
    let mut tokens = Vec::new();
    let mut failed = None;
    let mut progress = Some(Progress::start("reading the prompt", Unit::Tokens, ask.prompt.len() as u64));
    let tokenizer = &model.text.tokenizer;
    recordings.prompt_ends(session.tokens().len() + session.pending().iter().count() + ask.prompt.len());
    let (trace, mut on_pass) = recordings.watch();
    let on_event = &mut |event| {
        match event {
            Event::Prefill { done, total, read, .. } => {
                let read = read.unwrap_or_default();
                progress.iter().for_each(|line| line.update_read(done as u64, total as u64, read));
            }
            Event::Pass(stats) => on_pass(&stats),
            Event::Token(token) => {
                if tokens.is_empty() {
                    // The old line goes before the new one comes.
                    progress = None;
                    progress = ask.count.then(|| Progress::start("answering", Unit::Tokens, 0));
                }
                let pushed = pipe.push(tokenizer.token_bytes(token.id).unwrap_or_default());
                tokens.push(token);
                progress.iter().for_each(|line| line.update(tokens.len() as u64, 0));
                failed = pushed.err();
                if failed.is_some() || pipe.stop.found().is_some() {
                    return ControlFlow::Break(());
                }
            }
        }
        ControlFlow::Continue(())
    };
    let request = Request {
        prompt: ask.prompt,
        max_tokens: ask.max_tokens,
        sampling: ask.sampling.clone(),
        stops: model.stops.ids(),
    };
    let constraint = constraint.as_deref_mut();
    let outcome = session.generate_within(&mut model.engine, &request, constraint, cancel, trace, on_event);
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
    Ok(Answer { tokens, content, reasoning, finish: outcome.finish, stats: outcome.stats })
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
