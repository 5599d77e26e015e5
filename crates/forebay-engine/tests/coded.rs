//! Coded experts: one job gives the same logits from the reference container, a raw one and a coded one, whatever slots
//! hold; and the planner counts slots as large as what they hold, and chooses by rates.

use std::path::Path;

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, IoOptions, Plan, Rates, Session, inspect};
use forebay_hub::pack::{self, Codes, PackOptions};
use forebay_hub::synth::{self, Dims, SynthSpec, TextFiles};
use forebay_io::{Access, Backend, slot_bytes};
use forebay_kernels::Isa;
use forebay_model::{Arith, SlotCodes};
use forebay_store::native::Native;
use forebay_tiers::LookAhead;
use tempfile::TempDir;

/// A model whose experts are large enough to become smaller coded: as it is, packed raw, and packed coded.
fn codable(format: &str) -> [TempDir; 3] {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [dir, raw, coded] = &dirs;
    let dims = Dims {
        hidden: 384,
        dense_width: 256,
        expert_width: 256,
        experts: 8,
        top_k: 4,
        vocab: 320,
        max_context: 512,
        ..Dims::TINY
    };
    let format = format.parse().unwrap();
    let spec =
        SynthSpec { dims, dense: 1, moe: 2, format, mtp: false, dsa: true, seed: 3, shard_bytes: 1 << 20 };
    let files = vec![("tokenizer.json".to_owned(), b"{}".to_vec())];
    let text = TextFiles { files, tokens: 300, stop_ids: vec![290] };
    let cancel = CancelToken::new();
    synth::write(dir.path(), &spec, &text, 2, &cancel, &mut |_, _| {}).unwrap();
    for (to, codes) in [(raw, Codes::Raw), (coded, Codes::Coded)] {
        let options = PackOptions { threads: 2, codes, margin: 0, cancel: &cancel };
        let packed = pack::pack(dir.path(), to.path(), options, &mut |_, _| {}).unwrap();
        assert_eq!(packed.experts.coded, if codes == Codes::Raw { 0 } else { 16 });
    }
    dirs
}

fn plan(dir: &Path, options: EngineOptions) -> Plan {
    let options = EngineOptions { context: Some(160), ..options };
    inspect(dir, &options).unwrap().plan.unwrap()
}

/// The bits of every logit of a prompt and four tokens behind it.
fn logits(dir: &Path, options: EngineOptions) -> Vec<u32> {
    let options = EngineOptions { context: Some(160), ..options };
    let mut engine = Engine::open(dir, options, &mut |_, _| {}).unwrap();
    let tokens: Vec<u32> = (0..100).map(|i| (i * i * 7 + 31 * i + 3) % 290).collect();
    let mut session = Session::new(&engine);
    let mut bits = Vec::new();
    let mut keep = |_: usize, row: &[f32]| bits.extend(row.iter().map(|logit| logit.to_bits()));
    let (prompt, rest) = tokens.split_at(96);
    for pass in std::iter::once(prompt).chain(rest.chunks(1)) {
        session.run_tokens(&mut engine, pass, &CancelToken::new(), &mut keep).unwrap();
    }
    let counters = engine.counters();
    assert!(counters.failures == 0 && counters.loads > 0, "{counters:?}");
    bits
}

#[test]
fn every_container_gives_the_same_bits_whatever_slots_hold() {
    for format in ["int4-row", "int4-g64"] {
        let [dir, raw, coded] = codable(format);
        for arith in [Arith::Int8, Arith::Exact] {
            let base = EngineOptions { arith, threads: Some(2), chunk: Some(64), ..Default::default() };
            let want = logits(dir.path(), base);
            assert!(logits(raw.path(), base) == want, "{format} {arith}");
            assert!(logits(coded.path(), base) == want, "{format} {arith}");
            for expert_slots in SlotCodes::ALL {
                let base = EngineOptions { expert_slots: Some(expert_slots), ..base };
                let Plan { minimum, everything, .. } = plan(coded.path(), base);
                let budgets = [minimum, (minimum + everything) / 2, everything];
                for (turn, isa) in Isa::available().enumerate() {
                    // Every value of these meets every value of the others, if not all at once.
                    let backend = [Backend::Pool, Backend::Uring][turn % 2];
                    let access = [Access::Direct, Access::Buffered][turn % 2];
                    let options = EngineOptions {
                        isa: Some(isa),
                        memory: Some(ByteSize(budgets[turn % 3])),
                        threads: Some(1 + turn % 2),
                        chunk: Some([7, 64, 96][turn % 3]),
                        look_ahead: [LookAhead::On, LookAhead::Off][turn % 2],
                        io: IoOptions { backend: Some(backend), access: Some(access), ..Default::default() },
                        ..base
                    };
                    assert!(
                        logits(coded.path(), options) == want,
                        "{format} {arith} {expert_slots} {options:?}"
                    );
                }
            }
        }
    }
}

/// A coded slot takes as much as the longest record of its layer, a decoded one as much as a raw record.
#[test]
fn slots_are_as_large_as_what_they_hold() {
    let [_dir, raw, coded] = codable("int4-row");
    let held = |expert_slots, memory| {
        plan(coded.path(), EngineOptions { expert_slots, memory, ..Default::default() })
    };
    let header = Native::read_header(coded.path()).unwrap();
    let longest = |layer: usize| header.layers[layer].records.iter().map(|record| record.len).max().unwrap();
    let slot = |bytes: u64| slot_bytes(bytes as usize) as u64;
    let [a, b] = SlotCodes::ALL.map(|slots| held(Some(slots), None));
    // Layers of about the same size share a class, that of the largest.
    let least = slot(longest(0)) + slot(longest(1));
    assert!((least..=2 * slot(longest(0).max(longest(1)))).contains(&a.slot_row()));
    assert_eq!(b.slot_row(), 2 * slot(header.kinds[0].len));
    let other = plan(raw.path(), EngineOptions::default());
    assert_eq!((other.codes, other.slot_row()), (None, b.slot_row()));
    // More slots in the same memory, and a smaller least.
    assert!(a.minimum < b.minimum && a.everything < b.everything);
    let middle = Some(ByteSize(b.minimum + 3 * slot(header.kinds[0].len)));
    let little = Some(ByteSize((a.minimum + b.minimum) / 2));
    let [a, b] = SlotCodes::ALL.map(|slots| held(Some(slots), middle));
    assert!(a.resident_slots() > b.resident_slots());
    assert!(a.codes.unwrap().asked && a.outlook.now.disk_bytes < b.outlook.now.disk_bytes);
    // Decoding takes cores' time in either way, and more of it where nothing is decoded for good.
    assert!(a.outlook.now.decoded_bytes > b.outlook.now.decoded_bytes && b.outlook.now.decoded_bytes > 0);
    // Where only coded slots fit, these are taken.
    let chosen = held(None, little).codes.unwrap();
    assert_eq!((chosen.slots, chosen.other, chosen.asked), (SlotCodes::Coded, None, false));
    let options = EngineOptions {
        expert_slots: Some(SlotCodes::Decoded),
        memory: little,
        context: Some(160),
        ..Default::default()
    };
    assert!(inspect(coded.path(), &options).unwrap().plan.is_err());
}

/// Behind a slow disk slots stay coded; with room for everything, or with a slow decoder, they do not.
#[test]
fn rates_choose_what_slots_hold() {
    let [_dir, _raw, coded] = codable("int4-row");
    let chosen = |memory, rates, throttle| {
        let io = IoOptions { throttle, ..Default::default() };
        plan(coded.path(), EngineOptions { memory, rates, io, threads: Some(1), ..Default::default() })
    };
    let decoded = EngineOptions { expert_slots: Some(SlotCodes::Decoded), ..Default::default() };
    let decoded = plan(coded.path(), EngineOptions { threads: Some(1), ..decoded });
    let some = Some(ByteSize(decoded.minimum + 2 * decoded.slot_row()));
    let all = Some(ByteSize(decoded.everything));
    let rates = |disk, decode| Rates { disk: Some(disk), memory: Some(10e9), decode: Some(decode) };
    let what = |plan: Plan| (plan.codes.unwrap().slots, plan.codes.unwrap().assumed);
    assert_eq!(what(chosen(some, rates(1e6, 4e9), None)), (SlotCodes::Coded, false));
    assert_eq!(what(chosen(all, rates(1e6, 1e8), None)), (SlotCodes::Decoded, false));
    assert_eq!(what(chosen(some, rates(100e9, 1e7), None)), (SlotCodes::Decoded, false));
    // A disk that is held back is a slow disk, and no rate at all is a usual one.
    assert_eq!(what(chosen(some, rates(100e9, 4e9), Some(1 << 20))), (SlotCodes::Coded, false));
    let unknown = chosen(some, Rates::default(), None);
    assert!(unknown.codes.unwrap().assumed && unknown.outlook.now.tokens_per_second.is_none());
}
