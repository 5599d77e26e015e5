//! What goes wrong, and how it is told: one line, the right status, nothing on standard output.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::{arg, command, demo_copy, forebay, forebay_reading, scratch, toy};

/// Every verb that opens a model says the same about a folder.
fn refused(dir: &Path, code: i32, words: &[&str]) {
    for verb in [&["run", "hi"][..], &["chat"], &["inspect"], &["score", "hi"]] {
        forebay(&[verb, &["--model", arg(dir)]].concat()).fails(code, words);
    }
}

fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(&path, config.to_string()).unwrap();
}

#[test]
fn folders_that_are_no_models() {
    let dir = tempfile::tempdir().unwrap();
    refused(&dir.path().join("nowhere"), 3, &["nowhere", "nothing at that path"]);
    refused(dir.path(), 3, &["empty"]);
    let file = dir.path().join("model.gguf");
    fs::write(&file, "GGUF").unwrap();
    refused(&file, 3, &["GGUF"]);
}

#[test]
fn a_bad_field_is_named() {
    let dir = demo_copy();
    edit_config(dir.path(), |config| config["num_hidden_layers"] = json!("eight"));
    refused(dir.path(), 3, &["config.json", "num_hidden_layers", "eight"]);
    edit_config(dir.path(), |config| config["model_type"] = json!("other"));
    refused(dir.path(), 3, &["model_type", "other"]);
    fs::write(dir.path().join("config.json"), "{").unwrap();
    refused(dir.path(), 3, &["config.json"]);
}

#[test]
fn damaged_shards_are_named() {
    let dir = demo_copy();
    let weights = dir.path().join("model.safetensors");
    let twin = dir.path().join("twin.safetensors");
    fs::copy(&weights, &twin).unwrap();
    refused(dir.path(), 3, &["twin.safetensors", "model.safetensors"]);
    fs::remove_file(&twin).unwrap();
    let size = fs::metadata(&weights).unwrap().len();
    fs::OpenOptions::new().write(true).open(&weights).unwrap().set_len(size - 100).unwrap();
    refused(dir.path(), 3, &["model.safetensors"]);
    fs::remove_file(&weights).unwrap();
    refused(dir.path(), 3, &[".safetensors"]);
}

#[test]
fn a_model_without_tokenizer_cannot_talk() {
    let dir = toy();
    forebay(&["run", "hi", "--model", arg(dir.path())]).fails(3, &["tokenizer.json"]);
    forebay(&["chat", "--model", arg(dir.path())]).fails(3, &["tokenizer.json"]);
}

#[test]
fn too_little_memory_says_how_much_it_takes() {
    for verb in [&["run", "hi"][..], &["chat"], &["score", "hi"]] {
        forebay(&[verb, &["--memory", "1M"]].concat()).fails(4, &["1.00 MB", "at least", "--memory"]);
    }
    let more_than_there_is = forebay(&["run", "hi", "--memory", "900T", "--context", "16"]);
    // A budget is a limit, not a reservation.
    assert_eq!(more_than_there_is.code, 0, "{more_than_there_is:#?}");
}

#[test]
fn prompts_that_do_not_fit_or_are_not_text() {
    let long = "word ".repeat(50);
    forebay(&["run", &long, "--context", "32"]).fails(2, &["context of 32", "--context"]);
    forebay(&["run", "hi", "--context", "4096"]).fails(2, &["4096", "2048"]);
    forebay(&["run"]).fails(2, &["empty"]);
    forebay_reading(&["run", "-"], b"caf\xe9").fails(2, &["UTF-8", "byte 3"]);
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("prompt.txt");
    forebay(&["run", "--file", arg(&file)]).fails(2, &["prompt.txt"]);
    fs::write(&file, b"ab\xff").unwrap();
    forebay(&["run", "--file", arg(&file)]).fails(2, &["prompt.txt", "byte 2"]);
    forebay(&["score", "--file", arg(dir.path())]).fails(2, &["a folder, not a regular file"]);
}

/// Nobody writes to these pipes: whoever opened one would wait for ever.
#[cfg(unix)]
#[test]
fn pipes_in_the_place_of_files() {
    for name in ["config.json", "generation_config.json"] {
        let dir = demo_copy();
        let path = dir.path().join(name);
        fs::remove_file(&path).unwrap();
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        refused(dir.path(), 3, &[name, "not a regular file"]);
    }
}

#[test]
fn names_in_files_do_not_steer_the_terminal() {
    let dir = demo_copy();
    edit_config(dir.path(), |config| config["model_type"] = json!("\u{1b}]0;owned\u{7}"));
    for verb in [&["run", "hi"][..], &["inspect"]] {
        let done = forebay(&[verb, &["--model", arg(dir.path())]].concat());
        assert!(!done.stderr.contains(['\u{1b}', '\u{7}']), "{done:#?}");
        done.fails(3, &["model_type", "owned"]);
    }
}

/// Not every system takes such a name.
#[cfg(unix)]
#[test]
fn names_of_files_do_not_steer_the_terminal() {
    let dir = demo_copy();
    fs::write(dir.path().join("bad\u{1b}[31m.safetensors"), b"short").unwrap();
    forebay(&["inspect", arg(dir.path())]).fails(3, &["bad\\u{1b}[31m.safetensors"]);
}

#[test]
fn options_that_do_not_exist_or_fit() {
    forebay(&["run", "--tempreature", "1", "hi"]).fails(2, &["--tempreature"]);
    forebay(&["run", "--temperature", "3", "hi"]).fails(2, &["from 0 to 2"]);
    forebay(&["run", "--memory", "lots", "hi"]).fails(2, &["16G"]);
    forebay(&["run", "--memory", "-5G", "hi"]).fails(2, &["-5G", "16G"]);
    forebay(&["sing"]).fails(2, &["sing"]);
    let other = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    forebay(&["run", "--cpu-features", other, "hi"]).fails(2, &[other, "scalar"]);
}

#[test]
fn help_documents_the_exit_statuses() {
    let help = forebay(&["--help"]).ok().stdout;
    for line in [
        "0    done",
        "1    failed",
        "2    wrong",
        "3    the model folder",
        "4    not enough",
        "130  interrupted",
    ] {
        assert!(help.contains(line), "{line} is missing: {help}");
    }
    assert_eq!(forebay(&["--version"]).ok().stdout, format!("forebay {}\n", env!("CARGO_PKG_VERSION")));
    assert_eq!(forebay(&[]).code, 2);
}

#[test]
fn a_damaged_copy_of_the_bundled_model_is_repaired() {
    let cache = tempfile::tempdir().unwrap();
    let run = || {
        let output = command(&["run", "What is 2+2?"]).env("FOREBAY_CACHE", cache.path()).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stdout), "2+2=4.\n");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    assert!(!run().contains("damaged"));
    let models = cache.path().join("models");
    let model = fs::read_dir(models).unwrap().next().unwrap().unwrap().path();
    let weights = model.join("model.safetensors");
    let mut bytes = fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&weights, bytes).unwrap();
    assert!(run().contains("model.safetensors of the bundled model was damaged"));
    assert!(!run().contains("damaged"));
}

#[test]
fn a_cache_that_cannot_be_written() {
    let file = tempfile::NamedTempFile::new_in(scratch()).unwrap();
    let output = command(&["run", "hi"]).env("FOREBAY_CACHE", file.path()).output().unwrap();
    crate::support::Done::of(output).fails(1, &["FOREBAY_CACHE", "--model"]);
}

#[cfg(unix)]
#[test]
fn a_first_run_without_a_home_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let mut command = command(&["run", "What is 2+2?"]);
    for variable in ["FOREBAY_CACHE", "HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"] {
        command.env_remove(variable);
    }
    let output = command.env("TMPDIR", temporary.path()).output().unwrap();
    let done = crate::support::Done::of(output).ok();
    assert_eq!(done.stdout, "2+2=4.\n");
    assert!(done.stderr.contains("no home folder") && done.stderr.contains("FOREBAY_CACHE"), "{done:#?}");
    assert!(done.stderr.contains(arg(temporary.path())), "{done:#?}");
}

#[test]
fn a_mirror_that_cannot_serve_is_a_wrong_option() {
    let (empty, toy) = (tempfile::tempdir().unwrap(), toy());
    let ids = empty.path().join("ids");
    std::fs::write(&ids, "1 2 3").unwrap();
    let score = ["score", "--ids", arg(&ids), "--model", arg(toy.path()), "--mirror"];
    let with = |mirror: &std::path::Path| forebay(&[&score[..], &[arg(mirror)]].concat());
    with(empty.path()).fails(2, &["has none of the model's files"]);
    let name = "out-00000.safetensors";
    let bytes = std::fs::read(toy.path().join(name)).unwrap();
    std::fs::write(empty.path().join(name), &bytes[1..]).unwrap();
    with(empty.path()).fails(2, &["its size differs"]);
    std::fs::write(empty.path().join(name), &bytes).unwrap();
    let found = forebay(&[&score[..], &[arg(empty.path()), "--json"]].concat()).ok().json();
    assert_eq!(found["roots"].as_array().unwrap().len(), 2);
}
