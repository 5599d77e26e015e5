use super::*;
use crate::routes::synthetic::CALIBRATED;
use proptest::prelude::*;

/// Less than `forebay bench cache` plays, and enough for the tolerances.
const LAYERS: usize = 4;
const TOKENS: usize = 700;

fn evaluation() -> Routes {
    CALIBRATED.routes(LAYERS, TOKENS, 300)
}

/// Counts of other texts than the one that is played.
fn history() -> Vec<Vec<u64>> {
    CALIBRATED.routes(LAYERS, 1600, 900).counts()
}

/// The best of the half-lives that the published table tried.
fn best_aged(routes: &Routes, quota: usize, history: &[Vec<u64>]) -> f64 {
    let rate =
        |half_life| replay(routes, Contestant::Policy(Policy::Aged { half_life }), quota, history).hit_rate();
    [7, 23, 69, 138].map(rate).into_iter().fold(0.0, f64::max)
}

/// The table of another implementation (docs/cache.md, "Where the routes come from"): slots, then global LRU, per-layer LRU, pins, half pins + LRU, aged LFU, Belady.
const PUBLISHED: [(usize, [f64; 6]); 14] = [
    (1, [0.000, 0.022, 0.031, 0.022, 0.045, 0.094]),
    (2, [0.000, 0.046, 0.058, 0.054, 0.081, 0.176]),
    (4, [0.000, 0.098, 0.101, 0.102, 0.141, 0.298]),
    (6, [0.000, 0.170, 0.138, 0.148, 0.192, 0.377]),
    (8, [0.158, 0.252, 0.173, 0.195, 0.235, 0.434]),
    (10, [0.252, 0.274, 0.205, 0.246, 0.273, 0.479]),
    (12, [0.252, 0.299, 0.234, 0.299, 0.306, 0.516]),
    (16, [0.334, 0.350, 0.291, 0.370, 0.365, 0.575]),
    (25, [0.427, 0.437, 0.394, 0.465, 0.472, 0.667]),
    (32, [0.480, 0.496, 0.454, 0.526, 0.536, 0.716]),
    (48, [0.599, 0.605, 0.569, 0.633, 0.628, 0.792]),
    (64, [0.683, 0.687, 0.654, 0.713, 0.704, 0.841]),
    (96, [0.793, 0.796, 0.788, 0.821, 0.810, 0.898]),
    (128, [0.864, 0.864, 0.877, 0.886, 0.877, 0.930]),
];

fn rate(routes: &Routes, contestant: Contestant, quota: usize, history: &[Vec<u64>]) -> f64 {
    replay(routes, contestant, quota, history).hit_rate()
}

/// "It must reproduce that section's table within 2 points."
#[test]
fn the_table_of_the_notes() {
    let (routes, history) = (evaluation(), history());
    let columns = [
        Contestant::GlobalLru,
        Contestant::TrimmedLru,
        Contestant::Pins,
        Contestant::HalfPins,
        Contestant::BeladyOneAtATime,
    ];
    for (quota, [global, lru, pins, half, aged, belady]) in PUBLISHED {
        let mut got = columns.map(|column| rate(&routes, column, quota, &history)).to_vec();
        got.push(best_aged(&routes, quota, &history));
        for (got, want) in got.iter().zip([global, lru, pins, half, belady, aged]) {
            assert!((got - want).abs() <= 0.02, "{quota} slots: {got:.3} where the spec has {want:.3}");
        }
    }
}

/// Two traps (docs/cache.md): a global LRU smaller than a token's experts hits exactly
/// nothing, and handling a union one at a time halves the hits below 8 slots.
#[test]
fn two_ways_to_lose() {
    let routes = evaluation();
    // Between two uses of an expert the other layers use 8 each: 24 here, 592 in the model.
    for quota in [1, 4, 6] {
        assert_eq!(replay(&routes, Contestant::GlobalLru, quota, &[]).hits, 0, "{quota}");
    }
    assert!(replay(&routes, Contestant::GlobalLru, 8, &[]).hits > 0);
    for quota in [4, 6, 7] {
        let (naive, whole) = (
            rate(&routes, Contestant::OneAtATime, quota, &[]),
            rate(&routes, Contestant::TrimmedLru, quota, &[]),
        );
        assert!(naive < 0.55 * whole, "{quota}: {naive:.3} {whole:.3}");
    }
    // .082 against .170 at 6 slots, .158 against .252 at 8.
    assert!((rate(&routes, Contestant::OneAtATime, 6, &[]) - 0.082).abs() < 0.02);
    assert!((rate(&routes, Contestant::OneAtATime, 8, &[]) - 0.158).abs() < 0.02);
}

/// What makes [`Policy::Blend`] the default: with or without history it is never below
/// recency and within a point of the best of the others at every budget.
#[test]
fn the_default_wins_at_every_budget() {
    let (routes, history) = (evaluation(), history());
    for (quota, _) in PUBLISHED {
        for history in [&history[..], &[]] {
            let ours = rate(&routes, Contestant::Policy(Policy::default()), quota, history);
            let recency = rate(&routes, Contestant::Policy(Policy::Lru), quota, history).max(rate(
                &routes,
                Contestant::TrimmedLru,
                quota,
                history,
            ));
            assert!(ours >= recency, "{quota} slots: {ours:.4} is below recency, {recency:.4}");
            let heat = rate(&routes, Contestant::Policy(Policy::Lfru { halve_every: 64 }), quota, history);
            // Pins without history would be the first ids.
            let half =
                if history.is_empty() { 0.0 } else { rate(&routes, Contestant::HalfPins, quota, history) };
            let best = best_aged(&routes, quota, history).max(recency).max(heat).max(half);
            assert!(ours >= best - 0.01, "{quota} slots: {ours:.4} against {best:.4}");
        }
    }
}

/// A prompt of hundreds of rows in one step, then its continuation token by token: the
/// cache must not come out of it worse than it went in, nor than one that never saw it.
#[test]
fn a_prompt_in_one_pass_does_not_wreck_the_cache() {
    for quota in [4, 8, 16, 64] {
        let mut after = [Outcome::default(); 3];
        for layer in CALIBRATED.routes(LAYERS, 512 + 448, 11).layers {
            let (warm, rest) = layer.split_at(256);
            let (prompt, answer) = rest.split_at(448);
            let rows = || prompt.iter().map(|step| step.experts.as_slice());
            // All at once; row by row; not at all.
            let prompts = [vec![Union::of(rows())], prompt.to_vec(), vec![]];
            for (outcome, prompt) in after.iter_mut().zip(prompts) {
                let mut cache = LayerCache::new(quota, Policy::default());
                play(&mut cache, warm, &mut Outcome::default());
                play(&mut cache, &prompt, &mut Outcome::default());
                play(&mut cache, &answer[..64], outcome);
            }
        }
        let [once, apart, never] = after.map(|outcome| outcome.hit_rate());
        println!("{quota} {once:.4} {apart:.4} {never:.4}");
        assert!(once > apart - 0.02 && once > never - 0.01, "{quota}: {once:.3} {apart:.3} {never:.3}");
    }
}

#[test]
fn outcomes() {
    let outcome = Outcome { hits: 3, misses: 1, evictions: 2 };
    assert_eq!((outcome.hit_rate(), outcome.bytes(10)), (0.75, 10));
    assert_eq!(Outcome::default().hit_rate(), 0.0);
    assert_eq!(replay(&Routes::default(), Contestant::Belady, 4, &[]), Outcome::default());
}

/// Most hits that any choice of residents could have had, by trying all of them.
fn exhaustive(steps: &[Union], resident: &[u32], quota: usize) -> usize {
    let Some((union, later)) = steps.split_first() else { return 0 };
    let hits = union.experts.iter().filter(|expert| resident.contains(expert)).count();
    let mut candidates: Vec<u32> = resident.iter().chain(&union.experts).copied().collect();
    candidates.sort_unstable();
    candidates.dedup();
    let choices = (0u32..1 << candidates.len()).filter(|choice| choice.count_ones() as usize <= quota);
    let best = choices.map(|choice| {
        let kept: Vec<u32> =
            candidates.iter().enumerate().filter(|(i, _)| choice >> i & 1 == 1).map(|(_, e)| *e).collect();
        exhaustive(later, &kept, quota)
    });
    hits + best.max().unwrap_or(0)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    /// Nobody beats the optimum, and the optimum is what trying everything finds.
    #[test]
    fn belady_is_the_optimum(
        quota in 0usize..4,
        rows in prop::collection::vec(prop::sample::subsequence(vec![0u32, 1, 2, 3, 4], 1..=3), 1..6),
    ) {
        let steps: Vec<Union> = rows.iter().map(|row| Union::of([row.as_slice()])).collect();
        let best = exhaustive(&steps, &[], quota);
        let routes = Routes { experts: 5, top_k: 2, layers: vec![steps] };
        prop_assert_eq!(replay(&routes, Contestant::Belady, quota, &[]).hits as usize, best);
        for contestant in [
            Contestant::Policy(Policy::Lru),
            Contestant::Policy(Policy::Blend),
            Contestant::TrimmedLru,
            Contestant::BeladyOneAtATime,
        ] {
            prop_assert!(replay(&routes, contestant, quota, &[]).hits as usize <= best);
        }
    }
}
