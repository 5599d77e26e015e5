//! Ten thousand damaged copies of the bundled model: each gives one clear error or a normal run, never a panic,
//! a hang or a large allocation. Also: what happens when files change under a running engine.

use std::fs::{self, File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use forebay_core::{ByteSize, CancelToken};
use forebay_engine::{Engine, EngineOptions, Event, GenerateError, Request, Sampling, Session, inspect};
use forebay_model::ForwardError;
use forebay_text::{ChatMessage, ChatTemplate, RenderOptions, Tokenizer};
use tempfile::TempDir;

/// splitmix64: the same damage on every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.roll() % n.max(1) as u64) as usize
    }

    fn pick<'a, T: ?Sized>(&mut self, of: &[&'a T]) -> &'a T {
        of[self.below(of.len())]
    }
}

const SHARD: &str = "model.safetensors";

/// A copy of the demo model that can be damaged and healed again.
struct Patient {
    dir: TempDir,
    shard: Vec<u8>,
    file: File,
}

fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

impl Patient {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        for name in ["config.json", "generation_config.json"] {
            fs::copy(demo().join(name), dir.path().join(name)).unwrap();
        }
        let shard = fs::read(demo().join(SHARD)).unwrap();
        fs::write(dir.path().join(SHARD), &shard).unwrap();
        let file = OpenOptions::new().write(true).open(dir.path().join(SHARD)).unwrap();
        Self { dir, shard, file }
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    fn header_len(&self) -> usize {
        8 + u64::from_le_bytes(self.shard[..8].try_into().unwrap()) as usize
    }

    /// Puts `bytes` at `at` of the shard.
    fn put(&mut self, at: usize, bytes: &[u8]) {
        self.file.seek(SeekFrom::Start(at as u64)).unwrap();
        self.file.write_all(bytes).unwrap();
    }

    fn set_len(&mut self, len: usize) {
        self.file.set_len(len as u64).unwrap();
    }

    /// Undoes a change of `len` bytes at `at`, or of the length.
    fn heal(&mut self, at: usize, len: usize) {
        self.set_len(self.shard.len());
        self.file.seek(SeekFrom::Start(at as u64)).unwrap();
        let end = (at + len).min(self.shard.len());
        self.file.write_all(&self.shard[at.min(end)..end]).unwrap();
    }
}

/// Damages a copy of `text`: bits, bytes, ranges, numbers, quotes; cut, or made longer.
fn damage(dice: &mut Dice, text: &[u8]) -> Vec<u8> {
    let mut out = text.to_vec();
    for _ in 0..1 + dice.below(2) {
        let at = dice.below(out.len());
        let len = dice.below(24).min(out.len() - at);
        match dice.below(10) {
            0 => out[at] ^= 1 << dice.below(8),
            1 => out[at] = dice.roll() as u8,
            2 => out[at] = b"{}[]\",:\\0-e. \n"[dice.below(14)],
            3 => out[at..at + len].iter_mut().for_each(|byte| *byte = b' '),
            4 => drop(out.drain(at..at + len)),
            5 => {
                let piece = out[at..at + len].to_vec();
                out.splice(at..at, piece);
            }
            6 => out.truncate(at),
            7 => out.extend((0..len).map(|_| b"}] \0x"[len % 5])),
            _ => replace_value(dice, &mut out),
        }
        if out.is_empty() {
            break;
        }
    }
    out
}

/// Replaces a number, if there is one after a random place, by a value that no field expects.
fn replace_value(dice: &mut Dice, out: &mut Vec<u8>) {
    let from = dice.below(out.len());
    let Some(start) = (from..out.len()).find(|&at| out[at].is_ascii_digit()) else { return };
    let end = (start..out.len()).find(|&at| !b"0123456789.eE+-".contains(&out[at])).unwrap_or(out.len());
    let values = [
        "0",
        "1",
        "2",
        "-1",
        "7",
        "255",
        "257",
        "4096",
        "65536",
        "1048576",
        "16777216",
        "1073741824",
        "4294967295",
        "9223372036854775807",
        "18446744073709551615",
        "18446744073709551616",
        "1e999",
        "1e300",
        "1e-300",
        "0.5",
        "null",
        "true",
        "\"8\"",
        "[]",
        "{}",
        "[[[[1]]]]",
    ];
    out.splice(start..end, dice.pick(&values).bytes());
}

fn options() -> EngineOptions {
    EngineOptions {
        memory: Some(ByteSize(120_000_000)),
        threads: Some(1),
        context: Some(64),
        ..Default::default()
    }
}

/// What a user is told: one line, not too long.
#[track_caller]
fn clear(error: &dyn std::fmt::Display) {
    let text = error.to_string();
    assert!(!text.is_empty() && !text.contains('\n') && text.len() < 1500, "{text}");
}

/// The folder is refused clearly, or planned within the budget.
#[track_caller]
fn examined(dir: &Path) -> bool {
    match inspect(dir, &options()) {
        Ok(found) => match found.plan {
            Ok(plan) => assert!(plan.total() <= plan.budget, "{plan:?}"),
            Err(error) => clear(&error),
        },
        Err(error) => {
            clear(&error);
            return false;
        }
    }
    true
}

/// The most memory that this process ever had, where the system says it.
fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(1024 * line.split_whitespace().next()?.parse::<u64>().ok()?)
}

/// All of it together, two copies of the shard and a few engines included, stays small: no number in a damaged
/// file ever became an allocation.
fn allocations_were_bounded() {
    if let Some(peak) = peak_bytes() {
        assert!(peak < 1_000_000_000, "the damaged models took {peak} bytes");
    }
}

#[test]
fn damaged_shards_are_refused_or_planned() {
    let mut patient = Patient::new();
    let mut dice = Dice(1);
    let header = patient.header_len();
    let (mut refused, mut planned) = (0, 0);
    for i in 0..5000 {
        // The first bytes of the header are as likely as all the others together.
        let within = if dice.below(2) == 0 { header } else { 600 };
        let at = if dice.below(6) == 0 { dice.below(8) } else { 8 + dice.below(within - 8) };
        let len = 1 + dice.below(16);
        let old: Vec<u8> = patient.shard[at..at + len].to_vec();
        let mut changed = (at, len);
        match i % 10 {
            0 => patient.put(at, &[old[0] ^ 1 << dice.below(8)]),
            1 => patient.put(at, &[b"{}[]\",:\\0-e. \n"[dice.below(14)]]),
            2 => {
                let noise: Vec<u8> = (0..len).map(|_| dice.roll() as u8).collect();
                patient.put(at, &noise);
            }
            // Digits stay digits: other offsets, shapes and names.
            3..=6 => {
                let digits =
                    old.iter().map(|&b| if b.is_ascii_digit() { b'0' + dice.below(10) as u8 } else { b });
                patient.put(at, &digits.collect::<Vec<u8>>());
            }
            7 => {
                let length = match dice.below(5) {
                    0 => u64::MAX,
                    1 => patient.shard.len() as u64,
                    2 => dice.below(header) as u64,
                    3 => (header - 8 + dice.below(64)) as u64,
                    _ => dice.roll() >> dice.below(64),
                };
                patient.put(0, &length.to_le_bytes());
                changed = (0, 8);
            }
            8 => {
                let cut =
                    if dice.below(4) == 0 { dice.below(header + 1) } else { patient.shard.len() - 1 - len };
                patient.set_len(cut);
                changed = (cut, patient.shard.len());
            }
            _ => {
                let longer = patient.shard.len() + (1 << dice.below(24));
                patient.set_len(longer);
            }
        }
        match examined(patient.path()) {
            true => planned += 1,
            false => refused += 1,
        }
        patient.heal(changed.0, changed.1);
    }
    assert!(examined(patient.path()), "every change was undone");
    // Both happen; a test that only ever sees one of them would miss its subject.
    assert!(refused > 500 && planned > 100, "{refused} refused, {planned} planned");
    allocations_were_bounded();
}

#[test]
fn damaged_settings_weights_and_texts_are_refused_or_run() {
    let mut dice = Dice(2);
    damaged_settings(&mut dice, 4200);
    damaged_payloads(&mut dice, 460);
    damaged_resident_weights(&mut dice, 40);
    damaged_texts(&mut dice, 300);
    allocations_were_bounded();
}

fn damaged_settings(dice: &mut Dice, times: usize) {
    let patient = Patient::new();
    let (mut refused, mut planned) = (0, 0);
    for i in 0..times {
        let name = if i % 3 == 0 { "generation_config.json" } else { "config.json" };
        let path = patient.path().join(name);
        let whole = fs::read(demo().join(name)).unwrap();
        let hurt = if i % 2 == 0 {
            damage(dice, &whole)
        } else {
            let mut hurt = whole;
            replace_value(dice, &mut hurt);
            hurt
        };
        fs::write(&path, hurt).unwrap();
        match examined(patient.path()) {
            true => planned += 1,
            false => refused += 1,
        }
        fs::copy(demo().join(name), &path).unwrap();
    }
    assert!(refused > 500 && planned > 100, "{refused} refused, {planned} planned");
}

/// Four tokens; the error, if it came to one.
fn four_tokens(engine: &mut Engine, session: &mut Session) -> Result<Vec<u32>, GenerateError> {
    session.truncate(0);
    let prompt = [8162, 8164, 17, 300];
    let request = Request { prompt: &prompt, max_tokens: 4, sampling: Sampling::greedy(), stops: &[] };
    let mut tokens = Vec::new();
    let mut keep = |event| {
        if let Event::Token(token) = event {
            tokens.push(token.id);
        }
        ControlFlow::Continue(())
    };
    session.generate(engine, &request, &CancelToken::new(), None, &mut keep).map(|_| tokens)
}

/// Expert bytes change while an engine runs: any result or a clear error, and the old answer afterwards.
fn damaged_payloads(dice: &mut Dice, times: usize) {
    let mut patient = Patient::new();
    let header = patient.header_len();
    let mut engine = Engine::open(patient.path(), options(), &mut |_, _| {}).unwrap();
    let mut session = Session::new(&engine);
    let before = four_tokens(&mut engine, &mut session).unwrap();
    let (mut failed, mut same) = (0, 0);
    for i in 0..times {
        // The scales come first; a megabyte of noise surely hits some that are used.
        let len = if i % 4 == 0 { 1 << 20 } else { 1 + dice.below(4096) };
        let at = header + dice.below(patient.shard.len() - header - len);
        let noise: Vec<u8> = match i % 3 {
            0 => vec![0xFF; len],
            1 => vec![0; len],
            _ => (0..len).map(|_| dice.roll() as u8).collect(),
        };
        patient.put(at, &noise);
        engine.drop_experts();
        match four_tokens(&mut engine, &mut session) {
            Ok(tokens) => same += usize::from(tokens == before),
            Err(error) => {
                clear(&error);
                failed += 1;
            }
        }
        patient.heal(at, len);
    }
    engine.drop_experts();
    assert_eq!(four_tokens(&mut engine, &mut session).unwrap(), before);
    assert!(failed > 0 && same > 0, "{failed} failed, {same} unharmed");
}

/// The same for weights that are loaded once.
fn damaged_resident_weights(dice: &mut Dice, times: usize) {
    let mut patient = Patient::new();
    let header = patient.header_len();
    for i in 0..times {
        let len = 1 << (8 + dice.below(14));
        let at = header + dice.below(patient.shard.len() - header - len);
        let byte = if i % 2 == 0 { 0xFF } else { 0x7F };
        patient.put(at, &vec![byte; len]);
        match Engine::open(patient.path(), options(), &mut |_, _| {}) {
            Ok(mut engine) => {
                let mut session = Session::new(&engine);
                if let Err(error) = four_tokens(&mut engine, &mut session) {
                    clear(&error);
                }
            }
            Err(error) => clear(&error),
        }
        patient.heal(at, len);
    }
}

fn damaged_texts(dice: &mut Dice, times: usize) {
    let dir = TempDir::new().unwrap();
    let names = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let whole = names.map(|name| fs::read(demo().join(name)).unwrap());
    for (name, bytes) in names.iter().zip(&whole) {
        fs::write(dir.path().join(name), bytes).unwrap();
    }
    let sound = Tokenizer::from_bytes(&whole[0], "tokenizer.json").unwrap();
    let talk =
        [ChatMessage::from_json(&serde_json::json!({"role": "user", "content": "Hi <|user|>"})).unwrap()];
    for i in 0..times {
        if i % 5 == 0 {
            match Tokenizer::from_bytes(&damage(dice, &whole[0]), "tokenizer.json") {
                Ok(tokenizer) => {
                    drop(tokenizer.decode_bytes(&tokenizer.encode_raw("What is 2+2? \u{1F600}")))
                }
                Err(error) => clear(&error),
            }
            continue;
        }
        let which = 1 + i % 2;
        let path = dir.path().join(names[which]);
        fs::write(&path, damage(dice, &whole[which])).unwrap();
        match ChatTemplate::load(dir.path(), &sound) {
            Ok(template) => match template.render(&talk, &RenderOptions::default()) {
                Ok(prompt) => match sound.encode_rendered(&prompt) {
                    Ok(ids) => assert!(ids.iter().all(|&id| (id as usize) < sound.vocab_size())),
                    Err(error) => clear(&error),
                },
                Err(error) => clear(&error),
            },
            Err(error) => clear(&error),
        }
        fs::write(&path, &whole[which]).unwrap();
    }
}

/// A shard that shrinks under a running engine fails the request with expert, file and offset; once it is whole
/// again the same session goes on, and answers as before.
#[test]
fn a_shard_that_shrinks_fails_the_request_and_not_the_engine() {
    let mut patient = Patient::new();
    let mut engine = Engine::open(patient.path(), options(), &mut |_, _| {}).unwrap();
    let mut session = Session::new(&engine);
    let before = four_tokens(&mut engine, &mut session).unwrap();
    for cut in [0, 1000, patient.header_len() + 1, patient.shard.len() / 4] {
        patient.set_len(cut);
        engine.drop_experts();
        let failures = engine.counters().failures;
        let error = four_tokens(&mut engine, &mut session).unwrap_err();
        assert!(matches!(error, GenerateError::Forward(ForwardError::Expert(_))), "{error}");
        let text = error.to_string();
        for word in ["layer", "expert", SHARD, "offset"] {
            assert!(text.contains(word), "{word} is missing: {text}");
        }
        clear(&error);
        assert!(engine.counters().failures > failures);
        let kept = session.tokens().len();
        patient.heal(0, patient.shard.len());
        assert_eq!(kept, 0, "nothing of a failed prompt is kept");
        assert_eq!(four_tokens(&mut engine, &mut session).unwrap(), before, "the same session");
        let mut fresh = Session::new(&engine);
        assert_eq!(four_tokens(&mut engine, &mut fresh).unwrap(), before, "a new session");
    }
}

/// Replacing the file by another of the same name does not disturb an engine that holds the first one open.
#[cfg(unix)]
#[test]
fn a_shard_that_is_replaced_is_still_read_from_the_old_file() {
    let patient = Patient::new();
    let mut engine = Engine::open(patient.path(), options(), &mut |_, _| {}).unwrap();
    let mut session = Session::new(&engine);
    let before = four_tokens(&mut engine, &mut session).unwrap();
    fs::remove_file(patient.path().join(SHARD)).unwrap();
    fs::write(patient.path().join(SHARD), b"something else").unwrap();
    engine.drop_experts();
    assert_eq!(four_tokens(&mut engine, &mut session).unwrap(), before);
    clear(&Engine::open(patient.path(), options(), &mut |_, _| {}).err().unwrap());
}
