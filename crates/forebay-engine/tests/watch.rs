//! Those who look at a scheduler see what it does, change nothing of it, and cost nothing when they are gone.

mod common;

use std::ops::ControlFlow;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use forebay_core::CancelToken;
use forebay_engine::scheduler::View;
use forebay_engine::{Engine, EngineOptions, Job, JobEvent, Limits, Priority, Sampling, Scheduler};

fn start() -> Scheduler {
    let dir = common::demo();
    let engine = Engine::open(&dir, EngineOptions::default(), &mut |_, _| ()).unwrap();
    Scheduler::start(engine, Limits { warm_up: false, ..Limits::default() }).unwrap()
}

/// Runs a job to its end: its tokens.
fn run(scheduler: &Scheduler, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let (send, events) = channel();
    scheduler.submit(job(prompt, tokens, &send)).unwrap();
    drop(send);
    let mut found = Vec::new();
    for event in events {
        match event {
            JobEvent::Token(token) => found.push(token.id),
            JobEvent::Failed(error) => panic!("{error}"),
            _ => {}
        }
    }
    found
}

fn job(prompt: &[u32], tokens: usize, to: &Sender<JobEvent>) -> Job {
    let to = to.clone();
    Job {
        prompt: prompt.to_vec(),
        max_tokens: Some(tokens),
        sampling: Sampling::greedy(),
        stops: Vec::new(),
        constraint: None,
        priority: Priority::Interactive,
        cancel: CancelToken::new(),
        events: Box::new(move |event| {
            to.send(event).unwrap();
            ControlFlow::Continue(())
        }),
    }
}

/// Looks until `seen` is, or too long.
fn until(scheduler: &Scheduler, seen: impl Fn(&View) -> bool) -> View {
    let began = Instant::now();
    loop {
        let view = scheduler.look();
        if seen(&view) {
            return view;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it is never seen: {view:?}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn nothing_is_noted_until_somebody_looks() {
    let scheduler = start();
    let prompt: Vec<u32> = (100..140).collect();
    let alone = run(&scheduler, &prompt, 8);
    let view = scheduler.look();
    // Known all the same, as it costs nothing.
    assert_eq!(view.recent.len(), 1);
    assert!(view.prefill.is_some() && view.decode.is_some());
    assert_eq!(view.watched, 0, "nobody had looked");
    assert_eq!((view.reuse.known(), view.reuse.first), (0, 0));
    // An idle engine shows what it holds soon.
    let view = until(&scheduler, |view| view.cells.is_some());
    let cells = view.cells.unwrap();
    let about = scheduler.about();
    assert_eq!(cells.len(), about.layers.iter().map(|layer| layer.experts).sum::<usize>());
    assert!(cells.iter().any(|cell| cell.resident), "experts of the prompt are in memory");
    assert!(cells.iter().all(|cell| cell.uses == 0 && !cell.used));
    // Watched, the same tokens come out.
    assert_eq!(run(&scheduler, &prompt, 8), alone);
}

#[test]
fn uses_are_those_of_the_rows_that_ran() {
    let scheduler = start();
    scheduler.look();
    let prompt: Vec<u32> = (200..230).collect();
    run(&scheduler, &prompt, 4);
    let view = until(&scheduler, |view| view.jobs.is_empty() && view.watched > 0);
    let rows = view.state.totals.rows;
    assert_eq!(rows, 30 + 3, "the last token of the answer is not run");
    assert_eq!(view.watched, view.state.totals.passes);
    let about = scheduler.about();
    let cells = view.cells.unwrap();
    let mut rest = &cells[..];
    for layer in &about.layers {
        let (cells, behind) = rest.split_at(layer.experts);
        rest = behind;
        let uses: u64 = cells.iter().map(|cell| u64::from(cell.uses)).sum();
        let used = cells.iter().filter(|cell| cell.used).count();
        if (layer.layer as usize) < about.decoder_layers {
            assert_eq!(uses, rows * about.top_k as u64, "layer {}", layer.layer);
            assert_eq!(used, about.top_k, "the last pass had one row");
            assert!(cells.iter().all(|cell| !cell.used || cell.uses > 0));
        } else {
            assert_eq!((uses, used), (0, 0), "nothing was drafted");
        }
        assert!(cells.iter().filter(|cell| cell.resident).count() <= layer.slots);
    }
    // Each of the three passes that generated used `top_k` experts of each layer, which it had seen before or not.
    let sparse = about.layers.iter().filter(|layer| (layer.layer as usize) < about.decoder_layers).count();
    assert_eq!(view.reuse.known() + view.reuse.first, 3 * (about.top_k * sparse) as u64);
    let most = about.layers.iter().map(|layer| layer.experts).max().unwrap();
    assert_eq!(view.reuse.hit_rate(most), Some(1.0), "nothing is forgotten where everything fits");
    let decode = view.decode.unwrap();
    assert_eq!((decode.stats.rows, decode.sequences, decode.prompt, decode.tokens), (1, 1, 0, 1));
    let prefill = view.prefill.unwrap();
    assert_eq!((prefill.prompt, prefill.tokens), (30, 1));
    let phases: Duration = decode.phases().map(|(_, time)| time).sum();
    assert!(phases > Duration::ZERO && phases <= decode.stats.time + Duration::from_millis(1));
    assert!(decode.phases().any(|(name, time)| name == "attend" && time > Duration::ZERO));
}

#[test]
fn jobs_are_seen_with_what_was_expected_of_them() {
    let scheduler = start();
    run(&scheduler, &(100..130).collect::<Vec<u32>>(), 4);
    let (send, events) = channel();
    let cancel = CancelToken::new();
    let long = Job { cancel: cancel.clone(), ..job(&(300..340).collect::<Vec<u32>>(), 400, &send) };
    let id = scheduler.submit(long).unwrap();
    let view = until(&scheduler, |view| {
        let running = view.jobs.first().and_then(|job| job.running);
        running.is_some_and(|(_, run)| run.new_tokens > 2)
    });
    let found = view.jobs[0];
    let (_, run) = found.running.unwrap();
    assert_eq!((found.id, found.prompt, found.max_tokens, found.batch), (id, 40, Some(400), false));
    assert_eq!((run.done, run.prompt, run.rows), (40, 40, 0));
    assert!(found.expected.is_some() && run.forecast.first_token.is_some(), "the first job was measured");
    assert!(run.first_token.is_some());
    cancel.cancel();
    let ended = until(&scheduler, |view| view.jobs.is_empty() && view.recent.len() == 2).recent;
    assert_eq!((ended[0].id, ended[0].prompt), (id, 40));
    let outcome = ended[0].outcome.unwrap();
    assert_eq!(outcome.finish, forebay_engine::Finish::Cancelled);
    assert!(outcome.stats.new_tokens > 2 && ended[0].took >= outcome.stats.prefill);
    assert!(ended[0].expected.is_some() && ended[1].expected.is_none(), "nothing was known before the first");
    drop(events);
}

#[test]
fn the_list_of_ended_jobs_is_bounded() {
    let scheduler = start();
    for at in 0..25 {
        run(&scheduler, &[100 + at], 1);
    }
    let recent = until(&scheduler, |view| view.jobs.is_empty()).recent;
    assert_eq!(recent.len(), 20);
    let ids: Vec<u64> = recent.iter().map(|job| job.id.number()).collect();
    assert_eq!(ids, (6..=25).rev().collect::<Vec<u64>>());
}
