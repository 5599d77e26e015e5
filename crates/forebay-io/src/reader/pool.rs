//! Worker threads that read, each one job at a time, and transform what they read.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use forebay_core::ReadSegment;

use super::queue::{Kind, Pass, Side, Taken};
use super::throttle::sleep_until;
use super::{Checks, Done, Job, JobStats, Shared, Transform};
use crate::open::Shard;
use crate::read::{ReadError, step};
use crate::roots::{End, Source, Tried};
use crate::transfer::{Tally, Transfer};
use crate::window::{Window, windows};

/// How long a throttled read sleeps at once.
const SLICE: Duration = Duration::from_millis(50);

/// The life of a worker.
pub(super) fn work(shared: &Shared, side: Side, kind: Kind) {
    let mut scratch = Vec::new();
    while let Some(Taken { job, serial }) = shared.queue.next(side, kind) {
        let Job { tag, segments, check, mut slab, len, transform } = job;
        let mut filling = Filling {
            shared,
            // What compute waits for is read in one go.
            piece: if side == Side::Demand { usize::MAX } else { shared.piece },
            pauses: side == Side::Ahead,
            serial,
            tally: Tally::default(),
            check: check.filter(|_| segments.len() == 1),
            checks: Checks::default(),
            bytes: 0,
            root: 0,
            start: Instant::now(),
        };
        let run = || filling.fill(&segments, &mut slab, len, transform.as_deref(), &mut scratch);
        let result = catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let (path, offset) = shared.place(&segments);
            Err(ReadError::Panicked { path, offset, message: panic_message(&*panic) })
        });
        shared.queue.finish(serial, Done { tag, slab, result });
    }
}

/// A job being read.
struct Filling<'s> {
    shared: &'s Shared,
    /// Bytes after which it is asked whether to go on.
    piece: usize,
    pauses: bool,
    serial: u64,
    tally: Tally,
    check: Option<u32>,
    checks: Checks,
    bytes: u64,
    root: usize,
    start: Instant,
}

impl Filling<'_> {
    /// Reads and transforms one job.
    fn fill(
        &mut self,
        segments: &[ReadSegment],
        slab: &mut [u8],
        len: usize,
        transform: Option<&dyn Transform>,
        scratch: &mut Vec<u8>,
    ) -> Result<JobStats, ReadError> {
        let slab = self.shared.target(segments, slab, len)?;
        match transform {
            None => self.read(segments, slab, true)?,
            Some(transform) if transform.reads_into_slab() => {
                let (len, raw_len) = (slab.len(), transform.raw_len());
                let behind = |segment: &ReadSegment| ReadSegment {
                    // What has no room is far outside then, and is found to be.
                    dst: len
                        .checked_sub(raw_len)
                        .map_or(usize::MAX, |start| start.saturating_add(segment.dst)),
                    ..*segment
                };
                self.read(&segments.iter().map(behind).collect::<Vec<_>>(), slab, true)?;
                self.transform(transform, segments, &[], slab)?;
            }
            Some(transform) => {
                let raw = raw_buffer(self.shared, scratch, transform.raw_len())?;
                // The raw buffer starts anywhere, so direct reads cannot go there.
                self.read(segments, raw, false)?;
                self.transform(transform, segments, raw, slab)?;
            }
        }
        Ok(JobStats::new(self.bytes, &self.tally, self.checks, self.root, self.start))
    }

    fn transform(
        &self,
        transform: &dyn Transform,
        segments: &[ReadSegment],
        raw: &[u8],
        slab: &mut [u8],
    ) -> Result<(), ReadError> {
        transform.apply(raw, slab).map_err(|reason| {
            let (path, offset) = self.shared.place(segments);
            ReadError::Transform { path, offset, reason: reason.to_string() }
        })
    }

    /// Reads every segment to its place.
    fn read(&mut self, segments: &[ReadSegment], dst: &mut [u8], aligned: bool) -> Result<(), ReadError> {
        self.shared.check(segments, dst.len())?;
        let windows = if aligned { windows(segments, dst.len()) } else { vec![None; segments.len()] };
        for (segment, window) in segments.iter().zip(windows) {
            self.read_segment(*segment, window, dst)?;
            self.bytes += segment.len as u64;
        }
        Ok(())
    }

    /// Reads one segment from the root that should be the fastest or, if that fails, from another one, and once more if
    /// there is none.
    fn read_segment(
        &mut self,
        segment: ReadSegment,
        window: Option<Window>,
        dst: &mut [u8],
    ) -> Result<(), ReadError> {
        let sources = &self.shared.sources;
        let mut tried = Tried::default();
        let mut first_error = None;
        loop {
            let Some(booking) = sources.book(segment.shard, segment.len, self.pauses, tried) else {
                if tried.once_more(first_error.as_ref()) {
                    self.tally.retries += 1;
                    continue;
                }
                let shards = sources.shards().len();
                return Err(first_error.unwrap_or(ReadError::UnknownShard { shard: segment.shard, shards }));
            };
            let root = booking.root;
            let source = sources.get(root, segment.shard).expect("only roots that have the shard are booked");
            // A file that panics fails like one that cannot be read: another root may do.
            let read = catch_unwind(AssertUnwindSafe(|| self.read_from(source, segment, window, dst)));
            let read = read.unwrap_or_else(|panic| Err(panicked(&source.shard, segment.offset, &*panic)));
            let read = read.and_then(|()| match self.check {
                Some(expected) => {
                    self.checks.compare(&dst[segment.dst_range()], expected, &segment, &source.shard.path)
                }
                None => Ok(()),
            });
            match read {
                Ok(()) => {
                    sources.settle(booking, End::Delivered, &mut tried);
                    self.root = root;
                    return Ok(());
                }
                Err(error @ ReadError::Aborted { .. }) => {
                    sources.settle(booking, End::GivenUp, &mut tried);
                    return Err(error);
                }
                Err(error) => {
                    sources.settle(booking, End::Failed, &mut tried);
                    first_error.get_or_insert(error);
                }
            }
        }
    }

    fn read_from(
        &mut self,
        source: &Source,
        segment: ReadSegment,
        window: Option<Window>,
        dst: &mut [u8],
    ) -> Result<(), ReadError> {
        let path = &source.shard.path;
        let window = window.filter(|_| source.is_direct());
        let mut transfer = Transfer::new(segment, window, path)?;
        while let Some(ask) = transfer.next(self.piece) {
            if !self.shared.queue.wait_to_pass(self.serial) {
                let (bytes, reads) = (self.bytes + transfer.got() as u64, self.tally.reads);
                return Err(ReadError::Aborted { path: path.clone(), bytes, reads });
            }
            let done = self.shared.throttle.as_ref().map(|throttle| throttle.book(ask.len));
            let result = step(&mut transfer, &ask, &*source.shard.file, path, dst, &mut self.tally);
            if let Some(done) = done {
                // In slices: whoever gives the job up should not wait for a slow disk that is not there.
                while Instant::now() < done && self.shared.queue.pass(self.serial) != Pass::GiveUp {
                    sleep_until(done.min(Instant::now() + SLICE));
                }
            }
            result?;
        }
        self.shared.after(source, &transfer);
        Ok(())
    }
}

/// The worker's own buffer, grown to at least `len` and no further than the limit.
fn raw_buffer<'s>(shared: &Shared, scratch: &'s mut Vec<u8>, len: usize) -> Result<&'s mut [u8], ReadError> {
    if len > shared.scratch_limit {
        return Err(ReadError::ScratchLimit { needed: len, limit: shared.scratch_limit });
    }
    let grow = len.saturating_sub(scratch.len());
    if grow > 0 {
        scratch.try_reserve_exact(grow).map_err(|_| ReadError::NoScratch { needed: len })?;
        scratch.resize(len, 0);
    }
    Ok(&mut scratch[..len])
}

impl Shared {
    /// The part of the slab that a job fills.
    pub(super) fn target<'s>(
        &self,
        segments: &[ReadSegment],
        slab: &'s mut [u8],
        len: usize,
    ) -> Result<&'s mut [u8], ReadError> {
        let room = slab.len();
        slab.get_mut(..len).ok_or_else(|| {
            let (path, offset) = self.place(segments);
            ReadError::OutsideBuffer { path, offset, len, dst: 0, room }
        })
    }

    /// Every segment names a shard and lies within `room` bytes.
    pub(super) fn check(&self, segments: &[ReadSegment], room: usize) -> Result<(), ReadError> {
        let shards = self.sources.shards();
        for &ReadSegment { shard, offset, len, dst } in segments {
            let file = shards.get(shard as usize);
            let file = file.ok_or(ReadError::UnknownShard { shard, shards: shards.len() })?;
            if dst.checked_add(len).is_none_or(|end| end > room) {
                return Err(ReadError::OutsideBuffer { path: file.path.clone(), offset, len, dst, room });
            }
        }
        Ok(())
    }

    /// What is remembered of a file after a read from it.
    pub(super) fn after(&self, source: &Source, transfer: &Transfer) {
        if transfer.refused() {
            source.refuse_direct();
        }
        if let Some((offset, len)) = transfer.cached() {
            source.shard.file.forget(offset, len);
        }
    }

    /// File and offset that stand for a whole job in an error.
    pub(super) fn place(&self, segments: &[ReadSegment]) -> (PathBuf, u64) {
        let first = segments.first();
        let path = first.and_then(|s| self.sources.shards().get(s.shard as usize)).map(|s| s.path.clone());
        (path.unwrap_or_default(), first.map_or(0, |s| s.offset))
    }
}

fn panicked(shard: &Shard, offset: u64, panic: &(dyn Any + Send)) -> ReadError {
    ReadError::Panicked { path: shard.path.clone(), offset, message: panic_message(panic) }
}

pub(super) fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|s| (*s).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}
