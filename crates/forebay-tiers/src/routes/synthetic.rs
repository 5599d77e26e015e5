//! Routes made up to be like those of GLM-5.2.
//!
//! A router's score of an expert is the sum of what the layer likes (fixed), a topic
//! that drifts, and the token. The three strengths and two speeds are fitted to nothing
//! but published reuse: previous-token overlap .26-.36, 22-24 distinct experts in 4
//! tokens and about 96 in 32 (docs/cache.md, "Where the routes come from"). Measured hit rates
//! then come out right without having been fitted.
//!
//! Same seed, same routes, on every machine: integers make the noise, and what follows
//! is sums, products and square roots.

use super::{Routes, Union};

/// How experts come to be chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Synthetic {
    /// Experts of a layer.
    pub experts: usize,
    /// Experts that a token uses.
    pub top_k: usize,
    /// Standard deviation over experts of what the layer likes; the token's is 1.
    pub popularity: f64,
    /// The same of the topic.
    pub topic: f64,
    /// Correlation of the topic with that of the token before.
    pub topic_memory: f64,
    /// Correlation of the token's own part with that of the token before.
    pub token_memory: f64,
}

/// The fit to GLM-5.2.
pub const CALIBRATED: Synthetic =
    Synthetic { experts: 256, top_k: 8, popularity: 0.6, topic: 0.5, topic_memory: 0.97, token_memory: 0.35 };

/// What a layer likes is drawn apart from what is said, so that texts of one model share it.
const LIKES: u64 = 0x11CE;

impl Synthetic {
    /// Routes of `tokens` single-token steps in `layers` layers. The model is always the
    /// same; `seed` picks the text.
    pub fn routes(&self, layers: usize, tokens: usize, seed: u64) -> Routes {
        let layers = (0..layers).map(|layer| self.layer(layer, tokens, seed)).collect();
        Routes { experts: self.experts, top_k: self.top_k, layers }
    }

    fn layer(&self, layer: usize, tokens: usize, seed: u64) -> Vec<Union> {
        let likes = Noise::new(LIKES, layer).take(self.experts, self.popularity);
        let mut noise = Noise::new(seed.wrapping_mul(2).wrapping_add(1), layer);
        let mut topic = noise.take(self.experts, self.topic);
        let mut token = noise.take(self.experts, 1.0);
        let fresh = |memory: f64| (1.0 - memory * memory).sqrt();
        let (new_topic, new_token) = (fresh(self.topic_memory) * self.topic, fresh(self.token_memory));
        let mut order: Vec<u32> = Vec::new();
        let mut scores = vec![0.0; self.experts];
        let mut steps = Vec::with_capacity(tokens);
        for _ in 0..tokens {
            for expert in 0..self.experts {
                topic[expert] = self.topic_memory * topic[expert] + new_topic * noise.draw();
                token[expert] = self.token_memory * token[expert] + new_token * noise.draw();
                scores[expert] = likes[expert] + topic[expert] + token[expert];
            }
            order.clear();
            order.extend(0..self.experts as u32);
            let best = |a: &u32, b: &u32| scores[*b as usize].total_cmp(&scores[*a as usize]).then(a.cmp(b));
            if self.top_k < order.len() {
                order.select_nth_unstable_by(self.top_k, best);
                order.truncate(self.top_k);
            }
            order.sort_unstable_by(best);
            steps.push(Union::of([order.as_slice()]));
        }
        steps
    }
}

/// Nearly normal noise from integers: the set bits of a random word (binomial), smoothed
/// by a uniform part.
struct Noise(u64);

impl Noise {
    fn new(seed: u64, stream: usize) -> Self {
        let mut noise = Self(seed);
        let start = noise.word() ^ (stream as u64).wrapping_mul(0xD6E8_FEB8_6659_FD93);
        Self(start)
    }

    /// `SplitMix64`.
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Mean 0, variance 1: 64 coins have variance 16, the uniform part 1/12.
    fn draw(&mut self) -> f64 {
        let coins = f64::from(self.word().count_ones()) - 32.0;
        let uniform = (self.word() >> 11) as f64 / (1u64 << 53) as f64 - 0.5;
        (coins + uniform) / (16.0f64 + 1.0 / 12.0).sqrt()
    }

    fn take(&mut self, count: usize, deviation: f64) -> Vec<f64> {
        (0..count).map(|_| deviation * self.draw()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs of the published SplitMix64 for seed 1234567.
    #[test]
    fn the_generator_is_the_published_one() {
        let mut noise = Noise(1_234_567);
        assert_eq!(noise.word(), 6_457_827_717_110_365_317);
        assert_eq!(noise.word(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn noise_is_nearly_normal() {
        let draws = Noise::new(1, 0).take(200_000, 1.0);
        let mean = |power: i32| draws.iter().map(|x| x.powi(power)).sum::<f64>() / draws.len() as f64;
        assert!(mean(1).abs() < 0.01 && (mean(2) - 1.0).abs() < 0.02, "{} {}", mean(1), mean(2));
        // The fourth moment of a normal variable is 3, of 64 coins 3 - 2/64.
        assert!((mean(4) - 3.0).abs() < 0.1, "{}", mean(4));
    }

    /// The published reuse (docs/cache.md, "Where the routes come from"), over several texts.
    #[test]
    fn reuse_is_that_of_the_model() {
        let routes = CALIBRATED.routes(6, 400, 5);
        let overlap = routes.overlap().unwrap();
        assert!((0.25..0.36).contains(&overlap), "previous token: {overlap}");
        let (four, many) = (routes.distinct(4).unwrap(), routes.distinct(32).unwrap());
        assert!((22.0..24.6).contains(&four), "4 tokens: {four}");
        assert!((93.0..99.0).contains(&many), "32 tokens: {many}");
        assert!(routes.layers.iter().flatten().all(|union| union.experts.len() == 8 && union.rows == 1));
        assert_eq!(routes, CALIBRATED.routes(6, 400, 5));
        assert_ne!(routes, CALIBRATED.routes(6, 400, 6));
    }

    #[test]
    fn fewer_experts_than_a_token_would_use() {
        let tiny = Synthetic { experts: 3, ..CALIBRATED };
        assert!(tiny.routes(1, 5, 0).layers[0].iter().all(|union| union.experts.len() == 3));
    }
}
