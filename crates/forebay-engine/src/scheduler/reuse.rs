//! How long ago the experts that tokens want were wanted last: what a cache of any size would have found in memory.
//!
//! A cache that keeps the last `n` experts of a layer that were used hits exactly the uses with fewer than `n` others in
//! between. One list per layer therefore answers for all sizes at once. The engine's own cache weighs more than the last
//! use (docs/cache.md); this is what can be measured of sizes that it does not have.

/// Uses of experts by tokens of answers, by how many other experts of the layer were used since the last time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reuse {
    /// How many uses had so many others in between.
    pub between: Vec<u64>,
    /// Uses of experts that had not been used before while somebody looked: of these nobody knows.
    pub first: u64,
}

impl Reuse {
    /// Uses whose last use is known.
    pub fn known(&self) -> u64 {
        self.between.iter().sum()
    }

    /// The share of them that a cache finds which keeps the last `slots` experts of every layer, 0 to 1; `None` while
    /// none is known.
    pub fn hit_rate(&self, slots: usize) -> Option<f64> {
        let known = self.known();
        let hits: u64 = self.between.iter().take(slots).sum();
        (known > 0).then(|| hits as f64 / known as f64)
    }
}

/// The experts of a layer that were used, the last one first.
#[derive(Clone, Debug, Default)]
pub(super) struct Recent(Vec<u32>);

impl Recent {
    /// An expert is used; the use is counted if it is to be.
    pub fn touch(&mut self, expert: u32, counted: Option<&mut Reuse>) {
        let found = self.0.iter().position(|known| *known == expert);
        match found {
            Some(at) => self.0[..=at].rotate_right(1),
            None => self.0.insert(0, expert),
        }
        let Some(reuse) = counted else { return };
        match found {
            None => reuse.first += 1,
            Some(at) => {
                if reuse.between.len() <= at {
                    reuse.between.resize(at + 1, 0);
                }
                reuse.between[at] += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    /// A cache that keeps the last `slots` experts: how many uses it finds, those of experts seen before alone.
    fn simulate(uses: &[u32], slots: usize) -> u64 {
        let mut cache: VecDeque<u32> = VecDeque::new();
        let mut hits = 0;
        for &expert in uses {
            if let Some(at) = cache.iter().position(|held| *held == expert) {
                cache.remove(at);
                hits += 1;
            }
            cache.push_back(expert);
            if cache.len() > slots {
                cache.pop_front();
            }
        }
        hits
    }

    #[test]
    fn one_list_answers_for_caches_of_all_sizes() {
        let mut state = 7_u32;
        let uses: Vec<u32> = (0..2000)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                // Low numbers are wanted more often.
                (state >> 24) * ((state >> 16) & 0xff) / 1024
            })
            .collect();
        let (mut recent, mut reuse) = (Recent::default(), Reuse::default());
        uses.iter().for_each(|expert| recent.touch(*expert, Some(&mut reuse)));
        let distinct = uses.iter().collect::<std::collections::BTreeSet<_>>().len();
        assert_eq!(reuse.first, distinct as u64);
        assert_eq!(reuse.known(), (uses.len() - distinct) as u64);
        for slots in [1, 2, 5, 16, 40, 64] {
            let expected = simulate(&uses, slots) as f64 / reuse.known() as f64;
            assert_eq!(reuse.hit_rate(slots), Some(expected), "{slots}");
        }
        assert_eq!(reuse.hit_rate(0), Some(0.0));
        assert_eq!(reuse.hit_rate(256), Some(1.0));
    }

    #[test]
    fn what_is_not_counted_is_remembered_all_the_same() {
        let (mut recent, mut reuse) = (Recent::default(), Reuse::default());
        assert_eq!(reuse.hit_rate(8), None);
        [3, 4, 5].into_iter().for_each(|expert| recent.touch(expert, None));
        assert_eq!(reuse, Reuse::default());
        recent.touch(3, Some(&mut reuse));
        recent.touch(9, Some(&mut reuse));
        assert_eq!((reuse.between.as_slice(), reuse.first), ([0, 0, 1].as_slice(), 1));
    }
}
