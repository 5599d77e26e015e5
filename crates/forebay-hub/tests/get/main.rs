//! Fetching models from a hub that misbehaves in every way.

mod folders;
mod tls;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay_core::CancelToken;
use forebay_hub::get::{Event, GetError, Got, Hub, HubConfig, Record, Request, Retry, Target, Token, Watch};
use forebay_hub::known::{Known, Origin};
use forebay_hub::verify::census;
use forebay_hub::verify::hash::{compare, hash_all};
use forebay_testkit::hub::{self, COMMIT, Hub as Server, REPO};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

/// Bytes that differ everywhere.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    (0..len).map(|_| next()).collect()
}

fn files() -> BTreeMap<String, Vec<u8>> {
    let file = |name: &str, bytes: Vec<u8>| (name.to_owned(), bytes);
    BTreeMap::from([
        file("config.json", b"{\"model\": true}\n".to_vec()),
        file("empty.txt", Vec::new()),
        file("sub/notes.md", noise(1, 5000)),
        file("model-00001.safetensors", noise(2, 5_000_003)),
        file("model-00002.safetensors", noise(3, 2_500_000)),
    ])
}

fn server() -> Server {
    Server::start(files(), 100_000).unwrap()
}

fn config(server: &Server) -> HubConfig {
    let milliseconds = Duration::from_millis;
    HubConfig {
        endpoint: server.url.clone(),
        connections: 4,
        stall: milliseconds(400),
        retry: Retry { first: milliseconds(5), longest: milliseconds(20), ..Retry::default() },
        ..HubConfig::default()
    }
}

fn request(target: Target) -> Request {
    Request { repo: REPO.parse().unwrap(), revision: "main".to_owned(), include: vec![], target, margin: 0 }
}

fn get(server: &Server, dir: &Path) -> Result<(Got, Vec<Event>), GetError> {
    get_with(&config(server), &request(Target::Folder(dir.to_owned())))
}

fn get_with(config: &HubConfig, request: &Request) -> Result<(Got, Vec<Event>), GetError> {
    let events = Mutex::new(Vec::new());
    let seen = |event| events.lock().unwrap().push(event);
    let cancel = CancelToken::new();
    let watch = Watch { cancel: &cancel, seen: &seen };
    let got = Hub::new(config)?.prepare(request, &watch)?.run(&watch)?;
    Ok((got, events.into_inner().unwrap()))
}

#[track_caller]
fn assert_complete(dir: &Path) {
    for (name, bytes) in files() {
        assert!(fs::read(dir.join(&name)).unwrap() == bytes, "{name}");
    }
}

/// Every file below a folder, our own apart.
fn names(dir: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => all.extend(names(&entry.path()).into_iter().map(|below| format!("{name}/{below}"))),
            false => all.push(name),
        }
    }
    all.retain(|name| !name.starts_with(".forebay/"));
    all.sort();
    all
}

fn restarts(events: &[Event]) -> usize {
    events.iter().filter(|event| matches!(event, Event::Restarted { .. })).count()
}

/// What `verify --hash` does: every file is hashed and right, one apart, which is named.
#[track_caller]
fn verifies_but_for(dir: &Path, damaged: Option<&str>) {
    let known = Known::of_folder(dir).unwrap();
    assert_eq!(known.origins.iter().collect::<Vec<_>>(), [&Origin::Hub]);
    let state = TempDir::new().unwrap();
    let (state, cancel) = (state.path().join("s.json"), CancelToken::new());
    let found = hash_all(dir, Some(&known.digests), &state, 2, &cancel, &mut |_, _| {}).unwrap();
    assert_eq!(found.0.keys().collect::<Vec<_>>(), files().keys().collect::<Vec<_>>());
    let before = census(dir).problems.len();
    let mut report = census(dir);
    compare(&known.digests, &found, &mut report);
    let named: Vec<&str> = report.problems[before..].iter().map(|problem| &*problem.name).collect();
    assert_eq!(named, damaged.into_iter().collect::<Vec<_>>());
}

#[test]
fn a_model_arrives_whole_and_is_recorded() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let (got, events) = get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
    let total: usize = files().values().map(Vec::len).sum();
    assert_eq!((got.arrived, got.kept, got.folder.as_path()), (total as u64, 0, dir.path()));
    assert_eq!(names(dir.path()), files().into_keys().collect::<Vec<_>>());
    let last = events.iter().rev().find(|event| matches!(event, Event::Progress { .. }));
    let all = total as u64;
    assert_eq!(last, Some(&Event::Progress { done: all, total: all, arrived: all }));
    let record = Record::of_folder(dir.path()).unwrap().unwrap();
    assert_eq!(
        (record.repo.as_str(), record.commit.as_str(), record.revision.as_str()),
        (REPO, COMMIT, "main")
    );
    for (name, known) in &record.files {
        let (bytes, known) = (&files()[name], &known.proof);
        let expected = if bytes.len() >= 100_000 { hub::sha256(bytes) } else { hub::git_blob(bytes) };
        assert_eq!((known.size, known.digest.hex()), (bytes.len() as u64, expected.as_str()));
    }
    assert_eq!(record.files.len(), files().len());
    verifies_but_for(dir.path(), None);
    for name in files().into_keys().filter(|name| name != "empty.txt") {
        let path = dir.path().join(&name);
        let mut bytes = fs::read(&path).unwrap();
        let middle = bytes.len() / 2;
        for flip in [true, false] {
            bytes[middle] ^= 1;
            fs::write(&path, &bytes).unwrap();
            verifies_but_for(dir.path(), flip.then_some(&name));
        }
    }
    // Several ranges of one file, and every file by its commit.
    let seen = server.seen();
    let ranges = seen.iter().filter(|seen| seen.storage && seen.range.is_some()).count();
    assert!(ranges >= 6, "{ranges}");
    // Four at a time to each of the two hosts, used again and again.
    assert!(server.connections() <= 8, "{} for {} requests", server.connections(), seen.len());
    assert!(seen.iter().filter(|seen| !seen.storage).skip(1).all(|seen| seen.path.contains(COMMIT)));
    // Again: nothing is fetched. What was written since is hashed once, and known from then on.
    let served = server.served();
    for kept in [1, files().len()] {
        let (again, _) = get(&server, dir.path()).unwrap();
        assert_eq!((again.arrived, again.kept, server.served()), (0, kept, served));
    }
}

#[cfg(unix)]
#[test]
fn the_cache_is_that_of_other_tools() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let request = request(Target::Cache(dir.path().to_owned()));
    let (got, _) = get_with(&config(&server), &request).unwrap();
    let repo = dir.path().join("models--test--model");
    assert_eq!(got.folder, repo.join("snapshots").join(COMMIT));
    assert_complete(&got.folder);
    assert_eq!(fs::read_to_string(repo.join("refs/main")).unwrap(), COMMIT);
    let small = hub::git_blob(&files()["sub/notes.md"]);
    let link = fs::read_link(got.folder.join("sub/notes.md")).unwrap();
    assert_eq!(link, Path::new(&format!("../../../blobs/{small}")));
    let large = hub::sha256(&files()["model-00001.safetensors"]);
    let blob = repo.join("blobs").join(large);
    assert!(fs::read(&blob).unwrap() == files()["model-00001.safetensors"]);
    assert_eq!(Record::of_folder(&got.folder).unwrap().unwrap().files.len(), files().len());

    // A file that another tool has put there damaged is noticed and fetched again.
    fs::remove_file(repo.join("forebay").join(format!("{COMMIT}.json"))).unwrap();
    let mut bytes = fs::read(&blob).unwrap();
    bytes[77] ^= 1;
    fs::write(&blob, &bytes).unwrap();
    let (again, events) = get_with(&config(&server), &request).unwrap();
    assert_complete(&again.folder);
    assert_eq!((again.arrived, restarts(&events)), (bytes.len() as u64, 1));
    // As is one that was cut.
    fs::write(&blob, &bytes[..1000]).unwrap();
    assert_eq!(get_with(&config(&server), &request).unwrap().0.arrived, bytes.len() as u64);
    assert_complete(&again.folder);
}

#[test]
fn the_token_goes_to_the_hub_and_to_nobody_else() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.token = Some("hf_secret".to_owned()));
    let error = get(&server, dir.path()).unwrap_err();
    assert!(matches!(error, GetError::Gated { status: 401, token: false, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("accept its terms") && text.contains("HF_TOKEN"), "{text}");
    let with_token = HubConfig { token: Some(Token::new("hf_secret").unwrap()), ..config(&server) };
    get_with(&with_token, &request(Target::Folder(dir.path().to_owned()))).unwrap();
    assert_complete(dir.path());
    let seen = server.seen();
    assert!(seen.iter().any(|seen| seen.authorization.as_deref() == Some("Bearer hf_secret")));
    assert!(seen.iter().filter(|seen| seen.storage).all(|seen| seen.authorization.is_none()));
    assert!(seen.iter().any(|seen| seen.storage));
}

#[test]
fn cut_connections_are_continued_where_they_broke() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.cut = 30);
    let (got, events) = get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
    let total: usize = files().values().map(Vec::len).sum();
    // Not a byte twice, apart from those that were on the way when a connection broke.
    assert_eq!((got.arrived, restarts(&events)), (total as u64, 0));
    assert!(events.iter().any(|event| matches!(event, Event::Waiting { .. })));
}

#[test]
fn busy_broken_and_silent_servers_are_tried_again() {
    for set in [
        (|faults| faults.limited = (5, "0")) as fn(&mut hub::Faults),
        |faults| faults.status = (5, 503),
        |faults| faults.status = (3, 500),
        |faults| faults.stall = 2,
    ] {
        let (server, dir) = (server(), TempDir::new().unwrap());
        server.faults(set);
        // The question for the files has fewer attempts.
        server.faults(|faults| {
            faults.limited.0 = faults.limited.0.min(3);
            faults.status.0 = faults.status.0.min(3);
        });
        let (_, events) = get(&server, dir.path()).unwrap();
        assert_complete(dir.path());
        assert!(events.iter().any(|event| matches!(event, Event::Waiting { .. })));
    }
}

#[test]
fn retry_after_is_obeyed_and_too_long_a_wait_is_said() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.limited = (1, "1"));
    let started = Instant::now();
    get(&server, dir.path()).unwrap();
    assert!(started.elapsed() >= Duration::from_secs(1));
    server.faults(|faults| faults.limited = (1, "86400"));
    let error = get(&server, dir.path()).unwrap_err();
    assert!(
        matches!(error, GetError::Limited { wait, status: 429, .. } if wait.as_secs() == 86_400),
        "{error}"
    );
    // A busy server may ask for it too, and is not said to have answered something else.
    server.faults(|faults| (faults.status, faults.retry_after) = ((1, 503), Some("7200")));
    let text = get(&server, dir.path()).unwrap_err().to_string();
    assert!(text.contains("7200 s") && text.contains("503"), "{text}");
    // Nonsense is no time.
    for nonsense in ["-5", "soon", "99999999999999999999999"] {
        server.faults(|faults| (faults.status, faults.retry_after) = ((1, 429), Some(nonsense)));
        get(&server, dir.path()).unwrap();
    }
}

#[test]
fn answers_that_trickle_are_given_up_like_silent_ones() {
    let server = server();
    let quick = HubConfig { retry: Retry { tries: 2, ..config(&server).retry }, ..config(&server) };
    // The headers of the listing, the listing, the headers of a file, a file.
    for (at_once, include) in [(0, "*"), (120, "*"), (0, "model-00002*"), (200, "model-00002*")] {
        let (dir, cancel) = (TempDir::new().unwrap(), CancelToken::new());
        let watch = Watch { cancel: &cancel, seen: &|_| {} };
        let hub = Hub::new(&quick).unwrap();
        let request =
            Request { include: vec![include.to_owned()], ..request(Target::Folder(dir.path().to_owned())) };
        let trickle = |on: bool| {
            server.faults(|faults| faults.trickle = on.then_some((at_once, Duration::from_millis(60))))
        };
        trickle(include == "*");
        let prepared = hub.prepare(&request, &watch);
        trickle(true);
        let error = match prepared {
            Err(error) => error,
            Ok(prepared) => prepared.run(&watch).unwrap_err(),
        };
        trickle(false);
        assert!(matches!(error, GetError::Unreachable { tries: 2, .. }), "{at_once} {include}: {error}");
    }
}

#[test]
fn a_server_that_only_fails_is_given_up_and_what_arrived_is_kept() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.status = (1000, 502));
    let error = get(&server, dir.path()).unwrap_err();
    assert!(matches!(error, GetError::Unreachable { .. }) && error.to_string().contains("502"), "{error}");
    server.faults(|faults| faults.status.0 = 0);
    drop(server);
    let gone = HubConfig { endpoint: "http://127.0.0.1:9".to_owned(), ..config(&self::server()) };
    let error = get_with(&gone, &request(Target::Folder(dir.path().to_owned()))).unwrap_err();
    assert!(matches!(error, GetError::Unreachable { .. }), "{error}");
}

#[test]
fn a_wrong_byte_is_fetched_again_and_then_named() {
    for (name, at) in
        [("model-00001.safetensors", 4_999_999), ("model-00002.safetensors", 0), ("config.json", 3)]
    {
        let (server, dir) = (server(), TempDir::new().unwrap());
        server.faults(|faults| faults.flip = Some((1, name.to_owned(), at)));
        let (_, events) = get(&server, dir.path()).unwrap();
        assert_complete(dir.path());
        assert_eq!(restarts(&events), 1);

        let dir = TempDir::new().unwrap();
        server.faults(|faults| faults.flip = Some((usize::MAX, name.to_owned(), at)));
        let error = get(&server, dir.path()).unwrap_err();
        let bytes = &files()[name];
        let mut wrong = bytes.clone();
        wrong[at] ^= 1;
        let digest =
            |bytes: &[u8]| if bytes.len() >= 100_000 { hub::sha256(bytes) } else { hub::git_blob(bytes) };
        let text = error.to_string();
        for word in [name, &digest(bytes), &digest(&wrong)] {
            assert!(text.contains(word), "{word}: {text}");
        }
        assert!(!dir.path().join(name).exists());
        assert!(
            !names(dir.path()).iter().any(|found| found.starts_with(&format!("{name}."))),
            "{:?}",
            names(dir.path())
        );
    }
}

#[test]
fn a_wrong_missing_or_malformed_digest_is_an_error() {
    let server = server();
    let with = |change: &dyn Fn(&mut Value)| {
        let dir = TempDir::new().unwrap();
        let mut listing = server.listing();
        let entry = listing["siblings"].as_array_mut().unwrap();
        change(entry.iter_mut().find(|entry| entry["rfilename"] == "model-00002.safetensors").unwrap());
        server.faults(|faults| faults.listing = Some(listing.to_string()));
        let error = get(&server, dir.path()).unwrap_err();
        assert!(error.to_string().contains("model-00002.safetensors"), "{error}");
        assert!(!dir.path().join("model-00002.safetensors").exists());
        error
    };
    let other = "0".repeat(64);
    let error = with(&|entry| entry["lfs"]["sha256"] = json!(other));
    assert!(matches!(&error, GetError::Mismatch { expected, .. } if *expected == other), "{error}");
    for lfs in [json!({"size": 2_500_000}), json!({"sha256": "sha256:xyz"}), json!({"oid": "abc"})] {
        let error = with(&|entry| entry["lfs"] = lfs.clone());
        assert!(matches!(error, GetError::Digest { .. }), "{error}");
    }
    // The older spelling.
    let (dir, mut listing) = (TempDir::new().unwrap(), server.listing());
    for entry in listing["siblings"].as_array_mut().unwrap() {
        if let Some(lfs) = entry.get_mut("lfs").and_then(Value::as_object_mut) {
            let digest = lfs.remove("sha256").unwrap();
            lfs.insert("oid".to_owned(), digest);
        }
    }
    server.faults(|faults| faults.listing = Some(listing.to_string()));
    get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
}

#[test]
fn an_answer_that_would_fill_the_memory_is_refused() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let text = server.listing().to_string() + &" ".repeat(9 << 20);
    server.faults(|faults| faults.listing = Some(text));
    let error = get(&server, dir.path()).unwrap_err();
    assert!(matches!(error, GetError::Answer { .. }) && error.to_string().contains("8 MiB"), "{error}");
}

/// Bytes that were packed for the way are not those of the file: nobody asked for them.
#[test]
fn bodies_in_another_encoding_are_refused_and_named() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    for encoding in ["gzip", "identity, br", "\u{e9}"] {
        server.faults(|faults| faults.encoding = Some(encoding));
        let error = get(&server, dir.path()).unwrap_err();
        assert!(matches!(error, GetError::Status { .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("encoding") && text.contains("as they are") && text.is_ascii(), "{text}");
        assert!(names(dir.path()).is_empty());
    }
    // The listing was in order, a file is not.
    server.faults(|faults| faults.encoding = None);
    let hub = Hub::new(&config(&server)).unwrap();
    let cancel = CancelToken::new();
    let watch = Watch { cancel: &cancel, seen: &|_| {} };
    let prepared = hub.prepare(&request(Target::Folder(dir.path().to_owned())), &watch).unwrap();
    server.faults(|faults| faults.encoding = Some("deflate"));
    let error = prepared.run(&watch).unwrap_err();
    assert!(error.to_string().contains("\"deflate\""), "{error}");
    for plain in ["identity", "Identity", ""] {
        server.faults(|faults| faults.encoding = Some(plain));
        get(&server, dir.path()).unwrap();
    }
    assert_complete(dir.path());
}

#[test]
fn servers_without_ranges_give_whole_files() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.no_ranges = true);
    let (_, events) = get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
    assert_eq!(restarts(&events), 2);
    let dir = TempDir::new().unwrap();
    server.faults(|faults| faults.cut = 6);
    get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
}

#[test]
fn ranges_and_sizes_that_the_server_does_not_have_are_said() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    server.faults(|faults| faults.refuse_ranges = true);
    let error = get(&server, dir.path()).unwrap_err();
    assert!(matches!(error, GetError::Range { .. }) && error.to_string().contains("416"), "{error}");
    server.faults(|faults| faults.refuse_ranges = false);
    let mut listing = server.listing();
    for entry in listing["siblings"].as_array_mut().unwrap() {
        if entry["rfilename"] == "model-00001.safetensors" {
            (entry["size"], entry["lfs"]["size"]) = (json!(5_000_002), json!(5_000_002));
        }
    }
    server.faults(|faults| faults.listing = Some(listing.to_string()));
    let error = get(&server, TempDir::new().unwrap().path()).unwrap_err();
    assert!(matches!(error, GetError::Size { expected: 5_000_002, found: 5_000_003, .. }), "{error}");
}

#[test]
fn every_refusal_has_its_own_error() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let ask = |repo: &str, revision: &str, include: &[&str]| {
        let include = include.iter().map(|text| (*text).to_owned()).collect();
        let (repo, revision) = (repo.parse().unwrap(), revision.to_owned());
        let target = Target::Folder(dir.path().to_owned());
        get_with(&config(&server), &Request { repo, revision, include, target, margin: 0 }).unwrap_err()
    };
    assert!(matches!(ask("other/model", "main", &[]), GetError::Refused { status: 401, token: false, .. }));
    assert!(matches!(ask(REPO, "v9", &[]), GetError::NoRevision { .. }));
    assert!(matches!(ask(REPO, "main", &["*.gguf"]), GetError::NoMatch { .. }));
    let mut listing = server.listing();
    listing["siblings"].as_array_mut().unwrap()[0]["rfilename"] = json!("gone.json");
    server.faults(|faults| faults.listing = Some(listing.to_string()));
    assert!(
        matches!(ask(REPO, "main", &["gone.json"]), GetError::NoFile { file, .. } if file == "gone.json")
    );
    let large = |to: String| {
        server.faults(|faults| (faults.listing, faults.redirect) = (None, Some(to)));
        ask(REPO, "main", &["model-00002.safetensors"])
    };
    assert!(matches!(large("file:///etc/passwd".to_owned()), GetError::Redirect { .. }));
    let round = format!("{}/{REPO}/resolve/{COMMIT}/model-00002.safetensors", server.url);
    assert!(matches!(large(round), GetError::Redirect { .. }));
    // A signature that is not valid any more is asked for again, for a while.
    assert!(matches!(large(format!("{}/blob/x", server.storage())), GetError::Unreachable { .. }));
    // Not TLS at all.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("https://{}", listener.local_addr().unwrap());
    let plain = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"HTTP/1.1 400 This is not TLS\r\n\r\n").unwrap();
        stream
    });
    let config = HubConfig { endpoint, ..config(&server) };
    let error = get_with(&config, &request(Target::Folder(dir.path().to_owned()))).unwrap_err();
    drop(plain.join().unwrap());
    assert!(matches!(error, GetError::Tls { .. }), "{error}");
}

#[test]
fn a_stopped_fetch_ends_soon_and_goes_on_later() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    // Everything hangs half way, and nobody waits for it.
    let patient = HubConfig { stall: Duration::from_secs(600), ..config(&server) };
    server.faults(|faults| faults.stall = 100);
    let cancel = CancelToken::new();
    let seen = |event| {
        if matches!(event, Event::Progress { arrived, .. } if arrived > 1_000_000) {
            cancel.cancel();
        }
    };
    let watch = Watch { cancel: &cancel, seen: &seen };
    let client = Hub::new(&patient).unwrap();
    let request = request(Target::Folder(dir.path().to_owned()));
    let started = Instant::now();
    let error = client.prepare(&request, &watch).unwrap().run(&watch).unwrap_err();
    assert!(matches!(error, GetError::Cancelled), "{error}");
    // Nobody has waited for the server.
    assert!(started.elapsed() < hub::STALL / 4);
    server.faults(|faults| faults.stall = 0);
    let before = server.served();
    // The same hub can be used again.
    cancel.reset();
    let watch = Watch { cancel: &CancelToken::new(), seen: &|_| {} };
    client.prepare(&request, &watch).unwrap().run(&watch).unwrap();
    assert_complete(dir.path());
    let total: u64 = files().values().map(|bytes| bytes.len() as u64).sum();
    let rest = server.served() - before;
    assert!(rest + 1_000_000 <= total, "{rest} of {total}");
}

#[test]
fn journals_that_lie_cost_a_download_and_never_give_a_wrong_file() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let name = "model-00002.safetensors";
    let size = files()[name].len();
    let part = dir.path().join(format!("{name}.forebay.incomplete"));
    fs::write(&part, vec![0; size]).unwrap();
    let digest = format!("sha256:{}", hub::sha256(&files()[name]));
    let journal = json!({"version": 1, "digest": digest, "size": size, "ranges": [[0, size - 10]]});
    fs::write(dir.path().join(format!("{name}.forebay.ranges")), journal.to_string()).unwrap();
    let (_, events) = get(&server, dir.path()).unwrap();
    assert_complete(dir.path());
    assert_eq!(restarts(&events), 1);
    assert_eq!(names(dir.path()).len(), files().len());
}

#[test]
fn one_file_and_parts_of_it_can_be_had_alone() {
    let (server, dir) = (server(), TempDir::new().unwrap());
    let cancel = CancelToken::new();
    let watch = Watch { cancel: &cancel, seen: &|_| {} };
    let client = Hub::new(&config(&server)).unwrap();
    let listing = client.list(&REPO.parse().unwrap(), "v1", &watch).unwrap();
    assert_eq!((listing.commit.as_str(), listing.files.len()), (COMMIT, files().len()));
    let name = "model-00001.safetensors";
    let file = listing.file(name).unwrap();
    let bytes = client.read_range(&listing, file, 1000..2_000_000, &watch).unwrap();
    assert!(bytes == files()[name][1000..2_000_000]);
    assert!(client.read_range(&listing, file, 5..5, &watch).unwrap().is_empty());
    assert!(matches!(
        client.read_range(&listing, file, 0..file.size + 1, &watch),
        Err(GetError::Range { .. })
    ));
    let to = dir.path().join("a/b.safetensors");
    client.fetch(&listing, file, &to, &watch).unwrap();
    assert!(fs::read(&to).unwrap() == files()[name]);
    assert_eq!(names(dir.path()), ["a/b.safetensors"]);
    server.faults(|faults| faults.no_ranges = true);
    assert!(matches!(client.read_range(&listing, file, 0..8, &watch), Err(GetError::Status { .. })));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_answer_of_a_hub_is_a_panic(text in prop_oneof![".{0,200}", r#"\{("sha"|"siblings"):.{0,80}\}"#]) {
        let (server, dir) = (Server::start([], 1).unwrap(), TempDir::new().unwrap());
        server.faults(|faults| faults.listing = Some(text));
        let _ = get(&server, dir.path());
        prop_assert!(names(dir.path()).is_empty());
    }
}
