//! What every request can see: the model, its scheduler, and the settings of the server.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_engine::{Sampling, Scheduler};
use forebay_text::tokenizer::EncodeError;
use forebay_text::{AnswerIds, ChatTemplate, RenderedPrompt, StopSet, Tokenizer, Turn};

use crate::auth::Keys;
use crate::body::Bodies;
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
    /// Room for what clients send.
    pub bodies: Bodies,
    /// Whether the end has begun.
    pub ending: AtomicBool,
    answers: Answers,
}

impl App {
    /// The state of a server that has answered nothing yet.
    pub fn new(model: Model, scheduler: Scheduler, settings: Settings) -> Self {
        Self {
            model,
            scheduler,
            bodies: Bodies::new(settings.max_body),
            settings,
            metrics: Arc::default(),
            grammars: Grammars::default(),
            jobs: Err("this server was started without a folder for them".to_owned()),
            ending: AtomicBool::new(false),
            answers: Answers::default(),
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
        self.answers.clone()
    }
}

/// A handle on the ids of earlier answers. The engine's thread remembers while other threads encode: nothing that takes
/// time is done while they are locked.
#[derive(Clone, Default)]
pub struct Answers(Arc<Mutex<AnswerIds>>);

impl Answers {
    /// The ids of a prompt, those of an earlier answer in their place.
    pub fn encode(&self, prompt: &RenderedPrompt, tokenizer: &Tokenizer) -> Result<Vec<u32>, EncodeError> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Ok(known.encode(prompt, tokenizer)?.ids)
    }

    /// Remembers that `answer` was generated after `prompt`, whose ids were `prompt_ids`.
    pub fn remember(
        &self,
        prompt: RenderedPrompt,
        prompt_ids: &[u32],
        answer: &[u32],
        tokenizer: &Tokenizer,
    ) {
        let turn = Turn::new(prompt, prompt_ids, answer, tokenizer);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remember(turn);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn an_answer_is_remembered_while_another_prompt_is_encoded() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
        let tokenizer = Tokenizer::from_file(&file).unwrap();
        let mut prompt = RenderedPrompt::new();
        prompt.push_text("Hi ");
        let answers = Answers::default();
        // Whoever encodes has what was known when it began, and holds nothing that others wait for.
        let known = answers.0.lock().unwrap().clone();
        answers.remember(prompt.clone(), &[1, 2], &tokenizer.encode_raw("there"), &tokenizer);
        prompt.push_text("there");
        assert_eq!(known.encode(&prompt, &tokenizer).unwrap().known, 0);
        let ids = answers.encode(&prompt, &tokenizer).unwrap();
        assert_eq!(ids[..2], [1, 2]);
        assert!(answers.0.try_lock().is_ok());
    }
}
