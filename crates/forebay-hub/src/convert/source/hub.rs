//! A checkpoint on a hub: headers first, then one file at a time.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forebay_core::CancelToken;
use forebay_store::catalog::CatalogError;
use forebay_store::shard::{ShardError, parse_header};

use super::super::error::ConvertError;
use super::super::manifest::begun_from;
use super::{MAX_TEXT_BYTES, Source, SourceFile, check};
use crate::digest::Digest;
use crate::get::{Event, GetError, Hub, Listing, RemoteFile, RepoId, Watch};
use crate::output::folder::{allocated, names};

/// Where a file of the source is while it is converted, within the folder of the result.
pub const WORK: &str = "forebay-convert.source";

/// A repository at one commit. Of its weight files at most one is on the disk, in a folder below that of the result:
/// fetched, verified, converted, deleted. It is on [`Job::run`](super::super::Job::run) that nobody else writes there
/// and that there is room.
pub struct HubSource<'a> {
    hub: &'a Hub,
    listing: Listing,
    files: Vec<RemoteFile>,
    work: PathBuf,
    watch: Watch<'a>,
}

impl<'a> HubSource<'a> {
    /// `repo` at `revision`, to be converted into `out`. If that was begun from a commit of `repo` before, this commit
    /// it is, whatever a branch has become meanwhile.
    ///
    /// # Errors
    /// A repository that cannot be listed, or that holds no checkpoint.
    pub fn open(
        hub: &'a Hub,
        repo: &RepoId,
        revision: &str,
        out: &Path,
        watch: Watch<'a>,
    ) -> Result<Self, ConvertError> {
        let begun = begun_from(out);
        let commit = begun.as_deref().and_then(|from| from.strip_prefix(&format!("{repo}@")));
        let listing = hub.list(repo, commit.unwrap_or(revision), &watch)?;
        let is_weights = |file: &&RemoteFile| file.name.ends_with(".safetensors") && !file.name.contains('/');
        let mut files: Vec<RemoteFile> = listing.files.iter().filter(is_weights).cloned().collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        if files.is_empty() {
            let advice = "a checkpoint to convert has them at its top".to_owned();
            return Err(CatalogError::NoShards { dir: place(&listing), advice }.into());
        }
        if listing.file("config.json").is_none() {
            let what = format!("{} has none, so it is no checkpoint", place(&listing).display());
            return Err(ConvertError::Source { name: "config.json".to_owned(), what });
        }
        Ok(Self { hub, listing, files, work: out.join(WORK), watch })
    }

    /// What the hub has.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }

    fn file(&self, file: usize) -> Result<&RemoteFile, ConvertError> {
        let none = || ConvertError::Source { name: format!("file {file}"), what: "there is none".to_owned() };
        self.files.get(file).ok_or_else(none)
    }

    /// Deletes whatever an earlier run has left that is not of this file: one at a time is what was announced.
    fn keep_only(&self, name: &str) -> Result<(), ConvertError> {
        let ours = format!("{name}.forebay.");
        for found in names(&self.work)?.into_iter().filter(|found| found != name && !found.starts_with(&ours))
        {
            let path = self.work.join(found);
            fs::remove_file(&path).map_err(|cause| ConvertError::at("delete", &path, cause))?;
        }
        Ok(())
    }
}

/// The repository and its commit.
fn place(listing: &Listing) -> PathBuf {
    PathBuf::from(format!("{}@{}", listing.repo, listing.commit))
}

impl Source for HubSource<'_> {
    fn place(&self) -> PathBuf {
        place(&self.listing)
    }

    fn files(&mut self) -> Result<Vec<SourceFile>, ConvertError> {
        let files: Vec<&RemoteFile> = self.files.iter().collect();
        let headers = self.hub.headers(&self.listing, &files, &self.watch)?;
        let describe = |(file, header): (&RemoteFile, Vec<u8>)| {
            let failed = |error| ShardError::Header { file: self.place().join(&file.name), error };
            let tensors = parse_header(header.get(8..).unwrap_or_default(), file.size).map_err(failed)?;
            let (name, digest) = (file.name.clone(), Some(file.digest.clone()));
            let identity = file.digest.to_string();
            Ok(SourceFile { name, size: file.size, tensors, identity, digest })
        };
        self.files.iter().zip(headers).map(describe).collect()
    }

    fn text(&mut self, name: &str) -> Result<Option<Vec<u8>>, ConvertError> {
        let Some(file) = self.listing.file(name) else { return Ok(None) };
        if file.size > MAX_TEXT_BYTES {
            let cause = io::Error::new(io::ErrorKind::InvalidData, "it is far too large");
            return Err(ConvertError::at("read", &self.place().join(name), cause));
        }
        let fetch = || {
            let bytes = self.hub.read_range(&self.listing, file, 0..file.size, &self.watch)?;
            let found = Digest::of(file.digest.algorithm(), &bytes);
            Ok::<_, ConvertError>((bytes, found))
        };
        let (mut bytes, mut found) = fetch()?;
        if found != file.digest {
            // Once more, as for weight files.
            (bytes, found) = fetch()?;
        }
        if found != file.digest {
            return Err(GetError::Mismatch {
                file: name.to_owned(),
                algorithm: file.digest.algorithm().name(),
                expected: file.digest.hex().to_owned(),
                found: found.hex().to_owned(),
            }
            .into());
        }
        Ok(Some(bytes))
    }

    fn take(&mut self, file: usize, cancel: &CancelToken) -> Result<PathBuf, ConvertError> {
        let remote = self.file(file)?;
        fs::create_dir_all(&self.work).map_err(|cause| ConvertError::at("create", &self.work, cause))?;
        self.keep_only(&remote.name)?;
        let path = self.work.join(&remote.name);
        if path.exists() {
            // Left whole by a run that was stopped while it converted it.
            match check(&path, &remote.proof(), cancel) {
                Err(ConvertError::Damaged { .. }) => {}
                other => return other.map(|()| path),
            }
            fs::remove_file(&path).map_err(|cause| ConvertError::at("delete", &path, cause))?;
        }
        (self.watch.seen)(Event::Started { file: remote.name.clone(), bytes: remote.size });
        let watch = Watch { cancel, seen: self.watch.seen };
        self.hub.fetch(&self.listing, remote, &path, &watch)?;
        Ok(path)
    }

    fn release(&mut self, file: usize) {
        if let Ok(remote) = self.file(file) {
            // Should it stay, the next file that is taken deletes it, or says why it cannot.
            let _ = fs::remove_file(self.work.join(&remote.name));
        }
    }

    fn room(&self, file: usize) -> u64 {
        let Ok(remote) = self.file(file) else { return 0 };
        let there =
            ["", ".forebay.incomplete"].map(|end| allocated(&self.work.join(remote.name.clone() + end)));
        remote.size.saturating_sub(there.into_iter().sum())
    }

    fn keeps_files(&self) -> bool {
        false
    }

    fn on_hub(&self) -> Option<(String, String)> {
        Some((self.listing.repo.to_string(), self.listing.commit.clone()))
    }
}
