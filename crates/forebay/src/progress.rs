//! Progress on standard error: a line that redraws itself on a terminal, a line every few seconds elsewhere.
//!
//! A thread keeps time, because one step of a giant model may take longer than anybody waits in silence.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use forebay_core::ByteSize;

use crate::console;

/// Quick work on a terminal shows nothing at all.
const FIRST_DRAW: Duration = Duration::from_millis(500);
/// Time between redraws on a terminal.
const REDRAW: Duration = Duration::from_millis(250);
/// Time between lines in a log: nothing is silent for ten seconds.
const LOG_EVERY: Duration = Duration::from_secs(8);

/// A rate is that of so much time.
const WINDOW: Duration = Duration::from_secs(20);

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes.
    Bytes,
    /// Tokens.
    Tokens,
    /// A share of the whole, shown in percent.
    Share,
}

/// Work under way. Dropping it takes its line away.
pub struct Progress {
    shared: Arc<Shared>,
    ticker: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    wake: Condvar,
}

struct State {
    done: u64,
    total: u64,
    /// Work of this run alone, which a rate is made of.
    arrived: Option<u64>,
    /// Bytes read from disk for it.
    read: u64,
    finished: bool,
}

impl Shared {
    /// Counts stay usable even if a thread died holding the lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Progress {
    /// Starts showing `label`, such as "loading". A total of 0 is "not known yet".
    pub fn start(label: &'static str, unit: Unit, total: u64) -> Self {
        let state = Mutex::new(State { done: 0, total, arrived: None, read: 0, finished: false });
        let shared = Arc::new(Shared { state, wake: Condvar::new() });
        let seen = shared.clone();
        let rich = console::stderr_is_rich();
        // Without a thread there is no progress to see, and the work goes on.
        let ticker = thread::Builder::new().name("progress".to_owned());
        let ticker = ticker.spawn(move || tick(&seen, label, unit, rich)).ok();
        Self { shared, ticker }
    }

    /// Says how far the work is.
    pub fn update(&self, done: u64, total: u64) {
        let mut state = self.shared.lock();
        (state.done, state.total) = (done, total);
    }

    /// Says how far the work is, and how many bytes were read from disk for it.
    pub fn update_read(&self, done: u64, total: u64, read: u64) {
        let mut state = self.shared.lock();
        (state.done, state.total, state.read) = (done, total, read);
    }

    /// Says how far the work is, some of which an earlier run has done; `arrived` is what this one did. The time that
    /// is left follows from the rate of the last seconds.
    pub fn update_arrived(&self, done: u64, total: u64, arrived: u64) {
        let mut state = self.shared.lock();
        (state.done, state.total, state.arrived) = (done, total, Some(arrived));
    }
}

/// Says something while progress is or may be shown.
pub fn note(text: &str) {
    if console::stderr_is_rich() {
        console::diagnose("\r\x1b[K");
    }
    console::note(text);
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.shared.lock().finished = true;
        self.shared.wake.notify_all();
        if let Some(ticker) = self.ticker.take() {
            let _ = ticker.join();
        }
    }
}

fn tick(shared: &Shared, label: &str, unit: Unit, rich: bool) {
    let started = Instant::now();
    let (mut pause, later) = if rich { (FIRST_DRAW, REDRAW) } else { (LOG_EVERY, LOG_EVERY) };
    let (mut drawn, mut before) = (false, 0);
    let mut arrivals = VecDeque::from([(started, 0)]);
    let mut state = shared.lock();
    while !state.finished {
        let (next, waited) = shared.wake.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
        state = next;
        if state.finished || !waited.timed_out() {
            continue;
        }
        let line = match state.arrived {
            Some(arrived) => {
                let moves = std::mem::replace(&mut before, state.done) < state.done;
                transfer_line(label, state.done, state.total, rate(&mut arrivals, arrived), moves)
            }
            None => {
                let line = line(label, unit, state.done, state.total, started.elapsed());
                if state.read > 0 { format!("{line}, {} read", ByteSize(state.read)) } else { line }
            }
        };
        console::diagnose(&if rich { format!("\r\x1b[K{line}") } else { format!("{line}\n") });
        (drawn, pause) = (true, later);
    }
    if drawn && rich {
        console::diagnose("\r\x1b[K");
    }
}

/// `reading the prompt: 256 of 1024 tokens, 12 s, about 36 s left`.
fn line(label: &str, unit: Unit, done: u64, total: u64, elapsed: Duration) -> String {
    let amount = |n: u64| match unit {
        Unit::Bytes => ByteSize(n).to_string(),
        Unit::Tokens | Unit::Share => n.to_string(),
    };
    let word = if unit == Unit::Tokens { " tokens" } else { "" };
    let counted = match (done, total) {
        (0, 0) => String::new(),
        _ if unit == Unit::Share => format!(" {} %,", (100.0 * done as f64 / total.max(1) as f64).floor()),
        (_, 0) => format!(" {}{word},", amount(done)),
        _ => format!(" {} of {}{word},", amount(done), amount(total)),
    };
    let left = if 0 < done && done < total {
        let rest = elapsed.as_secs_f64() * (total - done) as f64 / done as f64;
        format!(", about {} left", duration(rest))
    } else {
        String::new()
    };
    format!("{label}:{counted} {}{left}", duration(elapsed.as_secs_f64()))
}

/// Bytes per second over the last [`WINDOW`].
fn rate(arrivals: &mut VecDeque<(Instant, u64)>, arrived: u64) -> f64 {
    let now = Instant::now();
    arrivals.push_back((now, arrived));
    while arrivals.len() > 2 && now.duration_since(arrivals[0].0) > WINDOW {
        arrivals.pop_front();
    }
    let (from, before) = arrivals[0];
    arrived.saturating_sub(before) as f64 / now.duration_since(from).as_secs_f64().max(1e-3)
}

/// `downloading: 1.00 GB of 4.00 GB, 100.00 MB/s, about 30 s left`. What `moves` and does not arrive is there already, and
/// is hashed.
fn transfer_line(label: &str, done: u64, total: u64, rate: f64, moves: bool) -> String {
    let left = total.saturating_sub(done);
    let time = match left {
        0 => String::new(),
        _ if rate < 1.0 && moves => ", checking what is here".to_owned(),
        _ if rate < 1.0 => ", nothing arrives at the moment".to_owned(),
        left => format!(", about {} left", duration(left as f64 / rate)),
    };
    format!("{label}: {} of {}, {}/s{time}", ByteSize(done), ByteSize(total), ByteSize(rate as u64))
}

fn duration(seconds: f64) -> String {
    let whole = seconds.round() as u64;
    match (whole / 3600, whole / 60 % 60, whole % 60) {
        (0, 0, s) => format!("{s} s"),
        (0, m, s) => format!("{m} min {s} s"),
        (h, m, _) => format!("{h} h {m} min"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_how_far_and_how_long() {
        let at =
            |done, total, seconds| line("reading", Unit::Tokens, done, total, Duration::from_secs(seconds));
        assert_eq!(at(0, 0, 9), "reading: 9 s");
        assert_eq!(at(0, 512, 61), "reading: 0 of 512 tokens, 1 min 1 s");
        assert_eq!(at(256, 1024, 12), "reading: 256 of 1024 tokens, 12 s, about 36 s left");
        assert_eq!(at(1024, 1024, 48), "reading: 1024 of 1024 tokens, 48 s");
        assert_eq!(at(1, 7201, 1), "reading: 1 of 7201 tokens, 1 s, about 2 h 0 min left");
        let loading = line("loading", Unit::Bytes, 1_000_000, 4_000_000, Duration::from_secs(2));
        assert_eq!(loading, "loading: 1.00 MB of 4.00 MB, 2 s, about 6 s left");
        let share = line("measuring", Unit::Share, 299, 1000, Duration::from_secs(3));
        assert_eq!(share, "measuring: 29 %, 3 s, about 7 s left");
    }

    #[test]
    fn a_resumed_transfer_is_timed_by_what_this_run_fetched() {
        let line = transfer_line("downloading", 3_000_000_000, 4_000_000_000, 1e8, true);
        assert_eq!(line, "downloading: 3.00 GB of 4.00 GB, 100.00 MB/s, about 10 s left");
        let idle = |moves| transfer_line("downloading", 1, 2, 0.0, moves);
        assert!(idle(false).ends_with("0 B/s, nothing arrives at the moment"));
        assert!(idle(true).ends_with("0 B/s, checking what is here"));
        let now = Instant::now();
        let mut arrivals: VecDeque<_> =
            [(50, 0), (30, 1000), (10, 3000)].map(|(ago, n)| (now - Duration::from_secs(ago), n)).into();
        // 2000 bytes in the last ten seconds; what is older than the window does not count.
        let rate = rate(&mut arrivals, 5000);
        assert!((150.0..=200.0).contains(&rate), "{rate}");
    }

    #[test]
    fn dropping_ends_the_thread_at_once() {
        let started = Instant::now();
        Progress::start("working", Unit::Tokens, 3).update(1, 3);
        assert!(started.elapsed() < Duration::from_secs(5));
    }
}
