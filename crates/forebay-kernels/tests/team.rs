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

#[test]
fn a_worker_that_is_held_up_does_not_hold_up_the_others() {
    // Whoever runs the held part waits there for all other parts, those of its own share included: they
    // end only if the others take them.
    let team = Team::new(3).unwrap();
    for held in [0, 20, 59] {
        let others = AtomicUsize::new(0);
        team.run(60, &|part| {
            if part != held {
                others.fetch_add(1, Ordering::Release);
                return;
            }
            let start = std::time::Instant::now();
            while others.load(Ordering::Acquire) < 59 {
                assert!(start.elapsed() < Duration::from_secs(60), "the others' parts are stuck");
                std::thread::yield_now();
            }
        });
        assert_eq!(others.into_inner(), 59);
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_caller_that_waits_for_a_slow_part_sleeps() {
    // The process's time, in which the idle workers count too; other tests run beside this one,
    // so it runs in a process of its own.
    if !alone("a_caller_that_waits_for_a_slow_part_sleeps") {
        return;
    }
    let team = Team::new(2).unwrap();
    let caller = std::thread::current().id();
    let taken = AtomicUsize::new(0);
    let before = processor_time();
    team.run(2, &|_| {
        // Each thread takes one part; the worker's takes half a second, without computing.
        taken.fetch_add(1, Ordering::Relaxed);
        while taken.load(Ordering::Relaxed) < 2 {
            std::thread::yield_now();
        }
        if std::thread::current().id() != caller {
            std::thread::sleep(Duration::from_millis(500));
        }
    });
    assert!(processor_time() - before < Duration::from_millis(50), "the caller must sleep");
}

#[cfg(target_os = "linux")]
#[test]
fn an_idle_process_uses_no_processor_time() {
    if !alone("an_idle_process_uses_no_processor_time") {
        return;
    }
    let team = Team::new(6).unwrap();
    for _ in 0..100 {
        team.run(30, &|_| {});
    }
    std::thread::sleep(Duration::from_millis(20));
    let before = processor_time();
    std::thread::sleep(Duration::from_secs(1));
    assert!(processor_time() - before < Duration::from_millis(20), "an idle team must sleep");
    drop(team);
}

#[cfg(target_os = "linux")]
#[test]
fn the_affinity_mask_bounds_the_team_and_is_left_as_it_is() {
    if !alone("the_affinity_mask_bounds_the_team_and_is_left_as_it_is") {
        return;
    }
    let mask = || {
        // SAFETY: plain bits, for which zero is a value; the kernel writes at most their size.
        unsafe {
            let mut mask: libc::cpu_set_t = std::mem::zeroed();
            assert_eq!(libc::sched_getaffinity(0, size_of_val(&mask), &mut mask), 0);
            mask
        }
    };
    let all = mask();
    let cpus: Vec<usize> = (0..libc::CPU_SETSIZE as usize)
        // SAFETY: below the size of the set.
        .filter(|&cpu| unsafe { libc::CPU_ISSET(cpu, &all) })
        .collect();
    assert!((1..=cpus.len()).contains(&Team::default_threads()));
    // The last one: a team that started at processor 0 would leave the mask.
    let last = *cpus.last().unwrap();
    // SAFETY: as above; `last` is below the size of the set.
    let one = unsafe {
        let mut one: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(last, &mut one);
        assert_eq!(libc::sched_setaffinity(0, size_of_val(&one), &one), 0);
        one
    };
    assert_eq!(Team::default_threads(), 1);
    let team = Team::new(3).unwrap();
    let seen = Mutex::new(HashSet::new());
    team.run(60, &|_| {
        std::thread::sleep(Duration::from_millis(1));
        // SAFETY: takes nothing.
        let cpu = unsafe { libc::sched_getcpu() };
        // SAFETY: plain bits.
        let same = unsafe { libc::CPU_EQUAL(&mask(), &one) };
        assert!(same, "a thread of the team has another mask than its process");
        seen.lock().unwrap().insert(cpu);
    });
    assert_eq!(seen.into_inner().unwrap(), HashSet::from([last as i32]));
}

/// Whether this is the process that runs the named test alone; if not, runs it in one.
#[cfg(target_os = "linux")]
fn alone(test: &str) -> bool {
    const MARK: &str = "FOREBAY_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}{output:?}");
    false
}

/// User and system time of this process.
#[cfg(target_os = "linux")]
fn processor_time() -> Duration {
    // SAFETY: plain numbers, for which zero is a value; the call fills them in.
    let usage = unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        assert_eq!(libc::getrusage(libc::RUSAGE_SELF, &mut usage), 0);
        usage
    };
    let time = |t: libc::timeval| Duration::from_micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    time(usage.ru_utime) + time(usage.ru_stime)
}
