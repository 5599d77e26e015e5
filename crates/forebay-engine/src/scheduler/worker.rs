//! The engine's thread: one job at a time, from its first token to its last.

use std::any::Any;
use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;
use std::time::Duration;

use super::Shared;
use super::job::{JobError, JobEvent};
use super::queue::Waiting;
use crate::engine::Engine;
use crate::session::{Event, GenerateError, Outcome, Request, Session};

/// Serves jobs until the scheduler is drained, or the engine fails.
pub(super) fn run(mut engine: Engine, shared: &Shared) {
    let left = catch_unwind(AssertUnwindSafe(|| serve(&mut engine, shared)));
    let engine = match left {
        Ok(()) => Some(engine),
        Err(panic) => {
            let reason = reason(panic.as_ref());
            let waiting = shared.lock().fail(&reason);
            for mut waiting in waiting {
                waiting.events.failed(JobError::EngineFailed { reason: reason.clone() });
            }
            // What state it is in nobody knows: its threads may wait for something that never comes.
            std::mem::forget(engine);
            None
        }
    };
    shared.lock().leave(engine);
    shared.changed.notify_all();
}

fn serve(engine: &mut Engine, shared: &Shared) {
    let mut session = Session::new(engine);
    while wait(engine, shared) {
        shared.sweep();
        let Some(mut job) = shared.lock().next() else { continue };
        let mut reused = 0;
        let answered =
            catch_unwind(AssertUnwindSafe(|| answer(engine, &mut session, &mut job, &mut reused, shared)));
        match answered {
            Ok(Ok(outcome)) => {
                {
                    let mut queue = shared.lock();
                    queue.ended(reused, Some(&outcome));
                    queue.look_at(engine);
                }
                job.events.done(outcome);
            }
            Ok(Err(error)) => {
                shared.lock().ended(reused, None);
                job.events.failed(error.into());
            }
            Err(panic) => {
                job.events.failed(JobError::EngineFailed { reason: reason(panic.as_ref()) });
                std::panic::resume_unwind(panic);
            }
        }
        shared.changed.notify_all();
    }
    let trouble = engine.save_prefixes().err().map(|error| error.to_string());
    shared.lock().keeping = trouble;
}

/// Waits for a job, and uses the time; `false` when the end has come.
fn wait(engine: &mut Engine, shared: &Shared) -> bool {
    {
        let queue = shared.lock();
        if queue.wants_attention() {
            return !queue.is_finished();
        }
    }
    // When everybody has an answer, so that nobody waits for it.
    let trouble = engine.save_prefixes().err().map(|error| error.to_string());
    shared.lock().keeping = trouble;
    engine.idle_during(shared.facts.limits.warm_up, || {
        let mut queue = shared.lock();
        while !queue.wants_attention() {
            queue = shared.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        !queue.is_finished()
    })
}

fn answer(
    engine: &mut Engine,
    session: &mut Session,
    job: &mut Waiting,
    reused: &mut usize,
    shared: &Shared,
) -> Result<Outcome, GenerateError> {
    *reused = session.start_from(engine, &job.prompt)?.tokens;
    let new = &job.prompt[*reused..];
    let forecast = shared.lock().rates.forecast(new.len(), Some(Duration::ZERO));
    let events = &mut job.events;
    _ = events.tell(JobEvent::Started { reused: *reused, forecast });
    // No answer has more tokens than the context, so that without a limit it is the context that ends it.
    let max_tokens = job.max_tokens.unwrap_or(shared.facts.context + 1);
    let request = Request { prompt: new, max_tokens, sampling: job.sampling.clone(), stops: &job.stops };
    let constraint = job.constraint.as_deref_mut().map(|constraint| constraint as _);
    session.generate_within(engine, &request, constraint, &job.cancel, None, &mut |event| {
        // Those behind this one may have given up meanwhile.
        shared.sweep();
        match event {
            Event::Prefill { done, total, read, left } => {
                _ = events.tell(JobEvent::Prefill { done, total, read, left });
            }
            Event::Token(token) => return events.tell(JobEvent::Token(token)),
            Event::Pass(_) => {}
        }
        ControlFlow::Continue(())
    })
}

/// What a panic said.
fn reason(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no reason given").to_owned()
}
