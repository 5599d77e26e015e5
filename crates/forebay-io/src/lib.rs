//! How bytes get from disk into aligned memory.
//!
//! Start at [`read`] (one positioned read, done properly), then [`slab`] (the
//! aligned buffers that experts live in) and [`reader`] (what fills slabs while
//! compute goes on). [`open`] turns paths into shards, [`window`] says which pages a
//! direct read takes, [`roots`] spreads reads over several disks, [`probe`] measures
//! them, and [`memory`] says how much memory the machine and its container allow.
//! [`mod@file`] is for small files that are read as a whole.
//!
//! Nothing here knows what an expert is: see `forebay-tiers` for that.

pub mod file;
pub mod memory;
pub mod open;
pub mod probe;
pub mod read;
pub mod reader;
pub mod roots;
pub mod slab;
mod system;
mod transfer;
pub mod window;

pub use memory::{MemoryInfo, Pressure, give_back_freed, is_wsl, keep_little_freed};
pub use open::{Access, OpenError, Opened, Shard, open_files};
pub use probe::Rates;
#[cfg(target_os = "linux")]
pub use read::Descriptors;
pub use read::{ReadAt, ReadError, read_exact_at};
pub use reader::{
    Backend, Done, Gauge, Job, JobStats, Priority, Reader, ReaderConfig, StartError, Transform,
};
pub use roots::{MirrorError, RootStats, Roots};
pub use slab::{Arena, ArenaError, ArenaStats, PAGE, Slab, SlabClass, slot_bytes};
