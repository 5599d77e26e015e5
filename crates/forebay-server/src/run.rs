//! A request under way: its jobs in the scheduler, and what they tell, as text.

mod listener;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_core::CancelToken;
use forebay_engine::scheduler::{Forecast, JobId, Refused};
use forebay_engine::{Job, Priority, Scheduler};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::app::App;
use crate::ask::{Ask, Prepared};
use crate::error::ApiError;
use crate::fleet::{Lease, Turn, Wait};
use crate::pipe::{Delta, Part};
use crate::resident::Resident;
use listener::{Listener, Remember};

/// Pieces that may wait for a client that does not read; then its answer is given up.
const MOST_UNREAD: usize = 8192;
/// A response begins when its model is in memory, or after this: what is wrong with the model by then has a status of its own.
const AT_ONCE: Duration = Duration::from_secs(1);

/// What is told of one answer.
#[derive(Clone, Debug)]
pub enum Piece {
    /// It was taken on.
    Queued {
        /// Jobs that come first.
        ahead: usize,
        /// What is expected, the wait included.
        forecast: Forecast,
    },
    /// Its turn has come.
    Started {
        /// Prompt tokens that need not be computed.
        reused: usize,
        /// What is expected.
        forecast: Forecast,
    },
    /// So much of the prompt is computed.
    Progress {
        /// Tokens done.
        done: usize,
        /// Tokens to do.
        total: usize,
        /// Bytes that were read for them.
        read: Option<u64>,
        /// Time that the rest will take.
        left: Option<Duration>,
    },
    /// More of the answer.
    Delta(Delta),
    /// The answer is over.
    End(Ended),
    /// The answer failed.
    Failed(ApiError),
}

/// Why an answer is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The model ended it.
    Stop,
    /// A stop string: which one.
    StopString(usize),
    /// The model called tools.
    Calls,
    /// The limit, or the context.
    Length,
}

/// The end of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    /// Why.
    pub reason: Reason,
    /// Tokens of the answer.
    pub tokens: usize,
    /// Of these, tokens of the think block.
    pub reasoning_tokens: usize,
    /// Prompt tokens that were not computed.
    pub cached: usize,
    /// Time in the queue, for the prompt, and for the rest.
    pub times: Times,
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Times {
    /// Until its turn came.
    pub wait: Duration,
    /// For the prompt.
    pub prefill: Duration,
    /// For the answer.
    pub decode: Duration,
}

/// What is told of the answers to a request.
pub struct Pieces {
    pieces: UnboundedReceiver<(usize, Piece)>,
    unread: Arc<AtomicUsize>,
    /// Answers that are not over.
    left: usize,
}

impl Pieces {
    /// What comes through `pieces` of so many answers; `unread` counts what waits there.
    pub fn new(pieces: UnboundedReceiver<(usize, Piece)>, unread: Arc<AtomicUsize>, answers: usize) -> Self {
        Self { pieces, unread, left: answers }
    }

    /// The next piece, and which answer it belongs to; `None` when all are over.
    pub async fn next(&mut self) -> Option<(usize, Piece)> {
        if self.left == 0 {
            return None;
        }
        let Some((choice, piece)) = self.pieces.recv().await else {
            // Whoever was to say how an answer ended is gone: what there is of it must not pass for the whole.
            self.left = 0;
            let message = "the answer was lost, by a fault of the server; please report this";
            let error = ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message).code("internal_error");
            return Some((0, Piece::Failed(error)));
        };
        self.unread.fetch_sub(1, Ordering::Relaxed);
        self.left -= usize::from(matches!(piece, Piece::End(_) | Piece::Failed(_)));
        Some((choice, piece))
    }
}

/// Where a request was handed over, once it was, and its jobs there.
type Handed = Arc<OnceLock<(Scheduler, Vec<JobId>)>>;

fn cancel(handed: &Handed) {
    if let Some((scheduler, jobs)) = handed.get() {
        jobs.iter().for_each(|job| scheduler.cancel(*job));
    }
}

/// The answers to a request, as they come. Dropping it cancels what is not over.
pub struct Running {
    /// What is told of them.
    pub pieces: Pieces,
    cancel: CancelToken,
    handed: Handed,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Answers.
    pub choices: usize,
    /// What was expected when it was taken on.
    pub forecast: Forecast,
    /// Jobs that came first.
    pub ahead: usize,
}

impl Running {
    /// Everything, at the end; the first failure of any answer instead.
    pub async fn collect(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut answers: Vec<Whole> = (0..self.choices).map(|_| Whole::default()).collect();
        while let Some((choice, piece)) = self.pieces.next().await {
            match piece {
                Piece::Delta(delta) => answers[choice].add(delta),
                Piece::End(ended) => answers[choice].end = Some(ended),
                Piece::Failed(error) => return Err(error),
                Piece::Queued { .. } | Piece::Started { .. } | Piece::Progress { .. } => {}
            }
        }
        Ok(answers)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.pieces.left > 0 {
            self.cancel.cancel();
            cancel(&self.handed);
        }
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default)]
pub struct Whole {
    /// The text of the think block.
    pub reasoning: String,
    /// Text and calls.
    pub parts: Vec<Part>,
    /// Tokens of the answer proper, where log-probabilities were asked for.
    pub tokens: Vec<crate::pipe::TokenInfo>,
    /// How it ended.
    pub end: Option<Ended>,
}

impl Whole {
    fn add(&mut self, delta: Delta) {
        self.reasoning.push_str(&delta.reasoning);
        self.tokens.extend(delta.tokens);
        for part in delta.parts {
            match (self.parts.last_mut(), part) {
                (Some(Part::Text(last)), Part::Text(more)) => last.push_str(&more),
                (_, part) => self.parts.push(part),
            }
        }
    }

    /// All text of the answer proper.
    pub fn content(&self) -> String {
        self.parts.iter().map(Part::text).collect()
    }

    /// Its calls.
    pub fn calls(&self) -> impl Iterator<Item = &crate::pipe::Call> {
        self.parts.iter().filter_map(|part| match part {
            Part::Call(call) => Some(call),
            Part::Text(_) => None,
        })
    }

    /// Why it is over. Answers without an end are not handed out: they failed.
    pub fn reason(&self) -> Reason {
        self.end.as_ref().map_or(Reason::Stop, |end| end.reason)
    }
}

/// Prepares a request and hands it to the scheduler of its model, when that is in memory. `streams` says whether a client reads
/// while it is answered.
pub async fn start(app: &Arc<App>, ask: Ask, streams: bool) -> Result<Running, ApiError> {
    let taken_on = Instant::now();
    let of_task = Arc::clone(app);
    let prepared =
        tokio::task::spawn_blocking(move || Prepared::of(ask, &of_task)).await.map_err(|error| {
            let message = format!("the request could not be prepared: {error}");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
        })??;
    let (tokens, context) = (prepared.ids.len(), app.model.context);
    if tokens > context {
        // No model is loaded in order to say that.
        return Err(Refused::TooLong { tokens, context }.into());
    }
    let turn = app.fleet.ask(app.place, prepared.priority == Priority::Batch)?;
    let (request, mut running) = request(app, prepared, streams, taken_on);
    let (mut wait, ahead) = match turn {
        Turn::Now(lease) => return Ok(running.begun(request.hand_over(lease)?)),
        Turn::Later(wait, ahead) => (wait, ahead),
    };
    if let Ok(lease) = tokio::time::timeout(AT_ONCE, wait.turn()).await {
        return Ok(running.begun(request.hand_over(lease?)?));
    }
    let forecast = Forecast { wait: app.fleet.until_loaded(app.place), ..Forecast::default() };
    (running.ahead, running.forecast) = (ahead, forecast);
    for choice in 0..running.choices {
        request.tell(choice, Piece::Queued { ahead, forecast });
    }
    tokio::spawn(request.later(wait));
    Ok(running)
}

/// A request on its way to a scheduler.
struct Request {
    app: Arc<App>,
    prepared: Prepared,
    streams: bool,
    taken_on: Instant,
    send: UnboundedSender<(usize, Piece)>,
    unread: Arc<AtomicUsize>,
    cancel: CancelToken,
    handed: Handed,
}

fn request(app: &Arc<App>, prepared: Prepared, streams: bool, taken_on: Instant) -> (Request, Running) {
    let (send, pieces) = unbounded_channel();
    let request = Request {
        app: Arc::clone(app),
        prepared,
        streams,
        taken_on,
        send,
        unread: Arc::default(),
        cancel: CancelToken::new(),
        handed: Arc::default(),
    };
    let running = Running {
        pieces: Pieces::new(pieces, Arc::clone(&request.unread), request.prepared.choices),
        cancel: request.cancel.clone(),
        handed: Arc::clone(&request.handed),
        prompt_tokens: request.prepared.ids.len(),
        choices: request.prepared.choices,
        forecast: Forecast::default(),
        ahead: 0,
    };
    (request, running)
}

impl Running {
    /// With what was expected when it was handed over.
    fn begun(mut self, (ahead, forecast): (usize, Forecast)) -> Self {
        (self.ahead, self.forecast) = (ahead, forecast);
        self
    }
}

impl Request {
    fn tell(&self, choice: usize, piece: Piece) {
        self.unread.fetch_add(1, Ordering::Relaxed);
        _ = self.send.send((choice, piece));
    }

    /// Waits for the turn and hands the request over, unless its client leaves.
    async fn later(self, mut wait: Wait<Resident>) {
        let lease = tokio::select! {
            lease = wait.turn() => lease,
            () = self.send.closed() => return,
        };
        let error = match lease {
            Err(refusal) => refusal.into(),
            Ok(lease) => match self.hand_over(lease) {
                Ok(_) => {
                    // Its client may have left before it could be seen where it is.
                    if self.cancel.is_cancelled() {
                        cancel(&self.handed);
                    }
                    return;
                }
                Err(error) => error,
            },
        };
        self.tell(0, Piece::Failed(error));
    }

    /// Hands the request over: how many are ahead of it, and what is expected.
    fn hand_over(&self, lease: Lease<Resident>) -> Result<(usize, Forecast), ApiError> {
        let (prepared, model) = (&self.prepared, &self.app.model);
        let scheduler = lease.scheduler.clone();
        let forecast = scheduler.forecast(&prepared.ids, prepared.max_tokens);
        let (lease, ahead) = (Arc::new(lease), Arc::new(AtomicUsize::new(0)));
        let mut first = 0;
        let mut jobs = Vec::with_capacity(prepared.choices);
        for choice in 0..prepared.choices {
            let mut sampling = prepared.sampling.clone();
            sampling.seed = sampling.seed.wrapping_add(choice as u64);
            let mut listener = Listener {
                choice,
                send: self.send.clone(),
                unread: Arc::clone(&self.unread),
                most_unread: if self.streams { MOST_UNREAD } else { usize::MAX },
                overflowed: false,
                pipe: prepared.pipe(&self.app),
                ids: Vec::new(),
                remember: prepared.rendered.clone().map(|rendered| Remember {
                    answers: self.app.answers(),
                    tokenizer: Arc::clone(&model.tokenizer),
                    rendered,
                    prompt: prepared.ids.clone(),
                }),
                metrics: Arc::clone(&self.app.metrics),
                taken_on: self.taken_on,
                started: None,
                told: None,
                forecast,
                reused: 0,
                ahead: Arc::clone(&ahead),
                _lease: Some(Arc::clone(&lease)),
            };
            let job = Job {
                prompt: prepared.ids.clone(),
                max_tokens: prepared.max_tokens,
                sampling,
                stops: model.stops.ids().to_vec(),
                constraint: prepared.constraint(),
                priority: prepared.priority,
                cancel: self.cancel.clone(),
                events: Box::new(move |event| listener.hear(event)),
            };
            match scheduler.submit(job) {
                Ok(job) => jobs.push(job),
                Err(refused) => {
                    // What was taken on already is not wanted alone.
                    self.cancel.cancel();
                    jobs.into_iter().for_each(|job| scheduler.cancel(job));
                    return Err(refused.into());
                }
            }
            if choice == 0 {
                first = ahead.load(Ordering::Relaxed);
            }
        }
        _ = self.handed.set((scheduler, jobs));
        Ok((first, forecast))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_answer_that_nobody_ends_has_failed() {
        let (send, pieces) = unbounded_channel();
        let mut pieces = Pieces::new(pieces, Arc::new(AtomicUsize::new(1)), 2);
        send.send((1, Piece::Delta(Delta::default()))).unwrap();
        drop(send);
        assert!(matches!(pieces.next().await, Some((1, Piece::Delta(_)))));
        assert!(matches!(pieces.next().await, Some((_, Piece::Failed(error))) if error.status == 500));
        assert!(pieces.next().await.is_none());
    }
}
