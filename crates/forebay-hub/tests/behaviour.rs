//! That a synthetic model behaves: routing like that of real text, activations in range. Measured by running it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;

use forebay_core::{CancelToken, Format};
use forebay_engine::{Engine, EngineOptions, Request, Sampling, Session};
use forebay_hub::synth::random::Stream;
use forebay_hub::synth::{self, Dims, SynthSpec, TextFiles, tune};
use forebay_model::Trace;

/// The real ratios of widths, 256 experts and 8 per token; experts narrow enough for a test.
fn scaled_down(dense: usize, moe: usize) -> SynthSpec {
    let dims = Dims {
        hidden: 512,
        dense_width: 512,
        expert_width: 32,
        heads: 16,
        q_rank: 256,
        kv_rank: 128,
        nope: 96,
        rope: 64,
        index_dim: 64,
        value: 64,
        vocab: 8192,
        ..Dims::TINY
    };
    let shard_bytes = synth::spec::DEFAULT_SHARD_BYTES;
    SynthSpec { dims, dense, moe, format: Format::Int4Row, mtp: false, dsa: false, seed: 3, shard_bytes }
}

/// Token ids as frequent as words are: the n-th with probability proportional to 1/n.
fn text_like(len: usize, vocab: usize) -> Vec<u32> {
    let mut sums = vec![0.0];
    sums.extend((1..=vocab).scan(0.0, |sum, rank| {
        *sum += 1.0 / rank as f64;
        Some(*sum)
    }));
    let mut stream = Stream::new(11, "text", 0);
    let mut draw = || (stream.bits() >> 11) as f64 / (1u64 << 53) as f64 * sums[vocab];
    (0..len).map(|_| draw()).map(|at| sums.partition_point(|sum| *sum <= at) as u32 - 1).collect()
}

/// Experts by layer, in the order of positions.
#[derive(Default)]
struct Routes(BTreeMap<usize, Vec<BTreeSet<u32>>>);

impl Trace for Routes {
    fn routed(&mut self, layer: usize, position: usize, experts: &[u32], _: &[f32]) {
        let rows = self.0.entry(layer).or_default();
        assert_eq!(rows.len(), position);
        rows.push(experts.iter().copied().collect());
    }
}

/// Mean share of a token's experts that the token before had, behind the first `skip` tokens.
fn overlap(rows: &[BTreeSet<u32>], skip: usize) -> f64 {
    let pairs = rows[skip..].windows(2);
    let shared: usize = pairs.map(|pair| pair[0].intersection(&pair[1]).count()).sum();
    shared as f64 / ((rows.len() - skip - 1) * rows[0].len()) as f64
}

/// Mean number of distinct experts of `len` tokens in a row.
fn union(rows: &[BTreeSet<u32>], skip: usize, len: usize) -> f64 {
    let unions = rows[skip..].windows(len).map(|rows| rows.iter().flatten().collect::<BTreeSet<_>>().len());
    unions.sum::<usize>() as f64 / (rows.len() - skip - len + 1) as f64
}

/// Share of all choices that fall on the 16 experts chosen most.
fn top_16(rows: &[BTreeSet<u32>]) -> f64 {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    rows.iter().flatten().for_each(|expert| *counts.entry(*expert).or_default() += 1);
    let mut counts: Vec<usize> = counts.into_values().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts[..16].iter().sum::<usize>() as f64 / counts.iter().sum::<usize>() as f64
}

fn run(dir: &std::path::Path, tokens: &[u32]) -> (Engine, Session, Routes) {
    let options = EngineOptions { context: Some(tokens.len() + 1), threads: Some(2), ..Default::default() };
    let mut engine = Engine::open(dir, options, &mut |_, _| {}).unwrap();
    let mut session = Session::new(&engine);
    let mut routes = Routes::default();
    let request = Request { prompt: tokens, max_tokens: 0, sampling: Sampling::greedy(), stops: &[] };
    let cancel = CancelToken::new();
    session
        .generate(&mut engine, &request, &cancel, Some(&mut routes), &mut |_| ControlFlow::Continue(()))
        .unwrap();
    (engine, session, routes)
}

fn made(spec: &SynthSpec) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let text = TextFiles { files: vec![], tokens: spec.dims.vocab, stop_ids: vec![0] };
    synth::write(dir.path(), spec, &text, 2, &CancelToken::new(), &mut |_, _| {}).unwrap();
    dir
}

/// The last line of the table in docs/synth.md: real text shares .26 to .36 of its experts with the token before, 4 tokens use 22
/// to 24 experts and 32 tokens about 96.
#[test]
fn routing_has_the_reuse_of_real_text() {
    let spec = scaled_down(3, 4);
    let dir = made(&spec);
    let (_, _, routes) = run(dir.path(), &text_like(512, 8000));
    assert_eq!(routes.0.len(), 4);
    let skip = 64;
    for (layer, rows) in &routes.0 {
        let (shared, four, many) = (overlap(rows, skip), union(rows, skip, 4), union(rows, skip, 32));
        println!("layer {layer}: {shared:.3} {four:.1} {many:.1} {:.2}", top_16(rows));
        assert!((0.24..=0.38).contains(&shared), "layer {layer}: overlap {shared}");
        assert!((21.0..=25.5).contains(&four), "layer {layer}: U(4) {four}");
        assert!((80.0..=115.0).contains(&many), "layer {layer}: U(32) {many}");
    }
}

/// The stream is as large as planned after many layers, at every position, and its parts are finite.
#[test]
fn activations_stay_in_range_over_many_layers() {
    for (dense, moe) in [(2, 6), (1, 31)] {
        let mut spec = scaled_down(dense, moe);
        spec.dims = Dims { experts: 16, expert_width: 64, hidden: 256, ..spec.dims };
        let dir = made(&spec);
        let tokens = text_like(200, 8000);
        let (engine, session, _) = run(dir.path(), &tokens);
        let planned = tune::planned_growth(engine.spec()).sqrt();
        assert!(planned < 4.1, "{planned}");
        for position in [0, 1, 20, 199] {
            let hidden = engine.hidden(position);
            let square = hidden.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>();
            let size = (square / hidden.len() as f64).sqrt();
            println!("{} layers, position {position}: {size:.2}, planned {planned:.2}", dense + moe);
            // The first tokens have little to average over, so that the average is larger.
            let most = if position < 20 { 3.0 } else { 2.0 };
            assert!((0.5..=most).contains(&(size / planned)), "position {position}: {size} of {planned}");
        }
        assert!(session.last_logits().iter().all(|logit| logit.is_finite()));
    }
}
