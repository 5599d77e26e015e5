//! `forebay inspect`.

use serde_json::{Value, json};

use crate::support::{arg, forebay, toy};

fn toy_json(args: &[&str]) -> Value {
    let dir = toy();
    forebay(&[&["inspect", "--json", arg(dir.path())], args].concat()).ok().json()
}

#[test]
fn the_toy_is_described_as_its_generator_says() {
    let found = toy_json(&["--memory", "200M", "--context", "64"]);
    assert_eq!(found["family"], "glm_moe_dsa");
    assert_eq!(found["layers"], json!({"total": 5, "dense": 1, "sparse": 4}));
    assert_eq!((&found["hidden"], &found["vocabulary"]), (&json!(64), &json!(300)));
    assert_eq!(found["experts"]["total"], 4 * 256);
    // gate and up [16, 64], down [64, 16], int4 with one f32 scale per row.
    let expert = 2 * (16 * 32 + 16 * 4) + (64 * 8 + 64 * 4);
    assert_eq!(found["experts"]["file_bytes"], 4 * 256 * expert);
    assert_eq!(found["experts"]["cold_bytes_per_token"], 4 * 8 * expert);
    assert_eq!(found["formats"]["routed experts"], json!({"int4-row": 4 * 256 * 3}));
    assert_eq!(found["sparse_attention"]["active"], true);
    assert_eq!(found["mtp"]["complete"], true);
    assert_eq!(found["stop_ids"], json!([290, 291]));
    let plan = &found["plan"];
    assert_eq!((&plan["budget"], &plan["context"]), (&json!(200_000_000), &json!(64)));
    let parts = [
        "weights",
        "embedding",
        "embedding_row_checksums",
        "norms_and_routers",
        "mtp",
        "kv_cache",
        "work",
        "reading",
        "recording",
        "process",
        "staging",
        "slots",
    ];
    let sum: u64 = parts.iter().map(|part| plan[part].as_u64().unwrap()).sum();
    assert_eq!(plan["total"], sum);
    assert!(plan["total"].as_u64() <= plan["budget"].as_u64());
    // Everything fits into 200 MB, the MTP layer too.
    assert_eq!(plan["slots_per_layer"], json!([256, 256, 256, 256, 256]));
}

#[test]
fn the_smallest_budget_is_enough_and_one_byte_less_is_not() {
    let dir = toy();
    let at = |memory: &str| {
        forebay(&["inspect", "--json", arg(dir.path()), "--context", "64", "--memory", memory])
    };
    let minimum = at("200M").ok().json()["plan"]["minimum"].as_u64().unwrap();
    at(&minimum.to_string()).ok();
    let refused = at(&(minimum - 1).to_string());
    assert_eq!(refused.code, 4, "{refused:#?}");
    let found = refused.json();
    assert_eq!(found["plan"], Value::Null);
    assert!(found["plan_error"].as_str().unwrap().contains("--memory"), "{found:#}");
}

#[test]
fn text_names_every_part_of_the_plan() {
    let dir = toy();
    let done = forebay(&["inspect", "--model", arg(dir.path()), "--memory", "200M"]).ok();
    for row in [
        "family",
        "routed experts",
        "instruction set",
        "sparse attention",
        "MTP layer",
        "stop ids",
        "weights",
        "KV cache",
        "work",
    ] {
        assert!(done.stdout.contains(row), "{row} is missing: {}", done.stdout);
    }
    assert!(done.stdout.contains("200.00 MB, as asked for"), "{}", done.stdout);
    assert!(done.stdout.contains("100.0 % can be read in one piece"), "{}", done.stdout);
    assert_eq!(done.stderr, "");
}

#[test]
fn the_instruction_set_is_that_of_a_run() {
    assert_eq!(toy_json(&["--cpu-features", "scalar"])["cpu_features"], "scalar");
    let doctor = forebay(&["doctor", "--json"]).ok().json();
    assert_eq!(toy_json(&[])["cpu_features"], doctor["machine"]["cpu_features"]);
    let other = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    forebay(&["inspect", "--cpu-features", other]).fails(2, &[other, "scalar"]);
}

#[test]
fn re_encoding_is_planned() {
    // The bundled model's float matrices are only routers and norms, which stay as they are.
    let found = forebay(&["inspect", "--json", "--quantize", "int4-g64"]).ok().json();
    assert_eq!(found["formats"]["router"], found["loaded_formats"]["router"]);
    assert_eq!(found["formats"]["routed experts"], found["loaded_formats"]["routed experts"]);
}
