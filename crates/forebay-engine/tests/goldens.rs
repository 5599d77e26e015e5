//! Exact mode against transformers, on tiny random models of the true architecture
//! (`tests/goldens`, made by `tools/oracle`).
//!
//! A choice between two logits that the oracle itself tells apart by less than its own noise is
//! a tie: it is reported and does not fail. Everything else must agree.

mod common;

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use common::{Choices, all_logits, argmax, floats, greedy, ids, json};
use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Request, Sampling, Session};
use forebay_model::{Arith, Capability, KvDtype};
use serde_json::Value;

/// Largest accepted logit difference, relative to the oracle's logit range.
const TOLERANCE: f64 = 2e-4;

fn goldens() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/goldens")
}

fn cases() -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(goldens())
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().join("golden.json").exists())
        .map(|entry| entry.file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert!(names.len() >= 20, "the goldens are there: {names:?}");
    names
}

fn golden(case: &str) -> Value {
    json(&goldens().join(case).join("golden.json"))
}

fn options(golden: &Value) -> EngineOptions {
    EngineOptions {
        arith: Arith::Exact,
        kv_dtype: KvDtype::F32,
        low_rank_norm_eps: Some(golden["lora_norm_eps"].as_f64().unwrap() as f32),
        ..Default::default()
    }
}

fn open(case: &str, options: EngineOptions) -> Engine {
    let dir = goldens().join(case);
    let longest = golden(case)["prompts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|p| p["prompt_ids"].as_array().unwrap().len() + p["greedy_ids"].as_array().unwrap().len())
        .max()
        .unwrap();
    Engine::open(&dir, EngineOptions { context: Some(longest), ..options }, &mut |_, _| {})
        .unwrap_or_else(|e| panic!("{case}: {e}"))
}

/// What one prompt's comparison found.
#[derive(Default)]
struct Found {
    worst: f64,
    ties: Vec<String>,
    failures: Vec<String>,
}

fn compare(case: &str, golden: &Value, prompt: &Value, engine: &mut Engine, found: &mut Found) {
    let range = golden["logit_range"].as_f64().unwrap();
    let mut sequence = ids(&prompt["prompt_ids"]);
    let prompt_len = sequence.len();
    let want_greedy = ids(&prompt["greedy_ids"]);
    sequence.extend(&want_greedy);
    let rows = all_logits(engine, &sequence);
    for entry in prompt["logits"].as_array().unwrap() {
        let position = entry["position"].as_u64().unwrap() as usize;
        for (token, (want, have)) in floats(&entry["values"]).iter().zip(&rows[position]).enumerate() {
            let difference = (want - f64::from(*have)).abs() / range;
            found.worst = found.worst.max(difference);
            if difference > TOLERANCE {
                found.failures.push(format!(
                    "{case}: position {position}, token {token}: logit {have}, want {want}, {difference:.2e} of the range"
                ));
            }
        }
    }
    let want_argmax = ids(&prompt["argmax"]);
    assert_eq!(want_argmax.len(), rows.len());
    let mut first_tie = rows.len();
    for (position, (want, row)) in want_argmax.iter().zip(&rows).enumerate() {
        let two = floats(&prompt["top2_logits"][position]);
        for (id, want) in ids(&prompt["top2_ids"][position]).iter().zip(&two) {
            found.worst = found.worst.max((want - f64::from(row[*id as usize])).abs() / range);
        }
        let best = argmax(row);
        if best != *want {
            // A tie: the two logits differ by less than the tolerance on either side.
            let gap = f64::from(row[best as usize] - row[*want as usize]).abs();
            let what = format!(
                "{case}: position {position}: {best} instead of {want}, margin {:.2e}",
                two[0] - two[1]
            );
            if two[0] - two[1] <= TOLERANCE * range && gap <= TOLERANCE * range {
                first_tie = first_tie.min(position);
                found.ties.push(what);
            } else {
                found.failures.push(what);
            }
        }
    }
    let have = greedy(engine, &sequence[..prompt_len], want_greedy.len());
    let equal = have.iter().zip(&want_greedy).take_while(|(a, b)| a == b).count();
    if equal < want_greedy.len() && prompt_len + equal - 1 < first_tie {
        found.failures.push(format!("{case}: greedy {have:?}, want {want_greedy:?}"));
    }
}

#[test]
fn exact_mode_agrees_with_transformers_on_every_case() {
    let mut failures = Vec::new();
    for case in cases() {
        let golden = golden(&case);
        let mut engine = open(&case, options(&golden));
        let mut found = Found::default();
        for prompt in golden["prompts"].as_array().unwrap() {
            compare(&case, &golden, prompt, &mut engine, &mut found);
        }
        println!(
            "{case:20} worst logit difference {:.2e} of the range, {} ties",
            found.worst,
            found.ties.len()
        );
        found.ties.iter().for_each(|tie| println!("  tie: {tie}"));
        if found.worst > TOLERANCE && found.failures.is_empty() {
            found.failures.push(format!("{case}: top-2 logits differ by {:.2e} of the range", found.worst));
        }
        failures.extend(found.failures);
    }
    assert!(failures.is_empty(), "{} differences:\n{}", failures.len(), failures.join("\n"));
}

/// The router's picks and the indexer's selections at the last prompt position, where the
/// oracle's margins say that rounding cannot change them.
#[test]
fn routes_and_selections_agree_with_transformers() {
    let mut checked = (0, 0);
    for case in cases() {
        let golden = golden(&case);
        let mut engine = open(&case, options(&golden));
        for prompt in golden["prompts"].as_array().unwrap() {
            let trace = &prompt["trace"];
            let position = trace["position"].as_u64().unwrap() as usize;
            let mut choices = Choices::default();
            let request = Request {
                prompt: &ids(&prompt["prompt_ids"]),
                max_tokens: 0,
                sampling: Sampling::greedy(),
                stops: &[],
            };
            let mut session = Session::new(&engine);
            let cancel = CancelToken::new();
            session
                .generate(&mut engine, &request, &cancel, Some(&mut choices), &mut |_| {
                    ControlFlow::Continue(())
                })
                .unwrap();
            for entry in trace["router"].as_array().unwrap() {
                let layer = entry["layer"].as_u64().unwrap() as usize;
                let mut have = choices.routed[&(layer, position)].clone();
                have.sort_by_key(|pair| pair.0);
                let mut want: Vec<(u32, f64)> =
                    ids(&entry["experts"]).into_iter().zip(floats(&entry["weights"])).collect();
                want.sort_by_key(|pair| pair.0);
                for ((id, weight), (want_id, want_weight)) in have.iter().zip(&want) {
                    assert_eq!(id, want_id, "{case}: layer {layer}");
                    assert!(
                        (f64::from(*weight) - want_weight).abs() < 1e-4,
                        "{case}: layer {layer}: {weight}"
                    );
                }
                checked.0 += 1;
            }
            for entry in trace["dsa"].as_array().unwrap() {
                let layer = entry["layer"].as_u64().unwrap() as usize;
                let mut have = choices.selected[&(layer, position)].clone();
                have.sort_unstable();
                let mut want = ids(&entry["positions"]);
                want.sort_unstable();
                assert_eq!(have, want, "{case}: layer {layer}, position {position}");
                checked.1 += 1;
            }
        }
    }
    assert!(checked.0 > 100 && checked.1 > 20, "{checked:?} choices were compared");
}

#[test]
fn optional_parts_are_recognised() {
    for case in cases() {
        let golden = golden(&case);
        let engine = open(&case, options(&golden));
        let state = |capability: &Capability| match capability {
            Capability::Absent { .. } => "absent",
            Capability::Incomplete { .. } => "incomplete",
            Capability::Unusable { .. } => "unusable",
            Capability::Active => "active",
        };
        assert_eq!(state(engine.sparse_attention()), golden["dsa"].as_str().unwrap(), "{case}: DSA");
        let want = match golden["mtp"]["state"].as_str().unwrap() {
            "complete" => "active",
            other => other,
        };
        assert_eq!(state(engine.mtp()), want, "{case}: MTP");
        if let Capability::Incomplete { first_missing, missing } = engine.mtp() {
            let listed = golden["mtp"]["missing"].as_array().unwrap();
            assert_eq!(*missing, listed.len(), "{case}");
            assert!(listed.iter().any(|name| name == first_missing), "{case}: {first_missing}");
        }
    }
}

/// A selection that keeps every key is dense attention, bit for bit: forced or not, and against
/// a run without sparse attention at all.
#[test]
fn a_selection_of_everything_equals_dense_attention() {
    let golden = golden("keep_all");
    let base = options(&golden);
    let prompts = golden["prompts"].as_array().unwrap();
    let prompt = prompts.iter().map(|p| ids(&p["prompt_ids"])).max_by_key(Vec::len).unwrap();
    let run = |options| all_logits(&mut open("keep_all", options), &prompt);
    let plain = run(base);
    assert!(plain == run(EngineOptions { force_selection: true, ..base }), "forced selection");
    assert!(plain == run(EngineOptions { dense_attention: true, ..base }), "dense attention");
}
