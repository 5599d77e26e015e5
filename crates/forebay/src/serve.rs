//! `forebay serve`: models behind HTTP.

use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_engine::Limits;
use forebay_server::jobs::{self, OpenError};
use forebay_server::{App, Jobs, Keys, Origins, Pem, Settings, Tls};
use tracing::level_filters::LevelFilter;

use crate::args::{LogArg, LogFormatArg, ServeArgs, SwitchArg, key};
use crate::console::Output;
use crate::dirs;
use crate::failure::{Exit, Failure};
use crate::prompt;
use crate::served;

/// Between two signs of life of a stream that has nothing to say.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Runs the verb.
pub fn run(args: &ServeArgs) -> Result<(), Failure> {
    let keys = keys(args)?;
    let public = !args.host.is_loopback();
    if public && keys.are_none() && !args.allow_public {
        return Err(Failure::usage(format!(
            "anybody who reaches this machine could use a server on {}: give --api-key-file, or --allow-public if that is \
             what you want",
            args.host
        )));
    }
    if args.prefixes.prefix_store.is_none() && args.prefixes.prefix_store_size.is_some() {
        return Err(Failure::usage("--prefix-store-size needs --prefix-store: else nothing is kept"));
    }
    log(args);
    let tls = tls(args)?;
    let listener = forebay_server::listen(SocketAddr::new(args.host, args.port))
        .map_err(|error| Failure::runtime(error.to_string()))?;
    let address = listener.local_addr().map_err(|error| Failure::runtime(error.to_string()))?;
    let wanted = served::wanted(args)?;
    if wanted.len() > 1 || args.idle_unload.0.is_some() {
        forebay_io::keep_little_freed();
    }
    let jobs = jobs(args, &wanted[0].name)?;
    let local_names_only = !public && keys.are_none();
    let settings = Settings {
        keys,
        origins: Origins::new(args.cors_origin.iter().cloned()),
        local_names_only,
        max_tokens: args.max_tokens.map(|most| most as usize),
        think: args.think,
        max_body: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        max_connections: usize::from(args.max_connections),
        patience: Duration::from_secs(u64::from(args.client_timeout)),
        keep_alive: KEEP_ALIVE,
        drain: Duration::from_secs(u64::from(args.drain_timeout)),
        tls,
    };
    let mut limits = Limits {
        queue: usize::from(args.max_queue),
        warm_up: args.warm_up == SwitchArg::On,
        ..Limits::default()
    };
    limits.running = args.parallel.map_or(limits.running, usize::from);
    let models = served::models(args, wanted, limits)?;
    let scheme = if settings.tls.is_some() { "https" } else { "http" };
    let named: Vec<String> = models
        .served
        .iter()
        .map(|served| format!("model {}, context {}", served.model.id, served.model.context))
        .collect();
    let app = App::new(models, settings)
        .map_err(|error| Failure::runtime(format!("cannot start a thread for the engine: {error}")))?;
    Output::new().write(&greeting(scheme, address, &named.join("; ")))?;
    let well = forebay_server::serve(app.with_jobs(jobs), listener)
        .map_err(|error| Failure::runtime(error.to_string()))?;
    match well {
        true => Ok(()),
        false => Err(Failure::new(Exit::Runtime, "the engine had stopped after a fault; the log says which")),
    }
}

/// The first lines: where everything is.
fn greeting(scheme: &str, address: SocketAddr, models: &str) -> String {
    let base = match address.ip().is_unspecified() {
        // Every address of this machine, of which that one is no name.
        true => format!("{scheme}://localhost:{}", address.port()),
        false => format!("{scheme}://{address}"),
    };
    format!(
        "listening on {scheme}://{address} ({models})\n\
         in a browser: {base}/ (a chat, and what the engine does)\n\
         for programs: {base}/v1 (OpenAI), {base} (Anthropic, Ollama), {base}/openapi.json (everything)\n"
    )
}

/// The certificate, if there is to be one.
fn tls(args: &ServeArgs) -> Result<Option<Arc<Tls>>, Failure> {
    let (Some(certificates), Some(key)) = (args.tls_cert.clone(), args.tls_key.clone()) else {
        return Ok(None);
    };
    let read = move || {
        let file = |path: &Path| {
            std::fs::read(path).map_err(|error| format!("{} cannot be read: {error}", path.display()))
        };
        Ok(Pem { certificates: file(&certificates)?, key: file(&key)? })
    };
    let tls = Tls::open(Box::new(read)).map_err(|error| Failure::usage(error.to_string()))?;
    Ok(Some(Arc::new(tls)))
}

/// Keys from all places where they may be.
fn keys(args: &ServeArgs) -> Result<Keys, Failure> {
    let mut keys = args.api_key.clone();
    if let Some(path) = &args.api_key_file {
        let text = prompt::read_file(path)?;
        let before = keys.len();
        keys.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
        if keys.len() == before {
            return Err(Failure::usage(format!("{} holds no key; write one a line", path.display())));
        }
    }
    // Whoever sets it wants a key: a script's empty variable must not open the door.
    if let Some(found) = std::env::var_os("FOREBAY_API_KEY") {
        let Some(key) = found.to_str().and_then(|found| key(found).ok()) else {
            let what = if found.is_empty() { "is empty" } else { "holds no key" };
            return Err(Failure::usage(format!(
                "FOREBAY_API_KEY {what}: use letters, digits and signs without spaces, or unset it"
            )));
        };
        keys.push(key);
    }
    Ok(Keys::new(keys.iter().map(String::as_str)))
}

/// The folder for files and batches. One that was named has to be there; without the usual one the rest of the server
/// works, and says why this does not.
fn jobs(args: &ServeArgs, id: &str) -> Result<Result<Jobs, String>, Failure> {
    let limits = jobs::Limits {
        file: args.max_file.0,
        files: args.max_files.0,
        line: usize::try_from(args.max_body.0).unwrap_or(usize::MAX),
        // As many as the scheduler runs of them.
        places: args.parallel.map_or(Limits::default().running, usize::from).div_ceil(2),
    };
    let usual = || {
        let safe = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
        let name: String = id.chars().map(safe).take(200).collect();
        // No name of a model leads out of the folder.
        let name = if name.starts_with('.') { format!("_{name}") } else { name };
        dirs::state().map(|state| state.join("jobs").join(name))
    };
    let Some(dir) = args.jobs.clone().or_else(usual) else {
        return Ok(Err("this user has no folder for them; name one with --jobs".to_owned()));
    };
    match Jobs::open(&dir, limits) {
        Ok(jobs) => Ok(Ok(jobs)),
        Err(error) if args.jobs.is_none() => {
            tracing::warn!("no files and batches: {error}");
            Ok(Err(error.to_string()))
        }
        Err(error @ OpenError::Busy(_)) => Err(Failure::usage(error.to_string())),
        Err(error) => Err(Failure::runtime(error.to_string())),
    }
}

fn log(args: &ServeArgs) {
    let level = match args.log {
        LogArg::Off => LevelFilter::OFF,
        LogArg::Error => LevelFilter::ERROR,
        LogArg::Warn => LevelFilter::WARN,
        LogArg::Info => LevelFilter::INFO,
        LogArg::Debug => LevelFilter::DEBUG,
    };
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr).with_target(false);
    match args.log_format {
        LogFormatArg::Text => lines.with_ansi(false).init(),
        LogFormatArg::Json => lines.json().init(),
    }
}
