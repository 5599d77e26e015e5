//! Where files go: what is there already, what is in the way, and who else is at it.

use std::fs;
use std::path::Path;
use std::time::Duration;

use forebay_hub::get::{Event, GetError, Got, Request, Target};
use forebay_hub::known::Known;
use forebay_testkit::hub::COMMIT;
use tempfile::TempDir;

use crate::{assert_complete, config, files, get, get_with, request, server};

#[test]
fn disks_folders_and_locks_are_looked_at_before_anything_is_written() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let target = Target::Folder(dir.path().join("new"));
    let full = Request { margin: 1 << 62, ..request(target.clone()) };
    if cfg!(unix) {
        let error = get_with(&config(&server), &full).unwrap_err();
        assert!(matches!(error, GetError::NoRoom { margin, .. } if margin == 1 << 62), "{error}");
        assert!(!dir.path().join("new").exists());
    }
    // A file of the user's is never replaced.
    fs::create_dir(dir.path().join("new")).unwrap();
    fs::write(dir.path().join("new/config.json"), "mine").unwrap();
    let error = get_with(&config(&server), &request(target.clone())).unwrap_err();
    assert!(matches!(error, GetError::Occupied { .. }), "{error}");
    fs::write(
        dir.path().join("new/config.json"),
        files()["config.json"].iter().map(|b| b ^ 1).collect::<Vec<_>>(),
    )
    .unwrap();
    let error = get_with(&config(&server), &request(target.clone())).unwrap_err();
    assert!(matches!(error, GetError::Occupied { .. }), "{error}");
    // The right one is kept.
    fs::write(dir.path().join("new/config.json"), &files()["config.json"]).unwrap();
    get_with(&config(&server), &request(target.clone())).unwrap();
    assert_complete(&dir.path().join("new"));
    // Another commit does not go into the same folder.
    let text = server.listing().to_string().replace(COMMIT, &"a".repeat(40));
    server.faults(|faults| faults.listing = Some(text));
    let error = get_with(&config(&server), &request(target)).unwrap_err();
    assert!(matches!(&error, GetError::OtherModel { found, .. } if found.contains(COMMIT)), "{error}");
}

/// A folder that was fetched, and somebody worked on a file of it.
#[test]
fn what_was_changed_since_is_looked_at_again_and_never_replaced() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    get(&server, dir.path()).unwrap();
    let served = server.served();
    let path = dir.path().join("config.json");
    let right = files()["config.json"].clone();
    let (mut other, longer) = (right.clone(), [&right[..], b" "].concat());
    other[5] ^= 1;
    for changed in [other, longer] {
        fs::write(&path, &changed).unwrap();
        let error = get(&server, dir.path()).unwrap_err();
        assert!(matches!(&error, GetError::Occupied { path: at, .. } if *at == path), "{error}");
        assert!(fs::read(&path).unwrap() == changed);
    }
    // Written anew and right: it is hashed once, and known from then on.
    fs::write(&path, &right).unwrap();
    assert_eq!(get(&server, dir.path()).unwrap().0.kept, files().len() - 1);
    assert_eq!(get(&server, dir.path()).unwrap().0.kept, files().len());
    assert_eq!(server.served(), served);
    // Deleted, as `verify` advises for damage that no time tells of: it comes again.
    fs::remove_file(&path).unwrap();
    assert_eq!(get(&server, dir.path()).unwrap().0.arrived, right.len() as u64);
    assert_complete(dir.path());
}

/// Opening one would last for ever.
#[cfg(unix)]
#[test]
fn pipes_among_the_records_are_not_waited_for() {
    let pipe = |path: &Path| {
        let _ = fs::remove_file(path);
        assert!(std::process::Command::new("mkfifo").arg(path).status().unwrap().success());
    };
    let (server, dir) = (server(), TempDir::new().unwrap());
    get(&server, dir.path()).unwrap();
    let ours = dir.path().join(".forebay");
    pipe(&ours.join("get.json"));
    let said = |result: Result<(Got, Vec<Event>), GetError>| result.unwrap_err().to_string();
    let text = said(get(&server, dir.path()));
    assert!(text.contains("get.json") && text.contains("pipe") && text.contains("delete it"), "{text}");
    assert!(Known::of_folder(dir.path()).unwrap_err().to_string().contains("get.json"));
    fs::remove_file(ours.join("get.json")).unwrap();
    pipe(&ours.join("forebay.lock"));
    assert!(said(get(&server, dir.path())).contains("forebay.lock"));
    fs::remove_file(ours.join("forebay.lock")).unwrap();
    // An incomplete file with such a journal is as good as none.
    let name = "model-00002.safetensors";
    fs::remove_file(dir.path().join(name)).unwrap();
    fs::write(dir.path().join(format!("{name}.forebay.incomplete")), vec![0; files()[name].len()]).unwrap();
    pipe(&dir.path().join(format!("{name}.forebay.ranges")));
    get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
    // In the way of a file itself.
    pipe(&dir.path().join(name));
    assert!(matches!(get(&server, dir.path()), Err(GetError::Occupied { .. })));
}

#[test]
fn two_at_once_are_one_too_many() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.rate = Some(2_000_000));
    std::thread::scope(|scope| {
        let first = scope.spawn(|| get(&server, dir.path()));
        let lock = dir.path().join(".forebay/get.json");
        while !lock.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
        let error = get(&server, dir.path()).unwrap_err();
        assert!(matches!(error, GetError::Busy { .. }), "{error}");
        server.faults(|faults| faults.rate = None);
        first.join().unwrap().unwrap();
    });
    assert_complete(dir.path());
}
