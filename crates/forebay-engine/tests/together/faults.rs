//! What goes wrong with one sequence ends that one.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use forebay_core::{ByteSize, Constraint, ConstraintError, Ending, TokenSet};
use forebay_engine::rng::Rng;
use forebay_engine::scheduler::Health;
use forebay_engine::{
    Drafting, Engine, EngineOptions, Finish, GenerateError, Job, JobEvent, Refused, Sampling, Scheduler,
    inspect,
};
use forebay_io::Access;
use forebay_model::ForwardError;
use forebay_testkit::fault::Faults;

use super::*;

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

/// One read in ten fails, and some of them twice: the right tokens, or an error that names the expert, and the next round is
/// right.
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
            disk.set(Faults { seed: round, errors: 100, short_reads: 5, ..Faults::default() })
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

/// One read in a hundred fails, for more than a hundred requests of the bundled model at once, with few slots. Where the
/// next try works all have their bits. On a disk that is worse those that a read failed for say so, all others have
/// their bits, and so has everybody once the disk is well again.
#[test]
fn a_hundred_requests_over_a_disk_that_fails_now_and_then() {
    let dir = common::demo();
    let mut options = EngineOptions { context: Some(128), sequences: 8, ..EngineOptions::default() };
    options.io.access = Some(Access::Buffered);
    let plan = inspect(&dir, &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize((plan.minimum + plan.everything) / 2));
    let (mut engine, disks) = faulty(&dir, options);
    let mut all: Vec<Script> = (0..14).flat_map(|round| scripts(&mut Rng::new(round), 8000, 8)).collect();
    for script in &mut all {
        (script.cancel_at, script.after, script.tokens) = (None, 0, 1 + script.tokens / 4);
    }
    let want: Vec<_> = all.iter().map(|script| alone(&mut engine, script).unwrap()).collect();
    let limits = Limits { queue: all.len(), ..limits(8) };
    let (mut good, mut failed) = (0, 0);
    for (errors, passing) in [(10, true), (60, false), (0, false)] {
        disks.iter().for_each(|disk| disk.set(Faults { seed: 5, errors, passing, ..Faults::default() }));
        let before = engine.counters();
        let (told, back) = run(engine, limits, &all);
        engine = back;
        for (told, want) in told.iter().zip(&want) {
            let (found, end) = answer(told);
            assert_eq!(found[..], want[..found.len()]);
            match end {
                Ok(finish) => {
                    assert_eq!((finish, found.len()), (Finish::Length, want.len()));
                    good += usize::from(errors > 10);
                }
                Err(error) => {
                    assert!(
                        errors > 10 && error.contains("expert") && error.contains("safetensors"),
                        "{error}"
                    );
                    failed += 1;
                }
            }
        }
        let counters = engine.counters().since(&before);
        assert_eq!(counters.retries > 0, errors > 0, "{counters:?}");
        assert!(errors > 10 || counters.failures == 0, "{counters:?}");
        check_slabs(&mut engine);
    }
    assert!(good >= 10 && failed >= 1 && good + failed == all.len(), "{good} good, {failed} failed");
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

/// Drafts are no part of an answer: where the experts of the layer that drafts cannot be read, the answer comes without.
#[test]
fn drafts_that_cannot_be_had_end_nobody() {
    let dir = toy_dir();
    let drafting = Drafting::Depth(2);
    let options = EngineOptions { context: Some(64), sequences: 2, drafting, ..EngineOptions::default() };
    let options = streaming(dir.path(), options);
    let (mut engine, disks) = faulty(dir.path(), options);
    let script = quiet_script(20);
    let want = alone(&mut engine, &script).unwrap();
    let (experts, paths) = (mtp_experts(dir.path()), engine.weight_files());
    for (disk, path) in disks.iter().zip(paths) {
        let bad = (path == experts.0).then(|| experts.1.clone());
        disk.set(Faults { bad, ..Faults::default() });
    }
    engine.drop_experts();
    assert_eq!(alone(&mut engine, &script).unwrap(), want);
    assert!(engine.counters().failures > 0, "the layer that drafts was asked");
    engine.drop_experts();
    let (told, mut engine) = run(engine, limits(2), &[script.clone(), Script { after: 3, ..script }]);
    for told in &told {
        assert_eq!(answer(told), (want.clone(), Ok(Finish::Length)));
    }
    check_slabs(&mut engine);
}

/// Where the toy keeps most of what the experts of its MTP layer are made of: the file, and the bytes in it, among which is
/// nothing else.
fn mtp_experts(dir: &Path) -> (PathBuf, std::ops::Range<u64>) {
    for file in std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if file.extension().is_none_or(|end| end != "safetensors") {
            continue;
        }
        let bytes = std::fs::read(&file).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let json: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header as usize]).unwrap();
        let tensors = json.as_object().unwrap().iter();
        let ours = tensors.filter(|(name, _)| name.starts_with("model.layers.5.mlp.experts."));
        let at = |tensor: &serde_json::Value, end: usize| tensor["data_offsets"][end].as_u64().unwrap();
        let mut places: Vec<_> = ours.map(|(_, tensor)| at(tensor, 0)..at(tensor, 1)).collect();
        places.sort_by_key(|place| place.start);
        let mut runs: Vec<std::ops::Range<u64>> = Vec::new();
        for place in places {
            match runs.last_mut().filter(|run| run.end == place.start) {
                Some(run) => run.end = place.end,
                None => runs.push(place),
            }
        }
        if let Some(run) = runs.into_iter().max_by_key(|run| run.end - run.start) {
            return (file, 8 + header + run.start..8 + header + run.end);
        }
    }
    panic!("the toy has an MTP layer");
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
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let deaf = Box::new(move |event: JobEvent| {
        if seen == 4 {
            counted.fetch_add(1, Ordering::Relaxed);
        }
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
    let of_heard = of_heard.lock().unwrap();
    let tokens: Vec<_> = of_heard
        .iter()
        .filter_map(|(_, event)| match event {
            JobEvent::Token(token) => Some(bits(token)),
            _ => None,
        })
        .collect();
    assert_eq!(tokens[..], want[..4]);
    assert_eq!(calls.load(Ordering::Relaxed), 0, "a listener that panicked is left alone");
    assert!(matches!(of_heard.last(), Some((_, JobEvent::Token(_)))));
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
