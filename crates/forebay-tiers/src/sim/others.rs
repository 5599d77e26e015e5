//! What policies are compared with. None of this runs in the engine.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap, HashSet};

use super::Outcome;
use crate::cache::{LayerCache, Policy};
use crate::routes::{Routes, Union};

/// One recency list for all layers, in the order in which a pass visits them.
pub(super) fn global_lru(routes: &Routes, slots: usize, outcome: &mut Outcome) {
    let mut stamp_of: HashMap<(usize, u32), usize> = HashMap::new();
    let mut by_stamp: BTreeMap<usize, (usize, u32)> = BTreeMap::new();
    let mut clock = 0;
    let steps = routes.layers.iter().map(Vec::len).max().unwrap_or(0);
    for step in 0..steps {
        for (layer, unions) in routes.layers.iter().enumerate() {
            for &expert in unions.get(step).map_or(&[][..], |union| &union.experts) {
                clock += 1;
                let before = stamp_of.insert((layer, expert), clock);
                by_stamp.insert(clock, (layer, expert));
                match before {
                    Some(stamp) => drop(by_stamp.remove(&stamp)),
                    None if stamp_of.len() > slots => {
                        let (_, oldest) = by_stamp.pop_first().expect("as many stamps as experts");
                        stamp_of.remove(&oldest);
                    }
                    None => {}
                }
                outcome.add(usize::from(before.is_some()), usize::from(before.is_none()));
            }
        }
    }
}

/// `pinned` experts that `counts` has most of, ties to the lower id, and recency for the
/// rest in which even the step's own experts may go: the newest stay, and of those that
/// are equally new the ones that came in last.
pub(super) fn pins_and_trimmed_lru(
    steps: &[Union],
    counts: &[u64],
    pinned: usize,
    recent: usize,
    outcome: &mut Outcome,
) {
    let mut order: Vec<u32> = (0..counts.len() as u32).collect();
    order.sort_by_key(|&expert| (Reverse(counts[expert as usize]), expert));
    let pins: HashSet<u32> = order.into_iter().take(pinned).collect();
    // In the order in which they came in: (expert, step of its last use).
    let mut resident: Vec<(u32, usize)> = Vec::new();
    for (step, union) in steps.iter().enumerate() {
        let mut hits = 0;
        for &expert in &union.experts {
            match resident.iter_mut().find(|(other, _)| *other == expert) {
                _ if pins.contains(&expert) => hits += 1,
                Some((_, last)) => {
                    *last = step;
                    hits += 1;
                }
                None => resident.push((expert, step)),
            }
        }
        let mut oldest: Vec<(usize, usize)> = resident.iter().enumerate().map(|(at, r)| (r.1, at)).collect();
        oldest.sort_unstable();
        let gone: HashSet<usize> =
            oldest.iter().take(resident.len().saturating_sub(recent)).map(|&(_, at)| at).collect();
        let mut at = 0..;
        resident.retain(|_| at.next().is_some_and(|at| !gone.contains(&at)));
        outcome.add(hits, union.experts.len() - hits);
    }
}

/// Recency that sees a union as so many steps of one expert.
pub(super) fn one_at_a_time(steps: &[Union], quota: usize, outcome: &mut Outcome) {
    let mut cache = LayerCache::new(quota, Policy::Lru);
    for expert in steps.iter().flat_map(|union| &union.experts) {
        let hits = cache.plan(&[*expert]).hits.len();
        outcome.add(hits, 1 - hits);
    }
}

/// Keeps, of the residents and the union together, those that are needed soonest.
pub(super) fn belady(steps: &[Union], quota: usize, outcome: &mut Outcome) {
    let next = next_uses(steps);
    let mut resident: HashMap<u32, usize> = HashMap::new();
    for (union, next) in steps.iter().zip(&next) {
        let hits = union.experts.iter().filter(|expert| resident.contains_key(expert)).count();
        outcome.add(hits, union.experts.len() - hits);
        resident.extend(union.experts.iter().copied().zip(next.iter().copied()));
        if resident.len() > quota {
            let mut soonest: Vec<(usize, u32)> =
                resident.iter().map(|(&expert, &use_)| (use_, expert)).collect();
            soonest.sort_unstable();
            resident = soonest.into_iter().take(quota).map(|(use_, expert)| (expert, use_)).collect();
        }
    }
}

/// Knows the future too, but takes a union's experts one after another, so that those
/// before may go for those after.
pub(super) fn belady_one_at_a_time(steps: &[Union], quota: usize, outcome: &mut Outcome) {
    let next = next_uses(steps);
    let mut resident: HashMap<u32, usize> = HashMap::new();
    for (union, next) in steps.iter().zip(&next) {
        for (&expert, &use_) in union.experts.iter().zip(next) {
            let hit = resident.contains_key(&expert);
            outcome.add(usize::from(hit), usize::from(!hit));
            if !hit && resident.len() >= quota {
                let last = resident.iter().map(|(&other, &use_)| (use_, other)).max();
                match last {
                    Some((latest, other)) if latest > use_ => drop(resident.remove(&other)),
                    _ => continue,
                }
            }
            resident.insert(expert, use_);
        }
    }
}

/// For every member of every union the step that uses it next; `usize::MAX` for none.
fn next_uses(steps: &[Union]) -> Vec<Vec<usize>> {
    let mut later: HashMap<u32, usize> = HashMap::new();
    let mut next: Vec<Vec<usize>> = vec![Vec::new(); steps.len()];
    for (step, union) in steps.iter().enumerate().rev() {
        let of = |expert: &u32| later.get(expert).copied().unwrap_or(usize::MAX);
        next[step] = union.experts.iter().map(of).collect();
        later.extend(union.experts.iter().map(|expert| (*expert, step)));
    }
    next
}
