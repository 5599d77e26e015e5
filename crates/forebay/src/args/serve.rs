//! Options of `forebay serve`.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use forebay_core::ByteSize;
use forebay_engine::EngineOptions;

use super::{DiskArgs, DraftArgs, NumberArgs, PrefixArgs, SizeArgs, SwitchArg};

/// `forebay serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// A file with options of this verb, by their long names (docs/deploy.md); those of the command line win
    #[arg(
        long,
        value_name = "FILE",
        env = "FOREBAY_CONFIG",
        hide_env_values = true,
        help_heading = "Server"
    )]
    pub config: Option<PathBuf>,
    /// The address to listen on; 0.0.0.0 or :: is every one that this machine has
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1", help_heading = "Server")]
    pub host: IpAddr,
    /// The port to listen on; 0 takes a free one
    #[arg(long, value_name = "PORT", default_value_t = 8000, help_heading = "Server")]
    pub port: u16,
    /// The name that clients use for the only model [default: the folder's name; forebay-demo for the bundled one]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub served_name: Option<String>,
    /// A key that clients must send; may be given several times. Other users of this machine can see it: better use
    /// --api-key-file, or FOREBAY_API_KEY
    #[arg(long, value_name = "KEY", value_parser = key, help_heading = "Server")]
    pub api_key: Vec<String>,
    /// A file with keys, one a line
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub api_key_file: Option<PathBuf>,
    /// Let anybody in who can reach this machine, without a key
    #[arg(long, help_heading = "Server")]
    pub allow_public: bool,
    /// Encrypt connections with this certificate: a PEM file with it and those of the authorities behind it. SIGHUP reads
    /// it again
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = "Server")]
    pub tls_cert: Option<PathBuf>,
    /// The private key of --tls-cert, a PEM file
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = "Server")]
    pub tls_key: Option<PathBuf>,
    /// A web page that may ask, such as `https://chat.example`; * for all; may be given several times
    #[arg(long, value_name = "ORIGIN", help_heading = "Server")]
    pub cors_origin: Vec<String>,
    /// Requests that may wait for their turn; more are refused
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Server")]
    pub max_queue: u16,
    /// Requests that are answered at once, as far as memory allows [default: 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64), help_heading = "Server")]
    pub parallel: Option<u8>,
    /// Connections at a time; others wait
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u16).range(1..), help_heading = "Server")]
    pub max_connections: u16,
    /// Most tokens of an answer where a request does not say [default: as many as fit into the context]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "Server")]
    pub max_tokens: Option<u32>,
    /// Let the model reason where a request does not say
    #[arg(long, help_heading = "Server")]
    pub think: bool,
    /// Largest body of a request
    #[arg(long, value_name = "SIZE", default_value = "16MiB", help_heading = "Server")]
    pub max_body: ByteSize,
    /// The folder for files and batches, which outlive the server [default: one for the model's name in the user's
    /// folder for state]
    #[arg(long, value_name = "DIR", help_heading = "Server")]
    pub jobs: Option<PathBuf>,
    /// Largest file of a batch's requests
    #[arg(long, value_name = "SIZE", default_value = "200MB", help_heading = "Server")]
    pub max_file: ByteSize,
    /// Room for all files of requests and results; where it is used up, no more files are taken
    #[arg(long, value_name = "SIZE", default_value = "10GB", help_heading = "Server")]
    pub max_files: ByteSize,
    /// Seconds that a client has to send a request, and to take what is sent
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..), help_heading = "Server")]
    pub client_timeout: u32,
    /// Seconds for answers that are under way when the end is asked for
    #[arg(long, value_name = "SECONDS", default_value_t = 30, help_heading = "Server")]
    pub drain_timeout: u32,
    /// What is written to standard error
    #[arg(long, value_enum, value_name = "LEVEL", default_value_t = LogArg::Info, help_heading = "Server")]
    pub log: LogArg,
    /// How it is written
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = LogFormatArg::Text, help_heading = "Server")]
    pub log_format: LogFormatArg,
    /// What is kept for later runs.
    #[command(flatten)]
    pub prefixes: PrefixArgs,
    /// Whether tokens are drafted.
    #[command(flatten)]
    pub draft: DraftArgs,
    /// A model folder, or NAME=DIR for one that clients call by another name than the folder's; may be given several
    /// times: one model is in memory at a time, the first at the start, the others when they are asked for
    /// [default: $FOREBAY_MODEL, else the bundled demonstration model]
    #[arg(long, value_name = "DIR", value_parser = OsStringValueParser::new().map(ModelArg::read), help_heading = "Model and machine")]
    pub model: Vec<ModelArg>,
    /// Free the memory of a model that nobody has used for so long, such as 30m or 2h; the next request loads it again
    #[arg(long, value_name = "TIME", default_value = "off", value_parser = idle_unload, help_heading = "Model and machine")]
    pub idle_unload: IdleUnload,
    /// How much memory a model takes.
    #[command(flatten)]
    pub size: SizeArgs,
    /// How numbers are computed.
    #[command(flatten)]
    pub numbers: NumberArgs,
    /// How experts are read.
    #[command(flatten)]
    pub disk: DiskArgs,
    /// Read what earlier runs used most into free memory while nobody asks
    #[arg(long, value_enum, default_value_t = SwitchArg::On, help_heading = "Disk")]
    pub warm_up: SwitchArg,
}

impl ServeArgs {
    /// The options of the run.
    pub fn options(&self) -> EngineOptions {
        let options = self.disk.over(self.numbers.over(self.size.options()));
        EngineOptions { drafting: self.draft.draft, serving: true, ..options }
    }
}

/// `--model`: a folder, and the name that was given to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelArg {
    /// The name, if there is one.
    pub name: Option<String>,
    /// The folder.
    pub dir: PathBuf,
}

impl ModelArg {
    /// A name has no slash, so that paths with an equals sign can be given: as `./a=b`.
    fn read(text: OsString) -> Self {
        let named = text.to_str().and_then(|text| text.split_once('='));
        match named.filter(|(name, _)| !name.contains(['/', '\\'])) {
            Some((name, dir)) => Self { name: Some(name.to_owned()), dir: dir.into() },
            None => Self { name: None, dir: text.into() },
        }
    }
}

/// `--idle-unload`: how long, if at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleUnload(pub Option<Duration>);

fn idle_unload(text: &str) -> Result<IdleUnload, String> {
    if text == "off" {
        return Ok(IdleUnload(None));
    }
    let units = [("s", 1), ("m", 60), ("h", 3600), ("d", 86_400)];
    let seconds = units.iter().find_map(|(unit, seconds)| {
        let number: u32 = text.strip_suffix(unit)?.parse().ok()?;
        Some(u64::from(number) * seconds)
    });
    match seconds {
        Some(seconds @ 1..) => Ok(IdleUnload(Some(Duration::from_secs(seconds)))),
        _ => Err("use off, or a time such as 90s, 30m, 2h or 1d".to_owned()),
    }
}

/// `--log`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogArg {
    /// Nothing
    Off,
    /// What failed
    Error,
    /// And what was odd
    Warn,
    /// And every request
    Info,
    /// And why requests were refused
    Debug,
}

/// `--log-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    /// Lines for people
    Text,
    /// An object a line
    Json,
}

/// A key, if it is one.
pub fn key(text: &str) -> Result<String, String> {
    let good = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_graphic());
    if good { Ok(text.to_owned()) } else { Err("use letters, digits and signs without spaces".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_may_have_a_name() {
        for (text, name, dir) in [
            ("/models/a", None, "/models/a"),
            ("night=/models/a=b", Some("night"), "/models/a=b"),
            ("/models/a=b", None, "/models/a=b"),
            ("./a=b", None, "./a=b"),
            ("=x", Some(""), "x"),
            ("x=", Some("x"), ""),
        ] {
            let want = ModelArg { name: name.map(str::to_owned), dir: dir.into() };
            assert_eq!(ModelArg::read(text.into()), want, "{text}");
        }
    }

    #[test]
    fn times_have_a_unit() {
        for (text, seconds) in [("90s", 90), ("30m", 1800), ("2h", 7200), ("1d", 86_400)] {
            assert_eq!(idle_unload(text), Ok(IdleUnload(Some(Duration::from_secs(seconds)))), "{text}");
        }
        assert_eq!(idle_unload("off"), Ok(IdleUnload(None)));
        for text in ["", "10", "0s", "-1s", "1.5h", "s", "9999999999s", "1 h", "on", "1\u{e9}"] {
            assert!(idle_unload(text).is_err(), "{text:?}");
        }
    }
}
