//! Coded experts that are decoded on their way into their slots, by the threads that read them.
//!
//! A record is read into the end of the slab that it will fill decoded. Then its matrices, from front to back, are
//! copied out of the way, one at a time, and decoded to their places. So a thread that reads needs nothing beside the
//! slab, and only those that decode at the moment need room for a matrix.
//!
//! The last expert of a layer is waited for from its last byte until it is decoded, in every layer. So a large matrix is
//! decoded by several threads: they are there, for whoever computes waits too.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use forebay_core::PanelShape;
use forebay_core::coded::CodedView;
use forebay_io::Transform;
use forebay_kernels::Kernels;
use forebay_store::record::Part;

/// Threads that decode at a time, at most. They decode more than a disk delivers.
const DECODERS: usize = 4;
/// Threads that decode one matrix, at most, and bytes that are worth another one.
const SHARES: usize = 4;
const SHARE: usize = 1 << 20;
/// Panels that are decoded side by side.
const SIDE_BY_SIDE: usize = 4;

/// Room for what is decoded at the moment, shared by the threads that read.
#[derive(Debug)]
pub struct Rooms {
    /// Threads that may decode a matrix together.
    shares: usize,
    state: Mutex<State>,
    returned: Condvar,
}

#[derive(Debug)]
struct State {
    /// Rooms that may still be taken.
    left: usize,
    /// What they were made of; it is kept, and grows to what the largest needs.
    buffers: Vec<Vec<u8>>,
}

impl Rooms {
    /// As many as `workers` threads need, where computing takes `threads`.
    pub fn new(workers: usize, threads: usize) -> Self {
        let state = State { left: Self::count(workers), buffers: Vec::new() };
        let shares = threads.clamp(1, SHARES);
        Self { shares, state: Mutex::new(state), returned: Condvar::new() }
    }

    /// How many there are for `workers` threads.
    pub fn count(workers: usize) -> usize {
        workers.clamp(1, DECODERS)
    }

    /// Waits for a room, of at least `len` bytes. `None` if the system has no memory for it.
    fn take(&self, len: usize) -> Option<Room<'_>> {
        let state = self.returned.wait_while(self.lock(), |state| state.left == 0);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        state.left -= 1;
        let buffer = state.buffers.pop().unwrap_or_default();
        drop(state);
        let mut room = Room { rooms: self, buffer };
        if room.buffer.capacity() < len {
            // Never both the old one and the new one.
            room.buffer = Vec::new();
            room.buffer.try_reserve_exact(len).ok()?;
        }
        Some(room)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A room that was taken; it is free again when this is dropped.
struct Room<'r> {
    rooms: &'r Rooms,
    buffer: Vec<u8>,
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut state = self.rooms.lock();
        state.left += 1;
        state.buffers.push(std::mem::take(&mut self.buffer));
        drop(state);
        self.rooms.returned.notify_one();
    }
}

/// Decodes an expert's three matrices on the reading thread.
#[derive(Debug)]
pub struct DecodeExpert {
    /// Where gate, up and down lie in the record.
    from: [Range<usize>; 3],
    /// Bytes of the record.
    raw_len: usize,
    to: Arc<[Part; 3]>,
    /// What has to be out of the way before a matrix is decoded: itself, or all of the record.
    whole: bool,
    kernels: Kernels,
    rooms: Arc<Rooms>,
}

impl DecodeExpert {
    /// Decodes a record of `raw_len` bytes, with its matrices at `from`, to `to`.
    pub fn new(
        from: [Range<usize>; 3],
        raw_len: usize,
        to: Arc<[Part; 3]>,
        kernels: Kernels,
        rooms: Arc<Rooms>,
    ) -> Self {
        let whole = !one_by_one(&from, raw_len, &to);
        Self { from, raw_len, to, whole, kernels, rooms }
    }
}

/// Bytes of room that decoding such a record takes.
pub fn room_len(from: &[Range<usize>; 3], raw_len: usize, to: &[Part; 3]) -> usize {
    match one_by_one(from, raw_len, to) {
        true => from.iter().map(Range::len).max().unwrap_or(0),
        false => raw_len,
    }
}

/// Whether no matrix is decoded into what was not copied yet, where the record lies at the end of the slab and its
/// matrices are copied and decoded one after the other. In a longer slab it lies further behind, which does no harm.
///
/// Records of which one matrix shrinks and another one grows need not be so. `pack` makes none from weights that are
/// alike, but whoever writes files may.
fn one_by_one(from: &[Range<usize>; 3], raw_len: usize, to: &[Part; 3]) -> bool {
    let Some(start) = super::end_of(to).checked_sub(raw_len) else { return false };
    to.iter().zip(&from[1..]).all(|(to, next)| to.codes.end <= start + next.start)
}

impl Transform for DecodeExpert {
    fn raw_len(&self) -> usize {
        self.raw_len
    }

    fn reads_into_slab(&self) -> bool {
        true
    }

    fn apply(&self, _: &[u8], slab: &mut [u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        let start = slab.len().checked_sub(self.raw_len).ok_or("it is longer than its slot")?;
        let needed = room_len(&self.from, self.raw_len, &self.to);
        let mut room = self.rooms.take(needed).ok_or("the system has no memory to decode it")?;
        let copied = &mut room.buffer;
        for (at, (from, to)) in self.from.iter().zip(&*self.to).enumerate() {
            let coded = match self.whole {
                true => {
                    if at == 0 {
                        copied.clear();
                        copied.extend_from_slice(&slab[start..]);
                    }
                    &copied[from.clone()]
                }
                false => {
                    copied.clear();
                    copied.extend_from_slice(&slab[start + from.start..start + from.end]);
                    &copied[..]
                }
            };
            let shape = PanelShape::new(to.format, to.rows, to.cols);
            let view = CodedView::new(shape.ok_or("no panels")?, coded)?;
            decode(self.kernels, &view, self.rooms.shares, &mut slab[to.codes.clone()]);
        }
        Ok(())
    }
}

/// Decodes a matrix into `out`, on so many threads if it is large enough for them.
fn decode(kernels: Kernels, view: &CodedView<'_>, threads: usize, out: &mut [u8]) {
    let shape = view.shape();
    let threads = (out.len() / SHARE).clamp(1, threads);
    let each = shape.panels().div_ceil(threads).next_multiple_of(SIDE_BY_SIDE);
    let parts = Mutex::new(out.chunks_mut(each * shape.panel_bytes()).enumerate());
    let work = || {
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((at, out)) = next() {
            let panels = at * each..at * each + out.len() / shape.panel_bytes();
            kernels.decode_panels(view, panels, out);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // A thread that the system has no room for leaves its part to the others.
            _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_core::{Format, MatrixView, coded};
    use forebay_kernels::Isa;
    use forebay_store::record::Codes;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    const COLS: usize = 256;
    const PAGE: usize = 4096;

    /// Bytes that look like nothing.
    fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let mut next = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        };
        (0..len).map(|_| next()).collect()
    }

    /// A matrix in panels: of few codes, which shrink to nothing, or of all codes alike, which do not.
    fn panels(format: Format, rows: usize, seed: u64, few: bool) -> (PanelShape, Vec<u8>) {
        let mut codes = noise(seed, rows * COLS / 2);
        if few {
            codes.fill(0x88);
        }
        let count = format.scale_count(rows, COLS).unwrap();
        let scales: Vec<f32> = (0..count).map(|n| 0.5 + ((n * 37 + seed as usize) % 101) as f32).collect();
        let view = MatrixView::new(format, rows, COLS, &codes, &scales).unwrap();
        let shape = PanelShape::new(format, rows, COLS).unwrap();
        let mut out = vec![0; shape.bytes()];
        shape.pack(&view, &mut out);
        (shape, out)
    }

    /// A record of three matrices, and what it is decoded. `few` says which of them shrink.
    struct Record {
        from: [Range<usize>; 3],
        coded: Vec<u8>,
        to: Arc<[Part; 3]>,
        decoded: [Vec<u8>; 3],
    }

    fn record(format: Format, rows: [usize; 3], few: [bool; 3]) -> Record {
        let (mut coded, mut at) = (Vec::new(), 0);
        let mut from = [0..0, 0..0, 0..0];
        let made: [(PanelShape, Vec<u8>); 3] =
            std::array::from_fn(|n| panels(format, rows[n], 1 + n as u64, few[n]));
        let to = std::array::from_fn(|n| {
            let (shape, bytes) = &made[n];
            let matrix = coded::encode(shape, bytes).unwrap();
            from[n] = coded.len()..coded.len() + matrix.len();
            coded.extend(matrix);
            let codes = at..at + shape.bytes();
            at = codes.end.next_multiple_of(64);
            Part {
                format,
                rows: rows[n],
                cols: COLS,
                layout: Codes::Panels,
                scales: codes.end..codes.end,
                codes,
            }
        });
        coded.resize(coded.len().next_multiple_of(PAGE), 0);
        let [a, b, c] = made;
        Record { from, coded, to: Arc::new(to), decoded: [a.1, b.1, c.1] }
    }

    #[track_caller]
    fn comes_back(record: &Record, spare: usize, isa: Isa) -> usize {
        let Record { from, coded, to, decoded } = record;
        let rooms = Arc::new(Rooms::new(1, 3));
        let kernels = Kernels::with_isa(isa).unwrap();
        let transform = DecodeExpert::new(from.clone(), coded.len(), to.clone(), kernels, rooms.clone());
        let needed = room_len(from, coded.len(), to);
        let len = super::super::end_of(to).max(coded.len()) + spare;
        // Twice: what the first one left in the room must not matter.
        for _ in 0..2 {
            let mut slab = vec![0xa5; len];
            slab[len - coded.len()..].copy_from_slice(coded);
            transform.apply(&[], &mut slab).unwrap();
            for (to, decoded) in to.iter().zip(decoded) {
                assert!(slab[to.codes.clone()] == **decoded);
            }
        }
        let state = rooms.lock();
        assert_eq!((state.left, state.buffers.len()), (1, 1));
        assert!(state.buffers[0].capacity() <= needed, "no more than planned");
        needed
    }

    #[test]
    fn every_record_comes_back_within_its_slab() {
        for format in ["int4-row", "int4-g16", "int4-g64", "int4-g128", "int4-g192"] {
            let format: Format = format.parse().unwrap();
            for isa in Isa::available() {
                // As weights are: all alike.
                let usual = record(format, [64, 64, 80], [true; 3]);
                let needed = comes_back(&usual, 0, isa);
                assert!(needed < usual.coded.len() / 2, "one matrix at a time");
                comes_back(&usual, PAGE, isa);
                // Hostile: which matrix shrinks and which one does not, in all ways, with rooms that are too short.
                for mask in 0..8 {
                    let few = [0, 1, 2].map(|bit| mask >> bit & 1 == 1);
                    for rows in [[64, 64, 80], [16, 160, 16], [160, 16, 16], [17, 16, 170]] {
                        comes_back(&record(format, rows, few), 0, isa);
                    }
                }
            }
        }
    }

    /// Large enough for several threads, with panels that do not divide evenly among them.
    #[test]
    fn a_large_matrix_is_decoded_by_several_threads() {
        let format: Format = "int4-row".parse().unwrap();
        // 128 bytes a row and its scale.
        let rows = 3 * SHARE / 128 + 112;
        assert_ne!(rows / 16 % 12, 0);
        comes_back(&record(format, [rows, 64, 64], [true; 3]), 0, Isa::available().last().unwrap());
    }

    /// The last matrix shrinks so much that the record lies far behind, and then the first ones do, and do not.
    #[test]
    fn a_record_whose_matrices_would_overwrite_each_other_is_copied_as_a_whole() {
        let format: Format = "int4-row".parse().unwrap();
        let isa = Isa::Scalar;
        // Gate shrinks to nothing, so that up begins at once; up and down do not shrink.
        let record = record(format, [320, 64, 64], [true, false, false]);
        assert!(!one_by_one(&record.from, record.coded.len(), &record.to));
        assert_eq!(comes_back(&record, 0, isa), record.coded.len());
        // With the slab made longer on paper it would fit.
        let usual = self::record(format, [64, 64, 64], [true; 3]);
        assert!(one_by_one(&usual.from, usual.coded.len(), &usual.to));
    }

    #[test]
    fn what_is_no_coded_matrix_fails_and_gives_its_room_back() {
        let mut record = record("int4-row".parse().unwrap(), [64, 64, 64], [true; 3]);
        let at = record.from[1].start;
        record.coded[at] ^= 1;
        let rooms = Arc::new(Rooms::new(8, 1));
        let Record { from, coded, to, .. } = &record;
        let kernels = Kernels::with_isa(Isa::Scalar).unwrap();
        let transform = DecodeExpert::new(from.clone(), coded.len(), to.clone(), kernels, rooms.clone());
        let mut slab = vec![0; super::super::end_of(to)];
        let start = slab.len() - coded.len();
        slab[start..].copy_from_slice(coded);
        let error = transform.apply(&[], &mut slab).unwrap_err().to_string();
        assert!(error.contains("frequencies"), "{error}");
        assert!(transform.apply(&[], &mut slab[..coded.len() - 1]).is_err());
        assert_eq!(rooms.lock().left, DECODERS);
    }

    /// More threads than rooms: all get one in the end, and never more at a time than there are.
    #[test]
    fn rooms_are_shared_and_no_more_than_planned() {
        let rooms = Rooms::new(3, 1);
        let (now, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..12 {
                scope.spawn(|| {
                    for _ in 0..5 {
                        let room = rooms.take(1000).unwrap();
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(1));
                        now.fetch_sub(1, Ordering::SeqCst);
                        drop(room);
                    }
                });
            }
        });
        assert!(most.into_inner() <= 3);
        let state = rooms.lock();
        assert_eq!(state.left, 3);
        assert!(state.buffers.len() <= 3);
    }
}
