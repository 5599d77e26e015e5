//! Whether reading ahead is worth it, from what the counters say.
//!
//! Reads ahead only use a disk that would be idle, so they gain at most the share of the time
//! in which nothing waits for it, and they need guesses that are often enough right
//! (performance spec section 2.2). Neither is known beforehand: reading ahead is tried for a while, and
//! goes on as long as it pays.

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
    on: bool,
    steps: u32,
    /// Windows until the next try.
    pause: u32,
    window: Option<(Instant, Counters)>,
}

impl Controller {
    pub(crate) fn new(mode: LookAhead) -> Self {
        Self { mode, on: mode != LookAhead::Off, steps: 0, pause: 0, window: None }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.on
    }

    /// A step begins.
    pub(crate) fn observe(&mut self, counters: &Counters, now: Instant) {
        if self.mode != LookAhead::Auto {
            return;
        }
        let (started, before) = *self.window.get_or_insert((now, *counters));
        self.steps += 1;
        if self.steps < WINDOW {
            return;
        }
        let found = counters.since(&before);
        self.decide(&found, now.duration_since(started));
        self.steps = 0;
        self.window = Some((now, *counters));
    }

    fn decide(&mut self, found: &Counters, wall: Duration) {
        if self.on {
            let wanted = found.ahead_useful_bytes as f64;
            let wrong = found.ahead_wasted_bytes as f64;
            let waited = found.wait_ns as f64 / wall.as_nanos().max(1) as f64;
            let pays = wanted >= USEFUL * (wanted + wrong) && 1.0 - waited >= IDLE;
            if !pays && found.misses > 0 {
                self.on = false;
                self.pause = PAUSE;
            }
        } else if self.pause > 0 {
            self.pause -= 1;
        } else {
            self.on = true;
        }
    }
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
                counters.ahead_useful_bytes += add.ahead_useful_bytes;
                counters.ahead_wasted_bytes += add.ahead_wasted_bytes;
            }
            controller.observe(counters, *now);
        }
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
        let good =
            Counters { misses: 9, ahead_useful_bytes: 30, ahead_wasted_bytes: 70, ..Counters::default() };
        assert!(after(LookAhead::Auto, good, 9));
        let wrong = Counters { ahead_useful_bytes: 20, ahead_wasted_bytes: 80, ..good };
        assert!(!after(LookAhead::Auto, wrong, 1));
        // The disk is busy for all but two hundredths of the time.
        let busy = Counters { wait_ns: u64::from(WINDOW) * 980_000, ..good };
        assert!(!after(LookAhead::Auto, busy, 1));
        // Nothing is missed: nothing is lost either.
        assert!(after(LookAhead::Auto, Counters::default(), 3));
        assert!(after(LookAhead::On, wrong, 3));
        assert!(!after(LookAhead::Off, good, 40));
    }

    #[test]
    fn it_is_tried_again_after_a_pause() {
        let wrong = Counters { misses: 9, ahead_wasted_bytes: 80, ..Counters::default() };
        assert!(!after(LookAhead::Auto, wrong, 1 + PAUSE));
        assert!(after(LookAhead::Auto, wrong, 2 + PAUSE));
        assert!(!after(LookAhead::Auto, wrong, 3 + PAUSE));
    }
}
