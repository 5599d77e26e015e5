//! How many tokens to draft: as many as measurements say is fastest.
//!
//! A pass over `d` drafts costs what passes of `1 + d` rows were measured to take, and what drafting takes; it brings one
//! token and as many drafts as are right from the first one on. The depth with the most tokens per second wins. What was
//! never measured is put in relation to what was, and weighs little.
//!
//! Trying costs time, so it begins with one draft, goes on to at most twice what was tried, and there is an account of what
//! drafting is expected to have lost against passes of one token: trying stops where the account is overdrawn. That bounds
//! the loss whatever the estimates say; what was gained before covers only a few passes, so that a change for the
//! worse is noticed. The constants are what did best in simulated worlds (the tests below).

use std::time::Duration;

use super::MAX_DEPTH;

/// Rows of the longest verifying pass.
const MAX_ROWS: usize = MAX_DEPTH + 1;
/// Passes after which a measured time counts half.
const TIME_HALF_LIFE: f64 = 48.0;
/// Passes after which an accepted or rejected draft counts half.
const SHARE_HALF_LIFE: f64 = 128.0;
/// Drafted tokens after which the time of drafting one counts half: it hardly changes.
const DRAFT_HALF_LIFE: f64 = 14.0;
/// How many drafts are taken to be right before any was verified, and how many observations that is worth.
const FIRST_SHARE: (f64, f64) = (0.7, 2.0);
/// Observations that the share of all positions is worth at each.
const SHARE_WEIGHT: f64 = 4.0;
/// How many measurements a guess at a pass's time is worth.
const GUESS_WEIGHT: f64 = 2.0;
/// Of the experts that a row more wants, so many are not those of the rows before it (union law, docs/cache.md).
const NEW_EXPERTS: f64 = 0.65;
/// What a row more costs at least, as a share of a pass of one row.
const LEAST_ROW: f64 = 0.10;
/// Drafting must promise so much more than a pass of one token.
const WORTHWHILE: f64 = 1.01;
/// Passes of one token that come first: the very first one often finds nothing in memory and is not counted.
const FIRST_PASSES: u64 = 3;
/// Passes with drafts that are tried before drafting can be called not worth it.
const PROBES: f64 = 1.5;
/// Passes after which one of one row is measured anew, or drafting is tried again; fewer in the beginning, while the
/// gain is not clear.
const STALE: u64 = 64;
const FIRST_STALE: u64 = 6;
const CLEAR: f64 = 1.4;
/// A pass that takes so many times what was expected was disturbed and counts as so many.
const DISTURBED: f64 = 2.0;
/// Passes between trials of the next depths, which must promise nearly as much as the best.
const TRIAL: u64 = 16;
const PROMISING: f64 = 0.97;
/// The account: what may be lost in passes of one row, and per time; what of gains is kept to be lost.
const OVERDRAFT: (f64, f64) = (2.0, 0.004);
const CREDIT: f64 = 5.0;
/// Drafting is tried again only where less of the time was lost.
const RETRY: f64 = 0.004;

/// What a pass and the drafting before it brought and took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Observed {
    /// Tokens drafted.
    pub drafted: usize,
    /// Of these, verified.
    pub verified: usize,
    /// Of these, right.
    pub accepted: usize,
    /// Time for drafting.
    pub drafting: Duration,
    /// Time of the pass.
    pub pass: Duration,
    /// The part of it that waited for experts.
    pub waited: Duration,
}

/// A mean in which old observations fade.
#[derive(Clone, Copy, Debug, Default)]
struct Mean {
    weight: f64,
    value: f64,
}

impl Mean {
    fn fade(&mut self, half_life: f64) {
        self.weight *= 0.5f64.powf(1.0 / half_life);
    }

    fn add(&mut self, value: f64) {
        self.value = (self.weight * self.value + value) / (self.weight + 1.0);
        self.weight += 1.0;
    }

    /// With a guess that is worth `weight` observations.
    fn with(&self, guess: f64, weight: f64) -> f64 {
        (self.weight * self.value + weight * guess) / (self.weight + weight)
    }
}

/// Chooses the depth of every draft. One a model: what it knows outlives a sequence.
#[derive(Clone, Debug, Default)]
pub struct Controller {
    /// Seconds of a pass, by rows less one.
    passes: [Mean; MAX_ROWS],
    /// Share of a pass of one row that waits for experts.
    waiting: Mean,
    /// Seconds of drafting a token.
    drafting: Mean,
    /// Share of drafts that are right where all before them are, by position.
    right: [Mean; MAX_DEPTH],
    /// Seconds lost by drafting, less those gained.
    lost: f64,
    /// Seconds of all passes.
    spent: f64,
    /// Passes so far.
    count: u64,
    /// Passes since this depth was last used.
    since: [u64; MAX_ROWS],
}

/// What the controller expects of a depth.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Forecast {
    /// Tokens drafted.
    pub depth: usize,
    /// Tokens that come out of a pass.
    pub tokens: f64,
    /// Seconds that it takes, drafting included.
    pub seconds: f64,
}

impl Forecast {
    fn rate(&self) -> f64 {
        self.tokens / self.seconds.max(f64::MIN_POSITIVE)
    }
}

impl Controller {
    /// How many tokens to draft now.
    pub fn depth(&self) -> usize {
        let single = self.passes[0];
        if self.count < FIRST_PASSES || self.lost > OVERDRAFT.0 * single.value + OVERDRAFT.1 * self.spent {
            return 0;
        }
        let drafted = &self.passes[1..];
        let deepest = drafted.iter().rposition(|pass| pass.weight > 0.2).map_or(0, |at| at + 1);
        let best = self.best().min((2 * deepest).max(1));
        if drafted.iter().map(|pass| pass.weight).sum::<f64>() < PROBES {
            return best.max(1);
        }
        let turn = self.count % TRIAL;
        let promises = |depth: usize| self.forecast(depth).rate() >= PROMISING * self.forecast(best).rate();
        match best {
            0 if self.since[1] >= STALE && self.lost <= RETRY * self.spent => 1,
            0 => 0,
            _ if self.since[0] >= self.stale(best) => 0,
            _ if turn == 0 && best < MAX_DEPTH && promises(best + 1) => best + 1,
            _ if turn == TRIAL / 2 && best > 1 && promises(best - 1) => best - 1,
            _ => best,
        }
    }

    /// Passes after which one of one row is measured anew while passes with `best` drafts are run.
    fn stale(&self, best: usize) -> u64 {
        let gain = self.forecast(best).rate() / self.forecast(0).rate();
        match gain > CLEAR {
            true => (STALE as f64 * gain) as u64,
            false => (self.count / 3).clamp(FIRST_STALE, STALE),
        }
    }

    /// The depth with the most tokens per second; 0 unless another is clearly better.
    fn best(&self) -> usize {
        let single = self.forecast(0).rate();
        let all = (1..=MAX_DEPTH).map(|depth| self.forecast(depth));
        let best = all.max_by(|a, b| a.rate().total_cmp(&b.rate()));
        best.filter(|best| best.rate() >= WORTHWHILE * single).map_or(0, |best| best.depth)
    }

    /// What is expected of drafting `depth` tokens.
    pub fn forecast(&self, depth: usize) -> Forecast {
        let (mut tokens, mut all_right) = (1.0, 1.0);
        let known = self.pooled();
        for right in &self.right[..depth] {
            all_right *= right.with(known, SHARE_WEIGHT);
            tokens += all_right;
        }
        Forecast { depth, tokens, seconds: self.pass(depth) + self.drafting.value * depth as f64 }
    }

    /// The share of drafts that are right, over all positions.
    fn pooled(&self) -> f64 {
        let weight: f64 = self.right.iter().map(|right| right.weight).sum();
        let right: f64 = self.right.iter().map(|right| right.weight * right.value).sum();
        (right + FIRST_SHARE.0 * FIRST_SHARE.1) / (weight + FIRST_SHARE.1)
    }

    /// Seconds of a pass with `depth` drafts.
    fn pass(&self, depth: usize) -> f64 {
        let single = self.passes[0].value;
        if depth == 0 {
            return single;
        }
        let mut row = Mean { weight: 1.0, value: single * (NEW_EXPERTS * self.waiting.value + LEAST_ROW) };
        for (more, pass) in self.passes.iter().enumerate().skip(1) {
            let weight = pass.weight * more as f64;
            let each = (pass.value - single) / more as f64;
            if weight > 0.0 {
                row = Mean { weight: row.weight + weight, value: row.with(each, weight) };
            }
        }
        self.passes[depth].with(single + row.value.max(0.0) * depth as f64, GUESS_WEIGHT)
    }

    /// Takes in what a pass brought.
    pub fn observe(&mut self, seen: &Observed) {
        let (mut pass, drafting) = (seen.pass.as_secs_f64(), seen.drafting.as_secs_f64());
        let depth = seen.verified.min(MAX_DEPTH);
        self.count += 1;
        self.spent += pass + drafting;
        if self.count == 1 {
            return;
        }
        if self.count > FIRST_PASSES {
            pass = pass.min(DISTURBED * self.pass(depth));
        }
        self.since.iter_mut().for_each(|since| *since += 1);
        self.since[depth] = 0;
        self.passes.iter_mut().for_each(|mean| mean.fade(TIME_HALF_LIFE));
        self.right.iter_mut().for_each(|mean| mean.fade(SHARE_HALF_LIFE));
        self.passes[depth].add(pass);
        if depth == 0 {
            self.waiting.fade(TIME_HALF_LIFE);
            self.waiting.add(seen.waited.as_secs_f64() / pass.max(f64::MIN_POSITIVE));
        }
        if seen.drafted > 0 {
            self.drafting.fade(DRAFT_HALF_LIFE);
            self.drafting.add(drafting / seen.drafted as f64);
            for (at, right) in self.right[..depth].iter_mut().enumerate().take(seen.accepted + 1) {
                right.add(if at < seen.accepted { 1.0 } else { 0.0 });
            }
            // What such passes take, not what this one took: the account is about depths, not about luck.
            let single = self.passes[0].value;
            let gained = (1 + seen.accepted) as f64 * single - (self.pass(depth) + drafting);
            self.lost = (self.lost - gained).max(-CREDIT * single);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::Rng;

    /// A machine and a text. A pass of one row takes a second on average.
    #[derive(Clone, Copy, Debug)]
    struct World {
        /// What every row more takes.
        row: f64,
        /// What drafting a token takes.
        draft: f64,
        /// With which probability a draft is right.
        right: f64,
        /// By how much passes vary.
        noise: f64,
        /// How many take four times as long.
        disturbed: f64,
    }

    impl World {
        /// Seconds per token of a run of `tokens`; under a new controller unless the depth is fixed.
        fn run(&self, tokens: usize, fixed: Option<usize>, seed: u64) -> f64 {
            let mut rng = Rng::new(7919 * seed);
            let mut controller = Controller::default();
            let (mut done, mut time) = (0, 0.0);
            while done < tokens {
                let depth = fixed.unwrap_or_else(|| controller.depth()).min(tokens - done - 1);
                let accepted = (0..depth).take_while(|_| rng.next_unit() < self.right).count();
                let mut pass = 1.0 + self.row * (depth as f64).powf(0.9);
                pass *= 1.0 + self.noise * (2.0 * rng.next_unit() - 1.0);
                pass *= if rng.next_unit() < self.disturbed { 4.0 } else { 1.0 };
                pass *= if done == 0 { 2.0 } else { 1.0 };
                let drafting = self.draft * depth as f64;
                // Rows are expensive where their experts have to be read.
                let waited = pass * (1.8 * (self.row - 0.1)).clamp(0.0, 0.95);
                controller.observe(&Observed {
                    drafted: depth,
                    verified: depth,
                    accepted,
                    drafting: Duration::from_secs_f64(drafting),
                    pass: Duration::from_secs_f64(pass),
                    waited: Duration::from_secs_f64(waited),
                });
                done += 1 + accepted;
                time += pass + drafting;
            }
            time / done as f64
        }

        fn mean(&self, tokens: usize, fixed: Option<usize>) -> f64 {
            // As many tokens at any length, so that luck evens out.
            let runs = 24 * 1024 / tokens as u64;
            (1..=runs).map(|seed| self.run(tokens, fixed, seed)).sum::<f64>() / runs as f64
        }
    }

    fn worlds() -> Vec<World> {
        let mut worlds = Vec::new();
        for (noise, disturbed) in [(0.1, 0.0), (0.6, 0.0), (0.3, 0.03)] {
            for row in [0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8] {
                for right in [0.0, 0.3, 0.5, 0.7, 0.8, 0.9, 1.0] {
                    worlds.push(World { row, draft: 0.03, right, noise, disturbed });
                }
            }
        }
        worlds
    }

    /// Over 256 tokens, whatever a row costs, and whatever share of drafts is right.
    #[test]
    fn drafting_loses_no_more_than_may_be_lost() {
        for world in worlds() {
            let ratio = world.mean(256, Some(0)) / world.mean(256, None);
            assert!(ratio >= 0.97, "{world:?}: {ratio:.3}");
        }
    }

    /// Over 1,024 tokens it comes close to the best depth there is in hindsight.
    #[test]
    fn it_gets_most_of_what_there_is_to_gain() {
        let mut ratios = Vec::new();
        for world in worlds() {
            let ours = world.mean(1024, None);
            let best = (0..=MAX_DEPTH).map(|depth| world.mean(1024, Some(depth))).fold(f64::MAX, f64::min);
            assert!(best / ours >= 0.93, "{world:?}: {:.3}", best / ours);
            ratios.push(best / ours);
        }
        let mean = ratios.iter().sum::<f64>() / ratios.len() as f64;
        assert!(mean >= 0.97, "{mean:.3} on average");
    }

    /// Drafts that stop being right are noticed within a few passes.
    #[test]
    fn a_change_for_the_worse_is_noticed() {
        let mut controller = Controller::default();
        let pass = |controller: &mut Controller, depth: usize, accepted: usize| {
            controller.observe(&Observed {
                drafted: depth,
                verified: depth,
                accepted,
                drafting: Duration::from_millis(20 * depth as u64),
                pass: Duration::from_millis(1000 + 300 * depth as u64),
                waited: Duration::from_millis(500),
            });
        };
        for _ in 0..200 {
            let depth = controller.depth();
            pass(&mut controller, depth, depth);
        }
        assert!(controller.depth() >= 4);
        let mut wasted = 0;
        for _ in 0..256 {
            let depth = controller.depth();
            pass(&mut controller, depth, 0);
            wasted += depth;
        }
        assert!(wasted < 60, "{wasted} drafts in vain");
    }
}
