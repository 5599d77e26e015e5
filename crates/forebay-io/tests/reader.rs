//! The worker pool and the exact read, on disks that misbehave.

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::ReadSegment;
use forebay_io::{
    Access, Arena, Done, Job, Priority, ReadAt, ReadError, Reader, ReaderConfig, Shard, Slab, SlabClass,
    Transform, open_files, read_exact_at,
};
use forebay_testkit::fault::{EIO, Faults, FaultyDisk};
use proptest::prelude::*;

/// Bytes in which every position can be told from its neighbours.
fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(31) ^ (i >> 8)) as u8).collect()
}

fn shard(name: &str, disk: FaultyDisk) -> Shard {
    Shard { path: name.into(), file: Arc::new(disk) }
}

fn reader(shards: Vec<Shard>, workers: usize, scratch_per_worker: usize) -> Reader {
    Reader::new(shards, ReaderConfig { workers, scratch_per_worker, ..ReaderConfig::default() }).unwrap()
}

fn arena(bytes: usize, count: usize) -> Arena {
    Arena::new(&[SlabClass { bytes, count }]).unwrap()
}

fn plain(tag: u64, segments: &[ReadSegment], slab: Slab) -> Job {
    let len = segments.iter().map(|s| s.dst + s.len).max().unwrap_or(0);
    Job { tag, segments: segments.into(), slab, len, check: None, transform: None }
}

fn seg(shard: u32, offset: u64, len: usize, dst: usize) -> ReadSegment {
    ReadSegment { shard, offset, len, dst }
}

#[test]
fn gathers_segments_of_two_shards_and_counts_them() {
    let (a, b) = (pattern(1000), pattern(2000));
    let shards = vec![
        shard("a", FaultyDisk::of_bytes(a.clone(), Faults::default())),
        shard("b", FaultyDisk::of_bytes(b.clone(), Faults::default())),
    ];
    let reader = reader(shards, 2, 0);
    let arena = arena(4096, 2);
    reader.submit(
        Priority::Demand,
        plain(7, &[seg(1, 500, 100, 0), seg(0, 10, 50, 120)], arena.take(0).unwrap()),
    );
    assert_eq!(reader.in_flight(), 1);
    let Done { tag, slab, result } = reader.recv().unwrap();
    let stats = result.unwrap();
    assert_eq!((tag, stats.bytes, stats.reads), (7, 150, 2));
    assert_eq!(slab[..100], b[500..600]);
    assert_eq!(slab[100..120], [0; 20]);
    assert_eq!(slab[120..170], a[10..60]);
    assert_eq!(reader.in_flight(), 0);
    assert!(reader.recv().is_none() && reader.try_recv().is_none(), "nothing is in flight");
}

#[test]
fn a_shard_cut_by_one_byte_is_one_byte_short() {
    let disk = FaultyDisk::of_bytes(pattern(1000), Faults { truncate_to: Some(999), ..Faults::default() });
    let reader = reader(vec![shard("cut", disk)], 1, 0);
    reader.submit(Priority::Demand, plain(0, &[seg(0, 600, 400, 0)], arena(4096, 1).take(0).unwrap()));
    let error = reader.recv().unwrap().result.unwrap_err();
    assert_eq!(error, ReadError::EndOfFile { path: "cut".into(), offset: 600, wanted: 400, got: 399 });
}

#[test]
fn a_bad_sector_is_named() {
    let disk = FaultyDisk::of_bytes(pattern(1000), Faults { bad: Some(650..651), ..Faults::default() });
    let mut buf = [0; 400];
    let error = read_exact_at(&disk, Path::new("model-1"), &mut buf, 600).unwrap_err();
    assert!(
        matches!(&error, ReadError::Os { path, offset: 600, wanted: 400, got: 50, os_code: Some(EIO), .. }
            if path == Path::new("model-1")),
        "{error:?}"
    );
    let text = error.to_string();
    assert!(
        text.contains("model-1") && text.contains("offset 600") && text.contains("check the disk"),
        "{text}"
    );
}

/// What fails once is read once more, and counted; what fails twice is the error of its job.
#[test]
fn a_read_that_fails_is_tried_once_more() {
    let bytes = pattern(1000);
    let arena = arena(4096, 1);
    let run = |reader: &Reader, segments: &[ReadSegment]| {
        reader.submit(Priority::Demand, plain(0, segments, arena.take(0).unwrap()));
        let Done { slab, result, .. } = reader.recv().unwrap();
        (slab[..400].to_vec(), result)
    };
    // Every first try fails.
    let faults = Faults { errors: 1000, passing: true, ..Faults::default() };
    let passing = reader(vec![shard("a", FaultyDisk::of_bytes(bytes.clone(), faults))], 1, 0);
    for at in 0..20 {
        let (found, result) = run(&passing, &[seg(0, at, 100, 0), seg(0, 300 + at, 300, 100)]);
        let stats = result.unwrap();
        assert_eq!((stats.reads, stats.retries, stats.bytes), (4, 2, 400), "both segments were read twice");
        let at = at as usize;
        assert_eq!(found, [&bytes[at..at + 100], &bytes[300 + at..600 + at]].concat());
    }
    assert_eq!(passing.roots()[0].errors, 40);
    // What stays is tried twice, and no more: an error, and an end that comes too early.
    let stays = [
        Faults { bad: Some(600..601), ..Faults::default() },
        Faults { truncate_to: Some(600), ..Faults::default() },
    ];
    for faults in stays {
        let disk = Arc::new(FaultyDisk::of_bytes(bytes.clone(), faults));
        let shard = Shard { path: "a".into(), file: Arc::clone(&disk) as _ };
        let reader = reader(vec![shard], 1, 0);
        let (_, result) = run(&reader, &[seg(0, 600, 400, 0)]);
        let error = result.unwrap_err();
        assert!(
            matches!(error, ReadError::Os { os_code: Some(EIO), .. } | ReadError::EndOfFile { got: 0, .. }),
            "{error:?}"
        );
        assert_eq!((disk.reads(), reader.roots()[0].errors), (2, 2));
    }
}

/// A file whose bytes arrive wrong every other time.
struct Flips(FaultyDisk);

impl ReadAt for Flips {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<usize> {
        let read = self.0.read_at(buf, offset)?;
        buf[0] ^= u8::from(self.0.reads() % 2 == 1);
        Ok(read)
    }

    fn size(&self) -> std::io::Result<u64> {
        self.0.size()
    }
}

/// Bytes that were wrong on their way are read once more.
#[test]
fn bytes_with_another_checksum_are_read_once_more() {
    let bytes = pattern(1000);
    let flips = Flips(FaultyDisk::of_bytes(bytes.clone(), Faults::default()));
    let reader = reader(vec![Shard { path: "a".into(), file: Arc::new(flips) }], 1, 0);
    let arena = arena(4096, 1);
    for at in [0, 300] {
        let (segment, slab) = (seg(0, at, 400, 0), arena.take(0).unwrap());
        let check = Some(crc32c::crc32c(&bytes[at as usize..][..400]));
        reader.submit(Priority::Demand, Job { check, ..plain(0, &[segment], slab) });
        let Done { slab, result, .. } = reader.recv().unwrap();
        let stats = result.unwrap();
        assert_eq!((stats.reads, stats.retries, stats.checked), (2, 1, 800));
        assert_eq!(slab[..400], bytes[at as usize..][..400]);
    }
}

#[test]
fn jobs_that_make_no_sense_fail_alone() {
    let reader = reader(vec![shard("a", FaultyDisk::of_bytes(pattern(100), Faults::default()))], 1, 0);
    let arena = arena(4096, 1);
    let run = |segment: ReadSegment, len: usize| {
        let slab = arena.take(0).expect("the last job gave its slab back");
        reader.submit(
            Priority::Demand,
            Job { tag: 0, segments: [segment].into(), slab, len, check: None, transform: None },
        );
        reader.recv().unwrap().result
    };
    assert!(matches!(run(seg(3, 0, 10, 0), 10), Err(ReadError::UnknownShard { shard: 3, shards: 1 })));
    assert!(matches!(run(seg(0, 0, 10, 1), 10), Err(ReadError::OutsideBuffer { room: 10, .. })));
    assert!(matches!(run(seg(0, 0, 10, usize::MAX), 10), Err(ReadError::OutsideBuffer { .. })));
    assert!(matches!(
        run(seg(0, 0, 10, 0), 5000),
        Err(ReadError::OutsideBuffer { len: 5000, room: 4096, .. })
    ));
    assert!(run(seg(0, 0, 10, 0), 10).is_ok());
}

/// Writes each raw byte twice; refuses a raw 0xff and panics on a raw 0xfe.
struct Double;

impl Transform for Double {
    fn raw_len(&self) -> usize {
        8
    }
    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        for (pair, &byte) in slab.chunks_exact_mut(2).zip(raw) {
            assert_ne!(byte, 0xfe, "the bad byte");
            if byte == 0xff {
                return Err("byte 255".into());
            }
            pair.fill(byte);
        }
        Ok(())
    }
}

#[test]
fn transforms_fill_the_slab_fail_or_panic_without_losing_the_job() {
    let mut bytes: Vec<u8> = (0..32).collect();
    bytes[9] = 0xff;
    bytes[17] = 0xfe;
    let reader = reader(vec![shard("a", FaultyDisk::of_bytes(bytes, Faults::default()))], 1, 8);
    let arena = arena(4096, 1);
    let run = |offset: u64, transform: Arc<dyn Transform>| {
        let slab = arena.take(0).unwrap();
        let segments = [seg(0, offset + 4, 4, 4), seg(0, offset, 4, 0)].into();
        reader.submit(
            Priority::Demand,
            Job { tag: offset, segments, slab, len: 16, check: None, transform: Some(transform) },
        );
        reader.recv().unwrap()
    };
    let done = run(0, Arc::new(Double));
    assert_eq!(done.result.unwrap().bytes, 8);
    assert_eq!(done.slab[..17], [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 0]);
    drop(done.slab);

    let error = run(8, Arc::new(Double)).result.unwrap_err();
    assert!(
        matches!(&error, ReadError::Transform { offset: 12, reason, .. } if reason == "byte 255"),
        "{error:?}"
    );
    let error = run(16, Arc::new(Double)).result.unwrap_err();
    assert!(
        matches!(&error, ReadError::Panicked { offset: 20, message, .. } if message.contains("the bad byte")),
        "{error:?}"
    );
    // The one worker survived the panic.
    assert!(run(24, Arc::new(Double)).result.is_ok());

    struct Greedy;
    impl Transform for Greedy {
        fn raw_len(&self) -> usize {
            9
        }
        fn apply(&self, _: &[u8], _: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
            Ok(())
        }
    }
    let error = run(0, Arc::new(Greedy)).result.unwrap_err();
    assert_eq!(error, ReadError::ScratchLimit { needed: 9, limit: 8 });
}

/// Turns the raw bytes at the end of the slab round, to its start.
struct TurnRound {
    raw_len: usize,
}

impl Transform for TurnRound {
    fn raw_len(&self) -> usize {
        self.raw_len
    }
    fn reads_into_slab(&self) -> bool {
        true
    }
    fn apply(&self, raw: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn Error + Send + Sync>> {
        assert!(raw.is_empty());
        let start = slab.len() - self.raw_len;
        let (front, behind) = slab.split_at_mut(start);
        front.iter_mut().zip(behind.iter().rev()).for_each(|(to, from)| *to = *from);
        Ok(())
    }
}

/// Such jobs need no scratch, are read past the page cache where they lie in pages, and have their checksums compared.
#[test]
fn raw_bytes_may_be_read_to_the_end_of_the_slab() {
    let (bytes, dir) = (pattern(5 * 4096), tempfile::tempdir().unwrap());
    let path = dir.path().join("file");
    std::fs::write(&path, &bytes).unwrap();
    let wanted = &bytes[4096..3 * 4096];
    for access in [Access::Direct, Access::Buffered] {
        let opened = open_files(&[&path], access).unwrap();
        let reader = reader(opened.shards, 1, 0);
        let arena = arena(6 * 4096, 2);
        let run = |len, check, segment, raw_len| {
            let transform = Some(Arc::new(TurnRound { raw_len }) as _);
            let (segments, slab) = ([segment].into(), arena.take(0).unwrap());
            reader.submit(Priority::Demand, Job { tag: 0, segments, slab, len, check, transform });
            reader.recv().unwrap()
        };
        let turned: Vec<u8> = wanted.iter().rev().copied().collect();
        for len in [4 * 4096, 5 * 4096] {
            let done = run(len, Some(crc32c::crc32c(wanted)), seg(0, 4096, 8192, 0), 8192);
            let stats = done.result.unwrap();
            assert_eq!((stats.bytes, stats.checked), (8192, 8192));
            assert!(done.slab[..8192] == turned);
        }
        // Not a whole number of pages: read exactly, through the page cache.
        let done = run(1000, None, seg(0, 4096, 300, 0), 300);
        assert_eq!((done.result.unwrap().direct_reads, done.slab[0]), (0, bytes[4395]));
        let error = run(16384, Some(1), seg(0, 4096, 8192, 0), 8192).result.unwrap_err();
        assert!(matches!(error, ReadError::Checksum { .. }), "{error:?}");
        let error = run(4096, None, seg(0, 4096, 8192, 0), 8192).result.unwrap_err();
        assert!(matches!(error, ReadError::OutsideBuffer { .. }), "{error:?}");
    }
}

#[test]
fn withdrawn_and_dropped_jobs_give_their_slabs_back() {
    let slow = Faults { latency: Duration::from_millis(2), ..Faults::default() };
    let reader = reader(vec![shard("slow", FaultyDisk::of_bytes(pattern(1000), slow))], 1, 0);
    let arena = arena(4096, 20);
    let submit_all = || {
        for tag in 0..20 {
            reader.submit(Priority::Demand, plain(tag, &[seg(0, tag * 10, 10, 0)], arena.take(0).unwrap()));
        }
    };
    submit_all();
    let mut tags: Vec<u64> = reader.withdraw(Priority::Demand).into_iter().map(|job| job.tag).collect();
    while let Some(done) = reader.recv() {
        tags.push(done.tag);
    }
    tags.sort();
    assert_eq!(tags, (0..20).collect::<Vec<_>>());
    assert_eq!(arena.stats().in_use_bytes, 0);

    submit_all();
    drop(reader);
    assert_eq!(arena.stats().in_use_bytes, 0);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Short reads, interruptions and any order of arrival change nothing but the count.
    #[test]
    fn a_tired_disk_delivers_the_same_bytes(
        seed: u64,
        workers in 1usize..5,
        short_reads in 0u8..=100,
        interrupts in 0u8..=100,
        spans in prop::collection::vec((0u64..5000, 1usize..3000), 1..12),
    ) {
        let bytes = pattern(8000);
        let latency = Duration::from_micros(200);
        let faults = Faults { seed, short_reads, interrupts, latency, ..Faults::default() };
        let reader = reader(vec![shard("a", FaultyDisk::of_bytes(bytes.clone(), faults))], workers, 0);
        let arena = arena(4096, spans.len());
        for (tag, &(offset, len)) in spans.iter().enumerate() {
            reader.submit(Priority::Demand, plain(tag as u64, &[seg(0, offset, len, 0)], arena.take(0).unwrap()));
        }
        let mut seen = vec![false; spans.len()];
        while let Some(done) = reader.recv() {
            let tag = done.tag as usize;
            let (offset, len) = spans[tag];
            let stats = done.result.unwrap();
            prop_assert_eq!(&done.slab[..len], &bytes[offset as usize..][..len]);
            prop_assert_eq!(stats.bytes, len as u64);
            prop_assert!(stats.reads >= 1);
            prop_assert!(!std::mem::replace(&mut seen[tag], true), "delivered twice");
        }
        prop_assert!(seen.into_iter().all(|s| s));
    }
}
