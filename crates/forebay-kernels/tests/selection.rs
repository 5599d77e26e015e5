//! Attention, the indexer's selection and the router, against plain restatements.

mod common;

use common::{floats, kernels, random, same_bits};
use forebay_core::float::{bf16_to_f32, f32_to_bf16};
use forebay_kernels::*;
use proptest::prelude::*;

/// A cache of random keys and one random query row.
struct World {
    heads: usize,
    r: usize,
    p: usize,
    latents: Vec<f32>,
    rope_keys: Vec<f32>,
    q: Vec<f32>,
    q_rope: Vec<f32>,
}

impl World {
    fn new(heads: usize, r: usize, p: usize, positions: usize, seed: u64) -> Self {
        let mut next = random(seed);
        // Values that bfloat16 holds exactly, so that both caches can be compared.
        let mut take =
            |n| floats(n, 1, &mut next).iter().map(|v| bf16_to_f32(f32_to_bf16(4.0 * v))).collect();
        Self {
            heads,
            r,
            p,
            latents: take(positions * r),
            rope_keys: take(positions * p),
            q: take(heads * r),
            q_rope: take(heads * p),
        }
    }

    fn attend(&self, k: Kernels, bf16: bool, attended: Attended<'_>) -> Vec<f32> {
        let narrow = |v: &[f32]| v.iter().map(|v| f32_to_bf16(*v)).collect::<Vec<_>>();
        let (latents, rope_keys) = (narrow(&self.latents), narrow(&self.rope_keys));
        let keys = if bf16 {
            KeyCache { latents: KeyRows::Bf16(&latents), rope_keys: KeyRows::Bf16(&rope_keys) }
        } else {
            KeyCache { latents: KeyRows::F32(&self.latents), rope_keys: KeyRows::F32(&self.rope_keys) }
        };
        let query =
            Attention { latent_queries: &self.q, rope_queries: &self.q_rope, heads: self.heads, scale: 0.25 };
        let mut out = vec![f32::NAN; self.q.len()];
        attend(k, &query, keys, attended, &mut AttendScratch::default(), &mut out);
        out
    }

    /// Plain softmax attention in f64.
    fn reference(&self, attended: &[u32]) -> Vec<f64> {
        let mut out = Vec::new();
        for h in 0..self.heads {
            let dot = |a: &[f32], b: &[f32]| -> f64 {
                a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
            };
            let score = |t: usize| {
                let latent = dot(&self.q[h * self.r..][..self.r], &self.latents[t * self.r..][..self.r]);
                let rope = dot(&self.q_rope[h * self.p..][..self.p], &self.rope_keys[t * self.p..][..self.p]);
                (latent + rope) * 0.25
            };
            let scores: Vec<f64> = attended.iter().map(|t| score(*t as usize)).collect();
            let max = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
            let total: f64 = weights.iter().sum();
            for c in 0..self.r {
                let value = |t: u32| f64::from(self.latents[t as usize * self.r + c]);
                out.push(attended.iter().zip(&weights).map(|(t, w)| w * value(*t)).sum::<f64>() / total);
            }
        }
        out
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn attention_agrees(
        (heads, r, p) in (1..4usize, 1..150usize, 0..40usize),
        (start, len) in (0..200usize, 1..200usize),
        seed in any::<u64>(),
    ) {
        let world = World::new(heads, r, p, start + len, seed);
        let all: Vec<u32> = (start as u32..(start + len) as u32).collect();
        let mut next = random(seed);
        let some: Vec<u32> = all.iter().copied().filter(|_| next().is_multiple_of(3)).collect();
        let scalar = Kernels::with_isa(Isa::Scalar).unwrap();
        let dense = world.attend(scalar, false, Attended::Range(start..start + len));
        let sparse = world.attend(scalar, false, Attended::List(&some));
        for (a, b) in dense.iter().zip(world.reference(&all)) {
            prop_assert!((f64::from(*a) - b).abs() < 2e-4, "{a} for {b}");
        }
        if !some.is_empty() {
            for (a, b) in sparse.iter().zip(world.reference(&some)) {
                prop_assert!((f64::from(*a) - b).abs() < 2e-4, "{a} for {b}");
            }
        }
        for k in kernels() {
            for bf16 in [false, true] {
                let range = world.attend(k, bf16, Attended::Range(start..start + len));
                prop_assert!(same_bits(&range, &dense), "{k:?}");
                // A selection that keeps everything is dense attention, bit for bit.
                prop_assert!(same_bits(&world.attend(k, bf16, Attended::List(&all)), &dense), "{k:?}");
                prop_assert!(same_bits(&world.attend(k, bf16, Attended::List(&some)), &sparse), "{k:?}");
            }
        }
    }

    #[test]
    fn selection_is_the_sorted_prefix(
        n in 0..400usize,
        keep in 0..420usize,
        kinds in 1..9u64,
        seed in any::<u64>(),
    ) {
        // Few distinct values, so that ties are common; every kind of special value.
        let values = [0.5, -0.0, 0.0, f32::NAN, -1.5, f32::INFINITY, f32::NEG_INFINITY, 1e-40, -f32::NAN];
        let mut next = random(seed);
        let scores: Vec<f32> = (0..n).map(|_| values[(next() % kinds) as usize]).collect();
        let key = |t: u32| {
            let s = scores[t as usize];
            if s.is_nan() { (0, 0.0) } else { (1, s) }
        };
        // Independent: sort all positions by score, ties by position, and keep a prefix.
        let mut want: Vec<u32> = (0..n as u32).collect();
        want.sort_by(|a, b| key(*b).partial_cmp(&key(*a)).unwrap().then(a.cmp(b)));
        want.truncate(keep);
        if let Some(last) = want.last().copied() {
            let above = want.iter().filter(|t| key(**t) > key(last)).count();
            want[..above].sort_unstable();
        }
        let (mut out, mut scratch) = (vec![7; 3], SelectScratch::default());
        select_top_k(&scores, keep, &mut scratch, &mut out);
        prop_assert_eq!(&out, &want);
        want.sort_unstable();
        for k in kernels() {
            let mut ascending = vec![7; keep];
            let found = select_positions(k, &scores, keep, &mut scratch, &mut ascending);
            prop_assert_eq!(&ascending[..found], &want);
        }
    }

    #[test]
    fn routing_is_repeated_arg_max(
        experts in 1..300usize,
        wanted in 1..9usize,
        kinds in 1..40u64,
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let mut pick = || match next() % kinds {
            7 => f32::NAN,
            8 => f32::INFINITY,
            i => i as f32 * 0.37 - 3.0,
        };
        let logits: Vec<f32> = (0..experts).map(|_| pick()).collect();
        let bias: Vec<f32> = (0..experts).map(|_| pick()).collect();
        let k = Kernels::detect();
        let mut scores = logits.clone();
        k.sigmoid(&mut scores);
        let mut taken: Vec<u32> = Vec::new();
        let choice = |e: usize| scores[e] + bias[e];
        for _ in 0..wanted {
            let mut best: Option<usize> = None;
            for e in (0..experts).filter(|e| choice(*e).is_finite() && !taken.contains(&(*e as u32))) {
                if best.is_none_or(|b| choice(e) > choice(b)) {
                    best = Some(e);
                }
            }
            taken.extend(best.map(|b| b as u32));
        }
        let (mut ids, mut weights) = (vec![0; wanted], vec![0f32; wanted]);
        let rule = RouterRule { normalise: true, scaling: 2.5 };
        let mut work = logits.clone();
        let result = route(k, &mut work, &bias, rule, &mut ids, &mut weights);
        if taken.len() < wanted {
            let finite = taken.len();
            prop_assert_eq!(result, Err(RouterError::TooFewExperts { wanted, finite, experts }));
        } else {
            prop_assert_eq!(result, Ok(()));
            prop_assert_eq!(&ids, &taken);
            let sum: f32 = ids.iter().map(|e| scores[*e as usize]).sum::<f32>() + 1e-20;
            for (w, e) in weights.iter().zip(&ids) {
                prop_assert_eq!(*w, scores[*e as usize] / sum * 2.5);
            }
        }
    }

    #[test]
    fn indexer_scores_agree(
        (heads, dim, n) in (1..5usize, 1..140usize, 1..30usize),
        seed in any::<u64>(),
    ) {
        let mut next = random(seed);
        let (q, w) = (floats(heads * dim, 1, &mut next), floats(heads, 1, &mut next));
        let keys = floats(n * dim, 1, &mut next);
        let run = |k: Kernels| {
            let mut out = vec![0f32; n];
            indexer_scores(k, &q, &w, KeyRows::F32(&keys), dim, &mut out);
            out
        };
        let want = run(Kernels::with_isa(Isa::Scalar).unwrap());
        for (t, score) in want.iter().enumerate() {
            let mut sum = 0f64;
            for h in 0..heads {
                let terms = q[h * dim..][..dim].iter().zip(&keys[t * dim..][..dim]);
                let dot: f64 = terms.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                sum += f64::from(w[h]) * (dot / (dim as f64).sqrt()).max(0.0);
            }
            prop_assert!((f64::from(*score) - sum / (heads as f64).sqrt()).abs() < 1e-5);
        }
        for k in kernels() {
            prop_assert!(same_bits(&run(k), &want), "{k:?}");
        }
    }
}

#[test]
fn all_equal_scores_keep_the_first_positions() {
    let mut out = Vec::new();
    select_top_k(&[0.25; 2000], 500, &mut SelectScratch::default(), &mut out);
    assert!(out.iter().copied().eq(0..500));
}

#[test]
fn a_poisoned_or_empty_attention_is_nan() {
    let mut world = World::new(2, 8, 4, 100, 5);
    world.latents[70 * 8] = f32::NAN;
    for k in kernels() {
        assert!(world.attend(k, false, Attended::Range(0..100)).iter().all(|v| v.is_nan()));
        assert!(world.attend(k, false, Attended::Range(0..70)).iter().all(|v| v.is_finite()));
        assert!(world.attend(k, false, Attended::List(&[])).iter().all(|v| v.is_nan()));
        assert!(world.attend(k, false, Attended::Range(9..9)).iter().all(|v| v.is_nan()));
    }
}

#[test]
fn an_indexer_score_that_is_nan_ranks_last() {
    let mut scores = [0f32; 2];
    let keys = [f32::NAN, 1.0, 1.0, 1.0];
    for k in kernels() {
        indexer_scores(k, &[1.0, -9.0], &[1.0], KeyRows::F32(&keys), 2, &mut scores);
        assert!(scores[0].is_nan() && scores[1] == 0.0);
        let mut out = Vec::new();
        select_top_k(&scores, 1, &mut SelectScratch::default(), &mut out);
        assert_eq!(out, [1]);
    }
}
