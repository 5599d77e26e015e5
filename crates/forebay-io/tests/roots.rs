//! Several disks with the same files.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forebay_core::ReadSegment;
use forebay_io::{
    Access, Arena, Backend, Done, Job, MirrorError, Priority, ReadError, Reader, ReaderConfig, Roots, Shard,
    SlabClass, open_files,
};
use forebay_testkit::fault::{Faults, FaultyDisk};

const LEN: usize = 1 << 20;

fn pattern(seed: u8) -> Vec<u8> {
    // A safetensors header of no length, then bytes.
    (0..LEN).map(|i| if i < 8 { 0 } else { (i ^ (i >> 9)) as u8 ^ seed }).collect()
}

fn disk(name: &str, seed: u8, faults: Faults) -> Shard {
    Shard { path: name.into(), file: Arc::new(FaultyDisk::of_bytes(pattern(seed), faults)) }
}

fn run(reader: &Reader, arena: &Arena, shard: u32, offset: u64, len: usize) -> Done {
    let segments = [ReadSegment { shard, offset, len, dst: 0 }].into();
    let slab = arena.take(0).unwrap();
    reader.submit(Priority::Demand, Job { tag: offset, segments, slab, len, check: None, transform: None });
    reader.recv().unwrap()
}

fn arena() -> Arena {
    Arena::new(&[SlabClass { bytes: LEN, count: 32 }]).unwrap()
}

#[test]
fn an_error_of_one_disk_is_made_good_by_the_other() {
    let bad = Faults { bad: Some(5000..5001), ..Faults::default() };
    let mut roots = Roots::from(vec![disk("a/0", 0, bad), disk("a/1", 1, Faults::default())]);
    roots.add(vec![Some(disk("b/0", 0, Faults::default())), None]).unwrap();
    let reader = Reader::with_roots(roots, ReaderConfig { workers: 1, ..ReaderConfig::default() }).unwrap();
    let arena = arena();
    let want = pattern(0);
    for _ in 0..20 {
        let done = run(&reader, &arena, 0, 4000, 2000);
        assert!(done.result.is_ok());
        assert_eq!(done.slab[..2000], want[4000..6000]);
    }
    let stats = reader.roots();
    assert_eq!((stats[0].errors, stats[0].suspects, stats[0].bytes), (1, 1, 0), "asked once only");
    assert_eq!((stats[1].errors, stats[1].suspects, stats[1].bytes), (0, 0, 40_000));
    // The shard that only the first root has comes from there.
    let done = run(&reader, &arena, 1, 100, 50);
    assert_eq!((done.result.unwrap().root, &done.slab[..50]), (0, &pattern(1)[100..150]));
}

/// Castagnoli's CRC, bit by bit.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 & 0u32.wrapping_sub(crc & 1)))
    })
}

#[test]
fn bytes_with_another_checksum_come_from_the_other_disk() {
    let want = pattern(0);
    let mut damaged = want.clone();
    // Behind the last page that is compared when a root is added.
    damaged[LEN - 5000] ^= 1;
    let segment = ReadSegment { shard: 0, offset: LEN as u64 - 8192, len: 8192, dst: 0 };
    let expected = crc32c(&want[LEN - 8192..]);
    let check = Some(expected);
    let arena = arena();
    let files = tempfile::tempdir().unwrap();
    let open = |name: &str, bytes: &[u8]| {
        std::fs::write(files.path().join(name), bytes).unwrap();
        open_files(&[files.path().join(name)], Access::Direct).unwrap().shards
    };
    for backend in [Backend::Pool, Backend::Uring] {
        let config = ReaderConfig { backend, ..ReaderConfig::default() };
        let ask = |reader: &Reader, check| {
            let slab = arena.take(0).unwrap();
            let job = Job { tag: 0, segments: [segment].into(), check, slab, len: 8192, transform: None };
            reader.submit(Priority::Demand, job);
            reader.recv().unwrap()
        };
        let mut roots = Roots::from(open("bad", &damaged));
        roots.add(open("good", &want).into_iter().map(Some).collect()).unwrap();
        let reader = Reader::with_roots(roots, config).unwrap();
        let mut stats = Vec::new();
        for _ in 0..3 {
            let done = ask(&reader, check);
            stats.push(done.result.unwrap());
            assert_eq!(done.slab[..8192], want[LEN - 8192..], "{backend}");
        }
        assert!(stats.iter().all(|stats| stats.bytes == 8192 && stats.root == 1), "{stats:?}");
        let checked: Vec<u64> = stats.iter().map(|stats| stats.checked).collect();
        assert_eq!(checked, [2 * 8192, 8192, 8192], "the wrong copy once, the right one each time");
        assert_eq!((reader.roots()[0].errors, reader.roots()[0].suspects), (1, 1));

        let reader = Reader::new(open("bad", &damaged), config).unwrap();
        let done = ask(&reader, check);
        let error = done.result.unwrap_err();
        let found = crc32c(&damaged[LEN - 8192..]);
        let path = files.path().join("bad");
        let (offset, len) = (segment.offset, 8192);
        assert_eq!(error, ReadError::Checksum { path, offset, len, expected, found }, "{backend}");
        assert_eq!(reader.roots()[0].errors, 2, "{backend}: read once more");
        assert_eq!(ask(&reader, None).result.unwrap().checked, 0);
        assert!(ask(&reader, Some(found)).result.is_ok());
    }
}

#[test]
fn an_error_of_all_disks_is_the_first_ones() {
    let bad = || Faults { bad: Some(0..LEN as u64), ..Faults::default() };
    let disks = [
        FaultyDisk::of_bytes(pattern(0), Faults::default()),
        FaultyDisk::of_bytes(pattern(0), Faults::default()),
    ];
    let [a, b] = disks.map(Arc::new);
    let shard = |name: &str, disk: &Arc<FaultyDisk>| Shard { path: name.into(), file: Arc::clone(disk) as _ };
    let mut roots = Roots::from(vec![shard("a", &a)]);
    roots.add(vec![Some(shard("b", &b))]).unwrap();
    let reader = Reader::with_roots(roots, ReaderConfig::default()).unwrap();
    let arena = arena();
    a.set(bad());
    b.set(bad());
    let error = run(&reader, &arena, 0, 0, 100).result.unwrap_err();
    assert!(matches!(&error, ReadError::Os { path, .. } if path == Path::new("a")), "{error}");
    // Suspects are still better than nothing.
    b.set(Faults::default());
    let done = run(&reader, &arena, 0, 0, 100);
    assert_eq!(done.result.unwrap().root, 1);
    assert_eq!(reader.roots().iter().map(|root| root.errors).sum::<u64>(), reader.roots()[0].errors + 1);
}

#[test]
fn the_faster_disk_does_more() {
    let slow = Faults { latency: Duration::from_millis(12), ..Faults::default() };
    let fast = Faults { latency: Duration::from_millis(2), ..Faults::default() };
    let mut roots = Roots::from(vec![disk("slow", 0, slow)]);
    roots.add(vec![Some(disk("fast", 0, fast))]).unwrap();
    let reader = Reader::with_roots(roots, ReaderConfig { workers: 4, ..ReaderConfig::default() }).unwrap();
    let arena = arena();
    let want = pattern(0);
    for round in 0..6 {
        for i in 0..32 {
            let (offset, len) = (8 + round * 1000 + i * 3000, 300_000);
            let segments = [ReadSegment { shard: 0, offset, len, dst: 0 }].into();
            let slab = arena.take(0).unwrap();
            reader.submit(
                Priority::Demand,
                Job { tag: offset, segments, slab, len, check: None, transform: None },
            );
        }
        while let Some(done) = reader.recv() {
            assert!(done.result.is_ok());
            assert!(done.slab[..300_000] == want[done.tag as usize..][..300_000]);
        }
    }
    let stats = reader.roots();
    assert_eq!(stats[0].bytes + stats[1].bytes, 6 * 32 * 300_000);
    assert!(stats[0].bytes > 0 && stats[1].bytes > 2 * stats[0].bytes, "{stats:?}");
}

#[test]
fn copies_must_be_copies() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let write = |dir: usize, name: &str, header: &[u8], rest: usize| {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.resize(bytes.len() + rest, 3);
        std::fs::write(dirs[dir].path().join(name), bytes).unwrap();
    };
    write(0, "m-1", br#"{"a":1}"#, 1000);
    write(0, "m-2", br#"{"b":2}"#, 1000);
    let paths = ["m-1", "m-2"].map(|name| dirs[0].path().join(name));
    let add = || {
        let mut roots = Roots::from(open_files(&paths, Access::Buffered).unwrap().shards);
        roots.add_dir(dirs[1].path(), Access::Buffered).map(|_| roots)
    };
    assert!(matches!(add(), Err(MirrorError::Empty { .. })));
    write(1, "m-2", br#"{"b":2}"#, 1000);
    let reader = Reader::with_roots(add().unwrap(), ReaderConfig::default()).unwrap();
    assert_eq!(reader.roots().len(), 2, "a partial copy will do");
    write(1, "m-1", br#"{"a":1}"#, 999);
    assert!(matches!(add(), Err(MirrorError::Differs { what: "its size", .. })));
    write(1, "m-1", br#"{"a":2}"#, 1000);
    let Err(error) = add() else { panic!() };
    assert!(matches!(&error, MirrorError::Differs { what: "its header", .. }));
    assert!(error.to_string().contains("m-1"), "{error}");
    // A file too short for a header has to be the same as far as it goes.
    std::fs::write(&paths[0], [1, 2]).unwrap();
    std::fs::write(dirs[1].path().join("m-1"), [1, 2]).unwrap();
    assert!(add().is_ok());
}

#[test]
fn a_file_that_is_cut_short_under_way_is_made_good_by_its_copy() {
    let ways = [
        (Backend::Pool, Access::Buffered),
        (Backend::Pool, Access::Direct),
        (Backend::Uring, Access::Direct),
    ];
    for (backend, access) in ways {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let paths = dirs.each_ref().map(|dir| dir.path().join("m"));
        let want = pattern(9);
        for path in &paths {
            std::fs::write(path, &want).unwrap();
        }
        let mut roots = Roots::from(open_files(&paths[..1], access).unwrap().shards);
        roots.add_dir(dirs[1].path(), access).unwrap();
        let config = ReaderConfig { workers: 2, backend, ..ReaderConfig::default() };
        let reader = Reader::with_roots(roots, config).unwrap();
        let file = std::fs::File::options().write(true).open(&paths[0]).unwrap();
        file.set_len(300_000).unwrap();
        let arena = arena();
        for offset in (0..10u64).map(|i| i * 4096 * 20) {
            let done = run(&reader, &arena, 0, offset, 100_000);
            assert!(done.result.is_ok(), "{backend} {access}: {:?}", done.result);
            assert!(done.slab[..100_000] == want[offset as usize..][..100_000]);
        }
        let stats = reader.roots();
        assert_eq!((stats[0].errors, stats[0].suspects, stats[1].errors), (1, 1, 0), "{backend} {access}");
        assert_eq!(stats[0].bytes + stats[1].bytes, 1_000_000);
    }
}
