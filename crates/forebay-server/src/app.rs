//! What every request can see: its model, the one in memory, and the settings of the server.

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use forebay_engine::scheduler::{Health, Limits, SchedulerState, View};
use forebay_engine::{Priority, Sampling};
use forebay_text::tokenizer::EncodeError;
use forebay_text::{AnswerIds, ChatTemplate, RenderedPrompt, StopSet, Tokenizer};
use serde_json::{Map, Value};

use crate::auth::Keys;
use crate::body::Bodies;
use crate::cors::Origins;
use crate::error::ApiError;
use crate::fleet::{Fleet, Look, Plan, Standing, TRY_AGAIN, Turn};
use crate::grammars::Grammars;
use crate::jobs::Jobs;
use crate::metrics::Metrics;
use crate::resident::{Open, Opened, Resident};
use crate::tls::Tls;

/// What is known of a model that is served, whether it is in memory or not.
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

/// A model that is served.
pub struct Served {
    /// What is known of it.
    pub model: Model,
    /// How it comes into memory.
    pub open: Open,
}

/// What is served, and how it shares the memory.
pub struct Models {
    /// All models, by names that differ; requests that name none are for the first.
    pub served: Vec<Served>,
    /// The first one's engine.
    pub first: Opened,
    /// What opening it took.
    pub took: Duration,
    /// How much each takes on.
    pub limits: Limits,
    /// After so long without requests the model in memory leaves it.
    pub idle_unload: Option<Duration>,
}

/// What is kept of a model while the server runs.
#[derive(Clone)]
struct Kept {
    model: Arc<Model>,
    grammars: Arc<Grammars>,
    answers: Answers,
}

/// The server's state, as a request for one of its models sees it. Cheap to clone.
#[derive(Clone)]
pub struct App {
    /// The model.
    pub model: Arc<Model>,
    /// Its number among all that are served.
    pub place: usize,
    /// All models, and the one in memory.
    pub fleet: Arc<Fleet<Resident>>,
    /// How clients are treated.
    pub settings: Arc<Settings>,
    /// What was counted.
    pub metrics: Arc<Metrics>,
    /// What answers may be.
    pub grammars: Arc<Grammars>,
    /// Files and batches, or why there are none.
    pub jobs: Result<Arc<Jobs>, String>,
    /// Room for what clients send.
    pub bodies: Arc<Bodies>,
    /// Whether the end has begun.
    pub ending: Arc<AtomicBool>,
    answers: Answers,
    all: Arc<[Kept]>,
}

impl App {
    /// The state of a server that has answered nothing yet, as a request for its first model sees it.
    ///
    /// # Errors
    /// If there is no model, or no thread for its engine.
    pub fn new(models: Models, settings: Settings) -> std::io::Result<Self> {
        let Models { served, first, took, limits, idle_unload } = models;
        let first = Resident::start(0, first, limits, None)?;
        let (all, opens): (Vec<Kept>, Vec<Open>) = served
            .into_iter()
            .map(|Served { model, open }| {
                (Kept { model: Arc::new(model), grammars: Arc::default(), answers: Answers::default() }, open)
            })
            .unzip();
        let Some(Kept { model, grammars, answers }) = all.first().cloned() else {
            return Err(std::io::Error::other("there is no model to serve"));
        };
        let fleet = Fleet::new(Plan {
            names: all.iter().map(|kept| kept.model.id.clone()).collect(),
            first,
            took,
            most_waiting: limits.queue,
            idle_unload,
            load: Box::new(move |place, last, progress| {
                let opened = opens[place](progress)?;
                Resident::start(place, opened, limits, Some(last))
                    .map_err(|error| format!("cannot start a thread for the engine: {error}"))
            }),
            unload: Box::new(|resident: &Resident| {
                // Nothing runs any more: this waits for the engine's thread only.
                resident.put_away(Duration::from_secs(60));
            }),
        });
        Ok(Self {
            model,
            place: 0,
            fleet: Arc::new(fleet),
            bodies: Arc::new(Bodies::new(settings.max_body)),
            settings: Arc::new(settings),
            metrics: Arc::default(),
            grammars,
            jobs: Err("this server was started without a folder for them".to_owned()),
            ending: Arc::default(),
            answers,
            all: all.into(),
        })
    }

    /// With files and batches, or the reason why there are none.
    pub fn with_jobs(self, jobs: Result<Jobs, String>) -> Self {
        Self { jobs: jobs.map(Arc::new), ..self }
    }

    /// The names of all models that are served.
    pub fn served_names(&self) -> Vec<String> {
        self.all.iter().map(|kept| kept.model.id.clone()).collect()
    }

    /// The same, as a request for another model sees it; this one where there is no such.
    pub fn of(&self, place: usize) -> Arc<Self> {
        let mut app = self.clone();
        if let Some(Kept { model, grammars, answers }) = self.all.get(place).cloned() {
            (app.place, app.model, app.grammars, app.answers) = (place, model, grammars, answers);
        }
        Arc::new(app)
    }

    /// All models.
    pub fn all(&self) -> impl Iterator<Item = Arc<Self>> {
        (0..self.all.len()).map(|place| self.of(place))
    }

    /// The number of the model of this name.
    pub fn place_of(&self, name: &str) -> Option<usize> {
        let exactly = |name: &str| self.all.iter().position(|kept| kept.model.id == name);
        // Ollama's clients add a tag to names without one.
        exactly(name).or_else(|| exactly(name.strip_suffix(":latest")?))
    }

    /// The number of the model that a request names; the first one's where it names none that is served, which whoever reads
    /// the request refuses.
    pub fn place_for(&self, body: &Map<String, Value>) -> usize {
        let name = body.get("model").or_else(|| body.get("name")).and_then(Value::as_str);
        name.and_then(|name| self.place_of(name)).unwrap_or(0)
    }

    /// Brings the model into memory.
    ///
    /// # Errors
    /// If that is not possible.
    pub async fn load(&self) -> Result<(), ApiError> {
        if let Turn::Later(mut wait, _) = self.fleet.ask(self.place, false)? {
            wait.turn().await?;
        }
        Ok(())
    }

    /// An error if the model in memory takes on nothing more that somebody waits for. Says nothing where there are others:
    /// which one a request is for is not known before it is read.
    ///
    /// # Errors
    /// If its queue is full.
    pub fn check_room(&self) -> Result<(), ApiError> {
        let look = self.fleet.look();
        if self.all.len() == 1 && matches!(look.standing, Standing::Resident(_)) {
            look.last.scheduler.check_room(Priority::Interactive)?;
        }
        Ok(())
    }

    /// How everything stands.
    pub fn state(&self) -> SchedulerState {
        let look = self.fleet.look();
        let mut state = look.last.state();
        state.waiting += look.waiting.0;
        state.waiting_batch += look.waiting.1;
        if !matches!(look.standing, Standing::Resident(_)) {
            state.health = health(&look);
            (state.running, state.kv_blocks, state.slots, state.keeping) = (0, (0, 0), 0, None);
        }
        state
    }

    /// Everything there is to see of the model that is in memory, or was there last; and that model.
    pub fn seen(&self) -> (Arc<Self>, Arc<Resident>, View) {
        let look = self.fleet.look();
        let mut view = look.last.look();
        if !matches!(look.standing, Standing::Resident(_)) {
            view.state.health = health(&look);
            (view.state.kv_blocks, view.state.slots, view.state.keeping) = ((0, 0), 0, None);
            view.cells = None;
        }
        (self.of(look.last.place), look.last, view)
    }

    /// The ids of earlier answers.
    pub fn answers(&self) -> Answers {
        self.answers.clone()
    }
}

/// Whether requests are taken while no model is in memory: not if none could be loaded a moment ago.
fn health(look: &Look<Resident>) -> Health {
    if look.closed {
        return Health::Draining;
    }
    let failed =
        |at: &std::time::Instant| matches!(look.standing, Standing::Empty) && at.elapsed() < TRY_AGAIN;
    let mut failures = look.loads.iter().map(|loads| loads.failure.as_ref().filter(|(at, _)| failed(at)));
    match failures.clone().all(|failure| failure.is_some()) {
        true => match failures.next().flatten() {
            Some((_, reason)) => Health::Failed { reason: reason.clone() },
            None => Health::Ready,
        },
        false => Health::Ready,
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
        let turn = forebay_text::Turn::new(prompt, prompt_ids, answer, tokenizer);
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
