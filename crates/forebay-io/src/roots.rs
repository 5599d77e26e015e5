//! Several folders with the same files, on several disks: who is asked for what, and what that came to.
//!
//! Each read goes where it should be done first: the bytes already asked of a root, over the rate at which the
//! root has been delivering. A read that fails is done again from another root, and the file that failed is not
//! read again as long as another root has it; where no root is left, it is tried once more. Sizes, headers and samples are compared before a copy is used, so that
//! results are the same from everywhere.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::open::{Access, OpenError, Shard, open_files};
use crate::read::{ReadError, read_exact_at};
use crate::slab::PAGE;

/// Roots at most; far more than a machine has disks.
const MAX_ROOTS: usize = 64;
/// Longest file header that is compared; safetensors headers are shorter.
const MAX_HEADER: u64 = 128 << 20;
/// Pages of a file that are compared.
const SAMPLES: u64 = 64;
/// Bytes of headers that are compared at a time.
const HEADER_PART: usize = 1 << 16;
/// Shorter reads say nothing about a disk's rate.
const TELLING_BYTES: u64 = 1 << 16;
/// How much the newest rate counts.
const NEWEST: f64 = 0.2;

/// The files of a model, and further copies of some or all of them.
pub struct Roots {
    primary: Vec<Shard>,
    mirrors: Vec<Vec<Option<Shard>>>,
}

/// Why a folder cannot serve as a further root.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MirrorError {
    /// A copy could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A file or its copy could not be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The system does not say how long a file is.
    #[error("{path}: the size is not known: {cause}; check the disk")]
    Size {
        /// The file.
        path: PathBuf,
        /// What the system said.
        cause: io::Error,
    },
    /// Something else has the name of a file.
    #[error(
        "{copy}: it is {kind}, not a copy of the model's file; put a copy there, or take this name out of the folder"
    )]
    NotACopy {
        /// What is there.
        copy: PathBuf,
        /// What it is, such as `a folder`.
        kind: &'static str,
    },
    /// The folder has none of the files.
    #[error("{dir}: has none of the model's files; name the folder that holds copies of them")]
    Empty {
        /// The folder.
        dir: PathBuf,
    },
    /// A copy is not the same file.
    #[error("{copy}: {what} differs from {path}; copy the file again, or leave this folder out")]
    Differs {
        /// The file.
        path: PathBuf,
        /// The supposed copy.
        copy: PathBuf,
        /// What differs.
        what: &'static str,
    },
    /// More folders than can be used.
    #[error("at most {MAX_ROOTS} folders can hold copies of a model; name fewer")]
    TooMany,
}

impl From<Vec<Shard>> for Roots {
    fn from(primary: Vec<Shard>) -> Self {
        Self { primary, mirrors: Vec::new() }
    }
}

impl Roots {
    /// Adds the files in `dir` that are named as the model's: every one of them must have the size and the
    /// header of the original. Returns what a user should know about them.
    pub fn add_dir(&mut self, dir: &Path, access: Access) -> Result<Vec<String>, MirrorError> {
        let mut mirror = Vec::with_capacity(self.primary.len());
        let mut notes = Vec::new();
        for shard in &self.primary {
            let copy = shard.path.file_name().map(|name| dir.join(name)).filter(|path| is_there(path));
            mirror.push(match copy {
                None => None,
                Some(path) => {
                    let opened = open_files(&[path], access).map_err(|error| match error {
                        OpenError::NotAFile { path: copy, kind } => MirrorError::NotACopy { copy, kind },
                        other => MirrorError::Open(other),
                    })?;
                    notes.extend(opened.notes);
                    opened.shards.into_iter().next()
                }
            });
        }
        if mirror.iter().all(Option::is_none) {
            return Err(MirrorError::Empty { dir: dir.to_owned() });
        }
        self.add(mirror)?;
        Ok(notes)
    }

    /// Adds copies, in the order of the shards, `None` where there is none.
    pub fn add(&mut self, mirror: Vec<Option<Shard>>) -> Result<(), MirrorError> {
        if self.mirrors.len() + 1 >= MAX_ROOTS {
            return Err(MirrorError::TooMany);
        }
        for (shard, copy) in self.primary.iter().zip(&mirror) {
            if let Some(copy) = copy {
                compare(shard, copy)?;
            }
        }
        self.mirrors.push(mirror);
        Ok(())
    }
}

/// Whether the name is taken, be it by a link to nothing or by what may not be looked at: opening it says so.
fn is_there(path: &Path) -> bool {
    let absent = [io::ErrorKind::NotFound, io::ErrorKind::NotADirectory];
    std::fs::symlink_metadata(path).map_or_else(|error| !absent.contains(&error.kind()), |_| true)
}

/// Sizes, headers and samples; comparing everything would take as long as reading the model. A copy that is
/// damaged in a few places passes: verify it.
fn compare(shard: &Shard, copy: &Shard) -> Result<(), MirrorError> {
    let differs = |what| MirrorError::Differs { path: shard.path.clone(), copy: copy.path.clone(), what };
    let size = |shard: &Shard| {
        shard.file.size().map_err(|cause| MirrorError::Size { path: shard.path.clone(), cause })
    };
    let len = size(shard)?;
    if len != size(copy)? {
        return Err(differs("its size"));
    }
    let mut buffers = [vec![0; HEADER_PART], vec![0; HEADER_PART]];
    // The first eight bytes of a safetensors file say how long its header is.
    let (mut at, mut end) = (0, len.min(8));
    while at < end {
        let part = (end - at).min(HEADER_PART as u64) as usize;
        let [a, b] = buffers.each_mut().map(|buffer| &mut buffer[..part]);
        read_exact_at(&*shard.file, &shard.path, a, at)?;
        read_exact_at(&*copy.file, &copy.path, b, at)?;
        if a != b {
            return Err(differs("its header"));
        }
        if at == 0 && end == 8 {
            let header = u64::from_le_bytes([a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]]);
            end = len.min(header.min(MAX_HEADER) + 8);
        }
        at += part as u64;
    }
    // Two fine-tunes of one model have equal headers. Samples all over the file tell them apart.
    for sample in 0..SAMPLES {
        let at = (len / SAMPLES).saturating_mul(sample).max(end).min(len);
        let part = (len - at).min(PAGE as u64) as usize;
        let [a, b] = buffers.each_mut().map(|buffer| &mut buffer[..part]);
        read_exact_at(&*shard.file, &shard.path, a, at)?;
        read_exact_at(&*copy.file, &copy.path, b, at)?;
        if a != b {
            return Err(differs("its contents"));
        }
    }
    Ok(())
}

/// What a root did so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RootStats {
    /// Wanted bytes that it delivered.
    pub bytes: u64,
    /// Reads that failed.
    pub errors: u64,
    /// Files of it that are not read any more where another root has them.
    pub suspects: u64,
    /// Bytes per second, lately; `None` before the first long read.
    pub rate: Option<f64>,
}

/// The roots while a reader uses them.
pub(crate) struct Sources {
    shards: Vec<Shard>,
    roots: Vec<Root>,
}

struct Root {
    files: Vec<Option<Source>>,
    queued_bytes: AtomicU64,
    queued: AtomicU64,
    bytes: AtomicU64,
    errors: AtomicU64,
    rate: Mutex<Option<f64>>,
}

/// One file of one root.
pub(crate) struct Source {
    /// The file.
    pub shard: Shard,
    suspect: AtomicBool,
    /// Its file system refused a direct read.
    buffered_only: AtomicBool,
}

impl Source {
    /// Whether reads past the page cache are worth a try.
    pub fn is_direct(&self) -> bool {
        self.shard.file.is_direct() && !self.buffered_only.load(Ordering::Relaxed)
    }

    /// Reads past the page cache do not work with this file.
    pub fn refuse_direct(&self) {
        self.buffered_only.store(true, Ordering::Relaxed);
    }
}

/// A read that was given to a root.
pub(crate) struct Booking {
    pub root: usize,
    shard: u32,
    len: u64,
    /// It may pause, so its time says nothing, and it stands in nobody's way.
    pauses: bool,
    /// Reads that the root then had to do, this one included.
    depth: u64,
    start: Instant,
}

/// The roots that a read was tried on.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tried {
    /// A bit each.
    roots: u64,
    /// It is being tried a second time: there is no third one.
    again: bool,
}

impl Tried {
    /// Whether to try a read once more that failed with `error` and has no root left: a disk may recover, and bytes may have
    /// been wrong on their way only.
    pub fn once_more(&mut self, error: Option<&ReadError>) -> bool {
        let once_more = !self.again && error.is_some_and(ReadError::may_pass);
        if once_more {
            *self = Self { roots: 0, again: true };
        }
        once_more
    }
}

impl Sources {
    pub fn new(roots: Roots) -> Self {
        let shards = roots.primary.clone();
        let all = std::iter::once(roots.primary.into_iter().map(Some).collect()).chain(roots.mirrors);
        Self { shards, roots: all.map(Root::new).collect() }
    }

    /// The files by which jobs name shards.
    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    pub fn get(&self, root: usize, shard: u32) -> Option<&Source> {
        self.roots.get(root)?.files.get(shard as usize)?.as_ref()
    }

    /// Every file, by root.
    pub fn all(&self) -> impl Iterator<Item = &Source> {
        self.roots.iter().flat_map(|root| root.files.iter().flatten())
    }

    /// Picks the root that should deliver first and books the read with it; a suspect file only if
    /// no other is left. `None` when all that have the shard were tried.
    pub fn book(&self, shard: u32, len: usize, pauses: bool, tried: Tried) -> Option<Booking> {
        let len = len as u64;
        let known = self.roots.iter().filter_map(Root::rate).fold(1.0, f64::max);
        let candidates = self.roots.iter().enumerate().filter_map(|(at, root)| {
            let source = self.get(at, shard).filter(|_| tried.roots & (1 << at) == 0)?;
            let queued = root.queued_bytes.load(Ordering::Relaxed).saturating_add(len);
            // A root that has not been measured counts as the fastest, or it never would be.
            let seconds = queued as f64 / root.rate().unwrap_or(known);
            Some((source.suspect.load(Ordering::Relaxed), seconds, at))
        });
        let better = |a: &(bool, f64, usize), b: &(bool, f64, usize)| {
            a.0.cmp(&b.0).then(a.1.total_cmp(&b.1)).then(a.2.cmp(&b.2))
        };
        let (_, _, at) = candidates.min_by(better)?;
        let root = &self.roots[at];
        let mut depth = 0;
        if !pauses {
            root.queued_bytes.fetch_add(len, Ordering::Relaxed);
            depth = root.queued.fetch_add(1, Ordering::Relaxed) + 1;
        }
        Some(Booking { root: at, shard, len, pauses, depth, start: Instant::now() })
    }

    /// Settles a booking; a read that failed for the fault of the root is to be tried on another one.
    pub fn settle(&self, booking: Booking, end: End, tried: &mut Tried) {
        let Booking { root: at, shard, len, pauses, depth, start } = booking;
        let root = &self.roots[at];
        if !pauses {
            root.queued_bytes.fetch_sub(len, Ordering::Relaxed);
            root.queued.fetch_sub(1, Ordering::Relaxed);
        }
        match end {
            End::Delivered => {
                root.bytes.fetch_add(len, Ordering::Relaxed);
                if len >= TELLING_BYTES && !pauses {
                    root.learn(len as f64 * depth as f64 / start.elapsed().as_secs_f64().max(1e-9));
                }
            }
            End::Failed => {
                root.errors.fetch_add(1, Ordering::Relaxed);
                if let Some(source) = self.get(at, shard) {
                    source.suspect.store(true, Ordering::Relaxed);
                }
                tried.roots = if tried.again { u64::MAX } else { tried.roots | 1 << at };
            }
            End::GivenUp => {}
        }
    }

    pub fn stats(&self) -> Vec<RootStats> {
        let of = |root: &Root| RootStats {
            bytes: root.bytes.load(Ordering::Relaxed),
            errors: root.errors.load(Ordering::Relaxed),
            suspects: root.files.iter().flatten().filter(|s| s.suspect.load(Ordering::Relaxed)).count()
                as u64,
            rate: root.rate(),
        };
        self.roots.iter().map(of).collect()
    }
}

/// How a booked read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// All bytes are there.
    Delivered,
    /// The root is to blame.
    Failed,
    /// Nobody wanted it any more.
    GivenUp,
}

impl Root {
    fn new(files: Vec<Option<Shard>>) -> Self {
        let source =
            |shard| Source { shard, suspect: AtomicBool::default(), buffered_only: AtomicBool::default() };
        Self {
            files: files.into_iter().map(|file| file.map(source)).collect(),
            queued_bytes: AtomicU64::new(0),
            queued: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            rate: Mutex::new(None),
        }
    }

    fn rate(&self) -> Option<f64> {
        *self.rate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn learn(&self, rate: f64) {
        let mut known = self.rate.lock().unwrap_or_else(PoisonError::into_inner);
        *known = Some(known.map_or(rate, |old| old + NEWEST * (rate - old)));
    }
}
