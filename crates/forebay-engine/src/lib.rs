//! Turns token ids into token ids: planning, sessions, sampling, decode loop.
//!
//! - [`plan`]: what will fit, decided before anything is allocated.
//! - [`engine`]: a loaded model with its expert store and threads.
//! - [`session`]: one sequence: prefill, decode, continue, score.
//! - [`sample`], [`rng`]: from logits to a token.
//!
//! Text, templates and command lines live elsewhere; this crate sees ids only.

pub mod engine;
pub mod plan;
pub mod rng;
pub mod sample;
pub mod session;

pub use engine::{Engine, EngineOptions, Inspection, OpenError, inspect};
pub use plan::{BudgetFrom, Plan, PlanError};
pub use sample::{SampleError, Sampler, Sampling};
pub use session::{Event, Finish, GenerateError, Outcome, Request, Session, Stats, TokenScore};
