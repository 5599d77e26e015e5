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
mod tests {
    use super::*;

    const A: usize = 0;
    const B: usize = 1;
    const C: usize = 2;

    /// A line with a clock of its own, in seconds.
    struct World {
        line: Line,
        start: Instant,
        time: u64,
    }

    impl World {
        fn new(idle: Option<u64>) -> Self {
            let start = Instant::now();
            let names = ["a", "b", "c"].map(str::to_owned).to_vec();
            let idle = idle.map(Duration::from_secs);
            Self { line: Line::new(names, 3, idle, Duration::from_secs(7), start), start, time: 0 }
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_secs(self.time)
        }

        fn pass(&mut self, seconds: u64) {
            self.time += seconds;
        }

        fn ask(&mut self, place: usize) -> Result<Asked, Refusal> {
            self.line.ask(place, false, self.now())
        }

        /// Asks, and waits under the number that is returned.
        fn waits(&mut self, place: usize, batch: bool) -> u64 {
            match self.line.ask(place, batch, self.now()) {
                Ok(Asked::Waits { ticket, .. }) => ticket,
                other => panic!("{other:?}"),
            }
        }

        fn step(&mut self) -> Step {
            self.line.step(self.now())
        }

        fn rest_until(&mut self, seconds: Option<u64>) {
            let until = seconds.map(|seconds| self.start + Duration::from_secs(seconds));
            assert_eq!(self.step(), Step::Rest(until));
        }

        fn release(&mut self, batch: bool) {
            self.line.release(batch, self.now());
        }

        /// Takes out what is in memory and loads `place`, in three seconds.
        fn switch(&mut self, place: usize) {
            assert_eq!(self.step(), Step::Unload);
            self.rest_until(None);
            self.line.unloaded();
            self.load(place);
        }

        fn load(&mut self, place: usize) {
            assert_eq!(self.step(), Step::Load(place));
            self.rest_until(None);
            self.pass(3);
            self.line.loaded(Ok(()), self.now());
            assert_eq!(self.line.standing(), Standing::Resident(place));
        }
    }

    #[test]
    fn who_waits_for_another_model_is_not_overtaken() {
        let mut world = World::new(None);
        assert_eq!(world.ask(A), Ok(Asked::Now));
        assert_eq!(world.ask(B), Ok(Asked::Waits { ticket: 1, ahead: 1 }));
        assert_eq!(
            world.ask(A),
            Ok(Asked::Waits { ticket: 2, ahead: 2 }),
            "nothing new for the one in memory"
        );
        world.rest_until(None);
        world.release(false);
        world.switch(B);
        assert_eq!(world.step(), Step::Grant(1));
        assert_eq!(world.ask(B), Ok(Asked::Waits { ticket: 3, ahead: 2 }));
        world.release(false);
        world.switch(A);
        assert_eq!(world.step(), Step::Grant(2));
    }

    #[test]
    fn a_load_serves_all_who_waited_for_it() {
        let mut world = World::new(None);
        let tickets = [B, C, B].map(|place| world.waits(place, false));
        world.switch(B);
        assert_eq!(world.step(), Step::Grant(tickets[0]));
        assert_eq!(world.step(), Step::Grant(tickets[2]), "although another one comes first");
        world.rest_until(None);
        world.release(false);
        world.release(false);
        world.switch(C);
        assert_eq!(world.step(), Step::Grant(tickets[1]));
        assert_eq!(world.line.loads()[B].last, Some(Duration::from_secs(3)));
    }

    #[test]
    fn a_forecast_is_the_last_load() {
        let seconds = |seconds| Some(Duration::from_secs(seconds));
        let mut world = World::new(None);
        let until = |world: &World, place| world.line.until_loaded(place, world.now());
        assert_eq!((until(&world, A), until(&world, B)), (seconds(0), None), "b was never loaded");
        let _ = world.waits(B, false);
        world.switch(B);
        assert_eq!(world.step(), Step::Grant(0));
        assert_eq!(until(&world, A), None, "nobody knows when the request for b ends");
        world.release(false);
        assert_eq!(until(&world, A), seconds(7));
        let _ = world.waits(A, false);
        assert_eq!(world.step(), Step::Unload);
        world.line.unloaded();
        assert_eq!((until(&world, A), until(&world, B)), (seconds(7), None));
        assert_eq!(world.step(), Step::Load(A));
        world.pass(2);
        assert_eq!(until(&world, A), seconds(5));
        world.pass(20);
        assert_eq!(until(&world, A), seconds(0));
    }

    #[test]
    fn who_leaves_holds_nobody_up() {
        let mut world = World::new(None);
        assert_eq!(world.ask(A), Ok(Asked::Now));
        let tickets = [B, A, C].map(|place| world.waits(place, false));
        assert_eq!(world.ask(A), Err(Refusal::Full { waiting: 3 }));
        world.line.leave(tickets[0]);
        assert_eq!(world.step(), Step::Grant(tickets[1]), "the one who waits for c came later");
        world.line.leave(tickets[2]);
        world.rest_until(None);
        assert_eq!(world.ask(A), Ok(Asked::Now));
    }

    #[test]
    fn a_failed_load_is_told_to_those_who_wait_for_it_and_to_nobody_else() {
        let mut world = World::new(None);
        let tickets = [B, A, B].map(|place| world.waits(place, false));
        assert_eq!(world.step(), Step::Unload);
        world.line.unloaded();
        assert_eq!(world.step(), Step::Load(B));
        world.pass(2);
        world.line.loaded(Err("no such file".to_owned()), world.now());
        let failed = |seconds| Refusal::Failed {
            model: "b".to_owned(),
            reason: "no such file".to_owned(),
            again: Duration::from_secs(seconds),
        };
        assert_eq!(world.step(), Step::Refuse(tickets[0], failed(10)));
        assert_eq!(world.step(), Step::Refuse(tickets[2], failed(10)));
        world.load(A);
        assert_eq!(world.step(), Step::Grant(tickets[1]));
        world.release(false);
        // Another try does not cost the others their model at once, but later.
        world.pass(2);
        assert_eq!(world.ask(B), Err(failed(5)));
        world.pass(5);
        let again = world.waits(B, false);
        world.switch(B);
        assert_eq!(world.step(), Step::Grant(again));
        let Loads { done, failed, time, failure, .. } = &world.line.loads()[B];
        assert_eq!((*done, *failed, *time, failure), (1, 1, Duration::from_secs(5), &None));
    }

    #[test]
    fn a_model_that_nobody_uses_leaves_and_comes_back() {
        let mut world = World::new(Some(60));
        world.rest_until(Some(60));
        world.pass(50);
        assert_eq!(world.ask(A), Ok(Asked::Now));
        world.pass(100);
        world.rest_until(None);
        world.release(false);
        world.rest_until(Some(210));
        world.pass(59);
        world.rest_until(Some(210));
        world.pass(1);
        assert_eq!(world.step(), Step::Unload);
        let ticket = world.waits(A, false);
        world.line.unloaded();
        world.load(A);
        assert_eq!(world.step(), Step::Grant(ticket));
        // A model that nobody took although it was loaded leaves as well.
        world.release(false);
        world.pass(60);
        assert_eq!(world.step(), Step::Unload);
        world.line.unloaded();
        let ticket = world.waits(A, false);
        assert_eq!(world.step(), Step::Load(A));
        world.line.leave(ticket);
        world.line.loaded(Ok(()), world.now());
        world.pass(60);
        assert_eq!(world.step(), Step::Unload);
        world.line.unloaded();
        world.rest_until(None);
        assert_eq!(world.line.standing(), Standing::Empty);
    }

    #[test]
    fn batch_work_holds_nobody_up() {
        let mut world = World::new(None);
        assert_eq!(world.ask(A), Ok(Asked::Now));
        let batch = [B, B].map(|place| world.waits(place, true));
        assert_eq!(world.ask(A), Ok(Asked::Now), "only batch work waits for the other model");
        let later = world.waits(A, true);
        world.pass(5);
        world.release(false);
        world.release(false);
        world.rest_until(Some(35));
        world.pass(20);
        assert_eq!(world.ask(A), Ok(Asked::Now));
        world.release(false);
        world.rest_until(Some(55));
        world.pass(30);
        world.switch(B);
        assert_eq!(batch.map(Step::Grant), [world.step(), world.step()]);
        // Somebody wants the other one: no more batch work begins, and what runs is finished.
        let somebody = world.waits(A, false);
        let more = world.waits(B, true);
        world.release(true);
        world.rest_until(None);
        world.release(true);
        world.switch(A);
        assert_eq!(
            world.step(),
            Step::Grant(later),
            "batch work that waited longer comes with the same load"
        );
        assert_eq!(world.step(), Step::Grant(somebody));
        world.release(false);
        world.release(true);
        world.rest_until(Some(world.time + 30));
        world.pass(30);
        world.switch(B);
        assert_eq!(world.step(), Step::Grant(more));
    }

    #[test]
    fn at_the_end_only_what_is_in_memory_is_served() {
        let mut world = World::new(Some(1));
        assert_eq!(world.ask(A), Ok(Asked::Now));
        let tickets = [B, A].map(|place| world.waits(place, false));
        world.line.close();
        assert_eq!(world.ask(A), Err(Refusal::Ending));
        assert_eq!(world.step(), Step::Refuse(tickets[0], Refusal::Ending));
        assert_eq!(world.step(), Step::Grant(tickets[1]));
        world.release(false);
        world.release(false);
        world.pass(100);
        world.rest_until(None);

        let mut world = World::new(None);
        let tickets = [B, C].map(|place| world.waits(place, false));
        assert_eq!(world.step(), Step::Unload);
        world.line.unloaded();
        assert_eq!(world.step(), Step::Load(B));
        world.line.close();
        assert_eq!(world.step(), Step::Refuse(tickets[1], Refusal::Ending));
        world.rest_until(None);
        world.line.loaded(Ok(()), world.now());
        assert_eq!(world.step(), Step::Grant(tickets[0]));
    }

    /// Whatever comes in whatever order: nobody waits for ever, and two models are never in memory at once.
    #[test]
    fn everybody_is_served() {
        use proptest::prelude::*;
        proptest!(|(events in proptest::collection::vec((0usize..3, any::<bool>(), 0usize..4), 1..60))| {
            let mut world = World::new(Some(40));
            let (mut waiting, mut running) = (Vec::new(), Vec::new());
            for (place, batch, then) in events {
                match world.line.ask(place, batch, world.now()) {
                    Ok(Asked::Now) => running.push(batch),
                    Ok(Asked::Waits { ticket, .. }) => waiting.push((ticket, place, batch)),
                    Err(refusal) => prop_assert_eq!(refusal, Refusal::Full { waiting: 3 }),
                }
                for _ in 0..then {
                    turn(&mut world, &mut waiting, &mut running);
                }
            }
            for _ in 0..2000 {
                turn(&mut world, &mut waiting, &mut running);
            }
            prop_assert_eq!((waiting, running), (vec![], vec![]));
        });
    }

    /// One thing happens.
    fn turn(world: &mut World, waiting: &mut Vec<(u64, usize, bool)>, running: &mut Vec<bool>) {
        let before = world.line.standing();
        match world.step() {
            Step::Grant(ticket) => {
                let at = waiting.iter().position(|(known, ..)| *known == ticket).expect("it waits");
                let (_, place, batch) = waiting.remove(at);
                assert_eq!(before, Standing::Resident(place));
                running.push(batch);
            }
            Step::Refuse(..) => panic!("no load fails"),
            Step::Load(_) => assert_eq!((before, running.len()), (Standing::Empty, 0)),
            Step::Unload => assert!(running.is_empty() && matches!(before, Standing::Resident(_))),
            Step::Rest(until) => match (before, running.pop()) {
                (_, Some(batch)) => world.release(batch),
                (Standing::Loading(..), None) => world.line.loaded(Ok(()), world.now()),
                (Standing::Unloading(_), None) => world.line.unloaded(),
                (_, None) => assert!(waiting.is_empty() || until.is_some(), "{waiting:?} wait for nothing"),
            },
        }
        world.pass(1);
    }
}
