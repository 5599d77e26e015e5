use super::*;
use crate::sample::MAX_BIAS;
use proptest::prelude::*;

fn nucleus(temperature: f32, top_p: f32, seed: u64) -> Sampler {
    sampler(Sampling { temperature, top_p, seed, ..Sampling::greedy() })
}

fn sampler(sampling: Sampling) -> Sampler {
    Sampler::new(sampling).unwrap()
}

fn distribution(sampling: Sampling, logits: &[f32]) -> Vec<f32> {
    sampler(sampling).distribution(logits, None).unwrap().to_vec()
}

fn close(found: &[f32], want: &[f32]) {
    assert_eq!(found.len(), want.len());
    for (a, b) in found.iter().zip(want) {
        assert!((a - b).abs() < 2e-7, "{found:?} against {want:?}");
    }
}

#[test]
fn d01_nucleus() {
    let logits = [2.0, 1.0, 0.0, -1.0];
    let cases: [(f32, f32, [f32; 4]); 6] = [
        (1.0, 1.0, [0.6439143, 0.2368828, 0.0871443, 0.0320586]),
        (1.0, 0.9, [0.6652409, 0.2447285, 0.0900306, 0.0]),
        (1.0, 0.5, [1.0, 0.0, 0.0, 0.0]),
        (0.5, 0.9, [0.880_797, 0.1192029, 0.0, 0.0]),
        (2.0, 0.9, [0.4550542, 0.2760043, 0.1674051, 0.1015363]),
        (1e-9, 1.0, [1.0, 0.0, 0.0, 0.0]),
    ];
    for (temperature, top_p, want) in cases {
        close(nucleus(temperature, top_p, 0).distribution(&logits, None).unwrap(), &want);
    }
}

#[test]
fn d02_ties_by_ascending_id() {
    let kept = |n: usize, sampling: Sampling| -> Vec<usize> {
        let d = distribution(sampling, &vec![0.5; n]);
        (0..n).filter(|&i| d[i] > 0.0).collect()
    };
    let top_p = |top_p| Sampling { temperature: 1.0, top_p, ..Sampling::greedy() };
    assert_eq!(kept(4, top_p(0.5)), [0, 1]);
    assert_eq!(kept(6, top_p(0.5)), [0, 1, 2]);
    assert_eq!(kept(4, top_p(0.9)), [0, 1, 2, 3]);
    let top_k = |top_k| Sampling { temperature: 1.0, top_k, ..Sampling::greedy() };
    assert_eq!(kept(200, top_k(3)), [0, 1, 2]);
    assert_eq!(kept(3, top_k(200)), [0, 1, 2]);
}

#[test]
fn d03_non_finite() {
    let logits = [1.0, f32::NAN, 3.0, f32::INFINITY, 2.0];
    assert_eq!(argmax(&logits), Ok(2));
    let mut s = nucleus(1.0, 1.0, 0);
    close(s.distribution(&logits, None).unwrap(), &[0.0900306, 0.0, 0.6652409, 0.0, 0.2447285]);
    s.pick(&logits, None).unwrap();
    assert_eq!(s.non_finite(), 2);
    let none = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
    let error = SampleError::NoFiniteLogit { vocab: 3 };
    assert_eq!(argmax(&none), Err(error.clone()));
    assert_eq!(nucleus(1.0, 0.9, 0).pick(&none, None), Err(error.clone()));
    let all: TokenSet = [0, 1, 2].into_iter().collect();
    assert_eq!(nucleus(1.0, 0.9, 0).pick(&none, Some(&all)), Err(error));
    assert_eq!(argmax(&[3.0, 1.0, 3.0]), Ok(0));
}

#[test]
fn d04_draws_of_seed_one() {
    let logits = [2.0, 1.0, 0.0, -1.0];
    let draws = |mut s: Sampler| (0..8).map(|_| s.pick(&logits, None).unwrap()).collect::<Vec<_>>();
    assert_eq!(draws(nucleus(1.0, 0.9, 1)), [1, 0, 1, 1, 0, 0, 0, 0]);
    let banned = Sampling {
        temperature: 1.0,
        top_p: 0.9,
        seed: 1,
        logit_bias: vec![(0, -MAX_BIAS)],
        ..Sampling::greedy()
    };
    assert_eq!(draws(sampler(banned)), [2, 1, 2, 2, 1, 1, 1, 1]);
}

/// Decode spec D-12, as far as decision 0015 takes it over: the draft 0 is right with U = .4 and wrong with U = .6, and
/// then the token is 1.
#[test]
fn d12_the_draw_itself_judges_the_draft() {
    let row = [0.5, 0.3, 0.2];
    assert_eq!([0.4, 0.6, 0.85].map(|u| draw(&row, u)), [0, 1, 2]);
}

/// Computed with numpy: bias +1 on 4; for tokens of prompt [0, 3] and answer [1, 1, 3] l / 1.5 if l > 0 else 1.5 l, less
/// 0.5 count + 0.25 for those of the answer; softmax(l) and softmax(l / 0.8).
#[test]
fn penalties_and_biases() {
    let logits = [2.0, 1.0, 0.0, -1.0, 0.5];
    let sampling = |temperature| Sampling {
        temperature,
        repetition_penalty: 1.5,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        logit_bias: vec![(4, 1.0)],
        ..Sampling::greedy()
    };
    let cases = [
        (1.0, [0.3817031, 0.0561472, 0.1006159, 0.0106048, 0.450929]),
        (0.8, [0.3963632, 0.0361074, 0.0748633, 0.0044959, 0.4881702]),
    ];
    for (temperature, want) in cases {
        let mut s = sampler(sampling(temperature));
        s.prompt([0, 3].into_iter());
        for token in [1, 1, 3] {
            // The only one that is allowed: the history is the answer's, whatever the logits.
            let only: TokenSet = [token].into_iter().collect();
            assert_eq!(s.pick(&logits, Some(&only)), Ok(token));
        }
        close(s.distribution(&logits, None).unwrap(), &want);
    }
    let mut greedy = sampler(sampling(0.0));
    assert_eq!(greedy.pick(&logits, None), Ok(0));
    // 2 / 1.5 - 0.5 - 0.25 = 0.58 against 0.5 + 1.
    assert_eq!(greedy.pick(&logits, None), Ok(4));
}

/// Computed with numpy: w = exp((l - max) / T); w < min_p dropped; the k largest kept; p = w / sum; the shortest
/// prefix by descending p that reaches top_p kept and rescaled.
#[test]
fn truncations_in_their_order() {
    let logits = [2.0, 1.0, 0.0, -1.0, 0.5];
    let cases: [(f32, f32, usize, f32, [f32; 5]); 5] = [
        (1.0, 0.0, 2, 1.0, [0.7310586, 0.2689414, 0.0, 0.0, 0.0]),
        (1.0, 0.2, 0, 1.0, [0.6285317, 0.2312239, 0.0, 0.0, 0.1402444]),
        (0.8, 0.1, 3, 0.8, [0.7772999, 0.2227001, 0.0, 0.0, 0.0]),
        // Behind top-k the first two have 86 %; of all five they have 79 %.
        (1.0, 0.0, 3, 0.9, [0.6285317, 0.2312239, 0.0, 0.0, 0.1402444]),
        (1.0, 0.0, 0, 0.9, [0.5792585, 0.2130973, 0.0783941, 0.0, 0.12925]),
    ];
    for (temperature, min_p, top_k, top_p, want) in cases {
        let sampling = Sampling { temperature, min_p, top_k, top_p, ..Sampling::greedy() };
        close(&distribution(sampling, &logits), &want);
    }
}

/// Computed with numpy: l - log(sum(exp(l))).
#[test]
fn log_probabilities_are_the_models_own() {
    let logits = [2.0, 1.0, 0.0, -1.0, 0.5];
    let sampling = Sampling {
        temperature: 0.3,
        top_k: 1,
        logit_bias: vec![(0, -50.0), (1, -100.0)],
        logprobs: Some(3),
        ..Sampling::greedy()
    };
    let mut s = sampler(sampling);
    let token = s.pick(&logits, None).unwrap();
    assert_eq!(token, 4);
    let found = s.logprobs(&logits, token).unwrap();
    let near = |a: f64, b: f64| assert!((a - b).abs() < 1e-8, "{a} against {b}");
    near(found.chosen, -2.074437940);
    assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 1, 4]);
    for ((_, a), b) in found.top.iter().zip([-0.574437940, -1.574437940, -2.074437940]) {
        near(*a, b);
    }
    // What is not finite is not there.
    let holes = [1.0, f32::NAN, 1.0, f32::INFINITY];
    let found = sampler(Sampling { logprobs: Some(20), ..Sampling::greedy() }).logprobs(&holes, 2).unwrap();
    assert_eq!(found.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [0, 2]);
    near(found.chosen, -std::f64::consts::LN_2);
    assert_eq!(sampler(Sampling::greedy()).logprobs(&holes, 2), None);
}

#[test]
fn what_is_not_allowed_or_banned_is_never_chosen() {
    let logits = [9.0, 1.0, 8.0, 0.0];
    let allowed: TokenSet = [1, 3, 77].into_iter().collect();
    for temperature in [0.0, 1.0] {
        let banned = Sampling { temperature, logit_bias: vec![(1, -100.0)], ..Sampling::greedy() };
        let mut s = sampler(banned.clone());
        assert!((0..50).all(|_| s.pick(&logits, Some(&allowed)) == Ok(3)));
        let only: TokenSet = [1].into_iter().collect();
        assert_eq!(s.pick(&logits, Some(&only)), Err(SampleError::NothingLeft));
        let empty = TokenSet::new();
        assert_eq!(s.pick(&logits, Some(&empty)), Err(SampleError::NothingLeft));
    }
}

/// A penalty or bias that overflows leaves a logit in its place, at the end of the scale.
#[test]
fn large_logits_stay_finite() {
    let logits = [f32::MAX, 1.0, f32::MIN];
    let sampling =
        Sampling { repetition_penalty: 0.5, logit_bias: vec![(0, 100.0), (2, -99.0)], ..Sampling::greedy() };
    let mut s = sampler(sampling);
    s.prompt([0, 1, 2].into_iter());
    assert_eq!(s.pick(&logits, None), Ok(0));
    let kept = sampler(Sampling { logit_bias: vec![(2, -99.0)], ..Sampling::greedy() })
        .pick(&[f32::NAN, f32::NAN, f32::MIN], None);
    assert_eq!(kept, Ok(2));
}

/// Low temperatures leave one possible token, and small vocabularies fewer than a sorting block.
#[test]
fn a_peaked_or_tiny_distribution_has_a_nucleus() {
    let logits: Vec<f32> = (0..300).map(|i| if i == 77 { 9.0 } else { (i % 7) as f32 }).collect();
    for temperature in [1e-45, 1e-4, 0.01, 0.1, 0.15, 0.3, 1.0, 2.0] {
        for top_p in [1e-6, 0.5, 0.9, 0.999] {
            let mut s = nucleus(temperature, top_p, 5);
            let picked = s.pick(&logits, None).unwrap() as usize;
            assert!(s.distribution(&logits, None).unwrap()[picked] > 0.0);
            if temperature <= 0.15 {
                assert_eq!(picked, 77, "temperature {temperature}, top-p {top_p}");
            }
            assert_eq!(nucleus(temperature, top_p, 5).pick(&[1.0], None), Ok(0));
        }
    }
}

#[test]
fn zero_draw_never_picks_an_impossible_token() {
    assert_eq!(draw(&[0.0, 0.0, 1.0], 0.0), 2);
    assert_eq!(draw(&[0.5, 0.499_999, 0.0], 0.999_999_9), 1);
}

/// The plain definition of docs/sampling.md, in f64, with full sorts.
fn plainly(sampling: &Sampling, logits: &[f32]) -> Vec<f64> {
    let ranked = |weights: &[f64]| {
        let mut order: Vec<usize> = (0..weights.len()).collect();
        order.sort_by(|a, b| weights[*b].total_cmp(&weights[*a]).then(a.cmp(b)));
        order
    };
    let top = logits.iter().copied().fold(f32::MIN, f32::max);
    let mut weights: Vec<f64> = logits
        .iter()
        .map(|&l| f64::from(libm::expf((l - top) / sampling.temperature)))
        .map(|w| if w < f64::from(sampling.min_p) { 0.0 } else { w })
        .collect();
    if sampling.top_k > 0 {
        for id in ranked(&weights).into_iter().skip(sampling.top_k) {
            weights[id] = 0.0;
        }
    }
    let sum: f64 = weights.iter().sum();
    let mut p: Vec<f64> = weights.iter().map(|w| w / sum).collect();
    let mut mass = 0.0;
    for id in ranked(&p) {
        if mass >= f64::from(sampling.top_p) {
            p[id] = 0.0;
        }
        mass += p[id];
    }
    let kept: f64 = p.iter().sum();
    p.iter().map(|p| p / kept).collect()
}

proptest! {
    /// Partial sorts keep exactly what full sorts keep.
    #[test]
    fn truncation_equals_the_plain_definition(
        logits in proptest::collection::vec(-8i32..8, 1..400),
        top_p in 0.05f32..0.999,
        top_k in prop_oneof![Just(0usize), 1usize..60],
        min_p in prop_oneof![Just(0.0f32), 0.01f32..1.0],
    ) {
        let logits: Vec<f32> = logits.iter().map(|&l| l as f32 / 2.0).collect();
        let sampling = Sampling { temperature: 1.0, top_p, top_k, min_p, ..Sampling::greedy() };
        let want = plainly(&sampling, &logits);
        let found = distribution(sampling, &logits);
        let kept = |p: f64| p > 0.0;
        // Where f32 and f64 disagree about the crossing token, masses are within rounding of top_p.
        let same = found.iter().zip(&want).all(|(a, b)| kept(f64::from(*a)) == kept(*b));
        let apart = found.iter().zip(&want).filter(|(a, b)| kept(f64::from(**a)) != kept(**b)).count();
        prop_assert!(same || apart == 1);
        if same {
            prop_assert!(found.iter().zip(&want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-5));
        }
        prop_assert!((found.iter().map(|p| f64::from(*p)).sum::<f64>() - 1.0).abs() < 1e-4);
    }

    /// Whatever the settings: a token that is allowed, from finite logits, and never a panic.
    #[test]
    fn a_choice_is_always_among_what_may_be_chosen(
        logits in proptest::collection::vec(prop_oneof![-30f32..30.0, any::<f32>()], 1..60),
        allowed in proptest::option::of(proptest::collection::vec(0u32..70, 0..30)),
        bias in proptest::collection::vec((0u32..60, -100f32..=100.0), 0..6),
        numbers in (0f32..=2.0, 0.01f32..=1.0, 0f32..=1.0, 0.01f32..=2.0, -2f32..=2.0, -2f32..=2.0),
        top_k in 0usize..8,
        seed: u64,
    ) {
        let (temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty) = numbers;
        let sampling = Sampling {
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            logit_bias: bias, logprobs: Some(3), seed,
        };
        let allowed: Option<TokenSet> = allowed.map(|ids| ids.into_iter().collect());
        let mut s = sampler(sampling);
        s.prompt(0..5);
        for _ in 0..4 {
            match s.pick(&logits, allowed.as_ref()) {
                Ok(token) => {
                    prop_assert!(logits[token as usize].is_finite());
                    prop_assert!(allowed.as_ref().is_none_or(|set| set.contains(token)));
                    prop_assert!(s.logprobs(&logits, token).unwrap().chosen.is_finite());
                }
                Err(SampleError::NoFiniteLogit { .. }) => {
                    prop_assert!(logits.iter().all(|l| !l.is_finite()));
                }
                Err(SampleError::NothingLeft) => {}
                Err(other) => prop_assert!(false, "{other}"),
            }
        }
    }
}

/// Whatever a request asks for, its sampler takes no more memory than a plan has for it.
#[test]
fn a_sampler_keeps_to_its_plan() {
    for vocab in [100, 300, 1000, 3000, 8192] {
        let sampling = Sampling {
            temperature: 1.0,
            top_k: vocab - 1,
            top_p: 0.999,
            repetition_penalty: 1.1,
            presence_penalty: 0.5,
            ..Sampling::default()
        };
        let mut s = sampler(sampling);
        s.prompt(0..vocab as u32);
        let allowed: TokenSet = (0..vocab as u32).collect();
        for _ in 0..3 {
            s.pick(&vec![1.0; vocab], Some(&allowed)).unwrap();
        }
        let lists = s.adjusted.capacity() + s.probabilities.capacity() + s.order.capacity();
        let held = size_of::<f32>() * lists + s.history.bytes();
        let planned = Sampler::planned_bytes(vocab);
        assert!(held <= planned, "{vocab}: {held} of {planned}");
        assert!(2 * held >= planned, "{vocab}: {held} of {planned}");
    }
}
