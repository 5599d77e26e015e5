//! Replays routes against a policy: what a cache would have hit.
//!
//! Policies run in the very [`LayerCache`] that the engine uses. The others are there to
//! compare with: what was measured elsewhere ([`Contestant::GlobalLru`], pins), what a naive
//! cache does ([`Contestant::OneAtATime`]), what no cache can beat ([`Contestant::Belady`]).

mod others;

use crate::cache::{LayerCache, Policy};
use crate::routes::{Routes, Union};

/// Who plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Contestant {
    /// One cache per layer, as in the engine.
    Policy(Policy),
    /// Recency over the slots of all layers together, one expert after another.
    GlobalLru,
    /// Recency per layer in which a step's own experts may evict each other once all were
    /// looked up: "LRU" in docs/cache.md.
    TrimmedLru,
    /// The experts that history used most; nothing ever changes.
    Pins,
    /// Half the slots (rounded down) are such pins, [`TrimmedLru`](Self::TrimmedLru) has the others.
    HalfPins,
    /// Recency per layer, but a token's experts are looked up one after another and may
    /// evict each other.
    OneAtATime,
    /// Knows the future: keeps what is needed soonest. The optimum for its slots, with the
    /// right to let a miss pass through.
    Belady,
    /// The same for a cache that handles a union one expert at a time.
    BeladyOneAtATime,
}

/// What a replay came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// Experts of unions that were resident.
    pub hits: u64,
    /// Experts of unions that had to be read.
    pub misses: u64,
    /// Residents that made room for others, where a [`LayerCache`] played.
    pub evictions: u64,
}

impl Outcome {
    /// The share of hits; 0 if nothing was asked for.
    pub fn hit_rate(&self) -> f64 {
        match self.hits + self.misses {
            0 => 0.0,
            all => self.hits as f64 / all as f64,
        }
    }

    /// Bytes to read.
    pub fn bytes(&self, expert_bytes: u64) -> u64 {
        self.misses.saturating_mul(expert_bytes)
    }

    fn add(&mut self, hits: usize, misses: usize) {
        self.hits += hits as u64;
        self.misses += misses as u64;
    }
}

/// Plays all of `routes` with `quota` slots per layer, from an empty cache. `history` has
/// what earlier texts used, per layer ([`Routes::counts`]): pins are chosen from it and
/// frequency policies are seeded with it; empty lists are no history.
pub fn replay(routes: &Routes, contestant: Contestant, quota: usize, history: &[Vec<u64>]) -> Outcome {
    replay_with(routes, contestant, &vec![quota; routes.layers.len()], history)
}

/// The same with a number of slots for each layer.
pub fn replay_with(
    routes: &Routes,
    contestant: Contestant,
    quotas: &[usize],
    history: &[Vec<u64>],
) -> Outcome {
    let mut outcome = Outcome::default();
    if contestant == Contestant::GlobalLru {
        others::global_lru(routes, quotas.iter().sum(), &mut outcome);
        return outcome;
    }
    for ((at, steps), &quota) in routes.layers.iter().enumerate().zip(quotas) {
        let counts = history.get(at).map_or(&[][..], Vec::as_slice);
        match contestant {
            Contestant::Policy(policy) => {
                let mut cache = LayerCache::new(quota, policy);
                cache.seed(counts, routes.top_k);
                play(&mut cache, steps, &mut outcome);
            }
            Contestant::TrimmedLru => others::pins_and_trimmed_lru(steps, &[], 0, quota, &mut outcome),
            Contestant::Pins => others::pins_and_trimmed_lru(steps, counts, quota, 0, &mut outcome),
            Contestant::HalfPins => {
                let pinned = quota / 2;
                others::pins_and_trimmed_lru(steps, counts, pinned, quota - pinned, &mut outcome);
            }
            Contestant::OneAtATime => others::one_at_a_time(steps, quota, &mut outcome),
            Contestant::Belady => others::belady(steps, quota, &mut outcome),
            Contestant::BeladyOneAtATime => others::belady_one_at_a_time(steps, quota, &mut outcome),
            Contestant::GlobalLru => unreachable!("handled above: its slots are not the layer's"),
        }
    }
    outcome
}

/// Plays one layer's steps in a cache that may have a past.
pub fn play(cache: &mut LayerCache, steps: &[Union], outcome: &mut Outcome) {
    for union in steps {
        let plan = cache.plan_rows(&union.experts, &union.uses, union.rows);
        outcome.add(plan.hits.len(), plan.kept.len() + plan.transient.len());
        outcome.evictions += plan.evicted.len() as u64;
    }
}

#[cfg(test)]
mod tests;
