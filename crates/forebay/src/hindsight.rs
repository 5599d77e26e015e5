//! What a run says about itself at its end: how close it came to what the disk allows, to a cache
//! that knows the future, and what more memory would have given.
//!
//! All of it is replayed from what really happened: the experts that every step wanted, in the
//! cache that the engine uses, with other numbers of slots.

use std::time::Duration;

use forebay_core::ByteSize;
use forebay_engine::{Engine, Stats};
use forebay_tiers::Policy;
use forebay_tiers::sim::{Contestant, Outcome, replay_with};
use serde_json::{Value, json};

/// Memory that the line speaks of adding, where the budget is at least as large.
const MORE: u64 = 8_000_000_000;

/// What a run came to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Hindsight {
    /// Tokens per second after the prompt.
    tokens_per_second: Option<f64>,
    /// Share of the time after the prompt in which a read was outstanding.
    disk_busy: Option<f64>,
    /// Bytes per second after the prompt, over what `forebay tune` measured.
    of_disk: Option<f64>,
    /// Experts read, over those that a clairvoyant cache would have read.
    of_clairvoyant: Option<f64>,
    /// Memory to add, and the tokens per second that it would have given.
    with_more: Option<(u64, f64)>,
}

impl Hindsight {
    /// Looks back. `disk_time` is how long a read was outstanding after the prompt.
    pub fn of(engine: &mut Engine, stats: &Stats, disk_time: Duration) -> Self {
        let seconds = stats.decode.as_secs_f64();
        let decode = &stats.decode_experts;
        let mut found = Self::default();
        if stats.decode_passes == 0 || seconds <= 0.0 {
            return found;
        }
        found.tokens_per_second = Some(stats.decode_passes as f64 / seconds);
        // Where every expert has a slot, each is read once and there is nothing to improve.
        let plan = engine.plan();
        let experts: usize = plan.demand.layers.iter().map(|layer| layer.experts).sum();
        if decode.misses == 0 || plan.resident_slots() == experts {
            return found;
        }
        found.disk_busy = Some((disk_time.as_secs_f64() / seconds).min(1.0));
        let rates = engine.options().rates;
        found.of_disk = rates.disk.map(|rate| decode.bytes as f64 / seconds / rate);
        let quotas = plan.slots.quotas.clone();
        let (budget, row) = (plan.budget, plan.slot_row().max(1));
        let policy = engine.options().policy;
        let store = engine.store();
        let Some(routes) = store.recorded().filter(|_| store.recorded_all()) else { return found };
        let best = replay_with(routes, Contestant::Belady, &quotas, &[]).misses;
        let read = stats.experts.misses + stats.experts.ahead_wasted;
        found.of_clairvoyant = (best > 0).then(|| read as f64 / best as f64);
        let more = MORE.min(budget);
        let added = (more / row) as usize;
        let larger: Vec<usize> = quotas.iter().map(|quota| quota + added).collect();
        let usual = |quotas: &[usize]| replay_with(routes, Contestant::Policy(policy), quotas, &[]);
        found.with_more = speed_with(&usual(&quotas), &usual(&larger), stats, more);
        found
    }

    /// One line for people; nothing where there is nothing to say.
    pub fn line(&self) -> Option<String> {
        let mut parts = Vec::new();
        let speed = self.tokens_per_second?;
        match (self.of_disk, self.disk_busy) {
            (Some(share), _) => {
                parts.push(format!("{speed:.2} tok/s, {:.0} % of this disk's limit", 100.0 * share));
            }
            (None, Some(busy)) => {
                parts.push(format!("{speed:.2} tok/s, the disk was busy {:.0} % of the time", 100.0 * busy));
            }
            (None, None) => return None,
        }
        if let Some(ratio) = self.of_clairvoyant {
            parts.push(format!("{ratio:.2}x the reads of a clairvoyant cache"));
        }
        if let Some((more, speed)) = self.with_more {
            parts.push(format!("+{} of memory would give about {speed:.2}", ByteSize(more)));
        }
        Some(parts.join("; "))
    }

    /// The same for programs; unknown is null.
    pub fn json(&self) -> Value {
        json!({
            "decode_tokens_per_s": self.tokens_per_second,
            "disk_busy_share": self.disk_busy,
            "share_of_disk_limit": self.of_disk,
            "reads_over_clairvoyant": self.of_clairvoyant,
            "more_memory_bytes": self.with_more.map(|more| more.0),
            "more_memory_tokens_per_s": self.with_more.map(|more| more.1),
        })
    }
}

/// The speed with fewer misses: the time that was not waiting stays, waiting shrinks with the misses.
fn speed_with(now: &Outcome, more: &Outcome, stats: &Stats, bytes: u64) -> Option<(u64, f64)> {
    if now.misses == 0 || more.misses >= now.misses {
        return None;
    }
    let seconds = stats.decode.as_secs_f64();
    let waited = Duration::from_nanos(stats.decode_experts.wait_ns).as_secs_f64().min(seconds);
    let left = seconds - waited + waited * more.misses as f64 / now.misses as f64;
    (left > 0.0).then(|| (bytes, stats.decode_passes as f64 / left))
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
    use forebay_tiers::Counters;

    #[test]
    fn the_line_says_what_is_known() {
        let all = Hindsight {
            tokens_per_second: Some(0.41),
            disk_busy: Some(0.97),
            of_disk: Some(0.93),
            of_clairvoyant: Some(1.34),
            with_more: Some((8_000_000_000, 0.52)),
        };
        assert_eq!(
            all.line().unwrap(),
            "0.41 tok/s, 93 % of this disk's limit; 1.34x the reads of a clairvoyant cache; \
             +8.00 GB of memory would give about 0.52"
        );
        let untuned = Hindsight { of_disk: None, of_clairvoyant: None, with_more: None, ..all };
        assert_eq!(untuned.line().unwrap(), "0.41 tok/s, the disk was busy 97 % of the time");
        assert_eq!(Hindsight { disk_busy: None, ..untuned }.line(), None, "all of it was in memory");
    }

    /// Ten tokens in ten seconds, eight of them waiting; half the misses save four seconds.
    #[test]
    fn waiting_shrinks_with_the_misses() {
        let decode_experts = Counters { wait_ns: 8_000_000_000, ..Counters::default() };
        let decode = Duration::from_secs(10);
        let stats = Stats { decode_passes: 10, decode, decode_experts, ..Stats::default() };
        let outcome = |misses| Outcome { misses, ..Outcome::default() };
        let (_, speed) = speed_with(&outcome(100), &outcome(50), &stats, 1).unwrap();
        assert!((speed - 10.0 / 6.0).abs() < 1e-9);
        assert_eq!(speed_with(&outcome(100), &outcome(100), &stats, 1), None);
    }
}
