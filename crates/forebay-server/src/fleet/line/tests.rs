//! What the rules say, step by step.

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
    assert_eq!(world.ask(A), Ok(Asked::Waits { ticket: 2, ahead: 2 }), "nothing new for the one in memory");
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
    assert_eq!(world.step(), Step::Grant(later), "batch work that waited longer comes with the same load");
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
