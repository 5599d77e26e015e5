//! The team under loom, which runs every order of its threads' steps (with a bounded number of
//! preemptions) and everything that a weak memory may show them. A lost wake-up shows as a
//! deadlock, a wrong ordering as a race on a part's data or on the job. `.ci/loom` runs it.

use super::Team;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicUsize, Ordering};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Preemptions with two threads: a caller that closes the job while the worker is in a part, and
/// sees it leave while it spins, takes three.
const TWO_THREADS: usize = 3;
/// With three threads, where one more would take minutes.
const THREE_THREADS: usize = 2;

fn model(preemptions: usize, body: impl Fn() + Sync + Send + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(body);
}

/// What parts write without a lock; loom reports two accesses that nothing orders.
struct Slots(Vec<UnsafeCell<usize>>);

// SAFETY: loom's cells check every access; an unordered one ends the test.
unsafe impl Sync for Slots {}

impl Slots {
    fn new(parts: usize) -> Self {
        Self((0..parts).map(|_| UnsafeCell::new(0)).collect())
    }

    fn raise(&self, part: usize) {
        // SAFETY: as for `Sync`.
        self.0[part].with_mut(|slot| unsafe { *slot += 1 });
    }

    /// Every part's count, read by the caller after a job.
    fn assert_all(&self, expected: usize) {
        for slot in &self.0 {
            // SAFETY: as for `Sync`.
            slot.with(|slot| assert_eq!(unsafe { *slot }, expected));
        }
    }
}

fn run(team: &Team, slots: &Slots) {
    team.run(slots.0.len(), &|part| slots.raise(part));
}

#[test]
fn one_job_with_a_worker_that_may_be_late() {
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        let slots = Slots::new(2);
        run(&team, &slots);
        slots.assert_all(1);
    });
}

#[test]
fn two_jobs_in_a_row() {
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        // Each job's slots live no longer than its call: a worker of the first that is late has
        // to find the job closed or replaced.
        for _ in 0..2 {
            let slots = Slots::new(2);
            run(&team, &slots);
            slots.assert_all(1);
        }
    });
}

#[test]
fn the_second_job_sees_what_the_first_wrote() {
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        let slots = Slots::new(2);
        run(&team, &slots);
        // The threads may swap parts between the jobs.
        team.run(2, &|part| slots.raise(1 - part));
        slots.assert_all(2);
    });
}

#[test]
fn shares_are_stolen() {
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        let slots = Slots::new(3);
        run(&team, &slots);
        slots.assert_all(1);
    });
}

#[test]
fn two_workers_take_their_parts() {
    model(THREE_THREADS, || {
        let team = Team::new(3).unwrap();
        let slots = Slots::new(3);
        run(&team, &slots);
        slots.assert_all(1);
    });
}

#[test]
fn a_part_that_needs_the_worker_gets_it() {
    // The caller's part cannot end before the worker has run its own: the worker has to be woken
    // if it sleeps, and nothing but its own share may be needed for that.
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        let met = AtomicUsize::new(0);
        team.run(2, &|_| {
            met.fetch_add(1, Ordering::Relaxed);
            while met.load(Ordering::Relaxed) < 2 {
                loom::thread::yield_now();
            }
        });
        assert_eq!(met.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn a_panic_comes_back_and_the_next_job_runs() {
    struct Failed;
    model(TWO_THREADS, || {
        let team = Team::new(2).unwrap();
        let result = catch_unwind(AssertUnwindSafe(|| {
            // Not a message: loom's own failures have one.
            team.run(2, &|part| {
                if part == 1 {
                    std::panic::resume_unwind(Box::new(Failed));
                }
            });
        }));
        assert!(result.unwrap_err().is::<Failed>());
        let slots = Slots::new(2);
        run(&team, &slots);
        slots.assert_all(1);
    });
}

#[test]
fn a_team_ends_with_workers_that_sleep_or_are_about_to() {
    model(THREE_THREADS, || drop(Team::new(3).unwrap()));
}
