use super::*;
use proptest::prelude::*;

const SLOT: u64 = 19_000_000;

fn plan(slots: usize, floor: usize) -> GovernorPlan {
    let planned_bytes = 10_000_000_000 + slots as u64 * SLOT;
    GovernorPlan { slots, floor, slot_bytes: SLOT, planned_bytes, reserve_bytes: 2_000_000_000 }
}

/// A machine on which this process takes what its slots in hand take, and others the rest.
struct World {
    total: u64,
    others: u64,
    swapped: u64,
}

impl World {
    fn info(&self, governor: &Governor) -> MemoryInfo {
        let ours = 10_000_000_000 + governor.held() as u64 * SLOT;
        let taken = ours + self.others;
        MemoryInfo {
            total: Some(self.total),
            available: Some(self.total.saturating_sub(taken)),
            swapped_pages: Some(self.swapped),
            process_rss: Some(ours),
            ..MemoryInfo::default()
        }
    }

    /// Runs `seconds` of it; the slots in hand after every sample.
    fn run(&self, governor: &mut Governor, from_ms: &mut u64, seconds: u64) -> Vec<usize> {
        let samples = seconds * 1000 / INTERVAL_MS;
        let step = |_| {
            *from_ms += INTERVAL_MS;
            let before = governor.held();
            let info = self.info(governor);
            let expected = match governor.sample(*from_ms, &info) {
                Target::Keep => before,
                Target::Release(count) => before - count,
                Target::Regain(count) => before + count,
            };
            assert_eq!(governor.held(), expected, "the state is what the caller was told");
            expected
        };
        (0..samples).map(step).collect()
    }
}

/// The case: another program takes 4 GB, and leaves again.
#[test]
fn a_visitor_of_four_gigabytes_is_given_way_to_and_forgotten() {
    let mut governor = Governor::new(plan(450, 75));
    let mut now = 0;
    let mut world = World { total: 22_000_000_000, others: 0, swapped: 0 };
    assert!(world.run(&mut governor, &mut now, 5).iter().all(|&held| held == 450));
    world.others = 4_000_000_000;
    let held = world.run(&mut governor, &mut now, 5);
    assert!(held.is_sorted_by(|a, b| a >= b), "it only shrinks: {held:?}");
    let left = world.info(&governor).available.unwrap();
    assert!((2_000_000_000..2_000_000_000 + SLOT).contains(&left), "{left}");
    // An eighth at a time: no step takes more than that.
    assert!(450 - held[0] <= 450 / 8 && held.windows(2).all(|w| w[0] - w[1] <= w[0] / 8), "{held:?}");
    world.others = 0;
    let held = world.run(&mut governor, &mut now, 60);
    assert!(held.is_sorted(), "it only grows: {held:?}");
    assert_eq!(governor.held(), 450, "all of it comes back");
}

#[test]
fn growing_waits_for_calm() {
    let mut governor = Governor::new(plan(100, 10));
    let short = MemoryInfo { available: Some(0), ..MemoryInfo::default() };
    let plenty = MemoryInfo { available: Some(90_000_000_000), ..MemoryInfo::default() };
    assert_eq!(governor.sample(1_000, &short), Target::Release(12));
    for now in (1_100..1_000 + CALM_MS).step_by(100) {
        assert_eq!(governor.sample(now, &plenty), Target::Keep, "{now}");
    }
    assert_eq!(governor.sample(1_000 + CALM_MS, &plenty), Target::Regain(3));
    assert_eq!(governor.sample(1_000 + CALM_MS + 50, &plenty), Target::Keep, "not yet due");
    assert!(!governor.is_due(1_000 + CALM_MS + 50) && governor.is_due(1_100 + CALM_MS));
}

#[test]
fn every_sign_of_shortage_counts() {
    let calm = MemoryInfo {
        available: Some(3_000_000_000),
        swapped_pages: Some(100),
        process_rss: Some(1),
        ..MemoryInfo::default()
    };
    let after = |second: MemoryInfo| {
        let mut governor = Governor::new(plan(100, 10));
        assert_eq!(governor.sample(0, &calm), Target::Keep);
        governor.sample(INTERVAL_MS, &second)
    };
    assert_eq!(after(calm), Target::Keep);
    assert_eq!(after(MemoryInfo { swapped_pages: Some(101), ..calm }), Target::Release(1), "swap moves");
    let far = MemoryInfo { swapped_pages: Some(101), available: Some(5_000_000_000), ..calm };
    assert_eq!(after(far), Target::Keep, "somebody else's swap, with much left");
    assert_eq!(after(MemoryInfo { pressure: Some(Pressure::Warning), ..calm }), Target::Release(1));
    assert_eq!(after(MemoryInfo { pressure: Some(Pressure::Normal), ..calm }), Target::Keep);
    let over = plan(100, 10).planned_bytes + 1_000_000_000;
    assert!(matches!(after(MemoryInfo { process_rss: Some(over), ..calm }), Target::Release(_)));
    let in_swap = MemoryInfo { process_swap: Some(over), ..calm };
    assert!(matches!(after(in_swap), Target::Release(_)), "what is in swap is still ours");
    assert_eq!(after(MemoryInfo::default()), Target::Keep, "unknown is no shortage");
}

proptest! {
    /// Whatever the figures say, the slots stay within floor and plan.
    #[test]
    fn never_below_the_floor_nor_above_the_plan(
        slots in 0usize..600,
        floor in 0usize..600,
        slot_bytes in 0u64..u64::MAX,
        figures in prop::collection::vec((any::<Option<u64>>(), any::<Option<u64>>(), any::<Option<u64>>(), 0u64..3000), 1..60),
    ) {
        let mut governor = Governor::new(GovernorPlan { slot_bytes, ..plan(slots, floor) });
        let mut now = 0;
        for (available, process_rss, swapped_pages, passed) in figures {
            now += passed;
            let info = MemoryInfo { available, process_rss, swapped_pages, ..MemoryInfo::default() };
            let before = governor.held();
            let held = match governor.sample(now, &info) {
                Target::Keep => before,
                Target::Release(count) => before - count,
                Target::Regain(count) => before + count,
            };
            prop_assert_eq!(held, governor.held());
            prop_assert!(held >= floor.min(slots) && held <= slots);
        }
    }

    /// While nothing else changes, the slots move in one direction and come to rest.
    #[test]
    fn comes_to_rest_without_going_back_and_forth(
        slots in 1usize..500,
        floor in 0usize..100,
        total in 8_000_000_000u64..60_000_000_000,
        first in 0u64..30_000_000_000,
        then in 0u64..30_000_000_000,
    ) {
        let mut governor = Governor::new(plan(slots, floor));
        let mut now = 0;
        for others in [first, then] {
            let world = World { total, others, swapped: 0 };
            let held = world.run(&mut governor, &mut now, 90);
            let turns = held.windows(3).filter(|w| (w[1] > w[0]) != (w[2] > w[1]) && w[0] != w[1] && w[1] != w[2]);
            prop_assert_eq!(turns.count(), 0, "{:?}", held);
            prop_assert!(held.is_sorted() || held.is_sorted_by(|a, b| a >= b), "{:?}", held);
            let rest = &held[held.len() - 100..];
            prop_assert!(rest.iter().all(|held| *held == rest[0]), "{:?}", held);
            let available = world.info(&governor).available.unwrap();
            prop_assert!(available >= 2_000_000_000 || governor.held() == floor.min(slots));
        }
    }

    /// One machine figure that never changes: shrink to the floor, or grow to a limit, or stay.
    #[test]
    fn constant_figures_give_no_oscillation(available in any::<Option<u64>>(), rss in any::<Option<u64>>()) {
        let mut governor = Governor::new(plan(200, 20));
        let info = MemoryInfo { available, process_rss: rss, swapped_pages: Some(5), ..MemoryInfo::default() };
        let held: Vec<usize> = (0..900).map(|i| { governor.sample(i * INTERVAL_MS, &info); governor.held() }).collect();
        prop_assert!(held.is_sorted() || held.is_sorted_by(|a, b| a >= b), "{:?}", held);
    }
}
