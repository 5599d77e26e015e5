//! `forebay tune`.

use serde_json::Value;

use crate::support::{Done, arg, command, toy};

#[test]
fn what_was_measured_is_kept_until_the_files_change() {
    let (model, cache) = (toy(), tempfile::tempdir().unwrap());
    let tune = |args: &[&str]| {
        let all = [&["tune", "--model", arg(model.path())], args].concat();
        Done::of(command(&all).env("FOREBAY_CACHE", cache.path()).output().unwrap())
    };
    tune(&["--show"]).fails(1, &["nothing was measured yet", "forebay tune --model"]);
    let found: Value = tune(&["--json"]).ok().json();
    assert!(found["disk_bytes_per_second"].as_f64().unwrap() > 0.0, "{found}");
    assert!(found["memory_bytes_per_second"].as_f64().unwrap() > 0.0, "{found}");
    assert_eq!(tune(&["--show", "--json"]).ok().json(), found);
    let text = tune(&["--show"]).ok().stdout;
    assert!(text.contains("reads at a time") && text.contains("/s in reads of"), "{text}");

    let shards = std::fs::read_dir(model.path()).unwrap().map(|entry| entry.unwrap().path());
    let shard = shards.into_iter().find(|path| path.extension().is_some_and(|e| e == "safetensors")).unwrap();
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::remove_file(&shard).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    std::fs::write(&shard, bytes).unwrap();
    tune(&["--show"]).fails(1, &["changed since", "forebay tune --model"]);

    let kept: Vec<_> = std::fs::read_dir(cache.path().join("tune")).unwrap().collect();
    assert_eq!(kept.len(), 1);
    std::fs::write(kept[0].as_ref().unwrap().path(), b"{").unwrap();
    tune(&["--show"]).fails(1, &["nothing was measured yet"]);
}
