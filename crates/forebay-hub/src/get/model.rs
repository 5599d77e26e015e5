//! All files of a model: what is missing, whether it fits, and fetching several at a time.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::digest::hash_file;
use crate::output::folder::free_bytes;

use super::Hub;
use super::client::lock;
use super::error::GetError;
use super::fetch::{Job, Run};
use super::listing::{Listing, RemoteFile};
use super::name::RepoId;
use super::permits::{Permits, Tally};
use super::place::{Found, Place, Target, make_folder_of};
use super::record::{Fetched, Record};
use super::watch::{Event, Stop, Watch};

/// Files that are fetched at the same time.
const FILES: usize = 4;
/// The record is not written more often than this while files are fetched.
const RECORD_EVERY: Duration = Duration::from_secs(2);

/// Which model, and where to.
#[derive(Clone, Debug)]
pub struct Request {
    /// The repository.
    pub repo: RepoId,
    /// Branch, tag or commit.
    pub revision: String,
    /// Patterns that choose files; none means all.
    pub include: Vec<String>,
    /// Where the files go.
    pub target: Target,
    /// Bytes that stay free on the disk.
    pub margin: u64,
}

/// A model that is about to be fetched: everything is known and nothing has been written.
pub struct Prepared<'h> {
    hub: &'h Hub,
    listing: Listing,
    place: Place,
    files: Vec<RemoteFile>,
    missing: u64,
    margin: u64,
}

/// What a run did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Got {
    /// The folder with the model.
    pub folder: PathBuf,
    /// Bytes that arrived in this run.
    pub arrived: u64,
    /// Files that had been verified before.
    pub kept: usize,
}

/// A file, and under which names it appears; in the cache files with the same bytes are one.
struct Group {
    file: RemoteFile,
    names: Vec<String>,
}

impl Hub {
    /// Lists the model and looks at what of it is there. Writes nothing.
    ///
    /// # Errors
    /// What [`list`](Self::list) fails with, patterns that choose nothing, and folders that hold something else.
    pub fn prepare(&self, request: &Request, watch: &Watch<'_>) -> Result<Prepared<'_>, GetError> {
        let listing = self.list(&request.repo, &request.revision, watch)?;
        let files = listing.select(&request.include)?;
        let place = Place::new(&request.target, &listing);
        let mut prepared = Prepared { hub: self, listing, place, files, missing: 0, margin: request.margin };
        let found = prepared.look()?;
        prepared.missing = found.iter().map(|(group, found)| still_missing(&group.file, *found)).sum();
        Ok(prepared)
    }
}

impl Prepared<'_> {
    /// The repository at its commit.
    pub fn listing(&self) -> &Listing {
        &self.listing
    }

    /// The files that were chosen.
    pub fn files(&self) -> &[RemoteFile] {
        &self.files
    }

    /// Bytes of the chosen files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }

    /// Bytes that are still to be fetched.
    pub fn missing(&self) -> u64 {
        self.missing
    }

    /// Bytes that are free on the disk that the files go to, where the system says.
    pub fn free(&self) -> Option<u64> {
        free_bytes(&self.place.folder)
    }

    /// The folder that holds the model in the end.
    pub fn folder(&self) -> &Path {
        &self.place.folder
    }

    /// Fetches what is missing and verifies all that was not verified before.
    ///
    /// # Errors
    /// The first failure; what has arrived by then stays, and the next run goes on from it.
    pub fn run(&self, watch: &Watch<'_>) -> Result<Got, GetError> {
        self.check_room(self.missing)?;
        let _lock: File = self.place.lock(self.listing.repo.as_str())?;
        // Another run may have ended just now.
        let found = self.look()?;
        self.check_room(found.iter().map(|(group, found)| still_missing(&group.file, *found)).sum())?;
        let record = Record {
            endpoint: self.hub.client.endpoint.to_string(),
            repo: self.listing.repo.to_string(),
            revision: self.listing.revision.clone(),
            commit: self.listing.commit.clone(),
            files: Record::read(&self.place.record)?.map(|record| record.files).unwrap_or_default(),
        };
        make_folder_of(&self.place.record)?;
        record.write(&self.place.record)?;

        let kept = found.iter().filter(|(_, found)| *found == Found::Verified);
        let kept = kept.map(|(group, _)| group.names.len()).sum();
        let stop = Stop::new(watch.cancel);
        let permits = Permits::new(self.hub.connections);
        let total = found.iter().map(|(group, _)| group.file.size).sum();
        let tally = Tally { total, ..Tally::default() };
        let run = Run {
            client: &self.hub.client,
            stop: &stop,
            watch: *watch,
            permits: &permits,
            tally: &tally,
            margin: self.margin,
        };
        let books = Books { place: &self.place, state: Mutex::new((record, Instant::now())) };
        let done = stop.during(|| self.hub.client.interrupt(), || self.all(&run, &found, &books));
        // Even after a failure: what is complete need not be hashed again.
        let written = lock(&books.state).0.write(&self.place.record);
        done?;
        written?;
        self.place.refer(&self.listing)?;
        let arrived = tally.arrived.load(Ordering::Relaxed);
        Ok(Got { folder: self.place.folder.clone(), arrived, kept })
    }

    /// Every file with what is there of it.
    fn look(&self) -> Result<Vec<(Group, Found)>, GetError> {
        let verified = self.place.verified(&self.listing)?;
        let mut groups: Vec<Group> = Vec::with_capacity(self.files.len());
        let mut places = BTreeMap::new();
        for file in &self.files {
            let place = *places.entry(self.place.target(file)).or_insert_with(|| {
                groups.push(Group { file: file.clone(), names: Vec::new() });
                groups.len() - 1
            });
            groups[place].names.push(file.name.clone());
        }
        let repo = self.listing.repo.as_str();
        let found = |group: Group| {
            let found = self.place.found(repo, &group.file, &verified)?;
            Ok((group, found))
        };
        groups.into_iter().map(found).collect()
    }

    fn check_room(&self, needed: u64) -> Result<(), GetError> {
        let margin = self.margin;
        match self.free() {
            Some(free) if needed > 0 && free < needed.saturating_add(margin) => {
                Err(GetError::NoRoom { dir: self.place.folder.clone(), needed, margin, free })
            }
            _ => Ok(()),
        }
    }

    /// Brings all files to their places, several at a time; the first failure ends it.
    fn all(&self, run: &Run<'_>, found: &[(Group, Found)], books: &Books<'_>) -> Result<(), GetError> {
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        thread::scope(|scope| {
            for _ in 0..FILES.min(found.len()) {
                scope.spawn(|| {
                    while let Some((group, found)) = found.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let done = run.stop.check().and_then(|()| self.one(run, group, *found, books));
                        if let Err(error) = done {
                            let mut failure = lock(&failure);
                            // Others stop because of the first, and it is the one to show.
                            if matches!(*failure, None | Some(GetError::Cancelled)) {
                                *failure = Some(error);
                            }
                            run.stop.fail();
                            return;
                        }
                    }
                });
            }
        });
        failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).map_or(Ok(()), Err)
    }

    fn one(&self, run: &Run<'_>, group: &Group, found: Found, books: &Books<'_>) -> Result<(), GetError> {
        let file = &group.file;
        let there = match found {
            Found::Verified => {
                run.tally.done.fetch_add(file.size, Ordering::Relaxed);
                true
            }
            Found::Unchecked => self.check(run, file)?,
            Found::Part(_) => false,
        };
        let part = self.place.part(file);
        if there {
            // Left behind by a kill between the name and the journal's end.
            part.discard()?;
        } else {
            make_folder_of(&part.path)?;
            let (url, about) = (self.hub.file_url(&self.listing, file)?, self.hub.about(&self.listing, file));
            let folder = &self.place.folder;
            Job { run, name: &file.name, about, url, part, folder }.fetch()?;
            self.place.publish(file)?;
        }
        let fetched = self.place.fetched(file)?;
        for name in &group.names {
            self.place.link(file, name)?;
            books.enter(name, &fetched)?;
            if !there {
                (run.watch.seen)(Event::Finished { file: name.clone() });
            }
        }
        (run.watch.seen)(run.tally.event());
        Ok(())
    }

    /// Whether a file that somebody else has put there is the right one.
    fn check(&self, run: &Run<'_>, file: &RemoteFile) -> Result<bool, GetError> {
        let path = self.place.target(file);
        let counted = AtomicU64::new(0);
        let found = hash_file(&path, file.digest.algorithm(), &mut |bytes| {
            counted.fetch_add(bytes, Ordering::Relaxed);
            run.tally.done.fetch_add(bytes, Ordering::Relaxed);
            (run.watch.seen)(run.tally.event());
            !run.stop.is_raised()
        })?;
        let found = found.ok_or(GetError::Cancelled)?;
        if found == file.proof() {
            return Ok(true);
        }
        run.tally.done.fetch_sub(counted.into_inner(), Ordering::Relaxed);
        if !self.place.may_replace() {
            return Err(self.place.occupied(self.listing.repo.as_str(), file));
        }
        (run.watch.seen)(Event::Restarted {
            file: file.name.clone(),
            why: "the file in the cache is damaged",
        });
        Ok(false)
    }
}

/// Bytes to fetch of a file. One that nobody has verified is most likely right.
fn still_missing(file: &RemoteFile, found: Found) -> u64 {
    match found {
        Found::Verified | Found::Unchecked => 0,
        Found::Part(bytes) => file.size.saturating_sub(bytes),
    }
}

/// The record as it grows.
struct Books<'a> {
    place: &'a Place,
    state: Mutex<(Record, Instant)>,
}

impl Books<'_> {
    fn enter(&self, name: &str, fetched: &Fetched) -> Result<(), GetError> {
        let mut state = lock(&self.state);
        state.0.files.insert(name.to_owned(), fetched.clone());
        if state.1.elapsed() >= RECORD_EVERY {
            state.0.write(&self.place.record)?;
            state.1 = Instant::now();
        }
        Ok(())
    }
}
