//! Turns token ids into token ids: planning, sessions, sampling, decode loop.
//!
//! - [`mod@plan`]: what will fit, decided before anything is allocated.
//! - [`options`]: how a model is run.
//! - [`engine`]: a loaded model with its expert store and threads.
//! - [`mod@idle`]: what happens between two requests.
//! - [`session`]: one sequence: prefill, decode, continue, score.
//! - [`draft`]: tokens that are guessed at and then verified.
//! - [`prefix`]: what earlier sequences left to go on from, in memory and on disk.
//! - [`sample`], [`rng`]: from logits to a token.
//! - [`scheduler`]: an engine on its own thread, and the jobs that wait for it.
//! - [`routes`]: recording which experts were used.
//!
//! Text, templates and command lines live elsewhere; this crate sees ids only.

mod choose;
pub mod draft;
pub mod engine;
pub mod idle;
pub mod options;
pub mod plan;
pub mod prefix;
pub mod rng;
pub mod routes;
pub mod sample;
pub mod scheduler;
pub mod session;

pub use draft::{DraftStats, Drafting};
pub use engine::{Engine, Inspection, OpenError, WhatIf, inspect, inspect_for};
pub use options::{EngineOptions, IoOptions};
pub use plan::{
    Bound, BudgetFrom, Consumer, Decoder, Expectation, ModelFacts, Outlook, Plan, PlanError, PlanRequest,
    Rates, SlotChoice, plan,
};
pub use prefix::{KeepError, PrefixConfig, Saved};
pub use routes::RouteRecorder;
pub use sample::{Logprobs, SampleError, Sampler, Sampling};
pub use scheduler::{Job, JobError, JobEvent, Limits, Priority, Refused, Scheduler, SchedulerState};
pub use session::{
    Event, Finish, GenerateError, Outcome, PassStats, Request, Session, Stats, Token, TokenScore,
};
