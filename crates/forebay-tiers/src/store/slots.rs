//! Fewer slots while other programs need the memory, and more again.

use std::time::Duration;

use super::{ExpertStore, Governed};
use crate::budget::deal;
use crate::governor::{Governor, GovernorPlan, Machine, Target};

impl ExpertStore {
    /// Looks at the machine, at most as often as the governor wants to, and gives slots up or
    /// takes them back.
    pub(super) fn govern(&mut self) {
        let Some(governed) = &mut self.governed else { return };
        let now_ms = governed.machine.now_ms();
        if !governed.governor.is_due(now_ms) {
            return;
        }
        let target = governed.governor.sample(now_ms, &governed.machine.memory());
        let slots = governed.governor.held();
        match target {
            Target::Keep => return,
            Target::Release(count) => self.counters.slots_released += count as u64,
            Target::Regain(count) => self.counters.slots_regained += count as u64,
        }
        self.set_slots(slots);
    }

    /// Adapts the number of slots to another machine from now on. A store that is not governed stays
    /// as it is.
    pub fn govern_by(&mut self, plan: GovernorPlan, machine: Box<dyn Machine>) {
        if let Some(governed) = &mut self.governed {
            *governed = Governed { governor: Governor::new(plan), machine };
        }
    }

    /// Changes how many slots there are, at most those of the configuration; the layers share
    /// them evenly. On Linux the memory of slots that are given up goes back to the system.
    ///
    /// Which experts are resident changes, and no result.
    pub fn set_slots(&mut self, slots: usize) {
        self.settle();
        self.stop_warm_up();
        let limits: Vec<usize> = self.layers.iter().map(|layer| layer.slots.len()).collect();
        let mut left = slots;
        let quotas = deal(&limits, |_| match left.checked_sub(1) {
            Some(rest) => {
                left = rest;
                true
            }
            None => false,
        });
        for (layer, quota) in self.layers.iter_mut().zip(quotas) {
            for slot in layer.cache.set_quota(quota).closed {
                if let Some(slab) = &mut layer.slots[slot] {
                    slab.discard();
                }
            }
        }
    }

    /// Slots that may hold an expert now.
    pub fn slots(&self) -> usize {
        self.layers.iter().map(|layer| layer.cache.quota()).sum()
    }

    /// How long at least one demanded read was outstanding so far.
    pub fn disk_time(&self) -> Duration {
        self.reader.gauge().outstanding
    }
}
