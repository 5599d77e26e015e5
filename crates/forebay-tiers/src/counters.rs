//! What streaming cost, in numbers that only grow (docs/streaming.md, "Seeing it"): nothing is counted before it is
//! certain.

use std::time::Duration;

use forebay_io::{JobStats, ReadError};

/// Totals since the store was made. Take a copy, later ask what happened
/// [`since`](Counters::since).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Experts selected, summed over the rows of every step.
    pub requests: u64,
    /// Distinct experts of a step that were resident.
    pub hits: u64,
    /// Distinct experts of a step that were not. `hits + misses` is the number of
    /// distinct resolutions.
    pub misses: u64,
    /// Residents that made room for misses. What the governor takes is not among them.
    pub evictions: u64,
    /// Misses that had been read ahead when their step began.
    pub ahead_ready: u64,
    /// Misses that were being read ahead, or were to be, when their step began.
    pub ahead_late: u64,
    /// Experts asked for ahead.
    pub ahead_asked: u64,
    /// Of these, wrong ones that were not read, or not to the end.
    pub ahead_dropped: u64,
    /// Of these, wrong ones that were read.
    pub ahead_wasted: u64,
    /// Experts read into free slots because earlier runs used them most.
    pub warm_up_loads: u64,
    /// Experts read completely. Equal to `misses`, `ahead_wasted` and `warm_up_loads` together,
    /// unless reads failed or steps were abandoned.
    pub loads: u64,
    /// Bytes read by `loads`, and by reads ahead or to warm up that were given up.
    pub bytes: u64,
    /// Of these, bytes read to warm up, whatever came of it.
    pub warm_up_bytes: u64,
    /// Of these, bytes that found their slot taken, or were given up.
    pub warm_up_wasted_bytes: u64,
    /// Of these, bytes of experts that were there when their step began.
    pub ahead_useful_bytes: u64,
    /// Of these, bytes of experts that were asked for ahead and still being read when their step began.
    pub ahead_late_bytes: u64,
    /// Of these, bytes that were read ahead and not wanted.
    pub ahead_wasted_bytes: u64,
    /// Reads issued for them.
    pub reads: u64,
    /// Of these, reads past the page cache.
    pub direct_reads: u64,
    /// Direct reads that had to be finished through the page cache.
    pub fallbacks: u64,
    /// Reads that were repeated: short, interrupted, told to try again, or failed once.
    pub retries: u64,
    /// Time that workers spent on `loads`, in nanoseconds; several workers add up,
    /// so it may exceed wall time.
    pub service_ns: u64,
    /// Bytes whose checksum was compared when they were read: those of `loads` where the container has
    /// checksums, and wrong copies that were read again from elsewhere.
    pub checked_bytes: u64,
    /// Time that took on the reading threads, in nanoseconds; part of `service_ns`.
    pub check_ns: u64,
    /// Time that the compute thread spent waiting for an expert, in nanoseconds: the
    /// part of wall time that the disk is responsible for.
    pub wait_ns: u64,
    /// Loads that failed.
    pub failures: u64,
    /// Slots given up because memory was short.
    pub slots_released: u64,
    /// Slots taken back.
    pub slots_regained: u64,
    /// How long each load took.
    pub service: Histogram,
    /// How long each wait took.
    pub wait: Histogram,
}

/// How many durations fell into which range.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; Self::RANGES],
}

impl Histogram {
    /// Ranges: the first one ends at 16 microseconds, every other one at twice the end of the one
    /// before it, the last one never.
    pub const RANGES: usize = 24;

    /// Counts a duration.
    pub fn add(&mut self, duration: Duration) {
        let sixteenths = (duration.as_micros() / 16) as u64;
        let range = (u64::BITS - sixteenths.leading_zeros()) as usize;
        self.counts[range.min(Self::RANGES - 1)] += 1;
    }

    /// Durations in each range.
    pub fn counts(&self) -> &[u64; Self::RANGES] {
        &self.counts
    }

    /// The end of a range: every duration in it is shorter. `None` for the last one.
    pub fn end(range: usize) -> Option<Duration> {
        (range + 1 < Self::RANGES).then(|| Duration::from_micros(16 << range))
    }

    /// Durations counted.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The end of the range that holds the duration which a share of `share` are no longer than;
    /// `None` if there is none, or it has no end.
    pub fn quantile(&self, share: f64) -> Option<Duration> {
        let wanted = (self.total() as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        let range = self.counts.iter().position(|count| {
            seen += count;
            seen >= wanted
        })?;
        Self::end(range)
    }

    fn since(&self, earlier: &Self) -> Self {
        let mut counts = self.counts;
        for (count, earlier) in counts.iter_mut().zip(earlier.counts) {
            *count = count.saturating_sub(earlier);
        }
        Self { counts }
    }
}

impl Counters {
    /// An expert that was read ahead for nothing.
    pub(crate) fn wasted(&mut self, bytes: u64) {
        self.ahead_wasted += 1;
        self.ahead_wasted_bytes += bytes;
    }

    /// A wait of the compute thread.
    pub(crate) fn waited(&mut self, time: Duration) {
        self.wait_ns += time.as_nanos() as u64;
        self.wait.add(time);
    }

    /// The end of a read; `warm_up` says that it was one to warm up.
    pub(crate) fn finished(&mut self, result: &Result<JobStats, ReadError>, warm_up: bool) {
        match result {
            Ok(stats) => {
                self.loads += 1;
                self.bytes += stats.bytes;
                if warm_up {
                    self.warm_up_loads += 1;
                    self.warm_up_bytes += stats.bytes;
                }
                self.reads += stats.reads;
                self.direct_reads += stats.direct_reads;
                self.fallbacks += stats.fallbacks;
                self.retries += stats.retries;
                self.checked_bytes += stats.checked;
                self.check_ns += stats.checking.as_nanos() as u64;
                self.service_ns += stats.service.as_nanos() as u64;
                self.service.add(stats.service);
            }
            Err(ReadError::Aborted { bytes, reads, .. }) => {
                self.bytes += bytes;
                self.reads += reads;
                if warm_up {
                    self.warm_up_bytes += bytes;
                    self.warm_up_wasted_bytes += bytes;
                } else {
                    self.ahead_dropped += 1;
                    self.ahead_wasted_bytes += bytes;
                }
            }
            Err(error) => {
                self.failures += 1;
                self.retries += u64::from(error.may_pass());
            }
        }
    }

    /// Bytes that were read for steps: on demand or ahead, wrong guesses included, and not to warm up.
    pub fn step_bytes(&self) -> u64 {
        self.bytes.saturating_sub(self.warm_up_bytes)
    }

    /// Bytes that nobody asked for before their step began: those read for steps less what was read ahead.
    pub fn demand_bytes(&self) -> u64 {
        let ahead = [self.ahead_useful_bytes, self.ahead_late_bytes, self.ahead_wasted_bytes];
        ahead.into_iter().fold(self.step_bytes(), u64::saturating_sub)
    }

    /// What was added after `earlier`, a copy taken from the same store.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            hits: self.hits.saturating_sub(earlier.hits),
            misses: self.misses.saturating_sub(earlier.misses),
            evictions: self.evictions.saturating_sub(earlier.evictions),
            ahead_ready: self.ahead_ready.saturating_sub(earlier.ahead_ready),
            ahead_late: self.ahead_late.saturating_sub(earlier.ahead_late),
            ahead_asked: self.ahead_asked.saturating_sub(earlier.ahead_asked),
            ahead_dropped: self.ahead_dropped.saturating_sub(earlier.ahead_dropped),
            ahead_wasted: self.ahead_wasted.saturating_sub(earlier.ahead_wasted),
            warm_up_loads: self.warm_up_loads.saturating_sub(earlier.warm_up_loads),
            loads: self.loads.saturating_sub(earlier.loads),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            warm_up_bytes: self.warm_up_bytes.saturating_sub(earlier.warm_up_bytes),
            warm_up_wasted_bytes: self.warm_up_wasted_bytes.saturating_sub(earlier.warm_up_wasted_bytes),
            ahead_useful_bytes: self.ahead_useful_bytes.saturating_sub(earlier.ahead_useful_bytes),
            ahead_late_bytes: self.ahead_late_bytes.saturating_sub(earlier.ahead_late_bytes),
            ahead_wasted_bytes: self.ahead_wasted_bytes.saturating_sub(earlier.ahead_wasted_bytes),
            reads: self.reads.saturating_sub(earlier.reads),
            direct_reads: self.direct_reads.saturating_sub(earlier.direct_reads),
            fallbacks: self.fallbacks.saturating_sub(earlier.fallbacks),
            retries: self.retries.saturating_sub(earlier.retries),
            service_ns: self.service_ns.saturating_sub(earlier.service_ns),
            checked_bytes: self.checked_bytes.saturating_sub(earlier.checked_bytes),
            check_ns: self.check_ns.saturating_sub(earlier.check_ns),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            failures: self.failures.saturating_sub(earlier.failures),
            slots_released: self.slots_released.saturating_sub(earlier.slots_released),
            slots_regained: self.slots_regained.saturating_sub(earlier.slots_regained),
            service: self.service.since(&earlier.service),
            wait: self.wait.since(&earlier.wait),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_fall_into_their_ranges() {
        let mut found = Histogram::default();
        for (micros, range) in
            [(0, 0), (15, 0), (16, 1), (31, 1), (32, 2), (1_000, 6), (u64::MAX / 2000, Histogram::RANGES - 1)]
        {
            let before = found;
            found.add(Duration::from_micros(micros));
            assert_eq!(found.since(&before).counts()[range], 1, "{micros}");
            assert!(Histogram::end(range).is_none_or(|end| Duration::from_micros(micros) < end));
        }
        assert_eq!(found.total(), 7);
        assert_eq!(found.quantile(0.5), Some(Duration::from_micros(32)));
        assert_eq!(found.quantile(1.0), None);
        assert_eq!(Histogram::default().quantile(0.5), None);
    }
}
