//! The same bits together and alone, whatever becomes of the others.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::common::{demo, eval, ids};
use forebay_core::ByteSize;
use forebay_engine::rng::Rng;
use forebay_engine::{Drafting, Engine, EngineOptions, Finish, JobEvent, Sampling, Scheduler, inspect};
use forebay_testkit::fault::Faults;

use super::*;

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
