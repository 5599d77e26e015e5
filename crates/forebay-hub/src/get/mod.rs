//! Models from a hub, byte for byte as it promised.
//!
//! - [`Hub`]: lists a repository at one commit, reads bytes of a file, fetches one file or a whole model.
//! - [`config`], [`name`], [`listing`]: what is asked for, and what a hub answers. Nothing of it is trusted.
//! - `client`, `url`, `proxy`, `pace`, `backoff`: one request and the next attempt. `fetch`, `part`, `ranges`: one file.
//! - `model`, `place`, [`record`]: all files of a model, and where they go.
//!
//! No file gets its name before all of its bytes have been hashed and the digest is the one that the hub listed
//! (conversion spec section 5). Whatever stops a fetch, the next one goes on where it ended. docs/get.md says more.

mod backoff;
mod client;
pub mod config;
mod error;
mod fetch;
mod headers;
pub mod listing;
mod model;
pub mod name;
mod pace;
mod part;
mod permits;
mod place;
mod proxy;
mod ranges;
pub mod record;
mod url;
mod watch;

use std::ops::Range;
use std::path::Path;

pub use config::{HubConfig, Proxies, Retry, Token};
pub use error::GetError;
pub use listing::{Listing, RemoteFile};
pub use model::{Got, Prepared, Request};
pub use name::{RepoId, parse_reference};
pub use place::Target;
pub use record::{Fetched, Record};
pub use watch::{Event, Watch};

use backoff::persist;
use client::{About, Again, Client, header, read_body};
use fetch::{Job, Run, content_range};
use part::Part;
use permits::{Permits, Tally};
use url::Url;
use watch::Stop;

/// The longest answer about a repository: tens of thousands of files. As a tree it may take a hundred times as much memory.
const MAX_ANSWER: u64 = 8 << 20;

/// A hub. Its connections are kept for the next request.
pub struct Hub {
    client: Client,
    connections: usize,
}

impl Hub {
    /// Talks with nobody yet.
    ///
    /// # Errors
    /// Addresses or certificates that cannot be used.
    pub fn new(config: &HubConfig) -> Result<Self, GetError> {
        Ok(Self { client: Client::new(config)?, connections: config.connections.max(1) })
    }

    /// What `repo` holds at `revision`, a branch, a tag or a commit.
    ///
    /// # Errors
    /// Whatever the hub refuses or answers wrongly; after a few attempts, that it cannot be reached.
    pub fn list(&self, repo: &RepoId, revision: &str, watch: &Watch<'_>) -> Result<Listing, GetError> {
        if let Some(why) = name::fault(revision) {
            return Err(GetError::Revision { given: revision.to_owned(), why });
        }
        let path = format!("/api/models/{repo}/revision/{}", name::encoded(revision, false));
        let endpoint = |why| GetError::Endpoint { given: self.client.endpoint.to_string(), why };
        let url = self.client.endpoint.below(&path).and_then(|url| Url::parse(&format!("{url}?blobs=true")));
        let url = url.map_err(endpoint)?;
        let about = About { repo: repo.as_str(), revision, file: None };
        let stop = Stop::new(watch.cancel);
        let bytes = stop.during(
            || self.client.interrupt(),
            || {
                persist(repo.as_str(), &self.client, &stop, watch, || {
                    let reply = self.client.get(&url, None, about, &stop)?;
                    let read = read_body(reply.body, MAX_ANSWER);
                    Ok(read.map_err(|error| self.client.broken(&reply.url, &error))?)
                })
            },
        )?;
        let too_long = || GetError::Answer {
            repo: repo.to_string(),
            what: "the text".to_owned(),
            found: "longer".to_owned(),
            expected: "at most 8 MiB",
        };
        Listing::parse(repo, revision, &bytes.ok_or_else(too_long)?)
    }

    /// Reads bytes of a file, such as the header of a safetensors file. They are as the server sent them: only a
    /// whole file can be verified.
    ///
    /// # Errors
    /// A range beyond the file, a server that gives no ranges, and whatever [`list`](Self::list) fails with.
    pub fn read_range(
        &self,
        listing: &Listing,
        file: &RemoteFile,
        range: Range<u64>,
        watch: &Watch<'_>,
    ) -> Result<Vec<u8>, GetError> {
        let outside =
            GetError::Range { file: file.name.clone(), start: range.start, end: range.end, size: file.size };
        if range.start > range.end || range.end > file.size {
            return Err(outside);
        }
        let wanted = range.end - range.start;
        if wanted == 0 {
            return Ok(Vec::new());
        }
        let url = self.file_url(listing, file)?;
        let about = self.about(listing, file);
        let stop = Stop::new(watch.cancel);
        stop.during(
            || self.client.interrupt(),
            || {
                persist(&file.name, &self.client, &stop, watch, || {
                    let reply = self.client.get(&url, Some(&range), about, &stop)?;
                    let told = header(&reply.headers, "content-range").and_then(content_range);
                    let exact = told.is_some_and(|(first, last, _)| {
                        first == range.start && last.checked_add(1) == Some(range.end)
                    });
                    let usable = match reply.status.as_u16() {
                        206 => exact,
                        _ => wanted == file.size,
                    };
                    if !usable {
                        let found = format!("HTTP {} without the range", reply.status.as_u16());
                        let url = reply.url.to_string();
                        let expected = "the range that was asked for";
                        return Err(GetError::Status { url, found, expected }.into());
                    }
                    let bytes = read_body(reply.body, wanted)
                        .map_err(|error| self.client.broken(&reply.url, &error))?;
                    match bytes.filter(|bytes| bytes.len() as u64 == wanted) {
                        Some(bytes) => Ok(bytes),
                        None => Err(Again::new(&reply.url, "the answer has another length").into()),
                    }
                })
            },
        )
    }

    /// Fetches one file to `to`, which gets that name once it is verified. What is incomplete lies beside it and is
    /// used by the next call. It is on the caller that nobody else fetches to the same place meanwhile, and that the disk
    /// has room.
    ///
    /// # Errors
    /// Bytes that are not what the hub promised, a disk that becomes full, and whatever [`list`](Self::list) fails with.
    pub fn fetch(
        &self,
        listing: &Listing,
        file: &RemoteFile,
        to: &Path,
        watch: &Watch<'_>,
    ) -> Result<(), GetError> {
        place::make_folder_of(to)?;
        let folder = to.parent().unwrap_or(to);
        let part = Part::of(to, file);
        let stop = Stop::new(watch.cancel);
        let (permits, tally) =
            (Permits::new(self.connections), Tally { total: file.size, ..Tally::default() });
        let run = Run {
            client: &self.client,
            stop: &stop,
            watch: *watch,
            permits: &permits,
            tally: &tally,
            margin: 0,
        };
        let (url, about) = (self.file_url(listing, file)?, self.about(listing, file));
        let job = Job { run: &run, name: &file.name, about, url, part, folder };
        stop.during(|| self.client.interrupt(), || job.fetch())?;
        std::fs::rename(&job.part.path, to).map_err(|cause| GetError::at("write", to, cause))?;
        crate::output::file::sync_folder(folder);
        job.part.discard()
    }

    /// Where the hub has a file.
    fn file_url(&self, listing: &Listing, file: &RemoteFile) -> Result<Url, GetError> {
        let path =
            format!("/{}/resolve/{}/{}", listing.repo, listing.commit, name::encoded(&file.name, true));
        let failed = |why| GetError::Endpoint { given: self.client.endpoint.to_string(), why };
        self.client.endpoint.below(&path).map_err(failed)
    }

    fn about<'a>(&self, listing: &'a Listing, file: &'a RemoteFile) -> About<'a> {
        About { repo: listing.repo.as_str(), revision: &listing.commit, file: Some((&file.name, file.size)) }
    }
}
