//! Selection of the best scores.

/// What separates the selected scores from the others.
pub(crate) struct Cut {
    /// Rank of the smallest selected score; all scores above it are selected.
    pub rank: i32,
    /// How many scores of exactly that rank are selected: the first ones.
    pub ties: usize,
}

/// An integer that orders like the score: NaN lowest, then -infinity, up to +infinity.
#[inline(always)]
fn rank(score: f32) -> i32 {
    let bits = (score + 0.0).to_bits() as i32;
    let rank = if bits < 0 { bits ^ i32::MAX } else { bits };
    if score.is_nan() { i32::MIN } else { rank }
}

/// Puts the scores' ranks into `ranks` and finds the cut that keeps `keep` of them; `None` if
/// there is nothing to keep.
#[inline(always)]
pub(crate) fn find_cut(scores: &[f32], keep: usize, ranks: &mut Vec<i32>) -> Option<Cut> {
    ranks.clear();
    ranks.extend(scores.iter().map(|score| rank(*score)));
    let keep = keep.min(ranks.len());
    if keep == 0 {
        return None;
    }
    let at_least = |rank: i32| ranks.iter().map(|r| u32::from(*r >= rank)).sum::<u32>() as usize;
    // The largest rank that `keep` scores reach, bit by bit from the top. Counting takes one
    // comparison per score and no branch, so 32 rounds cost less than a search that moves scores.
    let mut found = 0u32;
    let signed = |rank: u32| (rank ^ 1 << 31) as i32;
    for bit in (0..32).rev() {
        let higher = found | 1 << bit;
        if at_least(signed(higher)) >= keep {
            found = higher;
        }
    }
    let rank = signed(found);
    // NaN has the lowest rank and no score the highest.
    let above = at_least(rank.saturating_add(1));
    Some(Cut { rank, ties: keep - above })
}

/// Writes the positions of the `keep` best scores, or of all if there are fewer, into the start
/// of `out` in ascending order, and returns how many those are. Ties go to the lowest position.
#[inline(always)]
pub(crate) fn positions(scores: &[f32], keep: usize, ranks: &mut Vec<i32>, out: &mut [u32]) -> usize {
    let Some(cut) = find_cut(scores, keep, ranks) else { return 0 };
    let out = &mut out[..keep.min(scores.len())];
    let (mut found, mut ties) = (0, cut.ties);
    for (t, rank) in ranks.iter().enumerate() {
        // Written in any case and kept if selected: there is no branch to guess.
        let Some(place) = out.get_mut(found) else { break };
        *place = t as u32;
        let tie = *rank == cut.rank && ties > 0;
        ties -= usize::from(tie);
        found += usize::from(tie || *rank > cut.rank);
    }
    out.len()
}
