//! One sequence: its KV cache, what is in it, and the loop that extends it.

mod answer;
mod drafts;
mod forced;
mod prefixes;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use forebay_core::{CancelToken, Constraint, ConstraintError};
use forebay_model::workspace::LOGIT_ROWS;
use forebay_model::{ForwardError, KvCache, Part, Phase, Trace, Watch, forward, logits};
use forebay_tiers::Counters;

use crate::choose::Chooser;
pub use crate::choose::Token;
use crate::draft::{DraftStats, Foretold};
use crate::engine::Engine;
use crate::sample::{SampleError, Sampling, argmax, log_probability};
pub(crate) use forced::Proposed;
pub use prefixes::Reused;

/// What to generate.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// Tokens to append before generating; may be empty to continue.
    pub prompt: &'a [u32],
    /// Most tokens to generate.
    pub max_tokens: usize,
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// Tokens that end the answer; never emitted and never kept.
    pub stops: &'a [u32],
}

/// What happens while generating.
#[allow(clippy::large_enum_variant, reason = "one a pass, handed on and dropped")]
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// So many prompt tokens of so many have been run; those of a pass that is under way count by
    /// the layers they are through.
    Prefill {
        /// Tokens done.
        done: usize,
        /// Tokens in all.
        total: usize,
        /// Bytes of experts that were read for them so far, where that is known.
        read: Option<u64>,
        /// Time that the rest will take, if it takes as long as what is done did; `None` before anything is.
        left: Option<Duration>,
    },
    /// A pass is over.
    Pass(PassStats),
    /// The next token of the answer.
    Token(Token),
}

/// What one pass cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PassStats {
    /// Tokens that were run.
    pub rows: usize,
    /// Wall time.
    pub time: Duration,
    /// Expert streaming.
    pub experts: Counters,
    /// Its time by part, in the order of [`Phase::ALL`].
    pub phases: [Duration; Phase::ALL.len()],
}

/// What there was before a pass.
pub(crate) struct PassStart {
    started: Instant,
    experts: Counters,
    phases: [Duration; Phase::ALL.len()],
}

/// Why generation ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// The model produced a stop token, or the constraint let nothing follow.
    Stop,
    /// The caller ended the answer at a token.
    Ended,
    /// `max_tokens` were generated.
    Length,
    /// The context is full.
    Context,
    /// The caller cancelled.
    Cancelled,
}

/// What a generation did and cost.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Why it ended.
    pub finish: Finish,
    /// What it cost.
    pub stats: Stats,
}

/// Measured cost of one generation.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stats {
    /// Prompt tokens that were run, a pending one included; fewer than asked for after a cancellation.
    pub prompt_tokens: usize,
    /// Tokens that were run again, because the KV blocks that held them had been given up for others.
    pub rerun_tokens: usize,
    /// Tokens generated.
    pub new_tokens: usize,
    /// Time for the prompt.
    pub prefill: Duration,
    /// Time for everything after it.
    pub decode: Duration,
    /// Time from the start to the first new token; `None` if there was none.
    pub first_token: Option<Duration>,
    /// Passes after the prompt.
    pub decode_passes: usize,
    /// Expert streaming.
    pub experts: Counters,
    /// The part of it after the prompt.
    pub decode_experts: Counters,
    /// How long at least one demanded read was outstanding after the prompt.
    pub decode_disk: Duration,
    /// Logits that were not finite numbers and were left out of sampling.
    pub non_finite_logits: u64,
    /// What became of drafts.
    pub drafts: DraftStats,
}

impl Stats {
    /// Tokens that came out of the passes after the prompt.
    pub fn decoded(&self) -> usize {
        self.decode_passes + (self.drafts.accepted + self.drafts.forced_accepted) as usize
    }
}

/// Why generation failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GenerateError {
    /// A pass failed.
    #[error(transparent)]
    Forward(#[from] ForwardError),
    /// No token could be chosen.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The constraint could not say what comes next.
    #[error(transparent)]
    Constraint(#[from] ConstraintError),
}

/// Teacher-forced score of one token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenScore {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability after the tokens before it.
    pub log_probability: f64,
    /// The token with the largest logit at that place.
    pub best: u32,
}

/// One sequence. Belongs to the engine that made it.
pub struct Session {
    pub(crate) kv: KvCache,
    /// The tokens in the cache.
    tokens: Vec<u32>,
    /// The last emitted token, if it is not in the cache yet.
    pub(crate) pending: Option<u32>,
    /// The token behind the cache's last that its MTP row was made with, if that is known already.
    behind: Option<u32>,
    /// Logits after the last token in the cache; empty before the first pass.
    logits: Vec<f32>,
    /// The drafts of the pass to come.
    pub(crate) drafts: Vec<u32>,
    /// Drafts for measurements.
    foretold: Option<Foretold>,
}

impl Session {
    /// An empty sequence with the planned context. The engine's plan has room for as many as it was asked for.
    pub fn new(engine: &Engine) -> Self {
        Self {
            kv: engine.new_kv(),
            tokens: Vec::new(),
            pending: None,
            behind: None,
            logits: Vec::new(),
            drafts: Vec::new(),
            foretold: None,
        }
    }

    /// Bytes that a sequence of up to `context` tokens keeps beside its KV blocks, and the choice of its tokens.
    pub(crate) fn planned_bytes(vocab: usize, context: usize) -> usize {
        // Its prompt; the tokens in the cache, in a list that may have grown to twice its length; a copy in which drafts are
        // looked up; and what the scheduler remembers of it for forecasts.
        let tokens = 5 * size_of::<u32>() * context;
        tokens + size_of::<f32>() * vocab + Chooser::planned_bytes(vocab)
    }

    /// The tokens in the cache.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The last emitted token, while it is not in the cache.
    pub fn pending(&self) -> Option<u32> {
        self.pending
    }

    /// The cache, for tests and dumps.
    pub fn kv(&self) -> &KvCache {
        &self.kv
    }

    /// Logits after the last token in the cache.
    pub fn last_logits(&self) -> &[f32] {
        &self.logits
    }

    /// Takes drafts from here instead of the model or the text, or no longer.
    pub fn foretell(&mut self, foretold: Option<Foretold>) {
        self.foretold = foretold;
    }

    /// Forgets everything from position `len` on, a pending token included.
    pub fn truncate(&mut self, len: usize) {
        self.pending = None;
        if len < self.tokens.len() {
            self.kv.truncate(len);
            self.tokens.truncate(len);
            self.logits.clear();
        }
    }

    /// Makes this the sequence `wanted` as far as the cache goes, and returns how many of its
    /// tokens are in the cache; the rest is the prompt of the next [`generate`](Self::generate).
    /// At least one token is always left to run, so that there are logits to go on from.
    pub fn reuse(&mut self, wanted: &[u32]) -> usize {
        let common = self.tokens.iter().zip(wanted).take_while(|(a, b)| a == b).count();
        let kept = common.min(wanted.len().saturating_sub(1));
        self.truncate(kept);
        kept
    }

    /// Runs the prompt and generates until a stop token, a limit, a cancellation, or until the caller ends it.
    ///
    /// `on_event` sees every token as it is chosen. `Break` at a token ends the answer there: the sequence
    /// holds exactly the tokens that were seen. What it returns for other events is not looked at.
    ///
    /// After an error the sequence holds what had been run before it and can be used again. After a cancellation in the
    /// middle of the prompt it holds the part that was run: [`truncate`](Self::truncate) takes it back.
    pub fn generate(
        &mut self,
        engine: &mut Engine,
        request: &Request<'_>,
        cancel: &CancelToken,
        trace: Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, GenerateError> {
        self.generate_within(engine, request, None, cancel, trace, on_event)
    }

    /// The same, of what `constraint` allows. Stop tokens count where it says that the answer may end.
    pub fn generate_within(
        &mut self,
        engine: &mut Engine,
        request: &Request<'_>,
        constraint: Option<&mut (dyn Constraint + '_)>,
        cancel: &CancelToken,
        mut trace: Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
    ) -> Result<Outcome, GenerateError> {
        let before = self.tokens.iter().copied().chain(self.pending).chain(request.prompt.iter().copied());
        let vocab = engine.spec().vocab;
        let constraint = constraint.map(|constraint| Box::new(constraint) as Box<dyn Constraint>);
        let mut chooser = Chooser::new(&request.sampling, constraint, request.stops, vocab, before)?;
        // What was read while nobody asked for anything is not this answer's cost.
        engine.store.work_begins();
        let before = engine.counters();
        let started = Instant::now();
        let mut stats = Stats::default();
        let finish =
            self.run(engine, request, cancel, &mut trace, on_event, &mut chooser, &mut stats, started);
        self.enter(engine);
        let finish = finish?;
        engine.store.work_ends();
        stats.decode = started.elapsed() - stats.prefill;
        stats.experts = engine.counters().since(&before);
        stats.non_finite_logits = chooser.non_finite();
        Ok(Outcome { finish, stats })
    }

    #[allow(clippy::too_many_arguments)] // The loop's state, split so that `generate` can measure around it.
    fn run(
        &mut self,
        engine: &mut Engine,
        request: &Request<'_>,
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event) -> ControlFlow<()>,
        chooser: &mut Chooser<'_>,
        stats: &mut Stats,
        started: Instant,
    ) -> Result<Finish, GenerateError> {
        let before = self.tokens.len();
        if let Some(&next) = request.prompt.first() {
            self.hidden_again(engine, next);
        }
        let prompt: Vec<u32> = self.pending.into_iter().chain(request.prompt.iter().copied()).collect();
        let mut ignored = |event| _ = on_event(event);
        let finish = self.prefill(engine, &prompt, cancel, trace, &mut ignored)?;
        self.enter(engine);
        let (prefilled, disk) = (engine.counters(), engine.store.disk_time());
        stats.prefill = started.elapsed();
        stats.prompt_tokens = self.tokens.len() - before;
        if let Finish::Cancelled = finish {
            return Ok(Finish::Cancelled);
        }
        let max_tokens = request.max_tokens;
        // What comes behind a rejected draft was chosen when the draft was.
        let mut chosen = None;
        loop {
            let wanted = stats.new_tokens < max_tokens;
            let behind =
                chosen.take().or_else(|| wanted.then(|| chooser.choose(&self.logits))).transpose()?;
            let mut tell = |token| on_event(Event::Token(token));
            let id = match self.go_on(behind, chooser, stats, max_tokens, started, &mut tell)? {
                ControlFlow::Continue(id) => id,
                ControlFlow::Break(finish) => return Ok(finish),
            };
            let left = request.max_tokens - stats.new_tokens;
            let proposed = self.propose_within(engine, id, left, chooser, true, cancel);
            stats.decode_passes += 1;
            let Some(verified) = self.verify(engine, id, chooser, cancel, trace, on_event)? else {
                return Ok(Finish::Cancelled);
            };
            proposed.count(engine, verified.accepted, &verified.pass, true, &mut stats.drafts);
            stats.decode_experts = engine.counters().since(&prefilled);
            stats.decode_disk = engine.store.disk_time().saturating_sub(disk);
            stats.new_tokens += verified.emitted;
            _ = on_event(Event::Pass(verified.pass));
            if verified.ended {
                return Ok(Finish::Ended);
            }
            chosen = verified.chosen;
        }
    }

    /// Runs `prompt` in chunks of the planned size.
    fn prefill(
        &mut self,
        engine: &mut Engine,
        prompt: &[u32],
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Finish, GenerateError> {
        if prompt.is_empty() && self.logits.is_empty() {
            return Err(ForwardError::NoTokens.into());
        }
        self.check(engine, prompt)?;
        let chunk = engine.plan().chunk;
        let mut done = 0;
        let (began, before) = (Instant::now(), engine.counters().step_bytes());
        for tokens in prompt.chunks(chunk) {
            let layers = engine.spec().layers.len();
            let mut layers_done = |layer: usize, bytes: u64| {
                // A long pass takes minutes: what its layers have done counts as tokens.
                let share = (done * layers + tokens.len() * layer) as f64 / (prompt.len() * layers) as f64;
                let tokens = tokens.len() * layer / layers;
                on_event(Event::Prefill {
                    done: done + tokens,
                    total: prompt.len(),
                    read: Some(bytes.saturating_sub(before)),
                    left: Some(began.elapsed().mul_f64((1.0 - share) / share)),
                });
            };
            let Some(pass) = self.extend(engine, tokens, cancel, trace, &mut layers_done)? else {
                // Part of a prompt is nothing to go on from.
                self.logits.clear();
                return Ok(Finish::Cancelled);
            };
            on_event(Event::Pass(pass));
            done += tokens.len();
        }
        Ok(Finish::Length)
    }

    /// One pass over `tokens`; afterwards they are in the cache and the last row's logits are known.
    /// `None` if it was cancelled.
    fn extend(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        layers_done: &mut dyn FnMut(usize, u64),
    ) -> Result<Option<PassStats>, GenerateError> {
        let start = pass_starts(engine);
        if !self.pass(engine, tokens, 0, cancel, trace, layers_done)? {
            return Ok(None);
        }
        self.keep(engine, tokens, 0..tokens.len())?;
        let (ctx, _, ws) = engine.split();
        let last = tokens.len() - 1..tokens.len();
        self.logits.clear();
        self.logits.extend_from_slice(logits(ctx, ws, last));
        Ok(Some(pass_stats(engine, tokens.len(), &start)))
    }

    /// One pass over `tokens`, of which the last ones are `drafts`; all are in the KV cache afterwards. `false` if it was
    /// cancelled.
    fn pass(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        drafts: usize,
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        layers_done: &mut dyn FnMut(usize, u64),
    ) -> Result<bool, GenerateError> {
        let room = self.kv.len()..self.kv.len() + tokens.len();
        engine.prefixes.make_room(&mut self.kv, room).map_err(ForwardError::from)?;
        let (ctx, store, ws) = engine.split();
        let trace = trace.as_mut().map(|t| &mut **t as &mut dyn Trace);
        let mut watch = Watch { trace, layers_done, left: &mut |_, _| () };
        let mut parts = [Part::new(&mut self.kv, tokens, cancel).with_drafts(drafts)];
        forward(ctx, store, &mut parts, ws, &mut watch);
        let [part] = parts;
        match part.result() {
            Ok(_) => Ok(true),
            Err(ForwardError::Cancelled) => Ok(false),
            Err(other) => Err(other.into()),
        }
    }

    /// An error unless all of `tokens` exist and fit: nothing of a prompt that does not is run.
    pub(crate) fn check(&self, engine: &Engine, tokens: &[u32]) -> Result<(), ForwardError> {
        let (used, capacity, vocab) = (self.kv.len(), self.kv.capacity(), engine.spec().vocab);
        if tokens.len() > capacity - used {
            return Err(ForwardError::ContextFull { tokens: tokens.len(), used, capacity });
        }
        match tokens.iter().find(|&&token| token as usize >= vocab) {
            Some(&token) => Err(ForwardError::Token { token, vocab }),
            None => Ok(()),
        }
    }

    /// Appends `tokens` and calls `on_row` with each token's position in `tokens` and the logits
    /// after it: teacher forcing. A pending token is run first and has no row.
    pub fn run_tokens(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        cancel: &CancelToken,
        on_row: &mut dyn FnMut(usize, &[f32]),
    ) -> Result<(), GenerateError> {
        self.run_rows(engine, tokens, cancel, &mut None, &mut |row| {
            if let Row::Logits { at, logits } = row {
                on_row(at, logits);
            }
        })
    }

    /// The same, also saying what each pass over `tokens` cost, after its rows.
    fn run_rows(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        cancel: &CancelToken,
        trace: &mut Option<&mut (dyn Trace + '_)>,
        on_row: &mut dyn FnMut(Row<'_>),
    ) -> Result<(), GenerateError> {
        engine.store.work_begins();
        if let Some(&next) = tokens.first() {
            self.hidden_again(engine, next);
        }
        if let Some(pending) = self.pending {
            self.check(engine, &[pending])?;
            if self.extend(engine, &[pending], cancel, trace, &mut |_, _| ())?.is_none() {
                return Err(ForwardError::Cancelled.into());
            }
        }
        self.check(engine, tokens)?;
        let (chunk, vocab) = (engine.plan().chunk, engine.spec().vocab);
        let mut at = 0;
        for tokens in tokens.chunks(chunk) {
            let start = pass_starts(engine);
            if !self.pass(engine, tokens, 0, cancel, trace, &mut |_, _| ())? {
                return Err(ForwardError::Cancelled.into());
            }
            self.keep(engine, tokens, 0..tokens.len())?;
            let (ctx, _, ws) = engine.split();
            for first in (0..tokens.len()).step_by(LOGIT_ROWS) {
                let rows = first..tokens.len().min(first + LOGIT_ROWS);
                let block = logits(ctx, ws, rows);
                for logits in block.chunks_exact(vocab) {
                    on_row(Row::Logits { at, logits });
                    at += 1;
                }
                self.logits.clear();
                self.logits.extend_from_slice(&block[block.len() - vocab..]);
            }
            on_row(Row::Pass(pass_stats(engine, tokens.len(), &start)));
        }
        engine.store.work_ends();
        Ok(())
    }

    /// Scores every token of `tokens` after the first one, given those before it; `trace` sees what the passes
    /// choose, and `on_event` how many tokens are scored and what each pass cost.
    ///
    /// Starts from an empty sequence, whatever this one held; it holds `tokens` afterwards.
    pub fn score(
        &mut self,
        engine: &mut Engine,
        tokens: &[u32],
        cancel: &CancelToken,
        mut trace: Option<&mut (dyn Trace + '_)>,
        on_event: &mut dyn FnMut(Event),
    ) -> Result<Vec<TokenScore>, GenerateError> {
        self.truncate(0);
        let mut scores = Vec::with_capacity(tokens.len());
        let mut failed = None;
        self.run_rows(engine, tokens, cancel, &mut trace, &mut |row| {
            let (at, row) = match row {
                Row::Logits { at, logits } => (at, logits),
                Row::Pass(stats) => return on_event(Event::Pass(stats)),
            };
            if let Some(&token) = tokens.get(at + 1) {
                match argmax(row) {
                    Ok(best) => {
                        let log_probability = log_probability(row, token);
                        scores.push(TokenScore { token, log_probability, best });
                    }
                    Err(error) => failed = Some(error),
                }
            }
            on_event(Event::Prefill { done: at + 1, total: tokens.len(), read: None, left: None });
        })?;
        match failed {
            Some(error) => Err(error.into()),
            None => Ok(scores),
        }
    }
}

/// What there is before a pass.
pub(crate) fn pass_starts(engine: &Engine) -> PassStart {
    let phases = engine.workspace.profile.all();
    PassStart { started: Instant::now(), experts: engine.counters(), phases }
}

/// What a pass over `rows` tokens cost.
pub(crate) fn pass_stats(engine: &Engine, rows: usize, start: &PassStart) -> PassStats {
    let mut phases = engine.workspace.profile.all();
    for (now, before) in phases.iter_mut().zip(start.phases) {
        *now = now.saturating_sub(before);
    }
    let experts = engine.counters().since(&start.experts);
    PassStats { rows, time: start.started.elapsed(), experts, phases }
}

/// What running given tokens brings.
#[allow(clippy::large_enum_variant, reason = "looked at and dropped")]
enum Row<'a> {
    /// The logits after the token at this place.
    Logits { at: usize, logits: &'a [f32] },
    /// A pass is over.
    Pass(PassStats),
}
