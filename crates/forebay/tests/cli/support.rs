//! Starting the binary in a world of its own: no settings of the user who runs the tests, no files of theirs.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

/// Where the bundled model is unpacked; shared by all tests, which is itself a test of racing first runs.
pub fn scratch() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}

/// The repository's copy of the demo model and its evaluation files.
pub fn demo() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo")
}

/// The binary with these arguments and nothing on standard input.
pub fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
    command
        .args(args)
        .env_remove("FOREBAY_MODEL")
        .env("FOREBAY_CACHE", scratch().join("cache"))
        .env("XDG_DATA_HOME", scratch().join("data"))
        .env("XDG_STATE_HOME", scratch().join("state"))
        .stdin(Stdio::null());
    command
}

/// The binary without the user's hub, token and proxies, and with a cache of its own.
pub fn online(args: &[&str]) -> Command {
    let mut command = command(args);
    for name in ["HF_ENDPOINT", "HF_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "SSL_CERT_FILE"] {
        command.env_remove(name);
    }
    for name in ["HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"] {
        command.env_remove(name).env_remove(name.to_lowercase());
    }
    command.env("HF_HOME", scratch().join("no-such-home"));
    command
}

/// What a finished run left behind.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Done {
    pub fn of(output: Output) -> Self {
        Self {
            code: output.status.code().expect("not killed by a signal"),
            stdout: String::from_utf8(output.stdout).expect("standard output is text"),
            stderr: String::from_utf8(output.stderr).expect("standard error is text"),
        }
    }

    /// The run succeeded.
    #[track_caller]
    pub fn ok(self) -> Self {
        assert_eq!(self.code, 0, "{self:#?}");
        self
    }

    /// The run failed with `code`, nothing on standard output, and one `error:` line holding all `words`.
    #[track_caller]
    pub fn fails(self, code: i32, words: &[&str]) -> Self {
        assert_eq!(self.code, code, "{self:#?}");
        assert_eq!(self.stdout, "", "{self:#?}");
        let errors: Vec<&str> = self.stderr.lines().filter(|line| line.starts_with("error:")).collect();
        assert_eq!(errors.len(), 1, "{self:#?}");
        for word in words {
            assert!(errors[0].contains(word), "{word:?} is missing: {self:#?}");
        }
        for internal in ["panicked", "backtrace", "RUST_"] {
            assert!(!self.stderr.contains(internal), "{self:#?}");
        }
        self
    }

    /// Standard output as one JSON object on one line.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.stdout.lines().count(), 1, "{self:#?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:#?}"))
    }
}

/// Runs the binary to its end.
pub fn forebay(args: &[&str]) -> Done {
    Done::of(command(args).output().expect("the binary starts"))
}

/// Runs the binary with `input` on standard input.
pub fn forebay_reading(args: &[&str], input: &[u8]) -> Done {
    let mut child = command(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    // A run that fails early does not read everything.
    let _ = stdin.write_all(input);
    drop(stdin);
    Done::of(child.wait_with_output().expect("the binary ends"))
}

/// A run in progress, whose output is seen as it comes.
pub struct Live {
    pub child: Child,
    pub stdin: ChildStdin,
    lines: Receiver<String>,
}

impl Live {
    pub fn start(args: &[&str]) -> Self {
        let mut child = command(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let stdin = child.stdin.take().expect("piped");
        let lines = lines_of(child.stdout.take().expect("piped"));
        Self { child, stdin, lines }
    }

    pub fn say(&mut self, line: &str) {
        writeln!(self.stdin, "{line}").expect("the binary reads");
    }

    /// The next line of standard output.
    #[track_caller]
    pub fn line(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(60)).expect("a line of output")
    }

    /// What Ctrl-C does.
    #[cfg(unix)]
    pub fn interrupt(&self) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args(["-INT", &pid]).status().expect("kill starts").success());
    }

    /// Closes standard input and waits for the end.
    pub fn end(self) -> Done {
        drop(self.stdin);
        let mut done = Done::of(self.child.wait_with_output().expect("the binary ends"));
        done.stdout = self.lines.iter().map(|line| line + "\n").collect();
        done
    }
}

fn lines_of(stdout: ChildStdout) -> Receiver<String> {
    let (send, receive) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                break;
            }
        }
    });
    receive
}

/// A folder with the toy model: no tokenizer, 300 ids, every weight known.
pub fn toy() -> TempDir {
    let dir = TempDir::new().expect("a temporary folder");
    forebay_testkit::toy::write(dir.path()).expect("the toy can be written");
    dir
}

/// A folder with a copy of the demo model, to be damaged.
pub fn demo_copy() -> TempDir {
    let dir = TempDir::new().expect("a temporary folder");
    let files = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"];
    for name in files.into_iter().chain(["chat_template.jinja", "model.safetensors"]) {
        std::fs::copy(demo().join(name), dir.path().join(name)).expect("the demo model is complete");
    }
    dir
}

/// The smallest memory budget with these arguments, as an argument.
pub fn smallest_memory(args: &[&str]) -> String {
    let found = forebay(&[&["inspect", "--json"], args].concat()).ok().json();
    found["plan"]["minimum"].as_u64().expect("a plan").to_string()
}

/// The path as an argument.
pub fn arg(path: &Path) -> &str {
    path.to_str().expect("test paths are text")
}
