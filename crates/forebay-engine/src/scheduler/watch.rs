//! What somebody sees who looks at an engine at work: the jobs, where the time of the last passes went, and which experts
//! are in memory and used.
//!
//! Most of it is known anyway. What is not, the uses of every expert, is noted only while somebody looks.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use forebay_model::kv::BLOCK;
use forebay_model::{Phase, Trace};
use forebay_tiers::ExpertStore;

use super::job::{Forecast, JobId};
use super::queue::SchedulerState;
use super::reuse::{Recent, Reuse};
use crate::draft::Drafting;
use crate::engine::Engine;
use crate::plan::{Plan, Rates};
use crate::session::{Outcome, PassStats};

/// How long a look lasts: who watches looks again before that.
const LOOK: Duration = Duration::from_secs(3);
/// Ended jobs that are kept to be looked at.
pub(super) const RECENT: usize = 20;

/// What is fixed as long as the engine runs.
#[derive(Clone, Debug)]
pub struct About {
    /// How memory is divided, and what was expected of that.
    pub plan: Plan,
    /// What was measured of this machine before the start.
    pub rates: Rates,
    /// The layers with routed experts, in order.
    pub layers: Vec<SparseLayer>,
    /// Experts that a token takes in each of them.
    pub top_k: usize,
    /// Layers of the decoder, dense ones included.
    pub decoder_layers: usize,
    /// Compute threads.
    pub threads: usize,
    /// The instruction set in use.
    pub isa: String,
    /// How experts are read: who, past the page cache or not, and how many at a time.
    pub way: (String, String, usize),
    /// Whether tokens are drafted.
    pub drafting: Drafting,
    /// Tokens of a KV block.
    pub block_tokens: usize,
}

/// A layer with routed experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SparseLayer {
    /// Its number in the decoder; the MTP layer comes behind the last one.
    pub layer: u32,
    /// Its experts.
    pub experts: usize,
    /// Of these, as many as memory was planned for.
    pub slots: usize,
}

impl About {
    pub(super) fn of(engine: &Engine) -> Self {
        let (spec, plan, way) = (engine.spec(), engine.plan(), engine.way());
        let sizes = plan.demand.layers.iter().zip(&plan.slots.quotas);
        let layers = engine.store.layers().zip(sizes);
        Self {
            layers: layers
                .map(|(layer, (demand, &slots))| SparseLayer { layer, experts: demand.experts, slots })
                .collect(),
            plan: plan.clone(),
            rates: engine.options().rates(),
            top_k: spec.moe.top_k,
            decoder_layers: spec.layers.len(),
            threads: engine.threads(),
            isa: engine.isa().to_string(),
            way: (way.backend.to_string(), way.access.to_string(), way.depth),
            drafting: engine.options().drafting,
            block_tokens: BLOCK,
        }
    }
}

/// An expert, to those who watch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cell {
    /// Whether it is in memory.
    pub resident: bool,
    /// Whether the last pass that was watched used it.
    pub used: bool,
    /// Rows that used it while somebody watched.
    pub uses: u32,
}

/// A job that runs, as of the start of the pass that is in progress.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RunJob {
    /// Tokens of its prompt that were known.
    pub reused: usize,
    /// What was expected when its turn came.
    pub forecast: Forecast,
    /// Tokens of its prompt; after it gave its KV blocks up, of all that it runs again.
    pub prompt: usize,
    /// Of these, known or computed.
    pub done: usize,
    /// Of these, in the pass.
    pub rows: usize,
    /// Tokens of its answer.
    pub new_tokens: usize,
    /// What its prompt took so far.
    pub prefill: Duration,
    /// From its turn to its first token.
    pub first_token: Option<Duration>,
}

/// A job that waits or runs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct JobState {
    /// Its name.
    pub id: JobId,
    /// Whether nobody waits for it.
    pub batch: bool,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Most tokens of its answer.
    pub max_tokens: Option<usize>,
    /// Until its turn came, or so far.
    pub waited: Duration,
    /// What all of it takes, by what was measured of others before its turn, or now if it waits.
    pub expected: Option<Duration>,
    /// For how long it runs, and how it stands; `None` if it waits.
    pub running: Option<(Duration, RunJob)>,
}

/// A job that ran.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndedJob {
    /// Its name.
    pub id: JobId,
    /// Whether nobody waited for it.
    pub batch: bool,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Of these, known.
    pub reused: usize,
    /// Until its turn came.
    pub waited: Duration,
    /// From then to its end.
    pub took: Duration,
    /// What that was expected to be.
    pub expected: Option<Duration>,
    /// What else was expected when its turn came.
    pub forecast: Forecast,
    /// How it ended and what it cost; `None` if it failed.
    pub outcome: Option<Outcome>,
}

/// A pass that is over.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenPass {
    /// Its number.
    pub number: u64,
    /// What it cost.
    pub stats: PassStats,
    /// Rows of prompts in it.
    pub prompt: usize,
    /// Sequences that had rows in it.
    pub sequences: usize,
    /// Tokens of answers that came of it.
    pub tokens: usize,
}

impl SeenPass {
    /// Its time by part, and the names of these.
    pub fn phases(&self) -> impl Iterator<Item = (&'static str, Duration)> + use<> {
        Phase::ALL.map(Phase::name).into_iter().zip(self.stats.phases)
    }
}

/// Everything there is to see.
#[derive(Clone, Debug)]
pub struct View {
    /// Counts and sizes.
    pub state: SchedulerState,
    /// The jobs that run, then those that wait.
    pub jobs: Vec<JobState>,
    /// The last jobs that ended, the last one first.
    pub recent: Vec<EndedJob>,
    /// The last pass that computed a prompt.
    pub prefill: Option<SeenPass>,
    /// The last pass that did nothing but generate, and made a token.
    pub decode: Option<SeenPass>,
    /// Layers that the pass in progress is through with, and all; the last pass, if none is in progress.
    pub layers_done: (usize, usize),
    /// The experts of [`About::layers`], one layer after the other; `None` until the engine has seen that somebody looks.
    pub cells: Option<Vec<Cell>>,
    /// Passes whose uses the cells hold.
    pub watched: u64,
    /// How soon tokens of answers wanted the same experts again, in these passes.
    pub reuse: Reuse,
}

/// What is noted for those who watch.
pub(super) struct Watched {
    pub about: About,
    began: Instant,
    /// Milliseconds from the beginning to the end of the last look.
    until: AtomicU64,
    layers_done: AtomicUsize,
    layers: AtomicUsize,
    map: Mutex<Map>,
}

#[derive(Default)]
struct Map {
    cells: Vec<Cell>,
    /// Of each layer.
    recent: Vec<Recent>,
    reuse: Reuse,
    passes: u64,
    seen: bool,
}

impl Watched {
    pub fn new(about: About) -> Self {
        let cells = vec![Cell::default(); about.layers.iter().map(|layer| layer.experts).sum()];
        let recent = vec![Recent::default(); about.layers.len()];
        Self {
            about,
            began: Instant::now(),
            until: AtomicU64::new(0),
            layers_done: AtomicUsize::new(0),
            layers: AtomicUsize::new(0),
            map: Mutex::new(Map { cells, recent, ..Map::default() }),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Somebody looks.
    pub fn looked(&self) {
        let until = self.began.elapsed() + LOOK;
        self.until.fetch_max(until.as_millis() as u64, Ordering::Relaxed);
    }

    /// Whether somebody looked a moment ago.
    pub fn is_watched(&self) -> bool {
        let until = self.until.load(Ordering::Relaxed);
        until > 0 && (self.began.elapsed().as_millis() as u64) < until
    }

    /// So many layers of the pass in progress are done.
    pub fn layers_done(&self, done: usize, layers: usize) {
        self.layers_done.store(done, Ordering::Relaxed);
        self.layers.store(layers, Ordering::Relaxed);
    }

    /// Notes which experts are in memory.
    pub fn look_at(&self, store: &ExpertStore) {
        let mut map = self.lock();
        map.seen = true;
        let mut rest = &mut map.cells[..];
        for layer in &self.about.layers {
            let (cells, behind) = rest.split_at_mut(layer.experts);
            mark(cells, &store.resident_in(layer.layer));
            rest = behind;
        }
    }

    /// Begins to note what a pass uses, which may do nothing but generate.
    pub fn begin(&self, generates: bool) -> Uses<'_> {
        let mut map = self.lock();
        map.passes += 1;
        map.seen = true;
        map.cells.iter_mut().for_each(|cell| cell.used = false);
        Uses { watch: self, generates }
    }

    /// Layers done of the pass in progress, and all of them.
    pub fn progress(&self) -> (usize, usize) {
        (self.layers_done.load(Ordering::Relaxed), self.layers.load(Ordering::Relaxed))
    }

    /// The experts, the passes whose uses they hold, and how soon they were used again.
    pub fn experts(&self) -> (Option<Vec<Cell>>, u64, Reuse) {
        let map = self.lock();
        (map.seen.then(|| map.cells.clone()), map.passes, map.reuse.clone())
    }

    /// Which of the layers that is, and its cells, if it has any.
    fn place(&self, wanted: usize) -> Option<(usize, Range<usize>)> {
        let mut start = 0;
        for (at, layer) in self.about.layers.iter().enumerate() {
            if layer.layer as usize == wanted {
                return Some((at, start..start + layer.experts));
            }
            start += layer.experts;
        }
        None
    }
}

fn mark(cells: &mut [Cell], resident: &[u32]) {
    cells.iter_mut().for_each(|cell| cell.resident = false);
    for &expert in resident {
        if let Some(cell) = cells.get_mut(expert as usize) {
            cell.resident = true;
        }
    }
}

/// Notes which experts a pass uses, layer by layer, as it goes.
pub(super) struct Uses<'w> {
    watch: &'w Watched,
    /// Whether the pass does nothing but generate.
    generates: bool,
}

impl Trace for Uses<'_> {
    fn wants_selected(&self) -> bool {
        false
    }

    fn resident(&mut self, layer: usize, experts: &[u32]) {
        if let Some((_, cells)) = self.watch.place(layer) {
            mark(&mut self.watch.lock().cells[cells], experts);
        }
    }

    fn routed(&mut self, layer: usize, _position: usize, experts: &[u32], _weights: &[f32]) {
        let Some((at, cells)) = self.watch.place(layer) else { return };
        let mut map = self.watch.lock();
        let Map { cells: all, recent, reuse, .. } = &mut *map;
        for &expert in experts {
            let Some(cell) = all[cells.clone()].get_mut(expert as usize) else { continue };
            // The rows of a pass share what it reads.
            if !cell.used {
                recent[at].touch(expert, self.generates.then_some(&mut *reuse));
            }
            cell.used = true;
            cell.uses = cell.uses.saturating_add(1);
        }
    }
}
