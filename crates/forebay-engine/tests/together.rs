//! Several sequences in the same passes: each gets what it gets alone, to the last bit, whatever becomes of the others.

mod common;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{demo, eval, ids};
use forebay_core::{ByteSize, CancelToken, Constraint, ConstraintError, Ending, TokenSet};
use forebay_engine::rng::Rng;
use forebay_engine::scheduler::Health;
use forebay_engine::{
    Drafting, Engine, EngineOptions, Event, Finish, GenerateError, Job, JobError, JobEvent, Limits, Priority,
    Refused, Request, Sampling, Scheduler, Session, Token, inspect,
};
use forebay_io::{Access, Roots, Shard};
use forebay_model::ForwardError;
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

/// Random jobs at random times, in passes of every size, with every budget, with and without drafts, some of them
/// cancelled: the same bits as alone.
#[test]
fn together_every_sequence_gets_the_bits_that_it_gets_alone() {
    let dir = toy_dir();
    let mut seen = BTreeMap::new();
    for round in 0..36u64 {
        let mut rng = Rng::new(31 + round);
        let mut scripts = scripts(&mut rng, 290, 90);
        scripts.sort_by_key(|script| script.after);
        let drafting = [Drafting::Off, Drafting::Depth(2), Drafting::Auto][round as usize % 3];
        let options = EngineOptions {
            context: Some(128),
            sequences: [8, 3, 1][round as usize / 3 % 3],
            chunk: Some([1, 7, 64, 300][round as usize % 4]),
            block: Some([256, 3, 50][round as usize / 4 % 3]),
            threads: Some(1 + round as usize / 5 % 2),
            drafting,
            ..EngineOptions::default()
        };
        let plan = inspect(dir.path(), &options).unwrap().plan.unwrap();
        let slot = plan.slot_row();
        let budgets =
            [plan.minimum, plan.minimum + slot, (plan.minimum + plan.everything) / 2, plan.everything];
        let options = EngineOptions { memory: Some(ByteSize(budgets[round as usize / 2 % 4])), ..options };
        let open = || Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
        let mut engine = open();
        engine.set_drafting(Drafting::Off);
        let want: Vec<_> = scripts.iter().map(|script| alone(&mut engine, script).unwrap()).collect();
        drop(engine);
        let (told, mut engine) = run(open(), limits([8, 4, 2][round as usize % 3]), &scripts);
        for ((script, told), want) in scripts.iter().zip(&told).zip(&want) {
            let (found, end) = answer(told);
            let count = found.len();
            assert_eq!(found, want[..count], "round {round}: {script:?} with {options:?}");
            match script.cancel_at {
                Some(Cancel::Token(at)) if at < script.tokens => {
                    // Drafts that were verified with it may have come with it.
                    assert_eq!(end, Ok(Finish::Cancelled), "round {round}: {script:?}");
                    assert!((at..at + 9).contains(&count), "round {round}: {count} {script:?}");
                }
                Some(Cancel::Layer(_)) if end == Ok(Finish::Cancelled) => {
                    // Behind the last layer of the prompt's last pass, the first token is there.
                    assert!(count <= 1, "round {round}: {script:?}");
                    *seen.entry("in a pass").or_insert(0) += usize::from(count == 0);
                }
                Some(Cancel::Token(at)) if at == script.tokens => assert_eq!(count, script.tokens),
                _ => {
                    assert_eq!(
                        (end, count),
                        (Ok(Finish::Length), script.tokens),
                        "round {round}: {script:?}"
                    );
                    *seen.entry("whole").or_insert(0) += 1;
                }
            }
        }
        let used = engine.prefix_blocks();
        assert!(used.0 <= used.1, "{used:?}");
        // Nobody left anything in it that changes what comes next.
        engine.set_drafting(Drafting::Off);
        assert_eq!(alone(&mut engine, &scripts[0]).unwrap(), want[0]);
    }
    assert!(seen["whole"] >= 120 && seen["in a pass"] >= 40, "{seen:?}");
}

/// The bundled model, which drafts well, on real text.
#[test]
fn the_bundled_model_gives_the_same_bits_together() {
    let heldout = eval("heldout.json");
    let windows: Vec<Vec<u32>> = (0..8).map(|at| ids(&heldout["segments"][0]["windows"][at])).collect();
    let script = |at: usize| Script {
        prompt: windows[at][..40 + 20 * at].to_vec(),
        tokens: 16,
        sampling: Sampling { logprobs: Some(3), seed: at as u64, ..Sampling::default() },
        after: 2 * at as u64,
        cancel_at: None,
    };
    let scripts: Vec<Script> = (0..8).map(script).collect();
    for (drafting, chunk) in [(Drafting::Off, 512), (Drafting::Depth(3), 512), (Drafting::Auto, 16)] {
        let options = EngineOptions {
            context: Some(256),
            sequences: 8,
            chunk: Some(chunk),
            drafting,
            ..EngineOptions::default()
        };
        let open = || Engine::open(&demo(), options, &mut |_, _| {}).unwrap();
        let mut engine = open();
        let want: Vec<_> = scripts.iter().map(|script| alone(&mut engine, script).unwrap()).collect();
        let (told, _) = run(open(), limits(8), &scripts);
        for (at, want) in want.iter().enumerate() {
            assert_eq!(answer(&told[at]), (want.clone(), Ok(Finish::Length)), "{at} with {drafting}");
        }
    }
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

/// A place on the disk that cannot be read ends those that need it, and nobody else, who get the same bits.
#[test]
fn an_expert_that_cannot_be_read_ends_those_that_chose_it() {
    let dir = toy_dir();
    let options = EngineOptions { context: Some(64), sequences: 8, ..EngineOptions::default() };
    let options = streaming(dir.path(), options);
    let size = std::fs::metadata(shard_of(dir.path())).unwrap().len();
    let (mut good, mut failed, mut mixed) = (0, 0, 0);
    for round in 0..40u64 {
        let mut rng = Rng::new(7 + round);
        let mut scripts = scripts(&mut rng, 290, if round % 4 == 0 { 40 } else { 6 });
        for script in &mut scripts {
            (script.cancel_at, script.after, script.tokens) = (None, 0, 1 + script.tokens / 3);
        }
        let at = (rng.next_unit() * size as f64) as u64;
        let faults = Faults { bad: Some(at..at + 400), ..Faults::default() };
        let (mut engine, disks) = faulty(dir.path(), options);
        disks.iter().for_each(|disk| disk.set(faults.clone()));
        let want: Vec<_> = scripts.iter().map(|script| alone(&mut engine, script)).collect();
        drop(engine);
        let (engine, disks) = faulty(dir.path(), options);
        disks.iter().for_each(|disk| disk.set(faults.clone()));
        let (told, mut engine) = run(engine, limits(8), &scripts);
        for (told, want) in told.iter().zip(&want) {
            let (found, end) = answer(told);
            match want {
                Ok(want) => {
                    assert_eq!((&found, end), (want, Ok(Finish::Length)), "round {round}");
                    good += 1;
                }
                Err(GenerateError::Forward(ForwardError::Expert(error))) => {
                    assert_eq!(end, Err(error.to_string()), "round {round}");
                    failed += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        mixed += usize::from(want.iter().any(Result::is_ok) && want.iter().any(Result::is_err));
        check_slabs(&mut engine);
    }
    assert!(
        good >= 20 && failed >= 10 && mixed >= 3,
        "{good} good, {failed} failed, {mixed} rounds with both"
    );
}

fn shard_of(dir: &Path) -> PathBuf {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).max().unwrap()
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

/// One read in a hundred fails: the right tokens, or an error that names the expert, and the next round is right.
#[test]
fn a_disk_that_fails_now_and_then_never_makes_a_wrong_token() {
    let dir = toy_dir();
    let mut options = EngineOptions { context: Some(128), sequences: 4, ..EngineOptions::default() };
    options.io.access = Some(Access::Buffered);
    let plan = inspect(dir.path(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize((plan.minimum + 2 * plan.everything) / 3));
    let (mut engine, disks) = faulty(dir.path(), options);
    let (mut good, mut failed) = (0, 0);
    for round in 0..20u64 {
        disks.iter().for_each(|disk| disk.set(Faults::default()));
        let mut scripts = scripts(&mut Rng::new(1000 + round), 290, 10);
        for script in &mut scripts {
            (script.cancel_at, script.tokens) = (None, 1 + script.tokens / 4);
        }
        scripts.sort_by_key(|script| script.after);
        let want: Vec<_> = scripts.iter().map(|script| alone(&mut engine, script).unwrap()).collect();
        engine.drop_experts();
        disks.iter().for_each(|disk| {
            disk.set(Faults { seed: round, errors: 10, short_reads: 5, ..Faults::default() })
        });
        let (told, back) = run(engine, limits(4), &scripts);
        engine = back;
        for (told, want) in told.iter().zip(&want) {
            let (found, end) = answer(told);
            assert_eq!(found[..], want[..found.len()], "round {round}");
            match end {
                Ok(finish) => {
                    assert_eq!((finish, found.len()), (Finish::Length, want.len()), "round {round}");
                    good += 1;
                }
                Err(error) => {
                    assert!(error.contains("expert") && error.contains("safetensors"), "{error}");
                    failed += 1;
                }
            }
        }
        check_slabs(&mut engine);
    }
    assert!(good >= 30 && failed >= 30, "{good} good, {failed} failed");
}

/// A token whose embedding is no number ends the sequences that have it, at their own position, and nobody else.
#[test]
fn a_value_that_is_not_finite_ends_its_own_sequence() {
    let dir = toy_dir();
    spoil_embedding(dir.path(), 77);
    let options = EngineOptions { context: Some(128), sequences: 8, ..EngineOptions::default() };
    let mut engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let script = |at: u32| {
        let mut prompt: Vec<u32> = (0..40).map(|i| (at * 17 + i * 7) % 290).filter(|id| *id != 77).collect();
        if at % 3 == 1 {
            prompt[10 + at as usize] = 77;
        }
        // What is generated is never that token: nobody fails by chance.
        let sampling = Sampling { logprobs: Some(2), logit_bias: vec![(77, -100.0)], ..Sampling::greedy() };
        Script { prompt, tokens: 8, sampling, after: 0, cancel_at: None }
    };
    let scripts: Vec<Script> = (0..8).map(script).collect();
    let want: Vec<_> = scripts.iter().map(|script| alone(&mut engine, script)).collect();
    drop(engine);
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let (told, _) = run(engine, limits(8), &scripts);
    for (at, (told, want)) in told.iter().zip(want).enumerate() {
        match want {
            Ok(want) => assert_eq!(answer(told), (want, Ok(Finish::Length)), "{at}"),
            Err(error) => {
                assert_eq!(at % 3, 1);
                let text = error.to_string();
                assert!(text.contains(&format!("position {}", 10 + at)), "{text}");
                assert_eq!(answer(told), (Vec::new(), Err(text)), "{at}");
            }
        }
    }
}

/// Makes the scale of a token's embedding no number.
fn spoil_embedding(dir: &Path, token: usize) {
    let mut found = false;
    for file in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let mut bytes = std::fs::read(&file).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        for (name, tensor) in json.as_object().unwrap() {
            if name.starts_with("model.embed_tokens.weight") && tensor["dtype"] == "F32" {
                let first = tensor["data_offsets"][0].as_u64().unwrap() as usize;
                let at = 8 + header + first + 4 * token;
                bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
                found = true;
            }
        }
        std::fs::write(&file, bytes).unwrap();
    }
    assert!(found, "the toy's embeddings have scales");
}

/// Sixteen clients that want the same amount: nobody waits three times as long as half of them, counted in passes.
#[test]
fn sixteen_clients_of_equal_work_wait_about_equally_long() {
    let dir = toy_dir();
    for (running, chunk) in [(8, 64), (8, 4), (3, 64), (1, 64)] {
        let options = EngineOptions {
            context: Some(64),
            sequences: running,
            chunk: Some(chunk),
            ..EngineOptions::default()
        };
        let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
        let script = |at: u32| Script {
            prompt: (0..20).map(|i| (at * 17 + i * 7) % 290).collect(),
            tokens: 20,
            sampling: Sampling { logprobs: Some(0), ..Sampling::greedy() },
            after: 0,
            cancel_at: None,
        };
        let (told, _) = run(engine, limits(running), &(0..16).map(script).collect::<Vec<_>>());
        let waits = |wanted: fn(&JobEvent) -> bool| {
            let first = |told: &Told| told.lock().unwrap().iter().find(|(_, event)| wanted(event)).unwrap().0;
            let mut all: Vec<u64> = told.iter().map(first).collect();
            all.sort_unstable();
            (all[15] as f64 / all[8] as f64, all)
        };
        let (ends, all_ends) = waits(is_end);
        let (firsts, all_firsts) = waits(|event| matches!(event, JobEvent::Token(_)));
        assert!(ends <= 3.0, "{running}: {all_ends:?}");
        assert!(firsts <= 3.0, "{running}: {all_firsts:?}");
        // Those that run at once share the passes: one after the other, all take sixteen times as many as one.
        let passes = 16 * 20 / running.min(chunk) + (16 * 20 / chunk).max(16 / running);
        assert!(all_ends[15] as usize <= passes * 3 / 2, "{running}: {all_ends:?}, {passes} expected");
    }
}

/// A long prompt that comes while others generate stops nobody: between two tokens are few passes.
#[test]
fn a_long_prompt_does_not_stop_those_that_generate() {
    let dir = toy_dir();
    let options =
        EngineOptions { context: Some(1024), sequences: 3, chunk: Some(1024), ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let script = |prompt: usize, tokens: usize, after: u64| Script {
        prompt: (0..prompt as u32).map(|i| (i * i + after as u32) % 290).collect(),
        tokens,
        sampling: Sampling { logprobs: Some(0), ..Sampling::greedy() },
        after,
        cancel_at: None,
    };
    let (told, _) = run(engine, limits(3), &[script(5, 200, 0), script(8, 200, 1), script(1000, 4, 5)]);
    let passes = |told: &Told, wanted: fn(&JobEvent) -> bool| -> Vec<u64> {
        told.lock().unwrap().iter().filter(|(_, event)| wanted(event)).map(|(pass, _)| *pass).collect()
    };
    let token = |event: &JobEvent| matches!(event, JobEvent::Token(_));
    for told in &told[..2] {
        let at = passes(told, token);
        let longest = at.windows(2).map(|two| two[1] - two[0]).max().unwrap();
        assert!(longest <= 1, "a token in every pass, not {longest} passes between two");
    }
    let prompt = passes(&told[2], |event| matches!(event, JobEvent::Started { .. }))[0];
    let first = passes(&told[2], token)[0];
    assert!(first - prompt >= 3, "the prompt came in parts, in {} passes", first - prompt);
}

/// Whoever is cancelled leaves the pass at the next layer, and is told at once; the others go on with it.
#[test]
fn a_cancelled_sequence_leaves_within_a_layer() {
    let dir = toy_dir();
    let options =
        EngineOptions { context: Some(256), sequences: 2, chunk: Some(256), ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let mut plain = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let layers = plain.spec().layers.len();
    let script = Script {
        prompt: (0..120).map(|i| (i * 7 + 3) % 290).collect(),
        tokens: 3,
        sampling: Sampling { logprobs: Some(2), ..Sampling::greedy() },
        after: 0,
        cancel_at: None,
    };
    let other = Script { prompt: (0..110).map(|i| (i * 11 + 5) % 290).collect(), ..script.clone() };
    let want = alone(&mut plain, &other).unwrap();
    let scheduler = Scheduler::start(engine, limits(2)).unwrap();
    // What both are told, in one order.
    let told: Arc<Mutex<Vec<(usize, JobEvent)>>> = Arc::default();
    let mut listeners = Vec::new();
    for (name, script) in [&script, &other].into_iter().enumerate() {
        let (mut job, of) = job(script, &scheduler);
        let (all, cancel, mut layer) = (Arc::clone(&told), job.cancel.clone(), 0);
        let mut inner = job.events;
        job.events = Box::new(move |event| {
            let label = match &event {
                JobEvent::Prefill { done, total, .. } => {
                    JobEvent::Prefill { done: *done, total: *total, read: None, left: None }
                }
                JobEvent::Done(outcome) => JobEvent::Done(*outcome),
                _ => JobEvent::Queued { ahead: 0 },
            };
            if let JobEvent::Prefill { .. } = label {
                layer += 1;
                if name == 0 && layer == 2 {
                    cancel.cancel();
                }
            }
            all.lock().unwrap().push((name, label));
            inner(event)
        });
        listeners.push(of);
        // Both begin with the same pass: the first one waits for the second one.
        if name == 0 {
            let hold = Arc::clone(&told);
            let mut inner = job.events;
            let mut held = false;
            job.events = Box::new(move |event| {
                if matches!(event, JobEvent::Started { .. }) && !held {
                    held = true;
                    let until = Instant::now() + Duration::from_secs(20);
                    while hold.lock().unwrap().iter().all(|(name, _)| *name == 0) && Instant::now() < until {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    // The other one is in the queue a moment later.
                    std::thread::sleep(Duration::from_millis(100));
                }
                inner(event)
            });
        }
        scheduler.submit(job).unwrap();
    }
    assert!(scheduler.drain(Duration::from_secs(60)).is_some());
    assert_eq!(answer(&listeners[0]), (Vec::new(), Ok(Finish::Cancelled)));
    assert_eq!(answer(&listeners[1]), (want, Ok(Finish::Length)));
    let told = told.lock().unwrap();
    let ended = told.iter().position(|(name, event)| *name == 0 && is_end(event)).unwrap();
    let layers_of = |name: usize, events: &[(usize, JobEvent)]| {
        events.iter().filter(|(of, event)| *of == name && matches!(event, JobEvent::Prefill { .. })).count()
    };
    // It raised its token behind the second layer, and the others are no more than a layer further when it is told.
    assert_eq!(layers_of(0, &told), 2, "{told:?}");
    assert!(layers_of(1, &told[..ended]) <= 3, "{told:?}");
    assert!(layers_of(1, &told) >= layers, "{told:?}");
}

/// Cancelled from elsewhere, at any moment of a pass that waits for a slow disk: the other one gets its bits, and no slab
/// is lost.
#[test]
fn a_cancellation_may_come_at_any_moment() {
    let dir = toy_dir();
    let options =
        EngineOptions { context: Some(512), sequences: 2, chunk: Some(400), ..EngineOptions::default() };
    let options = streaming(dir.path(), options);
    let (mut engine, disks) = faulty(dir.path(), options);
    let long = Script { prompt: (0..300).map(|i| (i * i + 3) % 290).collect(), ..quiet_script(4) };
    let other = Script { prompt: (0..30).map(|i| (i * 11 + 5) % 290).collect(), ..quiet_script(6) };
    let want = alone(&mut engine, &other).unwrap();
    let started = Instant::now();
    alone(&mut engine, &long).unwrap();
    let whole = started.elapsed();
    let mut cancelled = 0;
    for round in 0..30u32 {
        disks
            .iter()
            .for_each(|disk| disk.set(Faults { latency: Duration::from_micros(20), ..Faults::default() }));
        // Another prompt every time, so that nothing of it is known.
        let long =
            Script { prompt: long.prompt.iter().map(|id| (id + round) % 290).collect(), ..long.clone() };
        let scheduler = Scheduler::start(engine, limits(2)).unwrap();
        let (first, of_first) = job(&long, &scheduler);
        let (second, of_second) = job(&other, &scheduler);
        let cancel = first.cancel.clone();
        scheduler.submit(first).unwrap();
        scheduler.submit(second).unwrap();
        std::thread::sleep(whole * round / 20);
        cancel.cancel();
        engine = scheduler.drain(Duration::from_secs(60)).unwrap();
        assert_eq!(answer(&of_second), (want.clone(), Ok(Finish::Length)), "round {round}");
        cancelled += usize::from(answer(&of_first).1 == Ok(Finish::Cancelled));
        check_slabs(&mut engine);
    }
    assert!(cancelled >= 10, "{cancelled} of 30");
}

/// The same prompt several times at once is computed once.
#[test]
fn what_another_one_computes_is_waited_for() {
    let dir = toy_dir();
    for drafting in [Drafting::Off, Drafting::Depth(2)] {
        let options = EngineOptions {
            context: Some(256),
            sequences: 5,
            chunk: Some(30),
            drafting,
            ..EngineOptions::default()
        };
        let open = || Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
        let prompt: Vec<u32> = (0..130).map(|i| (i * i + 5 * i) % 290).collect();
        let script = |at: usize| Script {
            prompt: [&prompt[..], &[at as u32][..(at / 3).min(1)]].concat(),
            tokens: 6,
            sampling: Sampling { seed: at as u64, logprobs: Some(2), ..Sampling::default() },
            after: 0,
            cancel_at: None,
        };
        let scripts: Vec<Script> = (0..5).map(script).collect();
        let mut plain = open();
        let want: Vec<_> = scripts.iter().map(|script| alone(&mut plain, script).unwrap()).collect();
        let scheduler = Scheduler::start(open(), limits(5)).unwrap();
        let told: Vec<Told> = scripts
            .iter()
            .map(|script| {
                let (job, of) = job(script, &scheduler);
                scheduler.submit(job).unwrap();
                of
            })
            .collect();
        assert!(scheduler.drain(Duration::from_secs(60)).is_some());
        for (told, want) in told.iter().zip(want) {
            assert_eq!(answer(told), (want, Ok(Finish::Length)));
        }
        let totals = scheduler.state().totals;
        // A token of each is always run; the last hidden state, which drafts go on from, may take one more.
        assert!((130..=130 + 4 * 2).contains(&totals.prompt_tokens), "{}", totals.prompt_tokens);
        assert!(totals.reused_tokens >= 4 * 128, "{}", totals.reused_tokens);
    }
}

/// A constraint that fails in the worst way.
struct Panics(usize);

impl Constraint for Panics {
    fn ending(&mut self) -> Result<Ending, ConstraintError> {
        assert!(self.0 > 0, "a fault on purpose");
        self.0 -= 1;
        Ok(Ending::May)
    }

    fn allowed(&mut self, _: &mut TokenSet) -> Result<bool, ConstraintError> {
        Ok(false)
    }

    fn accept(&mut self, _: u32) -> Result<(), ConstraintError> {
        Ok(())
    }

    fn forced(&mut self, tokens: &mut Vec<u32>) -> Result<(), ConstraintError> {
        tokens.clear();
        Ok(())
    }

    fn agrees(&mut self, tokens: &[u32]) -> Result<usize, ConstraintError> {
        Ok(tokens.len())
    }
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

/// A panic of somebody's constraint or listener is that job's own.
#[test]
fn a_panic_that_belongs_to_a_job_ends_that_job() {
    let dir = toy_dir();
    let options = EngineOptions { context: Some(64), sequences: 3, ..EngineOptions::default() };
    let mut plain = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let script = quiet_script(20);
    let want = alone(&mut plain, &script).unwrap();
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, limits(3)).unwrap();
    let (sound, of_sound) = job(&script, &scheduler);
    let (constrained, of_constrained) = job(&script, &scheduler);
    let (heard, of_heard) = job(&script, &scheduler);
    let mut inner = heard.events;
    let mut seen = 0;
    let deaf = Box::new(move |event: JobEvent| {
        seen += usize::from(matches!(event, JobEvent::Token(_)));
        let told = inner(event);
        assert!(seen != 4, "a fault on purpose");
        told
    });
    scheduler.submit(sound).unwrap();
    scheduler.submit(Job { constraint: Some(Box::new(Panics(6))), ..constrained }).unwrap();
    scheduler.submit(Job { events: deaf, ..heard }).unwrap();
    let health = scheduler.state().health;
    assert!(scheduler.drain(Duration::from_secs(60)).is_some(), "the engine is sound");
    assert_eq!(health, Health::Ready);
    assert_eq!(answer(&of_sound), (want.clone(), Ok(Finish::Length)));
    let (tokens, end) = answer(&of_constrained);
    assert!(!tokens.is_empty() && tokens[..] == want[..tokens.len()]);
    assert!(end.as_ref().is_err_and(|error| error.contains("a fault on purpose")), "{end:?}");
    let (tokens, _) = answer(&of_heard);
    assert_eq!(tokens[..], want[..4]);
}

/// What panics when it is dropped, on the engine's thread.
struct Trap(bool);

impl Drop for Trap {
    fn drop(&mut self) {
        assert!(!self.0, "a trap on purpose");
    }
}

/// A fault of ours ends everything, once, and says so.
#[test]
fn a_fault_of_the_engine_ends_every_job_once() {
    let dir = toy_dir();
    let options = EngineOptions { context: Some(256), sequences: 3, ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, limits(2)).unwrap();
    let mut told = Vec::new();
    for name in 0..4 {
        let (job, of) = job(&quiet_script(if name == 1 { 5 } else { 200 }), &scheduler);
        let mut inner = job.events;
        let trap = Trap(name == 1);
        let events = Box::new(move |event| {
            let _held = &trap;
            inner(event)
        });
        match scheduler.submit(Job { events, ..job }) {
            Ok(_) => told.push(of),
            Err(refused) => assert!(matches!(refused, Refused::EngineFailed { .. })),
        }
    }
    assert!(scheduler.drain(Duration::from_secs(60)).is_none(), "the engine is lost");
    assert!(told.len() >= 2);
    for (name, told) in told.iter().enumerate() {
        let (_, end) = answer(told);
        match name {
            1 => assert_eq!(end, Ok(Finish::Length)),
            _ => assert!(
                end.as_ref().is_err_and(|error| error.contains("a trap on purpose")),
                "{name}: {end:?}"
            ),
        }
    }
    assert!(matches!(scheduler.state().health, Health::Failed { .. }));
    let (late, _) = job(&quiet_script(1), &scheduler);
    assert!(matches!(scheduler.submit(late), Err(Refused::EngineFailed { .. })));
}

/// What is owed to whole contexts is not given to others: jobs wait for KV blocks, and all are served.
#[test]
fn jobs_wait_for_kv_blocks_and_all_are_served() {
    let dir = toy_dir();
    // Room for two whole contexts, and eight that would run.
    let options = EngineOptions { context: Some(256), sequences: 2, ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let script = |at: u32, prompt: u32, tokens: usize| Script {
        prompt: (0..prompt).map(|i| (at * 31 + i * 3) % 290).collect(),
        tokens,
        ..quiet_script(0)
    };
    let scripts: Vec<Script> = (0..10).map(|at| script(at, 20 + at % 3 * 90, 30)).collect();
    let scheduler = Scheduler::start(engine, limits(8)).unwrap();
    let mut told = Vec::new();
    let mut most = 0;
    for script in &scripts {
        let (job, of) = job(script, &scheduler);
        scheduler.submit(job).unwrap();
        told.push(of);
    }
    while scheduler.state().totals.completed < 10 && scheduler.state().totals.failed == 0 {
        most = most.max(scheduler.state().running);
        std::thread::sleep(Duration::from_micros(500));
    }
    assert!(scheduler.drain(Duration::from_secs(60)).is_some());
    for told in &told {
        let (tokens, end) = answer(told);
        assert_eq!((tokens.len(), end), (30, Ok(Finish::Length)));
    }
    assert!((2..8).contains(&most), "{most} ran at once");
    let failed = told.iter().any(|told| {
        told.lock().unwrap().iter().any(|(_, event)| matches!(event, JobEvent::Failed(JobError::Generate(_))))
    });
    assert!(!failed);
}

/// Answers that become longer than what blocks are kept for give them up to those that came before, and go on later: the
/// same tokens as alone, and nobody fails.
#[test]
fn long_answers_give_blocks_up_and_go_on_later() {
    let dir = toy_dir();
    // Three are taken on, and there is not room for three whole answers.
    let options = EngineOptions {
        context: Some(1728),
        sequences: 2,
        drafting: Drafting::Depth(2),
        ..EngineOptions::default()
    };
    let script = |at: u32| Script {
        prompt: (0..20).map(|i| (at * 31 + i * 3) % 290).collect(),
        tokens: 1320,
        sampling: Sampling { logprobs: Some(1), seed: u64::from(at), ..Sampling::default() },
        after: 0,
        cancel_at: None,
    };
    let scripts: Vec<Script> = (0..3).map(script).collect();
    let open = || Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let mut plain = open();
    plain.set_drafting(Drafting::Off);
    let want: Vec<_> = scripts.iter().map(|script| alone(&mut plain, script).unwrap()).collect();
    let scheduler = Scheduler::start(open(), limits(8)).unwrap();
    let mut told = Vec::new();
    for script in &scripts {
        let (job, of) = job(script, &scheduler);
        scheduler.submit(job).unwrap();
        told.push(of);
    }
    assert!(scheduler.drain(Duration::from_secs(300)).is_some());
    for (at, (told, want)) in told.iter().zip(&want).enumerate() {
        let (found, end) = answer(told);
        assert_eq!((found.len(), end), (1320, Ok(Finish::Length)), "{at}");
        assert_eq!(&found, want, "{at}");
        let started = |event: &JobEvent| matches!(event, JobEvent::Started { .. });
        assert_eq!(told.lock().unwrap().iter().filter(|(_, event)| started(event)).count(), 1);
    }
    let totals = scheduler.state().totals;
    assert!(totals.prompt_tokens > 3 * 20, "somebody ran again what it had given up: {totals:?}");
}

/// Batch work gives way: while anybody else is served it has no rows, and no more than half of the places.
#[test]
fn batch_work_gives_way() {
    let dir = toy_dir();
    let options = EngineOptions { context: Some(256), sequences: 4, ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, limits(4)).unwrap();
    let batch: Vec<Told> = (0..4)
        .map(|_| {
            let (job, of) = job(&quiet_script(100), &scheduler);
            scheduler.submit(Job { priority: Priority::Batch, ..job }).unwrap();
            of
        })
        .collect();
    let begun = |told: &Told| {
        told.lock().unwrap().iter().filter(|(_, event)| matches!(event, JobEvent::Token(_))).count()
    };
    while begun(&batch[0]) < 3 {
        std::thread::sleep(Duration::from_micros(200));
    }
    assert!(scheduler.state().running <= 2);
    let (urgent, of) = job(&quiet_script(30), &scheduler);
    scheduler.submit(urgent).unwrap();
    while !of.lock().unwrap().iter().any(|(_, event)| is_end(event)) {
        std::thread::sleep(Duration::from_micros(200));
    }
    let span =
        |wanted: fn(&JobEvent) -> bool| of.lock().unwrap().iter().find(|(_, event)| wanted(event)).unwrap().0;
    let (from, to) = (span(|event| matches!(event, JobEvent::Token(_))), span(is_end));
    while scheduler.state().totals.completed < 5 {
        std::thread::sleep(Duration::from_millis(1));
    }
    for told in &batch {
        let told = told.lock().unwrap();
        let meanwhile = told
            .iter()
            .filter(|(pass, event)| matches!(event, JobEvent::Token(_)) && *pass > from && *pass < to);
        assert_eq!(meanwhile.count(), 0);
    }
    assert!(scheduler.drain(Duration::from_secs(60)).is_some());
}
