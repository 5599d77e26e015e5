//! A file that is not complete yet: its bytes, and a journal of those that are on the disk for certain.
//!
//! The journal is written after the bytes it names have been synchronised, so it never claims too much. And if it did:
//! the whole file is hashed before it gets its name, so that a wrong journal costs a download and never gives a wrong
//! file.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use forebay_io::file::read_regular;
use forebay_store::json::parse_object;
use serde_json::{Value, json};

use crate::digest::Digest;
use crate::output::{FileError, file};

use super::error::GetError;
use super::listing::RemoteFile;
use super::ranges::Ranges;

/// Changes when a journal changes its meaning.
const VERSION: u64 = 1;
/// The longest journal; real ones have a few hundred bytes.
const MAX_JOURNAL: u64 = 4 << 20;

/// Where an incomplete file and its journal are, and what it will be.
pub(super) struct Part {
    /// The bytes, at their places.
    pub path: PathBuf,
    /// Which of them count.
    pub journal: PathBuf,
    /// Bytes when it is complete.
    pub size: u64,
    /// What will prove it.
    pub digest: Digest,
}

impl Part {
    /// What will be the file `to`, which lies beside it.
    pub fn of(to: &Path, file: &RemoteFile) -> Self {
        let with = |suffix: &str| {
            let mut path = to.as_os_str().to_owned();
            path.push(suffix);
            PathBuf::from(path)
        };
        let (path, journal) = (with(".forebay.incomplete"), with(".forebay.ranges"));
        Self { path, journal, size: file.size, digest: file.digest.clone() }
    }

    /// What an earlier run has left, without changing anything.
    pub fn found(&self) -> Ranges {
        let long = fs::metadata(&self.path).is_ok_and(|meta| meta.is_file() && meta.len() == self.size);
        if long { self.journalled().unwrap_or_default() } else { Ranges::default() }
    }

    /// Opens the file, at its full length, and says what of it is there.
    pub fn open(&self) -> Result<(File, Ranges), GetError> {
        let done = self.found();
        let failed = |cause| GetError::at("write", &self.path, cause);
        if done.bytes() == 0 {
            // Whatever is there proves nothing; a longer file or a link must not stay.
            self.discard()?;
        }
        let open = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&self.path);
        let file = open.map_err(failed)?;
        file.set_len(self.size).map_err(failed)?;
        Ok((file, done))
    }

    /// Makes `done` survive whatever happens to this process and this machine.
    pub fn note(&self, file: &File, done: &Ranges) -> Result<(), GetError> {
        file.sync_data().map_err(|cause| GetError::at("write", &self.path, cause))?;
        let ranges: Vec<[u64; 2]> = done.iter().map(|range| [range.start, range.end]).collect();
        let digest = self.digest.to_string();
        let text =
            json!({"version": VERSION, "digest": digest, "size": self.size, "ranges": ranges}).to_string();
        file::write_path(&self.journal, text.as_bytes())
            .map_err(|FileError { cause, .. }| GetError::at("write", &self.journal, cause))
    }

    /// Throws everything away.
    pub fn discard(&self) -> Result<(), GetError> {
        for path in [&self.journal, &self.path] {
            match fs::remove_file(path) {
                Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                    return Err(GetError::at("delete", path, cause));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The ranges of the journal, if it is one of this very file.
    fn journalled(&self) -> Option<Ranges> {
        let bytes = read_regular(&self.journal, MAX_JOURNAL).ok()?;
        let root = parse_object(&bytes).ok()?;
        let number = |key: &str| root.get(key).and_then(Value::as_u64);
        let ours = number("version") == Some(VERSION)
            && number("size") == Some(self.size)
            && root.get("digest")?.as_str() == Some(&self.digest.to_string());
        let range = |pair: &Value| -> Option<Range<u64>> {
            let [start, end] = pair.as_array()?.as_slice() else { return None };
            Some(start.as_u64()?..end.as_u64()?)
        };
        let list: Option<Vec<_>> = root.get("ranges")?.as_array()?.iter().map(range).collect();
        if ours { Ranges::from_ascending(list?, self.size) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tempfile::TempDir;

    fn part(dir: &TempDir) -> Part {
        Part {
            path: dir.path().join("x.incomplete"),
            journal: dir.path().join("x.ranges"),
            size: 100,
            digest: Digest::sha256(&"a".repeat(64)).unwrap(),
        }
    }

    #[test]
    fn what_was_noted_is_found_and_nothing_else() {
        let dir = TempDir::new().unwrap();
        let part = part(&dir);
        let (file, done) = part.open().unwrap();
        assert_eq!((done.bytes(), file.metadata().unwrap().len()), (0, 100));
        let some = Ranges::from_ascending([0..10, 20..100], 100).unwrap();
        part.note(&file, &some).unwrap();
        assert_eq!(part.found(), some);
        assert_eq!(part.open().unwrap().1, some);
        // Another file, another length, no bytes.
        let other = Part { digest: Digest::sha256(&"b".repeat(64)).unwrap(), ..self::part(&dir) };
        assert_eq!(other.found().bytes(), 0);
        assert_eq!(Part { size: 101, ..self::part(&dir) }.found().bytes(), 0);
        file.set_len(50).unwrap();
        assert_eq!(part.found().bytes(), 0);
        part.discard().unwrap();
        part.discard().unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        #[test]
        fn a_damaged_journal_claims_nothing_impossible(at in 0usize..120, byte in any::<u8>(), cut in 0usize..120) {
            let dir = TempDir::new().unwrap();
            let part = part(&dir);
            let (file, _) = part.open().unwrap();
            part.note(&file, &Ranges::from_ascending([3..10, 20..90], 100).unwrap()).unwrap();
            let mut text = fs::read(&part.journal).unwrap();
            text.truncate(text.len() - cut.min(text.len()));
            if let Some(place) = text.get_mut(at) {
                *place = byte;
            }
            fs::write(&part.journal, &text).unwrap();
            prop_assert!(part.found().iter().all(|range| range.start < range.end && range.end <= 100));
        }
    }
}
