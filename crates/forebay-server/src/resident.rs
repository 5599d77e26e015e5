//! An engine in memory: what serves requests of a model, until the model leaves.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use forebay_engine::scheduler::{Health, Limits, SchedulerState, Totals, View};
use forebay_engine::{Engine, Scheduler};
use forebay_tiers::Counters;

use crate::fleet::LoadProgress;

/// Lets an engine go that is not needed any more, and its memory with it.
pub type Afterwards = Box<dyn FnOnce(Engine) + Send>;
/// Opens the engine of a model. May be called again and again, never while another one is in memory.
pub type Open = Box<dyn Fn(&LoadProgress) -> Result<Opened, String> + Send + Sync>;

/// An engine that was just opened.
pub struct Opened {
    /// The engine.
    pub engine: Engine,
    /// How it is let go at its end.
    pub afterwards: Afterwards,
}

/// An engine at work.
pub struct Resident {
    /// Its number among the models that are served.
    pub place: usize,
    /// The engine, behind its queue.
    pub scheduler: Scheduler,
    /// What was done by those who were in memory before.
    before: Past,
    afterwards: Mutex<Option<Afterwards>>,
}

/// What was done, in numbers that only grow.
#[derive(Clone, Copy, Default)]
struct Past {
    totals: Totals,
    experts: Counters,
}

impl Resident {
    /// Puts an engine to work; `before` is the one that was in memory before.
    ///
    /// # Errors
    /// If there is no thread to be had.
    pub fn start(
        place: usize,
        opened: Opened,
        limits: Limits,
        before: Option<&Self>,
    ) -> std::io::Result<Self> {
        let Opened { engine, afterwards } = opened;
        let scheduler = Scheduler::start(engine, limits)?;
        let before = before.map(Self::past).unwrap_or_default();
        Ok(Self { place, scheduler, before, afterwards: Mutex::new(Some(afterwards)) })
    }

    /// Finishes what is under way, for as long as `patience`, and lets the engine go. False if it had failed.
    pub fn put_away(&self, patience: Duration) -> bool {
        let Some(engine) = self.scheduler.drain(patience) else {
            // Gone already, or lost.
            return !matches!(self.scheduler.state().health, Health::Failed { .. });
        };
        let afterwards = self.afterwards.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(afterwards) = afterwards {
            afterwards(engine);
        }
        true
    }

    fn past(&self) -> Past {
        let SchedulerState { totals, experts, .. } = self.state();
        Past { totals, experts }
    }

    /// How it stands. Numbers that only grow count those who were in memory before too.
    pub fn state(&self) -> SchedulerState {
        let mut state = self.scheduler.state();
        state.totals.join(&self.before.totals);
        join_experts(&mut state.experts, &self.before.experts);
        state
    }

    /// Everything there is to see of this engine.
    pub fn look(&self) -> View {
        self.scheduler.look()
    }
}

/// Adds what [`crate::metrics`] shows of them.
fn join_experts(all: &mut Counters, more: &Counters) {
    all.hits += more.hits;
    all.misses += more.misses;
    all.bytes += more.bytes;
    all.wait_ns += more.wait_ns;
    all.service_ns += more.service_ns;
    all.failures += more.failures;
    all.retries += more.retries;
}
