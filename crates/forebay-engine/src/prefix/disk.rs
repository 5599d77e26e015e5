//! The store on disk: a folder per model, a file per block (docs/sessions.md).
//!
//! A file is written under another name, forced to the disk and renamed, so that it is there as a whole or not at all.
//! What was written once is never changed. A file that is not exactly what was written is removed and its block
//! computed again. Several processes may use one store: they see each other's files when they open it, and one that
//! another has removed is only missed.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use forebay_io::file::open_regular;
use forebay_model::kv::BLOCK;
use forebay_model::{KvBlock, KvDtype, KvLayout};
use forebay_store::prefix::{Header, Key, MAX_HEADER, MAX_TOKENS, PrefixError};
use sha2::{Digest, Sha256};

use super::tree::{NodeId, StoredBlock, Tree};

/// Files that a store holds at most, over all models: what it knows of each takes some hundred bytes of memory.
pub const MAX_FILES: usize = 8192;
/// Ending of a file's name.
const ENDING: &str = ".kv";
/// How files that are not complete are called.
const UNFINISHED: &str = ".new-";
/// An unfinished file that is older belongs to no process any more.
const ABANDONED: Duration = Duration::from_secs(3600);
const _: () = assert!(MAX_TOKENS == BLOCK, "a file holds a block");

/// Where prefixes are kept, and how much of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefixConfig {
    /// The folder. It is made if it is not there.
    pub dir: PathBuf,
    /// Bytes of files in it at most, over all models.
    pub limit: u64,
}

/// Why a store cannot be used. None of these is a reason not to answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KeepError {
    /// The folder cannot be made or read.
    #[error(
        "cannot use {} to keep prefixes: {source}; choose another folder with --prefix-store",
        path.display()
    )]
    Folder {
        /// The folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written: a full disk, no permission.
    #[error(
        "cannot keep this prefix in {}: {source}; what was kept before is as it was; free some space there or \
         choose another folder with --prefix-store",
        path.display()
    )]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// What a save did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Saved {
    /// Blocks that were written.
    pub blocks: usize,
    /// Bytes of their files.
    pub bytes: u64,
    /// Blocks were left out because the limit does not allow for more of this sequence.
    pub full: bool,
    /// Blocks were left for another time.
    pub unfinished: bool,
}

/// What a store holds of one model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFolder {
    /// The folder.
    pub path: PathBuf,
    /// Files in it.
    pub files: usize,
    /// Their bytes.
    pub bytes: u64,
    /// When one of them was used last.
    pub used: Option<SystemTime>,
}

/// A file of the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stored {
    pub key: Key,
    /// The position of its first token.
    pub first: u64,
}

/// What tells a block from all others.
pub(super) fn key_of(parent: &Key, tokens: &[u32]) -> Key {
    let mut digest = Sha256::new();
    digest.update(parent);
    tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
    let hash: [u8; 32] = digest.finalize().into();
    *hash.first_chunk().expect("a hash is longer")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The key in a file's name.
fn key_in(name: &OsStr) -> Option<Key> {
    let digits = name.to_str()?.strip_suffix(ENDING)?.as_bytes();
    let mut key = Key::default();
    if digits.len() != 2 * key.len() || digits.iter().any(u8::is_ascii_uppercase) {
        return None;
    }
    for (byte, pair) in key.iter_mut().zip(digits.chunks_exact(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(key)
}

pub(super) struct Disk {
    config: PrefixConfig,
    folder: PathBuf,
    identity: [u8; 32],
    value_bytes: u32,
    shape: [u32; 7],
    position_bytes: usize,
    hidden: usize,
    /// Numbers the unfinished files of this process.
    unfinished: u64,
    /// The path whose files were marked as used last.
    touched: Vec<NodeId>,
}

impl Disk {
    /// Opens the store and says what it holds of this model.
    pub fn open(
        config: PrefixConfig,
        identity: [u8; 32],
        layout: &KvLayout,
    ) -> Result<(Self, Vec<StoredBlock>), KeepError> {
        let folder = config.dir.join(hex(&identity[..16]));
        let path = folder.clone();
        let failed = |source| KeepError::Folder { path: path.clone(), source };
        make_private(&folder).map_err(failed)?;
        let value_bytes = match layout.dtype() {
            KvDtype::Bf16 => 2,
            KvDtype::F32 => 4,
        };
        let disk = Self {
            config,
            identity,
            value_bytes,
            shape: layout.shape().map(|value| value as u32),
            position_bytes: layout.position_bytes(),
            hidden: layout.hidden(),
            unfinished: 0,
            touched: Vec::new(),
            folder,
        };
        let mut found = Vec::new();
        for entry in fs::read_dir(&disk.folder).map_err(failed)?.take(2 * MAX_FILES) {
            let Ok(entry) = entry else { continue };
            remove_abandoned(&entry);
            let Some(key) = key_in(&entry.file_name()) else { continue };
            if found.len() < MAX_FILES
                && let Some(header) = disk.header_of(&key)
            {
                let file = Stored { key, first: header.first };
                found.push(StoredBlock { file, parent: header.parent, tokens: header.tokens });
            }
        }
        Ok((disk, found))
    }

    fn path(&self, key: &Key) -> PathBuf {
        self.folder.join(format!("{}{ENDING}", hex(key)))
    }

    /// The header of a file; one that is wrong is removed.
    fn header_of(&self, key: &Key) -> Option<Header> {
        let path = self.path(key);
        let file = open_regular(&path).ok()?;
        let len = file.metadata().ok()?.len();
        let mut bytes = Vec::new();
        file.take(MAX_HEADER as u64).read_to_end(&mut bytes).ok()?;
        let fits = |header: &Header| len == header.len() as u64 + header.payload && self.is_ours(header, key);
        match Header::parse(&bytes) {
            Ok(header) if fits(&header) => Some(header),
            // Of a program that is newer or older; that one may want it.
            Err(PrefixError::Version { .. }) => None,
            _ => {
                let _ = fs::remove_file(&path);
                None
            }
        }
    }

    /// Whether a header belongs to this model and to a file of this name, and its sizes are those of its rows.
    fn is_ours(&self, header: &Header, key: &Key) -> bool {
        header.model == self.identity
            && header.value_bytes == self.value_bytes
            && header.shape == self.shape
            && header.key == *key
            && key_of(&header.parent, &header.tokens) == *key
            && header.payload == self.payload(header.tokens.len(), header.carries.len())
            && (header.first == 0) == (header.parent == Key::default())
    }

    fn payload(&self, tokens: usize, carries: usize) -> u64 {
        (tokens * self.position_bytes + carries * self.hidden * 4) as u64
    }

    /// Reads the rows of a block that follows `parent` and has `tokens`, and its hidden states by place. `None` if the
    /// file is gone, or was not what was written: it is removed then.
    pub fn read(
        &mut self,
        stored: &Stored,
        parent: &Key,
        tokens: &[u32],
        block: &mut KvBlock,
    ) -> Option<Vec<(usize, Vec<f32>)>> {
        let path = self.path(&stored.key);
        let file = open_regular(&path).ok()?;
        let most = MAX_HEADER as u64 + self.payload(MAX_TOKENS, forebay_store::prefix::MAX_CARRIES);
        let mut bytes = Vec::new();
        file.take(most + 1).read_to_end(&mut bytes).ok()?;
        let carries = self.decode(&bytes, stored, parent, tokens, block);
        if carries.is_none() {
            let _ = fs::remove_file(&path);
        }
        carries
    }

    fn decode(
        &self,
        bytes: &[u8],
        stored: &Stored,
        parent: &Key,
        tokens: &[u32],
        block: &mut KvBlock,
    ) -> Option<Vec<(usize, Vec<f32>)>> {
        let header = Header::parse(bytes).ok()?;
        let payload = &bytes[header.len()..];
        let sound = self.is_ours(&header, &stored.key)
            && (header.first, &header.parent, &header.tokens[..]) == (stored.first, parent, tokens)
            && payload.len() as u64 == header.payload
            && crc32c::crc32c(payload) == header.checksum;
        if !sound {
            return None;
        }
        let (rows, states) = payload.split_at(tokens.len() * self.position_bytes);
        if !block.read_rows(tokens.len(), rows) {
            return None;
        }
        let states = states.chunks_exact(self.hidden * 4).map(|state| {
            let (values, _) = state.as_chunks();
            values.iter().map(|value| f32::from_le_bytes(*value)).collect()
        });
        Some(header.carries.iter().map(|at| *at as usize).zip(states).collect())
    }

    /// Writes the blocks that no file has, as long as `goes_on` says so.
    pub fn save(
        &mut self,
        tree: &mut Tree,
        last: &[NodeId],
        goes_on: &mut dyn FnMut() -> bool,
    ) -> Result<Saved, KeepError> {
        let last = tree.present(last);
        if self.touched != last {
            self.touch(tree, &last);
            self.touched.clone_from(&last);
        }
        let mut saved = Saved::default();
        let unsaved = tree.unsaved(&last);
        if unsaved.is_empty() {
            return Ok(saved);
        }
        let mut space = Space::of(&self.config).map_err(|source| self.folder_error(source))?;
        let kept: Vec<PathBuf> = last.iter().map(|id| self.path(&tree.key(Some(*id)))).collect();
        for id in unsaved {
            let (key, parent, first) = tree.place(id);
            if first > 0 && !tree.is_stored(&parent) {
                continue;
            }
            if !goes_on() {
                saved.unfinished = true;
                break;
            }
            let bytes = (MAX_HEADER as u64) + self.payload(tree.tokens(id).len(), tree.carries(id).len());
            while !space.fits(bytes) {
                let Some(path) = space.remove_oldest(&kept) else {
                    saved.full = true;
                    return Ok(saved);
                };
                // Its model may be another one, whose keys are nobody's here.
                if let Some(key) =
                    path.file_name().and_then(key_in).filter(|_| path.starts_with(&self.folder))
                {
                    tree.forget_stored(&key);
                }
            }
            let written = self.write(tree, id, key, parent, first)?;
            space.add(self.path(&key), written);
            saved.blocks += 1;
            saved.bytes += written;
            for old in tree.saved(id, Stored { key, first }) {
                let _ = fs::remove_file(self.path(&old.key));
            }
        }
        self.touch(tree, &last);
        sync_folder(&self.folder).map_err(|source| self.folder_error(source))?;
        Ok(saved)
    }

    fn folder_error(&self, source: io::Error) -> KeepError {
        KeepError::Folder { path: self.folder.clone(), source }
    }

    /// Writes one block and returns the bytes of its file.
    fn write(
        &mut self,
        tree: &Tree,
        id: NodeId,
        key: Key,
        parent: Key,
        first: u64,
    ) -> Result<u64, KeepError> {
        let tokens = tree.tokens(id).to_vec();
        let mut payload = Vec::with_capacity(self.payload(tokens.len(), tree.carries(id).len()) as usize);
        let block = tree.block(id).expect("only blocks in memory are written");
        block.write_rows(tokens.len(), &mut payload);
        let states = tree.carries(id).iter().flat_map(|(_, state)| state);
        payload.extend(states.flat_map(|value| value.to_le_bytes()));
        let header = Header {
            model: self.identity,
            value_bytes: self.value_bytes,
            shape: self.shape,
            first,
            parent,
            key,
            carries: tree.carries(id).iter().map(|(at, _)| *at as u32).collect(),
            tokens,
            payload: payload.len() as u64,
            checksum: crc32c::crc32c(&payload),
        };
        self.unfinished += 1;
        let unfinished = self.folder.join(format!("{UNFINISHED}{}-{}", std::process::id(), self.unfinished));
        let path = self.path(&key);
        let written = write_private(&unfinished, &header.to_bytes(), &payload)
            .and_then(|()| fs::rename(&unfinished, &path));
        if let Err(source) = written {
            let _ = fs::remove_file(&unfinished);
            return Err(KeepError::Write { path, source });
        }
        Ok(header.len() as u64 + header.payload)
    }

    /// Marks the files of a path as used now, the beginning as used last of all: it is needed by all the rest.
    fn touch(&self, tree: &Tree, path: &[NodeId]) {
        let now = SystemTime::now();
        for (depth, id) in path.iter().enumerate() {
            if let Some(stored) = tree.stored(*id) {
                let time = now - Duration::from_micros(depth as u64);
                // A file that another process removed is none to keep.
                let file = OpenOptions::new().write(true).open(self.path(&stored.key));
                let _ = file.and_then(|file| file.set_modified(time));
            }
        }
    }
}

/// The files of a store, the least recently used first.
struct Space {
    files: std::collections::VecDeque<(PathBuf, u64)>,
    bytes: u64,
    limit: u64,
}

impl Space {
    fn of(config: &PrefixConfig) -> io::Result<Self> {
        let mut files = Vec::new();
        for folder in fs::read_dir(&config.dir)?.flatten() {
            files.extend(files_in(&folder.path()));
        }
        files.sort_by_key(|(_, _, used)| *used);
        let bytes = files.iter().map(|(_, bytes, _)| bytes).sum();
        let files = files.into_iter().map(|(path, bytes, _)| (path, bytes)).collect();
        Ok(Self { files, bytes, limit: config.limit })
    }

    fn fits(&self, more: u64) -> bool {
        self.files.len() < MAX_FILES && self.bytes.saturating_add(more) <= self.limit
    }

    fn add(&mut self, path: PathBuf, bytes: u64) {
        // It may have taken the place of an older one.
        self.files.retain(|(old, old_bytes)| {
            let is_new = *old != path;
            self.bytes -= if is_new { 0 } else { *old_bytes };
            is_new
        });
        self.bytes += bytes;
        self.files.push_back((path, bytes));
    }

    /// Removes the file that was used least recently, unless it is one of `kept`.
    fn remove_oldest(&mut self, kept: &[PathBuf]) -> Option<PathBuf> {
        let at = self.files.iter().position(|(path, _)| !kept.contains(path))?;
        let (path, bytes) = self.files.remove(at)?;
        self.bytes -= bytes;
        let _ = fs::remove_file(&path);
        Some(path)
    }
}

/// Path, bytes and last use of the prefix files in a folder; nothing if it cannot be read.
fn files_in(folder: &Path) -> Vec<(PathBuf, u64, SystemTime)> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let entries = entries.flatten().filter(|entry| key_in(&entry.file_name()).is_some());
    let all = entries.filter_map(|entry| {
        let found = entry.metadata().ok()?;
        Some((entry.path(), found.len(), found.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
    });
    all.collect()
}

/// What the store in `dir` holds, model by model; nothing if there is no such folder.
pub fn folders(dir: &Path) -> io::Result<Vec<ModelFolder>> {
    let entries = match fs::read_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut all = Vec::new();
    for path in entries.flatten().map(|entry| entry.path()) {
        let files = files_in(&path);
        if files.is_empty() {
            continue;
        }
        let bytes = files.iter().map(|(_, bytes, _)| bytes).sum();
        let used = files.iter().map(|(_, _, used)| *used).max();
        all.push(ModelFolder { path, files: files.len(), bytes, used });
    }
    all.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(all)
}

/// Removes the prefix files of a model's folder, finished or not, and the folder if nothing else is in it.
pub fn clear(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten() {
        let name = entry.file_name();
        let unfinished = name.to_str().is_some_and(|name| name.starts_with(UNFINISHED));
        if unfinished || key_in(&name).is_some() {
            fs::remove_file(entry.path())?;
        }
    }
    let _ = fs::remove_dir(folder);
    Ok(())
}

fn remove_abandoned(entry: &fs::DirEntry) {
    let unfinished = entry.file_name().to_str().is_some_and(|name| name.starts_with(UNFINISHED));
    let age = || entry.metadata().ok()?.modified().ok()?.elapsed().ok();
    if unfinished && age().is_some_and(|age| age > ABANDONED) {
        let _ = fs::remove_file(entry.path());
    }
}

/// Makes a folder that only its owner can enter; one that is there stays as it is.
fn make_private(folder: &Path) -> io::Result<()> {
    if let Some(parent) = folder.parent() {
        private_folders().recursive(true).create(parent)?;
    }
    match private_folders().create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        done => done,
    }
}

fn private_folders() -> fs::DirBuilder {
    #[allow(unused_mut, reason = "only some systems have modes")]
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder
}

/// Writes a new file that only its owner can read, down to the disk.
fn write_private(path: &Path, header: &[u8], payload: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    // One of an earlier process with our number.
    let _ = fs::remove_file(path);
    let mut file = options.open(path)?;
    file.write_all(header)?;
    file.write_all(payload)?;
    file.sync_all()
}

/// Forces names to the disk, where a system can do that.
fn sync_folder(folder: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests;
