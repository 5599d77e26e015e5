//! Aligned buffers of fixed size classes.
//!
//! All memory for experts is set aside here, once: an [`Arena`] owns one region
//! per class and lends its slots out as [`Slab`]s. A slot never changes class,
//! so what is resident is what was planned (docs/planning.md). Pages are
//! zero and untouched until first written, so setting aside costs address space
//! and not time.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forebay_core::DIRECT_ALIGN;

/// Alignment of every slab, and the unit its size is rounded up to: what direct
/// reads ask for on every common disk.
pub const PAGE: usize = DIRECT_ALIGN;

/// The memory a slab of at least `bytes` really takes.
pub const fn slot_bytes(bytes: usize) -> usize {
    match bytes.checked_next_multiple_of(PAGE) {
        Some(rounded) => rounded,
        // Not allocatable; the arena refuses it with an error.
        None => usize::MAX,
    }
}

/// A size class: `count` slabs of at least `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlabClass {
    /// Bytes a slab must hold; rounded up to [`PAGE`].
    pub bytes: usize,
    /// How many slabs there are.
    pub count: usize,
}

/// Why an arena could not be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArenaError {
    /// A class with slabs of no bytes.
    #[error("slab class {class} has slabs of 0 bytes; please report this as a bug")]
    EmptySlabs {
        /// Index of the class.
        class: usize,
    },
    /// More bytes than an address space holds.
    #[error(
        "slab class {class} ({count} x {bytes} bytes) is larger than this machine can address; lower the memory budget"
    )]
    TooLarge {
        /// Index of the class.
        class: usize,
        /// Bytes per slab.
        bytes: usize,
        /// Slabs wanted.
        count: usize,
    },
    /// The system refused the memory.
    #[error(
        "the system refused {bytes} bytes for slab class {class}; lower the memory budget or free some memory"
    )]
    OutOfMemory {
        /// Index of the class.
        class: usize,
        /// Bytes asked for in one piece.
        bytes: usize,
    },
}

/// What an arena holds, in real capacities (page-rounded).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaStats {
    /// Bytes of all slabs.
    pub capacity_bytes: u64,
    /// Bytes of the slabs that are lent out.
    pub in_use_bytes: u64,
}

/// The owner of all slabs. Clones share the memory, which lives until the last
/// clone and the last slab are gone.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    regions: Vec<Region>,
    /// Per class: indices of the slots that are not lent out.
    free: Mutex<Vec<Vec<usize>>>,
}

/// The memory of one class.
struct Region {
    /// Slot 0, page-aligned; dangling when `count` is 0.
    base: NonNull<u8>,
    /// What the allocator returned, to give back; `None` when `count` is 0.
    allocation: Option<(NonNull<u8>, Layout)>,
    slot_bytes: usize,
    count: usize,
}

// SAFETY: a region is an address range that it alone owns. It is only read to
// compute slot addresses; the bytes behind it are reached through `Slab`s.
unsafe impl Send for Region {}
// SAFETY: as above; nothing in a region changes after it was made.
unsafe impl Sync for Region {}

impl Region {
    fn new(class: usize, SlabClass { bytes, count }: SlabClass) -> Result<Self, ArenaError> {
        if bytes == 0 {
            return Err(ArenaError::EmptySlabs { class });
        }
        let slot_bytes = slot_bytes(bytes);
        if count == 0 {
            return Ok(Self { base: NonNull::dangling(), allocation: None, slot_bytes, count });
        }
        // One byte-aligned request with a page to spare instead of a page-aligned one:
        // the standard allocator clears the former lazily (calloc) and the latter by
        // writing every byte, which for a big budget takes half a minute.
        let layout = slot_bytes
            .checked_mul(count)
            .and_then(|total| total.checked_add(PAGE))
            .and_then(|total| Layout::from_size_align(total, 1).ok())
            .ok_or(ArenaError::TooLarge { class, bytes, count })?;
        // SAFETY: the layout's size is not zero, it is at least one page.
        let raw = unsafe { alloc_zeroed(layout) };
        let raw = NonNull::new(raw).ok_or(ArenaError::OutOfMemory { class, bytes: layout.size() })?;
        let pad = raw.addr().get().wrapping_neg() % PAGE;
        // SAFETY: `pad` is less than PAGE and the allocation is longer than PAGE.
        let base = unsafe { raw.add(pad) };
        want_large_pages(base, slot_bytes * count);
        Ok(Self { base, allocation: Some((raw, layout)), slot_bytes, count })
    }

    fn slot(&self, index: usize) -> NonNull<u8> {
        assert!(index < self.count);
        // SAFETY: slots 0..count lie inside the allocation: it has room for
        // count * slot_bytes bytes after the padding.
        unsafe { self.base.add(index * self.slot_bytes) }
    }
}

/// Asks for large pages, still untouched: experts are read from one end to the other, and a page
/// table entry for every 4 KiB would cost more than a tenth of the bandwidth. Whether the system
/// grants them is its own affair: the bytes are the same.
#[cfg(target_os = "linux")]
fn want_large_pages(base: NonNull<u8>, len: usize) {
    // SAFETY: the range is ours, page-aligned, and this advice changes no byte.
    unsafe {
        libc::madvise(base.as_ptr().cast(), len, libc::MADV_HUGEPAGE);
    }
}

#[cfg(not(target_os = "linux"))]
fn want_large_pages(_base: NonNull<u8>, _len: usize) {}

impl Drop for Region {
    fn drop(&mut self) {
        if let Some((raw, layout)) = self.allocation {
            // SAFETY: `raw` came from `alloc_zeroed` with this layout and is freed once,
            // here. No slab is alive: each holds an `Arc` of the arena that owns us.
            unsafe { dealloc(raw.as_ptr(), layout) }
        }
    }
}

impl Arena {
    /// Sets aside the memory of all classes, or none of it.
    pub fn new(classes: &[SlabClass]) -> Result<Self, ArenaError> {
        let regions = classes
            .iter()
            .enumerate()
            .map(|(index, &class)| Region::new(index, class))
            .collect::<Result<Vec<_>, _>>()?;
        // Reversed, so that slots are lent in ascending address order.
        let free = regions.iter().map(|region| (0..region.count).rev().collect()).collect();
        Ok(Self(Arc::new(Inner { regions, free: Mutex::new(free) })))
    }

    /// Lends a slab of `class`; `None` when all are out or there is no such class.
    /// Its bytes are zero or what the last holder left.
    pub fn take(&self, class: usize) -> Option<Slab> {
        let region = self.0.regions.get(class)?;
        let index = self.0.free()[class].pop()?;
        Some(Slab {
            start: region.slot(index),
            len: region.slot_bytes,
            class,
            index,
            arena: Arc::clone(&self.0),
        })
    }

    /// Bytes of one slab of `class`, after rounding; `None` if there is no such class.
    pub fn slab_bytes(&self, class: usize) -> Option<usize> {
        Some(self.0.regions.get(class)?.slot_bytes)
    }

    /// Slabs of `class` that are not lent out.
    pub fn available(&self, class: usize) -> usize {
        self.0.free().get(class).map_or(0, Vec::len)
    }

    /// What is set aside and what is lent out.
    pub fn stats(&self) -> ArenaStats {
        let free = self.0.free();
        let mut stats = ArenaStats { capacity_bytes: 0, in_use_bytes: 0 };
        for (region, free) in self.0.regions.iter().zip(free.iter()) {
            let bytes = |slots: usize| slots as u64 * region.slot_bytes as u64;
            stats.capacity_bytes += bytes(region.count);
            stats.in_use_bytes += bytes(region.count - free.len());
        }
        stats
    }
}

impl Inner {
    fn free(&self) -> MutexGuard<'_, Vec<Vec<usize>>> {
        // A panic cannot leave the lists half changed: each change is one push or pop.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One aligned buffer, owned. Dropping it gives it back to its class.
pub struct Slab {
    start: NonNull<u8>,
    len: usize,
    class: usize,
    index: usize,
    arena: Arc<Inner>,
}

// SAFETY: a slab is the only way to its bytes while it exists (its index is out of
// the free list), so it may move between threads as a `Box<[u8]>` may.
unsafe impl Send for Slab {}
// SAFETY: a shared slab only gives out `&[u8]`.
unsafe impl Sync for Slab {}

impl Slab {
    /// Gives its memory back to the system until it is written again. Its bytes then mean nothing
    /// (on Linux they are zero).
    pub fn discard(&mut self) {
        #[cfg(target_os = "linux")]
        {
            // Whole pages of the system, which may be larger than ours: it would round the end up,
            // into the next slab.
            // SAFETY: asks for a number.
            let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE).max(1);
            let skipped = self.start.addr().get().wrapping_neg() % page;
            let whole = self.len.saturating_sub(skipped) / page * page;
            if whole > 0 {
                // SAFETY: skipped..skipped + whole are whole pages inside this slab's slot, borrowed
                // exclusively. It is private anonymous memory (of the allocator), which reads as
                // zeros afterwards: still initialised.
                unsafe {
                    let start = self.start.add(skipped);
                    libc::madvise(start.as_ptr().cast(), whole, libc::MADV_DONTNEED);
                }
            }
        }
    }

    /// The class it belongs to.
    pub fn class(&self) -> usize {
        self.class
    }
}

impl Deref for Slab {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: start..start+len is one slot of a live region (we hold the arena),
        // zeroed when it was allocated and hence initialised, and nobody else has it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Slab {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        let mut free = self.arena.free();
        debug_assert!(!free[self.class].contains(&self.index), "slab given back twice");
        debug_assert!(free[self.class].len() < self.arena.regions[self.class].count);
        free[self.class].push(self.index);
    }
}

impl fmt::Debug for Slab {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Slab(class {}, index {}, {} bytes)", self.class, self.index, self.len)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Arena").field(&self.stats()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slabs_are_aligned_zeroed_disjoint_and_run_out() {
        let arena =
            Arena::new(&[SlabClass { bytes: 5000, count: 3 }, SlabClass { bytes: 1, count: 1 }]).unwrap();
        assert_eq!(arena.stats(), ArenaStats { capacity_bytes: 3 * 8192 + 4096, in_use_bytes: 0 });
        let mut slabs: Vec<Slab> = std::iter::from_fn(|| arena.take(0)).collect();
        assert_eq!(slabs.len(), 3);
        assert!(arena.take(2).is_none(), "no such class");
        for (i, slab) in slabs.iter_mut().enumerate() {
            assert_eq!((slab.as_ptr() as usize) % PAGE, 0);
            assert_eq!(slab.len(), 8192);
            assert!(slab.iter().all(|&b| b == 0));
            slab.fill(i as u8 + 1);
        }
        for (i, slab) in slabs.iter().enumerate() {
            assert!(slab.iter().all(|&b| b == i as u8 + 1), "slab {i} was overwritten");
        }
        assert_eq!(arena.stats().in_use_bytes, 3 * 8192);
        slabs.pop();
        assert_eq!(arena.available(0), 1);
        assert!(arena.take(0).is_some());
    }

    #[test]
    fn slabs_outlive_the_arena_handle() {
        let arena = Arena::new(&[SlabClass { bytes: PAGE, count: 1 }]).unwrap();
        let mut slab = arena.take(0).unwrap();
        drop(arena);
        slab.fill(7);
        assert_eq!(slab[PAGE - 1], 7);
    }

    /// Setting aside costs no memory until it is used; zeroing by writing would.
    #[cfg(target_os = "linux")]
    #[test]
    fn untouched_slabs_are_not_resident() {
        let resident = || crate::MemoryInfo::read().process_rss.unwrap();
        let before = resident();
        let arena = Arena::new(&[SlabClass { bytes: 64 << 20, count: 16 }]).unwrap();
        let slab = arena.take(0).unwrap();
        let grown = resident().saturating_sub(before);
        assert!(grown < 256 << 20, "{grown} of {} bytes are resident", arena.stats().capacity_bytes);
        assert_eq!(slab[slab.len() - 1], 0);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_discarded_slab_takes_no_memory_and_can_be_used_again() {
        let resident = || crate::MemoryInfo::read().process_rss.unwrap();
        let arena = Arena::new(&[SlabClass { bytes: 256 << 20, count: 1 }]).unwrap();
        let mut slab = arena.take(0).unwrap();
        slab.fill(7);
        let full = resident();
        slab.discard();
        let freed = full.saturating_sub(resident());
        assert!(freed > 128 << 20, "only {freed} bytes went back");
        assert!(slab.iter().all(|byte| *byte == 0));
        slab.fill(9);
        assert_eq!(slab[PAGE], 9);
    }

    #[test]
    fn what_cannot_be_had_is_an_error() {
        let one = |bytes, count| Arena::new(&[SlabClass { bytes, count }]).unwrap_err();
        assert_eq!(one(0, 1), ArenaError::EmptySlabs { class: 0 });
        assert!(matches!(one(usize::MAX, 1), ArenaError::TooLarge { .. }));
        assert!(matches!(one(1 << 40, 1 << 40), ArenaError::TooLarge { .. }));
        // Larger than the 47-bit or 56-bit address spaces in use, so no system has it.
        assert!(matches!(one(1 << 60, 1), ArenaError::OutOfMemory { .. }));
    }

    proptest! {
        /// Whatever was taken and given back, slots keep
        /// their class, and the books agree with a count of what is held.
        #[test]
        fn capacity_is_count_times_class(
            main in 0usize..6,
            mtp in 0usize..4,
            ops in prop::collection::vec((0usize..2, any::<bool>(), any::<prop::sample::Index>()), 0..80),
        ) {
            let classes = [SlabClass { bytes: 6000, count: main }, SlabClass { bytes: 12_000, count: mtp }];
            let size = [8192u64, 12_288];
            let arena = Arena::new(&classes).unwrap();
            let mut held: [Vec<Slab>; 2] = [Vec::new(), Vec::new()];
            for (class, take, which) in ops {
                if take {
                    let room = held[class].len() < classes[class].count;
                    let slab = arena.take(class);
                    prop_assert_eq!(slab.is_some(), room);
                    held[class].extend(slab);
                } else if !held[class].is_empty() {
                    let at = which.index(held[class].len());
                    held[class].swap_remove(at);
                }
                let stats = arena.stats();
                prop_assert_eq!(stats.capacity_bytes, main as u64 * size[0] + mtp as u64 * size[1]);
                let held_bytes: u64 = held.iter().flatten().map(|slab| slab.len() as u64).sum();
                prop_assert_eq!(stats.in_use_bytes, held_bytes);
                for (class, slabs) in held.iter().enumerate() {
                    prop_assert!(slabs.iter().all(|s| s.class() == class && s.len() as u64 == size[class]));
                }
                let mut starts: Vec<_> = held.iter().flatten().map(|s| s.as_ptr()).collect();
                starts.sort();
                starts.dedup();
                prop_assert_eq!(starts.len(), held[0].len() + held[1].len());
            }
        }
    }
}
