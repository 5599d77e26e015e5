//! Jobs on an engine's own thread: what comes out is what comes out alone, in order, and each ends exactly once.

mod common;

use std::ops::ControlFlow;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use common::{demo, eval, greedy, ids};
use forebay_core::{CancelToken, Constraint, ConstraintError, Ending, TokenSet};
use forebay_engine::scheduler::Health;
use forebay_engine::{
    Engine, EngineOptions, Finish, Job, JobError, JobEvent, Limits, Priority, Refused, Sampling, Scheduler,
};

fn open() -> Engine {
    let options = EngineOptions { context: Some(256), chunk: Some(16), ..EngineOptions::default() };
    Engine::open(&demo(), options, &mut |_, _| {}).unwrap()
}

/// One job at a time; several at once are `together/`.
fn start(limits: Limits) -> Scheduler {
    Scheduler::start(open(), Limits { running: 1, ..limits }).unwrap()
}

/// Token `at` of the held-out text and those behind it.
fn prompt(at: usize, len: usize) -> Vec<u32> {
    let heldout = eval("heldout.json");
    ids(&heldout["segments"][0]["windows"][0])[at..at + len].to_vec()
}

/// A job whose events, with its name, go to a channel.
fn job(name: usize, prompt: Vec<u32>, tokens: usize, to: &Sender<(usize, JobEvent)>) -> Job {
    let to = to.clone();
    Job {
        prompt,
        max_tokens: Some(tokens),
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        constraint: None,
        priority: Priority::Interactive,
        cancel: CancelToken::new(),
        events: Box::new(move |event| {
            _ = to.send((name, event));
            ControlFlow::Continue(())
        }),
    }
}

/// Everything that is told until all senders are gone.
fn all(events: Receiver<(usize, JobEvent)>) -> Vec<(usize, JobEvent)> {
    let mut found = Vec::new();
    while let Ok(event) = events.recv_timeout(Duration::from_secs(60)) {
        found.push(event);
    }
    found
}

fn of(all: &[(usize, JobEvent)], name: usize) -> Vec<&JobEvent> {
    all.iter().filter(|(of, _)| *of == name).map(|(_, event)| event).collect()
}

fn tokens(events: &[&JobEvent]) -> Vec<u32> {
    let token = |event: &&JobEvent| match event {
        JobEvent::Token(token) => Some(token.id),
        _ => None,
    };
    events.iter().filter_map(token).collect()
}

fn is_end(event: &JobEvent) -> bool {
    matches!(event, JobEvent::Done(_) | JobEvent::Failed(_))
}

/// Exactly one event says how it ended, and it is the last one.
#[track_caller]
fn ends_once(events: &[&JobEvent]) {
    assert_eq!(events.iter().filter(|event| is_end(event)).count(), 1, "{events:?}");
    assert!(is_end(events.last().unwrap()), "{events:?}");
    assert!(matches!(events[0], JobEvent::Queued { .. }), "{events:?}");
}

#[track_caller]
fn finish(events: &[&JobEvent]) -> Finish {
    match events.last() {
        Some(JobEvent::Done(outcome)) => outcome.finish,
        other => panic!("{other:?}"),
    }
}

#[test]
fn jobs_give_the_tokens_that_they_give_alone_and_go_on_from_what_is_known() {
    let mut alone = open();
    let prompts = [prompt(0, 40), prompt(0, 60), prompt(100, 33)];
    let want: Vec<_> = prompts.iter().map(|prompt| greedy(&mut alone, prompt, 8)).collect();
    drop(alone);
    let scheduler = start(Limits::default());
    let forecast = scheduler.forecast(&prompts[0], Some(8));
    assert_eq!(
        (forecast.wait, forecast.prefill, forecast.tokens_per_second),
        (Some(Duration::ZERO), None, None)
    );
    let (send, events) = channel();
    for (name, prompt) in prompts.iter().enumerate() {
        scheduler.submit(job(name, prompt.clone(), 8, &send)).unwrap();
    }
    drop(send);
    let found = all(events);
    for (name, want) in want.iter().enumerate() {
        let events = of(&found, name);
        ends_once(&events);
        assert_eq!(&tokens(&events), want, "job {name}");
        assert_eq!(finish(&events), Finish::Length);
        let started = events.iter().find_map(|event| match event {
            JobEvent::Started { reused, .. } => Some(*reused),
            _ => None,
        });
        // The second one begins as the first one does.
        assert_eq!(started, Some([0, 40, 0][name]), "job {name}");
        assert!(events.iter().any(|event| matches!(event, JobEvent::Prefill { .. })));
    }
    let state = scheduler.state();
    assert_eq!((state.health, state.waiting, state.running), (Health::Ready, 0, 0));
    assert_eq!((state.totals.submitted, state.totals.completed, state.totals.new_tokens), (3, 3, 24));
    assert_eq!((state.totals.reused_tokens, state.totals.prompt_tokens), (40, 40 + 20 + 33));
    let forecast = scheduler.forecast(&prompt(300, 40), Some(8));
    assert!(
        forecast.prefill.is_some_and(|time| time > Duration::ZERO) && forecast.tokens_per_second.is_some()
    );
    assert_eq!(forecast.wait, Some(Duration::ZERO));
    // Of a prompt that is known, one token is to be computed.
    assert!(scheduler.forecast(&prompts[1], Some(8)).prefill <= forecast.prefill);
    assert_eq!(scheduler.forecast(&prompts[1], Some(8)), scheduler.forecast(&[7], Some(8)));
    assert!(scheduler.drain(Duration::from_secs(10)).is_some(), "the engine comes back");
}

#[test]
fn batch_work_waits_for_those_who_wait() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    scheduler.submit(job(0, prompt(0, 40), 20, &send)).unwrap();
    for name in [1, 2] {
        let batch = Job { priority: Priority::Batch, ..job(name, prompt(20 * name, 20), 2, &send) };
        scheduler.submit(batch).unwrap();
    }
    scheduler.submit(job(3, prompt(80, 20), 2, &send)).unwrap();
    drop(send);
    let order: Vec<usize> =
        all(events).into_iter().filter(|(_, event)| is_end(event)).map(|(name, _)| name).collect();
    assert_eq!(order, [0, 3, 1, 2]);
}

#[test]
fn what_is_cancelled_ends_and_the_others_go_on() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    let long = scheduler.submit(job(0, prompt(0, 40), 200, &send)).unwrap();
    let waits = scheduler.submit(job(1, prompt(0, 10), 4, &send)).unwrap();
    let token = CancelToken::new();
    let raised = Job { cancel: token.clone(), ..job(2, prompt(5, 10), 4, &send) };
    scheduler.submit(raised).unwrap();
    scheduler.submit(job(3, prompt(9, 10), 4, &send)).unwrap();
    drop(send);
    // At once, though another one runs.
    let before = Instant::now();
    scheduler.cancel(waits);
    assert!(before.elapsed() < Duration::from_millis(500));
    token.cancel();
    let mut found = Vec::new();
    while !found.iter().any(|(name, event)| *name == 0 && matches!(event, JobEvent::Token(_))) {
        found.push(events.recv_timeout(Duration::from_secs(60)).unwrap());
    }
    scheduler.cancel(long);
    found.extend(all(events));
    for name in 0..4 {
        let events = of(&found, name);
        ends_once(&events);
        let want = if name == 3 { Finish::Length } else { Finish::Cancelled };
        assert_eq!(finish(&events), want, "job {name}");
    }
    assert!(tokens(&of(&found, 0)).len() < 200);
    assert_eq!(tokens(&of(&found, 3)).len(), 4);
    let totals = scheduler.state().totals;
    assert_eq!((totals.completed, totals.cancelled, totals.failed), (1, 3, 0));
}

#[test]
fn a_listener_ends_its_answer_at_a_token() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    let mut seen = 0;
    let ends = Job {
        max_tokens: None,
        events: Box::new(move |event| {
            seen += usize::from(matches!(event, JobEvent::Token(_)));
            _ = send.send((0, event));
            if seen == 3 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        }),
        ..job(0, prompt(0, 20), 1, &channel().0)
    };
    scheduler.submit(ends).unwrap();
    let found = all(events);
    let events = of(&found, 0);
    assert_eq!((tokens(&events).len(), finish(&events)), (3, Finish::Ended));
}

#[test]
fn without_a_limit_the_context_ends_an_answer() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    scheduler.submit(Job { max_tokens: None, ..job(0, prompt(0, 240), 1, &send) }).unwrap();
    drop(send);
    let found = all(events);
    let events = of(&found, 0);
    // The last one is never run.
    assert_eq!((tokens(&events).len(), finish(&events)), (256 - 240 + 1, Finish::Context));
}

#[test]
fn what_cannot_be_served_is_refused() {
    let scheduler = start(Limits { queue: 1, warm_up: false, ..Limits::default() });
    let (send, events) = channel();
    let refused = |job: Job| scheduler.submit(job).unwrap_err();
    assert!(matches!(refused(job(9, Vec::new(), 1, &send)), Refused::NoTokens));
    let long = vec![5; 257];
    assert!(matches!(refused(job(9, long, 1, &send)), Refused::TooLong { tokens: 257, context: 256 }));
    assert!(matches!(refused(job(9, vec![8192], 1, &send)), Refused::Token { token: 8192, vocab: 8192 }));
    let hot = Sampling { temperature: 3.0, ..Sampling::greedy() };
    assert!(matches!(refused(Job { sampling: hot, ..job(9, vec![5], 1, &send) }), Refused::Sampling(_)));

    let running = scheduler.submit(job(0, prompt(0, 40), 200, &send)).unwrap();
    let mut found = Vec::new();
    while !found.iter().any(|(_, event)| matches!(event, JobEvent::Started { .. })) {
        found.push(events.recv_timeout(Duration::from_secs(60)).unwrap());
    }
    scheduler.submit(job(1, prompt(0, 10), 2, &send)).unwrap();
    let full = refused(job(9, prompt(0, 10), 2, &send));
    assert!(matches!(full, Refused::QueueFull { waiting: 1, .. }), "{full}");
    scheduler.cancel(running);
    drop(send);
    found.extend(all(events));
    assert_eq!(finish(&of(&found, 1)), Finish::Length);
    assert!(of(&found, 9).is_empty(), "nothing is told of what was refused");
    assert_eq!(scheduler.state().totals.refused, 1);
}

#[test]
fn draining_finishes_what_is_there_and_takes_nothing_new() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    scheduler.submit(job(0, prompt(0, 40), 30, &send)).unwrap();
    scheduler.submit(job(1, prompt(0, 10), 2, &send)).unwrap();
    let batch = Job { priority: Priority::Batch, ..job(2, prompt(0, 10), 2, &send) };
    scheduler.submit(batch).unwrap();
    let draining = {
        let scheduler = scheduler.clone();
        std::thread::spawn(move || scheduler.drain(Duration::from_secs(60)).is_some())
    };
    while scheduler.state().health == Health::Ready {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(matches!(scheduler.submit(job(9, prompt(0, 10), 1, &send)), Err(Refused::Draining)));
    assert!(draining.join().unwrap(), "the engine comes back");
    drop(send);
    let found = all(events);
    for name in 0..3 {
        ends_once(&of(&found, name));
    }
    assert_eq!((finish(&of(&found, 0)), finish(&of(&found, 1))), (Finish::Length, Finish::Length));
    assert!(matches!(of(&found, 2).last(), Some(JobEvent::Failed(JobError::ShuttingDown))));
    assert!(scheduler.drain(Duration::ZERO).is_none(), "there is one engine");
}

#[test]
fn a_deadline_cuts_what_is_left() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    scheduler.submit(job(0, prompt(0, 40), 200, &send)).unwrap();
    scheduler.submit(job(1, prompt(0, 40), 200, &send)).unwrap();
    drop(send);
    assert!(scheduler.drain(Duration::ZERO).is_some());
    let found = all(events);
    for name in 0..2 {
        ends_once(&of(&found, name));
        assert_eq!(finish(&of(&found, name)), Finish::Cancelled);
    }
}

/// A constraint that fails fails its own job only.
struct Leads;

impl Constraint for Leads {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        Err(ConstraintError::DeadEnd)
    }

    fn allowed(&mut self, _: &mut TokenSet) -> Result<bool, ConstraintError> {
        Ok(false)
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn forced(&mut self, _: &mut Vec<u32>) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        Ok(tokens.len())
    }
}

#[test]
fn an_error_of_one_job_is_its_own() {
    let scheduler = start(Limits::default());
    let (send, events) = channel();
    scheduler.submit(Job { constraint: Some(Box::new(Leads)), ..job(0, prompt(0, 40), 30, &send) }).unwrap();
    scheduler.submit(job(1, prompt(0, 10), 2, &send)).unwrap();
    drop(send);
    let found = all(events);
    assert!(matches!(of(&found, 0).last(), Some(JobEvent::Failed(JobError::Generate(_)))));
    assert_eq!(finish(&of(&found, 1)), Finish::Length);
    assert_eq!(scheduler.state().totals.failed, 1);
}
