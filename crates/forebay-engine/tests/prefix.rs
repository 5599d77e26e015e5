//! Going on from what earlier sequences left, in memory and from disk: what it costs, and that no bit changes.

mod common;

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use common::{all_logits, demo, eval, ids};
use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{
    Drafting, Engine, EngineOptions, Event, GenerateError, PrefixConfig, Request, Sampling, Session, Stats,
    inspect,
};
use forebay_model::ForwardError;
use forebay_testkit::disk::SmallDisk;
use forebay_testkit::toy;
use proptest::prelude::*;
use tempfile::TempDir;

const MODEL: [u8; 32] = [9; 32];

fn store(dir: &Path, limit: u64) -> PrefixConfig {
    PrefixConfig { dir: dir.to_owned(), limit }
}

fn open(model: &Path, options: EngineOptions, kept: Option<&Path>) -> Engine {
    let mut engine = Engine::open(model, options, &mut |_, _| {}).unwrap();
    if let Some(dir) = kept {
        engine.keep_prefixes(store(dir, 1 << 30), MODEL).unwrap();
    }
    engine
}

static TOY: LazyLock<TempDir> = LazyLock::new(|| {
    let dir = tempfile::tempdir().unwrap();
    toy::write(dir.path()).unwrap();
    dir
});

fn toy_options(drafting: Drafting) -> EngineOptions {
    EngineOptions { context: Some(300), threads: Some(1), drafting, ..Default::default() }
}

/// What a turn brought.
struct Turn {
    tokens: Vec<u32>,
    reused: usize,
    from_disk: usize,
    stats: Stats,
}

/// Answers `wanted` greedily, going on from whatever is known.
fn answer(engine: &mut Engine, session: &mut Session, wanted: &[u32], max_tokens: usize) -> Turn {
    let reused = session.start_from(engine, wanted).unwrap();
    let prompt = &wanted[reused.tokens..];
    let request = Request { prompt, max_tokens, sampling: Sampling::greedy(), stops: &[] };
    let mut tokens = Vec::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            tokens.push(token.id);
        }
        ControlFlow::Continue(())
    };
    let done = session.generate(engine, &request, &CancelToken::new(), None, &mut keep).unwrap();
    Turn { tokens, reused: reused.tokens, from_disk: reused.from_disk, stats: done.stats }
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|value| value.to_bits()).collect()
}

/// The files of a store with one model.
fn files(store: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path());
    let mut all: Vec<PathBuf> =
        folders.flat_map(|dir| fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path())).collect();
    all.sort();
    all
}

/// Two thousand tokens of the held-out texts.
fn long_prompt() -> Vec<u32> {
    let heldout = eval("heldout.json");
    let segments = heldout["segments"].as_array().unwrap();
    let windows = segments.iter().flat_map(|segment| segment["windows"].as_array().unwrap());
    windows.flat_map(ids).take(2000).collect()
}

#[test]
fn a_long_prompt_asked_twice_costs_one_token_and_a_follow_up_its_own() {
    let wanted = long_prompt();
    assert_eq!(wanted.len(), 2000);
    for drafting in [Drafting::Off, Drafting::Depth(2)] {
        let kept = tempfile::tempdir().unwrap();
        let options = EngineOptions { context: Some(2048), drafting, ..Default::default() };
        let mut engine = open(&demo(), options, Some(kept.path()));
        let mut session = Session::new(&engine);
        let first = answer(&mut engine, &mut session, &wanted, 8);
        assert_eq!((first.reused, first.stats.prompt_tokens), (0, 2000));
        let logits = bits(session.last_logits());

        // The same sequence again, and another one.
        let mut other = Session::new(&engine);
        for session in [&mut session, &mut other] {
            let again = answer(&mut engine, session, &wanted, 8);
            assert_eq!((again.reused, again.stats.prompt_tokens), (1999, 1), "{drafting:?}");
            assert_eq!((again.tokens, bits(session.last_logits())), (first.tokens.clone(), logits.clone()));
        }
        // The last token of an answer may not have been run; the question is.
        let cached = session.tokens().len().max(other.tokens().len());
        assert!(cached == 2007 || cached == 2008);
        let question: Vec<u32> = (500..510).collect();
        let talk = [&wanted[..], &first.tokens, &question].concat();
        let mut follow_up = Session::new(&engine);
        let next = answer(&mut engine, &mut follow_up, &talk, 5);
        assert_eq!((next.reused, next.stats.prompt_tokens), (cached, 2018 - cached), "{drafting:?}");
        let cached = follow_up.tokens().len();
        assert!(engine.save_prefixes().unwrap().blocks >= 32);
        assert_eq!(engine.save_prefixes().unwrap().blocks, 0, "only what is new is written");
        drop((engine, session, other, follow_up));

        let mut engine = open(&demo(), options, Some(kept.path()));
        let mut session = Session::new(&engine);
        let again = answer(&mut engine, &mut session, &wanted, 8);
        assert_eq!(
            (again.reused, again.from_disk, again.stats.prompt_tokens),
            (1999, 1999, 1),
            "{drafting:?}"
        );
        assert_eq!((again.tokens, bits(session.last_logits())), (first.tokens.clone(), logits));
        drop((engine, session));

        let mut engine = open(&demo(), options, Some(kept.path()));
        let mut session = Session::new(&engine);
        let more = [&talk[..], &next.tokens, &question].concat();
        let turn = answer(&mut engine, &mut session, &more, 2);
        assert_eq!((turn.reused, turn.stats.prompt_tokens), (cached, 2033 - cached), "{drafting:?}");
    }
}

/// Sequences that begin alike, end anywhere, go on, are asked again and survive restarts: the logits behind every answer are
/// those of one fresh run without drafts, and with an MTP layer its rows are, too.
#[test]
fn any_way_to_a_sequence_gives_the_same_bits() {
    any_way(TOY.path(), [Drafting::Off, Drafting::Depth(1), Drafting::Depth(4)]);
}

#[test]
fn any_way_to_a_sequence_of_the_bundled_model_gives_the_same_bits() {
    any_way(&demo(), [Drafting::Off, Drafting::Depth(3), Drafting::Auto]);
}

fn any_way(model: &Path, drafting: [Drafting; 3]) {
    let mut plain = open(model, toy_options(Drafting::Off), None);
    let mtp = plain.spec().layers.len();
    let bases: [Vec<u32>; 3] = [0, 40, 64].map(|same| {
        (0..200u32).map(|i| if i < same { 37 * i % 290 } else { (31 * i + 7 * same) % 290 }).collect()
    });
    for (drafting, seed) in drafting.into_iter().zip(1u64..) {
        let kept = tempfile::tempdir().unwrap();
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut below = |n: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % n
        };
        let mut tails: Vec<Vec<u32>> = bases.to_vec();
        for restart in 0..3 {
            // Every time with other memory.
            let options =
                EngineOptions { chunk: Some([300, 7, 64][restart]), sequences: 2, ..toy_options(drafting) };
            let plan = inspect(model, &options).unwrap().plan.unwrap();
            let memory = Some(ByteSize(plan.minimum + 7 * restart as u64 * plan.slot_row()));
            let options = EngineOptions { memory, ..options };
            let mut engine = open(model, options, Some(kept.path()));
            let mut session = Session::new(&engine);
            for _ in 0..6 {
                let base = &tails[below(tails.len())];
                let len =
                    [1 + below(base.len().min(200)), base.len().min(200), 64, 65][below(4)].min(base.len());
                let mut wanted = base[..len].to_vec();
                wanted.extend((0..below(4) as u32).map(|i| 100 + i));
                if below(3) == 0 {
                    session = Session::new(&engine);
                }
                let turn = answer(&mut engine, &mut session, &wanted, below(12));
                assert!(turn.reused < wanted.len());
                let cached = session.tokens().to_vec();
                assert_eq!(cached[..wanted.len()], wanted);
                let rows = all_logits(&mut plain, &cached);
                assert_eq!(
                    bits(rows.last().unwrap()),
                    bits(session.last_logits()),
                    "{drafting:?}, {wanted:?}"
                );
                // Where it has no room, auto leaves the MTP layer out.
                if engine.plan().mtp > 0 {
                    let mut fresh = Session::new(&engine);
                    fresh.run_tokens(&mut engine, &cached, &CancelToken::new(), &mut |_, _| ()).unwrap();
                    assert_eq!(session.kv().drafting(), cached.len() - 1, "no holes");
                    for position in 0..cached.len() - 1 {
                        assert_eq!(
                            session.kv().latent(mtp, position),
                            fresh.kv().latent(mtp, position),
                            "{position}"
                        );
                    }
                }
                tails.push([&wanted[..], &turn.tokens].concat());
                if below(2) == 0 {
                    engine.save_prefixes().unwrap();
                }
            }
        }
    }
}

/// A token other than the one that was announced must not meet the MTP row of that one.
#[test]
fn another_prompt_than_announced_leaves_no_stale_row() {
    let mut engine = open(TOY.path(), toy_options(Drafting::Depth(2)), None);
    let wanted: Vec<u32> = (0..70).collect();
    let mut session = Session::new(&engine);
    answer(&mut engine, &mut session, &wanted, 3);
    let mut session = Session::new(&engine);
    assert_eq!(session.start_from(&mut engine, &wanted).unwrap().tokens, 69);
    let request = Request { prompt: &[200, 201], max_tokens: 3, sampling: Sampling::greedy(), stops: &[] };
    session
        .generate(&mut engine, &request, &CancelToken::new(), None, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    let cached = session.tokens().to_vec();
    let mut fresh = Session::new(&engine);
    fresh.run_tokens(&mut engine, &cached, &CancelToken::new(), &mut |_, _| ()).unwrap();
    for position in 0..cached.len() - 1 {
        assert_eq!(session.kv().latent(5, position), fresh.kv().latent(5, position), "{position}");
    }
}

#[test]
fn sequences_share_blocks_and_end_with_an_error_where_there_are_none() {
    let mut engine =
        open(TOY.path(), EngineOptions { context: Some(128), ..toy_options(Drafting::Off) }, None);
    let all = engine.prefix_blocks().1;
    assert_eq!(all, 4, "two for a context, and two to spare");
    let wanted: Vec<u32> = (0..120).collect();
    let mut sessions: Vec<Session> = (0..3).map(|_| Session::new(&engine)).collect();
    let answers: Vec<Turn> = sessions.iter_mut().map(|s| answer(&mut engine, s, &wanted, 4)).collect();
    assert!(answers.iter().all(|turn| turn.tokens == answers[0].tokens));
    assert_eq!(answers.iter().map(|turn| turn.stats.prompt_tokens).sum::<usize>(), 122);
    // Nothing in common: there is no room for its two blocks beside those of the three.
    let mut other = Session::new(&engine);
    let prompt: Vec<u32> = (0..120).map(|i| 250 - i).collect();
    let request = Request { prompt: &prompt, max_tokens: 1, sampling: Sampling::greedy(), stops: &[] };
    let error = other
        .generate(&mut engine, &request, &CancelToken::new(), None, &mut |_| ControlFlow::Continue(()))
        .unwrap_err();
    let GenerateError::Forward(ForwardError::NoBlock(full)) = error else { panic!("{error}") };
    assert_eq!(full.blocks, 4);
    assert!(other.tokens().is_empty());
    drop(sessions);
    // What only the cache holds makes room.
    other
        .generate(&mut engine, &request, &CancelToken::new(), None, &mut |_| ControlFlow::Continue(()))
        .unwrap();
    assert_eq!(bits(other.last_logits()), bits(all_logits(&mut engine, &prompt).last().unwrap()));
}

#[test]
fn a_prompt_beyond_the_context_is_refused_and_changes_nothing() {
    let mut engine =
        open(TOY.path(), EngineOptions { context: Some(32), ..toy_options(Drafting::Off) }, None);
    let mut session = Session::new(&engine);
    answer(&mut engine, &mut session, &toy::prompt(), 2);
    let before = session.tokens().to_vec();
    let error = session.start_from(&mut engine, &[5; 33]).unwrap_err();
    assert!(matches!(
        error,
        GenerateError::Forward(ForwardError::ContextFull { tokens: 33, used: 0, capacity: 32 })
    ));
    assert_eq!(session.tokens(), before);
}

/// A store with two blocks and a bit of a conversation, and what the conversation comes to.
fn saved(drafting: Drafting) -> (TempDir, Vec<u32>, Vec<u32>) {
    let kept = tempfile::tempdir().unwrap();
    let mut engine = open(TOY.path(), toy_options(drafting), Some(kept.path()));
    let mut session = Session::new(&engine);
    let wanted: Vec<u32> = (0..150).map(|i| (7 * i + 3) % 290).collect();
    answer(&mut engine, &mut session, &wanted, 5);
    engine.save_prefixes().unwrap();
    (kept, wanted, bits(session.last_logits()))
}

#[test]
fn a_changed_byte_anywhere_is_noticed_and_computed_again() {
    let (kept, wanted, logits) = saved(Drafting::Depth(2));
    let all = files(kept.path());
    assert_eq!(all.len(), 3);
    let mut next = 1u64;
    for round in 0..24 {
        let path = &all[round % 3];
        let sound = fs::read(path).unwrap();
        next = next.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let at = if round < 6 { round * 3 } else { (next >> 33) as usize % sound.len() };
        let mut damaged = sound.clone();
        match round % 4 {
            3 => damaged.truncate(at),
            bit => damaged[at] ^= 1 << (2 * bit),
        }
        fs::write(path, &damaged).unwrap();
        let mut engine = open(TOY.path(), toy_options(Drafting::Depth(2)), Some(kept.path()));
        let mut session = Session::new(&engine);
        let turn = answer(&mut engine, &mut session, &wanted, 5);
        assert!(turn.reused < 149, "round {round}: byte {at} of {} was not noticed", path.display());
        assert_eq!(bits(session.last_logits()), logits, "round {round}");
        // Computed again, it is kept again.
        engine.save_prefixes().unwrap();
        drop((engine, session));
        let mut engine = open(TOY.path(), toy_options(Drafting::Depth(2)), Some(kept.path()));
        let mut session = Session::new(&engine);
        assert_eq!(answer(&mut engine, &mut session, &wanted, 5).reused, 149, "round {round}");
    }
}

#[test]
fn another_model_or_setting_finds_nothing() {
    let (kept, wanted, _) = saved(Drafting::Off);
    let options = toy_options(Drafting::Off);
    let with = |options: EngineOptions, model: [u8; 32]| {
        let mut engine = Engine::open(TOY.path(), options, &mut |_, _| {}).unwrap();
        engine.keep_prefixes(store(kept.path(), 1 << 30), model).unwrap();
        Session::new(&engine).start_from(&mut engine, &wanted).unwrap().tokens
    };
    assert_eq!(with(options, MODEL), 149);
    assert_eq!(with(options, [8; 32]), 0);
    assert_eq!(with(EngineOptions { arith: forebay_model::Arith::Exact, ..options }, MODEL), 0);
    assert_eq!(with(EngineOptions { kv_dtype: forebay_model::KvDtype::F32, ..options }, MODEL), 0);
    assert_eq!(with(EngineOptions { dense_attention: true, ..options }, MODEL), 0);
    assert_eq!(with(EngineOptions { low_rank_norm_eps: Some(1e-6), ..options }, MODEL), 0);
    assert_eq!(with(EngineOptions { drafting: Drafting::Depth(2), ..options }, MODEL), 0);
    // What changes no bit finds it.
    let isa = Some(forebay_kernels::Isa::Scalar);
    assert_eq!(with(EngineOptions { isa, threads: Some(2), chunk: Some(3), ..options }, MODEL), 149);
}

#[test]
fn the_limit_holds_and_the_least_recently_used_goes_first_from_its_end() {
    let kept = tempfile::tempdir().unwrap();
    let mut engine = Engine::open(TOY.path(), toy_options(Drafting::Off), &mut |_, _| {}).unwrap();
    let sequence = |seed: u32| (0..130u32).map(|i| (7 * i + seed) % 290).collect::<Vec<u32>>();
    engine.keep_prefixes(store(kept.path(), 1 << 30), MODEL).unwrap();
    let mut session = Session::new(&engine);
    answer(&mut engine, &mut session, &sequence(1), 0);
    let one = engine.save_prefixes().unwrap();
    assert_eq!(one.blocks, 3);
    // Room for two of them and a bit.
    let limit = one.bytes * 5 / 2;
    engine.keep_prefixes(store(kept.path(), limit), MODEL).unwrap();
    for seed in [2, 3] {
        answer(&mut engine, &mut session, &sequence(seed), 0);
        assert!(!engine.save_prefixes().unwrap().full);
        let bytes: u64 = files(kept.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
        assert!(bytes <= limit, "{bytes} of {limit}");
    }
    drop((engine, session));
    let mut engine = open(TOY.path(), toy_options(Drafting::Off), Some(kept.path()));
    let mut found = |seed| Session::new(&engine).start_from(&mut engine, &sequence(seed)).unwrap().tokens;
    assert_eq!((found(3), found(2)), (129, 129));
    let first = found(1);
    assert!(first == 0 || first == 64, "{first}: from its end");

    let mut engine = Engine::open(TOY.path(), toy_options(Drafting::Off), &mut |_, _| {}).unwrap();
    engine.keep_prefixes(store(kept.path(), one.bytes / 2), MODEL).unwrap();
    let mut session = Session::new(&engine);
    answer(&mut engine, &mut session, &sequence(9), 0);
    assert!(engine.save_prefixes().unwrap().full, "its beginning alone fits");
    let bytes: u64 = files(kept.path()).iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    assert!(bytes <= one.bytes / 2 && bytes > 0);
}

#[cfg(unix)]
#[test]
fn files_are_their_owners_alone() {
    use std::os::unix::fs::PermissionsExt;
    let (kept, ..) = saved(Drafting::Off);
    for path in files(kept.path()) {
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&path), mode(path.parent().unwrap())), (0o600, 0o700));
    }
}

#[test]
fn a_full_disk_is_said_and_changes_no_answer() {
    let Some(disk) = SmallDisk::new(1 << 20) else {
        println!("skipped: this system lets nobody mount a small disk");
        return;
    };
    let mut engine = open(TOY.path(), toy_options(Drafting::Off), Some(&disk.path().join("kept")));
    let mut session = Session::new(&engine);
    let wanted: Vec<u32> = (0..150).collect();
    disk.fill();
    let first = answer(&mut engine, &mut session, &wanted, 4);
    let error = engine.save_prefixes().unwrap_err().to_string();
    assert!(error.contains("free some space"), "{error}");
    disk.empty();
    assert!(engine.save_prefixes().unwrap().blocks > 0, "later it is kept");
    drop((engine, session));
    let mut engine = open(TOY.path(), toy_options(Drafting::Off), Some(&disk.path().join("kept")));
    let mut session = Session::new(&engine);
    let again = answer(&mut engine, &mut session, &wanted, 4);
    assert_eq!((again.tokens, again.reused), (first.tokens, 149));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// A file of anything under any name is no prefix, no panic, and no large allocation.
    #[test]
    fn strange_files_are_no_prefixes(bytes in proptest::collection::vec(any::<u8>(), 0..2000), sound in any::<bool>()) {
        let (kept, wanted, logits) = saved(Drafting::Off);
        let path = &files(kept.path())[0];
        let mut content = if sound { fs::read(path).unwrap() } else { Vec::new() };
        content.extend(bytes);
        fs::write(path, &content).unwrap();
        fs::write(path.with_file_name("0123.kv"), &content).unwrap();
        fs::write(path.with_file_name(".new-1-1"), &content).unwrap();
        let mut engine = open(TOY.path(), toy_options(Drafting::Off), Some(kept.path()));
        let mut session = Session::new(&engine);
        answer(&mut engine, &mut session, &wanted, 5);
        prop_assert_eq!(bits(session.last_logits()), logits);
    }
}
