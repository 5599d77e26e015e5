//! The thread team under stress and misuse.

use forebay_kernels::Team;
use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

#[test]
fn every_part_runs_once() {
    for threads in [1, 2, 3, 8] {
        let team = Team::new(threads).unwrap();
        assert_eq!(team.threads(), threads);
        for parts in [0, 1, 2, 3, 7, 64, 1000] {
            let counts: Vec<AtomicUsize> = (0..parts).map(|_| AtomicUsize::new(0)).collect();
            team.run(parts, &|part| {
                counts[part].fetch_add(1, Ordering::Relaxed);
            });
            assert!(
                counts.iter().all(|c| c.load(Ordering::Relaxed) == 1),
                "{threads} threads, {parts} parts"
            );
        }
    }
}

#[test]
fn many_tiny_runs_lose_nothing() {
    let team = Team::new(4).unwrap();
    let sum = AtomicUsize::new(0);
    for run in 0..20_000 {
        // Written without atomics: the end of a run must make it visible.
        let mut own = [0usize; 5];
        team.for_each_chunk(&mut own, 1, &|i, chunk| chunk[0] = run + i);
        sum.fetch_add(own.iter().sum::<usize>(), Ordering::Relaxed);
        if run % 4000 == 0 {
            // Long enough for the workers to park.
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    assert_eq!(sum.into_inner(), (0..20_000).map(|run| 5 * run + 10).sum());
}

#[test]
fn chunks_cover_the_data_and_work_spaces_are_private() {
    let team = Team::new(3).unwrap();
    let mut data = vec![0u32; 1003];
    let mut spaces = vec![Vec::new(); 3];
    team.for_each_chunk_with(&mut spaces, &mut data, 10, &|i, chunk, space: &mut Vec<usize>| {
        space.push(i);
        chunk.fill(i as u32 + 1);
    });
    assert!(data.iter().enumerate().all(|(i, v)| *v == i as u32 / 10 + 1));
    let mut seen: Vec<usize> = spaces.concat();
    seen.sort_unstable();
    assert!(seen.into_iter().eq(0..101));
}

#[test]
fn a_panic_reaches_the_caller_and_the_team_lives_on() {
    let team = Team::new(3).unwrap();
    for round in 0..50 {
        let result = catch_unwind(AssertUnwindSafe(|| {
            team.run(30, &|part| assert!(part != round % 30, "part {part} fails"));
        }));
        let message = result.unwrap_err();
        let message = message.downcast_ref::<String>().unwrap();
        assert_eq!(*message, format!("part {} fails", round % 30));
        let ran = AtomicUsize::new(0);
        team.run(30, &|_| {
            ran.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(ran.into_inner(), 30);
    }
}

#[test]
fn a_run_inside_a_part_runs_inline() {
    let (team, other) = (Team::new(3).unwrap(), Team::new(2).unwrap());
    let ran = AtomicUsize::new(0);
    team.run(6, &|_| {
        let here = std::thread::current().id();
        for inner in [&team, &other] {
            inner.run(5, &|_| {
                assert_eq!(std::thread::current().id(), here);
                ran.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
    assert_eq!(ran.into_inner(), 60);
}

#[test]
fn callers_take_turns() {
    let team = Team::new(2).unwrap();
    let ran = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..500 {
                    team.run(3, &|_| {
                        ran.fetch_add(1, Ordering::Relaxed);
                    });
                }
            });
        }
    });
    assert_eq!(ran.into_inner(), 6000);
}

#[test]
fn the_workers_take_part() {
    let team = Team::new(4).unwrap();
    let seen = Mutex::new(HashSet::new());
    team.run(64, &|_| {
        seen.lock().unwrap().insert(std::thread::current().id());
        std::thread::sleep(Duration::from_millis(1));
    });
    assert!(seen.into_inner().unwrap().len() > 1);
    assert!(Team::default_threads() >= 1);
}

#[cfg(target_os = "linux")]
#[test]
fn an_idle_team_uses_no_processor_time() {
    // User and system time of this thread's workers, in clock ticks (10 ms).
    let ticks = || -> u64 {
        let mut total = 0;
        for task in std::fs::read_dir("/proc/self/task").unwrap() {
            let folder = task.unwrap().path();
            let name = std::fs::read_to_string(folder.join("comm")).unwrap_or_default();
            let stat = std::fs::read_to_string(folder.join("stat")).unwrap_or_default();
            if name.starts_with("forebay-idle") {
                let fields: Vec<&str> =
                    stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
                total += fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap();
            }
        }
        total
    };
    let team = Team::named("forebay-idle", 5).unwrap();
    team.run(5, &|_| {});
    std::thread::sleep(Duration::from_millis(50));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(300));
    assert!(ticks() - before <= 1, "an idle team must sleep");
    drop(team);
}
