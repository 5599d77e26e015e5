//! Folders for state that cannot be written: the answer is the same, what is wrong is said, and what was there stays.
#![cfg(target_os = "linux")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::{Done, arg, command, demo, smallest_memory, toy};

/// An answer of the bundled model with so little memory that a usage history is kept.
fn answer(cache: &Path) -> Done {
    answer_of(command(&[]), cache)
}

/// The same of the binary as `forebay` starts it.
fn answer_of(mut forebay: Command, cache: &Path) -> Done {
    let model = demo();
    let memory = smallest_memory(&["--model", arg(&model), "--context", "64"]);
    let args = ["run", "--model", arg(&model), "--context", "64", "--memory", &memory, "What is 2+2?"];
    let done = Done::of(forebay.args(args).env("FOREBAY_CACHE", cache).output().unwrap()).ok();
    assert_eq!(done.stdout, "2+2=4.\n", "{done:#?}");
    assert!(!done.stderr.contains("panicked"), "{done:#?}");
    done
}

/// The history that an undisturbed run leaves.
fn history(cache: &Path) -> PathBuf {
    let done = answer(cache);
    assert!(!done.stderr.contains("usage history"), "{done:#?}");
    let files = fs::read_dir(cache.join("usage")).unwrap().map(|entry| entry.unwrap().path());
    let mut histories = files.filter(|path| path.extension().is_some_and(|extension| extension == "txt"));
    let found = histories.next().expect("a history");
    assert!(histories.next().is_none());
    found
}

/// The file beside the history with this at its end.
fn beside(path: &Path, end: &str) -> PathBuf {
    PathBuf::from(format!("{}{end}", path.display()))
}

#[test]
fn a_full_disk_leaves_the_history_as_it_was() {
    let cache = tempfile::tempdir().unwrap();
    let path = history(cache.path());
    let before = fs::read(&path).unwrap();
    // Not a byte can be written to a file; the signal that says so is ignored.
    let mut full = Command::new("sh");
    full.args(["-c", "trap '' XFSZ; ulimit -f 0; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_forebay")]);
    let done = answer_of(full, cache.path());
    for word in ["usage history", "File too large", "the old one is unchanged"] {
        assert!(done.stderr.contains(word), "{done:#?}");
    }
    assert_eq!(fs::read(&path).unwrap(), before);
    // There is space again.
    answer(cache.path());
    assert_ne!(fs::read(&path).unwrap(), before, "counted at last");
}

#[test]
fn a_damaged_history_is_moved_aside() {
    let cache = tempfile::tempdir().unwrap();
    let path = history(cache.path());
    let whole = fs::read(&path).unwrap();
    let flipped = [&whole[..60], &[whole[60] ^ 1], &whole[61..]].concat();
    for bad in [&whole[..whole.len() / 2], b"", b"\xff\xfe\0", &flipped] {
        fs::write(&path, bad).unwrap();
        let done = answer(cache.path());
        assert!(done.stderr.contains("is damaged"), "{done:#?}");
        let aside: Vec<_> = fs::read_dir(cache.path().join("usage"))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|extension| extension == "damaged"))
            .collect();
        assert!(matches!(&aside[..], [one] if fs::read(one).unwrap() == bad), "{aside:?}");
        let done = answer(cache.path());
        assert!(!done.stderr.contains("usage history"), "{done:#?}");
    }
}

/// Nobody, not even root, can make a folder in /sys; and something else in the place of the folder, of the
/// history or of its lock is no better than a file system that has become read-only.
#[test]
fn a_folder_that_cannot_be_written() {
    let done = answer(Path::new("/sys/forebay"));
    assert!(done.stderr.contains("cannot write the usage history"), "{done:#?}");

    let cache = tempfile::tempdir().unwrap();
    fs::write(cache.path().join("usage"), b"a file").unwrap();
    let done = answer(cache.path());
    assert!(done.stderr.contains("usage history"), "{done:#?}");

    let cache = tempfile::tempdir().unwrap();
    let path = history(cache.path());
    let before = fs::read(&path).unwrap();
    fs::remove_file(beside(&path, ".lock")).unwrap();
    fs::create_dir(beside(&path, ".lock")).unwrap();
    let done = answer(cache.path());
    assert!(done.stderr.contains("cannot write the usage history"), "{done:#?}");
    assert_eq!(fs::read(&path).unwrap(), before);

    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let done = answer(cache.path());
    assert!(done.stderr.contains("cannot read the usage history"), "{done:#?}");
}

#[test]
fn what_was_measured_is_shown_even_where_it_cannot_be_kept() {
    let model = toy();
    let done = Done::of(
        command(&["tune", "--model", arg(model.path()), "--json"])
            .env("FOREBAY_CACHE", "/sys/forebay")
            .output()
            .unwrap(),
    );
    let done = done.ok();
    assert!(done.json()["disk_bytes_per_second"].as_f64().unwrap() > 0.0);
    assert!(done.stderr.contains("cannot be kept in /sys/forebay/tune"), "{done:#?}");
    assert!(done.stderr.contains("FOREBAY_CACHE"), "{done:#?}");
}
