//! The synthetic end-to-end oracle (tests/goldens): logits, hidden states, cache
//! rows, selections, routes and token sequences that another engine and an independent numpy
//! implementation agree on.

mod common;

use std::ops::ControlFlow;

use common::{Choices, greedy_on};
use forebay_core::CancelToken;
use forebay_engine::{Engine, EngineOptions, Request, Sampling, Session};
use forebay_model::{Arith, KvDtype, Trace};
use forebay_testkit::toy;

fn exact() -> EngineOptions {
    EngineOptions { arith: Arith::Exact, kv_dtype: KvDtype::F32, context: Some(64), ..Default::default() }
}

fn open(options: EngineOptions) -> (tempfile::TempDir, Engine) {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    let engine = Engine::open(dir.path(), options, &mut |_, _| {}).unwrap();
    (dir, engine)
}

fn prefill(engine: &mut Engine, session: &mut Session, trace: Option<&mut dyn Trace>) {
    let request = Request { prompt: &toy::prompt(), max_tokens: 0, sampling: Sampling::greedy(), stops: &[] };
    session
        .generate(engine, &request, &CancelToken::new(), trace, &mut |_| ControlFlow::Continue(()))
        .unwrap();
}

fn close(found: &[f32], want: &[f32], tolerance: f32, what: &str) {
    for (i, (a, b)) in found.iter().zip(want).enumerate() {
        assert!((a - b).abs() <= tolerance, "{what}[{i}]: found {a}, want {b}");
    }
}

fn top(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut order: Vec<u32> = (0..logits.len() as u32).collect();
    order.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
    order.into_iter().take(n).map(|id| (id, logits[id as usize])).collect()
}

#[test]
fn prefill_matches_the_published_values() {
    let (_dir, mut engine) = open(exact());
    let mut session = Session::new(&engine);
    let mut choices = Choices::default();
    prefill(&mut engine, &mut session, Some(&mut choices));

    let logits = session.last_logits();
    close(&logits[..4], &[1.11281, 2.29147, -2.43228, -5.20253], 1e-4, "logits");
    let want = [(224, 12.49354), (178, 11.23931), (212, 10.74889), (91, 10.39326), (184, 10.12785)];
    for ((id, logit), (want_id, want_logit)) in top(logits, 5).into_iter().zip(want) {
        assert_eq!(id, want_id);
        close(&[logit], &[want_logit], 1e-4, "top logit");
    }
    let hidden = engine.hidden(19);
    close(hidden, &[3.277186, -3.678388, 0.222817, 0.755352], 2e-5, "hidden");
    let norm = hidden.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    assert!((norm - 16.21808).abs() < 1e-4, "{norm}");

    let kv = session.kv();
    close(&kv.latent(0, 3), &[0.0114234, -1.2086066, -0.1088654, -0.1448445], 1e-5, "latent");
    let rope = [0.3573231, 0.6834615, -0.6188745, -0.9688244, -1.4564264, 1.143368, -0.0611194, 0.2221182];
    close(&kv.rope_key(0, 3), &rope, 1e-5, "rope key");
    let index = kv.index_key(0, 3).unwrap();
    close(&index, &[0.6126239, 0.9680295, -0.2696778, -0.1071331], 1e-5, "index key");
    assert!(kv.index_key(2, 3).is_none(), "shared layers keep no index keys");

    let selections: [(usize, usize, [u32; 6]); 6] = [
        (0, 19, [1, 3, 12, 13, 15, 17]),
        (1, 19, [11, 13, 14, 16, 18, 9]),
        (3, 19, [10, 1, 2, 5, 6, 7]),
        (0, 6, [1, 2, 3, 5, 6, 4]),
        (1, 6, [0, 2, 4, 5, 6, 3]),
        (3, 6, [0, 1, 2, 3, 5, 4]),
    ];
    for (layer, position, want) in selections {
        assert_eq!(choices.selected[&(layer, position)], want, "layer {layer}, position {position}");
    }
    assert!(!choices.selected.contains_key(&(0, 5)), "six keys fit into a selection of six");
    let want = [
        (195, 0.3146459),
        (176, 0.3164133),
        (134, 0.3145911),
        (57, 0.3046944),
        (114, 0.310266),
        (93, 0.3147447),
        (218, 0.3098058),
        (142, 0.3148389),
    ];
    let routed = &choices.routed[&(1, 19)];
    assert_eq!(routed.iter().map(|r| r.0).collect::<Vec<_>>(), want.map(|w| w.0));
    close(&routed.iter().map(|r| r.1).collect::<Vec<_>>(), &want.map(|w| w.1), 1e-5, "router weight");
}

#[test]
fn a_batch_of_rows_and_single_rows_match_the_published_values() {
    let (_dir, mut engine) = open(exact());
    let mut session = Session::new(&engine);
    prefill(&mut engine, &mut session, None);
    let mut rows = Vec::new();
    let cancel = CancelToken::new();
    let mut keep = |_: usize, row: &[f32]| rows.push(row.to_vec());
    session.run_tokens(&mut engine, &[224, 42, 218, 218], &cancel, &mut keep).unwrap();
    let want = [(114, 10.83053), (54, 13.0172), (101, 13.94384), (270, 10.91887)];
    for (row, (id, logit)) in rows.iter().zip(want) {
        let best = top(row, 1)[0];
        assert_eq!(best.0, id);
        close(&[best.1], &[logit], 1e-4, "verify row");
    }
    // The same rows one at a time give the same bits (F-11).
    session.truncate(20);
    for (token, batch_row) in [224, 42, 218, 218].into_iter().zip(&rows) {
        let mut compare = |_: usize, row: &[f32]| {
            assert!(row.iter().zip(batch_row).all(|(a, b)| a.to_bits() == b.to_bits()));
        };
        session.run_tokens(&mut engine, &[token], &cancel, &mut compare).unwrap();
    }
    session.truncate(20);
    let mut single = |_: usize, row: &[f32]| {
        let two = top(row, 2);
        assert_eq!((two[0].0, two[1].0), (114, 28));
        close(&[two[0].1, two[1].1], &[10.83054, 10.74151], 1e-4, "single row");
    };
    session.run_tokens(&mut engine, &[224], &cancel, &mut single).unwrap();
}

fn greedy(engine: &mut Engine, session: &mut Session, prompt: &[u32], max_tokens: usize) -> Vec<u32> {
    greedy_on(engine, session, prompt, max_tokens, &[])
}

const GREEDY: [u32; 24] = [
    224, 114, 245, 33, 224, 47, 177, 233, 136, 81, 206, 114, 114, 114, 114, 114, 114, 114, 211, 264, 30, 63,
    135, 268,
];

#[test]
fn greedy_decoding_matches_the_published_sequence() {
    let (_dir, mut engine) = open(exact());
    let mut session = Session::new(&engine);
    assert_eq!(greedy(&mut engine, &mut session, &toy::prompt(), 24), GREEDY);
}

/// A budget of 24 equals three budgets of 8 with "continue" in between; the last
/// token of each part is pending, not lost and not repeated.
#[test]
fn continuing_neither_loses_nor_repeats_a_token() {
    let (_dir, mut engine) = open(exact());
    let mut session = Session::new(&engine);
    let mut all = greedy(&mut engine, &mut session, &toy::prompt(), 8);
    assert_eq!(session.pending(), Some(GREEDY[7]));
    all.extend(greedy(&mut engine, &mut session, &[], 8));
    all.extend(greedy(&mut engine, &mut session, &[], 8));
    assert_eq!(all, GREEDY);
}

#[test]
fn without_sparse_attention_the_first_token_differs_as_published() {
    let (_dir, mut engine) = open(EngineOptions { dense_attention: true, ..exact() });
    let mut session = Session::new(&engine);
    assert_eq!(greedy(&mut engine, &mut session, &toy::prompt(), 1), [221]);
}

#[test]
fn capabilities_are_recognised() {
    let (_dir, engine) = open(exact());
    assert!(engine.sparse_attention().is_active());
    assert!(engine.mtp().is_active());
    assert_eq!(engine.stop_ids(), [290, 291]);
}
