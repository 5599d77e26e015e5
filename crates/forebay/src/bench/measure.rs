//! The clock: everything once a round, so that noise hits all alike.

use std::hint::black_box;
use std::time::Instant;

use forebay_kernels::{Kernels, Team, limits};

use crate::progress::Progress;

/// Bytes that the read limit reads at a time.
const READ: usize = 32 << 20;
/// Parts per thread of the multiply-add limits at a time; each takes a tenth of a millisecond.
const PARTS: usize = 16;

/// Something that is measured.
pub struct Meter<'a> {
    work: Box<dyn FnMut() + 'a>,
    /// How often the work is done in one round.
    times: u32,
    /// Seconds for doing it once, one entry per round.
    seconds: Vec<f64>,
}

impl<'a> Meter<'a> {
    /// A meter of `work`.
    pub fn new(work: impl FnMut() + 'a) -> Self {
        Self { work: Box::new(work), times: 1, seconds: Vec::new() }
    }

    /// Seconds per time when it is done `times` times in a row.
    fn run(&mut self, times: u32) -> f64 {
        let started = Instant::now();
        for _ in 0..times {
            (self.work)();
        }
        started.elapsed().as_secs_f64() / f64::from(times)
    }
}

/// How far the whole measurement is.
pub struct Pace<'a> {
    progress: &'a Progress,
    done: f64,
    total: f64,
}

impl<'a> Pace<'a> {
    /// The beginning of work of the weight `total`.
    pub fn new(progress: &'a Progress, total: f64) -> Self {
        Self { progress, done: 0.0, total }
    }

    /// `share` of a part of the weight `weight` is done.
    fn show(&self, weight: f64, share: f64) {
        const SCALE: f64 = 1e6;
        self.progress.update((SCALE * (self.done + weight * share) / self.total) as u64, SCALE as u64);
    }
}

/// Measures everything `rounds` times, in turns, each for about `sample` seconds. Returns the seconds of each,
/// one entry per round. `weight` is this part's weight in `pace`.
pub fn measure(
    mut meters: Vec<Meter<'_>>,
    rounds: usize,
    sample: f64,
    pace: &mut Pace<'_>,
    weight: f64,
) -> Vec<Vec<f64>> {
    // The first time pays for caches and pages; only slow work is timed by it.
    let mut expected = Vec::with_capacity(meters.len());
    let count = meters.len() as f64;
    for (i, meter) in meters.iter_mut().enumerate() {
        let first = meter.run(1);
        let once = if first < sample { meter.run(1) } else { first };
        meter.times = (sample / once.max(1e-9)).clamp(1.0, 1e6) as u32;
        expected.push(f64::from(meter.times) * once);
        pace.show(weight, (i + 1) as f64 / count / (rounds + 1) as f64);
    }
    let round: f64 = expected.iter().sum();
    let mut done = round;
    for _ in 0..rounds {
        for (meter, expected) in meters.iter_mut().zip(&expected) {
            let seconds = meter.run(meter.times);
            meter.seconds.push(seconds);
            done += expected;
            pace.show(weight, done / (round * (rounds + 1) as f64));
        }
    }
    pace.done += weight;
    meters.into_iter().map(|meter| meter.seconds).collect()
}

/// The middle one of some numbers, the mean of the middle two if their count is even; 0 of none.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    match sorted.len() {
        0 => 0.0,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
    }
}

/// What a number of threads can do at most, in units per second; one entry per round.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Threads.
    pub threads: usize,
    /// Bytes read from memory.
    pub read: Vec<f64>,
    /// Integer multiply-adds.
    pub integer: Vec<f64>,
    /// Single-precision multiply-adds.
    pub float: Vec<f64>,
}

impl Limits {
    /// The meters of the limits of all teams, reading from `bytes`; [`collect`](Self::collect) takes what they
    /// measured.
    pub fn meters<'a>(kernels: Kernels, teams: &'a [Team], bytes: &'a [u8]) -> Vec<Meter<'a>> {
        let mut meters = Vec::new();
        for team in teams {
            let mut chunks = bytes.chunks_exact(read_len(bytes)).cycle();
            let parts = PARTS * team.threads();
            meters.push(Meter::new(move || {
                black_box(limits::read(kernels, team, chunks.next().unwrap_or_default()));
            }));
            meters.push(Meter::new(move || {
                black_box(limits::integer_multiply_adds(kernels, team, parts));
            }));
            meters.push(Meter::new(move || {
                black_box(limits::float_multiply_adds(kernels, team, parts));
            }));
        }
        meters
    }

    /// The limits from the seconds of [`meters`](Self::meters), of which it takes three per team.
    pub fn collect(
        kernels: Kernels,
        teams: &[Team],
        bytes: &[u8],
        seconds: &mut impl Iterator<Item = Vec<f64>>,
    ) -> Vec<Limits> {
        let mut rates = |work: f64| seconds.next().unwrap_or_default().iter().map(|s| work / s).collect();
        let limits = |team: &Team| {
            // What they do is what they say they do.
            let parts = PARTS * team.threads();
            let integer = limits::integer_multiply_adds(kernels, team, parts) as f64;
            let float = limits::float_multiply_adds(kernels, team, parts) as f64;
            Limits {
                threads: team.threads(),
                read: rates(read_len(bytes) as f64),
                integer: rates(integer),
                float: rates(float),
            }
        };
        teams.iter().map(limits).collect()
    }
}

/// Bytes per read, the same each time.
fn read_len(bytes: &[u8]) -> usize {
    READ.min(bytes.len()).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::progress::Unit;
    use std::cell::RefCell;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
    }

    #[test]
    fn everything_is_measured_once_a_round_in_turns() {
        let log = RefCell::new(Vec::new());
        let meters = ["a", "b"].map(|name| {
            let log = &log;
            Meter::new(move || {
                std::thread::sleep(std::time::Duration::from_millis(2));
                log.borrow_mut().push(name);
            })
        });
        let progress = Progress::start("measuring", Unit::Share, 0);
        let mut pace = Pace::new(&progress, 1.0);
        let seconds = measure(meters.into(), 3, 0.001, &mut pace, 1.0);
        assert!(seconds.iter().all(|rounds| rounds.len() == 3 && rounds.iter().all(|s| *s >= 0.002)));
        assert_eq!(log.into_inner().join(""), "abababab");
    }
}
