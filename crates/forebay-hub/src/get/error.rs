//! What can go wrong while a model is fetched, and what to do about it: one variant per cause.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_core::ByteSize;

use crate::output::FileError;

/// Why a model, a file or a part of one was not fetched.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GetError {
    /// The repository's name cannot be one.
    #[error("{given:?} names no repository; write OWNER/NAME or OWNER/NAME@REVISION")]
    Repo {
        /// What was given.
        given: String,
    },
    /// The revision's name cannot be one.
    #[error("{given:?} names no revision: {why}; give a branch, a tag or a commit")]
    Revision {
        /// What was given.
        given: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The hub's address cannot be used.
    #[error("{given:?} is no address of a hub: {why}; write https://HOST")]
    Endpoint {
        /// What was given.
        given: String,
        /// What is wrong with it.
        why: String,
    },
    /// The proxy's address cannot be used.
    #[error("the proxy {given:?} cannot be used: {why}; write http://HOST:PORT")]
    Proxy {
        /// What was given, without a password.
        given: String,
        /// What is wrong with it.
        why: String,
    },
    /// The file of certificates cannot be used.
    #[error("cannot use the certificates in {}: {why}; give a PEM file with the authority's certificate", path.display())]
    Ca {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The token cannot be sent.
    #[error(
        "the access token holds characters that no token has; copy it again from the hub's settings page"
    )]
    Token,
    /// A pattern chooses nothing.
    #[error("no file of {repo} matches {pattern:?}; it holds for example {example:?}")]
    NoMatch {
        /// The repository.
        repo: String,
        /// The pattern.
        pattern: String,
        /// One of its files.
        example: String,
    },
    /// The owner gives the files only to those who accepted terms.
    #[error(
        "{repo} is gated (HTTP {status}): accept its terms on {page}, then set HF_TOKEN to a token of that account{}",
        if *token { "; the token in use has no access" } else { "" }
    )]
    Gated {
        /// The repository.
        repo: String,
        /// Its page.
        page: String,
        /// The hub's status.
        status: u16,
        /// Whether a token was sent.
        token: bool,
    },
    /// The hub wants to know who asks, or knows and refuses.
    #[error(
        "the hub refuses access to {repo} (HTTP {status}): {}",
        if *token {
            "the token in use has no access to it; check HF_TOKEN and the spelling of the name"
        } else {
            "it is private, gated or does not exist; check the spelling, accept its terms on its page, set HF_TOKEN"
        }
    )]
    Refused {
        /// The repository.
        repo: String,
        /// The hub's status.
        status: u16,
        /// Whether a token was sent.
        token: bool,
    },
    /// No such repository.
    #[error("{endpoint} has no repository {repo}; check the spelling, or set HF_TOKEN if it is private")]
    NoRepo {
        /// The hub.
        endpoint: String,
        /// The repository.
        repo: String,
    },
    /// No such revision.
    #[error("{repo} has no revision {revision:?}; name a branch, a tag or a commit that its page shows")]
    NoRevision {
        /// The repository.
        repo: String,
        /// The revision.
        revision: String,
    },
    /// A file that was listed is not there.
    #[error(
        "{repo} lists {file:?} at {commit} but does not have it; try again later, or name another revision"
    )]
    NoFile {
        /// The repository.
        repo: String,
        /// The commit.
        commit: String,
        /// The file.
        file: String,
    },
    /// What the hub says of a repository makes no sense.
    #[error(
        "the hub's answer about {repo} cannot be used: {what} is {found}, expected {expected}; check --endpoint"
    )]
    Answer {
        /// The repository.
        repo: String,
        /// The part of the answer.
        what: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: &'static str,
    },
    /// A file's name could write outside of the folder, or cannot be written on every system.
    #[error("{repo} holds a file named {name:?}, which is refused: {why}; nothing was written for it")]
    Name {
        /// The repository.
        repo: String,
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A file comes without a digest, so that nothing could prove it.
    #[error(
        "the hub gives no usable digest for {file:?}: {field} is {found}, expected {expected}; it cannot be verified, so it is not fetched"
    )]
    Digest {
        /// The file.
        file: String,
        /// The field of the answer.
        field: &'static str,
        /// What it holds.
        found: String,
        /// What it should hold.
        expected: &'static str,
    },
    /// The bytes are not those that the hub promised, twice in a row.
    #[error(
        "{file:?} arrived damaged twice: its {algorithm} should be {expected} and is {found}; the bytes were thrown away: try again, or another --endpoint"
    )]
    Mismatch {
        /// The file.
        file: String,
        /// `sha256` or `git blob sha1`.
        algorithm: &'static str,
        /// The digest that the hub listed.
        expected: String,
        /// The digest of what came.
        found: String,
    },
    /// The server has another number of bytes than the hub listed.
    #[error(
        "{file:?} should have {expected} bytes and the server has {found}; try again later, or name another revision"
    )]
    Size {
        /// The file.
        file: String,
        /// Bytes listed.
        expected: u64,
        /// Bytes the server has.
        found: u64,
    },
    /// The server does not have bytes that the hub listed (HTTP 416).
    #[error(
        "the server has no bytes {start} to {end} of {file:?} (HTTP 416), which was listed with {size} bytes; try again later, or name another revision"
    )]
    Range {
        /// The file.
        file: String,
        /// First byte asked for.
        start: u64,
        /// End of the bytes asked for.
        end: u64,
        /// Bytes listed.
        size: u64,
    },
    /// What is in a weight file cannot be seen from its first bytes.
    #[error(
        "the header of {file:?} cannot be used: {why}; name another revision, or a repository of safetensors files"
    )]
    Header {
        /// The file.
        file: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An answer that means nothing here.
    #[error("{url} answered {found}, expected {expected}; check --endpoint and the proxy")]
    Status {
        /// The address.
        url: String,
        /// What came.
        found: String,
        /// What should have come.
        expected: &'static str,
    },
    /// The server asks for a longer pause than anybody waits for.
    #[error("{host} wants to be left alone for {} s (HTTP {status}); give the same command again after that", wait.as_secs())]
    Limited {
        /// The server.
        host: String,
        /// What it answered.
        status: u16,
        /// The pause it asks for.
        wait: Duration,
    },
    /// The server or the way to it failed too often in a row.
    #[error(
        "{url} failed {tries} times in a row: {why}; what has arrived is kept: give the same command again to go on"
    )]
    Unreachable {
        /// The address.
        url: String,
        /// Attempts without a byte between them.
        tries: u32,
        /// What happened last.
        why: String,
    },
    /// The server could not prove who it is.
    #[error(
        "no trusted connection to {host}: {why}; behind a company proxy, give its certificate with --ca FILE or SSL_CERT_FILE"
    )]
    Tls {
        /// The server.
        host: String,
        /// What is wrong.
        why: String,
    },
    /// A redirect that is not followed.
    #[error("{url} redirects to {to:?}, which is not followed: {why}; check --endpoint and the proxy")]
    Redirect {
        /// The address.
        url: String,
        /// Where it points.
        to: String,
        /// What is wrong with that.
        why: &'static str,
    },
    /// The disk has too little room for all of it.
    #[error(
        "{} needs {} more, and {} should stay free (--margin), but its disk has {} free; free {}, or name a folder on another disk; what has arrived is kept",
        dir.display(), ByteSize(*needed), ByteSize(*margin), ByteSize(*free),
        ByteSize(needed.saturating_add(*margin).saturating_sub(*free))
    )]
    NoRoom {
        /// The folder.
        dir: PathBuf,
        /// Bytes still to be written.
        needed: u64,
        /// Bytes that should stay free.
        margin: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The disk became full on the way.
    #[error("the disk became full at {}: {cause}; what has arrived is kept: free some space and give the same command again", path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {cause}; when that is mended, give the same command again", path.display())]
    Io {
        /// What was tried, such as "write".
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// Another process fetches the same model.
    #[error("another forebay is fetching {repo} (it holds {}); wait for it to end, or stop it", lock.display())]
    Busy {
        /// The repository.
        repo: String,
        /// The lock.
        lock: PathBuf,
    },
    /// The folder holds another model or another state of it.
    #[error("{} holds {found}, not {asked}; name a new folder, or ask for {found}", dir.display())]
    OtherModel {
        /// The folder.
        dir: PathBuf,
        /// What was fetched there, as REPO@COMMIT.
        found: String,
        /// What was asked for.
        asked: String,
    },
    /// A file is in the way that was not fetched by Forebay.
    #[error("{} is in the way: it is not {file:?} of {repo}; nothing was changed: move it away, or name another folder", path.display())]
    Occupied {
        /// The file that is there.
        path: PathBuf,
        /// The repository.
        repo: String,
        /// The file that should go there.
        file: String,
    },
    /// A record of what was fetched cannot be read.
    #[error("{} is damaged: {why}; delete it, and files will be checked again", path.display())]
    Record {
        /// The record.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// The user stopped it.
    #[error("stopped; what has arrived is kept, and the same command goes on")]
    Cancelled,
}

impl From<FileError> for GetError {
    fn from(error: FileError) -> Self {
        Self::at(error.action, &error.path, error.cause)
    }
}

impl GetError {
    /// A failure at `path`; a full disk is told apart.
    pub(crate) fn at(action: &'static str, path: &Path, cause: io::Error) -> Self {
        let path = path.to_owned();
        match cause.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => Self::Full { path, cause },
            _ => Self::Io { action, path, cause },
        }
    }
}
