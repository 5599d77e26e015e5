//! Where files go: a folder of the user's, or the cache that Hugging Face's own tools share.
//!
//! The cache holds every file once, named by its digest, and a folder of links for every commit:
//! `models--owner--name/blobs/DIGEST`, `snapshots/COMMIT/NAME` (relative links), `refs/REVISION` (the commit). Other
//! tools find what Forebay has fetched and the other way round. Incomplete files have names that other tools do not
//! look for: they would take a file with holes for the beginning of one.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use crate::output::{FileError, file, folder};

use super::error::GetError;
use super::listing::{Listing, RemoteFile};
use super::name;
use super::part::Part;
use super::record::{Fetched, Record};

/// Name of the file that is held while a model is fetched.
const LOCK: &str = "forebay.lock";

/// Where a model goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// The cache in this folder (`HF_HUB_CACHE`).
    Cache(PathBuf),
    /// Plain files in this folder.
    Folder(PathBuf),
}

/// The places of one commit's files.
pub(super) struct Place {
    /// The folder that is a model in the end.
    pub folder: PathBuf,
    /// The repository's folder in the cache, if it goes there.
    repo_dir: Option<PathBuf>,
    /// What was fetched.
    pub record: PathBuf,
    /// Where the lock is.
    locks: PathBuf,
}

/// What of a file is there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// All of it, and it was verified.
    Verified,
    /// Something of the right length that nobody has verified.
    Unchecked,
    /// So many bytes of an incomplete file.
    Part(u64),
}

impl Place {
    pub fn new(target: &Target, listing: &Listing) -> Self {
        match target {
            Target::Folder(dir) => {
                let ours = dir.join(name::OURS);
                Self { folder: dir.clone(), repo_dir: None, record: ours.join("get.json"), locks: ours }
            }
            Target::Cache(root) => {
                let folder_name = format!("models--{}", listing.repo.as_str().replace('/', "--"));
                let repo = root.join(&folder_name);
                Self {
                    folder: repo.join("snapshots").join(&listing.commit),
                    record: repo.join("forebay").join(format!("{}.json", listing.commit)),
                    locks: root.join(".locks").join(&folder_name),
                    repo_dir: Some(repo),
                }
            }
        }
    }

    /// The file itself: a blob of the cache, or the file in the user's folder.
    pub fn target(&self, file: &RemoteFile) -> PathBuf {
        match &self.repo_dir {
            Some(repo) => repo.join("blobs").join(file.digest.hex()),
            None => self.folder.join(&file.name),
        }
    }

    /// Where it grows.
    pub fn part(&self, file: &RemoteFile) -> Part {
        Part::of(&self.target(file), file)
    }

    /// Takes the folder for this process.
    pub fn lock(&self, repo: &str) -> Result<File, GetError> {
        let path = self.locks.join(LOCK);
        make_folder_of(&path)?;
        folder::lock(&self.locks, LOCK)?.ok_or_else(|| GetError::Busy { repo: repo.to_owned(), lock: path })
    }

    /// Everything that was verified: of this commit, and in the cache of others, which share files with it.
    pub fn verified(&self, listing: &Listing) -> Result<Vec<Record>, GetError> {
        let own = Record::read(&self.record)?;
        let Some(repo) = &self.repo_dir else {
            if let Some(own) =
                own.as_ref().filter(|own| own.commit != listing.commit || own.repo != listing.repo.as_str())
            {
                return Err(GetError::OtherModel {
                    dir: self.folder.clone(),
                    found: format!("{}@{}", own.repo, own.commit),
                    asked: format!("{}@{}", listing.repo, listing.commit),
                });
            }
            return Ok(own.into_iter().collect());
        };
        let entries = fs::read_dir(repo.join("forebay")).into_iter().flatten().flatten();
        let others = entries.map(|entry| entry.path()).filter(|path| *path != self.record);
        // What another record says is a saving, not a need.
        Ok(own.into_iter().chain(others.filter_map(|path| Record::read(&path).ok().flatten())).collect())
    }

    /// What is there of a file.
    pub fn found(&self, repo: &str, file: &RemoteFile, verified: &[Record]) -> Result<Found, GetError> {
        let target = self.target(file);
        let part = || Found::Part(self.part(file).found().bytes());
        match fs::metadata(&target) {
            Ok(meta) if meta.is_file() && meta.len() == file.size => {
                let seen =
                    |at: &&Fetched| at.proof == file.proof() && at.modified == file::modified(&meta).ok();
                let is_verified = match self.repo_dir {
                    Some(_) => verified.iter().any(|record| record.files.values().any(|at| seen(&at))),
                    None => verified.iter().any(|record| record.files.get(&file.name).filter(seen).is_some()),
                };
                Ok(if is_verified { Found::Verified } else { Found::Unchecked })
            }
            // Not what its name in the cache says: it is fetched again.
            Ok(meta) if meta.is_file() && self.repo_dir.is_some() => Ok(part()),
            Ok(_) => Err(self.occupied(repo, file)),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(part()),
            Err(cause) => Err(GetError::at("look at", &target, cause)),
        }
    }

    /// What to record of a file that is in its place and was verified.
    pub fn fetched(&self, file: &RemoteFile) -> Result<Fetched, GetError> {
        let target = self.target(file);
        let meta = fs::metadata(&target).map_err(|cause| GetError::at("look at", &target, cause))?;
        Ok(Fetched { proof: file.proof(), modified: file::modified(&meta).ok() })
    }

    /// Something else is where a file should go.
    pub fn occupied(&self, repo: &str, file: &RemoteFile) -> GetError {
        GetError::Occupied { path: self.target(file), repo: repo.to_owned(), file: file.name.clone() }
    }

    /// Whether a file that turned out to be another may be replaced.
    pub fn may_replace(&self) -> bool {
        // A blob's name is its digest: nobody can have meant another.
        self.repo_dir.is_some()
    }

    /// Gives a complete file its name.
    pub fn publish(&self, file: &RemoteFile) -> Result<(), GetError> {
        let (part, target) = (self.part(file), self.target(file));
        fs::rename(&part.path, &target).map_err(|cause| GetError::at("write", &target, cause))?;
        target.parent().into_iter().for_each(file::sync_folder);
        part.discard()
    }

    /// Shows a file of the cache under its name in the folder of its commit.
    pub fn link(&self, file: &RemoteFile, name: &str) -> Result<(), GetError> {
        if self.repo_dir.is_none() {
            return Ok(());
        }
        let link = self.folder.join(name);
        make_folder_of(&link)?;
        let up = "../".repeat(2 + name.matches('/').count());
        let relative = PathBuf::from(format!("{up}blobs/{}", file.digest.hex()));
        if fs::read_link(&link).is_ok_and(|found| found == relative) {
            return Ok(());
        }
        let failed = |cause| GetError::at("write", &link, cause);
        match fs::remove_file(&link) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => return Err(failed(cause)),
            _ => {}
        }
        let blob = self.target(file);
        let linked = symlink(&relative, &link).or_else(|_| fs::hard_link(&blob, &link));
        linked.or_else(|_| fs::copy(&blob, &link).map(drop)).map_err(failed)
    }

    /// Notes in the cache which commit a revision stands for.
    pub fn refer(&self, listing: &Listing) -> Result<(), GetError> {
        let Some(repo) = &self.repo_dir else { return Ok(()) };
        if listing.revision.eq_ignore_ascii_case(&listing.commit) {
            return Ok(());
        }
        let path = repo.join("refs").join(&listing.revision);
        make_folder_of(&path)?;
        file::write_path(&path, listing.commit.as_bytes())
            .map_err(|FileError { cause, .. }| GetError::at("write", &path, cause))
    }
}

/// Makes the folder that `path` is in.
pub(super) fn make_folder_of(path: &Path) -> Result<(), GetError> {
    let Some(folder) = path.parent() else { return Ok(()) };
    fs::create_dir_all(folder).map_err(|cause| GetError::at("create", folder, cause))
}

fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    #[cfg(unix)]
    return std::os::unix::fs::symlink(target, link);
    #[cfg(windows)]
    return std::os::windows::fs::symlink_file(target, link);
    #[cfg(not(any(unix, windows)))]
    return {
        let _ = (target, link);
        Err(io::ErrorKind::Unsupported.into())
    };
}
