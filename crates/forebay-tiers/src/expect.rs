//! What a cache can be expected to hit, for the planner.
//!
//! Source: [`crate::sim`] on the calibrated routes ([`CALIBRATED`]), eight layers, 1,000
//! tokens of which the first 300 only warm the cache, no history. Reproduced by a test.
//! Other models reuse experts differently; the live counters replace this as soon as
//! there are some.

#[cfg(doc)]
use crate::routes::synthetic::CALIBRATED;

/// Experts of a layer in the table.
const EXPERTS: f64 = 256.0;

/// Slots per layer, hit rate of the default policy.
const TABLE: [(f64, f64); 25] = [
    (1.0, 0.053),
    (2.0, 0.096),
    (3.0, 0.132),
    (4.0, 0.164),
    (5.0, 0.193),
    (6.0, 0.220),
    (7.0, 0.244),
    (8.0, 0.267),
    (10.0, 0.307),
    (12.0, 0.342),
    (14.0, 0.371),
    (16.0, 0.400),
    (20.0, 0.448),
    (25.0, 0.497),
    (32.0, 0.553),
    (40.0, 0.610),
    (48.0, 0.654),
    (64.0, 0.727),
    (80.0, 0.784),
    (96.0, 0.828),
    (128.0, 0.894),
    (160.0, 0.939),
    (192.0, 0.971),
    (224.0, 0.991),
    (256.0, 1.0),
];

/// The share of experts that are expected in memory with the default policy and so many
/// slots in each layer of `experts`: 0 with no slot, 1 with a slot for each.
///
/// Straight lines between the points of the table. A layer of another size is taken to
/// behave like one of 256 with as large a share of slots.
pub fn hit_rate(slots_per_layer: f64, experts: usize) -> f64 {
    let slots = slots_per_layer * EXPERTS / experts.max(1) as f64;
    if slots.is_nan() || slots <= 0.0 {
        return 0.0;
    }
    let mut before = (0.0, 0.0);
    for here in TABLE {
        if slots <= here.0 {
            let share = (slots - before.0) / (here.0 - before.0);
            return before.1 + share * (here.1 - before.1);
        }
        before = here;
    }
    1.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{LayerCache, Policy};
    use crate::routes::synthetic::CALIBRATED;
    use crate::sim::{Outcome, play};

    /// The table against a smaller simulation of another text, and far from it: a wrong
    /// policy is off by 2 to 10 points.
    #[test]
    fn the_table_is_what_the_simulator_finds() {
        for slots in [2, 6, 8, 12, 16, 32, 64, 128] {
            let (ours, expected) = (simulated(slots, 3, 700, 300), hit_rate(slots as f64, 256));
            assert!((ours - expected).abs() < 0.02, "{slots}: {ours:.3}, expected {expected:.3}");
        }
    }

    #[test]
    fn between_and_beyond_the_points() {
        assert_eq!((hit_rate(0.0, 256), hit_rate(-1.0, 256), hit_rate(f64::NAN, 256)), (0.0, 0.0, 0.0));
        assert_eq!((hit_rate(256.0, 256), hit_rate(1e9, 256), hit_rate(64.0, 64)), (1.0, 1.0, 1.0));
        assert!((hit_rate(0.5, 256) - hit_rate(1.0, 256) / 2.0).abs() < 1e-12);
        // As large a share of fewer experts.
        assert!((hit_rate(16.0, 64) - hit_rate(64.0, 256)).abs() < 1e-12);
        assert!((0.0..=1.0).contains(&hit_rate(3.0, 0)));
        let mut before = -1.0;
        for tenth in 0..2600 {
            let slots = f64::from(tenth) / 10.0;
            let now = hit_rate(slots, 256);
            assert!(now >= before, "{slots}");
            before = now;
        }
    }

    /// The hit rate after `warm` of `tokens` tokens.
    fn simulated(slots: usize, layers: usize, tokens: usize, warm: usize) -> f64 {
        let mut outcome = Outcome::default();
        for layer in &CALIBRATED.routes(layers, tokens, 21).layers {
            let mut cache = LayerCache::new(slots, Policy::default());
            play(&mut cache, &layer[..warm], &mut Outcome::default());
            play(&mut cache, &layer[warm..], &mut outcome);
        }
        outcome.hit_rate()
    }
}
