//! A server in a world of its own, and a client that sends exactly what it is told to.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

/// The bundled model's name.
pub const MODEL: &str = "forebay-demo";
/// Nothing here takes longer, on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A running server; it ends when this is dropped.
pub struct Server {
    child: Child,
    pub address: String,
    /// What it says when it is there.
    pub greeting: String,
}

impl Server {
    pub fn start() -> Self {
        Self::with(&[])
    }

    fn command(args: &[&str]) -> Command {
        let scratch = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        let log: &[&str] = if args.contains(&"--log") { &[] } else { &["--log", "warn"] };
        command
            .args(["serve", "--port", "0", "--threads", "2"])
            .args(log)
            .args(args)
            .env_remove("FOREBAY_MODEL")
            .env_remove("FOREBAY_API_KEY")
            .env_remove("FOREBAY_CONFIG")
            .env("FOREBAY_CACHE", scratch.join("cache"))
            .env("XDG_STATE_HOME", scratch.join("state"))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        command
    }

    pub fn with(args: &[&str]) -> Self {
        Self::run(Self::command(args))
    }

    /// A server to which limits can be set: it is told when it exceeds one, instead of being ended.
    #[cfg(target_os = "linux")]
    pub fn limitable(args: &[&str]) -> Self {
        let plain = Self::command(args);
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' XFSZ; exec \"$@\"", "sh"])
            .arg(plain.get_program())
            .args(plain.get_args());
        for (name, value) in plain.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Self::run(command)
    }

    /// Limits the size of files that the server writes.
    #[cfg(target_os = "linux")]
    pub fn limit_files(&self, bytes: &str) {
        let args = ["--pid", &self.child.id().to_string(), &format!("--fsize={bytes}:")];
        assert!(Command::new("prlimit").args(args).status().expect("util-linux is there").success());
    }

    /// The most memory that it ever had, in bytes.
    #[cfg(target_os = "linux")]
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
        kilobytes << 10
    }

    fn run(mut command: Command) -> Self {
        let mut child = command.spawn().expect("the binary starts");
        let mut greeting = String::new();
        let mut lines = BufReader::new(child.stdout.take().expect("piped"));
        for _ in 0..3 {
            lines.read_line(&mut greeting).expect("the server says where it is");
        }
        let address = greeting.split("://").nth(1).and_then(|rest| rest.split(' ').next());
        let Some(address) = address.map(str::to_owned) else {
            let mut stderr = String::new();
            let _ = child.stderr.take().expect("piped").read_to_string(&mut stderr);
            panic!("no address: {greeting:?} {stderr}");
        };
        Self { child, address, greeting }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the server listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// One request on a connection of its own.
    pub fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Reply {
        let mut stream = self.connect();
        stream.write_all(&request(method, path, headers, body)).expect("the server reads");
        read_reply(&mut BufReader::new(stream))
    }

    pub fn get(&self, path: &str) -> Reply {
        self.send("GET", path, &[], None)
    }

    pub fn post(&self, path: &str, body: &Value) -> Reply {
        let headers = [("content-type", "application/json")];
        self.send("POST", path, &headers, Some(body.to_string().as_bytes()))
    }

    /// The answer to a question, in the chat interface.
    pub fn ask(&self, question: &str) -> String {
        let reply = self.post("/v1/chat/completions", &chat(question)).ok();
        reply["choices"][0]["message"]["content"].as_str().expect("an answer").to_owned()
    }

    /// The answer of one of several models.
    #[track_caller]
    pub fn ask_model(&self, model: &str) -> String {
        let body = with(chat("What is 2+2?"), json!({"model": model}));
        let reply = self.post("/v1/chat/completions", &body).ok();
        reply["choices"][0]["message"]["content"].as_str().expect("an answer").to_owned()
    }

    /// The number of the process.
    #[cfg(target_os = "linux")]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// It still answers, and rightly.
    #[track_caller]
    pub fn is_well(&self) {
        assert_eq!(self.ask("What is 2+2?"), "2+2=4.");
    }

    /// The value of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").text();
        let line = text.lines().find(|line| line.split(' ').next() == Some(name));
        line.and_then(|line| line.rsplit(' ').next()?.parse().ok())
            .unwrap_or_else(|| panic!("no {name}:\n{text}"))
    }

    /// Waits until `done` holds.
    #[track_caller]
    pub fn until(&self, what: &str, done: impl Fn(&Self) -> bool) {
        let began = Instant::now();
        while !done(self) {
            assert!(began.elapsed() < PATIENCE, "{what} takes too long");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// What it said on standard error, up to the line with this word in it, or its end.
    pub fn said_until(&mut self, word: &str) -> String {
        let mut all = String::new();
        let mut lines = BufReader::new(self.child.stderr.take().expect("piped"));
        while !all.contains(word) && lines.read_line(&mut all).is_ok_and(|len| len > 0) {}
        all
    }

    /// Memory of the process, in bytes.
    #[cfg(target_os = "linux")]
    pub fn resident_bytes(&self) -> u64 {
        self.memory("VmRSS:")
    }

    /// The most memory that the process ever had, in bytes.
    #[cfg(target_os = "linux")]
    pub fn peak_bytes(&self) -> u64 {
        self.memory("VmHWM:")
    }

    #[cfg(target_os = "linux")]
    fn memory(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it runs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of this name");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }

    #[cfg(unix)]
    pub fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(
            Command::new("kill").args([&format!("-{name}"), &pid]).status().expect("kill starts").success()
        );
    }

    /// Ends the process as a power failure would: at once.
    pub fn kill(mut self) {
        self.child.kill().expect("the process can be killed");
        self.wait();
    }

    /// What the server says before it ends by itself.
    pub fn last_words(args: &[&str]) -> (ExitStatus, String) {
        let output = Self::command(args).output().expect("the binary starts");
        (output.status, String::from_utf8(output.stderr).expect("errors are text"))
    }

    /// Waits for the end of the process.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("the process ends")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A question in the chat interface.
pub fn chat(question: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}]})
}

/// `value` with these fields as well.
pub fn with(mut value: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("an object") };
    value.as_object_mut().expect("an object").extend(more);
    value
}

/// A request in bytes.
pub fn request(method: &str, path: &str, headers: &[(&str, &str)], body: Option<&[u8]>) -> Vec<u8> {
    let mut text = format!("{method} {path} HTTP/1.1\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        text += "host: localhost\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if let Some(body) = body {
        text += &format!("content-length: {}\r\n", body.len());
    }
    [text.as_bytes(), b"\r\n", body.unwrap_or_default()].concat()
}

/// What came back.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("bodies are text")
    }

    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The body of a success.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// The error of a refusal, in OpenAI's shape.
    #[track_caller]
    pub fn refused(&self, status: u16, param: &str) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        let error = self.json()["error"].clone();
        assert_eq!(error["param"], if param.is_empty() { Value::Null } else { param.into() }, "{error}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()));
        error
    }

    /// The events of a stream: their names, and their data where it is JSON.
    pub fn events(&self) -> Vec<(String, Value)> {
        assert_eq!(self.header("content-type"), Some("text/event-stream"), "{}", self.text());
        events(&self.text())
    }
}

/// The events in a text: their names (empty without one), and their data.
pub fn events(text: &str) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for block in text.split("\n\n").filter(|block| !block.is_empty()) {
        let (mut name, mut data) = (String::new(), None);
        for line in block.lines() {
            match line.split_once(": ") {
                Some(("event", value)) => name = value.to_owned(),
                Some(("data", value)) => {
                    let value =
                        serde_json::from_str(value).unwrap_or_else(|_| Value::String(value.to_owned()));
                    data = Some(value);
                }
                // A sign of life.
                _ => assert!(line.starts_with(':'), "{line}"),
            }
        }
        found.extend(data.map(|data| (name, data)));
    }
    found
}

/// Reads the head of a reply: status and headers.
pub fn read_head(stream: &mut impl BufRead) -> (u16, Vec<(String, String)>) {
    let mut line = String::new();
    stream.read_line(&mut line).expect("a status line");
    let status = line.split(' ').nth(1).and_then(|status| status.parse().ok());
    let status = status.unwrap_or_else(|| panic!("no status: {line:?}"));
    let mut headers = Vec::new();
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).expect("a header");
        match line.trim_end().split_once(':') {
            Some((name, value)) => headers.push((name.to_ascii_lowercase(), value.trim().to_owned())),
            None => return (status, headers),
        }
    }
}

/// Reads one reply to its end.
pub fn read_reply(stream: &mut impl BufRead) -> Reply {
    let (status, headers) = read_head(stream);
    let mut reply = Reply { status, headers, body: Vec::new() };
    if let Some(len) = reply.header("content-length") {
        reply.body = vec![0; len.parse().expect("a length")];
        stream.read_exact(&mut reply.body).expect("the whole body");
        return reply;
    }
    if reply.header("transfer-encoding") == Some("chunked") {
        loop {
            let mut line = String::new();
            stream.read_line(&mut line).expect("a chunk");
            let len = usize::from_str_radix(line.trim(), 16).unwrap_or_else(|_| panic!("a length: {line:?}"));
            let mut chunk = vec![0; len + 2];
            stream.read_exact(&mut chunk).expect("the whole chunk");
            if len == 0 {
                return reply;
            }
            reply.body.extend_from_slice(&chunk[..len]);
        }
    }
    reply
}
