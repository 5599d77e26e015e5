//! Files that a run writes never replace what anybody needs; what is no regular file is not waited for.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::support::{arg, demo, demo_copy, forebay, forebay_reading};

/// Every file of a folder.
fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())).collect()
}

#[cfg(unix)]
#[test]
fn outputs_never_replace_what_is_read() {
    use std::os::unix::fs::symlink;
    let (model, mirror, other) = (demo_copy(), demo_copy(), tempfile::tempdir().unwrap());
    let at = |name: &str| other.path().join(name);
    let prompt = at("prompt");
    fs::write(&prompt, "What is 2+2?").unwrap();
    symlink(model.path().join("config.json"), at("soft")).unwrap();
    symlink(model.path().join("new"), at("dangling")).unwrap();
    symlink(model.path(), at("folder")).unwrap();
    fs::hard_link(mirror.path().join("model.safetensors"), at("hard")).unwrap();
    symlink("prompt", at("same")).unwrap();
    let before = [model.path(), mirror.path(), other.path()].map(contents_of_files);
    let run = ["run", "--model", arg(model.path()), "--mirror", arg(mirror.path()), "--file", arg(&prompt)];
    for (target, why) in [
        (model.path().join("tokenizer.json"), "tokenizer.json in the model's folder"),
        (model.path().join("new"), "in the model's folder"),
        (at("folder/new"), "in the model's folder"),
        (at("soft"), "config.json in the model's folder"),
        (at("dangling"), "in the model's folder"),
        (mirror.path().join("model.safetensors"), "a folder of copies"),
        (mirror.path().join("new"), "a folder of copies"),
        (at("hard"), "model.safetensors in a folder of copies"),
        (prompt.clone(), "read by this command"),
        (at("same"), "read by this command"),
        (other.path().to_owned(), "a folder, not a regular file"),
    ] {
        for option in ["--record", "--route-trace"] {
            let args = [&run[..], &[option, arg(&target)]].concat();
            forebay(&args).fails(2, &[arg(&target), why, "choose another path"]);
        }
    }
    let after = [model.path(), mirror.path(), other.path()].map(contents_of_files);
    assert!(before == after, "something was written");

    // The score's inputs, and standard input where it is a file.
    let ids = at("ids");
    fs::write(&ids, "1 2 3").unwrap();
    forebay(&["score", "--ids", arg(&ids), "--record", arg(&ids)]).fails(2, &["read by this command"]);
    let piped = crate::support::command(&["run", "-", "--record", arg(&prompt)])
        .stdin(fs::File::open(&prompt).unwrap())
        .output()
        .unwrap();
    crate::support::Done::of(piped).fails(2, &["this command's stdin"]);
    assert_eq!(
        (fs::read(&ids).unwrap(), fs::read(&prompt).unwrap()),
        (b"1 2 3".into(), b"What is 2+2?".into())
    );
}

/// The same where links may lead nowhere.
#[cfg(unix)]
fn contents_of_files(dir: &Path) -> BTreeMap<String, Option<Vec<u8>>> {
    let entries = fs::read_dir(dir).unwrap().map(Result::unwrap);
    entries.map(|entry| (entry.file_name().into_string().unwrap(), fs::read(entry.path()).ok())).collect()
}

#[test]
fn two_outputs_are_two_files() {
    let dir = tempfile::tempdir().unwrap();
    let twice = |a: &Path, b: &Path| {
        let args = ["score", "x", "--record", arg(a), "--route-trace", arg(b)];
        forebay(&args).fails(2, &["the route trace goes there"]);
        assert!(fs::read_dir(dir.path()).unwrap().all(|entry| entry.unwrap().file_name() == "link"));
    };
    twice(&dir.path().join("x"), &dir.path().join("x"));
    twice(&dir.path().join("x"), &dir.path().join("./x"));
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("x", dir.path().join("link")).unwrap();
        twice(&dir.path().join("x"), &dir.path().join("link"));
    }
    // One that cannot be made leaves none of the other.
    let (good, bad) = (dir.path().join("good"), demo().join("config.json"));
    forebay(&["score", "x", "--model", arg(&demo()), "--route-trace", arg(&good), "--record", arg(&bad)])
        .fails(2, &["in the model's folder"]);
    assert!(!good.exists());
}

#[test]
fn a_conversation_is_not_saved_into_the_model() {
    let model = demo_copy();
    let before = contents(model.path());
    let save = format!("/save {}\n", arg(&model.path().join("model.safetensors.index.json")));
    let done = forebay_reading(&["chat", "--model", arg(model.path())], save.as_bytes());
    assert_eq!(done.code, 2, "{done:#?}");
    assert!(done.stderr.contains("that is in the model's folder"), "{done:#?}");
    assert!(before == contents(model.path()));
}

#[test]
fn a_result_is_not_made_in_its_source() {
    let model = demo_copy();
    let before = contents(model.path());
    for inside in [model.path().join("packed"), model.path().join("deep/er"), model.path().to_owned()] {
        for verb in [&["pack"][..], &["pack", "--to-reference"], &["convert"], &["convert", "--plan"]] {
            let args = [verb, &[arg(model.path()), arg(&inside)]].concat();
            forebay(&args).fails(2, &["which is read; choose a folder outside"]);
        }
    }
    assert!(before == contents(model.path()));
}

#[test]
fn a_failed_export_leaves_nothing_and_names_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, text) = (dir.path().join("trace"), dir.path().join("text"));
    forebay(&["score", "one two", "--context", "64", "--route-trace", arg(&trace)]).ok();
    let export = ["bench", "cache", "--trace", arg(&trace), "--export-text", arg(&text)];
    #[cfg(unix)]
    {
        // Not a byte can be written to a file; the signal that says so is ignored.
        let done = std::process::Command::new("sh")
            .args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_forebay")])
            .args(export)
            .output()
            .unwrap();
        let done = crate::support::Done::of(done);
        assert!(!done.stderr.contains(arg(&trace)), "{done:#?}");
        done.fails(1, &["cannot write", arg(&text), "File too large", "another path"]);
        assert!(!text.exists());
    }
    let whole = fs::read(&trace).unwrap();
    fs::write(&trace, [&whole[..], b"no record\n"].concat()).unwrap();
    forebay(&export).fails(2, &[arg(&trace), "is not exported", "record it again"]);
    assert!(!text.exists());
    // The name is still free.
    fs::write(&trace, whole).unwrap();
    forebay(&export).ok();
    let mine = fs::read(&trace).unwrap();
    forebay(&["bench", "cache", "--trace", arg(&trace), "--export-text", arg(&trace)])
        .fails(2, &["it is the route trace to export"]);
    assert_eq!(fs::read(&trace).unwrap(), mine);
}

/// Nobody is at the other end of these pipes: whoever opened one would wait for ever.
#[cfg(unix)]
mod pipes {
    use std::process::{Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;
    use crate::support::{Done, command, online, smallest_memory, toy};

    fn pipe(path: &Path) {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }

    /// Runs to the end, which comes soon.
    #[track_caller]
    fn ends(command: &mut Command) -> Done {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let started = Instant::now();
        while child.try_wait().unwrap().is_none() {
            if started.elapsed() > Duration::from_secs(120) {
                child.kill().unwrap();
                panic!("{command:?} waits for ever");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Done::of(child.wait_with_output().unwrap())
    }

    #[test]
    fn that_are_named_on_the_command_line() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pipe");
        pipe(&path);
        let path = arg(&path);
        let empty = dir.path().join("new");
        for args in [
            &["run", "--file", path][..],
            &["score", "--file", path],
            &["score", "--ids", path],
            &["run", "hi", "--record", path],
            &["score", "hi", "--route-trace", path],
            &["bench", "cache", "--trace", path],
            &["bench", "cache", "--trace", path, "--export-text", arg(&empty)],
            &["convert", arg(&demo()), arg(&empty), "--check-text", path],
            &["get", "a/b", "--endpoint", "http://127.0.0.1:9", "--ca", path],
        ] {
            ends(&mut command(args)).fails(2, &[path, "it is a named pipe, not a regular file"]);
        }
        let mut with_token = online(&["get", "a/b", "--endpoint", "http://127.0.0.1:9"]);
        ends(with_token.env("HF_TOKEN_PATH", path)).fails(1, &[path, "named pipe"]);
        assert!(!empty.exists());
    }

    #[test]
    fn in_the_place_of_a_tuning() {
        let (model, cache) = (toy(), tempfile::tempdir().unwrap());
        let run = |args: &[&str]| ends(command(args).env("FOREBAY_CACHE", cache.path()));
        let show = ["tune", "--show", "--model", arg(model.path())];
        run(&["tune", "--model", arg(model.path())]).ok();
        let mut kept = fs::read_dir(cache.path().join("tune")).unwrap();
        let kept = kept.next().unwrap().unwrap().path();
        let result = fs::read(&kept).unwrap();
        // What could be one, were it not for its length.
        fs::write(&kept, [&result[..], &vec![b' '; 64 << 10]].concat()).unwrap();
        run(&show).fails(1, &["nothing was measured yet"]);
        fs::write(&kept, &result).unwrap();
        run(&show).ok();
        fs::remove_file(&kept).unwrap();
        pipe(&kept);
        run(&show).fails(1, &["nothing was measured yet"]);
        run(&["plan", arg(model.path()), "--context", "64"]).ok();
        // Measuring again puts a file there.
        run(&["tune", "--model", arg(model.path())]).ok();
        run(&show).ok();
    }

    #[test]
    fn in_the_place_of_a_usage_history() {
        let (cache, model) = (tempfile::tempdir().unwrap(), demo());
        let memory = smallest_memory(&["--model", arg(&model), "--context", "64"]);
        let args = ["run", "--model", arg(&model), "--context", "64", "--memory", &memory, "What is 2+2?"];
        let answer = || {
            let done = ends(command(&args).env("FOREBAY_CACHE", cache.path())).ok();
            assert_eq!(done.stdout, "2+2=4.\n", "{done:#?}");
            done.stderr
        };
        answer();
        let folder = cache.path().join("usage");
        let all = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let history = all.into_iter().find(|path| path.extension().is_some_and(|end| end == "txt")).unwrap();
        for (end, said) in
            [("", "cannot read the usage history"), (".lock", "cannot write"), (".new", "cannot write")]
        {
            let path = format!("{}{end}", history.display());
            let _ = fs::remove_file(&path);
            pipe(Path::new(&path));
            let said_now = answer();
            assert!(said_now.contains(said) && said_now.contains("named pipe"), "{end}: {said_now}");
            let _ = fs::remove_file(&path);
            answer();
        }
    }

    #[test]
    fn in_a_folder_of_copies() {
        let (model, mirror) = (toy(), tempfile::tempdir().unwrap());
        let ids = mirror.path().join("ids");
        fs::write(&ids, "1 2 3").unwrap();
        let name = mirror.path().join("out-00000.safetensors");
        let score =
            ["score", "--ids", arg(&ids), "--model", arg(model.path()), "--mirror", arg(mirror.path())];
        pipe(&name);
        let done = ends(&mut command(&score));
        done.fails(
            2,
            &["out-00000.safetensors", "a named pipe, not a copy of the model's file", "put a copy there"],
        );
        fs::remove_file(&name).unwrap();
        fs::create_dir(&name).unwrap();
        forebay(&score).fails(2, &["a folder, not a copy"]);
        fs::remove_dir(&name).unwrap();
        std::os::unix::fs::symlink("nowhere", &name).unwrap();
        forebay(&score).fails(2, &["out-00000.safetensors", "no such file"]);
    }

    /// `--file <(command)` and the like are open already.
    #[test]
    fn that_the_shell_opened() {
        let done = forebay_reading(&["run", "--file", "/dev/stdin"], b"What is 2+2?");
        assert_eq!(done.ok().stdout, "2+2=4.\n");
        forebay(&["score", "hi", "--record", "/dev/null", "--route-trace", "/dev/null"]).ok();
    }

    #[test]
    fn in_a_folder_that_is_written_to() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("out");
        let synth = ["synth", arg(&out), "--shape", "tiny", "--layers", "4"];
        for name in ["synth.lock", "synth.json"] {
            fs::create_dir(&out).unwrap();
            pipe(&out.join(name));
            ends(&mut command(&synth)).fails(1, &[name, "named pipe"]);
            fs::remove_dir_all(&out).unwrap();
        }
        forebay(&synth).ok();
        fs::remove_file(out.join("config.json")).unwrap();
        pipe(&out.join("config.json"));
        ends(&mut command(&synth)).fails(1, &["config.json", "named pipe"]);
    }
}

/// A disk that dies while a conversation goes on, and a copy on another one.
#[cfg(unix)]
#[test]
fn reads_that_failed_are_told_at_the_end() {
    use crate::support::{Live, smallest_memory};
    let (model, mirror, other) = (demo_copy(), demo_copy(), tempfile::tempdir().unwrap());
    let record = other.path().join("record");
    let usual = ["--model", arg(model.path()), "--context", "256", "--embedding", "memory"];
    let memory = smallest_memory(&usual);
    let own =
        ["--mirror", arg(mirror.path()), "--memory", &memory, "--record", arg(&record), "--warm-up", "off"];
    let mut chat = Live::start(&[&["chat", "--temperature", "0"], &usual[..], &own[..]].concat());
    chat.say("What is 2+2?");
    assert_eq!(chat.line(), "2+2=4.");
    let weights = fs::OpenOptions::new().write(true).open(model.path().join("model.safetensors")).unwrap();
    weights.set_len(4096).unwrap();
    chat.say("What is 2+2?");
    assert_eq!(chat.line(), "2+2=4.");
    let done = chat.end().ok();
    let told = done.stderr.lines().find(|line| line.contains("failed in")).expect("a note").to_owned();
    for word in [arg(model.path()), "another copy was read instead", "avoided now: 1", "check this disk"] {
        assert!(told.contains(word), "{told}");
    }
    assert!(!done.stderr.contains(&format!("failed in {}", mirror.path().display())), "{done:#?}");
    let lines = fs::read_to_string(&record).unwrap();
    let last: serde_json::Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    let roots = &last["run"]["roots"];
    assert!(roots[0]["errors"].as_u64() > Some(0) && roots[0]["suspect_files"] == 1, "{roots}");
    assert!(roots[1]["errors"] == 0 && roots[1]["suspect_files"] == 0, "{roots}");
    assert!(roots[1]["bytes_read"].as_u64() > Some(0), "{roots}");
}
