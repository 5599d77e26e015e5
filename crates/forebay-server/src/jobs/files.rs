//! The files of clients and the results of batches, on disk: `ID.jsonl` the bytes, `ID.json` what is known of them.
//! Bytes without the other are no file yet.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::disk;
use crate::ids;

/// Most files at a time.
pub const MAX_FILES: usize = 10_000;
/// The first letters of a file's id.
const PREFIX: &str = "file-";

/// What a file is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Purpose {
    /// The requests of a batch.
    Batch,
    /// What came of them.
    BatchOutput,
}

impl Purpose {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Batch => "batch",
            Self::BatchOutput => "batch_output",
        }
    }
}

/// What is known of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileRecord {
    /// Its name in requests.
    pub id: String,
    /// Its size.
    pub bytes: u64,
    /// When it was complete, in seconds since 1970.
    pub created_at: u64,
    /// What the client calls it.
    pub filename: String,
    /// What it is for.
    pub purpose: Purpose,
}

/// Why a file is not taken.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is too large.
    #[error("the file is larger than {0} bytes; send it in parts, or start with a larger --max-file")]
    TooLarge(u64),
    /// There is no room for it.
    #[error(
        "files hold {used} of {limit} bytes, and there are {count} of at most {MAX_FILES}; delete some, or start with a larger --max-files"
    )]
    Full {
        /// Bytes of all files.
        used: u64,
        /// Bytes that they may have.
        limit: u64,
        /// How many there are.
        count: usize,
    },
    /// The disk.
    #[error("the file cannot be kept: {0}")]
    Io(#[from] io::Error),
}

#[derive(Debug, Default)]
struct Known {
    all: BTreeMap<String, FileRecord>,
    /// Bytes of files that are on their way.
    coming: u64,
}

impl Known {
    fn used(&self) -> u64 {
        self.all.values().map(|file| file.bytes).sum::<u64>() + self.coming
    }
}

/// All files. Clones are the same ones.
#[derive(Clone, Debug)]
pub struct Files {
    dir: PathBuf,
    most_file: u64,
    most_all: u64,
    known: Arc<Mutex<Known>>,
}

/// Whether this is `prefix` with the letters of an id behind it: such a name is safe as a file's name.
pub fn is_id(id: &str, prefix: &str) -> bool {
    id.strip_prefix(prefix).is_some_and(|rest| {
        rest.len() == 24 && rest.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
    })
}

/// An id that no file has yet.
pub fn new_id() -> String {
    format!("{PREFIX}{}", ids::random())
}

impl Files {
    /// Reads what is known of the files in `dir`. What cannot be understood is set aside.
    pub fn open(dir: PathBuf, most_file: u64, most_all: u64) -> io::Result<Self> {
        disk::private_dir(&dir)?;
        let mut known = Known::default();
        for entry in fs::read_dir(&dir)? {
            let path = entry?.path();
            let end = path.extension().unwrap_or_default().to_string_lossy().into_owned();
            let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            match end.as_str() {
                // Nobody was told of these.
                "part" | "tmp" if is_id(&stem, PREFIX) => _ = fs::remove_file(&path),
                "json" => match read_record(&path, &stem) {
                    Ok(record) => _ = known.all.insert(record.id.clone(), record),
                    Err(why) => disk::set_aside(&path, &why),
                },
                _ => {}
            }
        }
        Ok(Self { dir, most_file, most_all, known: Arc::new(Mutex::new(known)) })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Most bytes of a file.
    pub fn most_file(&self) -> u64 {
        self.most_file
    }

    /// Bytes of all files.
    pub fn used(&self) -> u64 {
        self.lock().used()
    }

    /// What is known of a file.
    pub fn get(&self, id: &str) -> Option<FileRecord> {
        self.lock().all.get(id).cloned()
    }

    /// All files, the newest first.
    pub fn all(&self) -> Vec<FileRecord> {
        let mut all: Vec<FileRecord> = self.lock().all.values().cloned().collect();
        all.sort_by(|one, other| (other.created_at, &other.id).cmp(&(one.created_at, &one.id)));
        all
    }

    /// Where the bytes of a file are. The id has to be one that was made here.
    pub fn data_path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.jsonl"))
    }

    fn record_path(&self, id: &str) -> PathBuf {
        self.dir.join(format!("{id}.json"))
    }

    /// The bytes of a file, to read.
    pub fn open_data(&self, id: &str) -> io::Result<File> {
        File::open(self.data_path(id))
    }

    /// Begins a file.
    pub fn begin(&self) -> Result<Upload, FileError> {
        let (used, count) = (self.used(), self.lock().all.len());
        if used >= self.most_all || count >= MAX_FILES {
            return Err(FileError::Full { used, limit: self.most_all, count });
        }
        let id = new_id();
        let path = self.dir.join(format!("{id}.part"));
        let file = disk::private_file().create_new(true).open(&path)?;
        Ok(Upload {
            id,
            path,
            file,
            bytes: 0,
            most: self.most_file,
            most_all: self.most_all,
            known: Arc::clone(&self.known),
        })
    }

    /// Keeps a file whose bytes have all come. It is there when this returns.
    pub fn keep(&self, upload: Upload, filename: String) -> Result<FileRecord, FileError> {
        upload.file.sync_all()?;
        let data = self.data_path(&upload.id);
        fs::rename(&upload.path, &data)?;
        let kept = disk::sync_dir(&self.dir)
            .and_then(|()| self.publish(upload.id.clone(), upload.bytes, filename, Purpose::Batch));
        if kept.is_err() {
            _ = fs::remove_file(&data);
        }
        Ok(kept?)
    }

    /// Makes a file of bytes that are there. Doing it again changes nothing.
    pub fn publish(
        &self,
        id: String,
        bytes: u64,
        filename: String,
        purpose: Purpose,
    ) -> io::Result<FileRecord> {
        let record = FileRecord { id, bytes, created_at: ids::now(), filename, purpose };
        let text = serde_json::to_vec(&record)?;
        disk::write_whole(&self.record_path(&record.id), &text)?;
        self.lock().all.insert(record.id.clone(), record.clone());
        Ok(record)
    }

    /// Deletes a file; false if there is none of this name.
    pub fn delete(&self, id: &str) -> io::Result<bool> {
        if self.get(id).is_none() {
            return Ok(false);
        }
        // Bytes without a record are no file: this order needs no other care.
        fs::remove_file(self.record_path(id))?;
        self.lock().all.remove(id);
        _ = fs::remove_file(self.data_path(id));
        Ok(true)
    }
}

fn read_record(path: &Path, stem: &str) -> Result<FileRecord, String> {
    let text = fs::read(path).map_err(|error| error.to_string())?;
    let record: FileRecord = serde_json::from_slice(&text).map_err(|error| error.to_string())?;
    if record.id != stem || !is_id(stem, PREFIX) {
        return Err(format!("it is about {:?}", record.id.chars().take(80).collect::<String>()));
    }
    let bytes =
        fs::metadata(path.with_extension("jsonl")).map_err(|error| format!("its bytes: {error}"))?.len();
    match bytes == record.bytes {
        true => Ok(record),
        false => Err(format!("its bytes: {} expected, {bytes} found", record.bytes)),
    }
}

/// A file on its way; dropped before it is kept, nothing of it stays.
#[derive(Debug)]
pub struct Upload {
    id: String,
    path: PathBuf,
    file: File,
    bytes: u64,
    most: u64,
    most_all: u64,
    known: Arc<Mutex<Known>>,
}

impl Upload {
    /// Takes more of it.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let more = bytes.len() as u64;
        if self.bytes + more > self.most {
            return Err(FileError::TooLarge(self.most));
        }
        {
            let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
            let used = known.used();
            if used + more > self.most_all {
                return Err(FileError::Full { used, limit: self.most_all, count: known.all.len() });
            }
            known.coming += more;
        }
        self.bytes += more;
        Ok(self.file.write_all(bytes)?)
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).coming -= self.bytes;
        // Gone already where it was kept.
        _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_made_here_are_names() {
        assert!(is_id(&new_id(), PREFIX));
        let long = format!("file-{}", "a".repeat(24));
        assert!(is_id(&long, PREFIX));
        for wrong in
            ["", "file-", "file-../../../../etc/passwd", "batch_aaaaaaaaaaaaaaaaaaaaaaaa", &long[1..]]
        {
            assert!(!is_id(wrong, PREFIX), "{wrong}");
        }
        assert!(!is_id(&long.to_uppercase(), PREFIX) && !is_id(&(long.clone() + "a"), PREFIX));
    }

    #[test]
    fn files_stay_and_what_is_half_there_or_wrong_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let open = || Files::open(dir.path().to_owned(), 10, 25).unwrap();
        let files = open();
        let mut upload = files.begin().unwrap();
        upload.write(b"123456").unwrap();
        assert!(matches!(upload.write(b"78901"), Err(FileError::TooLarge(10))));
        drop(upload);
        assert_eq!((files.used(), fs::read_dir(dir.path()).unwrap().count()), (0, 0));
        let keep = |bytes: &[u8]| {
            let mut upload = files.begin()?;
            upload.write(bytes)?;
            files.keep(upload, "in.jsonl".to_owned())
        };
        let [one, other] = [keep(b"1234567890").unwrap(), keep(b"1234567890").unwrap()];
        assert!(matches!(keep(b"123456"), Err(FileError::Full { used: 20, limit: 25, count: 2 })));
        assert!(files.delete(&other.id).unwrap() && !files.delete(&other.id).unwrap());
        let kept = keep(b"123456").unwrap();
        fs::write(dir.path().join(format!("{}.part", new_id())), b"12").unwrap();
        fs::write(files.data_path(&kept.id), b"12345").unwrap();
        fs::write(dir.path().join("file-1.json"), b"{}").unwrap();
        let again = open();
        assert_eq!(again.all(), [one], "{again:?}");
        let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
        assert_eq!(names.filter(|name| name.to_string_lossy().contains("damaged")).count(), 2);
    }
}
