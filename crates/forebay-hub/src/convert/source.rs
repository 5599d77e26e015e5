//! Where a checkpoint comes from: a folder, or something that hands out one file at a time, such as a [`hub`].

pub mod hub;

use std::io;
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_io::file::read_regular;
use forebay_store::catalog::{self, Catalog, CatalogError};
use forebay_store::folder;
use forebay_store::shard::{HeaderTensor, read_header};

use super::error::ConvertError;
use crate::digest::{Digest, FileDigest, hash_file};
use crate::known::Known;
use crate::output::file;
use crate::pack::identity;

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
    /// What tells it from any other file of this name: its digest as in `sha256:...`, or `modified:` and a time.
    pub identity: String,
    /// What its bytes are compared with when it is taken, if that is known.
    pub digest: Option<Digest>,
}

/// A checkpoint. Files are counted in the order of [`files`](Self::files).
pub trait Source {
    /// What messages call it.
    fn place(&self) -> PathBuf;

    /// The weight files in byte order of their names, with their headers.
    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError>;

    /// The small file `name`, such as `config.json`; `None` if there is none.
    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError>;

    /// Makes weight file `file` readable and says where it is, until [`release`](Self::release). If its
    /// [digest](SourceFile::digest) is known, all of its bytes have been compared with it.
    fn take(&mut self, file: usize, cancel: &CancelToken) -> Result<PathBuf, ConvertError>;

    /// Weight file `file` is not needed any more.
    fn release(&mut self, file: usize);

    /// Bytes of disk that taking weight file `file` fills.
    fn room(&self, file: usize) -> u64;

    /// Whether every file can be taken at any time at no cost. If not, what is needed later of a file is set aside
    /// before the file is released, so that one file at a time is enough.
    fn keeps_files(&self) -> bool;

    /// Whether the file at `path` still is the one that was planned with.
    fn is_unchanged(&self, path: &Path, planned: &SourceFile) -> Result<bool, ConvertError> {
        let (size, tensors) = read_header(path)?;
        Ok(size == planned.size && tensors == planned.tensors)
    }

    /// Repository and commit, if the source is on a hub.
    fn on_hub(&self) -> Option<(String, String)> {
        None
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
    /// The weight files, and what is known of their bytes until that was checked.
    files: Vec<(PathBuf, Option<FileDigest>)>,
    /// What is known of all files, once it was looked up.
    known: Option<Known>,
}

impl LocalFolder {
    /// The checkpoint in `dir`.
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), files: Vec::new(), known: None }
    }

    fn known(&mut self, name: &str) -> Result<Option<FileDigest>, ConvertError> {
        if self.known.is_none() {
            self.known = Some(Known::of_folder(&self.dir)?);
        }
        Ok(self.known.as_ref().and_then(|known| known.digests.0.get(name)).cloned())
    }
}

impl Source for LocalFolder {
    fn place(&self) -> PathBuf {
        self.dir.clone()
    }

    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError> {
        let paths = catalog::list(&self.dir)?;
        if paths.is_empty() {
            let (dir, advice) = (self.dir.clone(), folder::advice(&self.dir));
            return Err(CatalogError::NoShards { dir, advice }.into());
        }
        self.files.clear();
        let mut files = Vec::new();
        for path in paths {
            let (size, tensors) = read_header(&path)?;
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let known = self.known(&name)?;
            let digest = known.as_ref().map(|known| known.digest.clone());
            let found = digest.clone().map(|digest| FileDigest { size, digest });
            // Its length is known before its bytes are.
            if let Some(difference) =
                known.as_ref().zip(found).and_then(|(known, found)| known.difference(&found))
            {
                return Err(ConvertError::Damaged { path, difference });
            }
            let identity = match &digest {
                Some(digest) => digest.to_string(),
                None => format!("modified:{}", modified(&path)?),
            };
            files.push(SourceFile { name, size, tensors, identity, digest });
            self.files.push((path, known));
        }
        Ok(files)
    }

    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError> {
        let path = self.dir.join(name);
        match read_regular(&path, MAX_TEXT_BYTES) {
            Ok(bytes) => {
                let known = self.known(name)?;
                let found = known.as_ref().map(|known| FileDigest::of(known.digest.algorithm(), &bytes));
                match known.zip(found).and_then(|(known, found)| known.difference(&found)) {
                    Some(difference) => Err(ConvertError::Damaged { path, difference }),
                    None => Ok(Some(bytes)),
                }
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(ConvertError::at("read", &path, cause)),
        }
    }

    fn take(&mut self, file: usize, cancel: &CancelToken) -> Result<PathBuf, ConvertError> {
        let Some((path, known)) = self.files.get_mut(file) else { return Ok(PathBuf::new()) };
        if let Some(proof) = known {
            check(path, proof, cancel)?;
            *known = None;
        }
        Ok(path.clone())
    }

    fn release(&mut self, _: usize) {}

    fn room(&self, _: usize) -> u64 {
        0
    }

    fn keeps_files(&self) -> bool {
        true
    }

    fn on_hub(&self) -> Option<(String, String)> {
        identity::cached_as(&self.dir)
    }
}

/// Compares all bytes of a file with what is known of them.
fn check(path: &Path, proof: &FileDigest, cancel: &CancelToken) -> Result<(), ConvertError> {
    let found = hash_file(path, proof.digest.algorithm(), &mut |_| !cancel.is_cancelled())?;
    match proof.difference(&found.ok_or(ConvertError::Cancelled)?) {
        Some(difference) => Err(ConvertError::Damaged { path: path.to_owned(), difference }),
        None => Ok(()),
    }
}

/// When a file was last written, in nanoseconds since 1970.
pub(crate) fn modified(path: &Path) -> Result<u128, ConvertError> {
    let time = std::fs::metadata(path).and_then(|meta| file::modified(&meta));
    time.map_err(|cause| ConvertError::at("look at", path, cause))
}

/// The tensors of `files` by name; one that occurs twice is an error.
pub(super) fn catalog(place: &Path, files: &[SourceFile]) -> Result<Catalog, ConvertError> {
    let headers = files.iter().map(|file| {
        let shard = catalog::Shard { path: place.join(&file.name), size: file.size };
        (shard, file.tensors.clone())
    });
    Ok(Catalog::from_headers(place, headers, catalog::Options::default())?)
}
