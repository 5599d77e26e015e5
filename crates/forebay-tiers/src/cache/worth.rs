//! What every expert of a layer is worth to its cache: the memory behind a policy.
//!
//! Numbers are brought up to date when they are asked for, so a step costs its union
//! and the residents, not all experts. Everything is sums, products and comparisons of
//! f64, which every machine computes alike.

use std::collections::HashMap;

use super::policy::{BLEND, Memory, Policy, decay, power};

/// Distinct memories that a frequency policy may have.
const MEMORIES: usize = BLEND.len();

/// Tokens that a seed counts as at most. A longer history says better what a layer likes, but
/// not what this text is about: at full weight it kept experts of other texts for hundreds of
/// tokens, and cost the bundled model up to .9 points where most experts fit.
const SEED_TOKENS: u64 = 128;

/// What is remembered of a layer's experts, resident or not.
#[derive(Clone, Debug)]
pub(super) enum Worth {
    /// When each was routed to last; later is larger, no two are equal.
    Recency { clock: u64, stamps: HashMap<u32, u64> },
    /// Counts and the token of the last use.
    Heat { clock: u32, halve_every: u32, since: u64, seen: HashMap<u32, Heat> },
    /// Uses per token, as exponential memories have them.
    Rates { clock: u64, memories: [Decay; MEMORIES], seen: HashMap<u32, Rates> },
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Heat {
    count: u32,
    last: u32,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    /// Uses per token, per memory, as of token `at`.
    rates: [f64; MEMORIES],
    at: u64,
}

/// A memory as it is computed with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decay {
    factor: f64,
    weight: f64,
}

impl Worth {
    pub(super) fn new(policy: Policy) -> Self {
        match policy {
            Policy::Lru => Self::Recency { clock: 0, stamps: HashMap::new() },
            Policy::Lfru { halve_every } => {
                Self::Heat { clock: 0, halve_every, since: 0, seen: HashMap::new() }
            }
            Policy::Aged { half_life } => {
                let none = Memory { half_life, weight: 0.0 };
                Self::rates([Memory { half_life, weight: 1.0 }, none, none])
            }
            Policy::Blend => Self::rates(BLEND),
        }
    }

    fn rates(memories: [Memory; MEMORIES]) -> Self {
        let memories = memories.map(|m| Decay { factor: decay(m.half_life), weight: m.weight });
        Self::Rates { clock: 0, memories, seen: HashMap::new() }
    }

    /// Takes note of a step of `rows` tokens; `uses` says how many of them chose each
    /// member, in the order of the union, and one where it says nothing.
    pub(super) fn observe(&mut self, union: &[u32], uses: &[u32], rows: u64) {
        let uses = uses.iter().copied().chain(std::iter::repeat(1));
        let used = union.iter().copied().zip(uses);
        match self {
            Self::Recency { clock, stamps } => {
                for (expert, _) in used {
                    *clock += 1;
                    stamps.insert(expert, *clock);
                }
            }
            Self::Heat { clock, halve_every, since, seen } => {
                // The clock is the spec's 32 bits and wraps.
                *clock = clock.wrapping_add(rows as u32);
                for (expert, uses) in used {
                    let heat = seen.entry(expert).or_default();
                    *heat = Heat { count: heat.count.saturating_add(uses), last: *clock };
                }
                *since += rows;
                if *halve_every > 0 {
                    let halvings = (*since / u64::from(*halve_every)).min(32) as u32;
                    *since %= u64::from(*halve_every);
                    if halvings > 0 {
                        seen.values_mut().for_each(|heat| heat.count = halve(heat.count, halvings));
                    }
                }
            }
            Self::Rates { clock, memories, seen } => {
                *clock += rows;
                let rows = rows.max(1);
                // What a whole step of steady use leaves in each memory.
                let gained = memories.map(|memory| 1.0 - power(memory.factor, rows));
                for (expert, uses) in used {
                    let entry = seen.entry(expert).or_default();
                    let mut rates = entry.now(memories, *clock);
                    let share = f64::from(uses) / rows as f64;
                    rates.iter_mut().zip(gained).for_each(|(rate, gained)| *rate += share * gained);
                    *entry = Rates { rates, at: *clock };
                }
            }
        }
    }

    /// What an expert is worth: more is better, ties are real.
    pub(super) fn of(&self, expert: u32) -> f64 {
        match self {
            Self::Recency { stamps, .. } => stamps.get(&expert).map_or(0.0, |stamp| *stamp as f64),
            Self::Heat { clock, seen, .. } => {
                let heat = seen.get(&expert).copied().unwrap_or_default();
                heat_score(heat.count, heat.last, *clock) as f64
            }
            Self::Rates { clock, memories, seen } => seen.get(&expert).map_or(0.0, |entry| {
                let rates = entry.now(memories, *clock);
                rates.iter().zip(memories).map(|(rate, memory)| rate * memory.weight).sum()
            }),
        }
    }

    /// Every expert that was ever used, with its worth, in no order.
    pub(super) fn known(&self) -> Vec<(u32, f64)> {
        let experts: Vec<u32> = match self {
            Self::Recency { stamps, .. } => stamps.keys().copied().collect(),
            Self::Heat { seen, .. } => seen.keys().copied().collect(),
            Self::Rates { seen, .. } => seen.keys().copied().collect(),
        };
        experts.into_iter().map(|expert| (expert, self.of(expert))).collect()
    }

    /// Whether a miss worth `newcomer` may take the place of a resident worth `resident`.
    pub(super) fn admits(&self, newcomer: f64, resident: f64) -> bool {
        match self {
            // The newcomer was used just now, the resident was not.
            Self::Recency { .. } => true,
            // Both fit u64: scores are at most 2^40.
            Self::Heat { .. } => heat_beats(newcomer as u64, resident as u64),
            Self::Rates { .. } => newcomer > resident,
        }
    }

    /// Begins with the experience of earlier runs: `counts[expert]` uses, `top_k` of them
    /// per token. Recency and heat start afresh, as in the reference.
    pub(super) fn seed(&mut self, counts: &[u64], top_k: usize) {
        let Self::Rates { clock, memories, seen } = self else { return };
        let total = counts.iter().fold(0u64, |sum, count| sum.saturating_add(*count));
        let tokens = (total / top_k.max(1) as u64).max(1);
        // As if the history had just been observed, at an even pace: a short one weighs little,
        // and so does the end of a long one.
        let weighs = tokens.min(SEED_TOKENS);
        let gained = memories.map(|memory| 1.0 - power(memory.factor, weighs));
        for (expert, &count) in counts.iter().enumerate().filter(|(_, count)| **count > 0) {
            let Ok(expert) = u32::try_from(expert) else { break };
            let rates = gained.map(|gained| count as f64 / tokens as f64 * gained);
            seen.insert(expert, Rates { rates, at: *clock });
        }
    }
}

impl Rates {
    fn now(&self, memories: &[Decay; MEMORIES], clock: u64) -> [f64; MEMORIES] {
        let mut rates = self.rates;
        for (rate, memory) in rates.iter_mut().zip(memories) {
            *rate *= power(memory.factor, clock.saturating_sub(self.at));
        }
        rates
    }
}

/// The reference's score (LFRU in docs/cache.md): a count, and a bonus for the last 255 ticks.
fn heat_score(count: u32, last: u32, clock: u32) -> u64 {
    let age = clock.wrapping_sub(last);
    u64::from(count) * 256 + u64::from(255u32.saturating_sub(age))
}

/// The same section: the margin by which a newcomer must win.
fn heat_beats(newcomer: u64, resident: u64) -> bool {
    newcomer > resident + resident / 4 + 1024
}

/// The same section: what a pass leaves of a count.
fn halve(count: u32, times: u32) -> u32 {
    count.checked_shr(times).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured with the reference's functions.
    #[test]
    fn heat_as_in_the_reference() {
        let cases = [
            (10, 10, 100, 2725),
            (10, 90, 100, 2805),
            (18, 20, 100, 4783),
            (18, 99, 100, 4862),
            (0, u32::MAX - 1, 5, 248),
            (0, 101, 100, 0),
        ];
        for (heat, last, clock, want) in cases {
            assert_eq!(heat_score(heat, last, clock), want, "{heat} {last} {clock}");
        }
        assert_eq!((heat_score(0, 0, 254), heat_score(0, 0, 255)), (1, 0));
        assert_eq!([7, 1, 0, u32::MAX].map(|count| halve(count, 1)), [3, 0, 0, 2_147_483_647]);
        assert_eq!(halve(u32::MAX, 32), 0);
    }

    /// The swap rule of the same section: the best candidate against the worst resident.
    #[test]
    fn the_margin_of_the_reference() {
        let score = |heat| heat_score(heat, 0, 1000);
        assert!(!heat_beats(score(8), score(4)) && !heat_beats(score(9), score(4)));
        assert!(heat_beats(score(10), score(4)));
        assert_eq!((score(10) - score(4)) >> 8, 6);
        let (cold, hot) = (heat_score(10, 10, 100), heat_score(18, 99, 100));
        assert!(heat_beats(hot, cold));
        assert_eq!((hot - cold) >> 8, 8);
    }

    /// One step of many rows is worth what the same rows are worth one by one, when the
    /// uses are spread evenly: here in every row.
    #[test]
    fn rows_together_or_apart() {
        let mut together = Worth::new(Policy::Blend);
        together.observe(&[3, 9], &[40, 40], 40);
        let mut apart = Worth::new(Policy::Blend);
        (0..40).for_each(|_| apart.observe(&[3, 9], &[], 1));
        assert!((together.of(3) - apart.of(3)).abs() < 1e-12);
        assert!((together.of(9) - together.of(3)).abs() < 1e-12);
        assert_eq!(together.of(4), 0.0);
    }

    #[test]
    fn a_seed_counts_as_much_as_it_saw_up_to_a_limit() {
        let worth = |counts: &[u64]| {
            let mut worth = Worth::new(Policy::Blend);
            worth.seed(counts, 2);
            worth
        };
        // Always used, for ever, but no more than 128 tokens of it: all of the last-token memory,
        // 255/256 of the topic's eight half-lives, 1 - 2^-0.32 = .198930 of the text's.
        let long = worth(&[1_000_000, 1_000_000, 0]);
        let want = 0.2 + 0.4 * 255.0 / 256.0 + 0.4 * 0.198_930;
        assert!((long.of(0) - want).abs() < 1e-6 && long.of(2) == 0.0, "{}", long.of(0));
        // Two tokens: 3/4 of the last-token memory and little of the others.
        let short = worth(&[2, 2]);
        assert!(short.of(0) > 0.15 && short.of(0) < 0.2, "{}", short.of(0));
        assert_eq!(worth(&[]).of(0), 0.0);
        assert!(worth(&[u64::MAX, u64::MAX]).of(1).is_finite());
    }
}
