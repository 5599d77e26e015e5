//! A hub on this machine: the API of a model hub, a storage host on a second port, and everything that can go wrong
//! with them.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The repository that the hub has.
pub const REPO: &str = "test/model";
/// The commit that `main` and `v1` stand for.
pub const COMMIT: &str = "3cc8db99b1b13fc79325d987ba3c1c430766b3b8";
/// How long a server is silent that stalls.
pub const STALL: Duration = Duration::from_secs(120);
/// Bytes sent at once.
const PIECE: usize = 16 << 10;

/// What goes wrong, and how. Counters go down with every use.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The answer to the question for the files, instead of the true one.
    pub listing: Option<String>,
    /// Only requests with this token get files.
    pub token: Option<String>,
    /// So many requests get HTTP 429 with this `Retry-After`.
    pub limited: (usize, &'static str),
    /// So many requests get this status.
    pub status: (usize, u16),
    /// What comes with that status as `Retry-After`.
    pub retry_after: Option<&'static str>,
    /// Of every answer so many bytes come at once, and the others one by one with a pause before each.
    pub trickle: Option<(usize, Duration)>,
    /// So many bodies end after a random number of bytes.
    pub cut: usize,
    /// So many bodies become silent half way.
    pub stall: usize,
    /// So many times this byte of this file is another.
    pub flip: Option<(usize, String, usize)>,
    /// What answers about files, and files, say that their bytes are encoded as.
    pub encoding: Option<&'static str>,
    /// `Range` is not looked at.
    pub no_ranges: bool,
    /// Questions for ranges get HTTP 416.
    pub refuse_ranges: bool,
    /// Large files are redirected here.
    pub redirect: Option<String>,
    /// Bytes per second, over all connections.
    pub rate: Option<u64>,
}

impl Faults {
    fn encoding(&self) -> String {
        self.encoding.map_or(String::new(), |encoding| format!("Content-Encoding: {encoding}\r\n"))
    }
}

/// One request as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Whether it came to the storage host.
    pub storage: bool,
    /// The path with its query.
    pub path: String,
    /// Header `Range`.
    pub range: Option<String>,
    /// Header `Authorization`.
    pub authorization: Option<String>,
}

/// A hub with one repository. It ends when it is dropped.
pub struct Hub {
    /// Its address.
    pub url: String,
    world: Arc<World>,
}

struct World {
    hub: u16,
    storage: u16,
    files: BTreeMap<String, File>,
    ended: AtomicBool,
    state: Mutex<State>,
}

struct File {
    bytes: Vec<u8>,
    large: bool,
}

#[derive(Default)]
struct State {
    faults: Faults,
    seen: Vec<Seen>,
    served: u64,
    connections: usize,
    random: u64,
    /// When the next piece may go, if there is a rate.
    next: Option<Instant>,
}

impl Hub {
    /// A hub whose repository has these files; those of at least `large` bytes are large ones (LFS).
    ///
    /// # Errors
    /// No port can be had.
    pub fn start(files: impl IntoIterator<Item = (String, Vec<u8>)>, large: usize) -> io::Result<Self> {
        let (hub, storage) = (TcpListener::bind("127.0.0.1:0")?, TcpListener::bind("127.0.0.1:0")?);
        let with_size = |bytes: Vec<u8>| File { large: bytes.len() >= large, bytes };
        let world = Arc::new(World {
            hub: hub.local_addr()?.port(),
            storage: storage.local_addr()?.port(),
            files: files.into_iter().map(|(name, bytes)| (name, with_size(bytes))).collect(),
            ended: AtomicBool::new(false),
            state: Mutex::new(State { random: 0x9e37_79b9_7f4a_7c15, ..State::default() }),
        });
        for (listener, is_storage) in [(hub, false), (storage, true)] {
            let world = world.clone();
            thread::spawn(move || accept(&listener, &world, is_storage));
        }
        Ok(Self { url: format!("http://127.0.0.1:{}", world.hub), world })
    }

    /// Changes what goes wrong.
    pub fn faults(&self, change: impl FnOnce(&mut Faults)) {
        change(&mut self.world.lock().faults);
    }

    /// Bytes of files that were sent so far.
    pub fn served(&self) -> u64 {
        self.world.lock().served
    }

    /// Connections that were made so far.
    pub fn connections(&self) -> usize {
        self.world.lock().connections
    }

    /// Every request so far.
    pub fn seen(&self) -> Vec<Seen> {
        self.world.lock().seen.clone()
    }

    /// The true answer to the question for the files.
    pub fn listing(&self) -> Value {
        self.world.listing()
    }

    /// The address of the storage host.
    pub fn storage(&self) -> String {
        format!("http://127.0.0.1:{}", self.world.storage)
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.world.ended.store(true, Ordering::Relaxed);
        for port in [self.world.hub, self.world.storage] {
            // Wakes the thread that waits there.
            let _ = TcpStream::connect(("127.0.0.1", port));
        }
    }
}

fn accept(listener: &TcpListener, world: &Arc<World>, storage: bool) {
    for stream in listener.incoming() {
        if world.ended.load(Ordering::Relaxed) {
            return;
        }
        let (Ok(stream), world) = (stream, world.clone()) else { continue };
        world.lock().connections += 1;
        thread::spawn(move || {
            // A client that went away is part of the tests.
            let _ = world.serve(&stream, storage);
            let _ = stream.shutdown(Shutdown::Both);
        });
    }
}

/// Where an answer goes.
struct Out<'a> {
    stream: &'a TcpStream,
    trickle: Option<(usize, Duration)>,
}

impl Write for Out<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let most = match &mut self.trickle {
            None => bytes.len(),
            Some((0, pause)) => {
                thread::sleep(*pause);
                1
            }
            Some((at_once, _)) => {
                let most = bytes.len().min(*at_once);
                *at_once -= most;
                most
            }
        };
        self.stream.write(&bytes[..most])
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

/// What a request asks for.
struct Asked {
    path: String,
    headers: BTreeMap<String, String>,
}

fn read_request(reader: &mut impl BufRead) -> io::Result<Option<Asked>> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_ascii_lowercase(), value.to_owned());
    }
    Ok(Some(Asked { path, headers }))
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listing(&self) -> Value {
        let entry = |(name, file): (&String, &File)| {
            let mut entry =
                json!({"rfilename": name, "size": file.bytes.len(), "blobId": git_blob(&file.bytes)});
            if file.large {
                entry["lfs"] =
                    json!({"sha256": sha256(&file.bytes), "size": file.bytes.len(), "pointerSize": 134});
            }
            entry
        };
        let files: Vec<Value> = self.files.iter().map(entry).collect();
        json!({"id": REPO, "sha": COMMIT, "private": false, "gated": false, "siblings": files})
    }

    fn serve(&self, stream: &TcpStream, storage: bool) -> io::Result<()> {
        stream.set_nodelay(true)?;
        let mut reader = BufReader::new(stream);
        while let Some(asked) = read_request(&mut reader)? {
            let (fault, trickle) = {
                let mut state = self.lock();
                let header = |name: &str| asked.headers.get(name).cloned();
                let (range, authorization) = (header("range"), header("authorization"));
                state.seen.push(Seen { storage, path: asked.path.clone(), range, authorization });
                (state.refuse(), state.faults.trickle)
            };
            let mut out = Out { stream, trickle };
            if let Some((status, extra)) = fault {
                answer(&mut out, status, &extra, b"")?;
            } else if storage {
                self.blob(&mut out, &asked)?;
            } else {
                self.hub(&mut out, &asked)?;
            }
        }
        Ok(())
    }

    fn hub(&self, out: &mut impl Write, asked: &Asked) -> io::Result<()> {
        let faults = self.lock().faults.clone();
        let code = |code: &str| format!("X-Error-Code: {code}\r\n");
        if let Some(rest) = asked.path.strip_prefix("/api/models/") {
            let (repo, revision) = rest.split_once("/revision/").unwrap_or((rest, "main?"));
            if repo != REPO {
                return answer(out, 401, &code("RepoNotFound"), b"{\"error\":\"Repository not found\"}");
            }
            if ![("main?blobs=true"), ("v1?blobs=true"), &format!("{COMMIT}?blobs=true")].contains(&revision)
            {
                return answer(out, 404, &code("RevisionNotFound"), b"{}");
            }
            let text = faults.listing.clone().unwrap_or_else(|| self.listing().to_string());
            let headers = format!("Content-Type: application/json\r\n{}", faults.encoding());
            return answer(out, 200, &headers, text.as_bytes());
        }
        let wanted = format!("Bearer {}", faults.token.as_deref().unwrap_or_default());
        if faults.token.is_some() && asked.headers.get("authorization") != Some(&wanted) {
            return answer(out, 401, &code("GatedRepo"), b"Access to model is restricted");
        }
        let name = asked.path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/"));
        match name.and_then(|name| self.files.get_key_value(name)) {
            Some((_, file)) if file.large => {
                let sha = sha256(&file.bytes);
                let to = faults
                    .redirect
                    .unwrap_or(format!("http://127.0.0.1:{}/blob/{sha}?signature=s", self.storage));
                answer(out, 302, &format!("Location: {to}\r\nX-Linked-Etag: \"{sha}\"\r\n"), b"moved")
            }
            Some((name, file)) => self.send(out, asked, name, file),
            None => answer(out, 404, &code("EntryNotFound"), b"Entry not found"),
        }
    }

    fn blob(&self, out: &mut impl Write, asked: &Asked) -> io::Result<()> {
        let sha = asked.path.strip_prefix("/blob/").and_then(|rest| rest.strip_suffix("?signature=s"));
        let file = self.files.iter().find(|(_, file)| Some(sha256(&file.bytes).as_str()) == sha);
        match file {
            Some((name, file)) => self.send(out, asked, name, file),
            None => answer(out, 403, "", b"signature"),
        }
    }

    /// Sends a file or a part of it.
    fn send(&self, out: &mut impl Write, asked: &Asked, name: &str, file: &File) -> io::Result<()> {
        let (faults, cut, stall, flip) = self.lock().faults_of_body(name);
        let size = file.bytes.len();
        let range = asked.headers.get("range").filter(|_| !faults.no_ranges);
        let part = range.map(|text| parse_range(text, size));
        if matches!(part, Some(None)) || faults.refuse_ranges && part.is_some() {
            return answer(out, 416, &format!("Content-Range: bytes */{size}\r\n"), b"");
        }
        let (status, part) = match part.flatten() {
            Some(part) => (206, part),
            None => (200, 0..size),
        };
        let told = match status {
            206 => format!("Content-Range: bytes {}-{}/{size}\r\n", part.start, part.end - 1),
            _ => String::new(),
        };
        let head = format!(
            "HTTP/1.1 {status} OK\r\nETag: \"{}\"\r\n{told}{}Content-Length: {}\r\n\r\n",
            git_blob(&file.bytes[..size.min(64)]),
            faults.encoding(),
            part.len()
        );
        out.write_all(head.as_bytes())?;
        let mut bytes = file.bytes[part.clone()].to_vec();
        if let Some(at) = flip.and_then(|at| at.checked_sub(part.start)).filter(|at| *at < bytes.len()) {
            bytes[at] ^= 1;
            if let Some((left, ..)) = &mut self.lock().faults.flip {
                *left -= 1;
            }
        }
        let end = match (cut, stall) {
            (Some(random), _) => random as usize % bytes.len().max(1),
            (None, true) => bytes.len() / 2,
            _ => bytes.len(),
        };
        for piece in bytes[..end].chunks(PIECE) {
            self.wait_turn(piece.len(), faults.rate);
            out.write_all(piece)?;
            self.lock().served += piece.len() as u64;
        }
        if stall {
            thread::sleep(STALL);
        }
        match end < bytes.len() {
            true => Err(io::ErrorKind::ConnectionAborted.into()),
            false => Ok(()),
        }
    }

    fn wait_turn(&self, bytes: usize, rate: Option<u64>) {
        let Some(rate) = rate else { return };
        let now = Instant::now();
        let turn = {
            let mut state = self.lock();
            let turn = state.next.map_or(now, |next| next.max(now));
            state.next = Some(turn + Duration::from_secs_f64(bytes as f64 / rate as f64));
            turn
        };
        thread::sleep(turn.saturating_duration_since(now));
    }
}

impl State {
    /// A status instead of an answer, if one is due.
    fn refuse(&mut self) -> Option<(u16, String)> {
        let faults = &mut self.faults;
        if faults.limited.0 > 0 {
            faults.limited.0 -= 1;
            return Some((429, format!("Retry-After: {}\r\n", faults.limited.1)));
        }
        if faults.status.0 > 0 {
            faults.status.0 -= 1;
            let wait = faults.retry_after.map(|wait| format!("Retry-After: {wait}\r\n"));
            return Some((faults.status.1, wait.unwrap_or_default()));
        }
        None
    }

    /// What goes wrong with the next body of a file: where it is cut, whether it stalls, which byte is another.
    fn faults_of_body(&mut self, name: &str) -> (Faults, Option<u64>, bool, Option<usize>) {
        let mut cut = None;
        if self.faults.cut > 0 {
            self.faults.cut -= 1;
            // xorshift64
            self.random ^= self.random << 13;
            self.random ^= self.random >> 7;
            self.random ^= self.random << 17;
            cut = Some(self.random >> 1);
        }
        let stall = cut.is_none() && self.faults.stall > 0;
        if stall {
            self.faults.stall -= 1;
        }
        let flip = self.faults.flip.as_ref().filter(|(left, file, _)| *left > 0 && file == name);
        let flip = flip.map(|(.., at)| *at);
        (self.faults.clone(), cut, stall, flip)
    }
}

fn parse_range(text: &str, size: usize) -> Option<Range<usize>> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last): (usize, usize) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last && last < size).then_some(first..last + 1)
}

fn answer(out: &mut impl Write, status: u16, extra: &str, body: &[u8]) -> io::Result<()> {
    write!(out, "HTTP/1.1 {status} Status\r\n{extra}Content-Length: {}\r\n\r\n", body.len())?;
    out.write_all(body)
}

fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 in hex.
pub fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

/// Git's id of a file with these bytes, in hex.
pub fn git_blob(bytes: &[u8]) -> String {
    hex(Sha1::digest([format!("blob {}\0", bytes.len()).as_bytes(), bytes].concat()))
}
