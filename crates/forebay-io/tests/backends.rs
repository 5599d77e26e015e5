//! Every way to read delivers the same bytes, and counts the same.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_core::ReadSegment;
use forebay_io::window::windows;
use forebay_io::{
    Access, Arena, Backend, Job, Priority, ReadError, Reader, ReaderConfig, Shard, SlabClass, open_files,
};
use forebay_testkit::fault::{Faults, FaultyDisk};
use proptest::prelude::*;

const WAYS: [(Backend, Access); 5] = [
    (Backend::Pool, Access::Buffered),
    (Backend::Pool, Access::Uncached),
    (Backend::Pool, Access::Direct),
    (Backend::Uring, Access::Buffered),
    (Backend::Uring, Access::Direct),
];

/// Bytes in which every position can be told from its neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8).collect()
}

/// A file in a folder that lives as long as the guard.
fn file(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("shard");
    std::fs::write(&path, bytes).unwrap();
    (dir, path)
}

/// Says, even if the test passes, what this machine could not do.
fn say(notes: &[String]) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !notes.is_empty() && !SAID.swap(true, Ordering::Relaxed) {
        let _ = writeln!(std::io::stderr(), "not tested on this machine: {}", notes.join("; "));
    }
}

/// A reader of one file, and whether its reads are direct.
fn reader(path: &PathBuf, (backend, access): (Backend, Access), piece: usize) -> (Reader, bool) {
    let opened = open_files(&[path], access).unwrap();
    let direct = opened.shards[0].file.is_direct();
    let config = ReaderConfig { workers: 3, piece, backend, ..ReaderConfig::default() };
    let reader = Reader::new(opened.shards, config).unwrap();
    say(&opened.notes);
    say(reader.notes());
    (reader, direct)
}

const ROOM: usize = 1 << 18;

/// Reads of pieces of a file of 300,000 bytes into a buffer of 64 pages: some keep their place in a page, some do not.
fn segments() -> impl Strategy<Value = Vec<ReadSegment>> {
    let one = (0u64..300_000, 1usize..40_000, prop::bool::weighted(0.8));
    prop::collection::vec(one, 1..5).prop_map(|spans| {
        let mut end = 0usize;
        let place = |(offset, len, keeps): (u64, usize, bool)| {
            let len = len.min(300_000 - offset as usize);
            let dst = end.next_multiple_of(4096) + if keeps { (offset % 4096) as usize } else { 3 };
            end = dst + len;
            ReadSegment { shard: 0, offset, len, dst }
        };
        spans.into_iter().map(place).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn the_same_bytes_from_everywhere(jobs in prop::collection::vec((segments(), 0usize..3), 1..6)) {
        let bytes = pattern(300_000);
        let (_dir, path) = file(&bytes);
        for way in WAYS {
            let (reader, direct) = reader(&path, way, 4096);
            let arena = Arena::new(&[SlabClass { bytes: ROOM, count: jobs.len() }]).unwrap();
            for (tag, (segments, priority)) in jobs.iter().enumerate() {
                let slab = arena.take(0).unwrap();
                let segments = segments.clone().into();
                let job = Job { tag: tag as u64, segments, slab, len: ROOM, check: None, transform: None };
                reader.submit(Priority::ALL[*priority], job);
            }
            let mut seen = 0;
            while let Some(done) = reader.recv() {
                let (segments, priority) = &jobs[done.tag as usize];
                let stats = done.result.unwrap();
                for s in segments {
                    let want = &bytes[s.offset as usize..][..s.len];
                    prop_assert_eq!(&done.slab[s.dst..][..s.len], want, "{:?} {:?}", way, s);
                }
                prop_assert_eq!(stats.bytes, segments.iter().map(|s| s.len as u64).sum::<u64>());
                let wide = windows(segments, ROOM).iter().flatten().count() as u64;
                if direct && *priority == 0 {
                    prop_assert_eq!((stats.direct_reads, stats.fallbacks), (wide, 0));
                    prop_assert_eq!(stats.reads, segments.len() as u64);
                } else if !direct {
                    prop_assert_eq!(stats.direct_reads, 0);
                }
                seen += 1;
            }
            prop_assert_eq!(seen, jobs.len());
            prop_assert_eq!(arena.stats().in_use_bytes, 0);
        }
    }
}

#[test]
fn a_file_cut_by_one_byte_is_one_byte_short_everywhere() {
    // Never "success".
    let (_dir, path) = file(&pattern(109_999));
    let segment = ReadSegment { shard: 0, offset: 10_000, len: 100_000, dst: 1808 };
    for way in WAYS {
        let (reader, _) = reader(&path, way, 1 << 20);
        let arena = Arena::new(&[SlabClass { bytes: 102_400, count: 1 }]).unwrap();
        let slab = arena.take(0).unwrap();
        let job =
            Job { tag: 0, segments: [segment].into(), slab, len: 102_400, check: None, transform: None };
        reader.submit(Priority::Demand, job);
        let error = reader.recv().unwrap().result.unwrap_err();
        let want = ReadError::EndOfFile { path: path.clone(), offset: 10_000, wanted: 100_000, got: 99_999 };
        assert_eq!(error, want, "{way:?}");
    }
}

#[test]
fn jobs_that_make_no_sense_fail_alone_everywhere() {
    let (_dir, path) = file(&pattern(10_000));
    for way in WAYS {
        let (reader, _) = reader(&path, way, 1 << 20);
        let arena = Arena::new(&[SlabClass { bytes: 8192, count: 1 }]).unwrap();
        let run = |shard, offset, len, dst, job_len| {
            let segments = [ReadSegment { shard, offset, len, dst }].into();
            let slab = arena.take(0).unwrap();
            reader.submit(
                Priority::Demand,
                Job { tag: 0, segments, slab, len: job_len, check: None, transform: None },
            );
            reader.recv().unwrap().result
        };
        assert!(matches!(run(1, 0, 10, 0, 10), Err(ReadError::UnknownShard { shard: 1, shards: 1 })));
        assert!(matches!(run(0, 0, 10, 1, 10), Err(ReadError::OutsideBuffer { room: 10, .. })));
        assert!(matches!(run(0, 0, 10, 0, 9000), Err(ReadError::OutsideBuffer { room: 8192, .. })));
        assert!(matches!(run(0, 0, 10, usize::MAX, 10), Err(ReadError::OutsideBuffer { .. })));
        assert!(matches!(run(0, u64::MAX - 3, 10, 0, 10), Err(ReadError::Os { .. })));
        assert!(matches!(run(0, 1 << 40, 10, 0, 10), Err(ReadError::EndOfFile { got: 0, .. })));
        assert!(run(0, 100, 10, 100, 200).is_ok(), "{way:?}");
    }
}

#[test]
fn a_dropped_reader_gives_every_slab_back() {
    let (_dir, path) = file(&pattern(300_000));
    for way in WAYS {
        let (reader, _) = reader(&path, way, 4096);
        let arena = Arena::new(&[SlabClass { bytes: ROOM, count: 40 }]).unwrap();
        for tag in 0..40 {
            let segments = [ReadSegment { shard: 0, offset: tag * 100, len: 200_000, dst: 0 }].into();
            let job =
                Job { tag, segments, slab: arena.take(0).unwrap(), len: ROOM, check: None, transform: None };
            reader.submit(Priority::ALL[tag as usize % 3], job);
        }
        drop(reader);
        assert_eq!(arena.stats().in_use_bytes, 0, "{way:?}");
    }
}

#[test]
fn what_a_ring_cannot_do_worker_threads_do() {
    let disk =
        || vec![Shard { path: "m".into(), file: Arc::new(FaultyDisk::of_bytes(vec![1], Faults::default())) }];
    let config = ReaderConfig { backend: Backend::Uring, ..ReaderConfig::default() };
    let reader = Reader::new(disk(), config).unwrap();
    assert_eq!((reader.backend(), reader.notes().len()), (Backend::Pool, 1));
    let (_dir, path) = file(&[1]);
    let shards = open_files(&[path], Access::Buffered).unwrap().shards;
    let reader = Reader::new(shards, ReaderConfig { throttle: Some(1 << 30), ..config }).unwrap();
    assert_eq!(reader.backend(), Backend::Pool);
    assert!(reader.notes()[0].contains("throttle"), "{:?}", reader.notes());
}

#[test]
fn short_direct_reads_and_misaligned_ones_end_well() {
    let bytes = pattern(300_000);
    let faults =
        Faults { seed: 3, direct: true, short_reads: 60, interrupts: 20, again: 20, ..Faults::default() };
    let disk = Arc::new(FaultyDisk::of_bytes(bytes.clone(), faults));
    let shard = Shard { path: "tired".into(), file: Arc::clone(&disk) as _ };
    let reader = Reader::new(vec![shard], ReaderConfig::default()).unwrap();
    let arena = Arena::new(&[SlabClass { bytes: ROOM, count: 1 }]).unwrap();
    let (mut fallbacks, mut retries, mut reads, mut direct) = (0, 0, 0, 0);
    for tag in 0..60 {
        let (offset, len) = (tag * 3000, 100_000);
        let segments = [ReadSegment { shard: 0, offset, len, dst: (offset % 4096) as usize }].into();
        let job =
            Job { tag, segments, slab: arena.take(0).unwrap(), len: ROOM, check: None, transform: None };
        reader.submit(Priority::Demand, job);
        let done = reader.recv().unwrap();
        assert_eq!(done.slab[(offset % 4096) as usize..][..len], bytes[offset as usize..][..len]);
        let stats = done.result.unwrap();
        fallbacks += stats.fallbacks;
        retries += stats.retries;
        reads += stats.reads;
        direct += stats.direct_reads;
    }
    assert!((1..60).contains(&fallbacks), "{fallbacks}");
    assert!(retries > 60, "{retries}");
    assert_eq!((reads, direct), (disk.reads(), disk.direct_reads()));
}

#[test]
fn whatever_goes_wrong_it_is_the_right_bytes_or_an_error() {
    let bytes = pattern(300_000);
    let (mut right, mut wrong) = (0, 0);
    for seed in 0..100 {
        let faults = Faults {
            seed,
            direct: seed % 2 == 0,
            errors: 60,
            short_reads: 40,
            interrupts: 20,
            again: 20,
            truncate_to: (seed % 5 == 0).then_some(290_000),
            ..Faults::default()
        };
        let disk = FaultyDisk::of_bytes(bytes.clone(), faults);
        let shard = Shard { path: "bad".into(), file: Arc::new(disk) };
        let config = ReaderConfig { workers: 3, piece: 8192, ..ReaderConfig::default() };
        let reader = Reader::new(vec![shard], config).unwrap();
        let arena = Arena::new(&[SlabClass { bytes: ROOM, count: 12 }]).unwrap();
        for tag in 0..12 {
            let (offset, len) = (tag * 20_000, 70_000);
            let segments = [ReadSegment { shard: 0, offset, len, dst: (offset % 4096) as usize }].into();
            let job =
                Job { tag, segments, slab: arena.take(0).unwrap(), len: ROOM, check: None, transform: None };
            reader.submit(Priority::ALL[tag as usize % 3], job);
        }
        let mut count = 0;
        while let Some(done) = reader.recv() {
            count += 1;
            let offset = done.tag as usize * 20_000;
            match done.result {
                Ok(_) => {
                    right += 1;
                    assert!(done.slab[offset % 4096..][..70_000] == bytes[offset..][..70_000], "seed {seed}");
                }
                Err(ReadError::Os { .. } | ReadError::EndOfFile { .. }) => wrong += 1,
                Err(other) => panic!("seed {seed}: {other}"),
            }
        }
        assert_eq!((count, arena.stats().in_use_bytes), (12, 0), "seed {seed}");
    }
    assert!(right > 300 && wrong > 100, "{right} right, {wrong} wrong");
}

/// A file of the system whose descriptors cannot be had without a panic, now and then.
#[cfg(target_os = "linux")]
struct Panicking {
    file: Arc<dyn forebay_io::ReadAt>,
    asked: std::sync::atomic::AtomicU64,
    every: std::sync::atomic::AtomicU64,
}

#[cfg(target_os = "linux")]
impl forebay_io::ReadAt for Panicking {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        self.file.read_at(buf, offset)
    }
    fn size(&self) -> std::io::Result<u64> {
        self.file.size()
    }
    fn descriptors(&self) -> Option<forebay_io::Descriptors> {
        let every = self.every.load(Ordering::Relaxed);
        let asked = self.asked.fetch_add(1, Ordering::Relaxed);
        assert!(every == 0 || asked % every != every - 1, "as the test wants it");
        self.file.descriptors()
    }
}

/// A panic of the ring's thread fails what it was reading, and nothing waits for ever.
#[cfg(target_os = "linux")]
#[test]
fn a_panic_of_the_ring_fails_its_reads_and_no_later_ones() {
    let bytes = pattern(300_000);
    let (_dir, path) = file(&bytes);
    let shard = open_files(&[&path], Access::Buffered).unwrap().shards.remove(0);
    let file = Arc::new(Panicking { file: shard.file, asked: Default::default(), every: Default::default() });
    let shards = vec![Shard { path: path.clone(), file: Arc::clone(&file) as _ }];
    let config = ReaderConfig { workers: 4, piece: 4096, backend: Backend::Uring, ..ReaderConfig::default() };
    let reader = Reader::new(shards, config).unwrap();
    say(reader.notes());
    if reader.backend() != Backend::Uring {
        return;
    }
    let arena = Arena::new(&[SlabClass { bytes: 65536, count: 12 }]).unwrap();
    let (mut right, mut panicked) = (0, 0);
    for (round, every) in [(0u64, 7), (1, 1), (2, 3), (3, 0)] {
        file.every.store(every, Ordering::Relaxed);
        let offset = |tag: u64| tag * 20_000 + round;
        for tag in 0..12 {
            let segments = [0, 1].map(|half: u64| ReadSegment {
                shard: 0,
                offset: offset(tag) + half * 9_000,
                len: 9_000,
                dst: half as usize * 16_384 + 5,
            });
            let (slab, segments) = (arena.take(0).unwrap(), segments.into());
            let job = Job { tag, segments, check: None, slab, len: 65536, transform: None };
            reader.submit(Priority::ALL[tag as usize % 3], job);
        }
        for _ in 0..12 {
            let done = reader.recv().expect("twelve were submitted");
            match done.result {
                Ok(_) => {
                    let at = offset(done.tag) as usize;
                    assert!(done.slab[5..9_005] == bytes[at..at + 9_000]);
                    assert!(done.slab[16_389..25_389] == bytes[at + 9_000..at + 18_000]);
                    right += 1;
                }
                Err(ReadError::Panicked { path: found, message, .. }) => {
                    assert_eq!((found, message.as_str()), (path.clone(), "as the test wants it"));
                    panicked += 1;
                }
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!((reader.in_flight(), arena.available(0)), (0, 12), "no slab is lost");
    }
    assert!(right >= 12 && panicked >= 12, "{right} right, {panicked} panicked");
}
