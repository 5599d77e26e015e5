//! The file of a usage history.
//!
//! ```text
//! forebay-usage 1
//! model 5f0c...
//! layer 3 tokens 1200 counts 17 0 4 ...
//! checksum 9e3779b97f4a7c15
//! ```
//!
//! The checksum is FNV-1a (64 bits) of every byte before its line.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forebay_io::file::{check_irregular, open_regular};

use super::{HistoryError, Layer, Layers, MAX_EXPERTS, MAX_LAYERS};

const FIRST_LINE: &str = "forebay-usage 1";
/// More than any model needs: 80 layers of 256 experts are 0.4 MB.
const MAX_BYTES: u64 = 64 << 20;
/// How long another process may hold the lock; a save takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(2);

/// `path` with `suffix` added to its name.
fn beside(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.file_name().map_or_else(OsString::new, OsString::from);
    name.push(suffix);
    path.with_file_name(name)
}

/// What the file holds; `None` if there is none.
pub(super) fn read(path: &Path, identity: &str) -> Result<Option<Layers>, HistoryError> {
    let unreadable = |source| HistoryError::Read { path: path.to_owned(), source };
    let file = match open_regular(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(unreadable(error)),
    };
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(unreadable)?;
    let damaged = |(line, what): (usize, String)| HistoryError::Damaged {
        path: path.to_owned(),
        line,
        what,
        aside: beside(path, ".damaged"),
    };
    if bytes.len() as u64 > MAX_BYTES {
        return Err(damaged((1, format!("more than {MAX_BYTES} bytes"))));
    }
    let text = String::from_utf8(bytes).map_err(|_| damaged((1, "not text".to_owned())))?;
    let (found, layers) = parse(&text).map_err(damaged)?;
    if found != identity {
        let (path, expected) = (path.to_owned(), identity.to_owned());
        return Err(HistoryError::OtherModel { path, expected, found });
    }
    Ok(Some(layers))
}

/// The text of a file.
pub(super) fn text(identity: &str, layers: &Layers) -> String {
    let mut text = format!("{FIRST_LINE}\nmodel {identity}\n");
    for (number, layer) in layers {
        let counts: Vec<String> = layer.counts.iter().map(u64::to_string).collect();
        text += &format!("layer {number} tokens {} counts {}\n", layer.tokens, counts.join(" "));
    }
    text += &format!("checksum {:016x}\n", fnv1a(text.as_bytes()));
    text
}

/// The model and the layers in a text, or the line that is wrong and why.
fn parse(text: &str) -> Result<(String, Layers), (usize, String)> {
    let first = text.lines().next().unwrap_or_default();
    if first != FIRST_LINE {
        let found: String = first.chars().take(40).collect();
        return Err((1, format!("expected {FIRST_LINE:?}, found {found:?}")));
    }
    let last = text.lines().count();
    let body = text.trim_end_matches('\n').rfind('\n').map_or(0, |at| at + 1);
    if text[body..] != format!("checksum {:016x}\n", fnv1a(&text.as_bytes()[..body])) {
        return Err((last, "the checksum does not match".to_owned()));
    }
    let mut lines = text[..body].lines().enumerate().skip(1);
    let model = lines.next().and_then(|(_, line)| line.strip_prefix("model "));
    let model = model.ok_or_else(|| (2, "expected the model".to_owned()))?;
    let mut layers = Layers::new();
    for (at, line) in lines {
        let wrong = |what: &str| (at + 1, what.to_owned());
        let (number, layer) = parse_layer(line).ok_or_else(|| wrong("expected a layer's counts"))?;
        if layers.len() == MAX_LAYERS || layers.insert(number, layer).is_some() {
            return Err(wrong("a layer too many"));
        }
    }
    Ok((model.to_owned(), layers))
}

fn parse_layer(line: &str) -> Option<(u32, Layer)> {
    let (number, rest) = line.strip_prefix("layer ")?.split_once(" tokens ")?;
    let (tokens, counts) = rest.split_once(" counts ")?;
    let number: u32 = number.parse().ok().filter(|number| (*number as usize) < MAX_LAYERS)?;
    let counts: Option<Vec<u64>> =
        counts.split_ascii_whitespace().take(MAX_EXPERTS + 1).map(|count| count.parse().ok()).collect();
    let counts = counts.filter(|counts| counts.len() <= MAX_EXPERTS)?;
    Some((number, Layer { counts, tokens: tokens.parse().ok()? }))
}

fn fnv1a(bytes: &[u8]) -> u64 {
    let step = |hash: u64, byte: &u8| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3);
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Keeps other processes from saving until it is dropped. The lock's file stays: to delete
/// it would let two processes lock different files of one name.
pub(super) fn lock(path: &Path) -> Result<File, HistoryError> {
    let failed = |source| HistoryError::Write { path: path.to_owned(), source };
    let path_of_lock = beside(path, ".lock");
    check_irregular(&path_of_lock).map_err(failed)?;
    let file =
        OpenOptions::new().write(true).create(true).truncate(false).open(path_of_lock).map_err(failed)?;
    let start = Instant::now();
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(error)) => return Err(failed(error)),
            Err(TryLockError::WouldBlock) if start.elapsed() > PATIENCE => {
                return Err(HistoryError::Busy { path: path.to_owned() });
            }
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Replaces the file as a whole: a new one is written, forced to the disk, and given the name.
pub(super) fn replace(path: &Path, text: &str) -> Result<(), HistoryError> {
    replace_with(path, |file| file.write_all(text.as_bytes()))
}

/// The same for any way to write, so that tests can let it fail.
pub(super) fn replace_with(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> Result<(), HistoryError> {
    // Only the holder of the lock comes here, so one name is enough.
    let temporary = beside(path, ".new");
    let written = check_irregular(&temporary).and_then(|()| {
        let mut file = File::create(&temporary)?;
        write(&mut file)?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    });
    written.map_err(|source| {
        let _ = fs::remove_file(&temporary);
        HistoryError::Write { path: path.to_owned(), source }
    })?;
    // The new name survives a power cut once its folder is on disk, where a system can do that.
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Ok(folder) = File::open(folder.unwrap_or(Path::new("."))) {
        let _ = folder.sync_all();
    }
    Ok(())
}
