//! Which experts of one layer are resident, decided without doing any I/O.
//!
//! A step's whole union is looked up before anything is evicted, and no member of it is
//! ever a victim. Handling a token's experts one at a time instead costs half the hits of
//! a small cache (docs/cache.md). Who stays is a matter of [`Policy`]; decisions
//! follow from the sequence of unions alone, and the order in which reads finish plays
//! no part.

mod policy;
#[cfg(test)]
mod tests;
mod worth;

use std::collections::{HashMap, HashSet};

pub use policy::{BLEND, Memory, Policy};
use worth::Worth;

/// The residents of one layer.
#[derive(Clone, Debug)]
pub struct LayerCache {
    policy: Policy,
    slots: Vec<Slot>,
    /// Where each resident is; its order is never seen.
    slot_of: HashMap<u32, usize>,
    worth: Worth,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// Given up: nothing may be put there.
    Closed,
    Free,
    Holds(u32),
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
    /// Resident no more, to make room for `kept`: (expert, slot it had), worst first.
    pub evicted: Vec<(u32, usize)>,
}

/// What a change of quota did to the slots.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resize {
    /// Slots that hold nothing and must not be used any more, ascending.
    pub closed: Vec<usize>,
    /// Slots that may be used from now on, ascending; new ones follow the last there was.
    pub opened: Vec<usize>,
    /// Resident no more: (expert, slot it had), worst first. Its slot is in `closed`.
    pub evicted: Vec<(u32, usize)>,
}

impl LayerCache {
    /// An empty cache of `quota` slots; 0 keeps nothing, ever.
    pub fn new(quota: usize, policy: Policy) -> Self {
        Self { policy, slots: vec![Slot::Free; quota], slot_of: HashMap::new(), worth: Worth::new(policy) }
    }

    /// Begins with the experience of earlier runs: `counts[expert]` uses in all, of which
    /// each token made `top_k`. Frequency policies rank by it until they know better; the
    /// others ignore it.
    pub fn seed(&mut self, counts: &[u64], top_k: usize) {
        self.worth.seed(counts, top_k);
    }

    /// Looks up the experts of one token and decides who stays: as
    /// [`plan_rows`](Self::plan_rows) with one row.
    pub fn plan(&mut self, union: &[u32]) -> StepPlan {
        self.plan_rows(union, &[], 1)
    }

    /// Looks up one step's experts and decides who stays.
    ///
    /// `union` holds distinct experts in routing order (first row first, highest
    /// score first), `uses` how many of the step's `rows` tokens chose each (one, where
    /// it is too short). A prompt of hundreds of tokens uses nearly every expert: only
    /// these counts tell what it likes, so give them.
    ///
    /// Misses take free slots, then those of the residents outside the union that are
    /// worth least, if the policy finds the newcomer worth more. When there are too few
    /// places, the misses worth most are kept, the first in routing order among equals
    /// (always, with [`Policy::Lru`]).
    ///
    /// The kept count as resident at once: take back what could not be loaded with
    /// [`forget`](Self::forget).
    pub fn plan_rows(&mut self, union: &[u32], uses: &[u32], rows: u64) -> StepPlan {
        self.worth.observe(union, uses, rows);
        let mut plan = StepPlan::default();
        let mut misses = Vec::new();
        for &expert in union {
            match self.slot_of.get(&expert) {
                Some(&slot) => plan.hits.push((expert, slot)),
                None => misses.push(expert),
            }
        }
        let slots = self.assign(&plan.hits, &misses, &mut plan.evicted);
        for (out, _) in &plan.evicted {
            self.slot_of.remove(out);
        }
        for (&expert, slot) in misses.iter().zip(slots) {
            match slot {
                Some(slot) => {
                    self.slots[slot] = Slot::Holds(expert);
                    self.slot_of.insert(expert, slot);
                    plan.kept.push((expert, slot));
                }
                None => plan.transient.push(expert),
            }
        }
        plan
    }

    /// A slot for each of `misses` that is to stay; who must go is added to `evicted`.
    fn assign(
        &self,
        hits: &[(u32, usize)],
        misses: &[u32],
        evicted: &mut Vec<(u32, usize)>,
    ) -> Vec<Option<usize>> {
        let mut slots = vec![None; misses.len()];
        if misses.is_empty() {
            return slots;
        }
        let mut order: Vec<usize> = (0..misses.len()).collect();
        let worth: Vec<f64> = misses.iter().map(|&expert| self.worth.of(expert)).collect();
        if self.policy != Policy::Lru {
            // Stable: equals stay in routing order.
            order.sort_by(|&a, &b| worth[b].total_cmp(&worth[a]));
        }
        for (miss, (slot, resident)) in order.into_iter().zip(self.places(hits, misses.len())) {
            if let Some((expert, resident)) = resident {
                // Newcomers fall and residents rise from here on: nobody else gets in either.
                if !self.worth.admits(worth[miss], resident) {
                    break;
                }
                evicted.push((expert, slot));
            }
            slots[miss] = Some(slot);
        }
        slots
    }

    /// At most `wanted` slots that may be overwritten while `hits` stay, with who is there
    /// and what that is worth: free ones, then the residents that are worth least.
    fn places(&self, hits: &[(u32, usize)], wanted: usize) -> Vec<(usize, Option<(u32, f64)>)> {
        let protected: HashSet<usize> = hits.iter().map(|&(_, slot)| slot).collect();
        let mut places: Vec<(usize, Option<(u32, f64)>)> = Vec::new();
        for (slot, state) in self.slots.iter().enumerate() {
            match *state {
                Slot::Free => places.push((slot, None)),
                Slot::Holds(expert) if !protected.contains(&slot) => {
                    places.push((slot, Some((expert, self.worth.of(expert)))));
                }
                Slot::Holds(_) | Slot::Closed => {}
            }
        }
        // Less than any worth where nobody is; equals keep slot order.
        let key = |place: &(usize, Option<(u32, f64)>)| place.1.map_or(f64::NEG_INFINITY, |(_, worth)| worth);
        places.sort_by(|a, b| key(a).total_cmp(&key(b)));
        places.truncate(wanted);
        places
    }

    /// Experts that are not resident and worth something by what is known, a seed above all, with
    /// their worth: best first, ties to the lower id.
    pub fn wanted(&self) -> Vec<(u32, f64)> {
        let mut known = self.worth.known();
        known.retain(|&(expert, worth)| worth > 0.0 && !self.is_resident(expert));
        known.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        known
    }

    /// Slots that hold nothing, ascending.
    pub fn free_slots(&self) -> Vec<usize> {
        (0..self.slots.len()).filter(|&slot| self.slots[slot] == Slot::Free).collect()
    }

    /// Makes an expert that was read beforehand resident in `slot`, if nobody is there and it is
    /// resident nowhere else. Nobody leaves for it.
    pub fn move_in(&mut self, expert: u32, slot: usize) -> bool {
        let free = self.slots.get(slot) == Some(&Slot::Free) && !self.is_resident(expert);
        if free {
            self.slots[slot] = Slot::Holds(expert);
            self.slot_of.insert(expert, slot);
        }
        free
    }

    /// Changes the number of slots. Shrinking closes free slots first (the last ones), then
    /// those of the residents that are worth least; growing reopens closed slots before it
    /// adds new ones. Residents that stay keep their slots.
    pub fn set_quota(&mut self, quota: usize) -> Resize {
        let mut resize = Resize::default();
        let open = self.quota();
        if quota < open {
            let mut places = self.places(&[], self.slots.len());
            let free = places.iter().take_while(|(_, resident)| resident.is_none()).count();
            places[..free].reverse();
            for (slot, resident) in places.into_iter().take(open - quota) {
                if let Some((expert, _)) = resident {
                    self.slot_of.remove(&expert);
                    resize.evicted.push((expert, slot));
                }
                self.slots[slot] = Slot::Closed;
                resize.closed.push(slot);
            }
            resize.closed.sort_unstable();
        } else {
            let closed = (0..self.slots.len()).filter(|&slot| self.slots[slot] == Slot::Closed);
            resize.opened = closed.chain(self.slots.len()..).take(quota - open).collect();
            for &slot in &resize.opened {
                match self.slots.get_mut(slot) {
                    Some(state) => *state = Slot::Free,
                    None => self.slots.push(Slot::Free),
                }
            }
        }
        resize
    }

    /// Makes an expert non-resident, because it could not be loaded; its slot is free.
    pub fn forget(&mut self, expert: u32) {
        if let Some(slot) = self.slot_of.remove(&expert) {
            self.slots[slot] = Slot::Free;
        }
    }

    /// Makes every expert non-resident and forgets what was learnt, a seed included, as if
    /// the cache were new. Closed slots stay closed.
    pub fn clear(&mut self) {
        self.slot_of.clear();
        self.worth = Worth::new(self.policy);
        for slot in &mut self.slots {
            if let Slot::Holds(_) = slot {
                *slot = Slot::Free;
            }
        }
    }

    /// Whether an expert is resident.
    pub fn is_resident(&self, expert: u32) -> bool {
        self.slot_of.contains_key(&expert)
    }

    /// Slots that may be used.
    pub fn quota(&self) -> usize {
        self.slots.iter().filter(|slot| **slot != Slot::Closed).count()
    }

    /// The policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// The residents, in ascending order.
    pub fn residents(&self) -> Vec<u32> {
        let mut experts: Vec<u32> = self.slot_of.keys().copied().collect();
        experts.sort_unstable();
        experts
    }
}
