//! Random numbers that are the same on every machine: integer arithmetic, and a table of the normal
//! distribution whose few transcendental calls go to the `libm` crate, never to the system.

use std::sync::LazyLock;

/// A stream of random bits: SplitMix64, whose n-th number is a hash of seed and n.
#[derive(Clone, Debug)]
pub struct Stream(u64);

impl Stream {
    /// The stream called `name`, number `index`, of a seed.
    pub fn new(seed: u64, name: &str, index: u64) -> Self {
        let fnv = name
            .bytes()
            .fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3));
        Self(mix(mix(mix(seed) ^ fnv) ^ index))
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number below `bound`, which must not be 0. The bias is below `bound / 2^32`.
    pub fn below(&mut self, bound: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(bound)) >> 32) as u32
    }

    /// A random order of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<u16> {
        let mut order: Vec<u16> = (0..n as u16).collect();
        for last in (1..n).rev() {
            order.swap(last, self.below(last as u32 + 1) as usize);
        }
        order
    }

    /// Fills `out` with `mean + std * z`, z normal.
    pub fn fill_normal(&mut self, out: &mut [f32], mean: f32, std: f32) {
        let table = &**NORMAL;
        for pair in out.chunks_mut(2) {
            let bits = self.bits();
            pair[0] = mean + std * normal(table, bits as u32);
            if let Some(second) = pair.get_mut(1) {
                *second = mean + std * normal(table, (bits >> 32) as u32);
            }
        }
    }
}

#[inline]
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Cells of equal probability.
const CELLS: usize = 1 << 16;

/// The normal distribution's quantiles at the borders of the cells. The two outermost are finite.
static NORMAL: LazyLock<Box<[f32; CELLS + 1]>> = LazyLock::new(|| {
    let mut borders = Box::new([0.0; CELLS + 1]);
    for cell in 0..=CELLS / 2 {
        let probability = (cell as f64 / CELLS as f64).max(0.125 / CELLS as f64);
        let value = quantile_of_lower_half(probability) as f32;
        (borders[cell], borders[CELLS - cell]) = (value, -value);
    }
    borders[CELLS / 2] = 0.0;
    borders
});

/// The upper 16 bits choose a cell, the lower 16 a place in it.
#[inline]
fn normal(table: &[f32; CELLS + 1], bits: u32) -> f32 {
    let cell = (bits >> 16) as usize;
    let place = (bits & 0xFFFF) as f32 * (1.0 / 65536.0);
    table[cell] + (table[cell + 1] - table[cell]) * place
}

/// x such that the normal distribution is below x with this probability, which is at most one half: bisection
/// on the complementary error function.
fn quantile_of_lower_half(probability: f64) -> f64 {
    let (mut low, mut high) = (-8.0, 0.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        match 0.5 * libm::erfc(-middle / std::f64::consts::SQRT_2) < probability {
            true => low = middle,
            false => high = middle,
        }
    }
    (low + high) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_numbers_have_the_moments_of_the_normal_distribution() {
        let mut values = vec![0.0; 400_001];
        Stream::new(1, "test", 0).fill_normal(&mut values, 0.0, 1.0);
        let moment = |power| values.iter().map(|v| f64::from(*v).powi(power)).sum::<f64>() / 400_001.0;
        assert!(moment(1).abs() < 0.01, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.01, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
        let beyond = |limit: f32| values.iter().filter(|v| v.abs() > limit).count() as f64 / 400_001.0;
        // Two-sided tails of the normal distribution.
        assert!((beyond(1.959_964) - 0.05).abs() < 0.002);
        assert!((beyond(3.290_527) - 0.001).abs() < 0.000_3);
    }

    #[test]
    fn quantiles_are_those_of_tables() {
        for (probability, want) in [(0.5, 0.0), (0.025, -1.959_963_985), (0.001, -3.090_232_306)] {
            assert!((quantile_of_lower_half(probability) - want).abs() < 1e-8);
        }
    }

    #[test]
    fn streams_differ_by_seed_name_and_index() {
        let first = |seed, name, index| Stream::new(seed, name, index).bits();
        let all = [first(1, "a", 0), first(2, "a", 0), first(1, "b", 0), first(1, "a", 1)];
        assert!(all.iter().enumerate().all(|(i, v)| !all[..i].contains(v)));
        let mut order = Stream::new(1, "order", 0).permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<u16>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<u16>>());
    }
}
