//! Which rows go through the next pass: a share for every sequence, decided from plain numbers.
//!
//! Sequences that generate have a row each in every pass. A prompt is many rows, and while experts are read from disk it
//! pays to run as many as possible at once; but whoever generates waits for all of them. So prompts and answers take
//! turns by time: after a pass with rows of prompts come passes without any, until those have taken as long.

use std::time::Duration;

/// Rows of prompts in a pass with others, before anything is measured, and at least.
const FIRST_ROWS: usize = 64;
const FEWEST_ROWS: usize = 32;

/// How long the arithmetic for rows of prompts may keep others waiting, if reading does not take longer anyway.
const PATIENCE: f64 = 0.5;

/// How much of what was known a new measurement leaves.
const KEEP: f64 = 0.75;

/// What a sequence could run.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Wish {
    /// Rows of its prompt that are left; none if it generates.
    pub prompt: usize,
    /// Whether it gives way to all that are not so.
    pub batch: bool,
    /// The pass in which it last had rows.
    pub last: u64,
}

/// What a pass was.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ran {
    /// Rows of prompts.
    pub prompt: usize,
    /// Sequences that generate, as in [`Shares::answers`].
    pub answers: usize,
    /// Its time.
    pub time: Duration,
    /// The part of it that waited for experts.
    pub waited: Duration,
}

/// What earlier passes took, and who is owed time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Time that those who generate waited for prompts and have not been given since.
    owed: Duration,
    /// Seconds of arithmetic for a row of a prompt.
    row: Option<f64>,
    /// Seconds that the last pass with rows of prompts waited for experts.
    read: f64,
    /// Seconds of a pass without.
    answers: Option<f64>,
}

impl Pace {
    /// Takes in what a pass took.
    pub fn observe(&mut self, ran: &Ran) {
        let (time, waited) = (ran.time.as_secs_f64(), ran.waited.as_secs_f64());
        let mix =
            |known: Option<f64>, new: f64| Some(known.map_or(new, |known| KEEP * known + (1.0 - KEEP) * new));
        if ran.prompt > 0 {
            self.row = mix(self.row, (time - waited).max(0.0) / ran.prompt as f64);
            self.read = waited;
        } else if ran.answers > 0 {
            self.answers = mix(self.answers, time);
        }
        self.owed = match (ran.prompt, ran.answers) {
            (_, 0) => Duration::ZERO,
            (0, _) => self.owed.saturating_sub(ran.time),
            // A token came out of this one too.
            _ => self.owed + ran.time.saturating_sub(Duration::from_secs_f64(self.answers.unwrap_or(0.0))),
        };
    }

    /// Rows of prompts for a pass in which others generate.
    fn rows(&self) -> usize {
        let Some(row) = self.row.filter(|row| *row > 0.0) else { return FIRST_ROWS };
        ((PATIENCE.max(self.read) / row) as usize).max(FEWEST_ROWS)
    }
}

/// Who has how much of a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Shares {
    /// Rows of every sequence.
    pub rows: Vec<usize>,
    /// Sequences that generate and have a turn, whether there is room for a row of each or not. Those that give way to
    /// others wait for nothing that is owed to them.
    pub answers: usize,
}

/// Rows of the next pass for every sequence, at most `budget` in all. One that generates gets as many as there are for it
/// and drafts.
pub(super) fn compose(wishes: &[Wish], budget: usize, pace: &Pace) -> Shares {
    let mut rows = vec![0; wishes.len()];
    let somebody_waits = wishes.iter().any(|wish| !wish.batch);
    let turn = |at: &usize| !somebody_waits || !wishes[*at].batch;
    // Who has waited longest comes first, where there is not room for all.
    let mut all: Vec<usize> = (0..wishes.len()).filter(turn).collect();
    all.sort_by_key(|at| (wishes[*at].last, *at));
    let (mut prompts, mut answers): (Vec<usize>, Vec<usize>) =
        all.into_iter().partition(|at| wishes[*at].prompt > 0);
    if !answers.is_empty() && !pace.owed.is_zero() {
        prompts.clear();
    }
    let all_answers = answers.len();
    let for_answers = budget.saturating_sub(usize::from(!prompts.is_empty()));
    answers.truncate(for_answers);
    for at in &answers {
        rows[*at] = for_answers / answers.len();
    }
    if !prompts.is_empty() {
        answers.iter().for_each(|at| rows[*at] = 1);
        let left = budget - answers.len();
        share(wishes, &prompts, if answers.is_empty() { left } else { left.min(pace.rows()) }, &mut rows);
    }
    Shares { rows, answers: all_answers }
}

/// Gives every prompt an equal part of `left`; what one does not need is there for the others.
fn share(wishes: &[Wish], prompts: &[usize], mut left: usize, rows: &mut [usize]) {
    let mut by_need = prompts.to_vec();
    by_need.sort_by_key(|at| wishes[*at].prompt);
    // Where there are fewer rows than prompts, those have them that waited longest.
    by_need.retain(|at| prompts[..left.min(prompts.len())].contains(at));
    let mut others = by_need.len();
    for at in by_need {
        rows[at] = wishes[at].prompt.min(left / others);
        left -= rows[at];
        others -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(rows: usize) -> Wish {
        Wish { prompt: rows, ..Wish::default() }
    }

    fn rows(wishes: &[Wish], budget: usize, pace: &Pace) -> Vec<usize> {
        compose(wishes, budget, pace).rows
    }

    #[test]
    fn everybody_who_generates_has_a_row() {
        let pace = Pace::default();
        assert_eq!(rows(&[Wish::default(); 3], 64, &pace), [21, 21, 21], "with room for drafts");
        let wishes = [Wish::default(), prompt(1000), Wish::default()];
        assert_eq!(rows(&wishes, 4096, &pace), [1, FIRST_ROWS, 1]);
        assert_eq!(rows(&wishes, 10, &pace), [1, 8, 1]);
        assert_eq!(rows(&wishes[1..2], 4096, &pace), [1000]);
    }

    #[test]
    fn prompts_share_alike_and_short_ones_are_not_held_up() {
        let pace = Pace::default();
        assert_eq!(rows(&[prompt(1000), prompt(10), prompt(1000)], 100, &pace), [45, 10, 45]);
        assert_eq!(rows(&[prompt(5), prompt(5), prompt(5)], 2, &pace), [1, 1, 0]);
        assert_eq!(rows(&[prompt(20), prompt(30)], 100, &pace), [20, 30]);
    }

    #[test]
    fn batch_work_has_what_nobody_else_wants() {
        let pace = Pace::default();
        let batch = Wish { batch: true, ..prompt(7) };
        assert_eq!(rows(&[batch, prompt(3), Wish { batch: true, ..Wish::default() }], 64, &pace), [0, 3, 0]);
        assert_eq!(rows(&[batch, Wish { batch: true, ..Wish::default() }], 64, &pace), [7, 1]);
    }

    /// An answer that nobody waits for waits for somebody's prompt: that is no debt of prompts to answers.
    #[test]
    fn batch_work_without_a_turn_is_owed_nothing() {
        let batch = Wish { batch: true, ..Wish::default() };
        let mut pace = Pace::default();
        let shares = compose(&[prompt(1000), batch], 64, &pace);
        assert_eq!(shares, Shares { rows: vec![64, 0], answers: 0 });
        let time = Duration::from_secs(60);
        pace.observe(&Ran { prompt: 64, answers: shares.answers, time, waited: Duration::ZERO });
        // Somebody else's answer begins: it has not waited yet, so the prompt goes on beside it.
        assert!(rows(&[prompt(936), Wish::default(), batch], 64, &pace)[0] > 0);
        // Alone, batch answers have their turn, and are owed what prompts of their kind take.
        let alone = compose(&[Wish { batch: true, ..prompt(10) }, batch], 64, &pace);
        assert_eq!((alone.rows, alone.answers), (vec![10, 1], 1));
    }

    /// With one row a pass, and with fewer than there are sequences, everybody's turn comes.
    #[test]
    fn the_smallest_passes_serve_everybody() {
        for budget in 1..4 {
            let mut wishes = [prompt(40), Wish::default(), Wish::default(), prompt(25), Wish::default()];
            let (mut pace, mut ran) = (Pace::default(), [0; 5]);
            for pass in 1..400 {
                let Shares { rows, answers } = compose(&wishes, budget, &pace);
                assert!((1..=budget).contains(&rows.iter().sum()), "{rows:?}");
                let mut seen = Ran { time: Duration::from_secs(1), answers, ..Ran::default() };
                for (at, rows) in rows.into_iter().enumerate().filter(|(_, rows)| *rows > 0) {
                    if wishes[at].prompt > 0 {
                        seen.prompt += rows;
                    }
                    wishes[at].prompt -= wishes[at].prompt.min(rows);
                    wishes[at].last = pass;
                    ran[at] += 1;
                }
                pace.observe(&seen);
            }
            let (most, least) = (ran.iter().max().unwrap(), ran.iter().min().unwrap());
            assert!(*least * 3 >= *most, "{budget}: {ran:?}");
        }
    }

    /// Whatever a pass costs, prompts and answers have about half of the time each while there are both.
    #[test]
    fn prompts_and_answers_share_the_time() {
        for (read, row, answers) in
            [(0.0, 0.001, 0.02), (0.0, 0.05, 0.5), (60.0, 0.02, 3.0), (2.0, 0.001, 0.1)]
        {
            let mut wishes = [prompt(1_000_000), Wish::default()];
            let mut pace = Pace::default();
            let (mut prompts, mut tokens, mut longest) = (0.0, 0.0, 0.0f64);
            for pass in 0..2000 {
                let rows = rows(&wishes, 4096, &pace);
                let (time, waited) = match rows[0] {
                    0 => (answers, 0.0),
                    n => (read + row * n as f64, read),
                };
                let (time, waited) = (Duration::from_secs_f64(time), Duration::from_secs_f64(waited));
                pace.observe(&Ran { prompt: rows[0], answers: 1, time, waited });
                wishes[0].prompt -= rows[0];
                if pass < 20 {
                    continue;
                }
                match rows[0] {
                    0 => tokens += time.as_secs_f64(),
                    _ => prompts += time.as_secs_f64(),
                }
                longest = longest.max(time.as_secs_f64());
            }
            let share = prompts / (prompts + tokens);
            assert!((0.4..0.7).contains(&share), "{read} {row} {answers}: {share:.2}");
            let limit = (2.0 * read).max(PATIENCE).max(FEWEST_ROWS as f64 * row) * 1.05;
            assert!(
                longest <= limit,
                "{read} {row} {answers}: nobody waits longer than {limit}, not {longest}"
            );
        }
    }
}
