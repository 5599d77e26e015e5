//! What a run says about itself at its end: how close it came to what the disk allows, to a cache
//! that knows the future, and what more memory would have given.
//!
//! All of it is replayed from what really happened: the experts that every step wanted, in the
//! cache that the engine uses, with other numbers of slots.

use std::time::Duration;

use forebay_core::ByteSize;
use forebay_engine::{Engine, Stats};
use forebay_tiers::sim::{Contestant, Outcome, replay_with};
use forebay_tiers::{Counters, Policy};
use serde_json::{Value, json};

/// Memory that the line speaks of adding, where the budget is at least as large.
const MORE: u64 = 8_000_000_000;

/// The part of a run that its speed is judged by: what came after prompts, or all of a score.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Stretch {
    /// Tokens that were run.
    pub tokens: usize,
    /// Wall time.
    pub time: Duration,
    /// How long at least one demanded read was outstanding.
    pub disk_time: Duration,
    /// Bytes of experts read for it, on demand or ahead.
    pub bytes: u64,
    /// Experts that were not in memory.
    pub misses: u64,
    /// Nanoseconds that compute waited for them.
    pub wait_ns: u64,
}

impl Stretch {
    /// What came after the prompt of an answer.
    pub fn of(stats: &Stats) -> Self {
        let experts = &stats.decode_experts;
        Self { tokens: stats.decoded(), time: stats.decode, disk_time: stats.decode_disk, ..Self::default() }
            .with(experts)
    }

    /// The same with what streaming cost.
    pub fn with(self, experts: &Counters) -> Self {
        Self { bytes: experts.step_bytes(), misses: experts.misses, wait_ns: experts.wait_ns, ..self }
    }

    /// Both together.
    pub fn add(&mut self, other: &Self) {
        self.tokens += other.tokens;
        self.time += other.time;
        self.disk_time += other.disk_time;
        self.bytes += other.bytes;
        self.misses += other.misses;
        self.wait_ns += other.wait_ns;
    }
}

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hindsight {
    /// Tokens per second in the stretch.
    tokens_per_second: Option<f64>,
    /// Whether every expert that was wanted in the stretch was in memory.
    all_in_memory: bool,
    /// Share of the stretch in which a read was outstanding.
    disk_busy: Option<f64>,
    /// Bytes per second in the stretch, over what `forebay tune` measured or `--throttle-disk` allows.
    of_disk: Option<f64>,
    /// Bytes read for all steps, over those that a clairvoyant cache would have read, which begins empty; unknown
    /// where ours was filled while nobody asked.
    of_clairvoyant: Option<f64>,
    /// Memory to add, and the tokens per second that it would have given.
    with_more: Option<(u64, f64)>,
}

impl Hindsight {
    /// Looks back at everything since the model was opened; speeds are those of the stretch.
    pub fn of(engine: &mut Engine, stretch: &Stretch) -> Self {
        let seconds = stretch.time.as_secs_f64();
        let mut found = Self::default();
        if stretch.tokens == 0 || seconds <= 0.0 {
            return found;
        }
        found.tokens_per_second = Some(stretch.tokens as f64 / seconds);
        found.all_in_memory = stretch.misses == 0;
        // Where every expert has a slot, each is read once and there is nothing to improve.
        let plan = engine.plan();
        if stretch.misses == 0 || plan.holds_everything() {
            return found;
        }
        found.disk_busy = Some((stretch.disk_time.as_secs_f64() / seconds).min(1.0));
        let options = engine.options();
        let limit = options.io.throttle.map(|rate| rate as f64).or(options.rates.disk);
        found.of_disk = limit.map(|rate| stretch.bytes as f64 / seconds / rate);
        let quotas = plan.slots.quotas.clone();
        let (budget, row) = (plan.budget, plan.slot_row().max(1));
        let policy = engine.options().policy;
        let counters = engine.counters();
        let store = engine.store();
        let expert = store.expert_bytes();
        let Some(routes) = store.recorded().filter(|_| store.recorded_all()) else { return found };
        let best = replay_with(routes, Contestant::Belady, &quotas, &[]).misses * expert;
        found.of_clairvoyant = over_clairvoyant(&counters, best);
        let more = MORE.min(budget);
        let added = (more / row) as usize;
        let larger: Vec<usize> = quotas.iter().map(|quota| quota + added).collect();
        let usual = |quotas: &[usize]| replay_with(routes, Contestant::Policy(policy), quotas, &[]);
        found.with_more = speed_with(&usual(&quotas), &usual(&larger), stretch, more);
        found
    }

    /// One line for people; nothing where there is nothing to say.
    pub fn line(&self) -> Option<String> {
        let speed = format!("{:.2} tok/s", self.tokens_per_second?);
        let mut parts = vec![match (self.of_disk, self.disk_busy) {
            (Some(share), _) => format!("{speed}, {:.0} % of this disk's limit", 100.0 * share),
            (None, Some(busy)) => format!("{speed}, the disk was busy {:.0} % of the time", 100.0 * busy),
            (None, None) if self.all_in_memory => format!("{speed}, every expert was in memory"),
            (None, None) => speed,
        }];
        if let Some(ratio) = self.of_clairvoyant {
            parts.push(format!("{ratio:.2}x the bytes of a clairvoyant cache"));
        }
        if let Some((more, speed)) = self.with_more {
            parts.push(format!("+{} of memory would give about {speed:.2}", ByteSize(more)));
        }
        Some(parts.join("; "))
    }

    /// The same for programs; unknown is null.
    pub fn json(&self) -> Value {
        json!({
            "tokens_per_s": self.tokens_per_second,
            "disk_busy_share": self.disk_busy,
            "share_of_disk_limit": self.of_disk,
            "bytes_over_clairvoyant": self.of_clairvoyant,
            "more_memory_bytes": self.with_more.map(|more| more.0),
            "more_memory_tokens_per_s": self.with_more.map(|more| more.1),
        })
    }
}

/// What was read over what a clairvoyant cache that begins empty would have read, if that can be compared.
fn over_clairvoyant(counters: &Counters, best: u64) -> Option<f64> {
    (best > 0 && counters.warm_up_loads == 0).then(|| counters.step_bytes() as f64 / best as f64)
}

/// The speed with fewer misses: the time that was not waiting stays, waiting shrinks with the misses.
fn speed_with(now: &Outcome, more: &Outcome, stretch: &Stretch, bytes: u64) -> Option<(u64, f64)> {
    if now.misses == 0 || more.misses >= now.misses {
        return None;
    }
    let seconds = stretch.time.as_secs_f64();
    let waited = Duration::from_nanos(stretch.wait_ns).as_secs_f64().min(seconds);
    let left = seconds - waited + waited * more.misses as f64 / now.misses as f64;
    (left > 0.0).then(|| (bytes, stretch.tokens as f64 / left))
}

/// The policy's name.
pub fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Lru => "lru",
        Policy::Blend => "blend",
        _ => "other",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_what_is_known() {
        let all = Hindsight {
            tokens_per_second: Some(0.41),
            all_in_memory: false,
            disk_busy: Some(0.97),
            of_disk: Some(0.93),
            of_clairvoyant: Some(1.34),
            with_more: Some((8_000_000_000, 0.52)),
        };
        assert_eq!(
            all.line().unwrap(),
            "0.41 tok/s, 93 % of this disk's limit; 1.34x the bytes of a clairvoyant cache; \
             +8.00 GB of memory would give about 0.52"
        );
        let untuned = Hindsight { of_disk: None, of_clairvoyant: None, with_more: None, ..all };
        assert_eq!(untuned.line().unwrap(), "0.41 tok/s, the disk was busy 97 % of the time");
        let quick = Hindsight { disk_busy: None, ..untuned };
        assert_eq!(quick.line().unwrap(), "0.41 tok/s");
        let held = Hindsight { all_in_memory: true, ..quick };
        assert_eq!(held.line().unwrap(), "0.41 tok/s, every expert was in memory");
        assert_eq!(Hindsight::default().line(), None, "nothing was decoded");
    }

    /// Warming up goes on while nothing else is read: its bytes are neither the run's nor what it is compared by.
    #[test]
    fn what_is_read_to_warm_up_is_not_read_for_the_run() {
        let decode_experts = Counters { bytes: 100, warm_up_bytes: 30, misses: 7, ..Counters::default() };
        let stats = Stats { decode_experts, ..Stats::default() };
        assert_eq!(Stretch::of(&stats).bytes, 70);
        assert_eq!(over_clairvoyant(&decode_experts, 50), Some(1.4));
        let filled = Counters { warm_up_loads: 1, ..decode_experts };
        assert_eq!(over_clairvoyant(&filled, 50), None);
        assert_eq!(over_clairvoyant(&decode_experts, 0), None);
    }

    /// Ten tokens in ten seconds, eight of them waiting; half the misses save four seconds.
    #[test]
    fn waiting_shrinks_with_the_misses() {
        let decode_experts = Counters { wait_ns: 8_000_000_000, ..Counters::default() };
        let decode = Duration::from_secs(10);
        let stats = Stats { decode_passes: 10, decode, decode_experts, ..Stats::default() };
        let stretch = Stretch::of(&stats);
        let mut twice = stretch;
        twice.add(&stretch);
        assert_eq!((twice.tokens, twice.time, twice.wait_ns), (20, 2 * decode, 16_000_000_000));
        let outcome = |misses| Outcome { misses, ..Outcome::default() };
        let (_, speed) = speed_with(&outcome(100), &outcome(50), &stretch, 1).unwrap();
        assert!((speed - 10.0 / 6.0).abs() < 1e-9);
        assert_eq!(speed_with(&outcome(100), &outcome(100), &stretch, 1), None);
    }
}
