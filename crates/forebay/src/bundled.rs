//! The small model inside the program, so that a first run needs nothing else.
//!
//! Its files are unpacked to the user's cache, in a folder named after their contents. Every run checks each
//! file there (size, SHA-256) and writes it again if it is missing or damaged: under another name first, then
//! renamed, so that no other process ever sees half a file and any number of first runs may race.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

struct BundledFile {
    name: &'static str,
    bytes: &'static [u8],
    /// In hexadecimal, from `build.rs`.
    sha256: &'static str,
}

macro_rules! bundled {
    ($($name:literal),* $(,)?) => {
        [$(BundledFile {
            name: $name,
            bytes: include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/demo/", $name)),
            sha256: env!(concat!("DEMO_SHA256_", $name)),
        }),*]
    };
}

static FILES: [BundledFile; 6] = bundled![
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
];

/// A temporary file this old belongs to a run that was killed: writing one takes seconds.
const LEFT_OVER: Duration = Duration::from_secs(3600);

/// The bundled model, unpacked.
pub struct Unpacked {
    /// Its folder.
    pub dir: PathBuf,
    /// Files that were there with wrong contents and have been replaced.
    pub repaired: Vec<&'static str>,
}

/// Why the bundled model cannot be unpacked.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot write the bundled model to {}: {cause}; set FOREBAY_CACHE to a folder that can be written, \
     or name a model with --model",
    path.display()
)]
pub struct UnpackError {
    path: PathBuf,
    cause: io::Error,
}

impl UnpackError {
    /// `path` cannot be written; names what is in its way, if that is why.
    fn new(path: &Path, cause: io::Error) -> Self {
        let own = |path: &Path, cause: &str| Self { path: path.to_owned(), cause: io::Error::other(cause) };
        if path.is_dir() {
            return own(path, "a folder is in the way; remove it");
        }
        match path.ancestors().skip(1).find(|folder| folder.exists()) {
            Some(file) if !file.is_dir() => own(file, "that is not a folder"),
            _ => Self { path: path.to_owned(), cause },
        }
    }
}

/// Names and contents of those of the bundled model's files that are called so.
pub fn files<'a>(names: &'a [&str]) -> impl Iterator<Item = (&'static str, &'static [u8])> + 'a {
    FILES.iter().filter(|file| names.contains(&file.name)).map(|file| (file.name, file.bytes))
}

/// Makes sure that the bundled model lies complete and undamaged under `cache`.
pub fn unpack(cache: &Path) -> Result<Unpacked, UnpackError> {
    let dir = cache.join("models").join(folder_name());
    remove_left_overs(&dir, LEFT_OVER);
    let mut repaired = Vec::new();
    for file in &FILES {
        let path = dir.join(file.name);
        let found = state(&path, file);
        if found == State::Good {
            continue;
        }
        replace(&path, file.bytes).map_err(|cause| UnpackError::new(&path, cause))?;
        if found == State::Damaged {
            repaired.push(file.name);
        }
    }
    Ok(Unpacked { dir, repaired })
}

/// `demo-` and the start of a digest over all digests: another model never shares the folder.
fn folder_name() -> String {
    let all = FILES.iter().fold(Sha256::new(), |hash, file| hash.chain_update(file.sha256));
    format!("demo-{}", &hex(&all.finalize())[..16])
}

#[derive(PartialEq, Eq)]
enum State {
    Absent,
    Damaged,
    Good,
}

fn state(path: &Path, file: &BundledFile) -> State {
    match digest(path, file.bytes.len() as u64) {
        Ok(Some(found)) if found == file.sha256 => State::Good,
        Err(error) if error.kind() == io::ErrorKind::NotFound => State::Absent,
        // What cannot be read is replaced; if that fails too, the error says so.
        _ => State::Damaged,
    }
}

/// The SHA-256 of a file, or `None` if its size is not `size`. Reads in pieces: the memory plan of a run has no
/// room for whole files.
fn digest(path: &Path, size: u64) -> io::Result<Option<String>> {
    let meta = fs::metadata(path)?;
    // Asked before opening: opening a pipe would wait for its writer.
    if !meta.is_file() || meta.len() != size {
        return Ok(None);
    }
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut piece = vec![0; 1 << 18];
    loop {
        match file.read(&mut piece)? {
            0 => return Ok(Some(hex(&hash.finalize()))),
            n => hash.update(&piece[..n]),
        }
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Puts a file with these bytes at `path`, in one step for everybody else.
pub fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let unique = format!(".{name}.{}-{:?}.tmp", std::process::id(), std::thread::current().id());
    let temporary = folder.join(unique.replace(['(', ')'], ""));
    let written = write_through(&temporary, bytes).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Removes what killed runs left: temporary files in `dir` that nobody has written to for `age`. They only
/// take space, so one that stays is no error.
fn remove_left_overs(dir: &Path, age: Duration) {
    let ours = |name: &str| {
        let file = FILES.iter().any(|file| name.strip_prefix('.').is_some_and(|n| n.starts_with(file.name)));
        file && name.ends_with(".tmp")
    };
    let old = |entry: &fs::DirEntry| {
        let written = entry.metadata().and_then(|meta| meta.modified()).ok();
        let since = written.and_then(|time| SystemTime::now().duration_since(time).ok());
        since.is_some_and(|since| since >= age)
    };
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(ours) && old(&entry) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// `path` is new: whoever can write to the folder could have put a link there.
fn write_through(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _ = fs::remove_file(path);
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents_match(dir: &Path) -> bool {
        FILES.iter().all(|file| fs::read(dir.join(file.name)).is_ok_and(|bytes| bytes == file.bytes))
    }

    #[test]
    fn unpacks_once_and_repairs_what_is_damaged() {
        let cache = tempfile::tempdir().unwrap();
        let first = unpack(cache.path()).unwrap();
        assert!(first.repaired.is_empty() && contents_match(&first.dir));
        assert!(unpack(cache.path()).unwrap().repaired.is_empty());

        // One flipped bit, one truncation, one missing file.
        let weights = first.dir.join("model.safetensors");
        let mut bytes = fs::read(&weights).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        fs::write(&weights, &bytes).unwrap();
        fs::write(first.dir.join("tokenizer.json"), b"{").unwrap();
        fs::remove_file(first.dir.join("config.json")).unwrap();
        let again = unpack(cache.path()).unwrap();
        assert_eq!(again.repaired, ["tokenizer.json", "model.safetensors"]);
        assert!(contents_match(&again.dir));
        let names = fs::read_dir(&again.dir).unwrap().count();
        assert_eq!(names, FILES.len(), "temporary files must not stay");
    }

    #[test]
    fn first_runs_may_race() {
        let cache = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let unpacked = unpack(cache.path()).unwrap();
                    assert!(contents_match(&unpacked.dir));
                });
            }
        });
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_named_with_a_way_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, b"").unwrap();
        let message = unpack(&file).err().unwrap().to_string();
        assert!(message.contains("FOREBAY_CACHE") && message.contains("--model"), "{message}");
        assert!(message.contains(&*file.to_string_lossy()) && message.contains("not a folder"), "{message}");
    }

    #[test]
    fn a_folder_in_the_place_of_a_file_is_named() {
        let cache = tempfile::tempdir().unwrap();
        let in_the_way = cache.path().join("models").join(folder_name()).join("tokenizer.json");
        fs::create_dir_all(&in_the_way).unwrap();
        let message = unpack(cache.path()).err().unwrap().to_string();
        assert!(message.contains("tokenizer.json: a folder is in the way"), "{message}");
    }

    #[test]
    fn temporary_files_of_killed_runs_go_and_those_of_running_ones_stay() {
        let cache = tempfile::tempdir().unwrap();
        let dir = unpack(cache.path()).unwrap().dir;
        let dead = dir.join(".model.safetensors.1-ThreadId1.tmp");
        let other = dir.join(".mine.tmp");
        for path in [&dead, &other] {
            let file = File::create(path).unwrap();
            file.set_modified(SystemTime::now() - 2 * LEFT_OVER).unwrap();
        }
        let alive = dir.join(".config.json.2-ThreadId1.tmp");
        fs::write(&alive, b"").unwrap();
        unpack(cache.path()).unwrap();
        assert!(!dead.exists() && alive.exists() && other.exists());
    }
}
