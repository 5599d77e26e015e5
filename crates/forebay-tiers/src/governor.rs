//! How many slots to keep while other programs come and go.
//!
//! The plan is made once; the machine changes afterwards. The governor looks at what this
//! process takes *now* (never at its peak, which cannot fall) and at what the machine has
//! left, and says how many slots to give up or take back. It does not touch memory itself:
//! its caller releases slots, and samples again.
//!
//! Shrinking is quick but smooth: at most an eighth of the slots per sample. Growing is
//! slow: only after some time without any shortage, and only as far as memory would still
//! be left over if every slot in hand were filled. Together with a gap between the two
//! thresholds that rules out going back and forth while nothing else changes.

use std::time::Instant;

use forebay_io::{MemoryInfo, Pressure};

/// Milliseconds between two looks at the machine.
pub const INTERVAL_MS: u64 = 100;
/// Milliseconds without any shortage before slots are taken back.
pub const CALM_MS: u64 = 2_000;
/// Bytes beside a 32nd of the plan by which a process may exceed it: what the system adds.
const SLACK: u64 = 64 << 20;

/// Where time and the machine's figures come from: [`ThisMachine`], or one that a test makes up.
pub trait Machine: Send {
    /// Milliseconds since a moment that never changes.
    fn now_ms(&mut self) -> u64;

    /// What memory there is now.
    fn memory(&mut self) -> MemoryInfo;
}

/// The machine that this process runs on.
#[derive(Clone, Copy, Debug)]
pub struct ThisMachine {
    started: Instant,
}

impl Default for ThisMachine {
    fn default() -> Self {
        Self { started: Instant::now() }
    }
}

impl Machine for ThisMachine {
    fn now_ms(&mut self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    fn memory(&mut self) -> MemoryInfo {
        MemoryInfo::read()
    }
}

/// What the governor keeps to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GovernorPlan {
    /// Slots of the plan: never more.
    pub slots: usize,
    /// Slots that are never given up.
    pub floor: usize,
    /// Bytes of one slot, on average.
    pub slot_bytes: u64,
    /// Bytes that the process takes with all its slots filled.
    pub planned_bytes: u64,
    /// Bytes that are to be left to the rest of the machine.
    pub reserve_bytes: u64,
}

/// What is to be done after a sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Nothing.
    Keep,
    /// Give up this many slots.
    Release(usize),
    /// Take back this many slots.
    Regain(usize),
}

/// The state between samples.
#[derive(Clone, Debug)]
pub struct Governor {
    plan: GovernorPlan,
    /// Slots in hand.
    held: usize,
    last_sample: Option<u64>,
    /// When there was last a shortage, or when counting began.
    calm_since: u64,
    swapped_pages: Option<u64>,
}

impl Governor {
    /// A governor of a process that has all slots of `plan` in hand.
    pub fn new(plan: GovernorPlan) -> Self {
        let floor = plan.floor.min(plan.slots);
        let plan = GovernorPlan { floor, ..plan };
        Self { plan, held: plan.slots, last_sample: None, calm_since: 0, swapped_pages: None }
    }

    /// Slots in hand after the last sample.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Whether a sample at `now_ms` would be looked at: callers need not read the machine's
    /// figures before.
    pub fn is_due(&self, now_ms: u64) -> bool {
        self.last_sample.is_none_or(|last| now_ms.saturating_sub(last) >= INTERVAL_MS)
    }

    /// Decides after a look at the machine; `now_ms` counts from any fixed moment and does
    /// not go back. The caller does what it is told.
    pub fn sample(&mut self, now_ms: u64, memory: &MemoryInfo) -> Target {
        if !self.is_due(now_ms) {
            return Target::Keep;
        }
        if self.last_sample.replace(now_ms).is_none() {
            self.calm_since = now_ms;
        }
        let short = self.short(memory);
        self.swapped_pages = memory.swapped_pages.or(self.swapped_pages);
        if short > 0 {
            self.calm_since = now_ms;
            return self.release(short);
        }
        if now_ms.saturating_sub(self.calm_since) < CALM_MS {
            return Target::Keep;
        }
        self.regain(memory)
    }

    /// Bytes that should not be ours.
    fn short(&self, memory: &MemoryInfo) -> u64 {
        // Against the whole plan, whatever is in hand: giving up slots must be able to end it.
        let allowed = self.plan.planned_bytes.saturating_add(self.plan.planned_bytes / 32 + SLACK);
        let over = memory.footprint().map_or(0, |taken| taken.saturating_sub(allowed));
        let reserve = self.plan.reserve_bytes;
        let missing = memory.available.map_or(0, |available| reserve.saturating_sub(available));
        // Pages moving to swap are somebody's loss; ours only if there is little left.
        let swapping = self.swapped_pages.zip(memory.swapped_pages).is_some_and(|(before, now)| now > before);
        let close = memory.available.is_none_or(|available| available < reserve.saturating_mul(2));
        let pressed = memory.pressure.is_some_and(|pressure| pressure > Pressure::Normal);
        let nudge = if (swapping && close) || pressed { self.plan.slot_bytes.max(1) } else { 0 };
        over.max(missing).max(nudge)
    }

    fn release(&mut self, short: u64) -> Target {
        let needed = usize::try_from(short.div_ceil(self.plan.slot_bytes.max(1))).unwrap_or(usize::MAX);
        let step = (self.held / 8).max(1);
        let count = needed.min(step).min(self.held - self.plan.floor);
        self.held -= count;
        if count == 0 { Target::Keep } else { Target::Release(count) }
    }

    fn regain(&mut self, memory: &MemoryInfo) -> Target {
        let Some(available) = memory.available else { return Target::Keep };
        // Slots in hand that are not filled yet will still take their memory.
        let given_up = ((self.plan.slots - self.held) as u64).saturating_mul(self.plan.slot_bytes);
        let promised = memory
            .footprint()
            .map_or(0, |taken| self.plan.planned_bytes.saturating_sub(given_up).saturating_sub(taken));
        let slot = self.plan.slot_bytes.max(1);
        let gap = (self.plan.reserve_bytes / 4).max(slot.saturating_mul(2));
        let spare =
            available.saturating_sub(promised).saturating_sub(self.plan.reserve_bytes).saturating_sub(gap);
        let room = usize::try_from(spare / slot).unwrap_or(usize::MAX);
        let step = (self.plan.slots / 32).max(1);
        let count = room.min(step).min(self.plan.slots - self.held);
        self.held += count;
        if count == 0 { Target::Keep } else { Target::Regain(count) }
    }
}

#[cfg(test)]
mod tests;
