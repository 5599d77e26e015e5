//! How fast files can be read, measured with the reader that will read them.

use std::path::Path;
use std::time::{Duration, Instant};

use forebay_core::{DIRECT_ALIGN, ReadSegment};

use crate::open::{Access, OpenError, Opened, Shard, open_files};
use crate::read::ReadError;
use crate::reader::{Backend, Job, Priority, Reader, ReaderConfig, StartError};
use crate::slab::{Arena, ArenaError, Slab, SlabClass};

/// What this machine was found to deliver, in bytes per second; `None` is "not measured".
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Rates {
    /// Experts from disk.
    pub disk: Option<f64>,
    /// Weights from memory, with all compute threads.
    pub memory: Option<f64>,
    /// Panels of int4 that one core decodes.
    pub decode: Option<f64>,
}

/// One way to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Who reads.
    pub backend: Backend,
    /// Past the page cache or through it.
    pub access: Access,
    /// Reads at a time.
    pub depth: usize,
}

/// What is read, and when it is enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProbeConfig {
    /// How.
    pub way: Way,
    /// Bytes of one read; less from files that have less.
    pub block: usize,
    /// No read starts after this many bytes.
    pub bytes: u64,
    /// No read starts after this time.
    pub time: Duration,
    /// Chooses where the reads lie.
    pub seed: u64,
}

/// What was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Probed {
    /// Bytes read.
    pub bytes: u64,
    /// From the first read to the end of the last.
    pub elapsed: Duration,
    /// Time of one read from its start: the middle one.
    pub p50: Duration,
    /// The same: 99 of 100 are not slower.
    pub p99: Duration,
    /// Who really read.
    pub backend: Backend,
    /// What is not as it was asked for, for the user.
    pub notes: Vec<String>,
}

impl Probed {
    /// Bytes per second.
    pub fn rate(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Why nothing could be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProbeError {
    /// A file could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No memory for what is read.
    #[error(transparent)]
    Memory(#[from] ArenaError),
    /// The reader did not start.
    #[error(transparent)]
    Start(#[from] StartError),
    /// A read failed.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// There is nothing to read.
    #[error("there are no bytes to read in these files; name others")]
    Empty,
}

/// Reads blocks from random places of the files, as many at a time as the depth says. With
/// [`Uncached`](Access::Uncached) access what the page cache holds of a block is dropped first, so that the
/// disk is measured and not the cache.
pub fn probe<P: AsRef<Path>>(paths: &[P], config: &ProbeConfig) -> Result<Probed, ProbeError> {
    let &ProbeConfig { way, block, bytes, time, seed } = config;
    let depth = way.depth.max(1);
    let Opened { shards, mut notes } = open_files(paths, way.access)?;
    let mut places = Places::new(&shards, block, seed)?;
    let reader_config = ReaderConfig { workers: depth, backend: way.backend, ..ReaderConfig::default() };
    let reader = Reader::new(shards, reader_config)?;
    notes.extend_from_slice(reader.notes());
    // One more than are read at a time, so that the next is there when one is done.
    let room = block.saturating_add(2 * DIRECT_ALIGN);
    let arena = Arena::new(&[SlabClass { bytes: room, count: depth + 1 }])?;
    let mut slabs: Vec<Slab> = std::iter::from_fn(|| arena.take(0)).collect();
    // Memory that was never written to costs time at the first read.
    slabs.iter_mut().for_each(|slab| slab.fill(1));

    let start = Instant::now();
    let (mut asked, mut got, mut tag) = (0, 0, 0);
    let mut times = Vec::new();
    loop {
        while asked < bytes && start.elapsed() < time {
            let Some(slab) = slabs.pop() else { break };
            let segment = places.next();
            if way.access == Access::Uncached {
                reader.shards()[segment.shard as usize].file.forget(segment.offset, segment.len);
            }
            asked += segment.len as u64;
            tag += 1;
            let (segments, len) = ([segment].into(), slab.len());
            reader.submit(Priority::Demand, Job { tag, segments, slab, len, check: None, transform: None });
        }
        let Some(done) = reader.recv() else { break };
        let stats = done.result?;
        got += stats.bytes;
        times.push(stats.service);
        slabs.push(done.slab);
    }
    let elapsed = start.elapsed();
    times.sort();
    let at = |percent: usize| times[(times.len() * percent / 100).min(times.len() - 1)];
    if times.is_empty() {
        return Err(ProbeError::Empty);
    }
    Ok(Probed { bytes: got, elapsed, p50: at(50), p99: at(99), backend: reader.backend(), notes })
}

/// Random places in files, any byte as likely as any other.
struct Places {
    /// Where each file ends if all were one.
    ends: Vec<u64>,
    block: usize,
    state: u64,
}

impl Places {
    fn new(shards: &[Shard], block: usize, seed: u64) -> Result<Self, ProbeError> {
        let mut end = 0u64;
        let mut ends = Vec::with_capacity(shards.len());
        for shard in shards {
            let size = shard.file.size();
            end =
                end.saturating_add(size.map_err(|cause| OpenError::Os { path: shard.path.clone(), cause })?);
            ends.push(end);
        }
        if end == 0 || block == 0 {
            return Err(ProbeError::Empty);
        }
        Ok(Self { ends, block, state: seed })
    }

    fn next(&mut self) -> ReadSegment {
        let total = self.ends.last().copied().unwrap_or(0);
        let at = self.random() % total;
        let shard = self.ends.partition_point(|end| *end <= at);
        let first = if shard == 0 { 0 } else { self.ends[shard - 1] };
        let size = self.ends[shard] - first;
        let len = size.min(self.block as u64);
        let offset = (at - first).min(size - len);
        let dst = (offset % DIRECT_ALIGN as u64) as usize;
        ReadSegment { shard: shard as u32, offset, len: len as usize, dst }
    }

    /// The SplitMix64 generator.
    fn random(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.state ^ (self.state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(access: Access, block: usize, bytes: u64) -> ProbeConfig {
        let way = Way { backend: Backend::Pool, access, depth: 2 };
        ProbeConfig { way, block, bytes, time: Duration::from_secs(60), seed: 1 }
    }

    #[test]
    fn reads_what_it_was_told_to_and_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [dir.path().join("a"), dir.path().join("b"), dir.path().join("none")];
        std::fs::write(&paths[0], vec![1; 50_000]).unwrap();
        std::fs::write(&paths[1], vec![2; 3_000]).unwrap();
        std::fs::write(&paths[2], []).unwrap();
        for access in [Access::Buffered, Access::Uncached, Access::Direct] {
            let found = probe(&paths, &config(access, 10_000, 200_000)).unwrap();
            assert!((200_000..210_000).contains(&found.bytes), "{found:?}");
            assert!(found.p50 <= found.p99 && found.p99 <= found.elapsed && found.rate() > 0.0);
        }
        assert!(matches!(probe(&paths[2..], &config(Access::Direct, 10, 10)), Err(ProbeError::Empty)));
        let nothing = ProbeConfig { time: Duration::ZERO, ..config(Access::Direct, 10, 10) };
        assert!(matches!(probe(&paths, &nothing), Err(ProbeError::Empty)));
    }

    #[test]
    fn places_are_within_their_files_and_everywhere() {
        let dir = tempfile::tempdir().unwrap();
        let paths = [dir.path().join("a"), dir.path().join("b")];
        std::fs::write(&paths[0], [1; 1000]).unwrap();
        std::fs::write(&paths[1], [1; 9000]).unwrap();
        let shards = open_files(&paths, Access::Buffered).unwrap().shards;
        let mut places = Places::new(&shards, 2000, 7).unwrap();
        let all: Vec<ReadSegment> = (0..1000).map(|_| places.next()).collect();
        for place in &all {
            let size = [1000, 9000][place.shard as usize];
            assert!(place.offset + place.len as u64 <= size && place.len == size.min(2000) as usize);
        }
        let first = all.iter().filter(|place| place.shard == 0).count();
        assert!((50..200).contains(&first), "a tenth of the bytes: {first}");
        assert!(all.iter().any(|place| place.offset < 1000 && place.shard == 1));
        assert!(all.iter().any(|place| place.offset > 6000));
    }
}
