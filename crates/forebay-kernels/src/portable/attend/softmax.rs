//! Online softmax over the scores of a group of heads.

use crate::portable::exp::{exp, exp_all};
use crate::portable::lanes::LANES;

/// Heads of a group at most.
pub(crate) const GROUP_HEADS: usize = 4;

/// Keys of a block whose values a group of heads can add without a change of its maxima.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Run {
    /// First head of the group.
    pub head: usize,
    /// First key.
    pub from: usize,
    /// One past the last key.
    pub to: usize,
    /// What the heads' sums are multiplied by before the run, unless by 1 everywhere.
    pub factors: Option<[f32; GROUP_HEADS]>,
}

/// Turns the scores `[key][head]` of one group into softmax weights, softmax tile by softmax
/// tile, and appends the group's runs. `max` and `sum` are the group's state.
#[inline(always)]
pub(super) fn softmax<const M: usize>(
    scores: &mut [[f32; M]],
    tile_ends: &[usize],
    head: usize,
    max: &mut [f32; M],
    sum: &mut [f32; M],
    runs: &mut Vec<Run>,
) {
    let first_run = runs.len();
    runs.push(Run { head, from: 0, to: scores.len(), factors: None });
    for (from, to) in tiles(tile_ends, scores.len()) {
        let scores = &mut scores[from..to];
        let now = largest(scores, *max);
        let mut grew = false;
        for m in 0..M {
            grew |= now[m] > max[m];
        }
        if grew {
            let mut factors = [1.0; GROUP_HEADS];
            for m in 0..M {
                if now[m] > max[m] {
                    factors[m] = exp(max[m] - now[m]);
                }
            }
            start_run(runs, from, factors);
            *max = now;
        }
        for scores in scores {
            for m in 0..M {
                scores[m] -= now[m];
            }
        }
    }
    exp_all(scores.as_flattened_mut());
    let mut starts = runs[first_run..].iter().filter_map(|run| Some((run.from, run.factors?))).peekable();
    for (from, to) in tiles(tile_ends, scores.len()) {
        if let Some((_, factors)) = starts.next_if(|(start, _)| *start == from) {
            for m in 0..M {
                sum[m] *= factors[m];
            }
        }
        let mut total = [0f32; M];
        for weights in &scores[from..to] {
            for m in 0..M {
                total[m] += weights[m];
            }
        }
        for m in 0..M {
            sum[m] += total[m];
        }
    }
}

/// The keys `from..to` of every softmax tile, cut off at `len`.
#[inline(always)]
fn tiles(ends: &[usize], len: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    ends.iter().map_while(move |end| {
        let tile = (from, (*end).min(len));
        from = *end;
        (tile.0 < tile.1).then_some(tile)
    })
}

/// Ends the last run before key `from` and starts one there.
#[inline(always)]
fn start_run(runs: &mut Vec<Run>, from: usize, factors: [f32; GROUP_HEADS]) {
    let last = runs.last_mut().expect("the caller opened a run");
    if from == 0 {
        last.factors = Some(factors);
        return;
    }
    let (head, to) = (last.head, last.to);
    last.to = from;
    runs.push(Run { head, from, to, factors: Some(factors) });
}

/// Per head the largest of `before` and its scores; NaN does not count.
#[inline(always)]
fn largest<const M: usize>(scores: &[[f32; M]], before: [f32; M]) -> [f32; M] {
    // Lane `i` belongs to head `i mod M`; M divides the number of lanes.
    const { assert!(LANES.is_multiple_of(M)) };
    let mut lanes: [f32; LANES] = std::array::from_fn(|i| before[i % M]);
    let (whole, tail) = scores.as_flattened().as_chunks::<LANES>();
    for scores in whole {
        for i in 0..LANES {
            lanes[i] = larger(lanes[i], scores[i]);
        }
    }
    for (lane, score) in lanes.iter_mut().zip(tail) {
        *lane = larger(*lane, *score);
    }
    let mut now = before;
    for (i, lane) in lanes.into_iter().enumerate() {
        now[i % M] = larger(now[i % M], lane);
    }
    now
}

#[inline(always)]
fn larger(max: f32, score: f32) -> f32 {
    if score > max { score } else { max }
}
