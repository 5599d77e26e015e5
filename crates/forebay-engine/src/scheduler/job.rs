//! What is asked for, and what is told of it.

use std::fmt;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use forebay_core::{CancelToken, Constraint};

use crate::choose::Token;
use crate::sample::{SampleError, Sampling};
use crate::session::{Finish, GenerateError, Outcome, Stats};

/// Which job comes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    #[default]
    Interactive,
    /// It waits until nobody waits.
    Batch,
}

/// A name for a job, for as long as the scheduler lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct JobId(pub(super) u64);

impl JobId {
    /// Jobs are numbered as they come.
    pub fn number(self) -> u64 {
        self.0
    }
}

/// Is told what becomes of a job, in order, from other threads. It should not block: whoever else is served waits too.
/// `Break` at a [token](JobEvent::Token) ends the answer there; what it returns for other events is not looked at.
pub type OnJobEvent = dyn FnMut(JobEvent) -> ControlFlow<()> + Send;

/// A request.
pub struct Job {
    /// The whole conversation; what is known of its beginning is not computed again.
    pub prompt: Vec<u32>,
    /// Most tokens of the answer; `None` goes on until the context is full.
    pub max_tokens: Option<usize>,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the answer; never told and never kept.
    pub stops: Vec<u32>,
    /// What the answer may be.
    pub constraint: Option<Box<dyn Constraint + Send>>,
    /// Which job comes first.
    pub priority: Priority,
    /// Once raised, the job ends within a layer.
    pub cancel: CancelToken,
    /// Is told what becomes of it.
    pub events: Box<OnJobEvent>,
}

impl Job {
    /// An error if it can never be served by a model with this context and vocabulary.
    pub(super) fn check(&self, context: usize, vocab: usize) -> Result<(), Refused> {
        if self.prompt.is_empty() {
            return Err(Refused::NoTokens);
        }
        if self.prompt.len() > context {
            return Err(Refused::TooLong { tokens: self.prompt.len(), context });
        }
        if let Some(&token) = self.prompt.iter().find(|&&token| token as usize >= vocab) {
            return Err(Refused::Token { token, vocab });
        }
        self.sampling.check()?;
        Ok(self.sampling.check_tokens(vocab)?)
    }
}

/// What becomes of a job.
#[allow(clippy::large_enum_variant, reason = "one a pass, handed on and dropped")]
#[derive(Debug)]
pub enum JobEvent {
    /// It waits for this many others.
    Queued {
        /// Jobs that run or come first.
        ahead: usize,
    },
    /// Its turn has come.
    Started {
        /// Tokens of its prompt that need not be computed.
        reused: usize,
        /// What is expected of the rest.
        forecast: Forecast,
    },
    /// So much of the prompt has been computed.
    Prefill {
        /// Tokens done, of those that were not reused.
        done: usize,
        /// Tokens to do.
        total: usize,
        /// Bytes of experts that were read for them, where that is known.
        read: Option<u64>,
        /// Time that the rest will take, if it takes as long as what is done did.
        left: Option<Duration>,
    },
    /// The next token of the answer.
    Token(Token),
    /// The answer is complete. Nothing comes after it.
    Done(Outcome),
    /// There is no answer, or no more of it. Nothing comes after it.
    Failed(JobError),
}

/// What is expected, by what was measured; `None` where nothing was.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Until its turn comes.
    pub wait: Option<Duration>,
    /// Computing the prompt.
    pub prefill: Option<Duration>,
    /// From the moment its turn comes to the first token.
    pub first_token: Option<Duration>,
    /// Behind the first token.
    pub tokens_per_second: Option<f64>,
}

/// Why a job is not taken on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Refused {
    /// There is nothing to go on from.
    #[error("the prompt has no tokens; send some text")]
    NoTokens,
    /// It does not fit.
    #[error(
        "the prompt has {tokens} tokens and the context has room for {context}; send less, or start with a larger --context"
    )]
    TooLong {
        /// Tokens of the prompt.
        tokens: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A token that the model does not have.
    #[error("the prompt names token {token}, and the model has the tokens 0 to {}", .vocab - 1)]
    Token {
        /// The token.
        token: u32,
        /// Tokens of the model.
        vocab: usize,
    },
    /// A sampling setting is not possible.
    #[error(transparent)]
    Sampling(#[from] SampleError),
    /// Too many wait.
    #[error("{waiting} requests are waiting already; try again in {} s", .retry_after.as_secs().max(1))]
    QueueFull {
        /// Jobs that wait.
        waiting: usize,
        /// When it may be worth another try.
        retry_after: Duration,
    },
    /// The program is ending.
    #[error("the server is shutting down and takes nothing new; try again when it is back")]
    Draining,
    /// The engine failed earlier.
    #[error("the engine stopped after a fault ({reason}); restart the server, and please report this")]
    EngineFailed {
        /// What happened.
        reason: String,
    },
}

/// Why a job that was taken on has no complete answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum JobError {
    /// It could not be computed.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// The engine failed; no other job is served either.
    #[error("the engine stopped after a fault ({reason}); restart the server, and please report this")]
    EngineFailed {
        /// What happened.
        reason: String,
    },
    /// The program is ending.
    #[error("the server is shutting down; send the request again when it is back")]
    ShuttingDown,
}

/// Tells a job's events, and exactly one that says how it ended.
pub(super) struct Events {
    on_event: Box<OnJobEvent>,
    ended: bool,
    /// The listener panicked, and is not called again: nobody knows what state it is in.
    deaf: bool,
}

impl Events {
    pub fn new(on_event: Box<OnJobEvent>) -> Self {
        Self { on_event, ended: false, deaf: false }
    }

    /// Tells what is not the end. `None` if the listener panics, or did before: then it hears nothing more.
    pub fn tell(&mut self, event: JobEvent) -> Option<ControlFlow<()>> {
        if self.deaf {
            return None;
        }
        let told = catch_unwind(AssertUnwindSafe(|| (self.on_event)(event))).ok();
        self.deaf = told.is_none();
        told
    }

    pub fn done(&mut self, outcome: Outcome) {
        self.end(JobEvent::Done(outcome));
    }

    pub fn failed(&mut self, error: JobError) {
        self.end(JobEvent::Failed(error));
    }

    /// It was cancelled before anything was computed.
    pub fn cancelled(&mut self) {
        self.done(Outcome { finish: Finish::Cancelled, stats: Stats::default() });
    }

    fn end(&mut self, event: JobEvent) {
        if !std::mem::replace(&mut self.ended, true) {
            // A listener that panics has heard it.
            _ = self.tell(event);
        }
    }
}

impl Drop for Events {
    /// Nobody is left without an end, whatever happened.
    fn drop(&mut self) {
        self.failed(JobError::EngineFailed { reason: "the job was lost".to_owned() });
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("ended", &self.ended).finish_non_exhaustive()
    }
}
