//! `forebay doctor`.

use serde_json::{Value, json};

use crate::support::forebay;

#[test]
fn the_machine_is_described() {
    let found = forebay(&["doctor", "--json"]).ok().json();
    let machine = &found["machine"];
    assert_eq!(found["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(machine["architecture"], std::env::consts::ARCH);
    let available = machine["cpu_features_available"].as_array().unwrap();
    assert_eq!(available.first(), Some(&json!("scalar")));
    // Slowest first: the best is the one in use.
    assert_eq!(available.last(), Some(&machine["cpu_features"]));
    assert!(machine["threads"].as_u64().unwrap() > 0);
    assert!(found["advice"].is_array());
    if cfg!(target_os = "linux") {
        assert!(machine["memory"]["total"].as_u64() >= machine["memory"]["available"].as_u64());
        assert!(machine["processors_allowed"].as_u64() >= machine["cores_allowed"].as_u64());
    }
    assert_eq!(found["plan"], Value::Null, "no model was named");
}

#[test]
fn text_says_the_same_and_how_to_choose() {
    let found = forebay(&["doctor", "--json"]).ok().json();
    let done = forebay(&["doctor"]).ok();
    assert_eq!(done.stderr, "");
    let isa = found["machine"]["cpu_features"].as_str().unwrap();
    for word in [isa, "--cpu-features", "--threads", "caches", "memory limit", "large pages", "advice"] {
        assert!(done.stdout.contains(word), "{word} is missing: {}", done.stdout);
    }
    for advice in found["advice"].as_array().unwrap() {
        assert!(done.stdout.contains(advice.as_str().unwrap()), "{}", done.stdout);
    }
}
