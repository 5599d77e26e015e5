//! Several sequences in the same passes: each gets what it gets alone, to the last bit, whatever becomes of the others.

#[path = "../common/mod.rs"]
mod common;

mod bits;
mod fair;
mod faults;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::rng::Rng;
use forebay_engine::{
    Engine, EngineOptions, Event, Finish, GenerateError, Job, JobEvent, Limits, Priority, Request, Sampling,
    Scheduler, Session, Token, inspect,
};
use forebay_io::{Access, Roots, Shard};
use forebay_testkit::fault::{Faults, FaultyDisk};
use forebay_testkit::toy;

/// A job and when it comes.
#[derive(Clone, Debug)]
struct Script {
    prompt: Vec<u32>,
    tokens: usize,
    sampling: Sampling,
    /// It comes behind so many passes.
    after: u64,
    /// When it is cancelled.
    cancel_at: Option<Cancel>,
}

#[derive(Clone, Copy, Debug)]
enum Cancel {
    /// At this token.
    Token(usize),
    /// Behind so many layers of passes over its prompt: in the middle of a pass that others go on with.
    Layer(usize),
}

/// A token, and the bits of its log-probabilities.
type Bits = (u32, Vec<u64>);

/// What a job is told.
type Told = Arc<Mutex<Vec<(u64, JobEvent)>>>;

/// A job that writes down what it is told, with the number of passes by then.
fn job(script: &Script, scheduler: &Scheduler) -> (Job, Told) {
    let told = Told::default();
    let (to, of, cancel) = (Arc::clone(&told), scheduler.clone(), CancelToken::new());
    let (token, cancel_at, mut tokens, mut layers) = (cancel.clone(), script.cancel_at, 0, 0);
    let events = Box::new(move |event| {
        tokens += usize::from(matches!(event, JobEvent::Token(_)));
        layers += usize::from(matches!(event, JobEvent::Prefill { .. }));
        match cancel_at {
            Some(Cancel::Token(at)) if at == tokens => token.cancel(),
            Some(Cancel::Layer(at)) if at == layers => token.cancel(),
            _ => {}
        }
        to.lock().unwrap().push((of.state().totals.passes, event));
        ControlFlow::Continue(())
    });
    let job = Job {
        prompt: script.prompt.clone(),
        max_tokens: Some(script.tokens),
        sampling: script.sampling.clone(),
        stops: Vec::new(),
        constraint: None,
        priority: Priority::Interactive,
        cancel,
        events,
    };
    (job, told)
}

fn is_end(event: &JobEvent) -> bool {
    matches!(event, JobEvent::Done(_) | JobEvent::Failed(_))
}

/// The tokens of a job with their log-probabilities, bit by bit, and how it ended; exactly one event says that, and it is
/// the last one.
#[track_caller]
fn answer(told: &Told) -> (Vec<Bits>, Result<Finish, String>) {
    let told = told.lock().unwrap();
    assert_eq!(told.iter().filter(|(_, event)| is_end(event)).count(), 1, "{told:?}");
    let tokens = told.iter().filter_map(|(_, event)| match event {
        JobEvent::Token(token) => Some(bits(token)),
        _ => None,
    });
    let end = match &told.last().unwrap().1 {
        JobEvent::Done(outcome) => Ok(outcome.finish),
        JobEvent::Failed(error) => Err(error.to_string()),
        other => panic!("{other:?}"),
    };
    (tokens.collect(), end)
}

fn bits(token: &Token) -> Bits {
    let logprobs = token.logprobs.as_ref().unwrap();
    let top = logprobs.top.iter().flat_map(|(id, value)| [u64::from(*id), value.to_bits()]);
    (token.id, std::iter::once(logprobs.chosen.to_bits()).chain(top).collect())
}

/// Runs jobs together, each from when it is to come on, and gives the engine back.
fn run(engine: Engine, limits: Limits, scripts: &[Script]) -> (Vec<Told>, Engine) {
    let scheduler = Scheduler::start(engine, limits).unwrap();
    let mut told = Vec::new();
    for script in scripts {
        let idle = |scheduler: &Scheduler| {
            let state = scheduler.state();
            state.running + state.waiting == 0
        };
        while scheduler.state().totals.passes < script.after && !idle(&scheduler) {
            std::thread::sleep(Duration::from_micros(200));
        }
        let (job, of) = job(script, &scheduler);
        scheduler.submit(job).unwrap();
        told.push(of);
    }
    let engine = scheduler.drain(Duration::from_secs(300)).expect("the engine comes back");
    (told, engine)
}

/// What a job gets alone.
fn alone(engine: &mut Engine, script: &Script) -> Result<Vec<Bits>, GenerateError> {
    let mut session = Session::new(engine);
    let Script { prompt, tokens, sampling, .. } = script;
    let request = Request { prompt, max_tokens: *tokens, sampling: sampling.clone(), stops: &[] };
    let mut found = Vec::new();
    session.generate(engine, &request, &CancelToken::new(), None, &mut |event| {
        if let Event::Token(token) = event {
            found.push(bits(&token));
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

fn limits(running: usize) -> Limits {
    Limits { queue: 64, running, warm_up: false }
}

fn toy_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    dir
}

/// Eight jobs with random prompts, of which some share their beginnings, and random ends.
fn scripts(rng: &mut Rng, vocab: u32, longest: usize) -> Vec<Script> {
    let mut upto = |n: usize| (rng.next_unit() * n as f64) as usize;
    let shared: Vec<u32> = (0..longest).map(|_| upto(vocab as usize) as u32).collect();
    (0..8)
        .map(|at| {
            let len = 1 + upto(longest);
            let own: Vec<u32> = (0..len).map(|_| upto(vocab as usize) as u32).collect();
            let prompt = if upto(4) == 0 { shared[..len].to_vec() } else { own };
            let sampling = if upto(2) == 0 { Sampling::greedy() } else { Sampling::default() };
            Script {
                prompt,
                tokens: upto(20),
                sampling: Sampling { logprobs: Some(5), seed: at, ..sampling },
                after: upto(30) as u64,
                cancel_at: match upto(6) {
                    0 => Some(Cancel::Token(1 + upto(8))),
                    1 | 2 => Some(Cancel::Layer(1 + upto(9))),
                    _ => None,
                },
            }
        })
        .collect()
}

/// An engine over disks whose faults can be set.
fn faulty(dir: &Path, options: EngineOptions) -> (Engine, Vec<Arc<FaultyDisk>>) {
    let mut disks = Vec::new();
    let engine = Engine::open_over(dir, options, &mut |_, _| {}, &mut |shards, _| {
        let slow = shards.iter().map(|shard| {
            let disk = Arc::new(FaultyDisk::over(Arc::clone(&shard.file), Faults::default()));
            disks.push(Arc::clone(&disk));
            Shard { path: shard.path.clone(), file: disk as _ }
        });
        Ok(Roots::from(slow.collect::<Vec<_>>()))
    });
    (engine.unwrap(), disks)
}

/// Few slots, so that experts are read again and again.
fn streaming(dir: &Path, options: EngineOptions) -> EngineOptions {
    let mut options = options;
    options.io.access = Some(Access::Buffered);
    let plan = inspect(dir, &options).unwrap().plan.unwrap();
    EngineOptions { memory: Some(ByteSize(plan.minimum + plan.slot_row())), ..options }
}

/// No slab is lost, whatever happened.
fn check_slabs(engine: &mut Engine) {
    let plan = engine.plan();
    let slabs = plan.resident_slots() + plan.demand.classes.iter().map(|class| class.staging).sum::<usize>();
    let store = engine.store();
    store.forget_ahead();
    while store.reader().is_busy() {
        std::thread::sleep(Duration::from_micros(50));
    }
    store.forget_ahead();
    assert_eq!(store.slabs_at_home(), slabs);
}

fn quiet_script(tokens: usize) -> Script {
    Script {
        prompt: toy::prompt(),
        tokens,
        sampling: Sampling { logprobs: Some(2), ..Sampling::greedy() },
        after: 0,
        cancel_at: None,
    }
}
