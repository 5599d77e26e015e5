//! `forebay plan`.

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{arg, command, forebay, toy};

/// GLM-5.2's headers, and nothing behind them.
fn glm() -> TempDir {
    let dir = TempDir::new().unwrap();
    forebay_testkit::glm52::write(dir.path()).unwrap();
    dir
}

#[test]
fn glm_on_24_gb_is_planned_from_its_headers() {
    let dir = glm();
    let machine = ["plan", arg(dir.path()), "--machine-memory", "24G", "--context", "4096"];
    let rates = ["--disk-rate", "7G", "--memory-rate", "90G"];
    let found = forebay(&[&machine[..], &rates[..], &["--draft", "off", "--json"]].concat()).ok().json();
    assert_eq!(found["schema_version"], 1);
    let model = &found["model"];
    assert_eq!((&model["tensors"], &model["dense_bytes"]), (&json!(118_478), &json!(10_592_313_856u64)));
    let plan = &found["plan"];
    let slots = plan["slots_per_layer"].as_array().unwrap();
    assert!(slots.len() == 75 && slots.iter().all(|slots| slots.as_u64() >= Some(6)), "{plan}");
    let now = &plan["outlook"]["this_budget"];
    let (speed, disk) =
        (now["tokens_per_s"].as_f64().unwrap(), now["disk_bytes_per_token"].as_f64().unwrap());
    assert!((speed * disk / 7e9 - 1.0).abs() < 1e-9 && now["bound"] == "disk", "{now}");
    assert_eq!(plan["outlook"]["half"], Value::Null);
    assert_eq!(found["machine"]["assumed"], true);

    let text = forebay(&[&machine[..], &rates[..], &["--draft", "off"]].concat()).ok().stdout;
    for part in [
        "10.59 GB that every token uses",
        "of which a token uses 600",
        "952.20 MB  token embeddings",
        "0.7 slots per layer",
        "6 to 7 of 256 in each of 75 layers",
        "limited by the disk",
        "too little",
        "sparse attention is absent",
        "it runs with this",
    ] {
        assert!(text.contains(part), "{part} is missing: {text}");
    }
    let mtp = forebay(&[&machine[..], &["--draft", "3", "--json"]].concat()).ok().json();
    // One slot in each of 76 layers, with the two pages that a direct read brings beside an expert.
    let row = 1_456_439_296 + 76 * 8192;
    assert_eq!((&mtp["plan"]["mtp"], &mtp["plan"]["slot_row"]), (&json!(284_972_288), &json!(row)));
    let usual = forebay(&[&machine[..], &["--json"]].concat()).ok().json();
    assert_eq!(usual["plan"]["slots_per_layer"], mtp["plan"]["slots_per_layer"], "the default is auto");
}

#[test]
fn what_is_not_measured_is_not_a_number() {
    let dir = toy();
    let args = ["plan", arg(dir.path()), "--machine-memory", "40M", "--context", "64"];
    let json = forebay(&[&args[..], &["--json"]].concat()).ok().json();
    assert_eq!(json["plan"]["outlook"]["this_budget"]["tokens_per_s"], Value::Null);
    assert_eq!(json["rates"], serde_json::json!({"disk": null, "memory": null}));
    let text = forebay(&args).ok().stdout;
    assert!(text.contains("not measured") && text.contains("--disk-rate"), "{text}");
    let here = forebay(&["plan", arg(dir.path()), "--context", "64"]).ok().stdout;
    assert!(here.contains(&format!("forebay tune --model {}", dir.path().display())), "{here}");
    assert!(here.contains("stay for everything else"), "{here}");
}

#[test]
fn a_machine_that_is_too_small_is_told_what_would_do() {
    let dir = toy();
    let at =
        |memory: &str| forebay(&["plan", arg(dir.path()), "--memory", memory, "--context", "64", "--json"]);
    let refused = at("1M");
    assert_eq!(refused.code, 4, "{refused:#?}");
    let reason = refused.json()["plan_error"].as_str().unwrap().to_owned();
    assert!(reason.contains("needs at least") && reason.contains("--memory"), "{reason}");
    let text = forebay(&["plan", arg(dir.path()), "--memory", "1M"]);
    assert!(text.code == 4 && text.stdout.contains("it does not run"), "{text:#?}");
    forebay(&["plan", arg(dir.path()), "--draft", "1"]).ok();
    forebay(&["plan", "/no/such/folder"]).fails(3, &["/no/such/folder"]);
}

#[test]
fn an_assumed_machine_is_not_told_to_close_programs() {
    let dir = toy();
    let at = ["plan", arg(dir.path()), "--machine-memory", "20M", "--memory", "60M", "--context", "64"];
    let refused = forebay(&at);
    assert!(refused.code == 4 && refused.stdout.contains("larger --machine-memory"), "{refused:#?}");
    assert!(!refused.stdout.contains("close"), "{refused:#?}");
}

#[test]
fn the_way_to_read_is_shown() {
    let dir = toy();
    let plan = ["plan", arg(dir.path()), "--context", "64"];
    let reading =
        |more: &[&str]| forebay(&[&plan[..], &["--json"], more].concat()).ok().json()["reading"].take();
    // Everything fits, so nothing is read twice and the page cache helps the next start.
    let usual = reading(&["--memory", "200M"]);
    assert_eq!(
        (&usual["backend"], &usual["access"], &usual["depth"]),
        (&json!("pool"), &json!("buffered"), &json!(8))
    );
    assert_eq!(usual["tuned"], false);
    let asked = ["--io-backend", "uring", "--io-access", "uncached", "--io-depth", "3"];
    let asked_json = reading(&asked);
    assert_eq!((&asked_json["backend"], &asked_json["access"]), (&json!("uring"), &json!("uncached")));
    assert_eq!(asked_json["depth"], 3);
    assert!(asked_json["block_bytes"].as_u64() > Some(0));
    let text = forebay(&[&plan[..], &asked].concat()).ok().stdout;
    assert!(text.contains("uncached, 3 reads at a time, by io_uring"), "{text}");

    // What tune keeps is used and shown, in its own folder of results.
    let cache = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| {
        let output = command(args).env("FOREBAY_CACHE", cache.path()).output().unwrap();
        crate::support::Done::of(output).ok()
    };
    let tuned = run(&["tune", "--json", "--model", arg(dir.path())]).json();
    let shown = run(&[&plan[..], &["--json"]].concat()).json();
    assert_eq!((&shown["reading"]["tuned"], &shown["reading"]["depth"]), (&json!(true), &tuned["depth"]));
    assert_eq!(shown["rates"]["disk"], tuned["disk_bytes_per_second"]);
    let text = run(&plan).stdout;
    assert!(text.contains("as forebay tune found best"), "{text}");
}

#[test]
fn doctor_and_inspect_show_the_same_plan() {
    let dir = toy();
    let of = |verb: &[&str]| {
        let mut plan = forebay(&[verb, &["--json"]].concat()).ok().json()["plan"].clone();
        // What is available differs from moment to moment, and with it the budget and its outlook.
        for moving in ["budget", "outlook"] {
            plan.as_object_mut().unwrap().remove(moving);
        }
        plan
    };
    let planned = of(&["plan", arg(dir.path())]);
    assert_eq!(planned, of(&["doctor", "--model", arg(dir.path())]));
    assert_eq!(planned, of(&["inspect", arg(dir.path())]));
    let text = forebay(&["doctor", "--model", arg(dir.path())]).ok().stdout;
    assert!(text.contains("KV cache") && text.contains("per token"), "{text}");
}

#[test]
fn where_embeddings_are_is_a_choice() {
    let dir = toy();
    let at = |place: &str| {
        let args =
            ["plan", "--json", arg(dir.path()), "--context", "64", "--memory", "200M", "--embedding", place];
        forebay(&args).ok().json()["plan"].clone()
    };
    let (disk, memory) = (at("disk"), at("memory"));
    assert_eq!((&disk["embedding"], &memory["embedding"]), (&json!(0), &disk["embedding_bytes"]));
    assert_eq!(disk["embedding_place"], "disk");
}

#[test]
fn what_is_kept_to_check_and_to_look_back_has_its_lines() {
    let (dir, packed) = (toy(), TempDir::new().unwrap());
    forebay(&["pack", arg(dir.path()), arg(packed.path()), "--margin", "0"]).ok();
    let plan = |dir: &std::path::Path, place: &str| {
        let args = ["plan", "--json", arg(dir), "--context", "64", "--embedding", place];
        let plan = forebay(&args).ok().json()["plan"].take();
        assert!(plan["recording"].as_u64() > Some(0), "{plan}");
        plan["embedding_row_checksums"].as_u64().unwrap()
    };
    // Four bytes for each of 300 rows, while they come from disk and have checksums.
    assert_eq!(plan(packed.path(), "disk"), 4 * 300);
    assert_eq!((plan(packed.path(), "memory"), plan(dir.path(), "disk")), (0, 0));
    let text = forebay(&["plan", arg(packed.path()), "--context", "64", "--embedding", "disk"]).ok().stdout;
    assert!(text.contains("1.20 kB  checksums of the token embeddings' rows"), "{text}");
    assert!(text.contains("which experts a run chose"), "{text}");
}
