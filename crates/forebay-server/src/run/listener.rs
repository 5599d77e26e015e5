//! What a job of the scheduler tells, passed on as text.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::http::StatusCode;
use forebay_engine::scheduler::{Forecast, JobError};
use forebay_engine::{Finish, JobEvent, Outcome};
use tokio::sync::mpsc::UnboundedSender;

use super::{Ended, MOST_UNREAD, Piece, Reason, Times};
use crate::app::Answers;
use crate::error::ApiError;
use crate::fleet::Lease;
use crate::metrics::Metrics;
use crate::pipe::Pipe;
use crate::resident::Resident;

/// Between two words about the progress of a prompt.
const PROGRESS: Duration = Duration::from_millis(200);

/// Keeps the ids of an answer for prompts that hold it as text.
pub(super) struct Remember {
    pub(super) answers: Answers,
    pub(super) tokenizer: Arc<forebay_text::Tokenizer>,
    pub(super) rendered: forebay_text::RenderedPrompt,
    pub(super) prompt: Vec<u32>,
}

/// Hears what becomes of a job, on the engine's thread, and passes it on as text.
pub(super) struct Listener {
    pub(super) choice: usize,
    pub(super) send: UnboundedSender<(usize, Piece)>,
    pub(super) unread: Arc<AtomicUsize>,
    pub(super) most_unread: usize,
    /// Whether the answer was given up because nobody reads it.
    pub(super) overflowed: bool,
    pub(super) pipe: Pipe,
    pub(super) ids: Vec<u32>,
    pub(super) remember: Option<Remember>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) taken_on: Instant,
    pub(super) started: Option<Instant>,
    /// When progress was told last.
    pub(super) told: Option<Instant>,
    pub(super) forecast: Forecast,
    pub(super) reused: usize,
    pub(super) ahead: Arc<AtomicUsize>,
    /// Keeps the model in memory until the job is over.
    pub(super) _lease: Option<Arc<Lease<Resident>>>,
}

impl Listener {
    pub(super) fn hear(&mut self, event: JobEvent) -> ControlFlow<()> {
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
    use tokio::sync::mpsc::unbounded_channel;

    use super::super::Pieces;
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
                _lease: None,
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
}
