//! What a session holds after limits, refusals, cancellations and errors.

mod common;

use std::ops::ControlFlow;

use common::greedy_on;
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{
    Engine, EngineOptions, Event, Finish, GenerateError, OpenError, PlanError, Request, Sampling, Session,
};
use forebay_model::{ForwardError, Trace};
use forebay_testkit::toy;

fn open(options: EngineOptions) -> (tempfile::TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    (dir, engine)
}

fn small() -> EngineOptions {
    EngineOptions { context: Some(32), chunk: Some(8), ..Default::default() }
}

fn request(prompt: &[u32], max_tokens: usize) -> Request<'_> {
    Request { prompt, max_tokens, sampling: Sampling::greedy(), stops: &[] }
}

#[test]
fn a_prompt_that_does_not_fit_is_refused_whole() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let long: Vec<u32> = (0..33).collect();
    let cancel = CancelToken::new();
    let error = session
        .generate(&mut engine, &request(&long, 1), &cancel, None, &mut |_| ControlFlow::Continue(()))
        .unwrap_err();
    assert!(matches!(
        error,
        GenerateError::Forward(ForwardError::ContextFull { tokens: 33, used: 0, capacity: 32 })
    ));
    assert!(session.tokens().is_empty() && engine.counters().requests == 0, "nothing of it was run");
}

/// An id without an embedding in the second chunk must not let the first chunk in, and as the
/// first id of a chunk must not be looked up among the logits before it.
#[test]
fn an_unknown_token_is_refused_before_any_work() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let mut tokens: Vec<u32> = (0..20).collect();
    tokens[8] = 300;
    let cancel = CancelToken::new();
    for error in [
        session
            .generate(&mut engine, &request(&tokens, 1), &cancel, None, &mut |_| ControlFlow::Continue(()))
            .unwrap_err(),
        session.score(&mut engine, &tokens, &cancel, None, &mut |_| {}).unwrap_err(),
    ] {
        assert!(matches!(error, GenerateError::Forward(ForwardError::Token { token: 300, vocab: 300 })));
    }
    assert!(session.tokens().is_empty());
}

#[test]
fn a_full_context_ends_the_answer_and_keeps_its_last_token_pending() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let prompt = toy::prompt();
    let mut seen = Vec::new();
    let cancel = CancelToken::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            seen.push(token.id);
        }
        ControlFlow::Continue(())
    };
    let outcome = session.generate(&mut engine, &request(&prompt, 100), &cancel, None, &mut keep).unwrap();
    assert_eq!(outcome.finish, Finish::Context);
    // 20 + 12 positions hold twelve new tokens; the thirteenth was chosen from the last logits.
    assert_eq!((seen.len(), session.tokens().len()), (13, 32));
    assert_eq!(session.pending(), seen.last().copied());
    assert_eq!(session.tokens()[20..], seen[..12]);
}

#[test]
fn a_stop_token_is_neither_emitted_nor_kept() {
    let (_dir, mut engine) = open(EngineOptions { context: Some(64), ..Default::default() });
    let mut session = Session::new(&engine);
    let all = greedy_on(&mut engine, &mut session, &toy::prompt(), 6, &[]);
    let stop = all[3];
    let first = all.iter().position(|t| *t == stop).unwrap();
    let mut session = Session::new(&engine);
    let mut seen = Vec::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            seen.push(token.id);
        }
        ControlFlow::Continue(())
    };
    let stops = [stop];
    let request = Request { stops: &stops, ..request(&[], 6) };
    let prompt = toy::prompt();
    let request = Request { prompt: &prompt, ..request };
    let outcome = session.generate(&mut engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
    assert_eq!(outcome.finish, Finish::Stop);
    assert_eq!(seen, all[..first]);
    assert_eq!(session.tokens().len(), 20 + first);
    assert_eq!(session.pending(), None);
}

/// Cancels when the given layer routes its first token after `after` positions.
struct CancelAt {
    cancel: CancelToken,
    after: usize,
}

impl Trace for CancelAt {
    fn routed(&mut self, layer: usize, position: usize, _: &[u32], _: &[f32]) {
        if layer == 2 && position >= self.after {
            self.cancel.cancel();
        }
    }
}

#[test]
fn a_cancelled_prompt_reports_what_was_run_and_can_be_taken_back() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let whole = greedy_on(&mut engine, &mut session, &toy::prompt(), 4, &[]);
    let mut session = Session::new(&engine);
    let cancel = CancelToken::new();
    let mut trace = CancelAt { cancel: cancel.clone(), after: 10 };
    let prompt = toy::prompt();
    let outcome = session
        .generate(&mut engine, &request(&prompt, 4), &cancel, Some(&mut trace), &mut |_| {
            ControlFlow::Continue(())
        })
        .unwrap();
    assert_eq!(outcome.finish, Finish::Cancelled);
    assert_eq!(outcome.stats.prompt_tokens, 8, "the first chunk was run, the second was not");
    assert_eq!(session.tokens(), &prompt[..8]);
    let again = session.generate(&mut engine, &request(&[], 1), &CancelToken::new(), None, &mut |_| {
        ControlFlow::Continue(())
    });
    assert!(
        matches!(again, Err(GenerateError::Forward(ForwardError::NoTokens))),
        "half a prompt has no answer"
    );
    session.truncate(0);
    assert_eq!(greedy_on(&mut engine, &mut session, &prompt, 4, &[]), whole);
}

#[test]
fn teacher_forcing_runs_a_pending_token_first() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let first = greedy_on(&mut engine, &mut session, &toy::prompt(), 1, &[])[0];
    let mut rows = 0;
    session.run_tokens(&mut engine, &[5, 6], &CancelToken::new(), &mut |_, _| rows += 1).unwrap();
    assert_eq!(rows, 2);
    assert_eq!(session.tokens()[20..], [first, 5, 6]);
}

#[test]
fn reuse_keeps_the_common_prefix_and_leaves_something_to_run() {
    let (_dir, mut engine) = open(small());
    let mut session = Session::new(&engine);
    let fresh = greedy_on(&mut engine, &mut session, &toy::prompt(), 3, &[]);
    let prompt = toy::prompt();
    assert_eq!(session.reuse(&prompt), 19, "the last token is run again for its logits");
    assert_eq!(greedy_on(&mut engine, &mut session, &prompt[19..], 3, &[]), fresh);
    let mut other = prompt.clone();
    other[4] = 1;
    assert_eq!(session.reuse(&other), 4);
    assert_eq!(session.tokens(), &prompt[..4]);
}

#[test]
fn a_budget_below_the_minimum_is_refused_with_the_minimum_that_works() {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    let options = EngineOptions { memory: Some(ByteSize(1_000_000)), ..small() };
    let Err(OpenError::Plan(PlanError::TooSmall { minimum, .. })) =
        Engine::open(dir.path(), options, &mut |_, _| {})
    else {
        panic!("a megabyte is too little")
    };
    let just = EngineOptions { memory: Some(ByteSize(minimum)), ..small() };
    let engine = Engine::open(dir.path(), just, &mut |_, _| {}).unwrap();
    assert!(engine.plan().total() <= minimum);
    let less = EngineOptions { memory: Some(ByteSize(minimum - 1)), ..small() };
    assert!(Engine::open(dir.path(), less, &mut |_, _| {}).is_err());
}
