//! The clock: everything once a round, so that noise hits all alike.

use std::hint::black_box;
use std::time::Instant;

use forebay_kernels::{Kernels, Team, limits};

use crate::progress::Progress;

/// Bytes that the read limit reads at a time.
const READ: usize = 32 << 20;
/// Other meters between two measurements of the limits.
const BETWEEN_LIMITS: usize = 16;
/// Parts per thread of the multiply-add limits at a time; each takes a tenth of a millisecond.
const PARTS: usize = 16;

/// Something that is measured.
pub struct Meter<'a> {
    work: Box<dyn FnMut() + 'a>,
    /// How often the work is done in one turn.
    times: u32,
    /// About how many seconds that takes.
    expected: f64,
    /// Seconds for doing it once, one entry per turn.
    seconds: Vec<f64>,
}

impl<'a> Meter<'a> {
    /// A meter of `work`.
    pub fn new(work: impl FnMut() + 'a) -> Self {
        Self { work: Box::new(work), times: 1, expected: 0.0, seconds: Vec::new() }
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

/// Measures `limits` and `others` `rounds` times, in turns, each for about `sample` seconds; the limits
/// [`limit_turns`] times a round, so that they see the same disturbances as what they are compared with. Returns
/// the seconds of each, limits first, one entry per turn. `weight` is this part's weight in `pace`.
pub fn measure<'m>(
    mut limits: Vec<Meter<'m>>,
    mut others: Vec<Meter<'m>>,
    rounds: usize,
    sample: f64,
    pace: &mut Pace<'_>,
    weight: f64,
) -> Vec<Vec<f64>> {
    // The first time pays for caches and pages; only slow work is timed by it.
    let count = (limits.len() + others.len()) as f64;
    for (i, meter) in limits.iter_mut().chain(&mut others).enumerate() {
        let first = meter.run(1);
        let once = if first < sample { meter.run(1) } else { first };
        meter.times = (sample / once.max(1e-9)).clamp(1.0, 1e6) as u32;
        meter.expected = f64::from(meter.times) * once;
        pace.show(weight, (i + 1) as f64 / count / (rounds + 1) as f64);
    }
    let cost = |meters: &[Meter<'_>]| meters.iter().map(|meter| meter.expected).sum::<f64>();
    let round = cost(&limits) * limit_turns(others.len()) as f64 + cost(&others);
    let mut done = round;
    let mut turn = |meter: &mut Meter<'_>| {
        let seconds = meter.run(meter.times);
        meter.seconds.push(seconds);
        done += meter.expected;
        pace.show(weight, done / (round * (rounds + 1) as f64));
    };
    for _ in 0..rounds {
        if others.is_empty() {
            limits.iter_mut().for_each(&mut turn);
        }
        for some in others.chunks_mut(BETWEEN_LIMITS) {
            limits.iter_mut().for_each(&mut turn);
            some.iter_mut().for_each(&mut turn);
        }
    }
    pace.done += weight;
    limits.into_iter().chain(others).map(|meter| meter.seconds).collect()
}

/// How often the limits are measured in a round with `others` other meters.
pub fn limit_turns(others: usize) -> usize {
    others.div_ceil(BETWEEN_LIMITS).max(1)
}

/// How far the slowest time lies above the fastest, as a share of the middle one.
pub fn spread(seconds: &[f64]) -> f64 {
    let least = seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let most = seconds.iter().copied().fold(0.0, f64::max);
    if seconds.is_empty() { 0.0 } else { (most - least) / median(seconds) }
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

/// What a number of threads can do at most, in units per second; one entry per turn.
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
    fn medians_and_spreads() {
        assert_eq!(median(&[]), 0.0);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert_eq!((spread(&[]), spread(&[4.0, 1.0, 2.0])), (0.0, 1.5));
    }

    #[test]
    fn everything_is_measured_once_a_round_in_turns() {
        let log = RefCell::new(Vec::new());
        let meter = |name: &'static str| {
            let log = &log;
            Meter::new(move || {
                std::thread::sleep(std::time::Duration::from_millis(2));
                log.borrow_mut().push(name);
            })
        };
        let progress = Progress::start("measuring", Unit::Share, 0);
        let mut pace = Pace::new(&progress, 1.0);
        let others = (0..BETWEEN_LIMITS + 1).map(|_| meter("o")).collect();
        let seconds = measure(vec![meter("L")], others, 2, 0.001, &mut pace, 1.0);
        let turns: Vec<usize> = seconds.iter().map(Vec::len).collect();
        assert_eq!((turns[0], &turns[1..]), (4, &[2; BETWEEN_LIMITS + 1][..]));
        assert!(seconds.iter().flatten().all(|s| *s >= 0.002));
        let many = "o".repeat(BETWEEN_LIMITS);
        let round = format!("L{many}Lo");
        assert_eq!(log.into_inner().concat(), format!("L{many}o{round}{round}"));
    }
}
