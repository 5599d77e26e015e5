//! What streaming cost, in numbers that only grow (streaming spec section 13).

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
    /// Experts read completely. Equal to `misses` unless reads failed or steps were
    /// abandoned.
    pub loads: u64,
    /// Bytes read by `loads`.
    pub bytes: u64,
    /// Reads issued by `loads`.
    pub reads: u64,
    /// Time that workers spent on `loads`, in nanoseconds; several workers add up,
    /// so it may exceed wall time.
    pub service_ns: u64,
    /// Time that the compute thread spent waiting for an expert, in nanoseconds: the
    /// part of wall time that the disk is responsible for.
    pub wait_ns: u64,
    /// Loads that failed.
    pub failures: u64,
}

impl Counters {
    /// What was added after `earlier`, a copy taken from the same store.
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            requests: self.requests.saturating_sub(earlier.requests),
            hits: self.hits.saturating_sub(earlier.hits),
            misses: self.misses.saturating_sub(earlier.misses),
            loads: self.loads.saturating_sub(earlier.loads),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            reads: self.reads.saturating_sub(earlier.reads),
            service_ns: self.service_ns.saturating_sub(earlier.service_ns),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
            failures: self.failures.saturating_sub(earlier.failures),
        }
    }
}
