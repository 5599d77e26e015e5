//! `forebay get`, with the hub on this machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use forebay_testkit::hub::{COMMIT, Hub, REPO};
use tempfile::TempDir;

use crate::support::{Done, arg, demo, forebay, online};

fn getting(args: &[&str]) -> Command {
    online(&[&["get"], args].concat())
}

fn get(args: &[&str]) -> Done {
    Done::of(getting(args).output().expect("the binary starts"))
}

/// Bytes that differ everywhere, in several files.
fn files() -> BTreeMap<String, Vec<u8>> {
    let noise = |seed: u64, len: usize| -> Vec<u8> {
        let mut state = seed;
        (0..len)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            })
            .collect()
    };
    BTreeMap::from([
        ("a/notes.md".to_owned(), noise(1, 20_000)),
        ("w-00001.safetensors".to_owned(), noise(2, 5_000_001)),
        ("w-00002.safetensors".to_owned(), noise(3, 3_000_000)),
    ])
}

fn total() -> u64 {
    files().values().map(|bytes| bytes.len() as u64).sum()
}

#[track_caller]
fn assert_complete(dir: &Path) {
    for (name, bytes) in files() {
        assert!(fs::read(dir.join(&name)).unwrap() == bytes, "{name}");
    }
}

#[cfg(unix)]
#[test]
fn a_model_goes_into_the_cache_and_runs_from_there() {
    let names = ["config.json", "generation_config.json", "tokenizer.json", "model.safetensors"];
    let bytes = |name: &str| (name.to_owned(), fs::read(demo().join(name)).unwrap());
    let hub = Hub::start(names.map(bytes), 1_000_000).unwrap();
    let home = TempDir::new().unwrap();
    let run = |more: &[&str]| {
        let mut command = getting(&[&[REPO, "--margin", "0"], more].concat());
        Done::of(command.env("HF_ENDPOINT", &hub.url).env("HF_HOME", home.path()).output().unwrap())
    };
    let plan = run(&["--dry-run", "--json"]).ok().json();
    assert_eq!(fs::read_dir(home.path()).unwrap().count(), 0, "a dry run writes nothing");
    // Headers alone: less than a tenth of the model has been fetched.
    assert!(hub.served() < plan["bytes"].as_u64().unwrap() / 5, "{} of {plan:#}", hub.served());
    let done = run(&[]).ok();
    let path = done.stdout.trim_end();
    assert!(path.ends_with(&format!("models--test--model/snapshots/{COMMIT}")), "{path}");
    assert!(done.stderr.contains("verified") && done.stderr.contains("memory"), "{}", done.stderr);
    // The plan made before the download is that of the model.
    let found = forebay(&["inspect", "--json", path]).ok().json();
    for name in ["minimum", "everything"] {
        assert_eq!(plan["memory"][name], found["plan"][name], "{name}");
    }
    forebay(&["score", "--model", path, "--json", "Water runs down to the turbine."]).ok();
    let again = run(&["--json"]).ok().json();
    assert_eq!(again["bytes_missing"], 0);
    assert_eq!((&again["bytes_fetched"], &again["files_kept"]), (&0.into(), &4.into()));
    // Every byte is checked against what the hub promised, and one that changes is named.
    let verified = forebay(&["verify", path, "--hash", "--json"]).ok().json();
    let hashed = (&verified["hash"]["origins"][0], &verified["hash"]["files"]);
    assert_eq!(hashed, (&"hub".into(), &4.into()), "{verified:#}");
    assert_eq!(
        (&verified["hash"]["bytes"], &verified["hash"]["files_without_digest"]),
        (&plan["bytes"], &0.into())
    );
    for name in ["model.safetensors", "tokenizer.json"] {
        let blob = fs::canonicalize(Path::new(path).join(name)).unwrap();
        let mut bytes = fs::read(&blob).unwrap();
        let last = bytes.len() - 1;
        for flip in [true, false] {
            bytes[last] ^= 1;
            fs::write(&blob, &bytes).unwrap();
            let done = forebay(&["verify", path, "--hash", "--json"]);
            let found = (done.code, done.json()["problems"][0]["name"].as_str().map(str::to_owned));
            assert_eq!(found, if flip { (3, Some(name.to_owned())) } else { (0, None) }, "{done:#?}");
        }
        // Damage that no time tells of: `verify` says what to delete, and then `get` brings it again.
        let written = fs::metadata(&blob).unwrap().modified().unwrap();
        bytes[last] ^= 1;
        fs::write(&blob, &bytes).unwrap();
        fs::File::options().write(true).open(&blob).unwrap().set_modified(written).unwrap();
        let done = forebay(&["verify", path, "--hash"]);
        let advice = format!("delete {} and get it again", blob.display());
        assert!(done.code == 3 && done.stdout.contains(&advice), "{done:#?}");
        fs::remove_file(&blob).unwrap();
        assert_eq!(run(&["--json"]).ok().json()["bytes_fetched"], bytes.len());
        forebay(&["verify", path, "--hash"]).ok();
    }
}

#[test]
fn killed_fifty_times_it_ends_with_the_right_bytes_and_fetches_few_twice() {
    let (hub, mut dir) = (Hub::start(files(), 100_000).unwrap(), TempDir::new().unwrap());
    let slow = |rate| hub.faults(|faults| faults.rate = rate);
    let start = |dir: &Path| -> Child {
        let args = [REPO, "--to", arg(dir), "--endpoint", &hub.url, "--margin", "0"];
        getting(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("the binary starts")
    };
    let (mut kills, mut rounds, mut random) = (0, 1, 7u64);
    while kills < 50 {
        slow(Some(1_500_000));
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // At any moment: before the first byte of this run, or after some.
        let kill_at = hub.served() + (random >> 33) % 500_000;
        let mut child = start(dir.path());
        std::thread::sleep(Duration::from_millis((random >> 33) % 20));
        let ended = loop {
            match child.try_wait().unwrap() {
                None if hub.served() < kill_at => std::thread::sleep(Duration::from_millis(1)),
                ended => break ended,
            }
        };
        match ended {
            Some(status) => {
                assert!(status.success());
                assert_complete(dir.path());
                (dir, rounds) = (TempDir::new().unwrap(), rounds + 1);
            }
            None => {
                child.kill().unwrap();
                child.wait().unwrap();
                kills += 1;
            }
        }
    }
    slow(None);
    let before = hub.served();
    assert!(start(dir.path()).wait().unwrap().success());
    assert_complete(dir.path());
    let (last, all) = (hub.served() - before, hub.served());
    println!("{kills} kills, {rounds} rounds of {} bytes: {all} served, {last} in the last run", total());
    // No run fetched more than a sixteenth of the model before it was killed; without what they kept the last one would
    // have had to fetch everything.
    assert!(rounds > 1 || last < total() * 3 / 4, "{last} of {}", total());
    for entry in fs::read_dir(dir.path()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        assert!(!name.contains(".forebay."), "{name}");
    }
}

#[cfg(unix)]
#[test]
fn ctrl_c_stops_it_soon_and_the_next_run_goes_on() {
    let (hub, dir) = (Hub::start(files(), 100_000).unwrap(), TempDir::new().unwrap());
    hub.faults(|faults| faults.rate = Some(2_000_000));
    let args = [REPO, "--to", arg(dir.path()), "--endpoint", &hub.url, "--margin", "0"];
    let child = getting(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    while hub.served() < 2_000_000 {
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let done = Done::of(child.wait_with_output().unwrap());
    assert_eq!((done.code, done.stdout.as_str()), (130, ""), "{done:#?}");
    assert!(done.stderr.contains("the same command goes on"), "{done:#?}");
    hub.faults(|faults| faults.rate = None);
    let before = hub.served();
    let done = get(&args).ok();
    assert_eq!(done.stdout.trim_end(), arg(dir.path()));
    assert_complete(dir.path());
    let rest = hub.served() - before;
    assert!(rest + 1_000_000 < total(), "{rest} of {}", total());
}

#[test]
fn what_goes_wrong_is_said_in_one_line() {
    let (hub, dir) = (Hub::start(files(), 100_000).unwrap(), TempDir::new().unwrap());
    let to = dir.path().join("new");
    let run = |repo: &str, more: &[&str]| {
        get(&[&[repo, "--to", arg(&to), "--endpoint", &hub.url, "--margin", "0"], more].concat())
    };
    run("no repo", &[]).fails(2, &["OWNER/NAME"]);
    run("other/model", &[]).fails(1, &["other/model", "HF_TOKEN"]);
    run(&format!("{REPO}@v9"), &[]).fails(2, &["v9", "branch"]);
    run(REPO, &["--include", "*.gguf"]).fails(2, &["*.gguf"]);
    run(REPO, &["--ca", "/no/such.pem"]).fails(2, &["/no/such.pem", "PEM"]);
    let endpoint = ["--to", arg(&to), "--endpoint", "ftp://x"];
    get(&[&[REPO], &endpoint[..]].concat()).fails(2, &["ftp://x", "https://HOST"]);
    if cfg!(unix) {
        let args = [REPO, "--to", arg(&to), "--endpoint", &hub.url, "--margin", "900000T"];
        get(&args).fails(1, &["free", "--margin"]);
    }
    assert!(!to.exists());
    hub.faults(|faults| faults.flip = Some((usize::MAX, "w-00001.safetensors".to_owned(), 4_000_000)));
    run(REPO, &[]).fails(1, &["w-00001.safetensors", "damaged", "sha256"]);
    assert!(!to.join("w-00001.safetensors").exists());
    hub.faults(|faults| faults.flip = None);
    hub.faults(|faults| faults.token = Some("hf_right".to_owned()));
    run(REPO, &[]).fails(1, &["gated", "accept", "HF_TOKEN"]);
    let with = |name: &str, value: &str| {
        let args = [REPO, "--to", arg(&to), "--endpoint", &hub.url, "--margin", "0"];
        Done::of(getting(&args).env(name, value).output().unwrap())
    };
    with("HF_TOKEN", "hf_wrong").fails(1, &["no access"]);
    fs::write(dir.path().join("token"), "hf_right\n").unwrap();
    with("HF_TOKEN_PATH", arg(&dir.path().join("token"))).ok();
    assert_complete(&to);
}

#[test]
fn the_proxy_of_the_environment_is_asked_for_hosts_that_are_not_excepted() {
    let proxy = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("127.0.0.1:{}", proxy.local_addr().unwrap().port());
    let asked = std::thread::spawn(move || {
        let (mut stream, _) = proxy.accept().unwrap();
        let mut line = String::new();
        BufReader::new(&stream).read_line(&mut line).unwrap();
        stream.write_all(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n").unwrap();
        line
    });
    let dir = TempDir::new().unwrap();
    let run = |endpoint: &str| {
        let args = [REPO, "--to", arg(dir.path()), "--endpoint", endpoint, "--margin", "0"];
        let mut command = getting(&args);
        command.env("HTTPS_PROXY", &address).env("HTTP_PROXY", &address).env("NO_PROXY", "127.0.0.1");
        Done::of(command.output().unwrap())
    };
    run("https://hub.invalid").fails(1, &["hub.invalid"]);
    assert!(asked.join().unwrap().starts_with("CONNECT hub.invalid:443 "));
    let hub = Hub::start(files(), 100_000).unwrap();
    run(&hub.url).ok();
    assert_complete(dir.path());
}
