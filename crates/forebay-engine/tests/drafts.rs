//! Drafting with the MTP layer and from what was said before: the values of forward spec section 18, the bundled
//! model's acceptance, and that no draft ever changes what is generated.

mod common;

use std::ops::ControlFlow;

use common::{demo, eval, greedy, greedy_on, ids, json, transformers_options};
use forebay_core::CancelToken;
use forebay_engine::{Drafting, Engine, EngineOptions, Event, Finish, Request, Sampling, Session};
use forebay_model::{Arith, KvDtype};
use forebay_testkit::toy;
use serde_json::Value;

/// Index of the toy's MTP layer.
const MTP: usize = 5;

const GREEDY: [u32; 24] = [
    224, 114, 245, 33, 224, 47, 177, 233, 136, 81, 206, 114, 114, 114, 114, 114, 114, 114, 211, 264, 30, 63,
    135, 268,
];

fn exact(depth: usize) -> EngineOptions {
    EngineOptions {
        arith: Arith::Exact,
        kv_dtype: KvDtype::F32,
        context: Some(64),
        drafting: Drafting::Depth(depth),
        ..Default::default()
    }
}

fn open(options: EngineOptions) -> (tempfile::TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    (dir, engine)
}

/// A sequence that holds the toy's prompt.
fn prompted(engine: &mut Engine) -> Session {
    let mut session = Session::new(engine);
    greedy_on(engine, &mut session, &toy::prompt(), 0, &[]);
    session
}

fn close(found: &[f32], want: &[f32]) {
    for (a, b) in found.iter().zip(want) {
        assert!((a - b).abs() <= 2e-5, "found {found:?}, want {want:?}");
    }
}

#[test]
fn drafts_and_cache_rows_are_the_published_ones() {
    let (_dir, mut engine) = open(exact(3));
    let mut session = prompted(&mut engine);
    assert_eq!(session.kv().drafting(), 19, "the last row waits for the token behind it");
    close(&session.kv().latent(MTP, 0), &[-1.2662973, -0.1467661, -0.3000719, -0.6247024]);
    let drafts = session.draft(&mut engine, 224, 3, &CancelToken::new());
    assert_eq!(drafts, [42, 218, 218]);
    close(&session.kv().latent(MTP, 19), &[0.1620995, 2.3207107, -0.6998071, 0.1923981]);
}

#[test]
fn without_sparse_attention_the_drafts_are_the_published_ones() {
    let (_dir, mut engine) = open(EngineOptions { dense_attention: true, ..exact(3) });
    let mut session = prompted(&mut engine);
    assert_eq!(session.draft(&mut engine, 221, 3, &CancelToken::new()), [80, 26, 284]);
}

#[test]
fn every_depth_gives_the_published_sequence() {
    for depth in 0..=8 {
        let (_dir, mut engine) = open(exact(depth));
        assert_eq!(greedy(&mut engine, &toy::prompt(), 24), GREEDY, "depth {depth}");
    }
}

/// Logits after every token, from a run without drafts, to compare bits with.
fn plain_bits(options: &EngineOptions, tokens: &[u32]) -> Vec<Vec<u32>> {
    let (_dir, mut engine) = open(EngineOptions { drafting: Drafting::Off, ..*options });
    let rows = common::all_logits(&mut engine, tokens);
    rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}

/// In parts, with a history that is partly taken back in between: tokens, logits and every row of the MTP layer's
/// cache are those of a run in one piece.
#[test]
fn turns_and_taken_back_tokens_leave_no_trace() {
    for depth in [1, 3, 8] {
        let (_dir, mut engine) = open(exact(depth));
        let mut session = Session::new(&engine);
        let prompt = toy::prompt();
        greedy_on(&mut engine, &mut session, &prompt[..7], 5, &[]);
        let wanted: Vec<u32> = prompt.iter().chain(&GREEDY[..5]).copied().collect();
        let kept = session.reuse(&wanted[..12]);
        assert_eq!(kept, 7, "the answer differs from the prompt's next token");
        greedy_on(&mut engine, &mut session, &prompt[kept..], 3, &[]);
        assert_eq!(session.pending(), Some(GREEDY[2]));
        greedy_on(&mut engine, &mut session, &[], 5, &[]);
        let all: Vec<u32> = prompt.iter().chain(&GREEDY[..8]).copied().collect();
        let cached = session.tokens().to_vec();
        assert_eq!(cached, all[..cached.len()]);

        let bits = plain_bits(&exact(depth), &cached);
        let last: Vec<u32> = session.last_logits().iter().map(|v| v.to_bits()).collect();
        assert!(bits.last() == Some(&last), "depth {depth}");

        let mut fresh = Session::new(&engine);
        greedy_on(&mut engine, &mut fresh, &cached, 0, &[]);
        assert_eq!(session.kv().drafting(), cached.len() - 1);
        for position in 0..cached.len() - 1 {
            assert_eq!(
                session.kv().latent(MTP, position),
                fresh.kv().latent(MTP, position),
                "depth {depth}, position {position}"
            );
        }
    }
}

/// Decode spec D-09 and D-10: a stop token among the drafts ends the answer and is no part of it; no more is
/// generated than asked for.
#[test]
fn stops_and_budgets_hold_among_drafts() {
    // Looked up in the text itself, drafts are right where it repeats itself.
    let text: Vec<u32> = GREEDY.to_vec();
    let prompt: Vec<u32> = toy::prompt().into_iter().chain(text[..16].iter().copied()).collect();
    for depth in [0, 2, 4, 8] {
        let (_dir, mut engine) = open(exact(depth));
        for stop in [211, 264, 63] {
            let mut session = Session::new(&engine);
            let have = greedy_on(&mut engine, &mut session, &prompt, 24, &[stop]);
            let upto = GREEDY.iter().position(|token| *token == stop).unwrap();
            assert_eq!(have, GREEDY[16..upto], "depth {depth}");
            assert!(!session.tokens().contains(&stop));
        }
        for budget in 1..6 {
            let mut session = Session::new(&engine);
            let have = greedy_on(&mut engine, &mut session, &prompt, budget, &[]);
            assert_eq!(have, GREEDY[16..16 + budget], "depth {depth}");
        }
    }
}

/// Decode spec D-11: the context is filled to its last place and never beyond.
#[test]
fn the_context_ends_where_it_should() {
    let mut answers = Vec::new();
    for depth in [0, 3, 8] {
        let (_dir, mut engine) = open(EngineOptions { context: Some(26), ..exact(depth) });
        let mut session = Session::new(&engine);
        let request =
            Request { prompt: &toy::prompt(), max_tokens: 50, sampling: Sampling::greedy(), stops: &[] };
        let mut tokens = Vec::new();
        let mut keep = |event| {
            if let Event::Token(token) = event {
                tokens.push(token.id);
            }
            ControlFlow::Continue(())
        };
        let done = session.generate(&mut engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
        assert_eq!((done.finish, session.tokens().len()), (Finish::Context, 26));
        answers.push(tokens);
    }
    assert!(answers.iter().all(|answer| answer[..] == GREEDY[..7]), "{answers:?}");
}

/// In the default arithmetic, with a BF16 cache.
#[test]
fn the_bundled_model_says_the_same_with_drafts() {
    let golden = eval("greedy.json");
    let prompts = golden["prompts"].as_array().unwrap();
    let options = |depth| EngineOptions {
        context: Some(600),
        drafting: if depth == 0 { Drafting::Off } else { Drafting::Depth(depth) },
        ..Default::default()
    };
    let mut without = Engine::open(&demo(), options(0), &mut |_, _| {}).unwrap();
    for depth in [1, 3, 8] {
        let mut with = Engine::open(&demo(), options(depth), &mut |_, _| {}).unwrap();
        for prompt in prompts.iter().take(4) {
            let start = ids(&prompt["prompt_ids"]);
            let (mut plain, mut drafted) = (Session::new(&without), Session::new(&with));
            let want = greedy_on(&mut without, &mut plain, &start, 48, &[]);
            let have = greedy_on(&mut with, &mut drafted, &start, 48, &[]);
            assert_eq!(have, want, "depth {depth}, {}", prompt["name"]);
        }
    }
}

/// Sampled answers too, token for token: every token is chosen from the same logits with the same random number.
#[test]
fn sampled_answers_are_the_same_with_drafts() {
    let prompt = ids(&eval("greedy.json")["prompts"][0]["prompt_ids"]);
    let mut answers = Vec::new();
    let mut accepted = 0;
    for drafting in
        [Drafting::Off, Drafting::Depth(1), Drafting::Depth(4), Drafting::Depth(8), Drafting::Auto]
    {
        let options = EngineOptions { context: Some(400), drafting, ..Default::default() };
        let mut engine = Engine::open(&demo(), options, &mut |_, _| {}).unwrap();
        let mut all = Vec::new();
        for seed in 0..6 {
            let sampling = Sampling { temperature: 0.9, top_p: 0.95, seed, ..Sampling::greedy() };
            let request = Request { prompt: &prompt, max_tokens: 60, sampling, stops: &[13] };
            let mut keep = |event| {
                if let Event::Token(token) = event {
                    all.push(token.id);
                }
                ControlFlow::Continue(())
            };
            let mut session = Session::new(&engine);
            let done = session.generate(&mut engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
            accepted += done.stats.drafts.accepted;
            all.push(u32::MAX);
        }
        answers.push(all);
    }
    assert!(accepted > 50, "{accepted} drafts were right: too few to show anything");
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

/// How often the first draft, the first two, and all three are right over the greedy texts behind the first 96
/// tokens of six held-out windows a segment, as `eval/mtp_acceptance.json` counts it.
fn acceptance(engine: &mut Engine) -> [f64; 3] {
    let heldout = eval("heldout.json");
    let mut right = [0u32; 3];
    let mut chains = 0;
    for segment in heldout["segments"].as_array().unwrap() {
        for window in segment["windows"].as_array().unwrap().iter().take(6) {
            let prompt = &ids(window)[..96];
            let text: Vec<u32> = prompt.iter().copied().chain(greedy(engine, prompt, 64)).collect();
            let mut session = Session::new(engine);
            greedy_on(engine, &mut session, prompt, 0, &[]);
            for at in 95..156 {
                // The cache ends with the token at `at`.
                let drafts = session.draft(engine, text[at + 1], 3, &CancelToken::new());
                let agreed = drafts.iter().zip(&text[at + 2..]).take_while(|(a, b)| a == b).count();
                right.iter_mut().take(agreed).for_each(|count| *count += 1);
                chains += 1;
                greedy_on(engine, &mut session, &[text[at + 1]], 0, &[]);
            }
        }
    }
    right.map(|count| f64::from(count) / f64::from(chains))
}

fn published() -> [f64; 3] {
    let all = eval("mtp_acceptance.json")["results"]["all"]["chains"].clone();
    ["draft1", "both_1_2", "all_three"].map(|name| all[name].as_f64().unwrap())
}

#[test]
fn the_bundled_model_drafts_as_well_as_published() {
    let options = EngineOptions { context: Some(200), drafting: Drafting::Depth(3), ..Default::default() };
    let mut engine = Engine::open(&demo(), options, &mut |_, _| {}).unwrap();
    let (have, want) = (acceptance(&mut engine), published());
    for (have, want) in have.iter().zip(want) {
        assert!((have - want).abs() <= 0.01, "{have:?}, published {:?}", published());
    }
}

/// Every chain of `mtp_chains.json` from the full-precision checkpoint, token for token.
#[test]
fn the_full_precision_chains_are_the_published_ones() {
    let Some(dir) = std::env::var_os("FOREBAY_DEMO_BF16").map(std::path::PathBuf::from) else {
        println!("skipped: FOREBAY_DEMO_BF16 does not name the full-precision demo checkpoint");
        return;
    };
    let options = EngineOptions { drafting: Drafting::Depth(3), ..transformers_options() };
    let mut engine = Engine::open(&dir, options, &mut |_, _| {}).unwrap();
    let chains: Value = json(&demo().join("eval/mtp_chains.json"));
    let (mut same, mut all) = (0, 0);
    for sequence in chains["sequences"].as_array().unwrap() {
        let text = ids(&sequence["ids"]);
        let mut session = Session::new(&engine);
        for (at, want) in sequence["drafts"].as_array().unwrap().iter().enumerate() {
            greedy_on(&mut engine, &mut session, &[text[at]], 0, &[]);
            let have = session.draft(&mut engine, text[at + 1], 3, &CancelToken::new());
            same += usize::from(have == ids(want));
            all += 1;
        }
    }
    assert!(all >= 4 * 159 && same == all, "{same} of {all} chains");
}

/// What is learnt of a text does not depend on drafts: rejected ones and the layer that makes them do not count, nor what is
/// asked for twice.
#[test]
fn uses_are_those_of_the_tokens_that_stayed() {
    let prompt = ids(&eval("greedy.json")["prompts"][0]["prompt_ids"]);
    let mut seen = Vec::new();
    for drafting in [Drafting::Off, Drafting::Depth(1), Drafting::Depth(6)] {
        let options = EngineOptions { context: Some(300), drafting, ..Default::default() };
        let mut engine = Engine::open(&demo(), options, &mut |_, _| {}).unwrap();
        let mut session = Session::new(&engine);
        let text: Vec<u32> =
            prompt.iter().copied().chain(greedy_on(&mut engine, &mut session, &prompt, 40, &[])).collect();
        // The last token may not have been run.
        let mut counted =
            Engine::open(&demo(), EngineOptions { drafting: Drafting::Off, ..options }, &mut |_, _| {})
                .unwrap();
        let cached = session.tokens().len();
        assert!(cached + 1 >= text.len());
        let mut choices = common::Choices::default();
        Session::new(&counted)
            .score(&mut counted, &text[..cached], &CancelToken::new(), Some(&mut choices), &mut |_| {})
            .unwrap();
        let mut want = std::collections::BTreeMap::<usize, Vec<u64>>::new();
        for ((layer, _), experts) in &choices.routed {
            let counts = want.entry(*layer).or_insert_with(|| vec![0; engine.spec().moe.experts]);
            experts.iter().for_each(|(expert, _)| counts[*expert as usize] += 1);
        }
        let found: std::collections::BTreeMap<usize, Vec<u64>> = engine
            .uses()
            .layers()
            .map(|(layer, uses)| {
                assert_eq!(uses.tokens, cached as u64, "{drafting}");
                let mut counts = uses.counts.clone();
                counts.resize(engine.spec().moe.experts, 0);
                (layer, counts)
            })
            .collect();
        assert_eq!(found, want, "{drafting}");
        seen.push(cached);
    }
    assert!(seen.iter().all(|cached| *cached > prompt.len() + 30));
}
