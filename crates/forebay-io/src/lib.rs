//! How bytes get from disk into aligned memory.
//!
//! Start at [`read`] (one positioned read, done properly), then [`slab`] (the
//! aligned buffers that experts live in) and [`reader`] (the worker pool that
//! fills slabs while compute goes on). [`open`] turns paths into shards and
//! [`memory`] says how much memory the machine and its container allow.
//!
//! Nothing here knows what an expert is: see `forebay-tiers` for that.

pub mod memory;
pub mod open;
pub mod read;
pub mod reader;
pub mod slab;

pub use memory::MemoryInfo;
pub use open::{OpenError, Shard, open_files};
pub use read::{ReadAt, ReadError, read_exact_at};
pub use reader::{Done, Job, JobStats, Reader, ReaderConfig, StartError, Transform};
pub use slab::{Arena, ArenaError, ArenaStats, PAGE, Slab, SlabClass, slot_bytes};
