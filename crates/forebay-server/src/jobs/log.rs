//! The results of a batch, appended line by line. A line that is whole is a result that is there for good.

use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::IgnoredAny;
use sha2::{Digest, Sha256};

use super::disk::{self, Line};

/// Most bytes of one result.
pub const MAX_RESULT: usize = 64 << 20;

/// The names of requests that have their result: digests, so that memory does not depend on how long names are.
#[derive(Debug, Default)]
pub struct Done(HashSet<[u8; 32]>);

impl Done {
    /// Adds a name; false if it was there.
    pub fn add(&mut self, custom_id: &str) -> bool {
        self.0.insert(Sha256::digest(custom_id).into())
    }

    /// Whether a name is there.
    pub fn has(&self, custom_id: &str) -> bool {
        self.0.contains(&<[u8; 32]>::from(Sha256::digest(custom_id)))
    }
}

/// What is looked at in a line.
#[derive(Deserialize)]
struct Named {
    custom_id: String,
    #[serde(rename = "response")]
    _response: IgnoredAny,
}

/// A file of results.
#[derive(Debug)]
pub struct ResultLog {
    file: File,
    /// Bytes of whole lines.
    len: u64,
    /// Whole lines.
    lines: u64,
    /// Whether there may be something behind them.
    unclean: bool,
}

impl ResultLog {
    /// Opens the file, or makes it. A torn line at its end is cut off; the names of the others are added to `done`.
    /// Lines that cannot be read are taken out: the file as it was is set aside.
    pub fn open(path: &Path, done: &mut Done) -> io::Result<Self> {
        let new = !path.exists();
        let mut file = disk::private_file().read(true).truncate(false).open(path)?;
        if new {
            disk::sync_dir(path.parent().unwrap_or(Path::new(".")))?;
        }
        let Scan { len, lines, damaged, torn } = scan(&file, done)?;
        if damaged > 0 {
            drop(file);
            file = without_damage(path, damaged)?;
            let len = file.metadata()?.len();
            return Ok(Self { file, len, lines, unclean: false });
        }
        if torn {
            tracing::warn!(file = %path.display(), at = len, "cut off a result that was half written; it is computed again");
            file.set_len(len)?;
            file.sync_all()?;
        }
        Ok(Self { file, len, lines, unclean: false })
    }

    /// Results in it.
    pub fn lines(&self) -> u64 {
        self.lines
    }

    /// Bytes of them.
    pub fn bytes(&self) -> u64 {
        self.len
    }

    /// Cuts off what an attempt to write left behind the last whole line.
    pub fn settle(&mut self) -> io::Result<()> {
        if self.unclean {
            self.file.set_len(self.len)?;
            self.unclean = false;
        }
        Ok(())
    }

    /// Appends a line, which must hold no line end. It lasts when this returns; after an error it does not
    /// count, and the next attempt begins where this one did.
    pub fn append(&mut self, line: &str) -> io::Result<()> {
        self.settle()?;
        self.unclean = true;
        self.file.seek(SeekFrom::Start(self.len))?;
        let bytes = format!("{line}\n");
        self.file.write_all(bytes.as_bytes())?;
        self.file.sync_data()?;
        self.unclean = false;
        self.len += bytes.len() as u64;
        self.lines += 1;
        Ok(())
    }
}

struct Scan {
    /// Bytes up to the torn line.
    len: u64,
    /// Good lines.
    lines: u64,
    /// Lines that are none, or double.
    damaged: u64,
    torn: bool,
}

fn name(line: &[u8]) -> Option<String> {
    serde_json::from_slice::<Named>(line).ok().map(|named| named.custom_id)
}

fn scan(file: &File, done: &mut Done) -> io::Result<Scan> {
    let mut reader = BufReader::new(file);
    let mut found = Scan { len: 0, lines: 0, damaged: 0, torn: false };
    while let Some(line) = disk::next_line(&mut reader, MAX_RESULT)? {
        match line {
            Line::Whole(bytes) => {
                let good = name(&bytes).is_some_and(|name| done.add(&name));
                found.lines += u64::from(good);
                found.damaged += u64::from(!good);
                found.len += bytes.len() as u64 + 1;
            }
            Line::TooLong => found.damaged += 1,
            Line::Torn(_) => found.torn = true,
        }
    }
    Ok(found)
}

/// The file again, with its good lines only.
fn without_damage(path: &Path, damaged: u64) -> io::Result<File> {
    let good: PathBuf = path.with_extension("tmp");
    let mut out = BufWriter::new(disk::private_file().truncate(true).open(&good)?);
    let (mut reader, mut own) = (BufReader::new(File::open(path)?), Done::default());
    while let Some(line) = disk::next_line(&mut reader, MAX_RESULT)? {
        if let Line::Whole(bytes) = line
            && name(&bytes).is_some_and(|name| own.add(&name))
        {
            out.write_all(&bytes)?;
            out.write_all(b"\n")?;
        }
    }
    out.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
    disk::set_aside(path, &format!("{damaged} results in it cannot be read; they are computed again"));
    std::fs::rename(&good, path)?;
    disk::sync_dir(path.parent().unwrap_or(Path::new(".")))?;
    disk::private_file().read(true).truncate(false).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str) -> String {
        serde_json::json!({"id": "batch_req_1", "custom_id": name, "response": {"body": "x\ny"}, "error": null})
            .to_string()
    }

    /// Cut anywhere, the results before the cut are there, and what is appended next makes the file whole.
    #[test]
    fn whatever_a_crash_leaves_whole_lines_count_and_torn_ones_do_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let whole = ["a", "b", "c"].map(|name| line(name) + "\n").concat();
        for cut in 0..=whole.len() {
            std::fs::write(&path, &whole[..cut]).unwrap();
            let mut done = Done::default();
            let mut log = ResultLog::open(&path, &mut done).unwrap();
            let lines = whole[..cut].matches('\n').count();
            assert_eq!(log.lines(), lines as u64, "cut at {cut}");
            for (at, name) in ["a", "b", "c"].into_iter().enumerate() {
                assert_eq!(done.has(name), at < lines, "cut at {cut}");
                if !done.has(name) {
                    log.append(&line(name)).unwrap();
                }
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), whole, "cut at {cut}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a torn line is no damage");
    }

    #[test]
    fn lines_that_are_none_are_taken_out_and_the_file_is_set_aside() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log.jsonl");
        let text = format!("{}\n\0\0\0\n{}\n{{\"custom_id\": 3}}\n{}\n", line("a"), line("a"), line("b"));
        std::fs::write(&path, &text).unwrap();
        let mut done = Done::default();
        let mut log = ResultLog::open(&path, &mut done).unwrap();
        assert_eq!(log.lines(), 2);
        log.append(&line("c")).unwrap();
        let want = ["a", "b", "c"].map(|name| line(name) + "\n").concat();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), want);
        assert_eq!(log.bytes(), want.len() as u64);
        assert_eq!(std::fs::read_to_string(dir.path().join("log.jsonl.damaged")).unwrap(), text);
    }
}
