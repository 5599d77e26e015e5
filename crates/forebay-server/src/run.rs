//! A request under way: its jobs in the scheduler, and what they tell, as text.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_core::CancelToken;
use forebay_engine::scheduler::{Forecast, JobError, JobId};
use forebay_engine::{Finish, Job, JobEvent, Outcome, Scheduler};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::app::{Answers, App};
use crate::ask::{Ask, Prepared};
use crate::error::ApiError;
use crate::metrics::Metrics;
use crate::pipe::{Delta, Part, Pipe};

/// Pieces that may wait for a client that does not read; then its answer is given up.
const MOST_UNREAD: usize = 8192;
/// Between two words about the progress of a prompt.
const PROGRESS: Duration = Duration::from_millis(200);

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

/// The answers to a request, as they come. Dropping it cancels what is not over.
pub struct Running {
    /// What is told of them.
    pub pieces: Pieces,
    jobs: Vec<JobId>,
    cancel: CancelToken,
    scheduler: Scheduler,
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
            self.jobs.iter().for_each(|job| self.scheduler.cancel(*job));
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

/// Prepares a request and hands it to the scheduler. `streams` says whether a client reads while it is answered.
pub async fn start(app: &Arc<App>, ask: Ask, streams: bool) -> Result<Running, ApiError> {
    let of_task = Arc::clone(app);
    let prepared =
        tokio::task::spawn_blocking(move || Prepared::of(ask, &of_task)).await.map_err(|error| {
            let message = format!("the request could not be prepared: {error}");
            ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
        })??;
    submit(app, prepared, streams)
}

fn submit(app: &Arc<App>, prepared: Prepared, streams: bool) -> Result<Running, ApiError> {
    let (send, pieces) = unbounded_channel();
    let (prompt_tokens, choices) = (prepared.ids.len(), prepared.choices);
    let cancel = CancelToken::new();
    let forecast = app.scheduler.forecast(&prepared.ids, prepared.max_tokens);
    let ahead = Arc::new(AtomicUsize::new(0));
    let unread = Arc::<AtomicUsize>::default();
    let mut running = Running {
        pieces: Pieces::new(pieces, Arc::clone(&unread), choices),
        jobs: Vec::with_capacity(choices),
        cancel: cancel.clone(),
        scheduler: app.scheduler.clone(),
        prompt_tokens,
        choices,
        forecast,
        ahead: 0,
    };
    for choice in 0..choices {
        let mut sampling = prepared.sampling.clone();
        sampling.seed = sampling.seed.wrapping_add(choice as u64);
        let mut listener = Listener {
            choice,
            send: send.clone(),
            unread: Arc::clone(&unread),
            most_unread: if streams { MOST_UNREAD } else { usize::MAX },
            overflowed: false,
            pipe: prepared.pipe(app),
            ids: Vec::new(),
            remember: prepared.rendered.clone().map(|rendered| Remember {
                answers: app.answers(),
                tokenizer: Arc::clone(&app.model.tokenizer),
                rendered,
                prompt: prepared.ids.clone(),
            }),
            metrics: Arc::clone(&app.metrics),
            taken_on: Instant::now(),
            started: None,
            told: None,
            forecast,
            reused: 0,
            ahead: Arc::clone(&ahead),
        };
        let job = Job {
            prompt: prepared.ids.clone(),
            max_tokens: prepared.max_tokens,
            sampling,
            stops: app.model.stops.ids().to_vec(),
            constraint: prepared.constraint(),
            priority: prepared.priority,
            cancel: cancel.clone(),
            events: Box::new(move |event| listener.hear(event)),
        };
        // What was taken on already is cancelled with `running`.
        running.jobs.push(app.scheduler.submit(job)?);
        if choice == 0 {
            running.ahead = ahead.load(Ordering::Relaxed);
        }
    }
    Ok(running)
}

/// Keeps the ids of an answer for prompts that hold it as text.
struct Remember {
    answers: Answers,
    tokenizer: Arc<forebay_text::Tokenizer>,
    rendered: forebay_text::RenderedPrompt,
    prompt: Vec<u32>,
}

/// Hears what becomes of a job, on the engine's thread, and passes it on as text.
struct Listener {
    choice: usize,
    send: UnboundedSender<(usize, Piece)>,
    unread: Arc<AtomicUsize>,
    most_unread: usize,
    /// Whether the answer was given up because nobody reads it.
    overflowed: bool,
    pipe: Pipe,
    ids: Vec<u32>,
    remember: Option<Remember>,
    metrics: Arc<Metrics>,
    taken_on: Instant,
    started: Option<Instant>,
    /// When progress was told last.
    told: Option<Instant>,
    forecast: Forecast,
    reused: usize,
    ahead: Arc<AtomicUsize>,
}

impl Listener {
    fn hear(&mut self, event: JobEvent) -> ControlFlow<()> {
        match event {
            JobEvent::Queued { ahead } => {
                self.ahead.store(ahead, Ordering::Relaxed);
                self.tell(Piece::Queued { ahead, forecast: self.forecast })
            }
            JobEvent::Started { reused, forecast } => {
                (self.started, self.reused, self.forecast) = (Some(Instant::now()), reused, forecast);
                self.metrics.wait.observe(self.taken_on.elapsed());
                self.tell(Piece::Started { reused, forecast })
            }
            JobEvent::Prefill { done, total, read, left } => {
                let now = Instant::now();
                if self.told.is_some_and(|told| now - told < PROGRESS) {
                    return ControlFlow::Continue(());
                }
                self.told = Some(now);
                self.tell(Piece::Progress { done, total, read, left })
            }
            JobEvent::Token(token) => {
                if self.ids.is_empty() {
                    self.first_token();
                }
                self.ids.push(token.id);
                let delta = self.pipe.push(token);
                let told = if delta.is_empty() { self.alive() } else { self.tell(Piece::Delta(delta)) };
                if self.pipe.stopped().is_some() { ControlFlow::Break(()) } else { told }
            }
            JobEvent::Done(outcome) => {
                self.end(&outcome);
                ControlFlow::Continue(())
            }
            JobEvent::Failed(error) => {
                self.metrics.failed.add(1);
                self.tell(Piece::Failed(error.into()))
            }
        }
    }

    fn first_token(&mut self) {
        self.metrics.first_token.observe(self.taken_on.elapsed());
        if let (Some(started), Some(expected)) = (self.started, self.forecast.first_token) {
            self.metrics.forecast(expected, started.elapsed());
        }
    }

    fn end(&mut self, outcome: &Outcome) {
        let complete = outcome.finish == Finish::Stop;
        let delta = self.pipe.finish(complete);
        if !delta.is_empty() {
            _ = self.tell(Piece::Delta(delta));
        }
        let reason = reason(self.pipe.stopped(), self.pipe.made_calls(), outcome.finish);
        self.metrics.ended(reason);
        let Some(reason) = reason else {
            // A client that is gone hears nothing; one that is there must not take half an answer for a whole one.
            _ = self.tell(Piece::Failed(self.given_up()));
            return;
        };
        if let Some(Remember { answers, tokenizer, rendered, prompt }) = self.remember.take() {
            answers.remember(rendered, &prompt, &self.ids, &tokenizer);
        }
        let wait = self.started.map_or_else(|| self.taken_on.elapsed(), |started| started - self.taken_on);
        let times = Times { wait, prefill: outcome.stats.prefill, decode: outcome.stats.decode };
        let ended = Ended {
            reason,
            tokens: self.ids.len(),
            reasoning_tokens: self.pipe.reasoning_tokens(),
            cached: self.reused,
            times,
        };
        _ = self.tell(Piece::End(ended));
    }

    /// Why an answer is given up that a client still waits for.
    fn given_up(&self) -> ApiError {
        if !self.overflowed {
            // Nobody but the end of the server does that.
            return JobError::ShuttingDown.into();
        }
        let message = format!(
            "the answer was given up, as {MOST_UNREAD} pieces of it were not read; read the stream as it comes, or ask \
             without stream"
        );
        ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("client_too_slow")
    }

    /// `Break` where nobody listens any more.
    fn alive(&self) -> ControlFlow<()> {
        if self.send.is_closed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    }

    fn tell(&mut self, piece: Piece) -> ControlFlow<()> {
        let last = matches!(piece, Piece::End(_) | Piece::Failed(_));
        if !last && self.unread.load(Ordering::Relaxed) >= self.most_unread {
            self.metrics.slow_clients.add(u64::from(!self.overflowed));
            self.overflowed = true;
            return ControlFlow::Break(());
        }
        self.unread.fetch_add(1, Ordering::Relaxed);
        match self.send.send((self.choice, piece)) {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    }
}

/// Why an answer is over; `None` if it was given up.
fn reason(stopped: Option<usize>, made_calls: bool, finish: Finish) -> Option<Reason> {
    match (stopped, finish) {
        (None, Finish::Cancelled | Finish::Ended) => None,
        // Whoever has calls to run must be told, whatever came behind them.
        _ if made_calls => Some(Reason::Calls),
        (Some(place), _) => Some(Reason::StopString(place)),
        (None, Finish::Length | Finish::Context) => Some(Reason::Length),
        (None, Finish::Stop) => Some(Reason::Stop),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_the_reason_whatever_came_behind_them_unless_the_answer_was_given_up() {
        for (stopped, calls, finish, want) in [
            (None, false, Finish::Stop, Some(Reason::Stop)),
            (None, false, Finish::Context, Some(Reason::Length)),
            (Some(2), false, Finish::Ended, Some(Reason::StopString(2))),
            (Some(2), true, Finish::Ended, Some(Reason::Calls)),
            (None, true, Finish::Length, Some(Reason::Calls)),
            (None, true, Finish::Cancelled, None),
            (None, false, Finish::Ended, None),
        ] {
            assert_eq!(reason(stopped, calls, finish), want, "{stopped:?} {calls} {finish:?}");
        }
    }

    #[tokio::test]
    async fn an_answer_that_is_not_read_or_that_the_end_cuts_off_has_failed() {
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo/tokenizer.json");
        let tokenizer = Arc::new(forebay_text::Tokenizer::from_file(&file).unwrap());
        for (tokens, finish, code) in
            [(100, Finish::Ended, "client_too_slow"), (3, Finish::Cancelled, "shutting_down")]
        {
            let (send, pieces) = unbounded_channel();
            let unread = Arc::<AtomicUsize>::default();
            let mut pieces = Pieces::new(pieces, Arc::clone(&unread), 1);
            let stop = forebay_text::StopMatcher::new(Vec::<String>::new()).unwrap();
            let mut listener = Listener {
                choice: 0,
                send,
                unread,
                most_unread: 10,
                overflowed: false,
                pipe: Pipe::new(Arc::clone(&tokenizer), None, stop, None),
                ids: Vec::new(),
                remember: None,
                metrics: Arc::default(),
                taken_on: Instant::now(),
                started: None,
                told: None,
                forecast: Forecast::default(),
                reused: 0,
                ahead: Arc::default(),
            };
            let id = tokenizer.encode_raw("a")[0];
            let token = || JobEvent::Token(forebay_engine::session::Token { id, logprobs: None });
            let heard = (0..tokens).take_while(|_| listener.hear(token()).is_continue()).count();
            assert_eq!(heard, 10.min(tokens), "it says when it takes no more");
            _ = listener.hear(JobEvent::Done(Outcome { finish, stats: Default::default() }));
            let mut told = Vec::new();
            while let Some((_, piece)) = pieces.next().await {
                told.push(piece);
            }
            assert_eq!(told.len(), heard + 1);
            let last = told.pop();
            assert!(matches!(&last, Some(Piece::Failed(error)) if error.code == Some(code)), "{last:?}");
        }
    }

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
