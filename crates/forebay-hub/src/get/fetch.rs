//! One file: ranges of it on several connections, hashed as the bytes become complete from the front, verified as a
//! whole.
//!
//! One thread keeps the file: it hashes what has arrived, by reading it back, and journals it. The others each take a
//! range, ask for it, and write what comes to its place. A byte is written at most once between two beginnings of the
//! file, so that what was hashed is what is there.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::digest::{Digest, Hasher};
use crate::output::folder::free_bytes;

use super::backoff::Patience;
use super::client::{About, Again, Client, Trouble, header, lock};
use super::error::GetError;
use super::pace::LEAST;
use super::part::Part;
use super::permits::{Permits, Tally};
use super::ranges::Ranges;
use super::url::Url;
use super::watch::{Event, Stop, Watch};

/// Smallest and largest range that is asked for at once.
const SEGMENT: (u64, u64) = (1 << 20, 64 << 20);
/// Bytes written at once.
const CHUNK: usize = 256 << 10;
/// Shortest and longest time between two notes in the journal. What is lost by a kill is at most that, and at most a
/// quarter of what the run has fetched.
const NOTE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// How often the keeper looks around when nothing happens.
const LOOK: Duration = Duration::from_millis(50);

/// What all files of a run share.
pub(super) struct Run<'a> {
    pub client: &'a Client,
    pub stop: &'a Stop<'a>,
    pub watch: Watch<'a>,
    pub permits: &'a Permits,
    pub tally: &'a Tally,
    /// Bytes that stay free on the disk.
    pub margin: u64,
}

/// One file to be fetched.
pub(super) struct Job<'a> {
    pub run: &'a Run<'a>,
    /// Its name, for the user.
    pub name: &'a str,
    pub about: About<'a>,
    /// Where the hub has it.
    pub url: Url,
    pub part: Part,
    /// On the disk that is filled.
    pub folder: &'a Path,
}

/// Why an attempt at the file ended without all of its bytes.
enum End {
    /// It cannot be had, or not now.
    Failed(GetError),
    /// The server gives no ranges.
    Unranged,
    /// The only stream broke, and no range can continue it.
    Cut(Again),
}

/// What the threads of one file share.
struct Shared {
    state: Mutex<State>,
    wake: Condvar,
    /// Where redirects led, which saves the hub from being asked for every range.
    led_to: Mutex<Option<Url>>,
}

struct State {
    /// Not asked for.
    todo: Ranges,
    /// Written.
    done: Ranges,
    end: Option<End>,
    workers: usize,
}

impl Job<'_> {
    /// Fetches what is missing of the file and verifies it. Afterwards the part file is complete and on the disk.
    pub fn fetch(&self) -> Result<(), GetError> {
        let run = self.run;
        let mut patience = Patience::new(run.client.retry.tries);
        let (mut single, mut damaged) = (false, false);
        let restarted = |why| (run.watch.seen)(Event::Restarted { file: self.name.to_owned(), why });
        loop {
            let (ended, bytes) = self.attempt(single)?;
            let found = match ended {
                Ok(found) if found == self.part.digest => return Ok(()),
                Err(End::Failed(error)) => return Err(error),
                Ok(found) => Some(found),
                Err(End::Unranged) => {
                    single = true;
                    restarted("the server does not give parts of files");
                    None
                }
                Err(End::Cut(again)) => {
                    patience.wait(again, self.name, run.client, run.stop, &run.watch)?;
                    None
                }
            };
            run.tally.done.fetch_sub(bytes, Ordering::Relaxed);
            self.part.discard()?;
            match found {
                Some(found) if damaged => {
                    let digest = &self.part.digest;
                    let (algorithm, expected) = (digest.algorithm().name(), digest.hex().to_owned());
                    return Err(GetError::Mismatch {
                        file: self.name.to_owned(),
                        algorithm,
                        expected,
                        found: found.hex().to_owned(),
                    });
                }
                Some(_) => {
                    damaged = true;
                    restarted("it arrived damaged");
                }
                None => {}
            }
        }
    }

    /// One attempt, which goes on where the journal ends: the digest of the whole, and the bytes that were counted.
    fn attempt(&self, single: bool) -> Result<(Result<Digest, End>, u64), GetError> {
        let (file, done) = self.part.open()?;
        self.run.tally.done.fetch_add(done.bytes(), Ordering::Relaxed);
        let todo = done.gaps(self.part.size);
        let pieces = todo.bytes().div_ceil(self.segment(single));
        let workers = (self.run.permits.all as u64).min(pieces) as usize;
        let state = Mutex::new(State { todo, done, end: None, workers });
        let shared = Shared { state, wake: Condvar::new(), led_to: Mutex::new(None) };
        let kept = thread::scope(|scope| {
            for _ in 0..workers {
                scope.spawn(|| self.work(&shared, single));
            }
            let kept = self.keep(&shared, &file);
            if kept.is_err() {
                // The workers stop at their next look.
                self.run.stop.fail();
            }
            kept
        });
        let state = shared.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let bytes = state.done.bytes();
        let ended = match (kept?, state.end) {
            (Some(found), _) => Ok(found),
            (None, Some(end)) => Err(end),
            (None, None) => Err(End::Failed(GetError::Cancelled)),
        };
        Ok((ended, bytes))
    }

    fn segment(&self, single: bool) -> u64 {
        let share = self.part.size / (4 * self.run.permits.all as u64);
        if single { self.part.size.max(1) } else { share.clamp(SEGMENT.0, SEGMENT.1) }
    }

    /// Hashes and journals what arrives, until all is there or no worker is left. `None`: not all is there.
    fn keep(&self, shared: &Shared, mut file: &File) -> Result<Option<Digest>, GetError> {
        let size = self.part.size;
        let failed = |cause| GetError::at("read", &self.part.path, cause);
        let mut hasher = Hasher::new(self.part.digest.algorithm(), size);
        let (mut hashed, mut noted) = (0, None);
        let (started, mut last) = (Instant::now(), Instant::now());
        let mut buffer = vec![0; (1 << 20).min(size as usize).max(1)];
        file.seek(SeekFrom::Start(0)).map_err(failed)?;
        loop {
            let mut state = lock(&shared.state);
            let idle = |state: &State| {
                state.done.prefix() == hashed || state.end.is_some() || self.run.stop.is_raised()
            };
            if state.workers > 0 && idle(&state) {
                state = shared.wake.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            }
            let (prefix, bytes, workers) = (state.done.prefix(), state.done.bytes(), state.workers);
            let stopped = self.run.stop.is_raised() || state.end.is_some();
            drop(state);
            (self.run.watch.seen)(self.run.tally.event());
            let last_look = workers == 0 && (stopped || prefix < size);
            if noted.is_none_or(|noted| noted < bytes) && (last_look || last.elapsed() >= pause(started)) {
                let done = lock(&shared.state).done.clone();
                noted = Some(done.bytes());
                self.part.note(file, &done)?;
                if !last_look {
                    self.check_room(size - done.bytes())?;
                }
                last = Instant::now();
            }
            if last_look {
                return Ok(None);
            }
            if hashed < prefix && !stopped {
                let most = buffer.len().min(usize::try_from(prefix - hashed).unwrap_or(usize::MAX));
                file.read_exact(&mut buffer[..most]).map_err(failed)?;
                hasher.update(&buffer[..most]);
                hashed += most as u64;
            }
            if hashed == size && workers == 0 {
                self.part.note(file, &lock(&shared.state).done)?;
                return Ok(Some(hasher.finish()));
            }
        }
    }

    /// Stops before other programs have no disk left.
    fn check_room(&self, needed: u64) -> Result<(), GetError> {
        let margin = self.run.margin;
        match free_bytes(self.folder) {
            Some(free) if free < margin => {
                Err(GetError::NoRoom { dir: self.folder.to_owned(), needed, margin, free })
            }
            _ => Ok(()),
        }
    }

    /// Fetches ranges until there are none.
    fn work(&self, shared: &Shared, single: bool) {
        /// Leaves even if the thread dies.
        struct Worker<'s>(&'s Shared);
        impl Drop for Worker<'_> {
            fn drop(&mut self) {
                lock(&self.0.state).workers -= 1;
                self.0.wake.notify_all();
            }
        }
        let _worker = Worker(shared);
        let Err(end) = self.fetch_ranges(shared, single) else { return };
        if let End::Failed(_) = end {
            // Nothing else of this run is of use without it.
            self.run.stop.fail();
        }
        let mut state = lock(&shared.state);
        // Being told to stop is no reason, if there is one.
        if state.end.is_none() && !matches!(end, End::Failed(GetError::Cancelled)) {
            state.end = Some(end);
        }
    }

    fn fetch_ranges(&self, shared: &Shared, single: bool) -> Result<(), End> {
        let opened = OpenOptions::new().write(true).open(&self.part.path);
        let mut file = opened.map_err(|cause| End::Failed(GetError::at("write", &self.part.path, cause)))?;
        let mut patience = Patience::new(self.run.client.retry.tries);
        loop {
            let next = lock(&shared.state).todo.take(self.segment(single));
            let Some(mut range) = next else { return Ok(()) };
            while range.start < range.end {
                let before = range.start;
                let Err(end) = self.stream(shared, &mut file, &mut range, single) else { continue };
                let again = match end {
                    End::Cut(again) if !single => again,
                    other => return Err(other),
                };
                *lock(&shared.led_to) = None;
                if range.start - before >= LEAST {
                    patience.renew();
                }
                let (client, stop) = (self.run.client, self.run.stop);
                patience.wait(again, self.name, client, stop, &self.run.watch).map_err(End::Failed)?;
            }
        }
    }

    /// Asks once for a range, and takes from it what arrives.
    fn stream(
        &self,
        shared: &Shared,
        file: &mut File,
        range: &mut Range<u64>,
        single: bool,
    ) -> Result<(), End> {
        let _permit = self.run.permits.take(self.run.stop).map_err(End::Failed)?;
        let led_to = lock(&shared.led_to).clone();
        let url = led_to.as_ref().unwrap_or(&self.url);
        let asked = (!single).then_some(&*range);
        let mut reply =
            self.run.client.get(url, asked, self.about, self.run.stop).map_err(|trouble| match trouble {
                Trouble::Final(error) => End::Failed(error),
                Trouble::Again(again) => End::Cut(again),
            })?;
        let size = self.part.size;
        let end = match reply.status.as_u16() {
            206 if !single => {
                let told = header(&reply.headers, "content-range");
                self.range_end(&reply.url, told, range).map_err(End::Failed)?
            }
            200 if *range == (0..size) => {
                let told = header(&reply.headers, "content-length").and_then(|text| text.parse().ok());
                if let Some(found) = told.filter(|found| *found != size) {
                    return Err(End::Failed(GetError::Size {
                        file: self.name.to_owned(),
                        expected: size,
                        found,
                    }));
                }
                size
            }
            200 => return Err(End::Unranged),
            other => {
                let (url, found) = (reply.url.to_string(), format!("HTTP {other}"));
                return Err(End::Failed(GetError::Status { url, found, expected: "the whole file" }));
            }
        };
        if reply.url != self.url {
            *lock(&shared.led_to) = Some(reply.url.clone());
        }
        let failed = |cause| End::Failed(GetError::at("write", &self.part.path, cause));
        file.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        let mut buffer = vec![0; CHUNK];
        while range.start < end {
            self.run.stop.check().map_err(End::Failed)?;
            if lock(&shared.state).end.is_some() {
                return Err(End::Failed(GetError::Cancelled));
            }
            let most = buffer.len().min(usize::try_from(end - range.start).unwrap_or(usize::MAX));
            let read = reply.body.read(&mut buffer[..most]);
            let read = read.map_err(|error| End::Cut(self.run.client.broken(&reply.url, &error)))?;
            if read == 0 {
                return Err(End::Cut(Again::new(&reply.url, "the connection ended early")));
            }
            file.write_all(&buffer[..read]).map_err(failed)?;
            let written = range.start..range.start + read as u64;
            range.start = written.end;
            lock(&shared.state).done.insert(written);
            self.run.tally.done.fetch_add(read as u64, Ordering::Relaxed);
            self.run.tally.arrived.fetch_add(read as u64, Ordering::Relaxed);
            shared.wake.notify_all();
        }
        // A body that was read to its end gives the connection back; there is nothing more to come.
        let _ = reply.body.read(&mut buffer[..1]);
        Ok(())
    }

    /// The end of the bytes in an answer with `Content-Range: bytes 0-99/200` to a question for `range`.
    fn range_end(&self, url: &Url, told: Option<&str>, range: &Range<u64>) -> Result<u64, GetError> {
        let (first, last, size) = told.and_then(content_range).ok_or_else(|| GetError::Status {
            url: url.to_string(),
            found: format!("HTTP 206 with the range {:?}", told.unwrap_or_default()),
            expected: "the range that was asked for",
        })?;
        if let Some(found) = size.filter(|size| *size != self.part.size) {
            return Err(GetError::Size { file: self.name.to_owned(), expected: self.part.size, found });
        }
        match first == range.start && (first..range.end).contains(&last) {
            true => Ok(last + 1),
            false => Err(GetError::Status {
                url: url.to_string(),
                found: format!("bytes {first} to {last}"),
                expected: "the range that was asked for",
            }),
        }
    }
}

/// Time between two notes in the journal of a run that began at `started`.
fn pause(started: Instant) -> Duration {
    (started.elapsed() / 4).clamp(NOTE.0, NOTE.1)
}

/// First byte, last byte and size, if it is told.
pub(super) fn content_range(text: &str) -> Option<(u64, u64, Option<u64>)> {
    let (range, size) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let size = if size == "*" { None } else { Some(size.parse().ok()?) };
    Some((first.parse().ok()?, last.parse().ok()?, size))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn ranges_in_headers_are_read() {
        assert_eq!(content_range("bytes 0-99/200"), Some((0, 99, Some(200))));
        assert_eq!(content_range("bytes 5-5/*"), Some((5, 5, None)));
        for bad in ["", "bytes */200", "bytes 0-/1", "items 0-1/2", "bytes 0-1", "bytes a-b/c"] {
            assert_eq!(content_range(bad), None, "{bad}");
        }
    }

    proptest! {
        #[test]
        fn no_header_is_a_panic(text in "(bytes )?.{0,24}") {
            content_range(&text);
        }
    }
}
