//! Sets of byte ranges: what of a file has arrived, and what has not.

use std::ops::Range;

/// Disjoint ranges in ascending order; neighbours that touch are one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// The ranges of a list in ascending order without overlap, within `size` bytes.
    pub fn from_ascending(list: impl IntoIterator<Item = Range<u64>>, size: u64) -> Option<Self> {
        let mut all = Self::default();
        for range in list {
            let behind = all.0.last().is_none_or(|last| last.end <= range.start);
            if !behind || range.start >= range.end || range.end > size {
                return None;
            }
            all.insert(range);
        }
        Some(all)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Range<u64>> {
        self.0.iter()
    }

    /// Bytes in all of them.
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// The end of the range that begins at 0, or 0.
    pub fn prefix(&self) -> u64 {
        self.0.first().filter(|range| range.start == 0).map_or(0, |range| range.end)
    }

    /// Adds a range; bytes that are there stay there.
    pub fn insert(&mut self, range: Range<u64>) {
        if range.start >= range.end {
            return;
        }
        let first = self.0.partition_point(|other| other.end < range.start);
        let last = self.0.partition_point(|other| other.start <= range.end);
        let merged = match self.0.get(first..last) {
            Some([one, .., other]) => one.start.min(range.start)..other.end.max(range.end),
            Some([one]) => one.start.min(range.start)..one.end.max(range.end),
            _ => range,
        };
        self.0.splice(first..last, [merged]);
    }

    /// What of `0..size` is missing.
    pub fn gaps(&self, size: u64) -> Self {
        let mut gaps = Vec::with_capacity(self.0.len() + 1);
        let mut at = 0;
        for range in &self.0 {
            if at < range.start {
                gaps.push(at..range.start);
            }
            at = range.end;
        }
        if at < size {
            gaps.push(at..size);
        }
        Self(gaps)
    }

    /// Takes at most `most` bytes from the front.
    pub fn take(&mut self, most: u64) -> Option<Range<u64>> {
        let first = self.0.first_mut()?;
        if first.end - first.start <= most {
            return Some(self.0.remove(0));
        }
        let taken = first.start..first.start + most;
        first.start = taken.end;
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn bits(ranges: &Ranges) -> Vec<bool> {
        (0..64).map(|at| ranges.iter().any(|range| range.contains(&at))).collect()
    }

    proptest! {
        #[test]
        fn ranges_behave_like_a_row_of_bits(list in prop::collection::vec((0u64..64, 0u64..64), 0..12), most in 1u64..20) {
            let mut ranges = Ranges::default();
            let mut model = vec![false; 64];
            for (start, end) in list {
                ranges.insert(start..end);
                for at in start..end.max(start) {
                    model[at as usize] = true;
                }
                prop_assert_eq!(bits(&ranges), model.clone());
                prop_assert!(ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start));
            }
            prop_assert_eq!(ranges.bytes(), model.iter().filter(|bit| **bit).count() as u64);
            prop_assert_eq!(ranges.prefix(), model.iter().position(|bit| !bit).unwrap_or(64) as u64);
            prop_assert_eq!(Ranges::from_ascending(ranges.iter().cloned(), 64), Some(ranges.clone()));
            let mut gaps = ranges.gaps(64);
            prop_assert!(bits(&gaps).iter().zip(&model).all(|(gap, bit)| gap != bit));
            while let Some(taken) = gaps.take(most) {
                prop_assert!(!taken.is_empty() && taken.end - taken.start <= most);
                ranges.insert(taken);
            }
            prop_assert_eq!(ranges.prefix(), 64);
        }
    }

    #[test]
    fn lists_that_cannot_be_are_refused() {
        let lists: [&[(u64, u64)]; 5] =
            [&[(3, 2)], &[(0, 2), (1, 3)], &[(4, 5), (0, 1)], &[(0, 11)], &[(2, 2)]];
        for list in lists {
            let ranges = list.iter().map(|(start, end)| *start..*end);
            assert_eq!(Ranges::from_ascending(ranges, 10), None, "{list:?}");
        }
    }
}
