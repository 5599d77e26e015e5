//! A disk that fails in every way a disk can: the right tokens or an error that says what is
//! wrong, never wrong tokens, and the engine goes on afterwards.

mod common;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Once};
use std::time::Duration;

use common::demo;
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Event, GenerateError, Request, Sampling, Session, inspect};
use forebay_io::{Access, Roots, Shard};
use forebay_model::ForwardError;
use forebay_testkit::fault::{Faults, FaultyDisk};
use forebay_tiers::LookAhead;

const PROMPT: [u32; 3] = [300, 17, 2041];
const ANSWER: usize = 3;

/// Panics that a disk was asked for say nothing; all others are told as usual.
fn be_quiet_about_wanted_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            let text = panic.payload_as_str().unwrap_or_default();
            if !text.contains("as was asked for") {
                usual(panic);
            }
        }));
    });
}

/// The bundled model with few slots, over a disk whose faults can be set.
struct World {
    engine: Engine,
    disks: Vec<Arc<FaultyDisk>>,
    /// Slabs there are.
    slabs: usize,
}

/// With `copies`, every file is there twice, each on a disk of its own.
fn world(slots: u64, copies: usize, look_ahead: LookAhead) -> World {
    let mut options = EngineOptions { context: Some(32), look_ahead, ..Default::default() };
    options.io.access = Some(Access::Buffered);
    let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
    options.memory = Some(ByteSize(plan.minimum + slots * plan.slot_row()));
    be_quiet_about_wanted_panics();
    let mut disks = Vec::new();
    let engine = Engine::open_over(&demo(), options, &mut |_, _| {}, &mut |shards, _| {
        let mut stand_before = |shard: &Shard| {
            let disk = Arc::new(FaultyDisk::over(Arc::clone(&shard.file), Faults::default()));
            disks.push(Arc::clone(&disk));
            Shard { path: shard.path.clone(), file: disk }
        };
        let mut roots = Roots::from(shards.iter().map(&mut stand_before).collect::<Vec<_>>());
        for _ in 1..copies {
            roots.add(shards.iter().map(|shard| Some(stand_before(shard))).collect())?;
        }
        Ok(roots)
    });
    let engine = engine.unwrap();
    let slabs = slabs(&engine);
    World { engine, disks, slabs }
}

impl World {
    fn set(&self, faults: &Faults) {
        for disk in &self.disks {
            disk.set(faults.clone());
        }
    }

    fn answer(&mut self) -> Result<Vec<u32>, GenerateError> {
        answer(&mut self.engine, &mut |_| ())
    }

    /// No slab is lost, whatever happened.
    fn check_slabs(&mut self) {
        check_slabs(&mut self.engine, self.slabs);
    }
}

/// The tokens of a short answer; `after` is told how many there are so far, 0 at the start.
fn answer(engine: &mut Engine, after: &mut dyn FnMut(usize)) -> Result<Vec<u32>, GenerateError> {
    let mut session = Session::new(engine);
    let request = Request { prompt: &PROMPT, max_tokens: ANSWER, sampling: Sampling::greedy(), stops: &[] };
    let mut tokens = Vec::new();
    after(0);
    session.generate(engine, &request, &CancelToken::new(), None, &mut |event| {
        if let Event::Token(token) = event {
            tokens.push(token.id);
            after(tokens.len());
        }
        ControlFlow::Continue(())
    })?;
    Ok(tokens)
}

/// Begins to read what a made-up history ranks highest.
fn warm_up(engine: &mut Engine) {
    let moe = &engine.spec().moe;
    let (experts, top_k) = (moe.experts as u64, moe.top_k);
    let store = engine.store();
    store.seed(top_k, &|layer| (0..experts).map(|expert| 1 + (expert * 5 + u64::from(layer)) % 9).collect());
    store.warm_up();
}

fn slabs(engine: &Engine) -> usize {
    let plan = engine.plan();
    plan.resident_slots() + plan.demand.classes.iter().map(|class| class.staging).sum::<usize>()
}

fn check_slabs(engine: &mut Engine, slabs: usize) {
    let store = engine.store();
    store.forget_ahead();
    while store.reader().is_busy() {
        std::thread::sleep(Duration::from_micros(50));
    }
    store.forget_ahead();
    assert_eq!(store.slabs_at_home(), slabs);
}
/// What happens in one run, from some read on.
fn faults(seed: u64) -> Faults {
    let after = if seed.is_multiple_of(3) { 0 } else { seed.wrapping_mul(6_364_136_223) % 120 };
    let usual = Faults { seed, after, ..Faults::default() };
    match seed % 11 {
        0 => Faults { errors: 150, ..usual },
        1 => Faults { short_reads: 60, interrupts: 30, ..usual },
        2 => Faults { again: 50, interrupts: 20, ..usual },
        3 => Faults { errors: 400, short_reads: 30, ..usual },
        4 => Faults { truncate_to: Some(seed.wrapping_mul(7_919_003) % 30_000_000), ..usual },
        5 => Faults { latency: Duration::from_micros(seed % 200), errors: 40, ..usual },
        6 => {
            let at = seed.wrapping_mul(104_729_017) % 30_000_000;
            Faults { bad: Some(at..at + 40_000), ..usual }
        }
        7 => Faults { panics: 1 + (seed % 50) as u16, ..usual },
        8 => Faults { direct: true, short_reads: 30, errors: 50, again: 10, ..usual },
        9 => Faults { direct: true, panics: 3, latency: Duration::from_micros(50), ..usual },
        _ => Faults { errors: 120, again: 20, short_reads: 20, interrupts: 20, ..usual },
    }
}

fn runs(world: &mut World, seeds: std::ops::Range<u64>) -> (usize, usize) {
    world.set(&Faults::default());
    let right = world.answer().unwrap();
    assert_eq!(right.len(), ANSWER);
    let (mut good, mut failed) = (0, 0);
    for seed in seeds {
        world.engine.drop_experts();
        world.set(&faults(seed));
        if !seed.is_multiple_of(3) {
            // On the failing disk as well.
            warm_up(&mut world.engine);
        }
        match world.answer() {
            Ok(tokens) => {
                assert_eq!(tokens, right, "seed {seed}");
                good += 1;
            }
            Err(GenerateError::Forward(ForwardError::Expert(error))) => {
                let text = error.to_string();
                assert!(text.contains("expert") && text.contains("safetensors"), "seed {seed}: {text}");
                failed += 1;
            }
            Err(other) => panic!("seed {seed}: {other}"),
        }
        world.check_slabs();
        if seed.is_multiple_of(10) {
            world.set(&Faults::default());
            assert_eq!(world.answer().unwrap(), right, "after seed {seed}, with the disk mended");
        }
    }
    (good, failed)
}

/// A thousand runs in all, over three ways to hold experts.
#[test]
fn faults_give_the_right_tokens_or_an_error() {
    let mut all = (0, 0);
    for (slots, look_ahead, seeds) in
        [(0, LookAhead::Off, 0..300), (2, LookAhead::On, 300..700), (6, LookAhead::Auto, 700..1000)]
    {
        let (good, failed) = runs(&mut world(slots, 1, look_ahead), seeds);
        all = (all.0 + good, all.1 + failed);
    }
    assert!(all.0 >= 250 && all.1 >= 100, "faults must hit some runs and not all: {all:?}");
}

/// With a second copy, one failing disk costs nothing but speed.
#[test]
fn a_copy_stands_in_for_a_failing_disk() {
    let mut world = world(2, 2, LookAhead::On);
    let right = world.answer().unwrap();
    let files = world.disks.len() / 2;
    for seed in 0..40 {
        world.engine.drop_experts();
        let broken = if seed % 2 == 0 { &world.disks[..files] } else { &world.disks[files..] };
        let whole = if seed % 2 == 0 { &world.disks[files..] } else { &world.disks[..files] };
        broken.iter().for_each(|disk| disk.set(Faults { seed, errors: 300, ..Faults::default() }));
        whole.iter().for_each(|disk| disk.set(Faults::default()));
        assert_eq!(world.answer().unwrap(), right, "seed {seed}");
        world.check_slabs();
    }
    let roots = world.engine.store().reader().roots();
    assert_eq!(roots.len(), 2);
    assert!(roots.iter().any(|root| root.errors > 0), "{roots:?}");
}

/// What happens to the model's file while the engine has it open.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Loss {
    Unlinked,
    Renamed,
    Replaced,
    Truncated(u64),
}

impl Loss {
    fn strike(self, file: &Path) {
        let aside = file.with_extension("aside");
        match self {
            Loss::Unlinked => std::fs::remove_file(file).unwrap(),
            Loss::Renamed => std::fs::rename(file, aside).unwrap(),
            Loss::Replaced => {
                std::fs::write(&aside, b"another file").unwrap();
                std::fs::rename(aside, file).unwrap();
            }
            Loss::Truncated(len) => {
                std::fs::OpenOptions::new().write(true).open(file).unwrap().set_len(len).unwrap();
            }
        }
    }
}

/// Real files that vanish, are renamed, replaced or cut short after a random token. Who has the file
/// open still has its bytes, unless it was cut; whoever opens the model then is told what is wrong.
#[cfg(unix)]
#[test]
fn files_may_vanish_under_the_engine() {
    use forebay_io::Backend;

    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.safetensors");
    for entry in std::fs::read_dir(demo()).unwrap() {
        let entry = entry.unwrap();
        if entry.file_type().unwrap().is_file() {
            std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
        }
    }
    let size = std::fs::metadata(&file).unwrap().len();
    let open = |backend, access| {
        let mut options = EngineOptions { context: Some(32), ..Default::default() };
        options.io.access = Some(access);
        options.io.backend = Some(backend);
        let plan = inspect(&demo(), &options).unwrap().plan.unwrap();
        options.memory = Some(ByteSize(plan.minimum + 2 * plan.slot_row()));
        Engine::open(dir.path(), options, &mut |_, _| {})
    };
    let right = answer(&mut open(Backend::Pool, Access::Buffered).unwrap(), &mut |_| ()).unwrap();
    let (mut good, mut failed) = (0, 0);
    for run in 0u64..48 {
        let loss = match run % 6 {
            0 => Loss::Unlinked,
            1 => Loss::Renamed,
            2 => Loss::Replaced,
            _ => Loss::Truncated(run.wrapping_mul(0x9e37_79b9_7f4a_7c15) % size),
        };
        let backend = if run % 2 == 0 { Backend::Pool } else { Backend::Uring };
        let access = if run % 4 < 2 { Access::Buffered } else { Access::Direct };
        let mut engine = open(backend, access).unwrap();
        let slabs = slabs(&engine);
        let moment = (run / 6) as usize % ANSWER;
        match answer(&mut engine, &mut |tokens| {
            if tokens == moment {
                loss.strike(&file)
            }
        }) {
            Ok(tokens) => {
                assert_eq!(tokens, right, "run {run}, {loss:?}");
                good += 1;
            }
            Err(GenerateError::Forward(error)) => {
                let text = error.to_string();
                assert!(matches!(loss, Loss::Truncated(_)), "run {run}, {loss:?}: {text}");
                assert!(text.contains("model.safetensors"), "run {run}: {text}");
                failed += 1;
            }
            Err(other) => panic!("run {run}: {other}"),
        }
        check_slabs(&mut engine, slabs);
        let again = open(backend, access).err().map(|error| error.to_string());
        let again = again.unwrap_or_else(|| panic!("run {run}: {loss:?} is not noticed"));
        // A snapshot without its file is one without its tensors.
        let named = again.contains("safetensors") || again.contains(dir.path().to_str().unwrap());
        assert!(named, "run {run}, {loss:?}: {again}");
        std::fs::copy(demo().join("model.safetensors"), &file).unwrap();
        assert_eq!(answer(&mut open(backend, access).unwrap(), &mut |_| ()).unwrap(), right, "run {run}");
    }
    assert!(good >= 24 && failed >= 8, "{good} good, {failed} failed");
}
