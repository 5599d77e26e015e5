//! Which experts texts used, to be known in later runs: those of rows of the decoder that stayed. What a rejected draft
//! chose says nothing about texts, and what the layer that drafts chose is a guess itself.

use std::collections::BTreeMap;
use std::ops::Range;

/// Draft rows of a pass whose choices are kept until it is known whether they stay; those of more are not learnt.
const MOST_GUESSES: usize = 256;

/// How often the experts of a layer were used.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LayerUses {
    /// Tokens that used any.
    pub tokens: u64,
    /// Uses of each expert; shorter than the layer if the last were never used.
    pub counts: Vec<u64>,
}

/// Uses since the start, and those of the drafts of the last pass.
#[derive(Debug, Default)]
pub struct Uses {
    layers: BTreeMap<usize, LayerUses>,
    guesses: Vec<Guess>,
}

/// What a draft's row chose.
#[derive(Debug)]
struct Guess {
    layer: usize,
    row: usize,
    ids: Box<[u32]>,
}

impl Uses {
    /// Every layer that was used.
    pub fn layers(&self) -> impl Iterator<Item = (usize, &LayerUses)> {
        self.layers.iter().map(|(layer, uses)| (*layer, uses))
    }

    /// Bytes held at most in passes of `rows` rows.
    pub(crate) fn planned_bytes(layers: usize, experts: usize, top_k: usize, rows: usize) -> usize {
        let guess = size_of::<Guess>() + 4 * top_k + 16;
        layers * (8 * experts + 2 * rows.min(MOST_GUESSES) * guess)
    }

    /// A pass begins.
    pub(crate) fn begin(&mut self) {
        self.guesses.clear();
    }

    /// A row chose these experts; if it is a draft's it counts once it is [accepted](Self::accept).
    pub(crate) fn chose(&mut self, layer: usize, row: usize, is_draft: bool, ids: &[u32]) {
        if !is_draft {
            return self.layers.entry(layer).or_default().add(ids);
        }
        let layers = self.layers.len().max(1);
        if self.guesses.len() < MOST_GUESSES * layers {
            self.guesses.push(Guess { layer, row, ids: ids.into() });
        }
    }

    /// Only the rows `stay` are left, and counted anew.
    pub(crate) fn keep_rows(&mut self, stay: &[Range<usize>]) {
        self.guesses.retain_mut(|guess| {
            let mut first = 0;
            for rows in stay {
                if rows.contains(&guess.row) {
                    guess.row = first + guess.row - rows.start;
                    return true;
                }
                first += rows.len();
            }
            false
        });
    }

    /// These rows of the last pass stay.
    pub(crate) fn accept(&mut self, rows: Range<usize>) {
        let layers = &mut self.layers;
        self.guesses.retain(|guess| {
            let stays = rows.contains(&guess.row);
            if stays {
                layers.entry(guess.layer).or_default().add(&guess.ids);
            }
            !stays
        });
    }
}

impl LayerUses {
    fn add(&mut self, ids: &[u32]) {
        self.tokens += 1;
        for &id in ids {
            let id = id as usize;
            if self.counts.len() <= id {
                self.counts.resize(id + 1, 0);
            }
            self.counts[id] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drafts_count_when_they_stay_and_where_their_rows_went() {
        let mut uses = Uses::default();
        uses.begin();
        // Three rows of each of three sequences, the first of which is no draft.
        for row in 0..9 {
            uses.chose(4, row, row % 3 > 0, &[row as u32, 9]);
        }
        uses.keep_rows(&[0..3, 6..9]);
        uses.accept(0..2);
        uses.accept(0..2);
        uses.accept(3..5);
        let found: Vec<_> = uses.layers().collect();
        let counts = vec![1, 1, 0, 1, 0, 0, 1, 1, 0, 5];
        assert_eq!(found, [(4, &LayerUses { tokens: 5, counts })]);
        uses.begin();
        uses.accept(0..9);
        assert_eq!(uses.layers().next().unwrap().1.tokens, 5, "the last pass is forgotten");
    }
}
