//! A disk of a chosen bandwidth, for experiments: every read is booked on one virtual disk and is done no
//! earlier than that disk would have done it.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Slower disks than this count as this fast, so that a slip of the pen does not stop the program for days.
const SLOWEST: u64 = 1 << 20;

pub(super) struct Throttle {
    bytes_per_second: u64,
    /// When the virtual disk is done with everything booked so far.
    free: Mutex<Option<Instant>>,
}

impl Throttle {
    pub fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(SLOWEST), free: Mutex::new(None) }
    }

    /// Books a read that starts now; returns when it may be done. Bookings are served in their order; what is
    /// less urgent comes in pieces, and none of them while a demand is outstanding.
    pub fn book(&self, bytes: usize) -> Instant {
        self.book_at(Instant::now(), bytes)
    }

    fn book_at(&self, now: Instant, bytes: usize) -> Instant {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let start = free.map_or(now, |free| free.max(now));
        let done = start + Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *free = Some(done);
        done
    }
}

/// Sleeps until then.
pub(super) fn sleep_until(then: Instant) {
    loop {
        let left = then.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        std::thread::sleep(left);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_queue_up_and_idle_time_is_lost() {
        let disk = Throttle::new(100 << 20);
        let start = Instant::now();
        let after = |at: u64, mib: usize| {
            let done = disk.book_at(start + Duration::from_millis(at), mib << 20);
            (done - start).as_millis()
        };
        assert_eq!(after(0, 10), 100);
        assert_eq!(after(0, 20), 300, "behind the first");
        assert_eq!(after(50, 10), 400);
        assert_eq!(after(1000, 10), 1100, "the disk was idle");
        assert_eq!(Throttle::new(0).bytes_per_second, SLOWEST);
    }
}
