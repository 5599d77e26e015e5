//! What every request can see: the model, its scheduler, and the settings of the server.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forebay_engine::{Sampling, Scheduler};
use forebay_text::{AnswerIds, ChatTemplate, StopSet, Tokenizer};

use crate::auth::Keys;
use crate::cors::Origins;
use crate::grammars::Grammars;
use crate::jobs::Jobs;
use crate::metrics::Metrics;
use crate::tls::Tls;

/// What is known of the model that is served.
pub struct Model {
    /// The name that clients use.
    pub id: String,
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to prompts.
    pub template: ChatTemplate,
    /// Tokens that end an answer.
    pub stops: StopSet,
    /// How tokens are chosen where a request does not say.
    pub sampling: Sampling,
    /// Positions of a sequence: prompt and answer together.
    pub context: usize,
    /// The family, as its config calls it.
    pub family: String,
    /// Bytes of its weight files.
    pub bytes: u64,
    /// When it was opened, in seconds since 1970.
    pub created: u64,
}

/// How the server treats its clients.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Keys that open the door; without any it is open.
    pub keys: Keys,
    /// Web pages that may ask.
    pub origins: Origins,
    /// Whether only names of this machine are taken for its own (against web pages that rebind a name to it).
    pub local_names_only: bool,
    /// Most tokens of an answer where a request does not say; `None` goes on until the context is full.
    pub max_tokens: Option<usize>,
    /// Whether the model thinks where a request does not say.
    pub think: bool,
    /// Most bytes of a request's body.
    pub max_body: usize,
    /// Most connections at a time.
    pub max_connections: usize,
    /// Until the head of a request is there, and then its body; and until a client takes what is sent.
    pub patience: Duration,
    /// Between two signs of life in a stream that has nothing to say.
    pub keep_alive: Duration,
    /// For answers that are under way when the end comes.
    pub drain: Duration,
    /// What connections are encrypted with; `None` leaves them plain.
    pub tls: Option<Arc<Tls>>,
}

/// The server's state.
pub struct App {
    /// The model.
    pub model: Model,
    /// Its engine.
    pub scheduler: Scheduler,
    /// How clients are treated.
    pub settings: Settings,
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// What answers may be.
    pub grammars: Grammars,
    /// Files and batches, or why there are none.
    pub jobs: Result<Jobs, String>,
    /// Whether the end has begun.
    pub ending: AtomicBool,
    answers: Arc<Mutex<AnswerIds>>,
}

impl App {
    /// The state of a server that has answered nothing yet.
    pub fn new(model: Model, scheduler: Scheduler, settings: Settings) -> Self {
        Self {
            model,
            scheduler,
            settings,
            metrics: Arc::default(),
            grammars: Grammars::default(),
            jobs: Err("this server was started without a folder for them".to_owned()),
            ending: AtomicBool::new(false),
            answers: Arc::default(),
        }
    }

    /// With files and batches, or the reason why there are none.
    pub fn with_jobs(self, jobs: Result<Jobs, String>) -> Self {
        Self { jobs, ..self }
    }

    /// The names of all models that are served.
    pub fn served_names(&self) -> Vec<String> {
        vec![self.model.id.clone()]
    }

    /// The ids of earlier answers.
    pub fn answers(&self) -> Answers {
        Answers(Arc::clone(&self.answers))
    }
}

/// A handle on the ids of earlier answers.
#[derive(Clone)]
pub struct Answers(Arc<Mutex<AnswerIds>>);

impl Answers {
    /// Looks, or remembers.
    pub fn lock(&self) -> MutexGuard<'_, AnswerIds> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
