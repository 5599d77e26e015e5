//! Byte-pair merging inside one piece.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

/// What a pair of adjacent ids becomes, and how early.
#[derive(Debug, Clone, Copy)]
pub(super) struct Merge {
    /// Position in the file's list; the lowest is applied first.
    pub rank: u32,
    /// Id of the merged token.
    pub id: u32,
}

/// All merges by pair of ids.
pub(super) type Merges = HashMap<(u32, u32), Merge>;

/// One symbol of the piece in a doubly linked list over the vector. An absorbed symbol is marked dead.
#[derive(Debug, Clone, Copy)]
struct Symbol {
    id: u32,
    previous: usize,
    next: usize,
    alive: bool,
}

/// "No neighbour" in [`Symbol`].
const NONE: usize = usize::MAX;

/// A merge that was possible when it was queued: (rank, position of the left symbol, the pair).
type Candidate = Reverse<(u32, usize, (u32, u32))>;

/// Merges the single-byte ids of one piece until no pair has a rank: always the lowest rank, the leftmost on
/// ties, one at a time. Appends the result to `out`. Takes O(n log n) for n bytes.
pub(super) fn merge_piece(byte_ids: impl Iterator<Item = u32>, merges: &Merges, out: &mut Vec<u32>) {
    let mut symbols: Vec<Symbol> = byte_ids
        .enumerate()
        .map(|(at, id)| Symbol { id, previous: at.wrapping_sub(1), next: at + 1, alive: true })
        .collect();
    match symbols.last_mut() {
        Some(last) => last.next = NONE,
        None => return,
    }

    let mut queue: BinaryHeap<Candidate> = symbols
        .windows(2)
        .enumerate()
        .filter_map(|(at, pair)| candidate(merges, at, (pair[0].id, pair[1].id)))
        .collect();
    while let Some(Reverse((_, at, pair))) = queue.pop() {
        let (left, right_at) = (symbols[at], symbols[at].next);
        // Entries are not removed when a neighbour changes; they are recognised here.
        if !left.alive || right_at == NONE || (left.id, symbols[right_at].id) != pair {
            continue;
        }
        let Some(merge) = merges.get(&pair) else { continue };
        let after = symbols[right_at].next;
        symbols[right_at].alive = false;
        symbols[at].id = merge.id;
        symbols[at].next = after;
        if after != NONE {
            symbols[after].previous = at;
            queue.extend(candidate(merges, at, (merge.id, symbols[after].id)));
        }
        if left.previous != NONE {
            queue.extend(candidate(merges, left.previous, (symbols[left.previous].id, merge.id)));
        }
    }
    out.extend(symbols.iter().filter(|symbol| symbol.alive).map(|symbol| symbol.id));
}

fn candidate(merges: &Merges, at: usize, pair: (u32, u32)) -> Option<Candidate> {
    merges.get(&pair).map(|merge| Reverse((merge.rank, at, pair)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition, word for word: quadratic, obviously right.
    fn merge_naively(ids: &[u32], merges: &Merges) -> Vec<u32> {
        let mut ids = ids.to_vec();
        loop {
            let best = (0..ids.len().saturating_sub(1))
                .filter_map(|at| merges.get(&(ids[at], ids[at + 1])).map(|merge| (merge.rank, at, merge.id)))
                .min();
            match best {
                Some((_, at, id)) => {
                    ids[at] = id;
                    ids.remove(at + 1);
                }
                None => return ids,
            }
        }
    }

    fn merged(ids: &[u32], merges: &Merges) -> Vec<u32> {
        let mut out = Vec::new();
        merge_piece(ids.iter().copied(), merges, &mut out);
        out
    }

    #[test]
    fn nothing_in_nothing_out() {
        assert!(merged(&[], &Merges::new()).is_empty());
        assert_eq!(merged(&[7], &Merges::new()), [7]);
    }

    proptest! {
        /// Random merge tables over a tiny alphabet, so that ties, chains and stale entries are common.
        #[test]
        fn equals_the_definition(
            pairs in proptest::collection::vec((0u32..8, 0u32..8), 0..14),
            ids in proptest::collection::vec(0u32..4, 0..60),
        ) {
            let mut merges = Merges::new();
            for (rank, pair) in pairs.into_iter().enumerate() {
                let rank = rank as u32;
                merges.entry(pair).or_insert(Merge { rank, id: 4 + rank % 4 });
            }
            prop_assert_eq!(merged(&ids, &merges), merge_naively(&ids, &merges));
        }
    }
}
