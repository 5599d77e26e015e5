//! Placement never changes a bit: one job, run in every way the engine can be told to run it,
//! always gives the same logits.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, IoOptions, Session, inspect};
use forebay_hub::pack::{Codes, PackOptions};
use forebay_io::{Access, Backend};
use forebay_kernels::Isa;
use forebay_model::{Arith, KvDtype};
use forebay_testkit::toy;
use forebay_tiers::{LookAhead, Policy};

/// Tokens of the job that come as a prompt; the rest come one by one.
const PROMPT: usize = 150;

/// One way to run the job.
#[derive(Clone, Copy, Debug)]
struct Way {
    budget: Budget,
    threads: usize,
    chunk: usize,
    block: usize,
    isa: Isa,
    look_ahead: LookAhead,
    policy: Policy,
    io: IoOptions,
    warm: bool,
}

#[derive(Clone, Copy, Debug)]
enum Budget {
    /// Every expert passes through; none stays.
    Streaming,
    /// One slot per layer.
    OneSlot,
    /// Half of what there is.
    Half,
    /// Every expert stays.
    Everything,
}

const BUDGETS: [Budget; 4] = [Budget::Streaming, Budget::OneSlot, Budget::Half, Budget::Everything];

fn bytes(budget: Budget, dir: &Path, options: &EngineOptions) -> ByteSize {
    let plan = inspect(dir, options).unwrap().plan.unwrap();
    let slot = plan.demand.classes.iter().map(|c| c.slab_bytes.next_multiple_of(4096) as u64).max().unwrap();
    ByteSize(match budget {
        Budget::Streaming => plan.minimum,
        Budget::OneSlot => plan.minimum + slot * plan.demand.layers.len() as u64,
        Budget::Half => (plan.minimum + plan.everything) / 2,
        Budget::Everything => plan.everything,
    })
}

/// A digest of every logit of the job, bit by bit.
fn run(dir: &Path, tokens: &[u32], base: EngineOptions, way: Way) -> u64 {
    run_from(dir, &[], tokens, base, way)
}

/// The same with copies of the files elsewhere.
fn run_from(dir: &Path, mirrors: &[PathBuf], tokens: &[u32], base: EngineOptions, way: Way) -> u64 {
    let mut options = EngineOptions {
        threads: Some(way.threads),
        chunk: Some(way.chunk),
        block: Some(way.block),
        isa: Some(way.isa),
        look_ahead: way.look_ahead,
        policy: way.policy,
        io: way.io,
        context: Some(tokens.len()),
        ..base
    };
    options.memory = Some(bytes(way.budget, dir, &options));
    let mut engine = Engine::open_mirrored(dir, mirrors, options, &mut |_, _| {}).unwrap();
    let mut session = Session::new(&engine);
    if way.warm {
        session.run_tokens(&mut engine, tokens, &CancelToken::new(), &mut |_, _| {}).unwrap();
        session.truncate(0);
    }
    let mut digest = 0xCBF2_9CE4_8422_2325u64;
    let mut eat = |_: usize, row: &[f32]| {
        for logit in row {
            digest = (digest ^ u64::from(logit.to_bits())).wrapping_mul(0x0000_0100_0000_01B3);
        }
    };
    let (prompt, rest) = tokens.split_at(PROMPT.min(tokens.len()));
    session.run_tokens(&mut engine, prompt, &CancelToken::new(), &mut eat).unwrap();
    for token in rest {
        session.run_tokens(&mut engine, &[*token], &CancelToken::new(), &mut eat).unwrap();
    }
    let counters = engine.counters();
    let loads = counters.misses + counters.ahead_wasted;
    assert_eq!(loads, counters.loads, "every miss is read, once: {counters:?}");
    if let LookAhead::Off = way.look_ahead {
        assert_eq!(counters.ahead_asked, 0);
    }
    if let Budget::Everything = way.budget {
        let experts: usize = engine.plan().demand.layers.iter().map(|layer| layer.experts).sum();
        assert!(counters.misses <= experts as u64, "with room for all, nothing is read twice: {counters:?}");
    }
    digest
}

/// All ways give one digest; on failure the ways are listed by digest.
fn assert_one_digest(dir: &Path, tokens: &[u32], base: EngineOptions, ways: &[Way]) {
    let mut digests: BTreeMap<u64, Vec<Way>> = BTreeMap::new();
    for way in ways {
        digests.entry(run(dir, tokens, base, *way)).or_default().push(*way);
    }
    assert_eq!(digests.len(), 1, "{} different results: {digests:#?}", digests.len());
}

/// Ways to read. Where a file system or a kernel refuses one, the engine takes another and says so.
fn disks() -> [IoOptions; 4] {
    let through = |backend, access| IoOptions { backend: Some(backend), access, ..IoOptions::default() };
    let slow = IoOptions { throttle: Some(400 << 20), depth: Some(1), ..IoOptions::default() };
    [
        through(Backend::Pool, Some(Access::Buffered)),
        through(Backend::Pool, Some(Access::Direct)),
        through(Backend::Uring, Some(Access::Direct)),
        slow,
    ]
}

fn every_way(chunks: &[usize]) -> Vec<Way> {
    let mut ways = Vec::new();
    for budget in BUDGETS {
        for threads in [1, 2] {
            for &chunk in chunks {
                for isa in Isa::available() {
                    for warm in [false, true] {
                        // Every value of these meets every value of the others, if not all at once.
                        let block = [256, 3, 50][ways.len() % 3];
                        let look_ahead = [LookAhead::On, LookAhead::Off][ways.len() / 2 % 2];
                        let policy = [Policy::Blend, Policy::Lru][ways.len() / 4 % 2];
                        let io = disks()[ways.len() / 2 % 4];
                        ways.push(Way { budget, threads, chunk, block, isa, look_ahead, policy, io, warm });
                    }
                }
            }
        }
    }
    ways
}

fn toy_tokens() -> Vec<u32> {
    (0..200).map(|i| (i * i * 7 + 31 * i + 3) % 290).collect()
}

fn toy_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    dir
}

/// 200 tokens of the synthetic model (256 experts a layer, sparse attention over 6 keys, int4
/// and int8 weights): every combination of budget, threads, chunk, instruction set and cache.
#[test]
fn every_combination_gives_the_same_bits_in_int8() {
    let dir = toy_dir();
    let base = EngineOptions { arith: Arith::Int8, ..Default::default() };
    assert_one_digest(dir.path(), &toy_tokens(), base, &every_way(&[1, 7, 64, 200]));
}

#[test]
fn every_combination_gives_the_same_bits_in_exact() {
    let dir = toy_dir();
    let base = EngineOptions { arith: Arith::Exact, kv_dtype: KvDtype::F32, ..Default::default() };
    assert_one_digest(dir.path(), &toy_tokens(), base, &every_way(&[7, 200]));
}

/// The same in Forebay's own container: experts in panels, each one read, each one checked.
#[test]
fn the_packed_model_gives_the_bits_of_the_other_one() {
    let (dir, packed) = (toy_dir(), tempfile::tempdir().unwrap());
    let cancel = CancelToken::new();
    let options = PackOptions { threads: 2, codes: Codes::Raw, margin: 0, cancel: &cancel };
    forebay_hub::pack::pack(dir.path(), packed.path(), options, &mut |_, _| {}).unwrap();
    for arith in [Arith::Int8, Arith::Exact] {
        let base = EngineOptions { arith, ..Default::default() };
        let ways = every_way(&[64]);
        assert_one_digest(packed.path(), &toy_tokens(), base, &ways);
        let [one, other] = [dir.path(), packed.path()].map(|dir| run(dir, &toy_tokens(), base, ways[0]));
        assert_eq!(one, other, "{arith}");
    }
}

/// From two folders at once, whichever is expected to be faster for an expert.
#[test]
fn copies_on_other_disks_give_the_same_bits() {
    let (dir, copy) = (toy_dir(), tempfile::tempdir().unwrap());
    for entry in std::fs::read_dir(dir.path()).unwrap().map(Result::unwrap) {
        std::fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
    }
    let (base, tokens) = (EngineOptions::default(), toy_tokens());
    let mirrors = [copy.path().to_owned()];
    let mut digests: BTreeMap<u64, Vec<Way>> = BTreeMap::new();
    for way in every_way(&[64]) {
        digests.entry(run_from(dir.path(), &mirrors, &tokens, base, way)).or_default().push(way);
    }
    assert_eq!(digests.len(), 1, "{digests:#?}");
    let alone = run(dir.path(), &tokens, base, every_way(&[64])[0]);
    assert_eq!(digests.into_keys().next(), Some(alone));
}

/// Experts quantised as they arrive are as independent of placement as stored ones.
#[test]
fn quantising_while_reading_gives_the_same_bits() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens/f16");
    let base = EngineOptions { quantise: Some("int4-g32".parse().unwrap()), ..Default::default() };
    let tokens: Vec<u32> = (0..40).map(|i| (i * 13 + 5) % 90).collect();
    assert_one_digest(&dir, &tokens, base, &every_way(&[3, 40]));
}

/// The bundled model on real text: each setting varied alone, and a few at once.
#[test]
fn the_bundled_model_gives_the_same_bits() {
    let dir: PathBuf = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let heldout: serde_json::Value =
        serde_json::from_slice(&std::fs::read(dir.join("eval/heldout.json")).unwrap()).unwrap();
    let window: Vec<u32> = serde_json::from_value(heldout["segments"][0]["windows"][3].clone()).unwrap();
    let best = Isa::available().last().unwrap();
    let usual = Way {
        budget: Budget::Half,
        threads: 2,
        chunk: 64,
        block: 256,
        isa: best,
        look_ahead: LookAhead::Auto,
        policy: Policy::default(),
        io: IoOptions::default(),
        warm: false,
    };
    let mut ways = vec![usual];
    ways.extend(BUDGETS.map(|budget| Way { budget, ..usual }));
    ways.extend([1, 7, 200].map(|chunk| Way { chunk, ..usual }));
    ways.extend([1, 33].map(|block| Way { chunk: 200, block, ..usual }));
    ways.extend(disks().map(|io| Way { io, ..usual }));
    let aged = Policy::Aged { half_life: 30 };
    ways.extend([Policy::Lru, aged].map(|policy| Way { policy, ..usual }));
    ways.extend([LookAhead::On, LookAhead::Off].map(|look_ahead| Way { look_ahead, ..usual }));
    ways.extend(Isa::available().map(|isa| Way { isa, ..usual }));
    ways.push(Way { threads: 1, warm: true, ..usual });
    ways.push(Way { threads: 1, chunk: 7, budget: Budget::OneSlot, warm: true, ..usual });
    assert_one_digest(&dir, &window[..200], EngineOptions::default(), &ways);
}
