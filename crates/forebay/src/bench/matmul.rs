//! Weight products: from memory, rotating over copies, and from the cache.

use std::cell::RefCell;

use forebay_core::{ByteSize, Format};
use forebay_kernels::{Activations, Input, Kernels, Team, Weights, free_order, matmul};
use forebay_model::Arith;

use super::cases::{Case, Layout, Selection, Shape};
use super::measure::{Limits, Meter, Pace, measure, median};
use super::weights::{Pool, random_floats};
use crate::doctor::Machine;

/// Columns of the matrices that stay in the cache.
const CACHED_COLS: usize = 2048;
/// The size of a second-level cache where the machine does not say: most have more.
const USUAL_CACHE: u64 = 512 << 10;
/// Panels that a thread decodes in one go.
const DECODED_TOGETHER: usize = 8;
/// Copies of a matrix take at least this much, so that no cache holds them.
const LEAST_POOL: u64 = 256 << 20;

/// The results for one shape.
pub struct Group {
    /// The shape.
    pub shape: Shape,
    /// The limits, one per number of threads.
    pub limits: Vec<Limits>,
    /// The products.
    pub lines: Vec<Line>,
    /// What could not be measured, and why.
    pub notes: Vec<String>,
}

/// The results of one product.
pub struct Line {
    /// What was measured.
    pub case: Case,
    /// Weights from memory.
    pub memory: Timed,
    /// Copies of the matrix in memory.
    pub copies: usize,
    /// Weights that stay in the cache.
    pub cache: Timed,
    /// The same two with sums in free order, where the order is compared.
    pub free_order: Option<FreeOrder>,
    /// Bytes in memory of a coded matrix over those that it stands for.
    pub ratio: Option<f64>,
    /// Coded weights from memory, decoded to memory and not multiplied, where that is measured.
    pub decoding: Option<Timed>,
}

/// A product with sums in free order.
pub struct FreeOrder {
    /// Weights from memory.
    pub memory: Timed,
    /// Weights that stay in the cache.
    pub cache: Timed,
}

/// The time of one product.
pub struct Timed {
    /// The shape of the weights.
    pub shape: Shape,
    /// Bytes of the weights, scales included.
    pub bytes: u64,
    /// Rows of activations.
    pub batch: usize,
    /// Seconds per product, one entry per round.
    pub seconds: Vec<f64>,
}

impl Timed {
    fn new(pool: &Pool, batch: usize, seconds: Vec<f64>) -> Self {
        let bytes = Pool::copy_bytes(pool.format(), pool.layout(), pool.shape()).unwrap_or(0);
        Self { shape: pool.shape(), bytes, batch, seconds }
    }

    /// Multiply-adds of one product.
    pub fn multiply_adds(&self) -> f64 {
        self.shape.multiply_adds() as f64 * self.batch as f64
    }

    /// Multiply-adds per second.
    pub fn speed(&self) -> f64 {
        self.multiply_adds() / median(&self.seconds)
    }

    /// Bytes of weights per second.
    pub fn bandwidth(&self) -> f64 {
        self.bytes as f64 / median(&self.seconds)
    }

    /// The most multiply-adds per second that these limits allow: those of the processor, or those of the
    /// weights that memory delivers, whichever is less.
    pub fn roofline(&self, read: f64, peak: f64) -> f64 {
        peak.min(read * self.multiply_adds() / self.bytes as f64)
    }
}

/// How many per cent longer the canonical order takes than the free one: the median over the rounds, in each of
/// which one was measured right after the other.
pub fn cost_of_order(canonical: &Timed, free: &Timed) -> f64 {
    let costs = canonical.seconds.iter().zip(&free.seconds).map(|(canonical, free)| canonical / free);
    100.0 * (median(&costs.collect::<Vec<f64>>()) - 1.0)
}

/// The multiply-add limit of an arithmetic.
pub fn peak(limits: &Limits, arith: Arith) -> f64 {
    median(match arith {
        Arith::Exact => &limits.float,
        Arith::Int8 => &limits.integer,
    })
}

/// What everything that is measured shares.
pub struct Bench<'a> {
    /// The kernels.
    pub kernels: Kernels,
    /// A team per number of threads.
    pub teams: &'a [Team],
    /// What is measured.
    pub selection: &'a Selection,
    /// Where.
    pub machine: &'a Machine,
    /// Memory for weights.
    pub memory: u64,
    /// Seconds of one sample.
    pub sample: f64,
}

impl Bench<'_> {
    /// The team that prepares data.
    pub fn largest_team(&self) -> &Team {
        self.teams.last().expect("a selection has at least one number of threads")
    }

    /// Bytes that no cache holds.
    pub fn uncached(&self) -> u64 {
        LEAST_POOL.max(self.machine.last_cache().unwrap_or(0).saturating_mul(4))
    }

    /// The matrix with 2048 columns of which each thread's part stays in its cache.
    fn cached_shape(&self, case: &Case) -> Shape {
        let cache = self.machine.second_cache().unwrap_or(USUAL_CACHE);
        let fits = |rows: &usize| {
            let shape = Shape { rows: *rows, cols: CACHED_COLS };
            // The rest is for activations and outputs.
            Pool::copy_bytes(case.format, case.layout, shape).is_some_and(|bytes| bytes <= cache / 8 * 5)
        };
        let rows = (4..16).map(|bit| 1usize << bit).take_while(fits).last().unwrap_or(16);
        Shape { rows: rows * self.selection.threads[case.team], cols: CACHED_COLS }
    }
}

/// Activations of one width and batch.
struct Rows {
    batch: usize,
    values: Vec<f32>,
    quantised: Activations,
}

impl Rows {
    fn random(bench: &Bench<'_>, cols: usize, batch: usize) -> Self {
        let values = random_floats(bench.largest_team(), cols * batch);
        let mut quantised = Activations::new(cols);
        quantised.quantise(bench.kernels, bench.largest_team(), &values);
        Self { batch, values, quantised }
    }

    fn input(&self, arith: Arith) -> Input<'_> {
        match arith {
            Arith::Exact => Input::exact(&self.values),
            Arith::Int8 => Input::int8(&self.values, &self.quantised),
        }
    }
}

/// One product with everything that it needs.
struct Prepared<'a> {
    case: Case,
    memory: &'a Pool,
    rows: &'a Rows,
    cached: &'a Pool,
    cached_rows: &'a Rows,
}

/// Measures the products of one shape.
pub fn run(bench: &Bench<'_>, shape: Shape, pace: &mut Pace<'_>, weight: f64) -> Group {
    let cases = bench.selection.cases();
    let (pools, notes) = memory_pools(bench, shape, &cases);
    let cached = cached_pools(bench, &cases);
    let rows_of = |cols| -> Vec<Rows> {
        bench.selection.batches.iter().map(|batch| Rows::random(bench, cols, *batch)).collect()
    };
    let (rows, cached_rows) = (rows_of(shape.cols), rows_of(CACHED_COLS));
    let prepare = |case: Case| {
        let is_kind = |pool: &&Pool| (pool.format(), pool.layout()) == (case.format, case.layout);
        let cached_shape = bench.cached_shape(&case);
        Some(Prepared {
            case,
            memory: pools.iter().find(is_kind)?,
            rows: rows.iter().find(|rows| rows.batch == case.batch)?,
            cached: cached.iter().filter(is_kind).find(|pool| pool.shape() == cached_shape)?,
            cached_rows: cached_rows.iter().find(|rows| rows.batch == case.batch)?,
        })
    };
    let prepared: Vec<Prepared<'_>> = cases.into_iter().filter_map(prepare).collect();

    let outputs = |one: &Prepared<'_>| one.case.batch * one.cached.shape().rows.max(shape.rows);
    let out = RefCell::new(vec![0f32; prepared.iter().map(outputs).max().unwrap_or(0)]);
    let read = pools.iter().map(Pool::bytes).max_by_key(|bytes| bytes.len()).unwrap_or_default();
    let limits = Limits::meters(bench.kernels, bench.teams, read);
    let decoded = decoded_room(&prepared);
    let mut meters = Vec::new();
    for one in &prepared {
        let orders: &[Order] =
            if one.case.compares_order() { &[Order::Canonical, Order::Free] } else { &[Order::Canonical] };
        for (pool, rows) in [(one.memory, one.rows), (one.cached, one.cached_rows)] {
            meters.extend(orders.iter().map(|order| meter(bench, one.case, *order, pool, rows, &out)));
        }
        if one.case.decodes() {
            meters.push(decoding_meter(bench, one.case, one.memory, &decoded));
        }
    }
    let mut seconds = measure(limits, meters, bench.selection.rounds, bench.sample, pace, weight).into_iter();
    let limits = Limits::collect(bench.kernels, bench.teams, read, &mut seconds);
    let line = |one: &Prepared<'_>| {
        let mut timed = |pool: &Pool| Some(Timed::new(pool, one.case.batch, seconds.next()?));
        let mut both = |pool: &Pool| {
            let canonical = timed(pool)?;
            Some((canonical, if one.case.compares_order() { Some(timed(pool)?) } else { None }))
        };
        let (memory, free_memory) = both(one.memory)?;
        let (cache, free_cache) = both(one.cached)?;
        let free_order = free_memory.zip(free_cache).map(|(memory, cache)| FreeOrder { memory, cache });
        let decoding = if one.case.decodes() { timed(one.memory) } else { None };
        let stored = one.memory.bytes().len() as f64 / one.memory.copies() as f64;
        let ratio = (one.case.layout == Layout::Coded).then_some(stored / memory.bytes as f64);
        Some(Line { case: one.case, memory, copies: one.memory.copies(), cache, free_order, ratio, decoding })
    };
    let lines = prepared.iter().map_while(line).collect();
    Group { shape, limits, lines, notes }
}

/// The order of sums.
#[derive(Clone, Copy)]
enum Order {
    /// That of docs/numerics.md.
    Canonical,
    /// Another one, for comparison.
    Free,
}

fn meter<'a>(
    bench: &Bench<'a>,
    case: Case,
    order: Order,
    pool: &'a Pool,
    rows: &'a Rows,
    out: &'a RefCell<Vec<f32>>,
) -> Meter<'a> {
    let (kernels, team, input) = (bench.kernels, &bench.teams[case.team], rows.input(case.arith));
    Meter::new(move || {
        let y = &mut out.borrow_mut()[..case.batch * pool.shape().rows];
        match order {
            Order::Canonical => matmul(kernels, team, pool.next(), input, y),
            Order::Free => free_order::matmul(kernels, team, pool.next(), input, y),
        }
    })
}

/// Room for the largest matrix that is decoded.
fn decoded_room(prepared: &[Prepared<'_>]) -> RefCell<Vec<u8>> {
    let shapes = prepared.iter().filter(|one| one.case.decodes()).map(|one| (one.case, one.memory.shape()));
    let bytes = shapes.filter_map(|(case, shape)| Pool::copy_bytes(case.format, case.layout, shape));
    RefCell::new(vec![0; bytes.max().unwrap_or(0) as usize])
}

/// Decodes without multiplying, as for slots that hold decoded weights.
fn decoding_meter<'a>(
    bench: &Bench<'a>,
    case: Case,
    pool: &'a Pool,
    room: &'a RefCell<Vec<u8>>,
) -> Meter<'a> {
    let (kernels, team) = (bench.kernels, &bench.teams[case.team]);
    Meter::new(move || {
        let Weights::Coded(view) = pool.next() else { return };
        let (shape, mut room) = (view.shape(), room.borrow_mut());
        let step = DECODED_TOGETHER * shape.panel_bytes();
        team.for_each_chunk(&mut room[..shape.bytes()], step, &|chunk, out| {
            let first = DECODED_TOGETHER * chunk;
            kernels.decode_panels(&view, first..first + out.len() / shape.panel_bytes(), out);
        });
    })
}

/// The weights in memory, one pool for each format and layout, and what there is no room for.
fn memory_pools(bench: &Bench<'_>, shape: Shape, cases: &[Case]) -> (Vec<Pool>, Vec<String>) {
    let mut kinds: Vec<(Format, Layout)> = Vec::new();
    for case in cases {
        if !kinds.contains(&(case.format, case.layout)) {
            kinds.push((case.format, case.layout));
        }
    }
    let share = bench.memory / kinds.len().max(1) as u64;
    let (mut pools, mut notes) = (Vec::new(), Vec::new());
    for (format, layout) in kinds {
        let fits = Pool::copy_bytes(format, layout, shape).is_some_and(|bytes| bytes <= share);
        let make = || Pool::random(bench.largest_team(), format, layout, shape, bench.uncached().min(share));
        match fits.then(make).flatten() {
            Some(pool) => pools.push(pool),
            None => notes.push(format!(
                "{format} ({}) of {shape} is left out, there are {} for it; a larger --memory or fewer formats \
                 in --format give it more",
                layout.name(),
                ByteSize(share),
            )),
        }
    }
    (pools, notes)
}

/// The weights that stay in the cache, one pool for each format, layout and number of threads.
fn cached_pools(bench: &Bench<'_>, cases: &[Case]) -> Vec<Pool> {
    let mut pools: Vec<Pool> = Vec::new();
    for case in cases {
        let shape = bench.cached_shape(case);
        let is_it =
            |pool: &Pool| (pool.format(), pool.layout(), pool.shape()) == (case.format, case.layout, shape);
        if !pools.iter().any(is_it) {
            pools.extend(Pool::random(bench.largest_team(), case.format, case.layout, shape, 1));
        }
    }
    pools
}
