//! A disk that fails in every way a disk can: the right tokens or an error that says what is
//! wrong, never wrong tokens, and the engine goes on afterwards.

mod common;

use std::sync::Arc;
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
    let plan = engine.plan();
    let staging: usize = plan.demand.classes.iter().map(|class| class.staging).sum();
    let slabs = plan.resident_slots() + staging;
    World { engine, disks, slabs }
}

impl World {
    fn set(&self, faults: &Faults) {
        for disk in &self.disks {
            disk.set(faults.clone());
        }
    }

    /// The tokens of a short answer.
    fn answer(&mut self) -> Result<Vec<u32>, GenerateError> {
        let mut session = Session::new(&self.engine);
        let sampling = Sampling { temperature: 0.0, ..Sampling::default() };
        let request = Request { prompt: &PROMPT, max_tokens: ANSWER, sampling, stops: &[] };
        let mut tokens = Vec::new();
        session.generate(&mut self.engine, &request, &CancelToken::new(), None, &mut |event| {
            if let Event::Token(token) = event {
                tokens.push(token);
            }
        })?;
        Ok(tokens)
    }

    /// No slab is lost, whatever happened.
    fn check_slabs(&mut self) {
        let store = self.engine.store();
        store.forget_ahead();
        while store.reader().is_busy() {
            std::thread::sleep(Duration::from_micros(50));
        }
        store.forget_ahead();
        assert_eq!(store.slabs_at_home(), self.slabs);
    }
}

/// What happens in one run.
fn faults(seed: u64) -> Faults {
    let usual = Faults { seed, ..Faults::default() };
    match seed % 8 {
        0 => Faults { errors: 60, ..usual },
        1 => Faults { short_reads: 60, interrupts: 30, ..usual },
        2 => Faults { again: 50, interrupts: 20, ..usual },
        3 => Faults { errors: 400, short_reads: 30, ..usual },
        4 => Faults { truncate_to: Some(seed.wrapping_mul(7_919_003) % 30_000_000), ..usual },
        5 => Faults { latency: Duration::from_micros(seed % 200), errors: 10, ..usual },
        6 => {
            let at = seed.wrapping_mul(104_729_017) % 30_000_000;
            Faults { bad: Some(at..at + 40_000), ..usual }
        }
        _ => Faults { errors: 15, again: 20, short_reads: 20, interrupts: 20, ..usual },
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
        if seed % 10 == 0 {
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
