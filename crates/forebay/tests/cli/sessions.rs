//! Prefixes and conversations that outlive the program, and a program that is killed while it keeps them.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{Done, arg, command};

/// The binary with state of its own.
fn with_state(state: &Path, args: &[&str]) -> Command {
    let mut command = command(args);
    command.env("XDG_STATE_HOME", state);
    command
}

fn done(mut command: Command) -> Done {
    Done::of(command.output().expect("the binary starts"))
}

fn run(store: &Path, prompt: &str) -> Value {
    let args =
        ["run", "--json", "--max-tokens", "6", "--context", "1024", "--prefix-store", arg(store), prompt];
    done(command(&args)).ok().json()
}

/// A chat with these lines; what its record says at the end.
fn chat(state: &Path, options: &[&str], lines: &str) -> (Done, Value) {
    let record = state.join("record");
    let args = [&["chat", "--temperature", "0", "--record", arg(&record)], options].concat();
    let mut child = with_state(state, &args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines.as_bytes()).unwrap();
    let done = Done::of(child.wait_with_output().unwrap());
    let text = fs::read_to_string(&record).unwrap_or_default();
    let last = text.lines().last().map_or(Value::Null, |line| serde_json::from_str(line).unwrap());
    (done, last)
}

fn number(value: &Value, name: &str) -> u64 {
    fn find(value: &Value, name: &str) -> Option<u64> {
        match value {
            Value::Object(fields) => fields
                .get(name)
                .and_then(Value::as_u64)
                .or_else(|| fields.values().find_map(|value| find(value, name))),
            _ => None,
        }
    }
    find(value, name).unwrap_or_else(|| panic!("no {name} in {value}"))
}

#[test]
fn a_kept_prompt_costs_one_token_until_it_is_deleted() {
    let store = tempfile::tempdir().unwrap();
    let prompt = "Tell me about the sea. ".repeat(20);
    let first = run(store.path(), &prompt);
    let all = number(&first, "prompt_tokens");
    assert_eq!(number(&first, "reused_tokens"), 0);
    let again = run(store.path(), &prompt);
    assert_eq!((number(&again, "prompt_tokens"), number(&again, "reused_tokens")), (1, all - 1));
    assert_eq!(again["token_ids"], first["token_ids"]);

    let listed =
        done(command(&["sessions", "list", "--json", "--prefix-store", arg(store.path())])).ok().json();
    assert!(number(&listed["prefixes"][0], "files") > 1, "{listed}");
    done(command(&["sessions", "rm", "--prefixes", "--prefix-store", arg(store.path())])).ok();
    assert_eq!(fs::read_dir(store.path()).unwrap().count(), 0);
    assert_eq!(number(&run(store.path(), &prompt), "reused_tokens"), 0);
    let args = ["run", "--prefix-store-size", "1G", "Hi"];
    done(command(&args)).fails(2, &["--prefix-store-size", "--prefix-store"]);
}

#[test]
fn a_named_conversation_goes_on_where_it_ended() {
    let (state, plain) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let options = ["--session", "sums"];
    let (whole, _) = chat(plain.path(), &[], "What is 2+2?\nWhat is 3+4?\n");
    let (first, cost) = chat(state.path(), &options, "What is 2+2?\n");
    let (second, more) = chat(state.path(), &options, "What is 3+4?\n");
    assert_eq!(first.ok().stdout + &second.stdout, whole.ok().stdout, "as in one piece");
    assert!(second.stderr.contains("goes on after 2 messages"), "{second:#?}");
    // The first turn's prompt and all of its answer: the token that ended it was never part of it.
    let had = number(&cost, "prompt_tokens") + number(&cost, "new_tokens");
    assert_eq!(number(&more, "reused_tokens"), had);
    let (_, third) = chat(state.path(), &[&options[..], &["--no-prefix-store"]].concat(), "What is 5+1?\n");
    assert_eq!(number(&third, "reused_tokens"), 0);
    let (other, _) = chat(state.path(), &[], "What is 2+2?\n");
    assert!(!other.ok().stderr.contains("goes on"), "never without its name");

    let list = || done(with_state(state.path(), &["sessions", "list"])).ok().stdout;
    assert!(list().starts_with("sums ") && list().contains("prefixes of one model"), "{}", list());
    done(with_state(state.path(), &["sessions", "rm", "sums"])).ok();
    assert!(!list().contains("sums"));
    done(with_state(state.path(), &["sessions", "rm", "sums"])).fails(2, &["no conversation sums"]);
    done(with_state(state.path(), &["sessions", "rm", "--all"])).ok();
    assert!(!list().contains("prefixes"));
    done(with_state(state.path(), &["chat", "--session", "../up"])).fails(2, &["letters"]);
}

#[test]
fn a_damaged_conversation_is_named_and_left_alone() {
    let state = tempfile::tempdir().unwrap();
    chat(state.path(), &["--session", "one"], "Hi\n").0.ok();
    let file = state.path().join("forebay/sessions/one.json");
    let sound = fs::read_to_string(&file).unwrap();
    for (damaged, word) in [
        (sound[..sound.len() / 2].to_owned(), "not what was written"),
        (sound.replace("\"version\":1", "\"version\":2"), "another version"),
        (sound.replace("\"model\":\"", "\"model\":\"0"), "another model"),
        (sound.replace("\"ids\":[", "\"ids\":[-1,"), "not what was written"),
    ] {
        fs::write(&file, &damaged).unwrap();
        let (refused, _) = chat(state.path(), &["--session", "one"], "Hi\n");
        refused.fails(2, &[word, "forebay sessions rm one"]);
        assert_eq!(fs::read_to_string(&file).unwrap(), damaged);
    }
    // Ids that no model has are an error of the message, not of the program.
    fs::write(&file, sound.replace("\"ids\":[", "\"ids\":[4000000000,")).unwrap();
    let (refused, _) = chat(state.path(), &["--session", "one"], "Hi\n");
    assert!(
        refused.stderr.contains("outside the vocabulary") && !refused.stderr.contains("panicked"),
        "{refused:#?}"
    );
}

fn copy(from: &Path) -> TempDir {
    let to = tempfile::tempdir().unwrap();
    for folder in fs::read_dir(from).unwrap().map(|entry| entry.unwrap().path()) {
        let target = to.path().join(folder.file_name().unwrap());
        fs::create_dir(&target).unwrap();
        for file in fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()) {
            fs::copy(&file, target.join(file.file_name().unwrap())).unwrap();
        }
    }
    to
}

fn kept_files(store: &Path) -> Vec<PathBuf> {
    let folders = fs::read_dir(store).unwrap().map(|entry| entry.unwrap().path());
    folders.flat_map(|folder| fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path())).collect()
}

/// Kills the program while it keeps a longer conversation beside a shorter one, at fifty moments. Afterwards the answer is
/// the same, and what is found is the old prefix, the new one, or the part of the new one that was written.
#[test]
fn a_program_killed_while_it_keeps_a_prefix_leaves_the_old_or_the_new_one() {
    let mut moment = 12345u64;
    let mut outcomes = [0; 3];
    for round in 0..5usize {
        let old_prompt = "Tell me about the sea and the ships. ".repeat(10 + 3 * round);
        let new_prompt =
            format!("{old_prompt}{}", "And about the wind, the sails and the harbours. ".repeat(14));
        let store = tempfile::tempdir().unwrap();
        run(store.path(), &old_prompt);
        let started = copy(store.path());
        let (old, want) =
            (number(&run(started.path(), &new_prompt), "reused_tokens"), run(started.path(), &new_prompt));
        let new = number(&want, "reused_tokens");
        assert!(old > 60 && new > old + 100, "{old} and {new}");
        let before = kept_files(store.path()).len();
        let written = kept_files(started.path()).len() - before;
        for _ in 0..10 {
            let store = copy(store.path());
            let options = [
                "run",
                "--json",
                "--max-tokens",
                "6",
                "--context",
                "1024",
                "--prefix-store",
                arg(store.path()),
            ];
            let mut child = command(&[&options[..], &[new_prompt.as_str()]].concat())
                .stdout(Stdio::piped())
                .stderr(Stdio::null())
                .spawn()
                .expect("the binary starts");
            let mut first = [0];
            child.stdout.as_mut().unwrap().read_exact(&mut first).expect("an answer");
            moment = moment.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // When so many files are there, finished or not, and a little later; the last number is never reached.
            let wanted = before + (moment >> 33) as usize % (written + 2);
            let there = || kept_files(store.path()).len() >= wanted;
            while child.try_wait().unwrap().is_none() && !there() {
                std::thread::yield_now();
            }
            let until = Instant::now() + Duration::from_micros((moment >> 20) % 1500);
            while Instant::now() < until && child.try_wait().unwrap().is_none() {}
            child.kill().unwrap();
            child.wait().unwrap();
            let after = run(store.path(), &new_prompt);
            assert_eq!(after["token_ids"], want["token_ids"]);
            let found = number(&after, "reused_tokens");
            assert!(
                found == old || found == new || (found > old && found.is_multiple_of(64)),
                "{old} {found} {new}"
            );
            outcomes[if found == old { 0 } else { 1 + usize::from(found == new) }] += 1;
            // What was left unfinished is seen by nobody.
            let again = run(store.path(), &new_prompt);
            assert_eq!(number(&again, "reused_tokens"), new);
            assert!(kept_files(store.path()).len() as u64 >= new / 64);
        }
    }
    println!("old, part of the new, new: {outcomes:?}");
    assert!(outcomes.iter().all(|count| *count > 0), "{outcomes:?}: not killed at different moments");
}
