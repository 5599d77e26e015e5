//! Whose turn it is: which model is in memory, who waits for which, and what is to be done next.
//!
//! Nothing here loads, waits or looks at a clock: time comes in as a number, and what is to be done goes out as a
//! [`Step`]. The rules:
//!
//! - Requests of the model in memory begin at once, unless somebody came before who waits for another model.
//! - The first who waits decides which model comes next, as soon as nothing runs of the one in memory.
//! - A model that has been loaded serves everybody who waited for it by then, in one go, so that requests that take
//!   turns do not cost a load each. Who comes later stands behind those who wait for another model.
//! - Batch work has nobody who waits for it: it holds nobody up, and sends no model away that somebody used just now.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// After a failed load the next one is not tried for so long: every try costs the model in memory its place.
pub const TRY_AGAIN: Duration = Duration::from_secs(10);
/// Batch work leaves the model in memory that somebody used less than this ago.
const QUIET: Duration = Duration::from_secs(30);

/// What is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Nothing.
    Empty,
    /// This model is being loaded, since then.
    Loading(usize, Instant),
    /// This model.
    Resident(usize),
    /// This model, not for much longer.
    Unloading(usize),
}

impl Standing {
    /// The model that is, or will be, in memory.
    fn kept(self) -> Option<usize> {
        match self {
            Self::Loading(place, _) | Self::Resident(place) => Some(place),
            Self::Empty | Self::Unloading(_) => None,
        }
    }
}

/// What becomes of a request at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It may begin.
    Now,
    /// It waits under this number, behind so many.
    Waits {
        /// Its number.
        ticket: u64,
        /// Requests that came first.
        ahead: usize,
    },
}

/// Why a request gets no model.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The model could not be loaded.
    #[error("the model {model:?} could not be loaded: {reason}")]
    Failed {
        /// Its name.
        model: String,
        /// What was wrong.
        reason: String,
        /// Until another try.
        again: Duration,
    },
    /// Too many wait.
    #[error("{waiting} requests are waiting for a model already; try again later")]
    Full {
        /// How many.
        waiting: usize,
    },
    /// The program is ending.
    #[error("the server is shutting down; send the request again when it is back")]
    Ending,
}

/// What is to be done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// This request may begin.
    Grant(u64),
    /// This request is told that it gets no model.
    Refuse(u64, Refusal),
    /// This model is to be loaded.
    Load(usize),
    /// The model in memory is to be taken out.
    Unload,
    /// Nothing, until something happens, or until then.
    Rest(Option<Instant>),
}

/// What was counted of a model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Loads {
    /// Times that it was loaded.
    pub done: u64,
    /// Times that it could not be.
    pub failed: u64,
    /// What all of that took.
    pub time: Duration,
    /// What loading it took the last time.
    pub last: Option<Duration>,
    /// When it failed, and why, if it did the last time.
    pub failure: Option<(Instant, String)>,
}

#[derive(Clone, Copy, Debug)]
struct Waiter {
    ticket: u64,
    place: usize,
    batch: bool,
}

/// Who waits, and what is in memory.
#[derive(Debug)]
pub struct Line {
    standing: Standing,
    /// Requests that run, and since when none has.
    leases: usize,
    rests: Instant,
    /// Of the model in memory: the first number that was not given out when its load was done.
    opened: u64,
    /// When the last request ended that somebody waited for.
    used: Option<Instant>,
    waiting: VecDeque<Waiter>,
    next: u64,
    names: Vec<String>,
    loads: Vec<Loads>,
    most: usize,
    idle: Option<Duration>,
    closed: bool,
}

impl Line {
    /// Models of these names, the first of which was loaded just now. At most `most` requests wait that somebody waits
    /// for; a model that nobody uses for as long as `idle` leaves.
    pub fn new(
        names: Vec<String>,
        most: usize,
        idle: Option<Duration>,
        took: Duration,
        now: Instant,
    ) -> Self {
        let mut loads = vec![Loads::default(); names.len()];
        if let Some(first) = loads.first_mut() {
            *first = Loads { done: 1, time: took, last: Some(took), ..Loads::default() };
        }
        Self {
            standing: Standing::Resident(0),
            leases: 0,
            rests: now,
            opened: 0,
            used: None,
            waiting: VecDeque::new(),
            next: 0,
            names,
            loads,
            most,
            idle,
            closed: false,
        }
    }

    /// What is in memory.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Time until a model is in memory, if it is loaded next and nothing has to end before that; by the last load.
    pub fn until_loaded(&self, place: usize, now: Instant) -> Option<Duration> {
        let last = self.loads.get(place)?.last?;
        match self.standing {
            Standing::Loading(loading, since) if loading == place => {
                Some(last.saturating_sub(now.saturating_duration_since(since)))
            }
            Standing::Resident(resident) if resident == place => Some(Duration::ZERO),
            Standing::Loading(..) => None,
            Standing::Empty | Standing::Unloading(_) | Standing::Resident(_) => {
                (self.leases == 0 && self.first().is_none_or(|first| first.place == place)).then_some(last)
            }
        }
    }

    /// Whether the end has begun.
    pub fn is_closed(&self) -> bool {
        self.closed
    }

    /// What was counted, by model.
    pub fn loads(&self) -> &[Loads] {
        &self.loads
    }

    /// Requests that wait: those that somebody waits for, and batch work.
    pub fn waiting(&self) -> (usize, usize) {
        let batch = self.waiting.iter().filter(|waiter| waiter.batch).count();
        (self.waiting.len() - batch, batch)
    }

    /// A request for a model.
    pub fn ask(&mut self, place: usize, batch: bool, now: Instant) -> Result<Asked, Refusal> {
        if self.closed {
            return Err(Refusal::Ending);
        }
        if let Some(refusal) = self.refusal(place, now) {
            return Err(refusal);
        }
        let ticket = self.next;
        self.next += 1;
        let waiter = Waiter { ticket, place, batch };
        if self.standing == Standing::Resident(place) && !self.is_blocked(&waiter) {
            self.leases += 1;
            return Ok(Asked::Now);
        }
        let (waiting, waiting_batch) = self.waiting();
        if !batch && waiting >= self.most {
            return Err(Refusal::Full { waiting });
        }
        self.waiting.push_back(waiter);
        let ahead = self.leases + waiting + if batch { waiting_batch } else { 0 };
        Ok(Asked::Waits { ticket, ahead })
    }

    /// A request that waited does not want to any more.
    pub fn leave(&mut self, ticket: u64) {
        self.waiting.retain(|waiter| waiter.ticket != ticket);
    }

    /// A request that ran is over.
    pub fn release(&mut self, batch: bool, now: Instant) {
        self.leases = self.leases.saturating_sub(1);
        self.rests = now;
        if !batch {
            self.used = Some(now);
        }
    }

    /// A load is over, one way or the other.
    pub fn loaded(&mut self, result: Result<(), String>, now: Instant) {
        let Standing::Loading(place, since) = self.standing else { return };
        let took = now.saturating_duration_since(since);
        let loads = &mut self.loads[place];
        loads.time += took;
        match result {
            Ok(()) => {
                loads.done += 1;
                (loads.last, loads.failure) = (Some(took), None);
                (self.standing, self.opened, self.rests) = (Standing::Resident(place), self.next, now);
            }
            Err(reason) => {
                loads.failed += 1;
                loads.failure = Some((now, reason));
                self.standing = Standing::Empty;
            }
        }
    }

    /// The model that was to be taken out is.
    pub fn unloaded(&mut self) {
        if matches!(self.standing, Standing::Unloading(_)) {
            self.standing = Standing::Empty;
        }
    }

    /// The end: nothing new is taken, and no model is loaded any more. Who waits for the one that is in memory, or on
    /// its way there, is served.
    pub fn close(&mut self) {
        self.closed = true;
    }

    /// What is to be done now. To be asked again until it is [`Step::Rest`].
    pub fn step(&mut self, now: Instant) -> Step {
        if let Some((at, refusal)) = self.refused(now) {
            let ticket = self.waiting.remove(at).map_or(0, |waiter| waiter.ticket);
            return Step::Refuse(ticket, refusal);
        }
        match self.standing {
            Standing::Loading(..) | Standing::Unloading(_) => Step::Rest(None),
            Standing::Resident(place) => {
                let may = |waiter: &&Waiter| waiter.place == place && !self.is_blocked(waiter);
                if let Some(ticket) = self.waiting.iter().find(may).map(|waiter| waiter.ticket) {
                    self.leave(ticket);
                    self.leases += 1;
                    return Step::Grant(ticket);
                }
                match self.leaves(now) {
                    Some(at) if at <= now => {
                        self.standing = Standing::Unloading(place);
                        Step::Unload
                    }
                    at => Step::Rest(at),
                }
            }
            Standing::Empty => match self.first() {
                None => Step::Rest(None),
                Some(Waiter { place, .. }) => {
                    self.standing = Standing::Loading(place, now);
                    Step::Load(place)
                }
            },
        }
    }

    /// When the model in memory leaves, as it looks now.
    fn leaves(&self, now: Instant) -> Option<Instant> {
        if self.leases > 0 || self.closed {
            return None;
        }
        match self.first() {
            Some(Waiter { batch: false, .. }) => Some(now),
            Some(Waiter { batch: true, .. }) => Some(self.used.map_or(now, |used| used + QUIET)),
            None => self.rests.checked_add(self.idle?),
        }
    }

    /// Who decides which model comes next.
    fn first(&self) -> Option<Waiter> {
        self.waiting.iter().find(|waiter| !waiter.batch).or(self.waiting.front()).copied()
    }

    /// Whether somebody who waits for another model comes first.
    fn is_blocked(&self, waiter: &Waiter) -> bool {
        let waited = waiter.ticket < self.opened;
        self.waiting.iter().filter(|other| other.place != waiter.place).any(|other| {
            match (waiter.batch, other.batch) {
                (false, true) => false,
                (true, false) => true,
                (false, false) | (true, true) => !waited && other.ticket < waiter.ticket,
            }
        })
    }

    /// Somebody who waits in vain.
    fn refused(&self, now: Instant) -> Option<(usize, Refusal)> {
        self.waiting.iter().enumerate().find_map(|(at, waiter)| {
            let in_vain = self.closed && self.standing.kept() != Some(waiter.place);
            let refusal = if in_vain { Some(Refusal::Ending) } else { self.refusal(waiter.place, now) };
            Some((at, refusal?))
        })
    }

    /// Why a model is not to be had now, if it could not be loaded a moment ago.
    fn refusal(&self, place: usize, now: Instant) -> Option<Refusal> {
        let (failed, reason) = self.loads.get(place)?.failure.as_ref()?;
        let again = TRY_AGAIN.checked_sub(now.saturating_duration_since(*failed))?;
        let refusal = Refusal::Failed { model: self.names[place].clone(), reason: reason.clone(), again };
        // While another try is under way, its end is waited for.
        (!again.is_zero() && self.standing.kept() != Some(place)).then_some(refusal)
    }
}

#[cfg(test)]
mod tests;
