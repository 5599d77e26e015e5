//! What was measured, and what it says about the next job.

use std::time::Duration;

use super::job::Forecast;
use crate::session::Stats;

/// How much of what was known a new measurement leaves.
const KEEP: f64 = 0.9;

/// Speeds of this engine so far, later ones counting more.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Rates {
    /// Seconds of prompts by their tokens.
    prefill: Line,
    /// Seconds of a token of an answer.
    token: Mean,
    /// Tokens of an answer.
    answer: Mean,
}

impl Rates {
    /// Takes in what an answer cost, and how long it was if it was not `cut` by a cancellation.
    pub fn learn(&mut self, stats: &Stats, cut: bool) {
        if stats.prompt_tokens > 0 && stats.new_tokens > 0 {
            self.prefill.add(stats.prompt_tokens as f64, stats.prefill.as_secs_f64());
        }
        if stats.new_tokens > 1 {
            self.token.add(stats.decode.as_secs_f64() / (stats.new_tokens - 1) as f64);
        }
        if !cut {
            self.answer.add(stats.new_tokens as f64);
        }
    }

    /// What is expected of a prompt with this many tokens to compute, that is to wait so long.
    pub fn forecast(&self, tokens: usize, wait: Option<Duration>) -> Forecast {
        let prefill = self.prefill.at(tokens as f64).map(seconds);
        let tokens_per_second =
            self.token.value().filter(|seconds| *seconds > 0.0).map(|seconds| 1.0 / seconds);
        // The first token is chosen from what the prompt's last pass leaves.
        Forecast { wait, prefill, first_token: prefill, tokens_per_second }
    }

    /// How long such a job takes in all, if its answer is as long as others were.
    pub fn whole(&self, tokens: usize, max_tokens: Option<usize>) -> Option<Duration> {
        let prefill = self.prefill.at(tokens as f64)?;
        let answer = self.answer.value()?.min(max_tokens.map_or(f64::INFINITY, |most| most as f64));
        Some(seconds(prefill + answer * self.token.value().unwrap_or(0.0)))
    }
}

fn seconds(value: f64) -> Duration {
    Duration::try_from_secs_f64(value.max(0.0)).unwrap_or(Duration::MAX)
}

/// A mean in which later values count more.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    weight: f64,
    sum: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.weight = self.weight * KEEP + 1.0;
        self.sum = self.sum * KEEP + value;
    }

    fn value(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

/// `y = a + b x` through what was seen: a pass has a cost of its own, as most experts are read once however many tokens
/// want them.
#[derive(Clone, Copy, Debug, Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

impl Line {
    fn add(&mut self, x: f64, y: f64) {
        for (sum, value) in [
            (&mut self.weight, 1.0),
            (&mut self.x, x),
            (&mut self.y, y),
            (&mut self.xx, x * x),
            (&mut self.xy, x * y),
        ] {
            *sum = *sum * KEEP + value;
        }
    }

    /// Neither part is ever negative: longer prompts do not take less time, and no prompt takes none.
    fn at(&self, x: f64) -> Option<f64> {
        if self.weight == 0.0 {
            return None;
        }
        let (mean_x, mean_y) = (self.x / self.weight, self.y / self.weight);
        let variance = self.xx / self.weight - mean_x * mean_x;
        let through_zero = mean_y / mean_x * x;
        if variance < 1e-6 * mean_x * mean_x {
            return Some(through_zero);
        }
        let slope = (self.xy / self.weight - mean_x * mean_y) / variance;
        if slope <= 0.0 {
            return Some(mean_y);
        }
        let start = mean_y - slope * mean_x;
        Some(if start < 0.0 { through_zero } else { start + slope * x })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(prompt: usize, prefill: f64, new: usize, decode: f64) -> Stats {
        Stats {
            prompt_tokens: prompt,
            new_tokens: new,
            prefill: seconds(prefill),
            decode: seconds(decode),
            ..Stats::default()
        }
    }

    fn near(found: Duration, want: f64) {
        assert!((found.as_secs_f64() - want).abs() < 1e-6, "{found:?} is not {want}");
    }

    #[test]
    fn nothing_is_promised_before_anything_is_measured() {
        assert_eq!(Rates::default().forecast(10, None), Forecast::default());
        assert_eq!(Rates::default().whole(10, Some(5)), None);
    }

    #[test]
    fn a_pass_costs_something_and_every_token_a_little_more() {
        let mut rates = Rates::default();
        rates.learn(&stats(10, 2.1, 5, 2.0), false);
        // One measurement is a rate.
        near(rates.forecast(20, None).prefill.unwrap(), 4.2);
        for tokens in [100, 200, 400] {
            rates.learn(&stats(tokens, 2.0 + 0.01 * tokens as f64, 5, 2.0), false);
        }
        let forecast = rates.forecast(300, Some(Duration::from_secs(7)));
        near(forecast.prefill.unwrap(), 5.0);
        near(forecast.first_token.unwrap(), 5.0);
        assert_eq!(forecast.wait, Some(Duration::from_secs(7)));
        assert!((forecast.tokens_per_second.unwrap() - 2.0).abs() < 1e-9);
        near(rates.whole(300, None).unwrap(), 5.0 + 5.0 * 0.5);
        near(rates.whole(300, Some(2)).unwrap(), 5.0 + 2.0 * 0.5);
    }

    #[test]
    fn noise_makes_no_nonsense() {
        let mut rates = Rates::default();
        // The longer one was faster: no slope is to be had from that.
        rates.learn(&stats(10, 3.0, 2, 1.0), false);
        rates.learn(&stats(100, 1.0, 2, 1.0), false);
        let found = rates.forecast(1000, None).prefill.unwrap();
        assert!(found > Duration::from_secs(1) && found < Duration::from_secs(3), "{found:?}");
        // A cancelled prompt says nothing.
        let before = (rates.forecast(50, None), rates.whole(50, None));
        rates.learn(&stats(50, 100.0, 0, 0.0), true);
        assert_eq!((rates.forecast(50, None), rates.whole(50, None)), before);
    }
}
