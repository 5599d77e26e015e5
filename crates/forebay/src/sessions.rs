//! Conversations that outlive the program: a file each, readable by its owner only, and the verb that lists and
//! deletes them (docs/sessions.md).

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use forebay_core::ByteSize;
use forebay_engine::prefix::{self, ModelFolder};
use forebay_io::file::read_regular;
use serde_json::{Value, json};

use crate::args::{SessionsArgs, SessionsVerb};
use crate::chat::Talk;
use crate::console::{self, Output};
use crate::dirs;
use crate::failure::Failure;
use crate::prefixes;

/// A file of more bytes is none of ours.
const MAX_BYTES: u64 = 64 << 20;
const VERSION: u64 = 1;

/// A conversation's place on disk.
pub struct SavedTalk {
    name: String,
    path: PathBuf,
    /// Tells the model from others.
    model: String,
}

impl SavedTalk {
    /// The place of the conversation `name` with the model that `model` tells from others.
    pub fn new(name: &str, model: String) -> Result<Self, Failure> {
        Ok(Self { name: name.to_owned(), path: file_of(name)?, model })
    }

    /// What was said so far; `None` if there is no such conversation yet.
    pub fn load(&self) -> Result<Option<Talk>, Failure> {
        let bytes = match read_regular(&self.path, MAX_BYTES) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            bytes => bytes.map_err(|error| self.unusable(&error.to_string()))?,
        };
        let value: Value =
            serde_json::from_slice(&bytes).map_err(|_| self.unusable("it is not what was written"))?;
        if value["version"].as_u64() != Some(VERSION) {
            return Err(self.unusable("another version of this program wrote it"));
        }
        if value["model"].as_str() != Some(&self.model) {
            return Err(Failure::usage(format!(
                "the conversation {} was held with another model, or with this one changed; choose another name, or \
                 delete it: forebay sessions rm {0}",
                self.name
            )));
        }
        let talk =
            Talk::from_json(&value["talk"]).ok_or_else(|| self.unusable("it is not what was written"))?;
        Ok(Some(talk))
    }

    fn unusable(&self, why: &str) -> Failure {
        Failure::usage(format!(
            "cannot go on with the conversation {}: {}: {why}; choose another name, or delete it: forebay sessions \
             rm {0}",
            self.name,
            self.path.display()
        ))
    }

    /// Replaces the file as a whole; what goes wrong is said.
    pub fn save(&self, talk: &Talk) {
        let value = json!({"version": VERSION, "model": self.model, "talk": talk.to_json()});
        if let Err(error) = replace(&self.path, &value.to_string()) {
            console::note(&format!(
                "the conversation {} cannot be kept in {}: {error}; /save FILE writes it elsewhere",
                self.name,
                self.path.display()
            ));
        }
    }
}

fn replace(path: &Path, text: &str) -> io::Result<()> {
    if let Some(folder) = path.parent() {
        private_folder(folder)?;
    }
    let unfinished = path.with_extension(format!("{}.new", std::process::id()));
    let _ = fs::remove_file(&unfinished);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let written = options.open(&unfinished).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    let done = written.and_then(|()| fs::rename(&unfinished, path));
    if done.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    done
}

fn private_folder(folder: &Path) -> io::Result<()> {
    #[allow(unused_mut, reason = "only some systems have modes")]
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(folder)
}

/// The folder of all conversations.
fn folder() -> Result<PathBuf, Failure> {
    let state = dirs::state().ok_or_else(|| {
        Failure::usage(
            "there is no folder to keep conversations in; set HOME, or XDG_STATE_HOME, to a full path",
        )
    })?;
    Ok(state.join("sessions"))
}

fn file_of(name: &str) -> Result<PathBuf, Failure> {
    Ok(folder()?.join(format!("{name}.json")))
}

/// A name that is a file's name on every system.
pub fn name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    match (1..=64).contains(&text.len()) && text.chars().all(allowed) {
        true => Ok(text.to_owned()),
        false => Err("use 1 to 64 letters, digits, - or _".to_owned()),
    }
}

/// Runs the verb.
pub fn run(args: &SessionsArgs) -> Result<(), Failure> {
    match &args.verb {
        SessionsVerb::List { prefix_store, json } => list(prefix_store.as_deref(), *json),
        SessionsVerb::Rm { names, all, prefixes, prefix_store } => {
            let names = if *all { all_names()? } else { names.clone() };
            remove(&names)?;
            if *prefixes || *all {
                remove_prefixes(prefix_store.as_deref())?;
            }
            Ok(())
        }
    }
}

fn all_names() -> Result<Vec<String>, Failure> {
    Ok(all()?.into_iter().map(|(name, _, _)| name).collect())
}

/// Name, bytes and last change of every conversation.
fn all() -> Result<Vec<(String, u64, Option<SystemTime>)>, Failure> {
    let folder = folder()?;
    let entries = match fs::read_dir(&folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| cannot_read(&folder, &error))?,
    };
    let mut all = Vec::new();
    for entry in entries.flatten() {
        let file = entry.file_name();
        let found =
            file.to_str().and_then(|file| file.strip_suffix(".json")).filter(|text| name(text).is_ok());
        if let (Some(name), Ok(metadata)) = (found, entry.metadata()) {
            all.push((name.to_owned(), metadata.len(), metadata.modified().ok()));
        }
    }
    all.sort();
    Ok(all)
}

fn cannot_read(path: &Path, error: &io::Error) -> Failure {
    Failure::runtime(format!("cannot read {}: {error}; check its permissions", path.display()))
}

fn kept_prefixes(named: Option<&Path>) -> Result<Vec<ModelFolder>, Failure> {
    let Some(dir) = named.map(Path::to_owned).or_else(prefixes::usual_folder) else { return Ok(Vec::new()) };
    prefix::folders(&dir).map_err(|error| cannot_read(&dir, &error))
}

fn list(prefix_store: Option<&Path>, as_json: bool) -> Result<(), Failure> {
    let (sessions, prefixes) = (all()?, kept_prefixes(prefix_store)?);
    let age = |time: Option<SystemTime>| time.and_then(|time| time.elapsed().ok()).map(|age| age.as_secs());
    let mut out = Output::new();
    if as_json {
        let sessions: Vec<_> = sessions
            .iter()
            .map(|(name, bytes, used)| json!({"name": name, "bytes": bytes, "used_s_ago": age(*used)}))
            .collect();
        let prefixes: Vec<_> = prefixes
            .iter()
            .map(|model| {
                json!({
                    "folder": model.path.display().to_string(),
                    "files": model.files,
                    "bytes": model.bytes,
                    "used_s_ago": age(model.used),
                })
            })
            .collect();
        return out.json(&json!({"sessions": sessions, "prefixes": prefixes}));
    }
    if sessions.is_empty() {
        out.write("no conversations are kept; forebay chat --session NAME keeps one\n")?;
    }
    for (name, bytes, used) in &sessions {
        out.write(&format!("{name:<24} {:>10}  {}\n", ByteSize(*bytes).to_string(), ago(age(*used))))?;
    }
    for model in &prefixes {
        out.write(&format!(
            "prefixes of one model    {:>10}  {}, {} files in {}\n",
            ByteSize(model.bytes).to_string(),
            ago(age(model.used)),
            model.files,
            model.path.display()
        ))?;
    }
    Ok(())
}

fn ago(seconds: Option<u64>) -> String {
    match seconds {
        None => "used at an unknown time".to_owned(),
        Some(seconds) if seconds < 120 => "used just now".to_owned(),
        Some(seconds) if seconds < 7200 => format!("used {} minutes ago", seconds / 60),
        Some(seconds) if seconds < 172_800 => format!("used {} hours ago", seconds / 3600),
        Some(seconds) => format!("used {} days ago", seconds / 86_400),
    }
}

fn remove(names: &[String]) -> Result<(), Failure> {
    for name in names {
        let path = file_of(name)?;
        fs::remove_file(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Failure::usage(format!("there is no conversation {name}; forebay sessions list shows all"))
            }
            _ => {
                Failure::runtime(format!("cannot delete {}: {error}; check its permissions", path.display()))
            }
        })?;
    }
    Ok(())
}

/// Removes the files of a store and its folders, and nothing else that may be in them.
fn remove_prefixes(named: Option<&Path>) -> Result<(), Failure> {
    for model in kept_prefixes(named)? {
        let failed = |error: io::Error| {
            Failure::runtime(format!(
                "cannot delete {}: {error}; check its permissions",
                model.path.display()
            ))
        };
        prefix::clear(&model.path).map_err(failed)?;
    }
    Ok(())
}
