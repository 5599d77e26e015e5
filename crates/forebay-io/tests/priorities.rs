//! Who goes first, who waits, and who is let off.

use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use forebay_core::ReadSegment;
use forebay_io::{
    Access, Arena, Backend, Job, Priority, ReadAt, ReadError, Reader, ReaderConfig, Shard, Slab, SlabClass,
    open_files,
};
use forebay_testkit::fault::{Faults, FaultyDisk};

/// A disk on which every read waits until the test lets it through; tells the test where each read begins.
struct Gate {
    begun: Sender<u64>,
    let_through: Mutex<Receiver<()>>,
}

impl ReadAt for Gate {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let _ = self.begun.send(offset);
        let _ = self.let_through.lock().unwrap().recv();
        buf.fill((offset >> 16) as u8);
        Ok(buf.len())
    }

    fn size(&self) -> io::Result<u64> {
        Ok(1 << 40)
    }
}

const PIECE: usize = 4096;

struct World {
    reader: Reader,
    begun: Receiver<u64>,
    let_through: Sender<()>,
    arena: Arena,
}

impl World {
    fn new(workers: usize, ahead: usize) -> Self {
        let (tell_begun, begun) = channel();
        let (let_through, wait) = channel();
        let gate = Gate { begun: tell_begun, let_through: Mutex::new(wait) };
        let shard = Shard { path: "gate".into(), file: Arc::new(gate) };
        let config = ReaderConfig { workers, ahead, piece: PIECE, ..ReaderConfig::default() };
        let reader = Reader::new(vec![shard], config).unwrap();
        let arena = Arena::new(&[SlabClass { bytes: 8 * PIECE, count: 32 }]).unwrap();
        Self { reader, begun, let_through, arena }
    }

    /// A job of so many pieces; its tag is the upper part of its offset.
    fn submit(&self, priority: Priority, tag: u64, pieces: usize) {
        self.reader.submit(priority, job(tag, tag << 16, pieces * PIECE, self.arena.take(0).unwrap()));
    }

    /// The tag of the next read that begins, and its piece.
    fn next(&self) -> (u64, u64) {
        let offset = self.begun.recv_timeout(Duration::from_secs(30)).expect("a read begins");
        (offset >> 16, (offset & 0xffff) / PIECE as u64)
    }

    /// No further read begins, as far as waiting a little can tell.
    fn quiet(&self) {
        assert!(self.begun.recv_timeout(Duration::from_millis(30)).is_err(), "a read began");
    }

    fn step(&self) {
        self.let_through.send(()).unwrap();
    }

    /// Lets everything through and returns the tags in the order of completion.
    fn finish(self) -> Vec<u64> {
        for _ in 0..1000 {
            self.step();
        }
        std::iter::from_fn(|| self.reader.recv()).map(|done| done.tag).collect()
    }
}

fn job(tag: u64, offset: u64, len: usize, slab: Slab) -> Job {
    let segments = [ReadSegment { shard: 0, offset, len, dst: 0 }].into();
    Job { tag, segments, slab, len, check: None, transform: None }
}

#[test]
fn the_most_urgent_starts_first() {
    let world = World::new(1, 1);
    world.submit(Priority::Demand, 1, 1);
    assert_eq!(world.next(), (1, 0));
    world.submit(Priority::WarmUp, 2, 1);
    world.submit(Priority::Predicted, 3, 1);
    world.submit(Priority::Demand, 4, 1);
    world.submit(Priority::Predicted, 5, 1);
    world.quiet();
    for tag in [4, 3, 5, 2] {
        world.step();
        assert_eq!(world.next(), (tag, 0));
    }
    assert_eq!(world.finish(), [1, 4, 3, 5, 2]);
}

#[test]
fn what_is_not_demanded_pauses_for_demands() {
    let world = World::new(1, 2);
    world.submit(Priority::Predicted, 1, 4);
    assert_eq!(world.next(), (1, 0));
    world.submit(Priority::Demand, 2, 1);
    assert_eq!(world.next(), (2, 0), "a paused job does not stand in the way");
    world.submit(Priority::Demand, 3, 1);
    world.submit(Priority::WarmUp, 4, 1);
    world.step();
    world.step();
    // Both reads in flight are done, and only the second demand goes on.
    assert_eq!(world.next(), (3, 0));
    world.quiet();
    world.step();
    // The rest goes on where it stopped; what is to warm up waits for what is predicted.
    assert_eq!(world.next(), (1, 1));
    world.quiet();
    world.submit(Priority::Predicted, 5, 1);
    assert_eq!(world.next(), (5, 0), "two at a time");
    let mut tags = world.finish();
    assert_eq!(tags[..2], [2, 3]);
    assert_eq!(tags.pop(), Some(4));
    tags.sort();
    assert_eq!(tags, [1, 2, 3, 5]);
}

#[test]
fn warming_up_pauses_for_predictions_and_leaves_them_a_worker() {
    let world = World::new(1, 2);
    world.submit(Priority::WarmUp, 1, 2);
    world.submit(Priority::WarmUp, 2, 1);
    assert_eq!(world.next(), (1, 0));
    world.quiet();
    world.submit(Priority::Predicted, 3, 2);
    assert_eq!(world.next(), (3, 0));
    world.step();
    world.step();
    assert_eq!(world.next(), (3, 1));
    world.quiet();
    world.step();
    assert_eq!(world.next(), (1, 1));
    assert_eq!(world.finish(), [3, 1, 2]);
}

#[test]
fn a_promoted_job_is_a_demand_queued_or_running() {
    let world = World::new(1, 1);
    world.submit(Priority::WarmUp, 1, 3);
    assert_eq!(world.next(), (1, 0));
    world.submit(Priority::WarmUp, 2, 1);
    world.submit(Priority::Predicted, 3, 1);
    assert!(world.reader.promote(2));
    assert_eq!(world.next(), (2, 0));
    assert!(world.reader.promote(1), "while it is read");
    world.step();
    world.step();
    assert_eq!(world.next(), (1, 1), "it goes on");
    assert!(!world.reader.promote(77) && !world.reader.abort(1));
    let mut tags = world.finish();
    tags[..2].sort();
    assert_eq!(tags, [1, 2, 3], "the predicted one waits for both");
}

#[test]
fn queued_jobs_can_be_taken_back() {
    let world = World::new(1, 1);
    world.submit(Priority::Demand, 1, 1);
    assert_eq!(world.next(), (1, 0));
    for (tag, priority) in
        [(2, Priority::Demand), (3, Priority::WarmUp), (4, Priority::Predicted), (5, Priority::WarmUp)]
    {
        world.submit(priority, tag, 1);
    }
    let tags = |jobs: Vec<Job>| jobs.iter().map(|job| job.tag).collect::<Vec<_>>();
    assert_eq!(world.reader.cancel(3).map(|job| job.tag), Some(3));
    assert!(world.reader.cancel(3).is_none() && world.reader.cancel(1).is_none());
    assert_eq!(tags(world.reader.withdraw(Priority::WarmUp)), [5]);
    assert_eq!(tags(world.reader.withdraw(Priority::Predicted)), [4]);
    assert_eq!(world.reader.in_flight(), 2);
    assert_eq!(tags(world.reader.withdraw(Priority::Demand)), [2]);
    let arena = world.arena.clone();
    assert_eq!(world.finish(), [1]);
    assert_eq!(arena.stats().in_use_bytes, 0);
}

#[test]
fn an_aborted_job_says_what_it_cost() {
    let world = World::new(1, 1);
    world.submit(Priority::Predicted, 1, 4);
    for piece in 0..3 {
        assert_eq!(world.next(), (1, piece));
        if piece < 2 {
            world.step();
        }
    }
    assert!(world.reader.abort(1));
    world.step();
    let done = world.reader.recv().unwrap();
    let bytes = 3 * PIECE as u64;
    assert_eq!(done.result.unwrap_err(), ReadError::Aborted { path: "gate".into(), bytes, reads: 3 });
    assert!(!world.reader.abort(1));
    // A paused job can be aborted too.
    world.submit(Priority::WarmUp, 2, 4);
    assert_eq!(world.next(), (2, 0));
    world.submit(Priority::Demand, 3, 1);
    assert_eq!(world.next(), (3, 0));
    assert!(world.reader.abort(2));
    world.step();
    world.step();
    let mut done = [world.reader.recv().unwrap(), world.reader.recv().unwrap()];
    done.sort_by_key(|done| done.tag);
    assert!(matches!(done[0].result, Err(ReadError::Aborted { bytes: 4096, reads: 1, .. })));
    assert!(done[1].result.is_ok());
}

#[test]
fn the_ring_keeps_the_same_rules() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard");
    let bytes: Vec<u8> = (0..1 << 20).map(|i: u32| (i >> 12) as u8).collect();
    std::fs::write(&path, &bytes).unwrap();
    let shards = open_files(&[path], Access::Direct).unwrap().shards;
    let config = ReaderConfig {
        workers: 2,
        ahead: 1,
        piece: PIECE,
        backend: Backend::Uring,
        ..ReaderConfig::default()
    };
    let reader = Reader::new(shards, config).unwrap();
    let arena = Arena::new(&[SlabClass { bytes: 1 << 19, count: 40 }]).unwrap();
    let mut aborted = 0;
    for round in 0..20 {
        for tag in 0..10 {
            let priority = if tag < 5 { Priority::WarmUp } else { Priority::Demand };
            let (offset, len) = (tag << 12, 1 << 19);
            reader.submit(priority, job(tag, offset, len, arena.take(0).unwrap()));
        }
        reader.promote(2);
        reader.abort(round % 5);
        let cancelled = reader.cancel(4);
        let mut count = usize::from(cancelled.is_some());
        drop(cancelled);
        while let Some(done) = reader.recv() {
            count += 1;
            match done.result {
                Ok(stats) => {
                    assert_eq!(stats.bytes, 1 << 19);
                    assert!(done.slab[..1 << 19] == bytes[(done.tag as usize) << 12..][..1 << 19]);
                }
                Err(ReadError::Aborted { bytes, .. }) => {
                    aborted += 1;
                    assert!(done.tag < 5 && bytes < 1 << 19);
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(count, 10);
    }
    assert!(aborted <= 20);
    assert_eq!(arena.stats().in_use_bytes, 0);
}

#[test]
fn demands_keep_every_worker_busy() {
    let faults = Faults { latency: Duration::from_millis(4), ..Faults::default() };
    let shard = Shard { path: "slow".into(), file: Arc::new(FaultyDisk::of_bytes(vec![0; 1 << 16], faults)) };
    let reader = Reader::new(vec![shard], ReaderConfig { workers: 4, ..ReaderConfig::default() }).unwrap();
    let arena = Arena::new(&[SlabClass { bytes: PIECE, count: 64 }]).unwrap();
    for tag in 0..64 {
        reader.submit(Priority::Demand, job(tag, tag * 512, 512, arena.take(0).unwrap()));
    }
    while reader.recv().is_some() {}
    let gauge = reader.gauge();
    assert!(gauge.idle * 4 < gauge.outstanding, "{gauge:?}");
    assert!(gauge.mean_depth() > 2.0 && gauge.mean_depth() < 4.01, "{gauge:?}");
    std::thread::sleep(Duration::from_millis(5));
    assert_eq!(reader.gauge(), gauge, "nothing is outstanding");
}

#[test]
fn a_throttled_disk_takes_its_time_and_serves_demands_first() {
    let shard = Shard {
        path: "ram".into(),
        file: Arc::new(FaultyDisk::of_bytes(vec![5; 4 << 20], Faults::default())),
    };
    let config = ReaderConfig { throttle: Some(64 << 20), piece: 64 << 10, ..ReaderConfig::default() };
    let reader = Reader::new(vec![shard], config).unwrap();
    let arena = Arena::new(&[SlabClass { bytes: 1 << 20, count: 8 }]).unwrap();
    let start = Instant::now();
    for tag in 0..8 {
        let priority = if tag < 2 { Priority::WarmUp } else { Priority::Demand };
        reader.submit(priority, job(tag, 0, 1 << 20, arena.take(0).unwrap()));
    }
    let mut order = Vec::new();
    while let Some(done) = reader.recv() {
        assert_eq!(done.result.unwrap().bytes, 1 << 20);
        order.push(done.tag);
    }
    // 8 MiB at 64 MiB/s, whatever the machine does.
    assert!(start.elapsed() >= Duration::from_millis(125));
    order[..6].sort();
    assert_eq!(order[..6], [2, 3, 4, 5, 6, 7]);
}
