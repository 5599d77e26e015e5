//! Whether reading ahead is worth it, from what the counters say.
//!
//! Reads ahead only use a disk that would be idle, so they gain at most the share of the time
//! in which nothing waits for it, and they need guesses that are often enough right
//! (docs/streaming.md). Neither is known beforehand: reading ahead is tried for a while,
//! and goes on as long as it pays. Guesses cost arithmetic, so there are none while every expert is in memory.

use std::time::{Duration, Instant};

use crate::counters::Counters;

/// What the user wants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LookAhead {
    /// Where the counters say that it gains.
    #[default]
    Auto,
    /// Always.
    On,
    /// Never.
    Off,
}

/// Steps after which a decision is made again.
const WINDOW: u32 = 256;
/// Guesses after which those that are mostly wrong are stopped at once.
const EVIDENCE: u64 = 24;
/// Steps without a miss after which there is nothing to guess at, until the next miss.
const QUIET: u32 = 32;
/// Windows to wait after one that did not pay, before the next try.
const PAUSE: u32 = 16;
/// Share of the time in which compute waits for nothing, below which the disk has no time to
/// give away.
const IDLE: f64 = 0.03;
/// Share of the bytes read ahead that must have been wanted.
const USEFUL: f64 = 0.25;

/// Decides window by window.
#[derive(Clone, Debug)]
pub(crate) struct Controller {
    mode: LookAhead,
    /// What the counters say, which counts in [`LookAhead::Auto`].
    pays: bool,
    steps: u32,
    /// Windows until the next try.
    pause: u32,
    /// What the counters were when the window began, and the time worked in it.
    window: Option<Counters>,
    worked: Duration,
    /// Up to when time was counted; `None` while nobody asks for anything.
    counted: Option<Instant>,
    /// Misses so far, and the steps since the last one.
    misses: u64,
    quiet: u32,
}

impl Controller {
    pub(crate) fn new(mode: LookAhead) -> Self {
        Self {
            mode,
            pays: true,
            steps: 0,
            pause: 0,
            window: None,
            worked: Duration::ZERO,
            counted: None,
            misses: 0,
            quiet: 0,
        }
    }

    /// Changes what the user wants; what the counters said before is not forgotten.
    pub(crate) fn set_mode(&mut self, mode: LookAhead) {
        self.mode = mode;
        self.steps = 0;
        self.window = None;
    }

    pub(crate) fn is_on(&self) -> bool {
        match self.mode {
            LookAhead::On => true,
            LookAhead::Off => false,
            LookAhead::Auto => self.pays && self.quiet < QUIET,
        }
    }

    /// Somebody asks for something: time counts from now on. What passed before is nobody's, however long a
    /// person thought.
    pub(crate) fn work_begins(&mut self, now: Instant) {
        self.counted = Some(now);
    }

    /// Nobody asks for anything any more.
    pub(crate) fn work_ends(&mut self, now: Instant) {
        self.count(now);
        self.counted = None;
    }

    fn count(&mut self, now: Instant) {
        if let Some(before) = self.counted.replace(now) {
            self.worked += now.saturating_duration_since(before);
        }
    }

    /// A step begins.
    pub(crate) fn observe(&mut self, counters: &Counters, now: Instant) {
        self.quiet = if counters.misses == self.misses { self.quiet.saturating_add(1) } else { 0 };
        self.misses = counters.misses;
        if self.mode != LookAhead::Auto {
            return;
        }
        self.count(now);
        let Some(before) = self.window else {
            self.open_window(counters);
            self.steps = 1;
            return;
        };
        self.steps += 1;
        let found = counters.since(&before);
        if self.steps >= WINDOW {
            self.decide(&found);
        } else if self.pays && found.ahead_asked >= EVIDENCE && mostly_wrong(&found) {
            self.pays = false;
            self.pause = PAUSE;
        } else {
            return;
        }
        self.steps = 0;
        self.open_window(counters);
    }

    fn open_window(&mut self, counters: &Counters) {
        self.window = Some(*counters);
        self.worked = Duration::ZERO;
    }

    fn decide(&mut self, found: &Counters) {
        if self.pays {
            let waited = found.wait_ns as f64 / self.worked.as_nanos().max(1) as f64;
            if mostly_wrong(found) || 1.0 - waited < IDLE {
                self.pays = false;
                self.pause = PAUSE;
            }
        } else if self.pause > 0 {
            self.pause -= 1;
        } else {
            self.pays = true;
        }
    }
}

/// Whether too little of what was read ahead was wanted. What was wanted before it was there counts
/// as a whole expert: the part that had been read is not known.
fn mostly_wrong(found: &Counters) -> bool {
    let expert = found.bytes as f64 / found.loads.max(1) as f64;
    let right = (found.ahead_ready + found.ahead_late) as f64 * expert;
    let wrong = found.ahead_wasted_bytes as f64;
    right < USEFUL * (right + wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a window of steps of a millisecond each, at whose end the counters are `end`.
    fn window(controller: &mut Controller, now: &mut Instant, counters: &mut Counters, add: Counters) {
        for step in 0..WINDOW {
            *now += Duration::from_millis(1);
            if step + 1 == WINDOW {
                counters.misses += add.misses;
                counters.wait_ns += add.wait_ns;
                counters.ahead_ready += add.ahead_ready;
                counters.ahead_asked += add.ahead_asked;
                counters.ahead_wasted_bytes += add.ahead_wasted_bytes;
                (counters.loads, counters.bytes) = (counters.loads + add.loads, counters.bytes + add.bytes);
            }
            controller.observe(counters, *now);
        }
    }

    /// Experts of 10 bytes, of which 30 were read ahead and wanted and 70 were not.
    fn good() -> Counters {
        let (loads, bytes) = (100, 1000);
        Counters { misses: 30, ahead_ready: 30, ahead_wasted_bytes: 700, loads, bytes, ..Counters::default() }
    }

    fn after(mode: LookAhead, add: Counters, windows: u32) -> bool {
        let (mut now, mut counters) = (Instant::now(), Counters::default());
        let mut controller = Controller::new(mode);
        for _ in 0..windows {
            window(&mut controller, &mut now, &mut counters, add);
        }
        controller.is_on()
    }

    #[test]
    fn it_goes_on_while_it_pays() {
        let good = good();
        assert!(after(LookAhead::Auto, good, 9));
        let wrong = Counters { ahead_ready: 20, ahead_wasted_bytes: 800, ..good };
        assert!(!after(LookAhead::Auto, wrong, 1));
        // The disk is busy for all but two hundredths of the time.
        let busy = Counters { wait_ns: u64::from(WINDOW) * 980_000, ..good };
        assert!(!after(LookAhead::Auto, busy, 1));
        // Nothing is missed, so a guess gains nothing; with the first miss there are guesses again.
        assert!(!after(LookAhead::Auto, Counters::default(), 1));
        let mut controller = Controller::new(LookAhead::Auto);
        let mut counters = Counters::default();
        window(&mut controller, &mut Instant::now(), &mut counters, Counters::default());
        counters.misses += 1;
        controller.observe(&counters, Instant::now());
        assert!(controller.is_on());
        assert!(after(LookAhead::On, wrong, 3));
        assert!(!after(LookAhead::Off, good, 40));
    }

    /// A turn is a quarter of a window, and the disk is busy for all but two hundredths of it; then a person
    /// thinks for a minute.
    #[test]
    fn time_in_which_a_person_thinks_does_not_count() {
        let mut controller = Controller::new(LookAhead::Auto);
        let (mut now, mut counters) = (Instant::now(), Counters::default());
        for _ in 0..4 {
            controller.work_begins(now);
            for _ in 0..WINDOW / 4 {
                controller.observe(&counters, now);
                now += Duration::from_millis(1);
                counters.wait_ns += 980_000;
                counters.misses += 1;
            }
            controller.work_ends(now);
            now += Duration::from_secs(60);
        }
        controller.work_begins(now);
        controller.observe(&counters, now);
        assert!(!controller.is_on());
    }

    #[test]
    fn it_is_tried_again_after_a_pause() {
        let wrong = Counters { ahead_ready: 0, ..good() };
        assert!(!after(LookAhead::Auto, wrong, 1 + PAUSE));
        assert!(after(LookAhead::Auto, wrong, 2 + PAUSE));
        assert!(!after(LookAhead::Auto, wrong, 3 + PAUSE));
    }

    #[test]
    fn wrong_guesses_stop_before_the_window_ends() {
        let now = Instant::now();
        for (right, on) in [(23, true), (0, false)] {
            let mut controller = Controller::new(LookAhead::Auto);
            controller.observe(&Counters::default(), now);
            let wrong = 24 - right;
            let some = Counters {
                misses: 24,
                ahead_asked: 24,
                ahead_ready: right,
                ahead_wasted_bytes: 10 * wrong,
                loads: 24,
                bytes: 240,
                ..Counters::default()
            };
            controller.observe(&some, now);
            assert_eq!(controller.is_on(), on);
            // Another mode and back: what was seen still counts.
            controller.set_mode(LookAhead::On);
            assert!(controller.is_on());
            controller.set_mode(LookAhead::Auto);
            assert_eq!(controller.is_on(), on);
        }
    }
}
