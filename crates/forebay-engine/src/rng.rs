//! The random numbers of one request.

/// xorshift64 with the seeding of the reference, one per request.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// The generator of seed `seed`. The same seed gives the same draws on every machine.
    pub fn new(seed: u64) -> Self {
        let state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(1);
        // The all-zero state is a fixed point; exactly one seed leads there.
        Self(if state == 0 { 0x9E37_79B9_7F4A_7C15 } else { state })
    }

    /// The next draw, uniform in [0, 1) with 53 bits.
    pub fn next_unit(&mut self) -> f64 {
        let mut s = self.0;
        s ^= s << 13;
        s ^= s >> 7;
        s ^= s << 17;
        self.0 = s;
        (s >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Captured from the reference.
    #[test]
    fn published_draws() {
        let cases: [(u64, [f64; 4]); 3] = [
            (1, [0.859_794_120_954, 0.331_789_833_281, 0.836_498_492_483, 0.748_700_271_344]),
            (0, [0.000_000_000_059, 0.062_503_875_710, 0.605_934_392_529, 0.958_327_592_195]),
            (2, [0.719_588_241_619, 0.858_911_302_880, 0.433_915_677_631, 0.019_202_597_250]),
        ];
        for (seed, want) in cases {
            let mut rng = Rng::new(seed);
            for u in want {
                assert!((rng.next_unit() - u).abs() < 1e-12, "seed {seed}");
            }
        }
    }

    #[test]
    fn no_seed_gets_stuck_at_zero() {
        // The seed s with s * 0x9E3779B97F4A7C15 = -1 mod 2^64, found by Newton's inversion.
        let odd = 0x9E37_79B9_7F4A_7C15u64;
        let mut inverse = odd;
        for _ in 0..6 {
            inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
        }
        let seed = inverse.wrapping_neg();
        assert_eq!(seed.wrapping_mul(odd).wrapping_add(1), 0);
        let mut rng = Rng::new(seed);
        assert!((0..4).map(|_| rng.next_unit()).any(|u| u != 0.0));
    }
}
