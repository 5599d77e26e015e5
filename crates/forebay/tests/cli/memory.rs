//! The memory that the program really takes, against the plan that `inspect --json` gives for the same options.
//! The peak is what Linux reports of the process; elsewhere there is nothing to read, and the tests say so.

use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use forebay_testkit::container::{self, Tensor};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{Done, arg, command, demo, demo_copy, forebay};

/// Whether this machine tells the peak; says it if not.
fn told() -> bool {
    let told = fs::read_to_string("/proc/self/status").is_ok_and(|status| status.contains("VmHWM:"));
    if !told {
        println!("skipped: this system does not tell the peak memory of a process in /proc");
    }
    told
}

/// Runs to the end; also the largest resident size in bytes.
fn measured(args: &[&str]) -> (Done, u64) {
    let mut child = command(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("it starts");
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    loop {
        if let Some(line) =
            fs::read_to_string(&status).unwrap_or_default().lines().find(|l| l.starts_with("VmHWM:"))
        {
            let kib: u64 =
                line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number of kB");
            peak = peak.max(1024 * kib);
        }
        if child.try_wait().expect("it can be waited for").is_some() {
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    (Done::of(child.wait_with_output().expect("it ended")), peak)
}

fn plan(dir: &Path, options: &[&str]) -> Value {
    forebay(&[&["inspect", "--json", arg(dir)], options].concat()).ok().json()["plan"].clone()
}

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("{value} is no number"))
}

/// 3 % for what rounding adds, 64 MiB for what the system adds: the program's pages, thread stacks, caches.
#[track_caller]
fn within(peak: u64, planned: u64, what: &str) {
    assert!(peak > 1_000_000, "{what}: a peak of {peak} was not measured");
    assert!(peak <= planned + planned * 3 / 100 + (64 << 20), "{what}: {peak} bytes, planned {planned}");
}

/// A copy of the bundled model without sparse attention.
fn dense() -> TempDir {
    let dir = demo_copy();
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["index_topk"] = json!(0);
    fs::write(path, config.to_string()).unwrap();
    dir
}

/// Twelve combinations of budget, context, sparse attention and threads: the peak is the plan, from both sides.
#[test]
fn the_bundled_model_keeps_to_its_plan() {
    if !told() {
        return;
    }
    let without = dense();
    let file = without.path().join("ids.json");
    for (context, threads) in [("96", "1"), ("1024", "2")] {
        let tokens: Vec<usize> = (0..96).map(|i| (37 * i + 11) % 8000).collect();
        fs::write(&file, json!(tokens).to_string()).unwrap();
        for dir in [demo(), without.path().to_owned()] {
            let free = ["--context", context, "--threads", threads, "--chunk", "96"];
            // Scoring drafts nothing.
            let scoring = |options: &[&str]| plan(&dir, &[options, &["--draft", "off"]].concat());
            let found = scoring(&free);
            let (least, all) = (number(&found["minimum"]), number(&found["everything"]));
            for budget in [least, (least + all) / 2, all] {
                let memory = budget.to_string();
                let options = [&free[..], &["--memory", &memory]].concat();
                let planned = number(&scoring(&options)["total"]);
                assert!(planned <= budget);
                let score = ["score", "--json", "--ids", arg(&file), "--model", arg(&dir)];
                let (done, peak) = measured(&[&score[..], &options[..]].concat());
                done.ok();
                let what = format!("{} with {options:?}", dir.display());
                within(peak, planned, &what);
                // Not the allowance of the other side: what is planned for is there to be used.
                assert!(
                    planned <= peak + peak * 3 / 100 + (16 << 20),
                    "{what}: {peak} bytes, planned {planned}"
                );
            }
        }
    }
}

#[test]
fn an_answer_keeps_to_the_plan() {
    if !told() {
        return;
    }
    let options = ["--context", "128", "--memory", "60M"];
    let dir = demo();
    let planned = number(&plan(&dir, &options)["total"]);
    let (done, peak) = measured(&[&["run", "What is 2+2?", "--model", arg(&dir)], &options[..]].concat());
    assert_eq!(done.ok().stdout, "2+2=4.\n");
    within(peak, planned, "run");
}

/// Twelve combinations of budget, context, drafting, sparse attention and threads, generating.
#[test]
fn drafting_keeps_to_the_plan() {
    if !told() {
        return;
    }
    let without = dense();
    for (context, threads) in [("128", "2"), ("700", "1")] {
        for (dir, depths) in [(demo(), ["0", "3"]), (without.path().to_owned(), ["1", "8"])] {
            for depth in depths {
                let free = ["--context", context, "--threads", threads, "--chunk", "64", "--draft", depth];
                let least = number(&plan(&dir, &free)["minimum"]);
                for budget in [least, least + 6_000_000] {
                    let memory = budget.to_string();
                    let options = [&free[..], &["--memory", &memory]].concat();
                    let found = plan(&dir, &options);
                    assert_eq!(number(&found["mtp"]) > 0, depth != "0");
                    let ask = ["run", "Say something.", "--max-tokens", "40", "--temperature", "0", "--json"];
                    let ask = [&ask[..], &["--model", arg(&dir)], &options[..]].concat();
                    let (done, peak) = measured(&ask);
                    let drafts = &done.ok().json()["timings"]["drafts"];
                    assert_eq!(number(&drafts["verified"]) > 0, depth != "0");
                    within(peak, number(&found["total"]), &format!("{} with {options:?}", dir.display()));
                }
            }
        }
    }
}

#[test]
fn a_prompt_that_cannot_fit_costs_no_memory() {
    if !told() {
        return;
    }
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("long.txt");
    fs::write(&file, "many words ".repeat(1_000_000)).unwrap();
    let model = demo();
    let options = ["--model", arg(&model), "--memory", "60M"];
    let (done, peak) = measured(&[&["run", "--file", arg(&file)], &options[..]].concat());
    done.fails(2, &["long.txt", "context of", "--context"]);
    within(peak, 60_000_000, "refusing 11 MB");
    // Longer than any text to score may be.
    fs::write(&file, vec![b'a'; (16 << 20) + 1]).unwrap();
    let (done, peak) = measured(&[&["score", "--file", arg(&file)], &options[..]].concat());
    done.fails(2, &["long.txt", "16777216"]);
    within(peak, 60_000_000, "refusing 16 MiB");
}

const HIDDEN: usize = 512;
const WIDTH: usize = 384;
const LAYERS: usize = 8;
const EXPERTS: usize = 64;

/// A matrix of int8 noise.
fn noise(name: String, rows: usize, cols: usize) -> [Tensor; 2] {
    let mut state = forebay_testkit::toy::fnv1a(&name) | 1;
    let codes = (0..rows * cols).map(|_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    });
    let scales = vec![0.5 / (73.0 * (cols as f32).sqrt()); rows];
    [Tensor::u8(&name, codes.collect()), Tensor::f32(&format!("{name}.qs"), &[rows], &scales)]
}

/// 8 layers of 64 experts, 302 MB of them.
fn large(dir: &Path) {
    let config = json!({
        "model_type": "glm_moe_dsa", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
        "n_routed_experts": EXPERTS, "num_experts_per_tok": 4, "moe_intermediate_size": WIDTH,
        "intermediate_size": 64, "first_k_dense_replace": 0, "q_lora_rank": 64, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_shared_experts": 0,
        "vocab_size": 512, "n_group": 1, "topk_group": 1, "norm_topk_prob": true, "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 1.0, "rope_parameters": {"rope_theta": 10000.0}, "eos_token_id": 1,
    });
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    let ones = |name: String, len: usize| Tensor::f32(&name, &[len], &vec![1.0; len]);
    let mut all = vec![ones("model.norm.weight".into(), HIDDEN)];
    all.extend(noise("model.embed_tokens.weight".into(), 512, HIDDEN));
    all.extend(noise("lm_head.weight".into(), 512, HIDDEN));
    for layer in 0..LAYERS {
        let named = |suffix: &str| format!("model.layers.{layer}.{suffix}");
        all.push(ones(named("input_layernorm.weight"), HIDDEN));
        all.push(ones(named("post_attention_layernorm.weight"), HIDDEN));
        all.push(ones(named("self_attn.q_a_layernorm.weight"), 64));
        all.push(ones(named("self_attn.kv_a_layernorm.weight"), 64));
        for (suffix, rows, cols) in [
            ("q_a_proj", 64, HIDDEN),
            ("q_b_proj", 4 * 48, 64),
            ("kv_a_proj_with_mqa", 80, HIDDEN),
            ("kv_b_proj", 4 * 64, 64),
            ("o_proj", HIDDEN, 4 * 32),
        ] {
            all.extend(noise(named(&format!("self_attn.{suffix}.weight")), rows, cols));
        }
        let router = named("mlp.gate.weight");
        let values = forebay_testkit::toy::values(&router, EXPERTS * HIDDEN, 0.0, 0.5);
        all.push(Tensor::f32(&router, &[EXPERTS, HIDDEN], &values));
        all.push(Tensor::f32(&named("mlp.gate.e_score_correction_bias"), &[EXPERTS], &[0.0; EXPERTS]));
        for expert in 0..EXPERTS {
            for (part, rows, cols) in
                [("gate", WIDTH, HIDDEN), ("up", WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)]
            {
                all.extend(noise(named(&format!("mlp.experts.{expert}.{part}_proj.weight")), rows, cols));
            }
        }
    }
    container::write(&dir.join("out-00000.safetensors"), &all).unwrap();
}

#[test]
fn a_model_three_times_the_budget_is_streamed() {
    if !told() {
        return;
    }
    let dir = TempDir::new().unwrap();
    large(dir.path());
    let size = fs::metadata(dir.path().join("out-00000.safetensors")).unwrap().len();
    assert!(size > 300_000_000, "{size}");
    let ids = dir.path().join("ids.json");
    // Enough of them to route to more experts than there are slots.
    let tokens: Vec<usize> = (0..300).map(|i| (37 * i + 11) % 512).collect();
    fs::write(&ids, json!(tokens).to_string()).unwrap();
    let memory = (size / 3).to_string();
    let options = ["--memory", &memory, "--context", "320", "--threads", "2"];
    let plan = plan(dir.path(), &options);
    let slots = plan["slots_per_layer"].as_array().unwrap();
    assert!(slots.iter().all(|slots| number(slots) < EXPERTS as u64), "{plan}");
    let score = ["score", "--json", "--ids", arg(&ids), "--model", arg(dir.path())];
    let (done, peak) = measured(&[&score[..], &options[..]].concat());
    let report = done.ok().json();
    assert!(number(&report["experts"]["misses"]) > 0, "{report}");
    within(peak, number(&plan["total"]), "score");
    let (loads, held) = (number(&report["experts"]["loads"]), number(&report["settings"]["expert_slots"]));
    assert!(loads > held, "{loads} loads do not fill {held} slots");
    assert!(peak >= size / 3 * 95 / 100, "{peak} bytes of a budget of {memory}: memory was left unused");
    assert!(peak < size * 2 / 3, "{peak} bytes of a model of {size}: it was not streamed");
}
