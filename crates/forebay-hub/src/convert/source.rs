//! Where a checkpoint comes from: a folder, or something that hands out one file at a time.

use std::io;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use forebay_store::catalog::{self, Catalog, CatalogError};
use forebay_store::folder;
use forebay_store::shard::{HeaderTensor, read_header};

use super::error::ConvertError;
use crate::digests::Digests;

/// The largest of the small files that are copied.
const MAX_TEXT_BYTES: u64 = 256 << 20;

/// One weight file of a source, known by its header.
#[derive(Clone, Debug)]
pub struct SourceFile {
    /// Its name.
    pub name: String,
    /// Its size in bytes.
    pub size: u64,
    /// Its tensors.
    pub tensors: Vec<HeaderTensor>,
    /// What tells it from any other file of this name: `sha256:` and the digest, or `modified:` and a time.
    pub identity: String,
}

/// A checkpoint. Files are counted in the order of [`files`](Self::files).
pub trait Source {
    /// What messages call it.
    fn place(&self) -> PathBuf;

    /// The weight files in byte order of their names, with their headers.
    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError>;

    /// The small file `name`, such as `config.json`; `None` if there is none.
    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError>;

    /// Makes weight file `file` readable and says where it is, until [`release`](Self::release).
    fn take(&mut self, file: usize) -> Result<PathBuf, ConvertError>;

    /// Weight file `file` is not needed any more.
    fn release(&mut self, file: usize);

    /// Whether every file can be taken at any time at no cost. If not, what is needed later of a file is set aside
    /// before the file is released, so that one file at a time is enough.
    fn keeps_files(&self) -> bool;

    /// Whether the file at `path` still is the one that was planned with.
    fn is_unchanged(&self, path: &Path, planned: &SourceFile) -> Result<bool, ConvertError> {
        let (size, tensors) = read_header(path)?;
        Ok(size == planned.size && tensors == planned.tensors)
    }

    /// Whether the weights were quantised before, by something else: then what is lost on top is measured.
    fn is_quantised(&self) -> bool {
        false
    }
}

/// A folder with all files.
#[derive(Debug)]
pub struct LocalFolder {
    dir: PathBuf,
    paths: Vec<PathBuf>,
}

impl LocalFolder {
    /// The checkpoint in `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), paths: Vec::new() }
    }
}

impl Source for LocalFolder {
    fn place(&self) -> PathBuf {
        self.dir.clone()
    }

    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError> {
        self.paths = catalog::list(&self.dir)?;
        if self.paths.is_empty() {
            let (dir, advice) = (self.dir.clone(), folder::advice(&self.dir));
            return Err(CatalogError::NoShards { dir, advice }.into());
        }
        let digests = Digests::read(&self.dir)?.unwrap_or_default();
        let describe = |path: &PathBuf| {
            let (size, tensors) = read_header(path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let identity = match digests.0.get(&name).filter(|digest| digest.size == size) {
                Some(digest) => format!("sha256:{}", digest.sha256),
                None => format!("modified:{}", modified(path)?),
            };
            Ok(SourceFile { name, size, tensors, identity })
        };
        self.paths.iter().map(describe).collect()
    }

    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError> {
        let path = self.dir.join(name);
        let read = || {
            let size = std::fs::metadata(&path)?.len();
            match size > MAX_TEXT_BYTES {
                true => Err(io::Error::new(io::ErrorKind::InvalidData, "it is far too large")),
                false => std::fs::read(&path),
            }
        };
        match read() {
            Ok(bytes) => Ok(Some(bytes)),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(ConvertError::at("read", &path, cause)),
        }
    }

    fn take(&mut self, file: usize) -> Result<PathBuf, ConvertError> {
        Ok(self.paths.get(file).cloned().unwrap_or_default())
    }

    fn release(&mut self, _: usize) {}

    fn keeps_files(&self) -> bool {
        true
    }
}

/// When a file was last written, in nanoseconds since 1970.
pub(crate) fn modified(path: &Path) -> Result<u128, ConvertError> {
    let time = std::fs::metadata(path).and_then(|meta| meta.modified());
    let time = time.map_err(|cause| ConvertError::at("look at", path, cause))?;
    Ok(time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()))
}

/// The tensors of `files` by name; one that occurs twice is an error.
pub(super) fn catalog(place: &Path, files: &[SourceFile]) -> Result<Catalog, ConvertError> {
    let headers = files.iter().map(|file| {
        let shard = catalog::Shard { path: place.join(&file.name), size: file.size };
        (shard, file.tensors.clone())
    });
    Ok(Catalog::from_headers(place, headers, catalog::Options::default())?)
}
