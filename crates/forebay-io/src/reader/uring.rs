//! One thread that reads through a ring of the Linux kernel (io_uring).
//!
//! It takes the jobs without a transform from the same queue, by the same rules, as the worker threads would, and
//! drives the same transfers; what differs is only who waits for the disk. All segments of a demand are in flight
//! at once; other jobs have one piece in flight, and none while a demand is outstanding.
//!
//! The kernel is told the files once, but not the slabs: registered memory is pinned, all of it at once, which counts
//! against a limit that is usually a few megabytes and would make an arena resident before it is used.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forebay_core::ReadSegment;
use io_uring::{IoUring, Probe, cqueue, opcode, squeue, types};

use super::pool::panic_message;
use super::queue::{Kind, Pass, Side, Taken};
use super::{Checks, Done, Job, JobStats, Shared};
use crate::read::ReadError;
use crate::roots::{Booking, End, Tried};
use crate::slab::Slab;
use crate::transfer::{Ask, Tally, Transfer};
use crate::window::{Window, windows};

/// Reads in flight at most, and the wake-up call.
const ENTRIES: u32 = 256;
/// What the completion of the wake-up call carries.
const WAKE: u64 = u64::MAX;

/// Wakes the ring's thread; clones wake the same one.
#[derive(Clone)]
pub(super) struct Wake(Arc<OwnedFd>);

impl Wake {
    fn new() -> io::Result<Self> {
        // SAFETY: the call takes two integers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made and nobody else has it.
        Ok(Self(Arc::new(unsafe { OwnedFd::from_raw_fd(fd) })))
    }

    /// Wakes it now or, if it is awake, before it sleeps next.
    pub fn up(&self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: the descriptor is open and `one` has the eight bytes. It fails only when the count is at
        // its end, and then the thread will wake.
        unsafe { libc::write(self.0.as_raw_fd(), one.as_ptr().cast(), one.len()) };
    }

    fn clear(&self) {
        let mut count = [0; 8];
        // SAFETY: the descriptor is open, does not block, and `count` has room for the eight bytes.
        unsafe { libc::read(self.0.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
    }
}

/// Starts the thread; says why not if the kernel or the files do not allow it.
pub(super) fn start(shared: &Arc<Shared>, workers: usize, ahead: usize) -> Result<JoinHandle<()>, String> {
    if shared.sources.all().any(|source| source.shard.file.descriptors().is_none()) {
        return Err("not all shards are files of the system".to_owned());
    }
    let refused = |what: &str, cause: io::Error| format!("{what}: {cause}");
    let wake = Wake::new().map_err(|cause| refused("the system refuses an event descriptor", cause))?;
    let (tell, hear) = mpsc::channel();
    let (of_thread, waker) = (Arc::clone(shared), wake.clone());
    let body = move || {
        // Made here because the kernel ties a ring with a single issuer to its thread.
        let ring = Ring::new(&of_thread, waker, workers, ahead);
        let (ring, result) = match ring {
            Ok(ring) => (Some(ring), Ok(())),
            Err(cause) => (None, Err(cause)),
        };
        if tell.send(result).is_ok()
            && let Some(mut ring) = ring
        {
            // A panic fails the jobs that were being read, not those to come.
            while let Err(panic) = catch_unwind(AssertUnwindSafe(|| ring.run(&of_thread))) {
                ring.fail_jobs(&of_thread, &panic_message(&*panic));
            }
        }
    };
    let thread = std::thread::Builder::new().name("read-ring".to_owned()).spawn(body);
    let thread = thread.map_err(|cause| refused("the thread of io_uring does not start", cause))?;
    match hear.recv() {
        Ok(Ok(())) => {
            shared.queue.also_wake(wake);
            Ok(thread)
        }
        Ok(Err(cause)) => {
            let _ = thread.join();
            Err(refused("the kernel refuses io_uring", cause))
        }
        Err(_) => Err("the thread of io_uring ended".to_owned()),
    }
}

struct Ring {
    ring: IoUring,
    wake: Wake,
    /// The wake-up call is in the ring.
    armed: bool,
    /// Reads in flight.
    outstanding: u32,
    /// Descriptors that the kernel holds already, by number.
    registered: HashMap<RawFd, u32>,
    active: Vec<Option<Active>>,
    workers: usize,
    ahead: usize,
}

/// A job being read. While one of its reads is in flight the kernel writes to the slab, and nobody else
/// touches it.
struct Active {
    serial: u64,
    tag: u64,
    side: Side,
    slab: Slab,
    /// Start of the slab.
    base: NonNull<u8>,
    lines: Vec<Line>,
    tally: Tally,
    check: Option<u32>,
    checks: Checks,
    bytes: u64,
    root: usize,
    start: Instant,
    error: Option<ReadError>,
}

/// A segment of a job.
struct Line {
    segment: ReadSegment,
    window: Option<Window>,
    tried: Tried,
    /// With the root that is being read from, and how far it is.
    under_way: Option<(Booking, Transfer)>,
    in_flight: Option<Ask>,
    done: bool,
    first_error: Option<ReadError>,
}

impl Ring {
    fn new(shared: &Shared, wake: Wake, workers: usize, ahead: usize) -> io::Result<Self> {
        let builder = IoUring::<squeue::Entry, cqueue::Entry>::builder;
        // Older kernels know fewer ways to save work.
        let ring = builder().setup_single_issuer().setup_coop_taskrun().build(ENTRIES);
        let ring = ring.or_else(|_| builder().build(ENTRIES))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        if !probe.is_supported(opcode::Read::CODE) || !probe.is_supported(opcode::PollAdd::CODE) {
            return Err(io::ErrorKind::Unsupported.into());
        }
        let descriptors = shared.sources.all().filter_map(|source| source.shard.file.descriptors());
        let files: Vec<RawFd> =
            descriptors.flat_map(|both| [Some(both.buffered), both.direct]).flatten().collect();
        let registered = match ring.submitter().register_files(&files) {
            Ok(()) => files.into_iter().zip(0..).collect(),
            // They can be named as usual.
            Err(_) => HashMap::new(),
        };
        Ok(Self { ring, wake, armed: false, outstanding: 0, registered, active: Vec::new(), workers, ahead })
    }

    /// Until the queue is closed and what was being read is done.
    fn run(&mut self, shared: &Shared) {
        loop {
            loop {
                self.take_jobs(shared);
                for at in 0..self.active.len() {
                    self.issue(shared, at);
                }
                if !self.finish_jobs(shared) {
                    break;
                }
            }
            if shared.queue.is_closed() && self.active.iter().all(Option::is_none) {
                return;
            }
            self.arm();
            self.wait();
            self.reap(shared);
        }
    }

    /// Starts what may be started.
    fn take_jobs(&mut self, shared: &Shared) {
        for (side, limit) in [(Side::Demand, self.workers), (Side::Ahead, self.ahead)] {
            while self.active.iter().flatten().filter(|active| active.side == side).count() < limit {
                let Some(taken) = shared.queue.try_next(side, Kind::Plain) else { break };
                let at = self.active.iter().position(Option::is_none).unwrap_or(self.active.len());
                if at == self.active.len() {
                    self.active.push(None);
                }
                let (active, segments, len) = Active::new(side, taken);
                // From here on a panic fails the job, whose slab is not lost.
                self.active[at].insert(active).lay_out(shared, &segments, len);
            }
        }
    }

    /// Puts the next reads of a job into the ring.
    fn issue(&mut self, shared: &Shared, at: usize) {
        let Some(active) = &mut self.active[at] else { return };
        for number in 0..active.lines.len() {
            let limit = match active.side {
                Side::Demand => usize::MAX,
                Side::Ahead if active.is_reading() => return,
                Side::Ahead => shared.piece,
            };
            while active.error.is_none() && !active.lines[number].done {
                if active.lines[number].in_flight.is_some() || self.outstanding >= ENTRIES - 1 {
                    break;
                }
                let Some(ask) = active.next_ask(shared, number, limit) else { continue };
                if active.side == Side::Ahead {
                    match shared.queue.pass(active.serial) {
                        Pass::Go => {}
                        Pass::Wait => return,
                        Pass::GiveUp => {
                            active.give_up(shared, number);
                            return;
                        }
                    }
                }
                let line = &active.lines[number];
                let source = line.under_way.as_ref();
                let source =
                    source.and_then(|(booking, _)| shared.sources.get(booking.root, line.segment.shard));
                let both = source.and_then(|source| source.shard.file.descriptors());
                let both = both.expect("asked of every file at the start");
                // A file that calls itself direct and has no descriptor for it reads whole pages all the same.
                let fd = both.direct.filter(|_| ask.direct).unwrap_or(both.buffered);
                let data = (at as u64) << 32 | number as u64;
                // SAFETY: see `read_entry`: the transfer only asks for bytes within the job's part of the slab
                // (checked when it began), and the slab is kept in `active` until the read has completed.
                let entry = unsafe { read_entry(&self.registered, fd, active.base, &ask).user_data(data) };
                active.lines[number].in_flight = Some(ask);
                self.outstanding += 1;
                push(&mut self.ring, &entry);
            }
        }
    }

    /// Hands out what is complete; `true` if there was something.
    fn finish_jobs(&mut self, shared: &Shared) -> bool {
        let mut any = false;
        for place in &mut self.active {
            let ended = |active: &mut Active| {
                let done = active.error.is_some() || active.lines.iter().all(|line| line.done);
                done && !active.is_reading()
            };
            if let Some(active) = place.take_if(ended) {
                active.finish(shared);
                any = true;
            }
        }
        any
    }

    /// Hands every job back as failed, after its reads have completed.
    fn fail_jobs(&mut self, shared: &Shared, message: &str) {
        self.drain();
        for mut active in self.active.drain(..).flatten() {
            active.panicked(shared, message);
            active.finish(shared);
        }
    }

    /// Waits for every read in flight, whatever came of it.
    fn drain(&mut self) {
        while self.outstanding > 0 {
            self.wait();
            for entry in self.ring.completion() {
                match entry.user_data() {
                    WAKE => self.armed = false,
                    _ => self.outstanding -= 1,
                }
            }
        }
    }

    /// Puts the wake-up call into the ring.
    fn arm(&mut self) {
        if !self.armed {
            let fd = types::Fd(self.wake.0.as_raw_fd());
            push(&mut self.ring, &opcode::PollAdd::new(fd, libc::POLLIN as u32).build().user_data(WAKE));
            self.armed = true;
        }
    }

    /// Until something is complete.
    fn wait(&mut self) {
        while let Err(error) = self.ring.submit_and_wait(1) {
            if error.kind() != io::ErrorKind::Interrupted {
                // The kernel is short of something; what is in flight completes all the same.
                std::thread::sleep(Duration::from_millis(1));
            }
            if !self.ring.completion().is_empty() {
                return;
            }
        }
    }

    fn reap(&mut self, shared: &Shared) {
        let completed: Vec<(u64, i32)> =
            self.ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (data, result) in completed {
            if data == WAKE {
                self.armed = false;
                self.wake.clear();
                continue;
            }
            self.outstanding -= 1;
            let (at, number) = ((data >> 32) as usize, (data & 0xffff_ffff) as usize);
            if let Some(active) = &mut self.active[at] {
                let result =
                    usize::try_from(result).map_err(|_| io::Error::from_raw_os_error(result.wrapping_neg()));
                active.completed(shared, number, result);
            }
        }
    }
}

impl Drop for Ring {
    /// Even after a panic, no slab goes back while the kernel may write to it.
    fn drop(&mut self) {
        self.drain();
    }
}

impl Active {
    /// A job that was taken; its segments are to be [laid out](Self::lay_out).
    fn new(side: Side, taken: Taken) -> (Self, Arc<[ReadSegment]>, usize) {
        let Taken { job: Job { tag, segments, check, mut slab, len, .. }, serial } = taken;
        let base = NonNull::from(&mut slab[..]).cast();
        let (tally, start) = (Tally::default(), Instant::now());
        let (check, checks) = (check.filter(|_| segments.len() == 1), Checks::default());
        let (lines, bytes, root, error) = (Vec::new(), 0, 0, None);
        let active =
            Self { serial, tag, side, slab, base, lines, tally, check, checks, bytes, root, start, error };
        (active, segments, len)
    }

    /// Checks what is to be read, and where it goes.
    fn lay_out(&mut self, shared: &Shared, segments: &[ReadSegment], len: usize) {
        self.error = match shared.target(segments, &mut self.slab, len) {
            Ok(_) => shared.check(segments, len).err(),
            Err(error) => Some(error),
        };
        let line = |(segment, window): (&ReadSegment, Option<Window>)| Line {
            segment: *segment,
            window,
            tried: Tried::default(),
            under_way: None,
            in_flight: None,
            done: false,
            first_error: None,
        };
        self.lines = segments.iter().zip(windows(segments, len)).map(line).collect();
        self.base = NonNull::from(&mut self.slab[..]).cast();
    }

    fn is_reading(&self) -> bool {
        self.lines.iter().any(|line| line.in_flight.is_some())
    }

    /// The next read of a segment; `None` when there is none right now: the segment is done, or failed on one
    /// root, or on all that there are, or altogether (then there is an error).
    fn next_ask(&mut self, shared: &Shared, number: usize, limit: usize) -> Option<Ask> {
        let line = &mut self.lines[number];
        let sources = &shared.sources;
        let shard = line.segment.shard;
        if line.under_way.is_none() {
            let Some(booking) = sources.book(shard, line.segment.len, self.side == Side::Ahead, line.tried)
            else {
                if line.tried.once_more(line.first_error.as_ref()) {
                    self.tally.retries += 1;
                    return None;
                }
                let unknown = ReadError::UnknownShard { shard, shards: sources.shards().len() };
                self.error = Some(line.first_error.take().unwrap_or(unknown));
                return None;
            };
            let source = sources.get(booking.root, shard).expect("only roots that have the shard are booked");
            let window = line.window.filter(|_| source.is_direct());
            match Transfer::new(line.segment, window, &source.shard.path) {
                Ok(transfer) => line.under_way = Some((booking, transfer)),
                Err(error) => {
                    line.failed(shared, booking, error);
                    return None;
                }
            }
        }
        let ask = line.under_way.as_ref().and_then(|(_, transfer)| transfer.next(limit));
        if ask.is_none()
            && let Some((booking, transfer)) = line.under_way.take()
        {
            self.root = booking.root;
            if let Some(source) = sources.get(booking.root, shard) {
                shared.after(source, &transfer);
                // A checked job has one segment, which is complete: nothing of the slab is in flight.
                if let Some(expected) = self.check
                    && let bytes = &self.slab[line.segment.dst_range()]
                    && let Err(error) =
                        self.checks.compare(bytes, expected, &line.segment, &source.shard.path)
                {
                    line.failed(shared, booking, error);
                    return None;
                }
            }
            sources.settle(booking, End::Delivered, &mut line.tried);
            line.done = true;
            self.bytes += line.segment.len as u64;
        }
        ask
    }

    /// Takes in what came of a segment's read.
    fn completed(&mut self, shared: &Shared, number: usize, result: io::Result<usize>) {
        let line = &mut self.lines[number];
        let (Some(ask), Some((booking, mut transfer))) = (line.in_flight.take(), line.under_way.take())
        else {
            return;
        };
        let source = shared.sources.get(booking.root, line.segment.shard);
        let path = source.map(|source| source.shard.path.as_path()).unwrap_or(std::path::Path::new(""));
        match transfer.digest(&ask, result, path, &mut self.tally) {
            Ok(()) => {
                let pause = transfer.pause();
                if !pause.is_zero() {
                    std::thread::sleep(pause);
                }
                line.under_way = Some((booking, transfer));
            }
            Err(error) => line.failed(shared, booking, error),
        }
    }

    fn give_up(&mut self, shared: &Shared, number: usize) {
        let under_way = self.lines[number].under_way.as_ref();
        let bytes = self.bytes + under_way.map_or(0, |(_, transfer)| transfer.got() as u64);
        let (path, _) = shared.place(&[self.lines[number].segment]);
        self.error = Some(ReadError::Aborted { path, bytes, reads: self.tally.reads });
    }

    /// The thread panicked while this was being read.
    fn panicked(&mut self, shared: &Shared, message: &str) {
        let segments: Vec<ReadSegment> = self.lines.iter().map(|line| line.segment).collect();
        let (path, offset) = shared.place(&segments);
        self.error.get_or_insert(ReadError::Panicked { path, offset, message: message.to_owned() });
    }

    /// Hands the slab back, with no read in flight.
    fn finish(self, shared: &Shared) {
        for mut line in self.lines {
            if let Some((booking, _)) = line.under_way.take() {
                shared.sources.settle(booking, End::GivenUp, &mut line.tried);
            }
        }
        let result = match self.error {
            None => Ok(JobStats::new(self.bytes, &self.tally, self.checks, self.root, self.start)),
            Some(error) => Err(error),
        };
        shared.queue.finish(self.serial, Done { tag: self.tag, slab: self.slab, result });
    }
}

impl Line {
    /// The segment is to be read from another root.
    fn failed(&mut self, shared: &Shared, booking: Booking, error: ReadError) {
        shared.sources.settle(booking, End::Failed, &mut self.tried);
        self.first_error.get_or_insert(error);
    }
}

/// A read for the ring.
///
/// # Safety
/// `ask` must lie within the slab that starts at `base`, which must be kept, untouched, until the entry has
/// completed; `fd` must be open until then.
unsafe fn read_entry(
    registered: &HashMap<RawFd, u32>,
    fd: RawFd,
    base: NonNull<u8>,
    ask: &Ask,
) -> squeue::Entry {
    // SAFETY: within the slab, by the contract.
    let target = unsafe { base.add(ask.dst) }.as_ptr();
    // Transfers ask for less than 2 GiB at a time.
    let len = ask.len as u32;
    let entry = match registered.get(&fd) {
        Some(&index) => opcode::Read::new(types::Fixed(index), target, len).offset(ask.offset).build(),
        None => opcode::Read::new(types::Fd(fd), target, len).offset(ask.offset).build(),
    };
    // A read through the page cache would run in the call that submits it.
    if ask.direct { entry } else { entry.flags(squeue::Flags::ASYNC) }
}

fn push(ring: &mut IoUring, entry: &squeue::Entry) {
    // SAFETY: the buffers of reads are kept until they complete, see `read_entry`; other entries have none.
    // There is room: no more than ENTRIES are in flight.
    while unsafe { ring.submission().push(entry) }.is_err() {
        // Full of entries that the kernel has not looked at yet.
        if ring.submit().is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
