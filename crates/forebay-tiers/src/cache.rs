//! Which experts of one layer are resident, decided without doing any I/O.
//!
//! Least recently used, over the whole union of a step at once: every member is
//! looked up before anything is evicted and no member is ever a victim. Handling
//! a token's experts one at a time instead costs half the hits of a small cache
//! (performance notes 2.7). Decisions follow from the sequence of unions alone;
//! the order in which reads finish plays no part.

use std::collections::HashMap;

/// The residents of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    slots: Vec<Option<Resident>>,
    /// Where each resident is; only looked up, never iterated.
    slot_of: HashMap<u32, usize>,
    clock: u64,
}

#[derive(Clone, Copy, Debug)]
struct Resident {
    expert: u32,
    /// When it was last routed to; larger is later, no two are equal.
    stamp: u64,
}

/// What a step does with each member of its union: `hits`, `kept` and
/// `transient` together hold each member once, each list in routing order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepPlan {
    /// Resident already: (expert, slot).
    pub hits: Vec<(u32, usize)>,
    /// To be loaded, resident from now on: (expert, slot).
    pub kept: Vec<(u32, usize)>,
    /// To be loaded for this step only.
    pub transient: Vec<u32>,
    /// Resident no more, to make room for `kept`.
    pub evicted: Vec<u32>,
}

impl LayerCache {
    /// An empty cache of `quota` slots; 0 keeps nothing, ever.
    pub fn new(quota: usize) -> Self {
        Self { slots: vec![None; quota], slot_of: HashMap::new(), clock: 0 }
    }

    /// Looks up one step's experts and decides who stays.
    ///
    /// `union` holds distinct experts in routing order (first row first, highest
    /// score first). Misses take free slots, then those of the least recently used
    /// residents outside the union; when there are too few, the first misses in
    /// routing order are kept. Then every member that is resident is stamped in
    /// routing order.
    ///
    /// The kept count as resident at once: take back what could not be loaded with
    /// [`forget`](Self::forget).
    pub fn plan(&mut self, union: &[u32]) -> StepPlan {
        let mut plan = StepPlan::default();
        let mut misses = Vec::new();
        for &expert in union {
            match self.slot_of.get(&expert) {
                Some(&slot) => plan.hits.push((expert, slot)),
                None => misses.push(expert),
            }
        }

        let places = self.places(&plan.hits, misses.len());
        let kept = places.len();
        for (&expert, slot) in misses.iter().zip(places) {
            plan.evicted.extend(self.slots[slot].map(|out| out.expert));
            plan.kept.push((expert, slot));
        }
        plan.transient.extend_from_slice(&misses[kept..]);

        for out in &plan.evicted {
            self.slot_of.remove(out);
        }
        for &(expert, slot) in &plan.kept {
            self.slot_of.insert(expert, slot);
        }
        for &expert in union {
            if let Some(&slot) = self.slot_of.get(&expert) {
                self.clock += 1;
                self.slots[slot] = Some(Resident { expert, stamp: self.clock });
            }
        }
        plan
    }

    /// At most `wanted` slots that may be overwritten while `hits` stay: free ones,
    /// then least recently used first.
    fn places(&self, hits: &[(u32, usize)], wanted: usize) -> Vec<usize> {
        let mut protected = vec![false; self.slots.len()];
        for &(_, slot) in hits {
            protected[slot] = true;
        }
        let mut places: Vec<usize> = (0..self.slots.len()).filter(|&slot| !protected[slot]).collect();
        // A free slot has no stamp, which sorts first; equal keys keep slot order.
        places.sort_by_key(|&slot| self.slots[slot].map(|resident| resident.stamp));
        places.truncate(wanted);
        places
    }

    /// Makes an expert non-resident, because it could not be loaded; its slot is free.
    pub fn forget(&mut self, expert: u32) {
        if let Some(slot) = self.slot_of.remove(&expert) {
            self.slots[slot] = None;
        }
    }

    /// Makes every expert non-resident.
    pub fn clear(&mut self) {
        self.slot_of.clear();
        self.slots.fill(None);
    }

    /// Slots.
    pub fn quota(&self) -> usize {
        self.slots.len()
    }

    /// The residents, in ascending order.
    pub fn residents(&self) -> Vec<u32> {
        let mut experts: Vec<u32> = self.slots.iter().flatten().map(|resident| resident.expert).collect();
        experts.sort_unstable();
        experts
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    /// Slots as (expert, stamp), as the streaming spec writes them.
    fn state(cache: &LayerCache) -> Vec<(u32, u64)> {
        cache.slots.iter().flatten().map(|r| (r.expert, r.stamp)).collect()
    }

    fn counts(plan: &StepPlan) -> (usize, usize) {
        (plan.hits.len(), plan.kept.len() + plan.transient.len())
    }

    /// Streaming spec section 2, cap 2. The reference promotes the last misses in
    /// reverse; we keep the first ones and stamp in routing order, so the first call
    /// keeps 5 and 9 and not 12 and 9. Hits and misses of every call are the spec's.
    #[test]
    fn two_slots() {
        let mut cache = LayerCache::new(2);
        let plan = cache.plan(&[5, 9, 12]);
        assert_eq!(counts(&plan), (0, 3));
        assert_eq!((plan.kept, plan.transient), (vec![(5, 0), (9, 1)], vec![12]));
        assert_eq!(state(&cache), [(5, 1), (9, 2)]);

        let plan = cache.plan(&[9, 7]);
        assert_eq!(counts(&plan), (1, 1));
        assert_eq!(plan.evicted, [5]);
        assert_eq!(state(&cache), [(7, 4), (9, 3)]);

        let plan = cache.plan(&[7, 9]);
        assert_eq!(counts(&plan), (2, 0));
        assert_eq!(state(&cache), [(7, 5), (9, 6)]);
    }

    /// Streaming spec section 2, cap 3: with [3,2,1] first, so that (as in the
    /// reference) 1 is the newest and 3 is the one that 4 replaces. The last call is
    /// the case the spec describes for us: "the hit slots are protected: 5 replaces
    /// slot 2 and 6 is not kept".
    #[test]
    fn three_slots_protect_the_hits_of_the_same_call() {
        let mut cache = LayerCache::new(3);
        cache.plan(&[3, 2, 1]);
        assert_eq!(state(&cache), [(3, 1), (2, 2), (1, 3)]);
        cache.plan(&[4]);
        assert_eq!(state(&cache), [(4, 4), (2, 2), (1, 3)]);
        let plan = cache.plan(&[1, 4, 5, 6]);
        assert_eq!(
            plan,
            StepPlan { hits: vec![(1, 2), (4, 0)], kept: vec![(5, 1)], transient: vec![6], evicted: vec![2] }
        );
        assert_eq!(state(&cache), [(4, 6), (5, 7), (1, 5)]);
    }

    #[test]
    fn a_forgotten_expert_is_a_miss_and_its_slot_is_used_first() {
        let mut cache = LayerCache::new(2);
        cache.plan(&[1, 2]);
        cache.forget(2);
        cache.forget(77);
        assert_eq!(cache.residents(), [1]);
        let plan = cache.plan(&[3]);
        assert_eq!((plan.kept, plan.evicted), (vec![(3, 1)], vec![]));
        cache.clear();
        assert_eq!(cache.plan(&[1, 3]).hits, []);
        assert_eq!(cache.quota(), 2);
    }

    /// The rules again, written as plainly as possible: residents from least to most
    /// recently used.
    struct Model {
        quota: usize,
        order: Vec<u32>,
    }

    impl Model {
        fn step(&mut self, union: &[u32]) -> (Vec<u32>, Vec<u32>, Vec<u32>, Vec<u32>) {
            let (hits, misses): (Vec<u32>, Vec<u32>) = union.iter().partition(|e| self.order.contains(e));
            let mut kept = Vec::new();
            let mut transient = Vec::new();
            let mut evicted = Vec::new();
            for miss in misses {
                if self.order.len() + kept.len() >= self.quota {
                    match self.order.iter().position(|e| !union.contains(e)) {
                        Some(oldest) => evicted.push(self.order.remove(oldest)),
                        None => {
                            transient.push(miss);
                            continue;
                        }
                    }
                }
                kept.push(miss);
            }
            self.order.retain(|e| !hits.contains(e));
            self.order.extend(union.iter().filter(|e| hits.contains(e) || kept.contains(e)));
            (hits, kept, transient, evicted)
        }
    }

    fn union_of(experts: u32) -> impl Strategy<Value = Vec<u32>> {
        let all: Vec<u32> = (0..experts).collect();
        prop::sample::subsequence(all, 1..=experts as usize).prop_shuffle()
    }

    proptest! {
        #[test]
        fn agrees_with_the_plain_rules(
            quota in 0usize..14,
            unions in prop::collection::vec(union_of(12), 1..40),
        ) {
            let mut cache = LayerCache::new(quota);
            let mut model = Model { quota, order: Vec::new() };
            for union in &unions {
                let before: BTreeSet<u32> = cache.residents().into_iter().collect();
                let plan = cache.plan(union);
                let first = |pairs: &[(u32, usize)]| pairs.iter().map(|p| p.0).collect::<Vec<_>>();
                let (hits, kept, transient, evicted) = model.step(union);
                prop_assert_eq!(first(&plan.hits), hits);
                prop_assert_eq!(first(&plan.kept), kept);
                prop_assert_eq!(&plan.transient, &transient);
                prop_assert_eq!(&plan.evicted, &evicted);

                prop_assert_eq!(counts(&plan).0 + counts(&plan).1, union.len());
                prop_assert!(plan.evicted.iter().all(|e| !union.contains(e) && before.contains(e)));
                prop_assert!(cache.residents().len() <= quota);
                let mut slots: Vec<usize> = plan.hits.iter().chain(&plan.kept).map(|p| p.1).collect();
                slots.sort_unstable();
                slots.dedup();
                prop_assert_eq!(slots.len(), plan.hits.len() + plan.kept.len(), "two experts in one slot");
                if quota == 0 {
                    prop_assert_eq!(&plan.transient, union);
                }
                if quota >= 12 {
                    prop_assert!(plan.evicted.is_empty() && plan.transient.is_empty());
                }
                let newest = cache.slots.iter().flatten().max_by_key(|r| r.stamp).map(|r| r.expert);
                prop_assert_eq!(newest, model.order.last().copied());
            }
            let mut order = model.order;
            order.sort_unstable();
            prop_assert_eq!(cache.residents(), order);
        }
    }
}
