//! `forebay bench kernels`, `io` and `cache`, with little to do.

use serde_json::{Value, json};

use crate::support::{arg, forebay};

const SMALL: [&str; 12] = [
    "bench",
    "kernels",
    "--shape",
    "64x256",
    "--batch",
    "1,3",
    "--threads",
    "1",
    "--rounds",
    "3",
    "--memory",
    "8M",
];

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is no number"))
}

#[track_caller]
fn close(value: &Value, want: f64) {
    let value = number(value);
    assert!((value - want).abs() <= 1e-9 * want.abs(), "{value} instead of {want}");
}

/// The median, which must be that of the `count` values beside it.
#[track_caller]
fn median(value: &Value, values: &str, count: usize) -> f64 {
    let mut all: Vec<f64> = value[values].as_array().unwrap().iter().map(number).collect();
    assert_eq!(all.len(), count);
    all.sort_by(f64::total_cmp);
    assert!(all[0] > 0.0);
    let middle = (all[(count - 1) / 2] + all[count / 2]) / 2.0;
    close(&value["median"], middle);
    middle
}

/// What must hold for the weights of a line, wherever they lie.
fn timed(part: &Value, batch: f64, weight_bytes: f64, peak: f64) -> f64 {
    close(&part["weight_bytes"], weight_bytes);
    let multiply_adds = number(&part["rows"]) * number(&part["cols"]) * batch;
    close(&part["multiply_adds"], multiply_adds);
    let seconds = median(&part["seconds"], "rounds", 3);
    close(&part["gb_s"], weight_bytes / seconds / 1e9);
    close(&part["gmac_s"], multiply_adds / seconds / 1e9);
    close(&part["percent_of_peak"], 100.0 * multiply_adds / seconds / 1e9 / peak);
    multiply_adds / seconds / 1e9
}

#[test]
fn every_percentage_follows_from_the_numbers_beside_it() {
    let options = ["--json", "--what", "matmul", "--format", "int4-g64,bf16", "--cpu-features", "scalar"];
    let found = forebay(&[&SMALL[..], &options].concat()).ok().json();
    assert_eq!(found["machine"]["cpu_features"], "scalar");
    assert_eq!((&found["rounds"], &found["attention"]), (&json!(3), &Value::Null));
    let [group] = &found["matmul"].as_array().unwrap()[..] else { panic!("{found:#}") };
    assert_eq!((&group["rows"], &group["cols"]), (&json!(64), &json!(256)));
    let [limits] = &group["limits"].as_array().unwrap()[..] else { panic!("{found:#}") };
    assert_eq!(limits["threads"], 1);
    // Twenty-two meters a round, and the limits before each sixteen.
    let limit = |name: &str| median(&limits[name], "samples", 2 * 3);
    let (read, integer, float) = (limit("read_gb_s"), limit("integer_gmac_s"), limit("float_gmac_s"));

    let lines = group["lines"].as_array().unwrap();
    let exact_bf16 = lines.iter().filter(|line| line["format"] == "bf16");
    assert!(exact_bf16.clone().all(|line| line["arith"] == "exact") && exact_bf16.count() == 2);
    assert!(lines.iter().any(|line| line["format"] == "int4-g64" && line["arith"] == "int8"));
    for line in lines {
        let peak = if line["arith"] == "exact" { float } else { integer };
        close(&line["limits"]["peak_gmac_s"], peak);
        close(&line["limits"]["read_gb_s"], read);
        // 64 x 256: two bytes a weight; or half a byte, and four groups of 64 with a scale of four bytes a row.
        let bytes = |rows: f64, cols: f64| match line["format"].as_str() {
            Some("bf16") => 2.0 * rows * cols,
            _ => rows * (cols / 2.0 + cols / 64.0 * 4.0),
        };
        let (memory, cache, batch) = (&line["memory"], &line["cache"], number(&line["batch"]));
        assert_eq!((&memory["rows"], &memory["cols"]), (&json!(64), &json!(256)));
        let speed = timed(memory, batch, bytes(64.0, 256.0), peak);
        timed(cache, batch, bytes(number(&cache["rows"]), number(&cache["cols"])), peak);
        close(&memory["percent_of_read"], 100.0 * number(&memory["gb_s"]) / read);
        let roofline = peak.min(read * number(&memory["multiply_adds"]) / bytes(64.0, 256.0));
        close(&memory["percent_of_roofline"], 100.0 * speed / roofline);
        // Int4 panels with one row are measured in free order too.
        let both = line["layout"] == "panels" && line["arith"] == "int8" && line["batch"] == 1;
        assert_eq!(line["free_order"].is_null(), !both, "{line:#}");
        for (part, canonical) in [("memory", memory), ("cache", cache)].into_iter().filter(|_| both) {
            let free = &line["free_order"][part];
            let seconds = median(&free["seconds"], "rounds", 3);
            close(&free["gmac_s"], number(&canonical["multiply_adds"]) / seconds / 1e9);
            let rounds = |part: &Value| -> Vec<f64> {
                part["seconds"]["rounds"].as_array().unwrap().iter().map(number).collect()
            };
            let mut costs: Vec<f64> = rounds(canonical)
                .iter()
                .zip(rounds(free))
                .map(|(canonical, free)| canonical / free)
                .collect();
            costs.sort_by(f64::total_cmp);
            let (cost, want) = (number(&free["canonical_costs_percent"]), 100.0 * (costs[1] - 1.0));
            assert!((cost - want).abs() < 1e-6, "{cost} instead of {want}");
        }
        // Copies fill the memory that each format got.
        assert!(number(&memory["copies"]) * bytes(64.0, 256.0) <= 8e6);
        assert!(number(&memory["copies"]) >= 2.0);
    }
}

#[test]
fn attention_has_its_own_lines() {
    let options = ["--json", "--what", "attention"];
    let found = forebay(&[&SMALL[..], &options].concat()).ok().json();
    assert_eq!(found["matmul"], json!([]));
    let lines = found["attention"]["lines"].as_array().unwrap();
    assert_eq!(lines.len(), 4);
    for line in lines {
        let seconds = median(&line["seconds"], "rounds", 3);
        close(&line["gb_s"], number(&line["bytes"]) / seconds / 1e9);
        if !line["multiply_adds"].is_null() {
            close(&line["gmac_s"], number(&line["multiply_adds"]) / seconds / 1e9);
            let peak = number(&line["limits"]["peak_gmac_s"]);
            close(&line["percent_of_peak"], 100.0 * number(&line["gmac_s"]) / peak);
        }
    }
    // 64 heads, 2048 positions: 512 + 64 for the score, 512 for the sum.
    assert_eq!(lines[0]["multiply_adds"], json!(64.0 * 2048.0 * 1088.0));
}

#[test]
fn tables_name_what_they_show() {
    let done = forebay(&[&SMALL[..], &["--format", "int8", "--arith", "int8"]].concat()).ok();
    for word in ["64x256", "GB/s", "GMAC/s", "% read", "% peak", "% roof", "int8", "indexer", "3 rounds"] {
        assert!(done.stdout.contains(word), "{word} is missing: {}", done.stdout);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let large = ["--shape", "4096x8192", "--format", "int8", "--what", "matmul"];
    let words = ["bench", "kernels", "--memory", "8M", "--batch", "1", "--rounds", "1"];
    let done = forebay(&[&words[..], &large].concat()).ok();
    assert!(done.stderr.contains("4096x8192 is left out"), "{done:#?}");
    assert!(done.stderr.contains("--memory"), "{done:#?}");
}

#[test]
fn wrong_selections_say_what_is_right() {
    let bench = |option: &str, value: &str| forebay(&["bench", "kernels", option, value]);
    bench("--format", "q4_0").fails(2, &["q4_0"]);
    assert!(bench("--format", "q4_0").stderr.contains("int4-g64"));
    bench("--shape", "2048").fails(2, &["2048", "2048x6144"]);
    bench("--batch", "0").fails(2, &["0"]);
    bench("--what", "speed").fails(2, &["speed"]);
    assert!(bench("--what", "speed").stderr.contains("attention"));
    let other = if cfg!(target_arch = "x86_64") { "neon" } else { "avx2" };
    bench("--cpu-features", other).fails(2, &[other, "scalar"]);
    bench("--memory", "lots").fails(2, &["16G"]);
}

#[test]
fn reads_are_measured_in_every_way_that_the_system_has() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("some.bin");
    std::fs::write(&file, vec![7; 1 << 20]).unwrap();
    let file = file.to_str().unwrap();
    let small = ["--file", file, "--block", "64KiB", "--depth", "1,2", "--rounds", "3", "--sample", "5"];
    let found = forebay(&[&["bench", "io", "--json"], &small[..]].concat()).ok().json();
    assert_eq!((&found["block_bytes"], &found["files"]), (&json!(65536), &json!(1)));
    let lines = found["lines"].as_array().unwrap();
    let pool = |line: &&Value| line["backend"] == "pool";
    assert_eq!(lines.iter().filter(pool).count(), 4, "direct and uncached with both depths");
    if found["notes"].as_array().unwrap().is_empty() {
        assert_eq!(lines.len(), 8);
    }
    for line in lines {
        median(&line["gb_s"], "rounds", 3);
        assert!(0.0 < number(&line["p50_s"]) && number(&line["p50_s"]) <= number(&line["p99_s"]), "{line}");
    }
    let text = forebay(&[&["bench", "io"], &small[..]].concat()).ok().stdout;
    assert!(text.starts_with("reads of 65.54 kB at random places of 1 file; medians of 3 rounds"), "{text}");
    assert!(text.contains("direct") && text.contains("pool"), "{text}");

    forebay(&["bench", "io", "--file", file, "--block", "1G"]).fails(2, &["--block", "268.44 MB"]);
    std::fs::write(file, []).unwrap();
    forebay(&["bench", "io", "--file", file]).fails(2, &["no bytes to read"]);
}

#[test]
fn a_recording_is_replayed_and_exported() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, text) = (dir.path().join("trace"), dir.path().join("text"));
    let memory = crate::support::smallest_memory(&["--context", "64"]);
    // A token a pass, so that what each chose is what was looked up.
    let run = [
        "run",
        "--json",
        "--draft",
        "off",
        "--context",
        "64",
        "--chunk",
        "1",
        "--max-tokens",
        "6",
        "--memory",
    ];
    let run =
        forebay(&[&run[..], &[&memory, "--route-trace", arg(&trace), "Tell me a story."]].concat()).ok();
    let experts = &run.json()["experts"];
    let recorded: Vec<Value> = std::fs::read_to_string(&trace)
        .unwrap()
        .lines()
        .skip(1)
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let sum = |field: &str| recorded.iter().map(|r| r[field].as_array().unwrap().len() as u64).sum::<u64>();
    assert_eq!(
        (experts["hits"].as_u64(), experts["requests"].as_u64()),
        (Some(sum("resident")), Some(sum("ids")))
    );

    let cache = ["bench", "cache", "--trace", arg(&trace)];
    let share = forebay(&[&cache[..], &["--json"]].concat()).ok().json()["resident_when_recorded"].as_f64();
    assert_eq!(share, Some(sum("resident") as f64 / sum("ids") as f64));
    let shown = forebay(&cache).ok().stdout;
    assert!(shown.contains("were in memory when this was recorded"), "{shown}");

    let export = [&cache[..], &["--export-text", arg(&text)]].concat();
    let said = forebay(&export).ok().stdout;
    let lines: Vec<String> = std::fs::read_to_string(&text).unwrap().lines().map(str::to_owned).collect();
    assert!(said.starts_with(&format!("{} lines", recorded.len())), "{said}");
    assert_eq!(lines.len(), recorded.len());
    let first = &recorded[0];
    let pair = |i: usize| format!("{}:{:.4}", first["ids"][i], first["weights"][i].as_f64().unwrap());
    let start = format!("0 0 {} {} {}", first["layer"], pair(0), pair(1));
    assert!(lines[0].starts_with(&start), "{} is not {start}", lines[0]);
    forebay(&export).fails(2, &["choose a name that is free"]);
    forebay(&["bench", "cache", "--trace", arg(&text)]).fails(2, &["line 1", "record"]);
}
