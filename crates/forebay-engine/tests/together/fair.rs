//! Who is served when: fairness, KV blocks, batch work, and what is not computed twice.

use std::time::Duration;

use forebay_engine::{
    Drafting, Engine, EngineOptions, Finish, Job, JobError, JobEvent, PrefixConfig, Priority, Refused,
    Sampling, Scheduler,
};

use super::*;

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
    assert!(totals.rerun_tokens > 0, "somebody ran again what it had given up: {totals:?}");
    // It is no longer a prompt for that.
    assert_eq!(totals.prompt_tokens + totals.reused_tokens, 3 * 20, "{totals:?}");
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

/// Batch work that has begun gives its KV blocks up for others who come later: these are taken on at once, have a token in
/// every pass, and go on before it does where one of them has to wait for another.
#[test]
fn batch_work_gives_its_kv_blocks_up_for_others() {
    let dir = toy_dir();
    // Room for two whole contexts; the batch job's prompt and the answers of the others together have no room.
    let options = EngineOptions { context: Some(1728), sequences: 2, ..EngineOptions::default() };
    let script = |at: u32, prompt: u32, tokens: usize| Script {
        prompt: (0..prompt).map(|i| (at * 31 + i * i) % 290).collect(),
        tokens,
        sampling: Sampling { logprobs: Some(1), seed: u64::from(at), ..Sampling::default() },
        after: 0,
        cancel_at: None,
    };
    let (batch, others) = (script(0, 1100, 200), [1, 2, 3].map(|at| script(at, 20, 1320)));
    let mut plain = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let want = alone(&mut plain, &batch).unwrap();
    let wanted = others.each_ref().map(|script| alone(&mut plain, script).unwrap());
    drop(plain);
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, limits(8)).unwrap();
    let (work, of_batch) = job(&batch, &scheduler);
    scheduler.submit(Job { priority: Priority::Batch, ..work }).unwrap();
    let is_token = |event: &JobEvent| matches!(event, JobEvent::Token(_));
    while of_batch.lock().unwrap().iter().filter(|(_, event)| is_token(event)).count() < 3 {
        std::thread::sleep(Duration::from_micros(200));
    }
    let of_others = others.each_ref().map(|script| {
        let (job, of) = job(script, &scheduler);
        scheduler.submit(job).unwrap();
        of
    });
    assert!(scheduler.drain(Duration::from_secs(300)).is_some());
    assert_eq!(answer(&of_batch), (want, Ok(Finish::Length)));
    let passes = |told: &Told, wanted: fn(&JobEvent) -> bool| -> Vec<u64> {
        told.lock().unwrap().iter().filter(|(_, event)| wanted(event)).map(|(pass, _)| *pass).collect()
    };
    for (told, want) in of_others.iter().zip(wanted) {
        assert_eq!(answer(told), (want, Ok(Finish::Length)));
    }
    let firsts = of_others.each_ref().map(|told| passes(told, is_token)[0]);
    assert!(firsts[2] - firsts[0] < 20, "taken on at once, not behind batch work: {firsts:?}");
    // The first two have a token in every pass: it is not they who gave their blocks up.
    for told in &of_others[..2] {
        let at = passes(told, is_token);
        assert!(at.windows(2).all(|two| two[1] - two[0] <= 1), "somebody who waits had to wait");
    }
    let first = firsts[0];
    let last = of_others.iter().map(|told| passes(told, is_end)[0]).max().unwrap();
    let meanwhile = passes(&of_batch, is_token).into_iter().filter(|pass| (first + 1..last).contains(pass));
    assert_eq!(meanwhile.count(), 0, "batch work went on before somebody who waits");
    assert_eq!(passes(&of_batch, |event| matches!(event, JobEvent::Started { .. })).len(), 1);
}

/// What a pass with somebody's prompt has no rows for is not drafted.
#[test]
fn nothing_is_drafted_that_is_not_verified() {
    let dir = toy_dir();
    let options = EngineOptions {
        context: Some(1024),
        sequences: 2,
        chunk: Some(64),
        drafting: Drafting::Depth(2),
        ..EngineOptions::default()
    };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let long = Script { prompt: (0..900).map(|i| (i * i + 3) % 290).collect(), after: 3, ..quiet_script(2) };
    let (told, _) = run(engine, limits(2), &[quiet_script(200), long]);
    for told in &told {
        assert_eq!(answer(told).1, Ok(Finish::Length));
        let told = told.lock().unwrap();
        let JobEvent::Done(outcome) = &told.last().unwrap().1 else { panic!("{told:?}") };
        let drafts = outcome.stats.drafts;
        assert_eq!(drafts.proposed, drafts.verified, "{drafts:?}");
    }
}

/// What is to be kept on disk is written while there is always somebody to answer, not only when nobody is left.
#[test]
fn prefixes_are_kept_while_others_are_answered() {
    let dir = toy_dir();
    let kept = tempfile::tempdir().unwrap();
    let options = EngineOptions { context: Some(1728), sequences: 2, ..EngineOptions::default() };
    let mut engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    engine.keep_prefixes(PrefixConfig { dir: kept.path().to_owned(), limit: 1 << 30 }, [3; 32]).unwrap();
    let scheduler = Scheduler::start(engine, limits(2)).unwrap();
    let (long, of_long) = job(&quiet_script(1500), &scheduler);
    scheduler.submit(long).unwrap();
    let short = Script { prompt: (0..200).map(|i| (i * i + 9) % 290).collect(), ..quiet_script(2) };
    let (short, of_short) = job(&short, &scheduler);
    scheduler.submit(short).unwrap();
    let has = |told: &Told, wanted: fn(&JobEvent) -> bool| {
        told.lock().unwrap().iter().any(|(_, event)| wanted(event))
    };
    let files = || {
        let folders = std::fs::read_dir(kept.path()).unwrap().map(|entry| entry.unwrap().path());
        folders
            .flat_map(|folder| std::fs::read_dir(folder).unwrap())
            .filter(|file| file.as_ref().unwrap().path().extension().is_some_and(|end| end == "kv"))
            .count()
    };
    while !has(&of_short, is_end) || files() < 3 {
        assert!(!has(&of_long, is_end), "nothing was kept until nobody was left: {} files", files());
        std::thread::sleep(Duration::from_millis(1));
    }
    assert!(scheduler.drain(Duration::from_secs(60)).is_some());
    assert_eq!(answer(&of_long).1, Ok(Finish::Length));
    assert!(files() > 20, "the rest at the end: {}", files());
}

/// A place is no use to a job without KV blocks: it waits, which its forecast says and the queue's limit counts.
#[test]
fn whoever_waits_for_kv_blocks_waits() {
    let dir = toy_dir();
    // One whole context: 27 blocks and 2 to spare.
    let options = EngineOptions { context: Some(1728), sequences: 1, ..EngineOptions::default() };
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    let scheduler = Scheduler::start(engine, Limits { queue: 1, ..limits(8) }).unwrap();
    let wait = |tokens: usize| scheduler.forecast(&toy::prompt(), Some(tokens)).wait;
    assert_eq!(wait(1000), Some(Duration::ZERO));
    let (first, of_first) = job(&quiet_script(1500), &scheduler);
    let cancel = first.cancel.clone();
    scheduler.submit(first).unwrap();
    while !of_first.lock().unwrap().iter().any(|(_, event)| matches!(event, JobEvent::Token(_))) {
        std::thread::sleep(Duration::from_micros(200));
    }
    // 19 blocks are taken; another such job needs 18, and a short one 4.
    assert_ne!(wait(1000), Some(Duration::ZERO));
    assert_eq!(wait(100), Some(Duration::ZERO));
    let (second, of_second) = job(&quiet_script(1000), &scheduler);
    scheduler.submit(second).unwrap();
    // It is the one that may wait, whatever comes behind it.
    assert_ne!(wait(100), Some(Duration::ZERO));
    let (third, _) = job(&quiet_script(10), &scheduler);
    assert!(matches!(scheduler.submit(third), Err(Refused::QueueFull { waiting: 1, .. })));
    cancel.cancel();
    assert!(scheduler.drain(Duration::from_secs(60)).is_some());
    assert_eq!(answer(&of_second).1, Ok(Finish::Length));
}
