//! CPU arithmetic of Forebay: one scalar truth and its bit-identical SIMD twins.
//!
//! `docs/numerics.md` defines every operation here: order, rounding, special
//! values. The code is laid out so that one definition serves every machine:
//!
//! * `portable` holds the bodies: plain loops over sixteen lanes with explicit
//!   fused multiply-adds. They are compiled once per instruction set.
//! * `scalar`, `x86::{avx2, avx512}` and `arm::{neon, dotprod, i8mm}` are the rooms.
//!   They mirror one another file for file and hold what the compiler does not
//!   find by itself: unpacking codes and exact integer dot products.
//! * [`Kernels`] picks a room at run time; the choice never changes a bit.
//!
//! Start reading at [`matmul()`], then [`Activations`], [`attend`] and [`Team`].
//! What this crate is not: it knows no model, no file and no cache.

mod activations;
mod attention;
mod buffer;
mod coded;
pub mod free_order;
mod indexer;
mod isa;
mod kernels;
pub mod limits;
mod matmul;
mod portable;
mod rope;
mod router;
mod scalar;
mod table;
mod team;

#[cfg(target_arch = "aarch64")]
mod arm;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use activations::{Activations, GROUP, KeptRows};
pub use attention::{
    AttendScratch, Attended, Attention, AttentionRows, Blocks, HeadRows, KeyCache, KeyRows, TILE, attend,
    attend_rows,
};
pub use buffer::Buffer;
pub use coded::decoded_at_once;
pub use indexer::{
    IndexQueries, ScoreScratch, SelectScratch, index_scores, indexer_scores, select_positions, select_top_k,
};
pub use isa::{Isa, IsaUnavailable, ParseIsaError};
pub use kernels::Kernels;
pub use matmul::{
    Input, MatmulJob, Weights, combine_batch, combine_rows, matmul, matmul_many, matmul_rows, matmul_swiglu,
};
pub use rope::{Rope, RopeError};
pub use router::{RouterError, RouterRule, route};
pub use team::Team;
