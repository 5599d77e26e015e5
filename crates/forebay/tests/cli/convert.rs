//! `forebay convert` and `forebay verify`: the real binary, also when it is killed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use forebay_testkit::disk::SmallDisk;
use forebay_testkit::hub::{Hub, REPO};
use tempfile::TempDir;

use crate::support::{Done, arg, command, demo, forebay, online};

/// A BF16 checkpoint of some ten megabytes in several files, with MTP layer and indexer.
pub fn checkpoint() -> TempDir {
    checkpoint_in("bf16")
}

/// The same in another format.
pub fn checkpoint_in(format: &str) -> TempDir {
    let dir = TempDir::new().unwrap();
    let shape = ["--shape", "tiny", "--experts", "12", "--dense", "1", "--moe", "1", "--expert-width", "128"];
    let more = ["--mtp", "--dsa", "--format", format, "--file-size", "2M"];
    forebay(&[&["synth", arg(dir.path())][..], &shape, &more].concat()).ok();
    dir
}

/// Every file that makes the model, with its bytes.
pub fn model_files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let named = fs::read_dir(dir).unwrap().map(|entry| {
        let entry = entry.unwrap();
        (entry.file_name().into_string().unwrap(), entry.path())
    });
    let kept = named.filter(|(name, _)| !name.starts_with("forebay-convert."));
    kept.map(|(name, path)| (name, fs::read(path).unwrap())).collect()
}

fn convert<'a>(from: &'a Path, to: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    [&["convert", arg(from), arg(to), "--margin", "0"][..], more].concat()
}

#[test]
fn a_checkpoint_is_converted_checked_and_run() {
    let (source, out) = (checkpoint(), TempDir::new().unwrap());
    let plan = forebay(&convert(source.path(), out.path(), &["--plan", "--json"])).ok().json();
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0, "a plan writes nothing");
    let text = source.path().join("text.txt");
    fs::write(&text, "Water runs down to the turbine, and the turbine turns.").unwrap();
    let done =
        forebay(&convert(source.path(), out.path(), &["--json", "--check-text", arg(&text)])).ok().json();
    assert_eq!((&done["bytes"], &done["census"]["sound"]), (&plan["bytes"], &true.into()), "{done:#}");
    assert_eq!(done["census"]["formats"]["routed experts"], serde_json::json!({"int4-g64": 12 * 3}));
    assert_eq!(done["census"]["mtp"]["state"], "complete");
    let quality = &done["quality"];
    assert!(quality["source_perplexity"].as_f64().unwrap() > 1.0, "{quality}");
    assert!((0.0..=1.0).contains(&quality["top1_agreement"].as_f64().unwrap()), "{quality}");
    let again = forebay(&convert(source.path(), out.path(), &["--json"])).ok().json();
    assert_eq!(again["files_written"], 0);
    forebay(&convert(source.path(), out.path(), &["--to", "int8"])).fails(2, &["other options", "int4-g64"]);
    let answer = forebay(&["run", "--model", arg(out.path()), "--max-tokens", "3", "hello"]).ok();
    assert!(!answer.stdout.is_empty());

    let verified = forebay(&["verify", arg(out.path()), "--hash", "--json"]).ok().json();
    assert_eq!(
        (&verified["sound"], &verified["hash"]["origins"]),
        (&true.into(), &serde_json::json!(["recorded"])),
        "{verified:#}"
    );
    let shown = forebay(&["verify", arg(out.path())]).ok().stdout;
    assert!(shown.contains("complete: dense int8 x") && shown.contains("whole"), "{shown}");
    // One byte, deep in the weights: the headers do not see it, the hash does.
    let path = fs::read_dir(out.path()).unwrap().map(|e| e.unwrap().path());
    let path = path.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).max().unwrap();
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() - 100;
    bytes[middle] ^= 4;
    fs::write(&path, &bytes).unwrap();
    forebay(&["verify", arg(out.path())]).ok();
    let bad = forebay(&["verify", arg(out.path()), "--hash", "--json"]);
    assert_eq!((bad.code, bad.json()["problems"][0]["kind"].as_str()), (3, Some("digest")), "{bad:#?}");
    fs::write(&path, &bytes[..middle]).unwrap();
    let cut = forebay(&["verify", arg(out.path()), "--json"]);
    assert_eq!(cut.code, 3);
    assert!(cut.json()["problems"].as_array().unwrap().len() > 1, "{cut:#?}");
}

#[test]
fn digests_are_recorded_only_when_asked() {
    let dir = crate::support::demo_copy();
    let folder = arg(dir.path());
    forebay(&["verify", folder, "--hash"]).fails(2, &["no recorded digests", "--record"]);
    assert!(!dir.path().join("forebay-digests.json").exists());
    let recorded = forebay(&["verify", folder, "--record", "--json"]).ok().json();
    assert_eq!(recorded["hash"]["recorded"], true);
    forebay(&["verify", folder, "--hash"]).ok();
    fs::write(dir.path().join("tokenizer.json"), "{}").unwrap();
    let bad = forebay(&["verify", folder, "--hash", "--json"]);
    assert_eq!((bad.code, bad.json()["problems"][0]["name"].as_str()), (3, Some("tokenizer.json")));
    // Where nothing can be remembered (a file is where the cache should be), everything is hashed all the same.
    let mut nowhere = command(&["verify", folder, "--hash"]);
    nowhere.env("FOREBAY_CACHE", dir.path().join("config.json"));
    let bad = Done::of(nowhere.output().unwrap());
    assert!(bad.code == 3 && bad.stdout.ends_with(" 1 problem\n"), "{bad:#?}");
    // The bundled model's own digests are nobody's: it is whole by its headers.
    let shown = forebay(&["verify", arg(&demo())]).ok().stdout;
    assert!(shown.contains("MTP layer           complete: dense int8 x"), "{shown}");
}

#[test]
fn killed_anywhere_it_goes_on_to_the_same_bytes() {
    killed(&checkpoint(), &[]);
}

#[test]
fn killed_anywhere_on_the_way_from_fp8_to_a_container_it_goes_on_to_the_same_bytes() {
    killed(&checkpoint_in("fp8-e4m3"), &["--container", "forebay"]);
}

/// kill -9 at 50 moments spread over the whole run, each time in the middle of whatever it is doing.
fn killed(source: &TempDir, more: &[&str]) {
    let whole = TempDir::new().unwrap();
    let started = Instant::now();
    forebay(&convert(source.path(), whole.path(), more)).ok();
    let once = started.elapsed();
    let want = model_files(whole.path());
    let (mut kills, mut rounds, mut seed) = (0, 0, 12345u32);
    while kills < 50 {
        let out = TempDir::new().unwrap();
        rounds += 1;
        assert!(rounds < 400, "only {kills} kills");
        loop {
            let run = command(&convert(source.path(), out.path(), more))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn();
            let mut run = run.unwrap();
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let share = f64::from(seed >> 8) / f64::from(1 << 24);
            std::thread::sleep(Duration::from_secs_f64(0.7 * share * once.as_secs_f64()));
            let ended = run.try_wait().unwrap().is_some();
            run.kill().unwrap();
            let status = run.wait().unwrap();
            if ended {
                assert!(status.success());
                break;
            }
            kills += 1;
            // Half a model does not look like one, and what has its name is whole.
            for (name, bytes) in model_files(out.path()) {
                assert!(
                    name.ends_with(".partial") || name == "forebay-digests.json" || want[&name] == bytes,
                    "{name}"
                );
            }
            if kills >= 50 {
                forebay(&convert(source.path(), out.path(), more)).ok();
                break;
            }
        }
        let found = model_files(out.path());
        assert_eq!(found.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        assert!(found == want, "after {kills} kills");
    }
    println!("{kills} kills in {rounds} conversions of about {once:?}");
}

/// Straight into a container: what converting and then packing make, and what answers as they do.
#[test]
fn a_container_is_what_packing_the_result_would_have_made() {
    let source = checkpoint_in("fp8-e4m3");
    let [between, packed, out] = [(); 3].map(|()| TempDir::new().unwrap());
    forebay(&convert(source.path(), between.path(), &[])).ok();
    forebay(&["pack", arg(between.path()), arg(packed.path()), "--margin", "0"]).ok();
    let asked = ["--container", "forebay", "--json"];
    let plan = forebay(&convert(source.path(), out.path(), &[&asked[..], &["--plan"]].concat())).ok().json();
    let done = forebay(&convert(source.path(), out.path(), &asked)).ok().json();
    assert_eq!((&done["bytes"], &done["census"]["sound"]), (&plan["bytes"], &true.into()), "{done:#}");
    assert_eq!(plan["peak_disk_bytes"], done["bytes"], "the files in between are never there");
    assert!(model_files(out.path()) == model_files(packed.path()));
    assert!(plan["files"].to_string().contains("experts-001.fbw"), "{plan}");
    let again = forebay(&convert(source.path(), out.path(), &asked)).ok().json();
    assert_eq!(again["files_written"], 0);
    forebay(&convert(source.path(), out.path(), &[])).fails(2, &["container", "forebay", "reference"]);
    // Moved, and the record of the conversion with it.
    forebay(&["verify", arg(out.path()), "--hash"]).ok();
    let answer = forebay(&["run", "--model", arg(out.path()), "--max-tokens", "3", "hello"]).ok();
    assert!(!answer.stdout.is_empty());
    let wrong = forebay(&convert(source.path(), out.path(), &["--to", "forebay"]));
    assert!(wrong.code == 2 && wrong.stderr.contains("--container forebay"), "{wrong:#?}");
}

/// A full disk ends it with an error that says what to do, and then it goes on.
#[test]
fn a_full_disk_ends_it_with_a_message_and_it_goes_on() {
    let (source, model) = (checkpoint(), TempDir::new().unwrap());
    forebay(&convert(source.path(), model.path(), &[])).ok();
    let Some(disk) = SmallDisk::new(60_000_000) else { return };
    let commands: [(&str, &Path, &[&str]); 3] = [
        ("convert", source.path(), &[]),
        ("convert", source.path(), &["--container", "forebay"]),
        ("pack", model.path(), &[]),
    ];
    for (number, (verb, from, more)) in commands.into_iter().enumerate() {
        let [whole, out] = ["whole", "out"].map(|name| disk.path().join(format!("{name}{number}")));
        let args = |to| [&[verb, arg(from), to, "--margin", "0"][..], more].concat();
        forebay(&args(arg(&whole))).ok();
        let mut stops = 0;
        for wait in 0..200 {
            let child =
                command(&args(arg(&out))).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
            std::thread::sleep(Duration::from_millis(wait));
            disk.fill();
            let done = Done::of(child.wait_with_output().unwrap());
            disk.empty();
            if done.code == 0 {
                break;
            }
            done.fails(1, &["free"]);
            stops += 1;
        }
        println!("{verb} {more:?}: {stops} full disks");
        forebay(&args(arg(&out))).ok();
        assert!(model_files(&out) == model_files(&whole), "{verb} {more:?}");
        for dir in [whole, out] {
            fs::remove_dir_all(dir).unwrap();
        }
    }
}

/// The most memory a process had, in bytes.
#[cfg(target_os = "linux")]
fn peak(id: u32) -> Option<u64> {
    let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb * 1024)
}

/// A source of which half alone is larger than the bound: nothing is ever read as a whole.
#[cfg(target_os = "linux")]
#[test]
fn memory_stays_below_what_is_announced() {
    let source = checkpoint();
    // A dense layer of 300 MB in a file that is all zeros and takes no disk.
    let path = source.path().join("config.json");
    let mut config: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let (hidden, width) = (config["hidden_size"].as_u64().unwrap(), 200_000u64);
    config["intermediate_size"] = width.into();
    fs::write(&path, config.to_string()).unwrap();
    for entry in fs::read_dir(source.path()).unwrap().map(Result::unwrap) {
        rename_in_header(&entry.path(), "model.layers.0.mlp.", "model.layers.0.was.");
    }
    let mut header = serde_json::Map::new();
    let each = hidden * width * 2;
    for (n, part) in ["gate", "up", "down"].iter().enumerate() {
        let shape = if *part == "down" { [hidden, width] } else { [width, hidden] };
        let offsets = [n as u64 * each, (n as u64 + 1) * each];
        let entry = serde_json::json!({"dtype": "BF16", "shape": shape, "data_offsets": offsets});
        header.insert(format!("model.layers.0.mlp.{part}_proj.weight"), entry);
    }
    let text = serde_json::Value::Object(header).to_string();
    let zeros = source.path().join("zeros.safetensors");
    fs::write(&zeros, [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&zeros).unwrap();
    file.set_len(8 + text.len() as u64 + 3 * each).unwrap();
    for more in [&[][..], &["--container", "forebay"]] {
        let out = TempDir::new().unwrap();
        let args = [&["--threads", "2"], more].concat();
        let plan = forebay(&convert(source.path(), out.path(), &[&args[..], &["--plan", "--json"]].concat()));
        let plan = plan.ok().json();
        let bound = plan["memory_bound_bytes"].as_u64().unwrap();
        assert!(3 * each > 2 * bound, "the source of {} must be far larger than {bound}", 3 * each);
        let mut run =
            command(&convert(source.path(), out.path(), &args)).stdout(Stdio::null()).spawn().unwrap();
        let mut most = 0;
        while run.try_wait().unwrap().is_none() {
            most = most.max(peak(run.id()).unwrap_or(0));
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(run.wait().unwrap().success());
        println!("{most} bytes at most, {bound} announced {more:?}");
        assert!(most > 0 && most <= bound, "{most} bytes, {bound} announced");
        // The disk: what was planned, and files of a few kilobytes.
        let total: u64 =
            fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        let planned = plan["peak_disk_bytes"].as_u64().unwrap();
        assert!(total >= planned && total < planned + 2_000_000, "{total} of {planned}");
    }
}

/// Gives tensors another name of the same length.
fn rename_in_header(path: &Path, from: &str, to: &str) {
    let Ok(mut bytes) = fs::read(path) else { return };
    if path.extension().is_none_or(|end| end != "safetensors") {
        return;
    }
    let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let text = String::from_utf8(bytes[8..8 + header].to_vec()).unwrap().replace(from, to);
    bytes[8..8 + header].copy_from_slice(text.as_bytes());
    fs::write(path, bytes).unwrap();
}

#[test]
fn what_cannot_be_converted_is_refused_before_anything_is_written() {
    let out = TempDir::new().unwrap();
    let new = out.path().join("new");
    let new = arg(&new);
    forebay(&["convert", arg(&demo()), new]).fails(3, &["quantised already", "original"]);
    let empty = TempDir::new().unwrap();
    forebay(&["convert", arg(empty.path()), new]).fails(3, &["config.json"]);
    let source = checkpoint();
    forebay(&["convert", arg(source.path()), new, "--mtp", "int4-row"])
        .fails(2, &["--mtp int4-row", "--skip-mtp"]);
    forebay(&["convert", arg(source.path()), new, "--margin", "100000T"]).fails(1, &["--margin", "free"]);
    forebay(&["convert", arg(source.path()), new, "--check-text", "no such file"])
        .fails(2, &["no such file"]);
    assert!(!out.path().join("new").join("out-00000.safetensors").exists());
    let help = Command::new(env!("CARGO_BIN_EXE_forebay")).args(["convert", "--help"]).output().unwrap();
    let help = String::from_utf8_lossy(&help.stdout).split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(help.contains("20.00 GB"), "{help}");
}

/// Nobody should wonder why nothing happens, least of all before there is anything to convert.
#[test]
fn pauses_while_the_hub_is_asked_are_said() {
    let (source, out) = (checkpoint(), TempDir::new().unwrap());
    let hub = Hub::start(model_files(source.path()), 100_000).unwrap();
    hub.faults(|faults| faults.limited = (1, "2"));
    let args = ["convert", REPO, arg(out.path()), "--plan", "--endpoint", &hub.url];
    let done = Done::of(online(&args).output().expect("the binary starts")).ok();
    assert!(done.stderr.contains("429") && done.stderr.contains("again in 2 s"), "{}", done.stderr);
}

#[test]
fn a_gguf_file_needs_its_tokenizer_and_is_refused_by_name() {
    let (dir, out) = (TempDir::new().unwrap(), TempDir::new().unwrap());
    let mut file = forebay_testkit::gguf::Gguf::default();
    file.text("general.architecture", "llama");
    let path = dir.path().join("model.gguf");
    fs::write(&path, file.bytes()).unwrap();
    forebay(&convert(&path, out.path(), &[])).fails(3, &["model.gguf", "llama", "deepseek2"]);
    fs::write(&path, b"GGML").unwrap();
    forebay(&convert(&path, out.path(), &[])).fails(3, &["model.gguf", "GGUF"]);
    let none = dir.path().join("none.gguf");
    forebay(&convert(&none, out.path(), &[])).fails(3, &["none.gguf", "cannot read"]);
    forebay(&convert(dir.path(), out.path(), &["--tokenizer", arg(dir.path())]))
        .fails(2, &["--tokenizer", "GGUF"]);
}
