//! The distribution of sampled text with and without drafts (decode spec section 12, invariant 5).

use super::*;
use crate::sample::{Sampler, Sampling};

const VOCAB: usize = 6;
const DRAWS: usize = 20_000;

/// Logits behind every token: a language of six words.
const LOGITS: [[f32; VOCAB]; VOCAB] = [
    [0.1, 2.0, 0.3, -0.5, 1.0, 0.0],
    [1.5, -1.0, 0.2, 1.4, 0.4, 0.9],
    [0.0, 0.3, 0.1, 0.2, -0.2, 0.4],
    [2.5, 0.0, 1.0, -1.5, 0.8, 0.3],
    [-0.3, 0.6, 1.9, 0.5, 0.0, 1.2],
    [0.7, 0.8, -0.9, 1.1, 0.2, 0.6],
];

/// Chooses behind a row, given the draft that is there.
type Rule<'a> = &'a mut dyn FnMut(Option<u32>, &[f32]) -> u32;

/// How often each token (second index) was drawn behind each (first index), with `depth` tokens drafted: always the
/// likeliest ones.
fn draw(depth: usize, rule: Rule<'_>) -> [[u32; VOCAB]; VOCAB] {
    let mut counts = [[0; VOCAB]; VOCAB];
    let (mut last, mut drawn) = (0, 0);
    let mut count = |last: &mut u32, token: u32| {
        counts[*last as usize][token as usize] += 1;
        *last = token;
        drawn += 1;
        drawn < DRAWS
    };
    let mut chosen = None;
    loop {
        let next = chosen.take().unwrap_or_else(|| rule(None, &LOGITS[last as usize]));
        if !count(&mut last, next) {
            return counts;
        }
        let likeliest = |token: u32| crate::sample::argmax(&LOGITS[token as usize]).unwrap();
        let drafts: Vec<u32> = std::iter::successors(Some(likeliest(next)), |token| Some(likeliest(*token)))
            .take(depth)
            .collect();
        let mut right = Vec::new();
        let rows = std::iter::once(next).chain(drafts.iter().copied());
        for (row, token) in rows.enumerate() {
            let draft = drafts.get(row).copied();
            let mut choose =
                |logits: &[f32]| Ok(Choice::Token(Token { id: rule(draft, logits), logprobs: None }));
            match judge_row(draft, &LOGITS[token as usize], &mut choose, &mut right) {
                None => {}
                Some(Some(Ok(Choice::Token(token)))) => {
                    chosen = Some(token.id);
                    break;
                }
                Some(_) => break,
            }
        }
        for token in right {
            if !count(&mut last, token.id) {
                return counts;
            }
        }
    }
}

/// Pearson's statistic against the distributions that the logits stand for: 30 degrees of freedom.
fn chi_square(counts: &[[u32; VOCAB]; VOCAB]) -> f64 {
    let mut sum = 0.0;
    for (counts, logits) in counts.iter().zip(&LOGITS) {
        let weights = logits.map(|logit| f64::from(logit).exp());
        let (drawn, all) = (f64::from(counts.iter().sum::<u32>()), weights.iter().sum::<f64>());
        for (&count, weight) in counts.iter().zip(weights) {
            let expected = drawn * weight / all;
            sum += (f64::from(count) - expected).powi(2) / expected;
        }
    }
    sum
}

/// Exceeded once in a thousand times by 30 degrees of freedom.
const LIMIT: f64 = 59.70;

fn sampler(seed: u64) -> Sampler {
    Sampler::new(Sampling { temperature: 1.0, seed, ..Sampling::greedy() }).unwrap()
}

#[test]
fn drafts_do_not_change_the_distribution() {
    for seed in [1, 2, 3] {
        let mut all = Vec::new();
        for depth in [0, 1, 3, 8] {
            let mut sampler = sampler(seed);
            let counts = draw(depth, &mut |_, logits| sampler.pick(logits, None).unwrap());
            let found = chi_square(&counts);
            assert!(found < LIMIT, "seed {seed}, depth {depth}: {found}");
            all.push(counts);
        }
        assert!(all.iter().all(|counts| *counts == all[0]), "the very same draws");
    }
}

/// The test above can fail: with the rule of rejection sampling that forgets to ban what was rejected, and draws again
/// from the whole distribution, it does.
#[test]
fn drawing_again_after_a_rejection_is_noticed() {
    for depth in [1, 3, 8] {
        let mut sampler = sampler(1);
        let counts = draw(depth, &mut |draft, logits| {
            let first = sampler.pick(logits, None).unwrap();
            match draft {
                Some(draft) if draft != first => sampler.pick(logits, None).unwrap(),
                _ => first,
            }
        });
        let found = chi_square(&counts);
        assert!(found > 10.0 * LIMIT, "depth {depth}: {found}");
    }
}
