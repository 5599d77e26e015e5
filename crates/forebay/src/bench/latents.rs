//! Attention over cached latents, and its indexer, with the sizes of GLM-5.2 and a bf16 cache.

use std::cell::RefCell;
use std::hint::black_box;

use forebay_kernels::Buffer;
use forebay_kernels::{
    AttendScratch, Attended, Attention, IndexQueries, Kernels, KeyCache, KeyRows, ScoreScratch,
    SelectScratch, Team, attend, index_scores, select_positions,
};

use super::matmul::Bench;
use super::measure::{Limits, Meter, Pace, measure, median};
use super::weights::{Kind, random_floats, randomise};

const HEADS: usize = 64;
const LATENT: usize = 512;
const ROPE: usize = 64;
const INDEX_HEADS: usize = 32;
const INDEX_DIM: usize = 128;
/// Positions in the cache.
const POSITIONS: usize = 32 << 10;
/// Positions that the indexer selects.
const KEEP: usize = 2048;
/// Scores per part, as the model shares them out.
const SCORES: usize = 1024;

/// The results.
pub struct Group {
    /// The limits, one per number of threads.
    pub limits: Vec<Limits>,
    /// What was measured.
    pub lines: Vec<Line>,
}

/// One thing that was measured: one row of queries.
pub struct Line {
    /// What it is.
    pub name: &'static str,
    /// Index in the selection's threads.
    pub team: usize,
    /// Multiply-adds, where it has any.
    pub multiply_adds: Option<f64>,
    /// Bytes of cached keys, or of scores, that it reads.
    pub bytes: f64,
    /// Seconds for doing it once, one entry per round.
    pub seconds: Vec<f64>,
}

impl Line {
    /// Multiply-adds per second.
    pub fn speed(&self) -> Option<f64> {
        Some(self.multiply_adds? / median(&self.seconds))
    }

    /// Bytes of cached keys, or of scores, per second.
    pub fn bandwidth(&self) -> f64 {
        self.bytes / median(&self.seconds)
    }
}

/// What is measured. The names say how many positions are read.
#[derive(Clone, Copy)]
enum What {
    AttendRange,
    AttendList,
    Scores,
    Select,
}

/// What is measured for each number of threads.
pub const METERS: usize = ALL.len();

const ALL: [What; 4] = [What::AttendRange, What::AttendList, What::Scores, What::Select];

impl What {
    fn name(self) -> &'static str {
        match self {
            What::AttendRange => "attention, 2048 positions",
            What::AttendList => "attention, 2048 chosen of 32768",
            What::Scores => "indexer, 32768 positions",
            What::Select => "choosing 2048 of 32768",
        }
    }

    fn multiply_adds(self) -> Option<f64> {
        match self {
            // Scores from latents and rope keys, then the sum of latents.
            What::AttendRange | What::AttendList => Some((KEEP * HEADS * (2 * LATENT + ROPE)) as f64),
            What::Scores => Some((POSITIONS * INDEX_HEADS * INDEX_DIM) as f64),
            What::Select => None,
        }
    }

    fn bytes(self) -> f64 {
        let bytes = match self {
            What::AttendRange | What::AttendList => 2 * KEEP * (LATENT + ROPE),
            What::Scores => 2 * POSITIONS * INDEX_DIM,
            What::Select => 4 * POSITIONS,
        };
        bytes as f64
    }
}

/// Random queries and caches.
struct Data {
    latents: Buffer,
    rope_keys: Buffer,
    /// The indexer's keys of several layers, so that no cache holds them.
    index_keys: Buffer,
    queries: Vec<f32>,
    rope_queries: Vec<f32>,
    index_queries: Vec<f32>,
    index_weights: Vec<f32>,
    chosen: Vec<u32>,
    scores: Vec<f32>,
}

impl Data {
    fn random(bench: &Bench<'_>) -> Option<Self> {
        let team = bench.largest_team();
        let keys = |numbers: usize| {
            let mut keys = Buffer::zeroed(2 * numbers)?;
            randomise(team, &mut keys, Kind::Bf16);
            Some(keys)
        };
        let layer = POSITIONS * INDEX_DIM;
        let layers = usize::try_from(bench.uncached().min(bench.memory)).ok()?.div_ceil(2 * layer);
        // One of every sixteen positions, at a changing place among them.
        let chosen = (0..KEEP as u32).map(|i| 16 * i + i * 7 % 16);
        Some(Self {
            latents: keys(POSITIONS * LATENT)?,
            rope_keys: keys(POSITIONS * ROPE)?,
            index_keys: keys(layer.checked_mul(layers.max(1))?)?,
            queries: random_floats(team, HEADS * LATENT),
            rope_queries: random_floats(team, HEADS * ROPE),
            index_queries: random_floats(team, INDEX_HEADS * INDEX_DIM),
            index_weights: random_floats(team, INDEX_HEADS),
            chosen: chosen.collect(),
            scores: random_floats(team, POSITIONS),
        })
    }

    fn cache(&self) -> KeyCache<'_> {
        KeyCache { latents: bf16(&self.latents), rope_keys: bf16(&self.rope_keys) }
    }
}

fn bf16(bytes: &[u8]) -> KeyRows<'_> {
    KeyRows::Bf16(bytemuck::cast_slice(bytes))
}

/// Measures attention and its indexer; `None` if there is not enough memory for the caches.
pub fn run(bench: &Bench<'_>, pace: &mut Pace<'_>, weight: f64) -> Option<Group> {
    let data = Data::random(bench)?;
    let mixed = RefCell::new(vec![0f32; HEADS * LATENT]);
    let limits = Limits::meters(bench.kernels, bench.teams, &data.index_keys);
    let mut meters = Vec::new();
    for team in bench.teams {
        for what in ALL {
            meters.push(meter(bench.kernels, team, what, &data, &mixed));
        }
    }
    let mut seconds = measure(limits, meters, bench.selection.rounds, bench.sample, pace, weight).into_iter();
    let limits = Limits::collect(bench.kernels, bench.teams, &data.index_keys, &mut seconds);
    let whats = (0..bench.teams.len()).flat_map(|team| ALL.map(|what| (team, what)));
    let lines = whats.zip(seconds).map(|((team, what), seconds)| Line {
        name: what.name(),
        team,
        multiply_adds: what.multiply_adds(),
        bytes: what.bytes(),
        seconds,
    });
    Some(Group { limits, lines: lines.collect() })
}

fn meter<'a>(
    kernels: Kernels,
    team: &'a Team,
    what: What,
    data: &'a Data,
    mixed: &'a RefCell<Vec<f32>>,
) -> Meter<'a> {
    match what {
        What::AttendRange => attend_meter(kernels, team, data, Attended::Range(0..KEEP), mixed),
        What::AttendList => attend_meter(kernels, team, data, Attended::List(&data.chosen), mixed),
        What::Scores => {
            let mut layers = data.index_keys.chunks_exact(2 * POSITIONS * INDEX_DIM).cycle();
            let mut scores = vec![0f32; POSITIONS];
            let mut scratch = vec![ScoreScratch::default(); team.threads()];
            let (queries, weights) = (&data.index_queries, &data.index_weights);
            let query = IndexQueries { queries, weights, heads: INDEX_HEADS, dim: INDEX_DIM };
            Meter::new(move || {
                let keys: &[u16] = bytemuck::cast_slice(layers.next().unwrap_or_default());
                team.for_each_chunk_with(&mut scratch, &mut scores, SCORES, &|part, scores, scratch| {
                    let keys = &keys[part * SCORES * INDEX_DIM..][..scores.len() * INDEX_DIM];
                    index_scores(kernels, &query, KeyRows::Bf16(keys), scratch, scores);
                });
            })
        }
        What::Select => {
            let (mut scratch, mut chosen) = (SelectScratch::default(), vec![0; KEEP]);
            Meter::new(move || {
                black_box(select_positions(kernels, &data.scores, KEEP, &mut scratch, &mut chosen));
            })
        }
    }
}

/// One row of queries, its heads shared out over the team.
fn attend_meter<'a>(
    kernels: Kernels,
    team: &'a Team,
    data: &'a Data,
    attended: Attended<'a>,
    mixed: &'a RefCell<Vec<f32>>,
) -> Meter<'a> {
    // The model also gives every thread some, and each part the same number.
    let heads = 1 << HEADS.div_ceil(team.threads()).ilog2();
    let mut scratch = vec![AttendScratch::default(); team.threads()];
    Meter::new(move || {
        let mixed = &mut mixed.borrow_mut()[..];
        team.for_each_chunk_with(&mut scratch, mixed, heads * LATENT, &|part, mixed, scratch| {
            let query = Attention {
                latent_queries: &data.queries[part * heads * LATENT..][..heads * LATENT],
                rope_queries: &data.rope_queries[part * heads * ROPE..][..heads * ROPE],
                heads,
                scale: 1.0 / 16.0,
            };
            attend(kernels, &query, data.cache(), attended.clone(), scratch, mixed);
        });
    })
}
