//! Memory for experts, divided into slots.
//!
//! Slots are dealt one at a time in a fixed order, round after round over the
//! layers, until the next one does not fit. So the quotas are equal but for a
//! last round that the first layers win, and a larger budget never takes a slot
//! from anyone.

use forebay_core::ByteSize;
use forebay_io::{SlabClass, slot_bytes};

/// What a model wants room for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotDemand {
    /// The slab classes.
    pub classes: Vec<ClassDemand>,
    /// The layers with routed experts, in order.
    pub layers: Vec<LayerDemand>,
}

/// One slab class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClassDemand {
    /// Bytes of one expert in memory. Slabs are page-rounded and so is every figure here.
    pub slab_bytes: usize,
    /// Slabs set aside for experts that pass through without being kept.
    pub staging: usize,
}

/// One layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerDemand {
    /// Index of its class.
    pub class: usize,
    /// Experts it has: more slots than that are of no use.
    pub experts: usize,
}

/// A division of memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSplit {
    /// Slots of each layer; 0 means that the layer streams every expert it uses.
    pub quotas: Vec<usize>,
    /// What to ask the arena for: staging and slots of each class.
    pub slabs: Vec<SlabClass>,
    /// Bytes of all that; at most the budget.
    pub bytes: u64,
}

/// Why memory could not be divided.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BudgetError {
    /// Not even the staging slabs fit.
    #[error(
        "{} is too little for experts to pass through, they need {}; raise the memory budget by {}",
        ByteSize(*budget), ByteSize(*needed), ByteSize(needed - budget)
    )]
    TooSmall {
        /// Bytes needed at least.
        needed: u64,
        /// Bytes offered.
        budget: u64,
    },
    /// A layer names a class that does not exist.
    #[error("entry {layer} of the layers wants slab class {class} of {classes}; please report this as a bug")]
    UnknownClass {
        /// Index in the list of layers.
        layer: usize,
        /// Class it names.
        class: usize,
        /// Classes there are.
        classes: usize,
    },
}

impl SlotDemand {
    /// Bytes without which nothing runs: the staging slabs.
    pub fn min_bytes(&self) -> u64 {
        let staging = self.classes.iter().map(|class| times(class.slot(), class.staging));
        staging.fold(0, u64::saturating_add)
    }

    /// Bytes with which every expert stays: staging and one slot per expert.
    pub fn all_bytes(&self) -> Result<u64, BudgetError> {
        self.check()?;
        let slots = self.layers.iter().map(|layer| times(self.classes[layer.class].slot(), layer.experts));
        Ok(slots.fold(self.min_bytes(), u64::saturating_add))
    }

    /// Divides `budget` bytes.
    pub fn split(&self, budget: u64) -> Result<SlotSplit, BudgetError> {
        self.check()?;
        let needed = self.min_bytes();
        let mut left = budget.checked_sub(needed).ok_or(BudgetError::TooSmall { needed, budget })?;
        let limits: Vec<usize> = self.layers.iter().map(|layer| layer.experts).collect();
        let quotas = deal(&limits, |layer| {
            // A smaller slot of a later layer might still fit where this one does not, but handing
            // it out would let a larger budget take it away again.
            let rest = left.checked_sub(self.classes[self.layers[layer].class].slot());
            left = rest.unwrap_or(left);
            rest.is_some()
        });

        let mut slabs: Vec<SlabClass> =
            self.classes.iter().map(|c| SlabClass { bytes: c.slab_bytes, count: c.staging }).collect();
        for (quota, layer) in quotas.iter().zip(&self.layers) {
            slabs[layer.class].count += quota;
        }
        Ok(SlotSplit { quotas, slabs, bytes: budget - left })
    }

    fn check(&self) -> Result<(), BudgetError> {
        let classes = self.classes.len();
        match self.layers.iter().enumerate().find(|(_, layer)| layer.class >= classes) {
            Some((at, layer)) => Err(BudgetError::UnknownClass { layer: at, class: layer.class, classes }),
            None => Ok(()),
        }
    }
}

impl ClassDemand {
    /// What one slab really takes.
    fn slot(&self) -> u64 {
        slot_bytes(self.slab_bytes) as u64
    }
}

/// Deals slots one at a time, round after round over the layers, to those that have fewer than
/// their limit, until `pay`, which is told the layer, has nothing left for the next one.
pub(crate) fn deal(limits: &[usize], mut pay: impl FnMut(usize) -> bool) -> Vec<usize> {
    let mut dealt = vec![0; limits.len()];
    for round in 0..limits.iter().copied().max().unwrap_or(0) {
        for (layer, limit) in limits.iter().enumerate() {
            if round < *limit {
                if !pay(layer) {
                    return dealt;
                }
                dealt[layer] += 1;
            }
        }
    }
    dealt
}

/// Sizes come from files; a product that does not fit is as good as infinite.
fn times(bytes: u64, count: usize) -> u64 {
    bytes.saturating_mul(count as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EXPERT: usize = 18_915_328; // int4, a multiple of 4096
    const MTP_EXPERT: usize = 37_789_696; // int8: 9226 pages exactly

    /// GLM-5.2: 75 sparse layers and the MTP layer, 16 + 8 staging slabs.
    fn glm() -> SlotDemand {
        let mut layers = vec![LayerDemand { class: 0, experts: 256 }; 75];
        layers.push(LayerDemand { class: 1, experts: 256 });
        let classes = vec![
            ClassDemand { slab_bytes: EXPERT, staging: 16 },
            ClassDemand { slab_bytes: MTP_EXPERT, staging: 8 },
        ];
        SlotDemand { classes, layers }
    }

    /// Byte facts of GLM-5.2 in row-scaled int4 (docs/planning.md): one slot in every layer is
    /// 1,456,439,296 bytes and all experts are 372,848,459,776 when there is one
    /// slab per expert and sizes are whole pages.
    #[test]
    fn figures_of_the_public_artifact() {
        let glm = glm();
        let staging = 16 * 18_915_328 + 8 * 37_789_696;
        assert_eq!(glm.min_bytes(), staging);
        assert_eq!(glm.all_bytes().unwrap(), staging + 372_848_459_776);

        let three_each = glm.split(staging + 3 * 1_456_439_296).unwrap();
        assert_eq!(three_each.quotas, [3; 76]);
        assert_eq!(three_each.bytes, staging + 3 * 1_456_439_296);
        assert_eq!(three_each.slabs[0], SlabClass { bytes: EXPERT, count: 16 + 225 });
        assert_eq!(three_each.slabs[1], SlabClass { bytes: MTP_EXPERT, count: 8 + 3 });

        let two_spare = glm.split(staging + 3 * 1_456_439_296 + 2 * 18_915_328 + 100).unwrap();
        assert_eq!(two_spare.quotas[..3], [4, 4, 3]);
        assert_eq!(two_spare.quotas.iter().sum::<usize>(), 3 * 76 + 2);
        assert_eq!(two_spare.bytes, staging + 3 * 1_456_439_296 + 2 * 18_915_328);

        assert_eq!(glm.split(u64::MAX).unwrap().quotas, [256; 76]);
        assert_eq!(glm.split(staging).unwrap().quotas, [0; 76]);
        let error = glm.split(staging - 1).unwrap_err();
        assert_eq!(error, BudgetError::TooSmall { needed: staging, budget: staging - 1 });
    }

    #[test]
    fn nonsense_is_an_error_and_not_an_overflow() {
        let demand = SlotDemand {
            classes: vec![ClassDemand { slab_bytes: usize::MAX, staging: usize::MAX }],
            layers: vec![LayerDemand { class: 0, experts: usize::MAX }],
        };
        assert_eq!(demand.min_bytes(), u64::MAX);
        assert_eq!(demand.all_bytes().unwrap(), u64::MAX);
        assert!(matches!(demand.split(1 << 40), Err(BudgetError::TooSmall { .. })));
        let lost = SlotDemand { classes: vec![], layers: vec![LayerDemand { class: 1, experts: 1 }] };
        assert!(matches!(lost.split(9), Err(BudgetError::UnknownClass { layer: 0, class: 1, classes: 0 })));
        assert!(lost.all_bytes().is_err());
    }

    fn demands() -> impl Strategy<Value = SlotDemand> {
        let class =
            (1usize..20_000, 0usize..4).prop_map(|(slab_bytes, staging)| ClassDemand { slab_bytes, staging });
        let layer = (0usize..2, 0usize..7).prop_map(|(class, experts)| LayerDemand { class, experts });
        (prop::collection::vec(class, 2), prop::collection::vec(layer, 0..8))
            .prop_map(|(classes, layers)| SlotDemand { classes, layers })
    }

    proptest! {
        #[test]
        fn never_exceeds_never_wastes_and_grows_with_the_budget(
            demand in demands(),
            budget in 0u64..900_000,
            more in 0u64..100_000,
        ) {
            let Ok(split) = demand.split(budget) else {
                prop_assert!(budget < demand.min_bytes());
                return Ok(());
            };
            let bytes: u64 = split.slabs.iter().map(|s| s.bytes.next_multiple_of(4096) as u64 * s.count as u64).sum();
            prop_assert_eq!(split.bytes, bytes);
            prop_assert!(bytes <= budget);
            for (class, slabs) in split.slabs.iter().enumerate() {
                let quotas = split.quotas.iter().zip(&demand.layers).filter(|(_, l)| l.class == class);
                let quotas: usize = quotas.map(|(q, _)| q).sum();
                prop_assert_eq!(slabs.count, demand.classes[class].staging + quotas);
            }
            prop_assert!(split.quotas.iter().zip(&demand.layers).all(|(&q, l)| q <= l.experts));
            // Even but for one slot, earlier layers first, unless a layer has no more experts.
            let open: Vec<usize> = split.quotas.iter().zip(&demand.layers)
                .filter(|(q, l)| **q < l.experts).map(|(q, _)| *q).collect();
            prop_assert!(open.is_sorted_by(|a, b| a >= b));
            if let (Some(first), Some(last)) = (open.first(), open.last()) {
                prop_assert!(first - last <= 1);
                let largest = demand.classes.iter().map(|c| c.slab_bytes.next_multiple_of(4096)).max().unwrap();
                prop_assert!(budget - bytes < largest as u64, "room for another slot was left");
            } else {
                prop_assert_eq!(bytes, demand.all_bytes().unwrap());
            }
            let larger = demand.split(budget + more).unwrap();
            prop_assert!(larger.quotas.iter().zip(&split.quotas).all(|(a, b)| a >= b));
        }
    }
}
