//! Where the time of forward passes goes.
//!
//! One clock runs through a pass: every stretch of time belongs to exactly one [`Phase`], so
//! the parts add up to the whole.

use std::time::{Duration, Instant};

use crate::spec::ModelSpec;
use crate::weights::{Ffn, Matrix, Mlp, Model};

/// A part of a forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Embedding, norms, residual sums, checks.
    Norms,
    /// `q_a`, `q_b`, `kv_a` with their norms; rotation; writing the cache.
    Projections,
    /// The DSA indexer: scores and selection.
    Indexer,
    /// Queries through the key half of `kv_b`.
    Absorb,
    /// Scores, softmax and mixtures over the cache.
    Attend,
    /// Mixtures through the value half of `kv_b`.
    Expand,
    /// The output projection of attention.
    AttentionOut,
    /// Dense MLPs.
    DenseMlp,
    /// Router logits and choice.
    Router,
    /// Waiting for routed experts that are not in memory.
    ExpertWait,
    /// Products of routed experts and their sum.
    Experts,
    /// The shared expert.
    SharedExpert,
    /// Logits.
    Head,
    /// Drafting with the MTP layer, waiting for its experts apart.
    Draft,
}

impl Phase {
    /// All phases, in the order of a layer.
    pub const ALL: [Phase; 14] = [
        Phase::Norms,
        Phase::Projections,
        Phase::Indexer,
        Phase::Absorb,
        Phase::Attend,
        Phase::Expand,
        Phase::AttentionOut,
        Phase::DenseMlp,
        Phase::Router,
        Phase::ExpertWait,
        Phase::Experts,
        Phase::SharedExpert,
        Phase::Head,
        Phase::Draft,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Norms => "norms and sums",
            Phase::Projections => "attention projections",
            Phase::Indexer => "indexer",
            Phase::Absorb => "absorb (kv_b keys)",
            Phase::Attend => "attend",
            Phase::Expand => "expand (kv_b values)",
            Phase::AttentionOut => "attention output",
            Phase::DenseMlp => "dense MLP",
            Phase::Router => "router",
            Phase::ExpertWait => "waiting for experts",
            Phase::Experts => "routed experts",
            Phase::SharedExpert => "shared expert",
            Phase::Head => "head",
            Phase::Draft => "drafting",
        }
    }
}

/// Time by phase since the last [`reset`](Self::reset).
#[derive(Clone, Debug)]
pub struct Profile {
    spent: [Duration; Phase::ALL.len()],
    last: Instant,
}

impl Default for Profile {
    fn default() -> Self {
        Self { spent: [Duration::ZERO; Phase::ALL.len()], last: Instant::now() }
    }
}

impl Profile {
    /// The time spent in a phase.
    pub fn spent(&self, phase: Phase) -> Duration {
        self.spent[phase as usize]
    }

    /// The time spent in every phase, in the order of [`Phase::ALL`].
    pub fn all(&self) -> [Duration; Phase::ALL.len()] {
        self.spent
    }

    /// Forgets everything.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// A pass begins, or goes on after a pause that belongs to no phase.
    pub(crate) fn start(&mut self) {
        self.last = Instant::now();
    }

    /// What was spent since `before` belongs to `phase`, whatever it was put down to; waiting stays waiting.
    pub(crate) fn fold(&mut self, before: [Duration; Phase::ALL.len()], phase: Phase) {
        for other in Phase::ALL.into_iter().filter(|other| *other != Phase::ExpertWait && *other != phase) {
            let moved = self.spent[other as usize].saturating_sub(before[other as usize]);
            self.spent[other as usize] -= moved;
            self.spent[phase as usize] += moved;
        }
    }

    /// The time since the last lap, or the start, belongs to `phase`.
    pub(crate) fn lap(&mut self, phase: Phase) {
        let now = Instant::now();
        self.spent[phase as usize] += now - self.last;
        self.last = now;
    }
}

/// What a phase has to do for one token, whatever the machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Weight bytes that are touched, scales included.
    pub bytes: u64,
    /// Multiply-adds with weights.
    pub multiply_adds: u64,
}

impl std::ops::AddAssign for Work {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.multiply_adds += other.multiply_adds;
    }
}

impl Model {
    /// The weights that one row goes through in every phase. Routed experts are those of
    /// `expert_bytes(layer)` each, as many as the router chooses; attention over the cache
    /// has no weights.
    pub fn work(&self, expert_bytes: &dyn Fn(usize) -> u64) -> [Work; Phase::ALL.len()] {
        let mut work = [Work::default(); Phase::ALL.len()];
        for (l, layer) in self.layers.iter().enumerate() {
            let a = &layer.attention;
            for matrix in [&a.q_a, &a.q_b, &a.kv_a] {
                work[Phase::Projections as usize] += of(matrix);
            }
            let (absorb, expand) = halves(&self.spec, &a.kv_b);
            work[Phase::Absorb as usize] += absorb;
            work[Phase::Expand as usize] += expand;
            work[Phase::AttentionOut as usize] += of(&a.o);
            if let Some(indexer) = &a.indexer {
                for matrix in [&indexer.q, &indexer.k, &indexer.head_weights] {
                    work[Phase::Indexer as usize] += of(matrix);
                }
            }
            match &layer.ffn {
                Ffn::Dense(mlp) => work[Phase::DenseMlp as usize] += of_mlp(mlp),
                Ffn::Sparse { router, shared, .. } => {
                    let moe = &self.spec.moe;
                    work[Phase::Router as usize] += of(router);
                    work[Phase::Experts as usize] += Work {
                        bytes: moe.top_k as u64 * expert_bytes(l),
                        multiply_adds: (3 * moe.top_k * moe.expert_width * self.spec.hidden) as u64,
                    };
                    if let Some(shared) = shared {
                        work[Phase::SharedExpert as usize] += of_mlp(shared);
                    }
                }
            }
        }
        work[Phase::Head as usize] += of(&self.head);
        work
    }
}

fn of(matrix: &Matrix) -> Work {
    Work { bytes: matrix.bytes() as u64, multiply_adds: (matrix.rows() * matrix.cols()) as u64 }
}

fn of_mlp(mlp: &Mlp) -> Work {
    let mut work = of(&mlp.gate);
    work += of(&mlp.up);
    work += of(&mlp.down);
    work
}

/// The key rows and the value rows of `kv_b`.
fn halves(spec: &ModelSpec, kv_b: &Matrix) -> (Work, Work) {
    let (all, a) = (of(kv_b), &spec.attention);
    let keys = |n: u64| n * a.nope as u64 / (a.nope + a.value) as u64;
    let absorb = Work { bytes: keys(all.bytes), multiply_adds: keys(all.multiply_adds) };
    let expand =
        Work { bytes: all.bytes - absorb.bytes, multiply_adds: all.multiply_adds - absorb.multiply_adds };
    (absorb, expand)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stretch_of_time_belongs_to_one_phase() {
        let mut profile = Profile::default();
        let started = Instant::now();
        profile.start();
        for phase in Phase::ALL {
            std::thread::sleep(Duration::from_millis(1));
            profile.lap(phase);
        }
        let sum: Duration = Phase::ALL.iter().map(|phase| profile.spent(*phase)).sum();
        assert!(sum <= started.elapsed() && sum >= Duration::from_millis(13));
        assert!(Phase::ALL.iter().all(|phase| profile.spent(*phase) >= Duration::from_millis(1)));
        profile.reset();
        assert_eq!(profile.spent(Phase::Head), Duration::ZERO);
    }
}
